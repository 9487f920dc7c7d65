"""What the rewrites of reductions over ranks share: local operators, totals, and how many rows there are."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.placement import REPLICATED, Placement
from sylvie_fx.ir.program import Program, meta, placement, shape
from sylvie_fx.ir.rules import Call
from sylvie_fx.passes.build import Builder
from sylvie_fx.passes.split_prologue import prologue_number

aten = torch.ops.aten


class Rewrite(Builder):
    """Builds the replacement of one node."""

    def __init__(self, program: Program, node: fx.Node) -> None:
        super().__init__(node)
        self.program, self.node = program, node
        self.invocation = Call(node, placement, program.rows_of_shape)

    def local(self, op: Any, *args: Any, place: Placement = REPLICATED, **kwargs: Any) -> fx.Node:
        """An operator on this rank's values."""
        return self.call(op, *args, place=place, **kwargs)

    def total(self, value: fx.Node, op: str = "sum") -> fx.Node:
        """The value reduced over ranks."""
        return self.call(ops.all_reduce, value, op, val=value.meta["val"], place=REPLICATED)

    def sum_over(self, value: fx.Node, dims: list[int], *, keep: bool, **kwargs: Any) -> fx.Node:
        """The sum over dimensions, rows of all ranks among them."""
        return self.total(self.local(aten.sum.dim_IntList, value, dims, keep, **kwargs))

    def entries(self, source: fx.Node, dims: list[int]) -> fx.Node | int:
        """How many entries of the global tensor a reduction over ``dims`` combines."""
        fixed = math.prod(int(s) for d, s in enumerate(shape(source)) if d in dims and not s.free_symbols)
        rows = next(s for d, s in enumerate(shape(source)) if d in dims and s.free_symbols)
        number = prologue_number(self.program, rows)
        if isinstance(number, int):
            return number * fixed
        if fixed == 1:
            return number
        with self.graph.inserting_before(self.before):
            scaled = self.graph.call_function(operator.mul, (number, fixed))
        scaled.meta["val"] = number.meta["val"] * fixed
        meta(scaled).placement = REPLICATED
        return scaled

    def like(self, source: fx.Node) -> Placement:
        """The placement of an operand, for row-local results of its shape."""
        return placement(source)


def neutral_value(dtype: torch.dtype, *, largest: bool) -> float | int:
    """What changes no maximum (or minimum) of a dtype."""
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max
