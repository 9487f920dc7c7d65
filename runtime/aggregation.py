"""Runs the aggregations of a program through the kernels, whose edge layouts it prepares once."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from sylvie_fx.ir import ops
from sylvie_fx.kernels import aggregate
from sylvie_fx.kernels.aggregate import Drop, EdgeLayout
from sylvie_fx.kernels.aggregate_split import SplitLayout, spmm_halo, spmm_inner
from sylvie_fx.kernels.edge_scores import edge_scores

_REDUCE: dict[str, Any] = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}


class Aggregations:
    """The edge layouts of one machine, by the indices that they were made of.

    An index is a placeholder that is bound once, so that its memory names it.

    Args:
        own_rows: Data pointers of indices that read halo rows too, each with the number of own rows in front of them: the
            messages of own rows are then summed first, whether or not the sum is taken in two parts.
        constant: Addresses of edge values that are bound and never change: the kernels keep them in their own order.
    """

    def __init__(self, own_rows: Mapping[int, int] | None = None, constant: Iterable[int] = ()) -> None:
        self._own_rows, self._constant = own_rows or {}, frozenset(constant)
        self._layouts: dict[tuple[Any, ...], EdgeLayout] = {}
        self._splits: dict[tuple[int, int], SplitLayout] = {}

    @property
    def targets(self) -> Collection[Any]:
        """The operators that :meth:`run` runs."""
        return _KERNELS.keys()

    def run(self, node: fx.Node, args: tuple[Any, ...]) -> Tensor:
        """Run a node whose target is one of :attr:`targets`.

        Args:
            node: The node.
            args: Its arguments' values.
        """
        target: Any = node.target
        if not args[0].dtype.is_floating_point:
            return target(*args)  # type: ignore[no-any-return]
        result: Tensor = _KERNELS[target](self, *args)
        return result

    def _spmm(self, x: Tensor, src: Tensor, dst: Tensor, weight: Tensor | None, rows: int, reduce: str) -> Tensor:
        return aggregate.spmm(self._layout(src, dst, len(x), rows), x, weight, _REDUCE[reduce])

    def inner(
        self, own: Tensor, src: Tensor, dst: Tensor, weight: Tensor | None, rows: int, reduce: str, halo: int
    ) -> Tensor:
        """The inner edges' part of a :data:`~sylvie_fx.ir.ops.spmm` whose rows are own rows and ``halo`` halo rows."""
        return spmm_inner(self._split(src, dst, len(own), halo, rows), own, weight, _REDUCE[reduce])

    def outer(
        self, partial: Tensor, halo: Tensor, src: Tensor, dst: Tensor, weight: Tensor | None, reduce: str, own: int
    ) -> Tensor:
        """The sum that :meth:`inner` began, with the halo edges."""
        layout = self._split(src, dst, own, len(halo), partial.shape[-3])
        return spmm_halo(layout, partial, halo, weight, _REDUCE[reduce])

    def _split(self, src: Tensor, dst: Tensor, own: int, halo: int, rows: int) -> SplitLayout:
        layout = self._layout(src, dst, own + halo, rows)
        key = id(layout), own
        if key not in self._splits:
            self._splits[key] = SplitLayout(layout, own)
        return self._splits[key]

    def _scatter(self, e: Tensor, index: Tensor, rows: int, reduce: str, dim: int = 0) -> Tensor:
        if dim != 0 or reduce not in _REDUCE:
            return ops.scatter(e, index, rows, reduce, dim)  # type: ignore[no-any-return]
        return aggregate.segment_reduce(self._layout(None, index, len(e), rows), e, _REDUCE[reduce])

    def _softmax(self, e: Tensor, index: Tensor, rows: int) -> Tensor:
        return aggregate.segment_softmax(self._layout(None, index, len(e), rows), e)

    def _sddmm(self, u: Tensor, src: Tensor, v: Tensor, dst: Tensor, op: Any) -> Tensor:
        return aggregate.sddmm(self._layout(src, dst, len(u), len(v)), u, v, op)

    def _edge_scores(
        self, u: Tensor, src: Tensor, v: Tensor, dst: Tensor, vector: Tensor, negative_slope: float
    ) -> Tensor:
        layout = self._layout(src, dst, len(u), len(v))
        return edge_scores(layout, u, v, vector.reshape(vector.shape[-2:]), negative_slope)

    def _attention(
        self,
        x: Tensor,
        src: Tensor,
        dst: Tensor,
        source_score: Tensor,
        target_score: Tensor,
        keep: Drop | Tensor | None,
        rows: int,
        negative_slope: float,
    ) -> Tensor:
        heads = math.prod(source_score.shape[1:])  # one without a dimension of heads
        source, target = (score.reshape(len(score), heads) for score in (source_score, target_score))
        tall = x.reshape(len(x), heads, math.prod(x.shape[1:]) // heads)
        layout = self._layout(src, dst, len(x), rows)
        if isinstance(keep, Tensor):  # something else reads the mask too, or it keeps nothing
            scores = torch.nn.functional.leaky_relu(aggregate.sddmm(layout, source, target, "add"), negative_slope)
            weight = aggregate.segment_softmax(layout, scores) * keep.reshape(len(dst), heads)
            return aggregate.spmm(layout, tall, weight, "sum").view(rows, *x.shape[1:])
        return aggregate.attention(layout, tall, source, target, negative_slope, keep).view(rows, *x.shape[1:])

    def _layout(self, src: Tensor | None, dst: Tensor, n_src: int, n_dst: int) -> EdgeLayout:
        if src is None:  # any layout reduces edges into their destinations, whatever they start from
            for (_, into, edges, _, rows), known in self._layouts.items():
                if (into, edges, rows) == (dst.data_ptr(), len(dst), n_dst):
                    return known
        key = (None if src is None else src.data_ptr(), dst.data_ptr(), len(dst), n_src, n_dst)
        found = self._layouts.get(key)
        if found is None:
            sources = torch.arange(len(dst), device=dst.device) if src is None else src
            own = None if src is None else self._own_rows.get(src.data_ptr())
            found = self._layouts[key] = EdgeLayout(sources, dst, n_src, n_dst, own, constant=self._constant)
        return found


def drawn_inside(graph: fx.Graph) -> set[fx.Node]:
    """Masks of ones that attention alone reads, which it draws itself, and those ones: neither is made."""
    masks: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is not ops.node_dropout or node.args[1] is None or not float(node.args[2]) < 1.0:
            continue
        ones, readers = node.args[0], list(node.users)
        alone = isinstance(ones, fx.Node) and ones.target is torch.ops.aten.full.default and ones.args[1] == 1
        if alone and readers and all(n.target is ops.attention and n.args[5] is node for n in readers):
            masks |= {node, *([ones] if len(ones.users) == 1 else [])}
    return masks


# Functions, as the machine's: what refers to itself is kept until a collection.
_KERNELS: dict[Any, Any] = {
    ops.spmm: Aggregations._spmm,
    ops.scatter: Aggregations._scatter,
    ops.segment_softmax: Aggregations._softmax,
    ops.sddmm: Aggregations._sddmm,
    ops.edge_scores: Aggregations._edge_scores,
    ops.attention: Aggregations._attention,
}
