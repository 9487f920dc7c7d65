"""The schedule of a program: what each rank does in a step, in order, as small actions with a text form.

    rank 0
    forward
      compute linear
      start 0 linear
      compute spmm_inner
      wait 0 age 1
      compute spmm_halo
    backward
      …

``start 0 linear`` sends the rows of ``linear`` that others need in exchange 0, ``wait 0 age 1`` takes what arrived from
the step before, ``reduce loss`` is a sum over all ranks. Backward, an exchange runs the other way: it starts where the
rows were waited for, and is waited for where they were sent. (Schedules as lists of small actions with a text form follow
torch.distributed.pipelining.)
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.errors import VerifyError
from sylvie_fx.ir.program import Program
from sylvie_fx.ir.timeline import BACKWARD, FORWARD

Exchange = tuple[int, str]
"""Number of an exchange, and the direction in which it runs."""


class Verb(enum.Enum):
    """What an action does."""

    COMPUTE = "compute"
    START = "start"
    WAIT = "wait"
    REDUCE = "reduce"


@dataclass(frozen=True)
class Action:
    """One action of one rank.

    Attributes:
        verb: What it does.
        name: What is computed, sent or reduced; empty for a wait.
        direction: ``forward`` or ``backward``.
        exchange: Number of the exchange that is started or waited for, else None.
        age: For a wait: how many steps ago what it takes was started.

    Raises:
        VerifyError: A name with white space, or a number that is missing, superfluous or negative.
    """

    verb: Verb
    name: str = ""
    direction: str = FORWARD
    exchange: int | None = None
    age: int = 0

    def __post_init__(self) -> None:
        numbered = self.verb in (Verb.START, Verb.WAIT)
        named = self.verb is not Verb.WAIT
        if (
            numbered != (self.exchange is not None)
            or (self.exchange or 0) < 0
            or self.age < 0
            or (self.age and self.verb is not Verb.WAIT)
            or named != bool(self.name)
            or self.name.split() != [self.name] * named
            or "#" in self.name
            or self.direction not in (FORWARD, BACKWARD)
        ):
            raise VerifyError(
                f"a schedule has no action {self.verb.value} {self.name!r} {self.exchange} age {self.age}"
            )

    @property
    def key(self) -> tuple[str, str]:
        """Direction and operator, the same in every step: ``("forward", "linear")``, ``("backward", "start 0")``."""
        if self.exchange is None:
            return self.direction, self.name
        return self.direction, f"{self.verb.value} {self.exchange}"

    def __str__(self) -> str:
        if self.verb is Verb.START:
            return f"start {self.exchange} {self.name}"
        if self.verb is Verb.WAIT:
            return f"wait {self.exchange} age {self.age}"
        return f"{self.verb.value} {self.name}"


@dataclass(frozen=True)
class Schedule:
    """What one rank does in a step.

    Example:
        >>> print(Schedule.parse("rank 1\\nforward\\n  compute linear\\n  start 0 linear\\n  wait 0 age 1\\n"))
        rank 1
        forward
          compute linear
          start 0 linear
          wait 0 age 1

    Attributes:
        rank: The rank.
        actions: In order, all of the forward pass before all of the backward pass.
    """

    rank: int
    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        turned = [a.direction for a in self.actions]
        if turned != sorted(turned, reverse=True):
            raise VerifyError(f"rank {self.rank} goes forward again after its backward pass")

    @staticmethod
    def of(
        program: Program,
        rank: int = 0,
        ages: Mapping[Exchange, int] | None = None,
        without: Collection[int] = (),
    ) -> Schedule:
        """The schedule of a program, its backward pass as autograd runs it: the mirror image of what has gradients.

        Left out are exchanges of values that depend on inputs alone, which cross once and not in every step, and the
        picking of one result out of several.

        Args:
            program: After insert-halo or any later pass.
            rank: The rank, for the text.
            ages: How old what a wait takes is, in steps; 0 for those that are not named.
            without: Numbers of exchanges that move no row on this graph.
        """
        forward = list(_forward(program, ages or {}, without))
        learning = _learning(program) if program.mode == "train" else set()
        names = {a.exchange: a.name for _, a in forward if a.verb is Verb.START}
        backward = [_mirror(a, names, ages or {}) for node, a in reversed(forward) if node in learning]
        # The parameters enter through an operator at the top, whose backward pass adds up their gradients.
        backward += [
            Action(Verb.REDUCE, node.name, BACKWARD)
            for node in program.graph.nodes
            if node.target is ops.sync_gradients and node in learning
        ]
        return Schedule(rank, (*[a for _, a in forward], *backward))

    @staticmethod
    def parse(text: str) -> Schedule:
        """The schedule of a text; what follows a ``#`` and empty lines are left out.

        Raises:
            VerifyError: Names the line that is no action.
        """
        rank, direction = None, ""
        actions: list[Action] = []
        for number, raw in enumerate(text.splitlines(), 1):
            words = raw.split("#")[0].split()
            try:
                if not words:
                    continue
                if words[0] == "rank" and len(words) == 2 and rank is None:
                    rank = int(words[1])
                elif words in ([FORWARD], [BACKWARD]):
                    direction = words[0]
                else:
                    actions.append(_action(words, direction))
            except (ValueError, VerifyError):
                raise VerifyError(
                    f"{raw.strip()!r} is no line of a schedule",
                    where=f"line {number}",
                    remedy="write `rank R`, `forward`, `backward`, `compute NAME`, `start E NAME`, `wait E age A` or "
                    "`reduce NAME`, the first three before the actions that they are of",
                ) from None
        if rank is None:
            raise VerifyError("the text names no rank", remedy="begin it with a line `rank 0`")
        return Schedule(rank, tuple(actions))

    def lines(self) -> Iterator[tuple[int, Action]]:
        """The actions with the numbers of their lines in the text, which begins with line 1."""
        number, direction = 1, ""
        for action in self.actions:
            if action.direction != direction:
                number, direction = number + 1, action.direction
            number += 1
            yield number, action

    def __str__(self) -> str:
        text, direction = [f"rank {self.rank}"], ""
        for action in self.actions:
            if action.direction != direction:
                direction = action.direction
                text.append(direction)
            text.append(f"  {action}")
        return "\n".join(text)


def _action(words: list[str], direction: str) -> Action:
    verb = Verb(words[0])
    if verb is Verb.WAIT:
        _, exchange, age, steps = words
        if age != "age":
            raise ValueError(age)
        return Action(verb, "", direction, int(exchange), int(steps))
    if verb is Verb.START:
        _, exchange, name = words
        return Action(verb, name, direction, int(exchange))
    _, name = words
    return Action(verb, name, direction)


def exchange_of(node: fx.Node) -> int | None:
    """The number of an exchange: its site, or its slot before quantize has numbered the sites; None for other nodes."""
    if node.target not in (*_WHOLE, *_STARTS, *_WAITS):
        return None
    number: Any = node.args[3] if len(node.args) > 3 else -1
    if number < 0:
        number = node.args[1]
    return int(number)


#: Exchanges in one piece, and the two halves of those that were split.
_WHOLE = (ops.halo_exchange, ops.halo_reduce, ops.relayout)
_STARTS: tuple[Any, ...] = ()
_WAITS: tuple[Any, ...] = ()


def _forward(
    program: Program, ages: Mapping[Exchange, int], without: Collection[int]
) -> Iterator[tuple[fx.Node, Action]]:
    for node in program.graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        number = exchange_of(node)
        if number is not None:
            coding = program.codings.get(number)
            if number in without or (coding is not None and coding.once):
                continue
            if node.target not in _WAITS:
                source = node.args[0]
                assert isinstance(source, fx.Node)
                yield node, Action(Verb.START, source.name, FORWARD, number)
            if node.target not in _STARTS:
                yield node, Action(Verb.WAIT, "", FORWARD, number, ages.get((number, FORWARD), 0))
        elif node.target is ops.all_reduce:
            yield node, Action(Verb.REDUCE, node.name)
        elif node.target not in (ops.sync_gradients, operator.getitem):
            yield node, Action(Verb.COMPUTE, node.name)


def _mirror(action: Action, names: Mapping[int | None, str], ages: Mapping[Exchange, int]) -> Action:
    """What the backward pass does in the place of an action."""
    number = action.exchange
    if action.verb is Verb.WAIT:
        return Action(Verb.START, names[number], BACKWARD, number)
    if action.verb is Verb.START:
        assert number is not None
        return Action(Verb.WAIT, "", BACKWARD, number, ages.get((number, BACKWARD), 0))
    return Action(action.verb, action.name, BACKWARD)


def _learning(program: Program) -> set[fx.Node]:
    """The nodes through which gradients flow."""
    entries = {i.name for i in program.inputs if not i.static}
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr" or (node.op == "placeholder" and node.name in entries):
            learns = isinstance(value, Tensor) and value.requires_grad
        else:
            learns = any(n in found for n in node.all_input_nodes) and _differentiable(value)
        if learns:
            found.add(node)
    return found


def _differentiable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_differentiable(v) for v in value)
    return value is None or (isinstance(value, Tensor) and value.dtype.is_floating_point)
