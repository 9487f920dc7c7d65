"""Fuse what is computed on edges from the two ends: scores, and the whole of an additive attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.placement import REPLICATED, Rows
from sylvie_fx.ir.program import Program, meta, placement, shape
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.build import Builder, copy_meta, replace

aten = torch.ops.aten

_COMBINED: dict[Any, str] = {aten.add.Tensor: "add", aten.sub.Tensor: "sub", aten.mul.Tensor: "mul"}
_SHAPES = frozenset({aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim})
_ERASABLE = _SHAPES | {
    ops.gather, ops.segment_softmax, ops.node_dropout, aten.dropout.default, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor,
    aten.leaky_relu.default, aten.relu.default, aten.sum.dim_IntList,
}  # fmt: skip


@dataclass(frozen=True)
class FuseAttention(Pass):
    """Replace sums weighted by a softmax of leaky-ReLU scores of both ends by one ``sylvie.attention``.

    Requires: fuse-softmax, fuse-aggregation.
    Ensures: where nothing else reads the scores and weights of the edges, they are made inside one operator; dropout of
    the weights becomes a mask that it is given, drawn for the same site and rows; where nothing else reads the mask, a
    machine leaves the drawing to the kernel (runtime/aggregation.py, drawn_inside).

    Before::

        a = sylvie.gather(s, src, 0)
        b = sylvie.gather(t, dst, 0)
        add = aten.add(a, b)
        e = aten.leaky_relu(add, 0.2)
        w = sylvie.segment_softmax(e, dst, rows_0)
        out = sylvie.spmm(h, src, dst, w, rows_0, sum)

    After::

        out = sylvie.attention(h, src, dst, s, t, None, rows_0, 0.2)
    """

    name: ClassVar[str] = "fuse-attention"

    def run(self, program: Program, context: PassContext) -> Program:
        """Fuse each weighted sum that matches."""
        for node in list(program.graph.nodes):
            if node.target is ops.spmm and node.args[5] == "sum":
                _attend(program, node)
        _clean(program)
        return program


@dataclass(frozen=True)
class FuseScores(Pass):
    """Replace a sum, difference, product or dot product of the values at the two ends of edges by ``sylvie.sddmm``.

    A product of a vector with the leaky ReLU of such a sum, as GATv2 scores edges, becomes ``sylvie.edge_scores``.

    Requires: fuse-attention.
    Ensures: such an operator reads the two ends itself, without their gathers; one of the two ends is the row that the edges are
    reduced into, so that no layout of edges is made for it alone.

    Before::

        q = sylvie.gather(a, dst, 0)
        k = sylvie.gather(b, src, 0)
        mul = aten.mul(q, k)
        out = aten.sum(mul, [-1])

    After::

        out = sylvie.sddmm(b, src, a, dst, dot)
    """

    name: ClassVar[str] = "fuse-scores"

    def run(self, program: Program, context: PassContext) -> Program:
        """Fuse each combination that matches."""
        targets = {n.args[1] for n in program.graph.nodes if n.target in (ops.scatter, ops.segment_softmax)}
        targets |= {n.args[2] for n in program.graph.nodes if n.target in (ops.spmm, ops.attention)}
        for node in list(program.graph.nodes):
            if node.target in _COMBINED:
                _combine(node, targets)
        _clean(program)
        return program


def _clean(program: Program) -> None:
    program.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or n.target not in _ERASABLE)


def _gathered(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is ops.gather and bool((*node.args, 0)[2] == 0)


def _ends(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two gathers that an operator combines, of values of one shape and type."""
    if len(node.args) != 2 or node.kwargs or not all(_gathered(a) for a in node.args):
        return None
    a, b = node.args
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    kinds = {(shape(n), n.meta["val"].dtype, str(placement(n))) for n in (a, b, node)}
    return (a, b) if len(kinds) == 1 and node.meta["val"].dtype.is_floating_point else None


def _combine(node: fx.Node, targets: set[Any]) -> None:
    ends, op = _ends(node), _COMBINED[node.target]
    if ends is None:
        return
    first, second = ends
    if second.args[1] not in targets and first.args[1] in targets and op != "sub":
        first, second = second, first
    if second.args[1] not in targets:
        return
    result = node
    if op == "mul" and (summed := _summed(node)) is not None:
        result, op = summed, "dot"
    if op == "add" and (scored := _scored(node)) is not None:
        _fuse_scores(first, second, *scored)
        return
    new = Builder(result).call(
        ops.sddmm, first.args[0], first.args[1], second.args[0], second.args[1], op, val=result.meta["val"]
    )
    copy_meta(result, new)
    replace(result, new)


def _summed(node: fx.Node) -> fx.Node | None:
    """What sums a value over its last dimension, where nothing else reads it."""
    user = next(iter(node.users), None)
    if user is None or len(node.users) != 1 or user.target is not aten.sum.dim_IntList:
        return None
    last: Any = user.args[1] if len(user.args) == 2 and not user.kwargs else None
    return user if last in ([-1], (-1,), [len(shape(node)) - 1]) and len(shape(node)) > 1 else None


def _scored(total: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """The scores, vector and slope, where a sum of both ends goes through a leaky ReLU into products with a vector."""
    raised = next(iter(total.users), None)
    if raised is None or not (_only(total) and _only(raised)) or len(shape(total)) != 3:
        return None
    if raised.target not in (aten.leaky_relu.default, aten.relu.default):
        return None
    slope: Any = 0.0 if raised.target is aten.relu.default else (raised.args[1] if len(raised.args) > 1 else 0.01)
    product = next(iter(raised.users))
    if product.target is not aten.mul.Tensor:
        return None
    vector = next((a for a in product.args if a is not raised), None)
    result = _summed(product)
    if result is None or not isinstance(vector, fx.Node) or isinstance(placement(vector), Rows):
        return None
    sizes = shape(vector)
    fits = len(sizes) in (2, 3) and sizes[-2:] == shape(total)[1:] and (len(sizes) == 2 or sizes[0] == 1)
    same = vector.meta["val"].dtype == total.meta["val"].dtype
    return (result, vector, float(slope)) if fits and same else None


def _fuse_scores(first: fx.Node, second: fx.Node, result: fx.Node, vector: fx.Node, slope: float) -> None:
    operands = (first.args[0], first.args[1], second.args[0], second.args[1], vector, slope)
    new = Builder(result).call(ops.edge_scores, *operands, val=result.meta["val"])
    copy_meta(result, new)
    replace(result, new)


def _attend(program: Program, node: fx.Node) -> None:
    x, src, dst, weight, rows, _ = node.args
    weight, dropout = _plain(weight), None
    if isinstance(weight, fx.Node) and weight.target is ops.node_dropout and _only(weight):
        dropout, weight = weight, _plain(weight.args[0])
    if not (isinstance(weight, fx.Node) and weight.target is ops.segment_softmax and _only(weight)):
        return
    e, index, size = weight.args
    raw = _plain(e)
    if not (isinstance(raw, fx.Node) and raw.target is aten.leaky_relu.default and _only(raw)):
        return
    slope = raw.args[1] if len(raw.args) > 1 else 0.01
    total = _plain(raw.args[0])
    if index is not dst or size is not rows or not isinstance(total, fx.Node) or total.target is not aten.add.Tensor:
        return
    ends = _ends(total)
    if ends is None or not _only(total) or not isinstance(x, fx.Node):
        return
    if x.meta["val"].dtype != total.meta["val"].dtype:
        return
    of_source = next((g for g in ends if g.args[1] is src), None)
    of_target = next((g for g in ends if g.args[1] is dst and g is not of_source), None)
    if of_source is None or of_target is None:
        return
    builder, keep = Builder(node), None
    if dropout is not None:
        keep = _mask(program, builder, dropout)
        if keep is None:
            return
    operands = (x, src, dst, of_source.args[0], of_target.args[0], keep, rows, float(slope))  # type: ignore[arg-type]
    new = builder.call(ops.attention, *operands, val=node.meta["val"])
    copy_meta(node, new)
    replace(node, new)


def _plain(node: Any) -> Any:
    """What a value is a view of, as long as nothing else reads the views."""
    while isinstance(node, fx.Node) and _only(node) and (_changes_nothing(node) or _same_rows(node)):
        node = node.args[0]
    return node


def _changes_nothing(node: fx.Node) -> bool:
    """A dropout that keeps everything."""
    return node.target is aten.dropout.default and bool(node.args[1] == 0.0 or not node.args[2])


def _same_rows(node: fx.Node) -> bool:
    """A view that changes nothing but ones among the dimensions behind the rows."""
    if node.target not in _SHAPES:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = shape(source), shape(node)
    return bool(before[0] == after[0]) and [s for s in before[1:] if s != 1] == [s for s in after[1:] if s != 1]


def _only(node: fx.Node) -> bool:
    return len(node.users) == 1


def _mask(program: Program, builder: Builder, dropout: fx.Node) -> fx.Node | None:
    """What the dropout of ones leaves: zero, or the inverse of the probability to be kept."""
    source, keys, p, site, dim = (*dropout.args, 0)[:5]
    if not isinstance(keys, fx.Node) or keys.name not in program.row_ids or dim != 0:
        return None
    assert isinstance(source, fx.Node)
    val, place = dropout.meta["val"], placement(dropout)
    count = program.bound_input(program.counts, "rows_edges", program.row_ids[keys.name], val.shape[0], REPLICATED)
    ones = builder.call(
        aten.full.default, [count, *val.shape[1:]], 1, dtype=val.dtype, device=val.device, val=val, place=place
    )
    mask = builder.call(ops.node_dropout, ones, keys, p, site, dim, val=val, place=place)
    meta(mask).where, meta(mask).module, meta(mask).site = meta(dropout).where, meta(dropout).module, meta(dropout).site
    return mask
