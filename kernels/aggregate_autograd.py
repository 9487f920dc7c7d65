"""Gradients of the aggregations: each backward pass is an aggregation over the transpose, or a product on the edges.

Nothing of size edges x values is kept or made, except where an edge value of that size is itself an operand. Sums,
products and combinations can be differentiated again; extremes, softmax and attention once.
"""

# torch leaves Function.apply and once_differentiable untyped.
# mypy: disable-error-code="no-untyped-call,no-any-return,untyped-decorator"

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sylvie_fx.kernels.aggregate_backend import backend_for
from sylvie_fx.kernels.aggregate_layout import EdgeLayout
from sylvie_fx.kernels.aggregate_reference import Combination
from sylvie_fx.kernels.dropout import Drop


def sum_rows(
    layout: EdgeLayout, x: Tensor, weight: Tensor | None = None, mean: bool = False, transposed: bool = False
) -> Tensor:
    """Differentiable :func:`~sylvie_fx.kernels.aggregate_reference.sum_rows` over ``layout.rows(transposed)``."""
    return _SumRows.apply(layout, transposed, x, weight, mean)


def dot_edges(layout: EdgeLayout, u: Tensor, v: Tensor, transposed: bool = False) -> Tensor:
    """Differentiable :func:`~sylvie_fx.kernels.aggregate_reference.dot_edges`."""
    if u.shape[2] == 1:  # a product of single values, which is cheaper as a combination
        return combine_edges(layout, u, v, "mul", transposed).squeeze(2)
    return _DotEdges.apply(layout, transposed, u, v)


def combine_edges(layout: EdgeLayout, u: Tensor, v: Tensor, op: Combination, transposed: bool = False) -> Tensor:
    """Differentiable :func:`~sylvie_fx.kernels.aggregate_reference.combine_edges`."""
    return _CombineEdges.apply(layout, transposed, u, v, op)


def extreme_rows(layout: EdgeLayout, x: Tensor, weight: Tensor | None, smallest: bool) -> Tensor:
    """Differentiable :func:`~sylvie_fx.kernels.aggregate_reference.extreme_rows`, without the counts."""
    return _ExtremeRows.apply(layout, x, weight, smallest)


def softmax_edges(layout: EdgeLayout, e: Tensor) -> Tensor:
    """Differentiable :func:`~sylvie_fx.kernels.aggregate_reference.softmax_edges` over incoming edges."""
    return _SoftmaxEdges.apply(layout, e)


def attention(
    layout: EdgeLayout,
    x: Tensor,
    source_score: Tensor,
    target_score: Tensor,
    negative_slope: float,
    drop: Drop | None,
) -> Tensor:
    """Differentiable :func:`~sylvie_fx.kernels.aggregate_reference.attention`, without the softmax."""
    return _Attention.apply(layout, x, source_score, target_score, negative_slope, drop)


class _SumRows(Function):
    @staticmethod
    def forward(ctx: Any, layout: EdgeLayout, transposed: bool, x: Tensor, weight: Tensor | None, mean: bool) -> Tensor:
        rows = layout.rows(transposed)
        ctx.layout, ctx.transposed, ctx.mean = layout, transposed, mean
        # x is needed for the gradient of the weights alone: without one it need not outlive the call.
        ctx.save_for_backward(x if weight is not None and ctx.needs_input_grad[3] else None, weight)
        return backend_for(rows, x).sum_rows(rows, x, weight, rows.degrees if mean else None)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.mean:
            gradient = gradient / ctx.layout.rows(ctx.transposed).degrees.view(-1, 1, 1)
        if ctx.needs_input_grad[2]:
            of_x = sum_rows(ctx.layout, gradient, weight, transposed=not ctx.transposed)
        if ctx.needs_input_grad[3]:
            of_weight = dot_edges(ctx.layout, x, gradient, ctx.transposed)
        return None, None, of_x, of_weight, None


class _DotEdges(Function):
    @staticmethod
    def forward(ctx: Any, layout: EdgeLayout, transposed: bool, u: Tensor, v: Tensor) -> Tensor:
        rows = layout.rows(transposed)
        ctx.layout, ctx.transposed = layout, transposed
        ctx.save_for_backward(u, v)
        return backend_for(rows, u).dot_edges(rows, u, v)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        u, v = ctx.saved_tensors
        of_u = of_v = None
        if ctx.needs_input_grad[2]:
            of_u = sum_rows(ctx.layout, v, gradient, transposed=not ctx.transposed)
        if ctx.needs_input_grad[3]:
            of_v = sum_rows(ctx.layout, u, gradient, transposed=ctx.transposed)
        return None, None, of_u, of_v


class _CombineEdges(Function):
    @staticmethod
    def forward(ctx: Any, layout: EdgeLayout, transposed: bool, u: Tensor, v: Tensor, op: Combination) -> Tensor:
        rows = layout.rows(transposed)
        ctx.layout, ctx.transposed, ctx.op = layout, transposed, op
        ctx.save_for_backward(*((u, v) if op == "mul" else ()))
        return backend_for(rows, u).combine_edges(rows, u, v, op)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layout, transposed = ctx.layout, ctx.transposed
        to_u, to_v = (layout.incoming, layout.outgoing) if transposed else (layout.outgoing, layout.incoming)
        of_u = of_v = None
        if ctx.op == "mul":
            # Every value is a head of its own, and the gradient of the edge its weight.
            u, v = (end.flatten(1).unsqueeze(2) for end in ctx.saved_tensors)
            flat, shape = gradient.flatten(1), (-1, *gradient.shape[1:])
            if ctx.needs_input_grad[2]:
                of_u = sum_rows(layout, v, flat, transposed=not transposed).view(shape)
            if ctx.needs_input_grad[3]:
                of_v = sum_rows(layout, u, flat, transposed=transposed).view(shape)
            return None, None, of_u, of_v, None
        if ctx.needs_input_grad[2]:
            of_u = sum_rows(to_u, gradient)
        if ctx.needs_input_grad[3]:
            of_v = sum_rows(to_v, gradient)
            of_v = -of_v if ctx.op == "sub" else of_v
        return None, None, of_u, of_v, None


class _ExtremeRows(Function):
    @staticmethod
    def forward(ctx: Any, layout: EdgeLayout, x: Tensor, weight: Tensor | None, smallest: bool) -> Tensor:
        rows = layout.by_destination
        out, ties = backend_for(rows, x).extreme_rows(rows, x, weight, smallest, any(ctx.needs_input_grad))
        ctx.layout = layout
        ctx.save_for_backward(x, weight, out, ties)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out, ties = ctx.saved_tensors
        layout, of_x, of_weight = ctx.layout, None, None
        # torch.scatter_reduce counts the zeros that it starts from as one more tie, even with include_self=False.
        share = gradient / ties.add(out == 0)
        if ctx.needs_input_grad[1]:
            rows = layout.by_source
            of_x = backend_for(rows, x).ties_rows(rows, x, weight, out, share)
        if ctx.needs_input_grad[2]:
            rows = layout.by_destination
            of_weight = backend_for(rows, x).tie_dot_edges(rows, x, share, weight, out)
        return None, of_x, of_weight, None


class _SoftmaxEdges(Function):
    @staticmethod
    def forward(ctx: Any, layout: EdgeLayout, e: Tensor) -> Tensor:
        rows = layout.by_destination
        y = backend_for(rows, e).softmax_edges(rows, e)
        ctx.layout = layout
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        rows = ctx.layout.by_destination
        return None, backend_for(rows, y).softmax_gradient(rows, y, gradient)


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        layout: EdgeLayout,
        x: Tensor,
        source_score: Tensor,
        target_score: Tensor,
        negative_slope: float,
        drop: Drop | None,
    ) -> Tensor:
        rows = layout.by_destination
        out, alpha = backend_for(rows, x).attention(rows, x, source_score, target_score, negative_slope, drop)
        ctx.layout, ctx.negative_slope, ctx.drop = layout, negative_slope, drop
        ctx.save_for_backward(x, source_score, target_score, alpha)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, source_score, target_score, alpha = ctx.saved_tensors
        rows, back, places = ctx.layout.by_destination, ctx.layout.by_source, ctx.layout.sorted_by_destination
        values, of_target = backend_for(rows, x).attention_gradient(
            rows, x, source_score, target_score, ctx.negative_slope, ctx.drop, alpha, gradient
        )
        of_x, of_source = backend_for(back, x).attention_sources(back, places, values, gradient)
        return None, of_x, of_source, of_target, None, None
