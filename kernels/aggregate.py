"""Neighbour aggregations at memory speed: sums and extremes of neighbours, products on edges, softmax, attention.

Prepare an :class:`EdgeLayout` once for a graph; every function takes it first. All are differentiable, make nothing of
size edges x values that is not an operand, and give the same bits for every number of threads
(``torch.get_num_threads()``). float32 and float64 in host memory run in C++; 16-bit floats are computed in float32.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels import aggregate_autograd as autograd
from sylvie_fx.kernels.aggregate_backend import as_computed
from sylvie_fx.kernels.aggregate_layout import EdgeLayout
from sylvie_fx.kernels.dropout import Drop

__all__ = ["Drop", "EdgeLayout", "Reduce", "attention", "sddmm", "segment_reduce", "segment_softmax", "spmm"]

Reduce = Literal["sum", "mean", "max", "min"]
EdgeOp = Literal["add", "sub", "mul", "dot"]


def spmm(layout: EdgeLayout, x: Tensor, weight: Tensor | None = None, reduce: Reduce = "sum") -> Tensor:
    """Reduce the messages ``weight * x[src]`` into the destinations of the edges.

    Args:
        layout: The graph.
        x: ``[n_src, ...]``, floating point.
        weight: None, or ``[edges, ...]`` whose dimensions stand under those of ``x``, from the left: each of the same
            size or 1, missing ones at the end are 1. So ``[edges]`` and ``[edges, 1]`` weigh edges, ``[edges, H]``
            weighs the heads of ``x [n_src, H, D]``, and ``[edges, F]`` the values of ``x [n_src, F]``.
        reduce: ``mean`` divides the sum by the number of edges. The gradient of ``max`` and ``min`` is shared by equal
            messages as :func:`torch.scatter_reduce` shares it (``include_self=False``, onto zeros).

    Returns:
        ``[n_dst, ...]``; zero for destinations without edges.

    Raises:
        KernelError: For operands that do not fit the layout or one another.

    >>> layout = EdgeLayout(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]), 2, 3)
    >>> spmm(layout, torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 10.0, 100.0])).flatten().tolist()
    [20.0, 201.0, 0.0]
    """
    dtype = checked("x", x, layout.n_src, layout)
    if weight is not None:
        dtype = torch.promote_types(dtype, checked("weight", weight, layout.edges, layout))
    if reduce not in ("sum", "mean", "max", "min"):
        raise KernelError(f"reduce is {reduce!r}", remedy="sum, mean, max and min are known")
    flat, weights = with_heads(x, weight)
    flat = flat.to(as_computed(dtype))
    weights = None if weights is None else weights.to(flat.dtype)
    if reduce in ("sum", "mean"):
        out = autograd.sum_rows(layout, flat, weights, mean=reduce == "mean")
    else:
        out = autograd.extreme_rows(layout, flat, weights, smallest=reduce == "min")
    return out.view(layout.n_dst, *x.shape[1:]).to(dtype)


def segment_reduce(layout: EdgeLayout, e: Tensor, reduce: Reduce = "sum") -> Tensor:
    """Reduce edge values ``[edges, ...]`` into the destinations, as :func:`spmm` does with messages.

    Raises:
        KernelError: For values that do not fit the layout.
    """
    return spmm(layout.incoming, e, None, reduce)


def sddmm(layout: EdgeLayout, u: Tensor, v: Tensor, op: EdgeOp) -> Tensor:
    """Values of edges from the rows at their two ends.

    Args:
        layout: The graph.
        u: ``[n_src, ...]``, of the sources.
        v: ``[n_dst, ...]``, of the destinations; trailing dimensions broadcast with those of ``u``.
        op: ``add``, ``sub`` (``u - v``), ``mul``, or ``dot``: the sum of products over the last dimension.

    Returns:
        ``[edges, ...]`` in the natural order of edges; ``dot`` drops the last dimension.

    Raises:
        KernelError: For operands that do not fit the layout or one another.
    """
    dtype = torch.promote_types(checked("u", u, layout.n_src, layout), checked("v", v, layout.n_dst, layout))
    try:
        shape = torch.broadcast_shapes(u.shape[1:], v.shape[1:])
    except RuntimeError as error:
        raise KernelError(f"the values of u {tuple(u.shape)} and v {tuple(v.shape)} do not broadcast") from error
    u, v = (_widened(end, shape).to(as_computed(dtype)) for end in (u, v))
    if op == "dot":
        if not shape:
            raise KernelError("dot needs values to sum over", why=f"u is {tuple(u.shape)}, v is {tuple(v.shape)}")
        size = (math.prod(shape[:-1]), shape[-1])
        dots = autograd.dot_edges(layout, u.reshape(len(u), *size), v.reshape(len(v), *size))
        return dots.view(layout.edges, *shape[:-1]).to(dtype)
    if op not in ("add", "sub", "mul"):
        raise KernelError(f"op is {op!r}", remedy="add, sub, mul and dot are known")
    size = (1, math.prod(shape))
    out = autograd.combine_edges(layout, u.reshape(len(u), *size), v.reshape(len(v), *size), op)
    return out.view(layout.edges, *shape).to(dtype)


def segment_softmax(layout: EdgeLayout, e: Tensor) -> Tensor:
    """Softmax of ``e`` ``[edges, ...]`` over the incoming edges of each destination, whatever its magnitude.

    Raises:
        KernelError: For values that do not fit the layout.
    """
    dtype = checked("e", e, layout.edges, layout)
    flat = e.reshape(layout.edges, math.prod(e.shape[1:])).to(as_computed(dtype))
    return autograd.softmax_edges(layout, flat).view(e.shape).to(dtype)


def attention(
    layout: EdgeLayout,
    x: Tensor,
    source_score: Tensor,
    target_score: Tensor,
    negative_slope: float = 0.2,
    drop: Drop | None = None,
) -> Tensor:
    """Graph attention in one sweep: neighbours weighed by the softmax of leaky-ReLU scores.

    The weight of an edge is the softmax over the destination's edges of
    ``leaky_relu(source_score[src] + target_score[dst])``.

    Args:
        layout: The graph.
        x: ``[n_src, H, D]``.
        source_score: ``[n_src, H]``.
        target_score: ``[n_dst, H]``.
        negative_slope: Of the leaky ReLU.
        drop: Dropout of the weights, with a key for each edge. Its mask is drawn where a weight is made.

    Returns:
        ``[n_dst, H, D]``; zero for destinations without edges.

    Raises:
        KernelError: For operands that do not fit the layout or one another.
    """
    if x.dim() != 3:
        raise KernelError(f"x is {tuple(x.shape)}, not [sources, heads, values]")
    dtype = checked("x", x, layout.n_src, layout)
    operands = {"source_score": (source_score, layout.n_src), "target_score": (target_score, layout.n_dst)}
    for name, (operand, rows) in operands.items():
        dtype = torch.promote_types(dtype, checked(name, operand, rows, layout))
        if operand.shape != (rows, x.shape[1]):
            raise KernelError(f"{name} is {tuple(operand.shape)}, not {(rows, x.shape[1])} as the heads of x ask")
    computed = as_computed(dtype)
    if drop is not None and drop.keys.shape != (layout.edges,):
        raise KernelError(f"the keys of the dropout are {tuple(drop.keys.shape)}, not one for each edge")
    scores = source_score.to(computed), target_score.to(computed)
    return autograd.attention(layout, x.to(computed), *scores, negative_slope, drop).to(dtype)


def checked(name: str, value: Tensor, rows: int, layout: EdgeLayout) -> torch.dtype:
    """The type of an operand.

    Raises:
        KernelError: Where it is not ``[rows, ...]`` of floating point values on the layout's device.
    """
    if value.dim() == 0 or value.shape[0] != rows:
        raise KernelError(f"{name} is {tuple(value.shape)}", why=f"the layout asks for {rows} rows")
    if not value.is_floating_point():
        raise KernelError(f"{name} is {value.dtype}", remedy="pass floating point values")
    if value.device != layout.src.device:
        raise KernelError(f"{name} is on {value.device}, the layout on {layout.src.device}")
    return value.dtype


def _widened(end: Tensor, shape: torch.Size) -> Tensor:
    missing = len(shape) - (end.dim() - 1)
    return end.reshape(end.shape[0], *[1] * missing, *end.shape[1:]).expand(end.shape[0], *shape)


def with_heads(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``x`` as ``[n_src, H, D]`` and the weight as ``[edges, H]``, with as few heads as the weight distinguishes."""
    values = tuple(x.shape[1:])
    if weight is None:
        return x.reshape(x.shape[0], 1, math.prod(values)), None
    sizes = list(weight.shape[1:])
    while len(sizes) > len(values) and sizes[-1] == 1:
        sizes.pop()
    if len(sizes) > len(values) or any(size not in (1, value) for size, value in zip(sizes, values, strict=False)):
        raise KernelError(
            f"weight {tuple(weight.shape)} does not fit the messages {(weight.shape[0], *values)}",
            remedy="give it one value an edge, a head or a message value",
        )
    while sizes and sizes[-1] == 1:
        sizes.pop()
    heads, rest = values[: len(sizes)], values[len(sizes) :]
    weights = weight.reshape(weight.shape[0], *sizes).expand(weight.shape[0], *heads)
    size = (math.prod(heads), math.prod(rest))
    return x.reshape(x.shape[0], *size), weights.reshape(weight.shape[0], size[0])
