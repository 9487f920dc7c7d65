"""The options of distribute(), validated at once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from sylvie_fx.ir.coding import EXACT, ROTATED_MOST, ROW_HEADER_BYTES, WARM, Coding, ExchangeCoding
from sylvie_fx.ir.errors import OptionError
from sylvie_fx.ir.pace import SYNCHRONOUS, Pace, Tier

BITS = (1, 2, 4, 8, 16, 32)
STALE = ("average", "last", "line")
VARIANTS = ("plain", "shift", "difference", "feedback")
GRADIENTS = ("plain", "shift")
_NUMBERS = ("bytes_per_step", "relative_error", "choose_every", "smoothing", "drift", "seed", "timeout")
_MOST_LISTED = 6
_FILLED = 1.4
"""How many times the bytes a row may take so that it can be rotated: it arrives with a third of the variance or less."""


@dataclass(frozen=True)
class Options:
    """How a model is distributed.

    Attributes:
        bits: Bits a number of an exchanged row takes on the wire; 32 sends it unchanged. One number (rows of 16 numbers or
            fewer may then take more of them: what fits into the four bytes of the row's header; at one bit a row may be
            filled up to 32, 64, ... numbers, for two fifths more bytes at most), or
            ``{"forward": 1, "backward": 2}``, or either of them by module path, the longest matching path counting:
            ``{"conv1": 2, "": 1}``. Or ``"auto"``: a width of 1, 2, 4 or 8 for each exchange and direction, chosen from
            measured variance to meet ``bytes_per_step`` or ``relative_error``.
        bytes_per_step: For ``bits="auto"``: what all ranks may send in the exchanges of one step, together.
        relative_error: For ``bits="auto"`` without a budget: the error that the coding may add to the rows of an exchange,
            relative to their norm.
        choose_every: For ``bits="auto"``: steps between two choices.
        variant: What is coded forward: ``plain`` rows; their difference to a ``shift`` that both ends move slowly (DIANA,
            Mishchenko et al., 2019), with little noise: rounded with subtractive dither, which is unbiased; at one bit the
            signs of the randomly rotated difference, filled up to 32, 64, ... 1024 numbers (EDEN, Vargaftik et al., 2022), a
            third of the variance, nearly unbiased but for rows that are nearly empty; the ``difference`` to the last
            reconstruction, best for rows that move smoothly, but biased at one bit, and misled by dropout in front of the
            exchange; or ``feedback`` of the last error (Seide et al., 2014). Compared in docs/design.md.
        gradients: What is coded backward: ``plain``, unbiased, or ``shift``, as forward.
        eval_bits: As ``bits``, for the model in eval mode. A line outside the model does not know the model's mode: it is
            coded by ``bits`` where gradients are enabled, by ``eval_bits`` under ``torch.no_grad()``.
        staleness: How many training steps old a halo row, or the gradient that comes back for one, may be: a bound that
            nothing exceeds. 0 is synchronous, as lines outside the model always are. A step ends when parameters change in
            place; of several passes in a step each has old rows of its own (docs/staleness.md). One number, or
            ``{"forward": 0, "backward": 1}`` (stale gradients alone), or either of them by module path (chosen layers), as
            for ``bits``. Or ``"auto"``, Sylvie's Bounded Staleness Adaptor: ages of 0 or 1 for each exchange, chosen from
            measured drift and waiting time.
        stale: What stands in for rows that have not arrived: the running ``average`` of what has arrived, which damps the
            oscillation of a delayed loop (PipeGCN, Wan et al., 2022); the ``last`` arrival, as in Sylvie-A; or ``line``,
            the linear extrapolation of the last two.
        smoothing: For ``stale="average"``: the weight of the past, from 0 to below 1. Studied in docs/staleness.md.
        drift: For ``staleness="auto"``: an exchange is stale only while its rows move by no more than this part of their
            norm in a step.
        warm_up: Steps at the beginning in which nothing is old, and in which what is coded against a shift takes 4 bits at
            least: parameters move fast then. 3 or more for ``staleness="auto"``, which measures in them.
        refresh_every: A synchronous step comes each time that so many steps have gone by (Sylvie's Bounded Staleness
            Adaptor with a fixed period); 0 for never.
        recompute: Compute what lies between aggregations, these included, again in the backward pass instead of keeping
            it: less memory, above all for attention, whose edge values are not kept, for about a third more time.
        policy: Links of two kinds: ``{"intra_host": {"bits": 16, "staleness": 0}, "inter_host": {"bits": 1, "staleness": 1}}``.
            What a kind leaves out is as given for all. The minimum cut counts the bytes between hosts; partial sums and moved
            rows travel to everybody as between hosts.
        link: Gbit/s between ranks for each core of a rank, by which the minimum cut weighs what crosses against what is
            computed again on halo rows. ``"auto"`` is what is usual where the ranks run: between the processes of a host 10
            for all cores of a rank, else 1. ``"measure"`` measures it in ``shard`` and rounds to a power of ten; on a busy
            machine two runs may then choose different programs. ``explain()`` shows it.
        seed: Seed of dropout masks and of random rounding; the same on every rank.
        timeout: Seconds that a rank waits for a peer before it raises CommError.

    Raises:
        OptionError: A value is not allowed.
    """

    bits: Any = 32
    bytes_per_step: float | None = None
    relative_error: float = 0.3
    choose_every: int = 50
    variant: str = "shift"
    gradients: str = "shift"
    eval_bits: Any = 32
    staleness: Any = 0
    stale: str = "average"
    smoothing: float = 0.85
    drift: float = 0.5
    warm_up: int = 5
    refresh_every: int = 0
    recompute: bool = False
    policy: Any = None
    link: Any = "auto"
    seed: int = 0
    timeout: float = 300.0
    _rules: Mapping[str, tuple[tuple[str, int, int], ...]] = field(default_factory=dict, repr=False, compare=False)
    _near: Options | None = field(default=None, repr=False, compare=False)
    _bounds: tuple[tuple[str, int, int], ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.policy is not None:
            near = replace(self, policy=None, **_kind(self.policy, "intra_host"))
            object.__setattr__(self, "_near", near)
            for name, value in _kind(self.policy, "inter_host").items():
                object.__setattr__(self, name, value)
            if "auto" in (self.bits, near.bits):
                raise OptionError(
                    'a policy together with bits="auto"', remedy="give both kinds of links a number of bits"
                )
        rules = {
            mode: tuple(_rules(name, value, _check_bits, 32))
            for mode, name, value in (("train", "bits", self.bits), ("eval", "eval_bits", self.eval_bits))
        }
        object.__setattr__(self, "_rules", MappingProxyType(rules))
        for name in _NUMBERS:
            value = getattr(self, name)
            absent = name == "bytes_per_step" and value is None
            if not absent and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise OptionError(f"{name}={value!r}", remedy="give a number")
        if isinstance(self.seed, float):
            raise OptionError(f"seed={self.seed!r}", remedy="give a whole number")
        if self.choose_every < 3:
            raise OptionError(f"choose_every={self.choose_every!r}", remedy="give 3 steps or more")
        if self.bytes_per_step is not None and not (self.bits == "auto" and self.bytes_per_step > 0):
            raise OptionError(
                f"bytes_per_step={self.bytes_per_step!r} with bits={self.bits!r}",
                remedy='give a number above 0, together with bits="auto"',
            )
        if not self.relative_error > 0:
            raise OptionError(f"relative_error={self.relative_error!r}", remedy="give a number above 0")
        if self.variant not in VARIANTS:
            raise OptionError(f"variant={self.variant!r}", remedy=f"choose one of {', '.join(VARIANTS)}")
        if self.gradients not in GRADIENTS:
            raise OptionError(f"gradients={self.gradients!r}", remedy=f"choose one of {', '.join(GRADIENTS)}")
        object.__setattr__(self, "_bounds", tuple(_rules("staleness", self.staleness, _check_staleness, 0)))
        if self.stale not in STALE:
            raise OptionError(f"stale={self.stale!r}", remedy=f"choose one of {', '.join(STALE)}")
        if not 0.0 <= self.smoothing < 1.0:
            raise OptionError(f"smoothing={self.smoothing!r}", remedy="give a number from 0 to below 1")
        if not self.drift > 0.0:
            raise OptionError(f"drift={self.drift!r}", remedy="give a number above 0")
        for name, least in (("warm_up", 3 if self.staleness == "auto" else 1), ("refresh_every", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"{name}={value!r}", remedy=f"give a whole number of steps, {least} or more")
        if self.link not in ("auto", "measure") and not (isinstance(self.link, (int, float)) and self.link > 0):
            raise OptionError(f"link={self.link!r}", remedy='give a number of Gbit/s above 0, "auto" or "measure"')
        if not self.timeout > 0:
            raise OptionError(f"timeout={self.timeout!r}", remedy="give a number of seconds above 0")

    def outside(self) -> Options:
        """These options for a line outside the model, whose exchanges remember nothing of earlier calls.

        A program of one operator runs for every line that uses it: a shift or old rows would be those of another line.
        """
        policy = self.policy and {
            kind: {**self.policy.get(kind, {}), "staleness": 0} for kind in ("intra_host", "inter_host")
        }
        bits = 8 if self.bits == "auto" else self.bits
        return replace(
            self, bits=bits, bytes_per_step=None, variant="plain", gradients="plain", staleness=0, policy=policy
        )

    def check_modules(self, paths: Collection[str]) -> None:
        """Refuse an option for a module that there is none of: it would be given to nobody.

        Args:
            paths: Of all modules of the model.

        Raises:
            OptionError: Names the paths that are near.
        """
        given = [("bits", self._rules["train"]), ("eval_bits", self._rules["eval"]), ("staleness", self._bounds)]
        for name, rules in given:
            for path, *_ in rules:
                if path and path not in paths:
                    known = sorted({"forward", "backward", *paths} - {""})
                    near = difflib.get_close_matches(path, known, cutoff=0.5) or known
                    listed = ", ".join(map(repr, near[:_MOST_LISTED])) + (", …" if len(near) > _MOST_LISTED else "")
                    raise OptionError(
                        f"{name}={getattr(self, name)!r}: there is no module {path!r} in the model",
                        remedy=f"give a path of model.named_modules() or a direction, such as {listed}",
                    )
        if self._near is not None:
            self._near.check_modules(paths)

    def coding(self, mode: str, module: str, columns: int) -> ExchangeCoding:
        """How an exchange for a module travels.

        Args:
            mode: ``train`` or ``eval``.
            module: Path of the module that needs the rows.
            columns: Numbers in a row.
        """
        if mode == "train" and self.bits == "auto":
            return ExchangeCoding(self._forward(8), self._backward(8), auto=True)
        forward, backward = _longest(self._rules[mode], module)
        if isinstance(self.bits if mode == "train" else self.eval_bits, int):
            forward, backward = widened(forward, columns), widened(backward, columns)
        return ExchangeCoding(self._forward(forward, columns), self._backward(backward, columns))

    def pace(self, mode: str, module: str) -> Pace:
        """How old the rows of an exchange for a module may be.

        Args:
            mode: ``train`` or ``eval``; an eval program is synchronous.
            module: Path of the module that needs the rows.
        """
        if mode != "train":
            return SYNCHRONOUS
        if self.staleness == "auto":
            return Pace(1, 1, auto=True)
        return Pace(*_longest(self._bounds, module))

    def near(self, mode: str, module: str, columns: int) -> Tier:
        """As :meth:`coding` and :meth:`pace`, to ranks of the same host; ``policy`` is given."""
        assert self._near is not None
        return Tier(self._near.coding(mode, module, columns), self._near.pace(mode, module))

    def at_width(self, bits: int, backward: bool) -> Coding:
        """The coding of one direction at another width, chosen by a variance that is not that of rotated rows."""
        return self._backward(bits) if backward else self._forward(bits)

    def _backward(self, bits: int, columns: int = 0) -> Coding:
        if bits == 32:
            return EXACT
        if bits <= 8 and self.gradients == "shift":
            return self._shifted(bits, columns)
        return Coding(bits, "stochastic", "plain")

    def _forward(self, bits: int, columns: int = 0) -> Coding:
        if bits >= 16:
            return Coding(bits, "nearest") if bits == 16 else EXACT
        if self.variant == "shift":
            return self._shifted(bits, columns)
        # With a state at both ends, stochastic rounding at one bit diverges: its error is several times the signal.
        biased = bits == 1 and self.variant in ("difference", "feedback")
        # Elsewhere it keeps the ends of a row's range exactly, above all zeros; differences to a shift have none.
        return Coding(bits, "nearest" if biased else "stochastic", self.variant)

    def _shifted(self, bits: int, columns: int) -> Coding:
        warm_up = self.warm_up if bits < WARM.bits else 0
        rotated, dithered = (Coding(bits, how, "shift", warm_up) for how in ("rotated", "dithered"))
        if bits != 1 or not 0 < columns <= ROTATED_MOST:
            return dithered
        return rotated if rotated.row_bytes(columns) <= _FILLED * dithered.row_bytes(columns) else dithered


def widened(bits: int, columns: int) -> int:
    """The width of a narrow row: as many bits as fit into the four bytes that its header takes anyway, at most 8.

    A class score at one bit behind dropout is where accuracy was lost (docs/design.md), and costs the fewest bytes.

    >>> [widened(1, columns) for columns in (7, 12, 16, 17, 64)]
    [4, 2, 2, 1, 1]
    """
    fitting = (b for b in (8, 4, 2) if b > bits and columns * b <= 8 * ROW_HEADER_BYTES)
    return next(fitting, bits)


def _kind(policy: Any, name: str) -> dict[str, Any]:
    """The options of one kind of link."""
    known = ("intra_host", "inter_host")
    if not isinstance(policy, Mapping) or set(policy) - set(known):
        raise OptionError(f"policy={policy!r}", remedy=f"give a mapping with {' and '.join(known)}")
    given = policy.get(name, {})
    if not isinstance(given, Mapping) or set(given) - {"bits", "staleness"} or "auto" in given.values():
        raise OptionError(f"policy[{name!r}]={given!r}", remedy="give bits and staleness, as numbers")
    return dict(given)


def _longest(rules: Sequence[tuple[str, int, int]], module: str) -> tuple[int, int]:
    """The pair of the longest path that a module lies in."""
    found = [(len(p), f, b) for p, f, b in rules if not p or module == p or module.startswith(p + ".")]
    return max(found)[1:]


def _rules(name: str, value: Any, check: Callable[[str, Any], None], default: int) -> list[tuple[str, int, int]]:
    """``(path, forward, backward)`` of an option that is given for all, for directions, or by module path."""
    if value == "auto" and name in ("bits", "staleness"):
        return [("", default, default)]
    if not isinstance(value, Mapping):
        return [("", *_pair(name, value, check, default))]
    if set(value) <= {"forward", "backward"}:
        return [("", *_pair(name, value, check, default))]
    rules = [(str(path), *_pair(f"{name}[{path!r}]", one, check, default)) for path, one in value.items()]
    return rules if any(not path for path, *_ in rules) else [("", default, default), *rules]


def _pair(name: str, value: Any, check: Callable[[str, Any], None], default: int) -> tuple[int, int]:
    given = value if isinstance(value, Mapping) else {"forward": value, "backward": value}
    if unknown := set(given) - {"forward", "backward"}:
        said = ", ".join(sorted(map(repr, unknown)))
        raise OptionError(f"{name}={value!r}: there is no direction {said}", remedy="give forward and backward")
    pair = given.get("forward", default), given.get("backward", default)
    for one in pair:
        check(f"{name}={value!r}", one)
    return pair


def _check_bits(said: str, bits: Any) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in BITS:
        raise OptionError(said, remedy=f"choose from {', '.join(map(str, BITS))}")


def _check_staleness(said: str, steps: Any) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise OptionError(said, remedy='give a whole number of steps, 0 or more, or "auto"')
