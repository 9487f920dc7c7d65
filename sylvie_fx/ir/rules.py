"""The registry of placement rules: for one ATen overload, from where its operands live to where its result lives.

A rule sees a :class:`Call` and returns an :class:`Outcome`, or raises :class:`Refused` with a reason and a remedy. Rules
say nothing about exchanges: neighbour gathers and scatters are the business of passes/canonicalize.py. Register one
for an operator of your own with :func:`placement_rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from sylvie_fx.ir.placement import REPLICATED, Placement, Replicated, Rows


class Refused(Exception):
    """A rule can not prove the operator right on sharded rows. The pass adds the source line and raises PassError."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.why, self.remedy = why, remedy


@dataclass(frozen=True)
class Outcome:
    """What a rule concludes.

    Attributes:
        out: Placement of the result; a tuple for an operator with several results.
        crosses: The operator combines rows of different ranks; a later pass must rewrite it (global_reductions).
    """

    out: Placement | tuple[Placement, ...]
    crosses: bool = False


def expression(size: Any) -> sympy.Expr:
    """The symbolic expression of one tensor size (an int or a SymInt)."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def shape_of(value: Any) -> tuple[sympy.Expr, ...]:
    """Symbolic shape of a fake tensor; ``()`` for anything else."""
    return tuple(expression(s) for s in value.shape) if isinstance(value, torch.Tensor) else ()


class Call:
    """One operator application as a rule sees it.

    Args:
        node: The FX node, whose ``meta["val"]`` holds fake results.
        placement: Gives the placement of an argument node.
        rows_of_size: Gives the rows that a requested shape alone implies, or None.
    """

    def __init__(
        self,
        node: fx.Node,
        placement: Callable[[fx.Node], Placement],
        rows_of_size: Callable[[tuple[sympy.Expr, ...]], Rows | None],
    ) -> None:
        self.node, self._placement, self.rows_of_size = node, placement, rows_of_size
        self.op: OpOverload = node.target  # type: ignore[assignment]

    def arg(self, index: int, name: str | None = None, default: Any = None) -> Any:
        """Positional argument ``index``, or the keyword of its name in the schema, or its default."""
        if index < len(self.node.args):
            return self.node.args[index]
        schema = self.op._schema.arguments
        if index < len(schema):
            argument = schema[index]
            if argument.name in self.node.kwargs:
                return self.node.kwargs[argument.name]
            return argument.default_value if argument.has_default_value() else default
        return self.node.kwargs.get(name, default) if name else default

    def named(self, name: str) -> Any:
        """The argument that the schema calls ``name``."""
        for i, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                return self.arg(i)
        raise KeyError(name)

    def place(self, arg: Any) -> Placement:
        """Placement of an argument; anything that is not a tensor is replicated."""
        if isinstance(arg, fx.Node) and isinstance(arg.meta.get("val"), torch.Tensor):
            return self._placement(arg)
        return REPLICATED

    def shape(self, arg: Any) -> tuple[sympy.Expr, ...]:
        """Symbolic shape of a tensor argument."""
        return shape_of(arg.meta.get("val")) if isinstance(arg, fx.Node) else ()

    @property
    def out_shape(self) -> tuple[sympy.Expr, ...]:
        """Symbolic shape of the (first) result."""
        value = self.node.meta["val"]
        return shape_of(value[0] if isinstance(value, (tuple, list)) else value)

    def tensors(self) -> list[fx.Node]:
        """All tensor operands, those inside lists included."""
        return [n for n in self.node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]

    def sharded(self) -> list[tuple[fx.Node, Rows]]:
        """The operands that live in rows."""
        return [(n, p) for n in self.tensors() if isinstance(p := self.place(n), Rows)]

    def results(self) -> int:
        """How many results the operator has."""
        value = self.node.meta["val"]
        return len(value) if isinstance(value, (tuple, list)) else 1

    def spread(self, placement: Placement, *, crosses: bool = False) -> Outcome:
        """The same placement for every result."""
        value = self.node.meta["val"]
        return Outcome((placement,) * len(value) if isinstance(value, (tuple, list)) else placement, crosses)


Rule: TypeAlias = Callable[[Call], Outcome]

_RULES: dict[OpOverload, Rule] = {}  # a table of facts about operators, filled at import and by register calls


def placement_rule(*operators: OpOverload | OpOverloadPacket) -> Callable[[Rule], Rule]:
    """Register a placement rule for operators (a packet stands for all its overloads).

    Example:
        >>> import torch
        >>> from sylvie_fx.ir.rules import placement_rule, pointwise
        >>> _ = placement_rule(torch.ops.aten.erfinv)(pointwise)
    """

    def register(rule: Rule) -> Rule:
        for overload in _overloads(operators):
            _RULES[overload] = rule
        return rule

    return register


def _overloads(operators: Iterable[OpOverload | OpOverloadPacket]) -> Iterable[OpOverload]:
    for operator in operators:
        if isinstance(operator, OpOverloadPacket):
            yield from (getattr(operator, name) for name in operator.overloads())
        else:
            yield operator


def find_rule(operator: OpOverload) -> Rule | None:
    """The rule of an operator: its own, or the one for elementwise operators if PyTorch tags it so."""
    rule = _RULES.get(operator)
    if rule is None and torch.Tag.pointwise in operator.tags:
        return pointwise
    return rule


def wrap(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dim + rank if dim < 0 else dim


def same_rows(places: Sequence[Rows]) -> None:
    """Refuse operands that live in different row spaces."""
    spaces = sorted({(p.space, p.factor) for p in places})
    if len(spaces) > 1:
        names = " and ".join(f"{s}{f'*{f}' if f != 1 else ''}" for s, f in spaces)
        raise Refused(
            f"it combines rows of different spaces, {names}, element by element",
            "gather one of them to the rows of the other first",
        )


def pointwise(call: Call) -> Outcome:
    """Elementwise with broadcasting: rows stay where they are."""
    rank, found = len(call.out_shape), []
    for node, place in call.sharded():
        dim = place.dim + rank - len(call.shape(node))
        found.append(Rows(place.space, dim, place.factor))
    if not found:
        return call.spread(REPLICATED)
    same_rows(found)
    if len({p.dim for p in found}) > 1:
        raise Refused(
            "it combines every row with every other row (a dense rows-by-rows result)",
            "restrict it to the pairs that are edges of the graph",
        )
    return call.spread(found[0])


def is_replicated(place: Placement) -> bool:
    """Whether a value is the same on all ranks."""
    return isinstance(place, Replicated)
