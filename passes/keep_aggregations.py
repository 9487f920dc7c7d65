"""Keep what is aggregated from inputs alone, so that it is computed once and not once an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx
from torch._ops import OpOverload

from sylvie_fx.ir import ops
from sylvie_fx.ir.program import Program, is_tensor, meta
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.dependence import depends_on_inputs_alone

AGGREGATIONS = frozenset({
    ops.spmm, ops.scatter, ops.segment_softmax, ops.sddmm, ops.edge_scores, ops.attention, ops.halo_reduce,
})  # fmt: skip


@dataclass(frozen=True)
class KeepAggregations(Pass):
    """Mark the values that are aggregated from inputs without gradient, and that anything else reads.

    The machine computes them at the first step, and again when an input of any rank has changed: is other memory, or
    was written into. What only they are computed from is then not computed at all, exchanges included.

    Requires: insert-halo; the fusions and the order of linear layers stand in front of it.
    Ensures: a marked value depends on no parameter, buffer, random mask or input with gradient.

    Before::

        agg = sylvie.spmm(x, src, dst, None, rows_0, sum)
        out = aten.linear(agg, weight)

    After::

        agg = sylvie.spmm(x, src, dst, None, rows_0, sum)      # kept
        out = aten.linear(agg, weight)
    """

    name: ClassVar[str] = "keep-aggregations"

    def run(self, program: Program, context: PassContext) -> Program:
        """Mark them."""
        fixed = _fixed(program)
        for node in fixed:
            meta(node).kept = any(user not in fixed for user in node.users)
        return program


def _fixed(program: Program) -> set[fx.Node]:
    """Aggregations of inputs alone and what is computed from them and inputs alone."""
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op != "call_function" or not is_tensor(node):
            continue
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            continue
        is_new = node.target in AGGREGATIONS or any(n in found for n in node.all_input_nodes)
        if is_new and depends_on_inputs_alone(program, node):
            found.add(node)
    return found
