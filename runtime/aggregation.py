"""Runs the aggregations of a program through the kernels, whose edge layouts it prepares once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from sylvie_fx.ir import ops
from sylvie_fx.kernels.aggregate import EdgeLayout, segment_reduce, spmm

_REDUCE: dict[str, Any] = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}


class Aggregations:
    """The edge layouts of one machine, by the indices that they were made of.

    An index is a placeholder that is bound once, so that its node and its memory name it.
    """

    def __init__(self) -> None:
        self._layouts: dict[tuple[Any, ...], EdgeLayout] = {}

    def run(self, node: fx.Node, args: tuple[Any, ...]) -> Tensor:
        """Run a ``sylvie.spmm`` or ``sylvie.scatter`` node.

        Args:
            node: The node.
            args: Its arguments' values.
        """
        if node.target is ops.spmm:
            x, src, dst, weight, rows, reduce = args
            if reduce not in _REDUCE or not x.dtype.is_floating_point:
                return ops.spmm(x, src, dst, weight, rows, reduce)  # type: ignore[no-any-return]
            return spmm(self._layout(src, dst, len(x), rows), x, weight, _REDUCE[reduce])
        e, index, rows, reduce, dim = (*args, 0)[:5]
        if dim != 0 or reduce not in _REDUCE or not e.dtype.is_floating_point:
            return ops.scatter(e, index, rows, reduce, dim)  # type: ignore[no-any-return]
        return segment_reduce(self._layout(None, index, len(e), rows), e, _REDUCE[reduce])

    def _layout(self, src: Tensor | None, dst: Tensor, n_src: int, n_dst: int) -> EdgeLayout:
        key = (None if src is None else src.data_ptr(), dst.data_ptr(), len(dst), n_src, n_dst)
        found = self._layouts.get(key)
        if found is None:
            sources = torch.arange(len(dst), device=dst.device) if src is None else src
            found = self._layouts[key] = EdgeLayout(sources, dst, n_src, n_dst)
        return found
