"""Runs the aggregations of a program through the kernels, whose edge layouts it prepares once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from sylvie_fx.ir import ops
from sylvie_fx.kernels import aggregate
from sylvie_fx.kernels.aggregate import EdgeLayout
from sylvie_fx.kernels.edge_scores import edge_scores

_REDUCE: dict[str, Any] = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}


class Aggregations:
    """The edge layouts of one machine, by the indices that they were made of.

    An index is a placeholder that is bound once, so that its memory names it.

    Attributes:
        targets: The operators that :meth:`run` runs.
    """

    def __init__(self) -> None:
        self._layouts: dict[tuple[Any, ...], EdgeLayout] = {}
        self._kernels: dict[Any, Any] = {
            ops.spmm: self._spmm,
            ops.scatter: self._scatter,
            ops.segment_softmax: self._softmax,
            ops.sddmm: self._sddmm,
            ops.edge_scores: self._edge_scores,
            ops.attention: self._attention,
        }
        self.targets = frozenset(self._kernels)

    def run(self, node: fx.Node, args: tuple[Any, ...]) -> Tensor:
        """Run a node whose target is one of :attr:`targets`.

        Args:
            node: The node.
            args: Its arguments' values.
        """
        target: Any = node.target
        if not args[0].dtype.is_floating_point:
            return target(*args)  # type: ignore[no-any-return]
        result: Tensor = self._kernels[target](*args)
        return result

    def _spmm(self, x: Tensor, src: Tensor, dst: Tensor, weight: Tensor | None, rows: int, reduce: str) -> Tensor:
        return aggregate.spmm(self._layout(src, dst, len(x), rows), x, weight, _REDUCE[reduce])

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
        keep: Tensor | None,
        rows: int,
        negative_slope: float,
    ) -> Tensor:
        source, target = source_score.flatten(1), target_score.flatten(1)
        heads = source.shape[1]
        keep = None if keep is None else keep.reshape(len(dst), heads)
        tall = x.reshape(len(x), heads, math.prod(x.shape[1:]) // heads)
        layout = self._layout(src, dst, len(x), rows)
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
            found = self._layouts[key] = EdgeLayout(sources, dst, n_src, n_dst)
        return found
