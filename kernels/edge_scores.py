"""Scores of edges from the rows at their two ends, in pieces that stay in the cache: attention of the GATv2 kind.

The score of a head is ``vector . leaky_relu(u[src] + v[dst])``. Nothing of size edges x values is kept for the backward
pass, which makes one such value, the gradient of the sums, and reduces it into both ends.
"""

# torch leaves Function.apply and once_differentiable untyped.
# mypy: disable-error-code="no-untyped-call,no-any-return,untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels.aggregate_autograd import as_computed, sum_rows
from sylvie_fx.kernels.aggregate_layout import EdgeLayout

_PIECE = 1 << 16  # values of edges that are in the making at once


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
        u, v, vector = u.contiguous(), v.contiguous(), vector.contiguous()
        ctx.save_for_backward(u, v, vector)
        out = u.new_empty(layout.edges, u.shape[1])
        for at, z in _sums(layout, u, v):
            torch.sum(torch.nn.functional.leaky_relu_(z, negative_slope).mul_(vector), -1, out=out[at])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        u, v, vector = ctx.saved_tensors
        layout, slope = ctx.layout, ctx.negative_slope
        of_sums = u.new_empty(layout.edges, *u.shape[1:])
        of_vector = torch.zeros_like(vector)
        for at, z in _sums(layout, u, v):
            piece = gradient[at].unsqueeze(-1)
            torch.mul(piece, vector, out=of_sums[at])
            of_sums[at].mul_((z > 0).to(z.dtype).mul_(1.0 - slope).add_(slope))
            of_vector += torch.nn.functional.leaky_relu_(z, slope).mul_(piece).sum(0)
        of_u = sum_rows(layout.outgoing, of_sums) if ctx.needs_input_grad[1] else None
        of_v = sum_rows(layout.incoming, of_sums) if ctx.needs_input_grad[2] else None
        return None, of_u, of_v, of_vector, None


def _sums(layout: EdgeLayout, u: Tensor, v: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """``u[src] + v[dst]`` of one piece of the edges after the other, in memory that the next piece takes."""
    values = u.shape[1] * u.shape[2]
    step = max(_PIECE // max(values, 1), 1)
    a, b = (u.new_empty(min(step, layout.edges), *u.shape[1:]) for _ in range(2))
    for start in range(0, layout.edges, step):
        at = slice(start, min(start + step, layout.edges))
        size = at.stop - start
        torch.index_select(u, 0, layout.src[at], out=a[:size])
        torch.index_select(v, 0, layout.dst[at], out=b[:size])
        yield at, a[:size].add_(b[:size])
