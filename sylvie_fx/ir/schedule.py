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
rows were waited for, and is waited for where they were sent. Sums of the gradients of parameters that overlap with the
backward pass are exchanges too, numbered behind the others. (Schedules as lists of small actions with a text form follow
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
            ages: How old what a wait takes is, in steps; for those that are not named, the bound that the program has.
            without: Numbers of exchanges that move no row on this graph.
        """
        learning = _learning(program) if program.mode == "train" else set()
        forward: list[Action] = []
        backward: list[Action] = []
        known = {(n, d): getattr(pace, d) for n, pace in program.paces.items() for d in (FORWARD, BACKWARD)}
        for node, there, back in _actions(program, {**known, **(ages or {})}, without):
            forward += there
            if node in learning:
                backward[:0] = back
        return Schedule(rank, (*forward, *backward))

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
    if node.target not in (*ops.EXCHANGES, ops.halo_wait):
        return None
    site: Any = node.args[2] if node.target is ops.halo_wait else ops.exchange_site(node)
    return int(node.args[1] if site is None else site)  # type: ignore[arg-type]


def _actions(
    program: Program, ages: Mapping[Exchange, int], without: Collection[int]
) -> Iterator[tuple[fx.Node, list[Action], list[Action]]]:
    """What each node does forward, and what autograd does in its place backward."""
    buckets = _buckets(program)
    names: dict[int, str] = {}
    for node in program.graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        number = exchange_of(node)
        if number is not None:
            coding = program.codings.get(number)
            if number in without or (coding is not None and coding.once):
                continue
            if node.target is not ops.halo_wait:
                names[number] = node.args[0].name
            start = [Action(Verb.START, names[number], d, number) for d in (FORWARD, BACKWARD)]
            wait = [Action(Verb.WAIT, "", d, number, ages.get((number, d), 0)) for d in (FORWARD, BACKWARD)]
            if node.target is ops.halo_start:
                yield node, start[:1], wait[1:]
            elif node.target is ops.halo_wait:
                yield node, wait[:1], start[1:]
            else:
                yield node, [start[0], wait[0]], [start[1], wait[1]]
        elif node.target is ops.sync_start:
            yield node, [], [Action(Verb.START, node.name, BACKWARD, buckets[node])]
        elif node.target is ops.sync_finish:
            # Autograd comes to the last bucket first.
            yield node, [], [Action(Verb.WAIT, "", BACKWARD, bucket) for bucket in reversed(buckets.values())]
        elif node.target is ops.sync_gradients:
            yield node, [], [Action(Verb.REDUCE, node.name, BACKWARD)]
        elif node.target in (ops.all_reduce, ops.all_reduces):
            shared = len(node.args) > 2 and bool(node.args[2])
            yield node, [Action(Verb.REDUCE, node.name)], [] if shared else [Action(Verb.REDUCE, node.name, BACKWARD)]
        elif node.target is not operator.getitem:
            yield node, [Action(Verb.COMPUTE, node.name)], [Action(Verb.COMPUTE, node.name, BACKWARD)]


def _buckets(program: Program) -> dict[fx.Node, int]:
    """The number of each bucket of gradients, behind those of the exchanges."""
    numbers = [n for node in program.graph.nodes if (n := exchange_of(node)) is not None]
    first = max(numbers, default=-1) + 1
    found = [node for node in program.graph.nodes if node.target is ops.sync_start]
    return {node: first + i for i, node in enumerate(found)}


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
