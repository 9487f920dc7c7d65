"""Scores of edges from the rows at their two ends: attention of the GATv2 kind.

The score of a head is ``vector . leaky_relu(u[src] + v[dst])``. Nothing of size edges x values is made, forward or
backward: the backward pass is a sweep over the edges for each end.
"""

# torch leaves Function.apply and once_differentiable untyped.
# mypy: disable-error-code="no-untyped-call,no-any-return,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels.aggregate_backend import as_computed, backend_for
from sylvie_fx.kernels.aggregate_layout import EdgeLayout


def edge_scores(layout: EdgeLayout, u: Tensor, v: Tensor, vector: Tensor, negative_slope: float) -> Tensor:
    """``(vector * leaky_relu(u[src] + v[dst], negative_slope)).sum(-1)``.

    Args:
        layout: The graph.
        u: ``[n_src, H, D]``.
        v: ``[n_dst, H, D]``.
        vector: ``[H, D]``.
        negative_slope: Of the leaky ReLU.

    Returns:
        ``[edges, H]``; can be differentiated once.

    Raises:
        KernelError: For operands that do not fit the layout or one another.
    """
    known = ((layout.n_src, *vector.shape), (layout.n_dst, *vector.shape))
    if vector.dim() != 2 or (tuple(u.shape), tuple(v.shape)) != known:
        found = f"u is {tuple(u.shape)}, v is {tuple(v.shape)}, vector is {tuple(vector.shape)}"
        raise KernelError("scores need [sources, H, D], [destinations, H, D] and [H, D]", why=found)
    dtype = torch.promote_types(torch.promote_types(u.dtype, v.dtype), vector.dtype)
    operands = (t.to(as_computed(dtype)) for t in (u, v, vector))
    return _EdgeScores.apply(layout, *operands, negative_slope).to(dtype)


class _EdgeScores(Function):
    @staticmethod
    def forward(ctx: Any, layout: EdgeLayout, u: Tensor, v: Tensor, vector: Tensor, negative_slope: float) -> Tensor:
        ctx.layout, ctx.negative_slope = layout, negative_slope
        ctx.save_for_backward(u, v, vector)
        rows = layout.by_destination
        return backend_for(rows, u).scores(rows, u, v, vector, negative_slope)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        u, v, vector = ctx.saved_tensors
        layout, slope = ctx.layout, ctx.negative_slope
        of_u = of_v = of_vector = None
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            rows = layout.by_destination
            of_v, of_vector = backend_for(rows, u).scores_gradient(
                rows, u, v, vector, slope, gradient, ctx.needs_input_grad[3]
            )
        if ctx.needs_input_grad[1]:
            rows = layout.by_source
            of_u, _ = backend_for(rows, u).scores_gradient(rows, v, u, vector, slope, gradient, False)
        return None, of_u, of_v, of_vector, None
