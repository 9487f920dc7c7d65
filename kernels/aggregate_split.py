"""Aggregation in two parts, so that the second one's rows may still be on their way while the first is computed.

A rank holds its own rows and, behind them, halo rows of other ranks. Edges from own rows are *inner* edges, the others
*halo* edges. :func:`spmm_inner` reduces the inner edges, :func:`spmm_halo` goes on from there with the halo edges. The
two together give the bits of :func:`~sylvie_fx.kernels.aggregate.spmm` over a layout that knows its own rows, forward
and backward: the compiled kernels reduce a destination's edges one after the other, and here they only rest in between.
"""

# torch leaves Function.apply and once_differentiable untyped.
# mypy: disable-error-code="no-untyped-call,no-any-return,untyped-decorator"

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels.aggregate import Reduce, checked, with_heads
from sylvie_fx.kernels.aggregate_autograd import dot_edges, sum_rows
from sylvie_fx.kernels.aggregate_backend import as_computed, backend_for
from sylvie_fx.kernels.aggregate_layout import EdgeLayout, Part, Rows


@dataclass(frozen=True, eq=False)
class SplitLayout:
    """The inner and the halo edges of a layout, each prepared at its first use.

    Args:
        layout: All edges; sources ``[0, own)`` are own rows, the others halo rows.
        own: Number of own rows.

    Raises:
        KernelError: Where ``own`` is not between zero and the number of sources.
    """

    layout: EdgeLayout
    own: int

    def __post_init__(self) -> None:
        if not 0 <= self.own <= self.layout.n_src:
            raise KernelError(f"{self.own} own rows of {self.layout.n_src} sources")

    @property
    def halo_rows(self) -> int:
        """Number of halo rows."""
        return self.layout.n_src - self.own

    @functools.cached_property
    def inner_edges(self) -> Tensor:
        """int64, the numbers of the inner edges, rising."""
        return (self.layout.src < self.own).nonzero().flatten()

    @functools.cached_property
    def halo_edges(self) -> Tensor:
        """int64, the numbers of the halo edges, rising."""
        return (self.layout.src >= self.own).nonzero().flatten()

    @functools.cached_property
    def inner(self) -> EdgeLayout:
        """The inner edges, between the own rows and all destinations."""
        src, dst, part = self._edges(self.inner_edges)
        return EdgeLayout(src, dst, self.own, self.layout.n_dst, None, part, self.layout.constant)

    @functools.cached_property
    def halo(self) -> EdgeLayout:
        """The halo edges, between the halo rows, numbered from zero, and all destinations."""
        src, dst, part = self._edges(self.halo_edges)
        return EdgeLayout(src - self.own, dst, self.halo_rows, self.layout.n_dst, None, part, self.layout.constant)

    def _edges(self, numbers: Tensor) -> tuple[Tensor, Tensor, Part]:
        src, dst = (index.index_select(0, numbers) for index in (self.layout.src, self.layout.dst))
        return src, dst, Part(numbers, self.layout.edges)

    @functools.cached_property
    def _targets_of_edges(self) -> tuple[Tensor, Tensor]:
        return torch.unique(self.halo.dst, return_inverse=True)

    @property
    def targets(self) -> Tensor:
        """int64, the destinations of halo edges, rising."""
        return self._targets_of_edges[0]

    @functools.cached_property
    def halo_of_targets(self) -> Rows:
        """The halo edges, to be reduced into their destinations' places in :attr:`targets`."""
        targets, places = self._targets_of_edges
        return Rows(places, self.halo.src, len(targets), self.halo_rows, None, self.halo.part, self.halo.constant)

    @functools.cached_property
    def degrees(self) -> Tensor:
        """int64 ``[n_dst]``, edges of each destination, one for those without."""
        return torch.bincount(self.layout.dst, minlength=self.layout.n_dst).clamp_(min=1)

    @functools.cached_property
    def inner_divisors(self) -> Tensor:
        """int64 ``[n_dst]``, what ends the mean of destinations without halo edges, one for the others."""
        return self.degrees.index_fill(0, self.targets, 1)

    @functools.cached_property
    def target_divisors(self) -> Tensor:
        """int64, the degrees of :attr:`targets`."""
        return self.degrees.index_select(0, self.targets)

    @functools.cached_property
    def inner_of_targets(self) -> Tensor:
        """int64, how many inner edges each of :attr:`targets` has."""
        return self.inner.by_destination.indptr.diff().index_select(0, self.targets)

    def prepare(self, backward: bool = True) -> SplitLayout:
        """Sort now instead of at the first use, for the backward pass as well where asked. Returns itself."""
        self.inner.prepare(backward)
        if backward:
            _ = self.halo.by_source.indptr, self.halo.by_source.sorted_columns
        _ = self.halo_of_targets.indptr, self.halo_of_targets.sorted_columns
        _ = self.inner_divisors, self.target_divisors, self.inner_of_targets
        return self


def spmm_inner(split: SplitLayout, x_own: Tensor, weight: Tensor | None = None, reduce: Reduce = "sum") -> Tensor:
    """Reduce the messages of the inner edges.

    Args:
        split: The graph.
        x_own: ``[own, ...]``, floating point.
        weight: None or ``[edges, ...]`` of all edges in natural order, as :func:`~sylvie_fx.kernels.aggregate.spmm`.
        reduce: ``sum``, ``mean``, ``max`` or ``min``.

    Returns:
        What :func:`spmm_halo` goes on from, and nothing else may read: ``[n_dst, H, D]`` in the type that is computed
        in; for extremes ``[2, n_dst, H, D]``, the extremes and how many messages are equal to them (without the latter,
        ``[1, n_dst, H, D]``, where gradients are off).

    Raises:
        KernelError: For operands that do not fit the layout or one another.
    """
    flat, weights, _ = _operands(split, "x_own", x_own, split.own, weight, reduce)
    if reduce in ("sum", "mean"):
        return _InnerSum.apply(split, flat, weights, reduce == "mean")
    return _InnerExtreme.apply(split, flat, weights, reduce == "min", torch.is_grad_enabled())


def spmm_halo(
    split: SplitLayout, acc: Tensor, x_halo: Tensor, weight: Tensor | None = None, reduce: Reduce = "sum"
) -> Tensor:
    """Go on from ``acc`` with the messages of the halo edges; only destinations that have any are touched.

    Args:
        split: The graph.
        acc: The result of :func:`spmm_inner` with the same weight and reduction; its memory becomes the result.
        x_halo: ``[halo rows, ...]``.
        weight: As for :func:`spmm_inner`.
        reduce: As for :func:`spmm_inner`.

    Returns:
        ``[n_dst, ...]``, the bits of ``spmm(layout, torch.cat([x_own, x_halo]), weight, reduce)`` over a layout made
        with ``own``, where the compiled kernels serve; else equal to it up to rounding.

    Raises:
        KernelError: For operands that do not fit the layout or one another.

    >>> src, dst = torch.tensor([0, 2, 1, 2]), torch.tensor([0, 0, 1, 2])
    >>> split, x = SplitLayout(EdgeLayout(src, dst, 3, 4), own=2), torch.tensor([[1.0], [2.0], [3.0]])
    >>> spmm_halo(split, spmm_inner(split, x[:2]), x[2:]).flatten().tolist()
    [4.0, 2.0, 3.0, 0.0]
    """
    flat, weights, dtype = _operands(split, "x_halo", x_halo, split.halo_rows, weight, reduce)
    size = (split.layout.n_dst, *flat.shape[1:])
    if acc.shape[-3:] != size or acc.dtype != flat.dtype:
        found = f"acc is {tuple(acc.shape)} {acc.dtype}, the halo rows ask for {size} {flat.dtype}"
        raise KernelError("acc is not of these operands", why=found, remedy="pass what spmm_inner has returned")
    if reduce in ("sum", "mean"):
        out = _HaloSum.apply(split, acc, flat, weights, reduce == "mean")
    else:
        out = _HaloExtreme.apply(split, acc, flat, weights, reduce == "min")
    return out.view(split.layout.n_dst, *x_halo.shape[1:]).to(dtype)


def _operands(
    split: SplitLayout, name: str, x: Tensor, rows: int, weight: Tensor | None, reduce: str
) -> tuple[Tensor, Tensor | None, torch.dtype]:
    """``[., H, D]``, ``[edges, H]`` in the type that is computed in, and the type of the result."""
    dtype = checked(name, x, rows, split.layout)
    if weight is not None:
        dtype = torch.promote_types(dtype, checked("weight", weight, split.layout.edges, split.layout))
    if reduce not in ("sum", "mean", "max", "min"):
        raise KernelError(f"reduce is {reduce!r}", remedy="sum, mean, max and min are known")
    flat, weights = with_heads(x, weight)
    flat = flat.to(as_computed(dtype))
    return flat, None if weights is None else weights.to(flat.dtype), dtype


class _InnerSum(Function):
    @staticmethod
    def forward(ctx: Any, split: SplitLayout, x: Tensor, weight: Tensor | None, mean: bool) -> Tensor:
        ctx.split = split
        ctx.save_for_backward(x if weight is not None and ctx.needs_input_grad[2] else None, weight)
        rows = split.inner.by_destination
        return backend_for(rows, x).sum_rows(rows, x, weight, split.inner_divisors if mean else None)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_sum_gradients(ctx, ctx.split.inner, gradient, 1), None


class _HaloSum(Function):
    @staticmethod
    def forward(ctx: Any, split: SplitLayout, acc: Tensor, x: Tensor, weight: Tensor | None, mean: bool) -> Tensor:
        ctx.split, ctx.mean = split, mean
        ctx.mark_dirty(acc)
        ctx.save_for_backward(x if weight is not None and ctx.needs_input_grad[3] else None, weight)
        rows = split.halo_of_targets
        divisors = split.target_divisors if mean else None
        backend_for(rows, x).continue_sum(rows, split.targets, x, weight, divisors, acc)
        return acc

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        split = ctx.split
        if ctx.mean:  # for the inner edges too: their part is handed back as a sum's
            gradient = gradient / split.degrees.view(-1, 1, 1)
        return None, gradient, *_sum_gradients(ctx, split.halo, gradient, 2), None


def _sum_gradients(ctx: Any, part: EdgeLayout, gradient: Tensor, at: int) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of rows, which stand at ``at`` among the operands, and of the weights behind them."""
    x, weight = ctx.saved_tensors
    of_x = of_weight = None
    if ctx.needs_input_grad[at]:
        of_x = sum_rows(part, gradient, weight, transposed=True)
    if ctx.needs_input_grad[at + 1]:
        of_weight = dot_edges(part, x, gradient)
    return of_x, of_weight


class _InnerExtreme(Function):
    @staticmethod
    def forward(ctx: Any, split: SplitLayout, x: Tensor, weight: Tensor | None, smallest: bool, count: bool) -> Tensor:
        rows = split.inner.by_destination
        extreme, ties = backend_for(rows, x).extreme_rows(rows, x, weight, smallest, count)
        acc = torch.stack([extreme] if ties is None else [extreme, ties])
        ctx.split = split
        ctx.save_for_backward(x, weight)
        # Not a saved tensor: by the backward pass the halo's messages have taken part in it, as they have to.
        ctx.extreme = acc.detach()[0]
        return acc

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_extreme_gradients(ctx, ctx.split.inner, ctx.extreme, gradient[0], 1), None, None


class _HaloExtreme(Function):
    @staticmethod
    def forward(ctx: Any, split: SplitLayout, acc: Tensor, x: Tensor, weight: Tensor | None, smallest: bool) -> Tensor:
        if any(ctx.needs_input_grad) and len(acc) == 1:
            raise KernelError("acc has no counts of equal messages, which the gradient is shared by",
                              why="spmm_inner ran with gradients off, spmm_halo with gradients on")  # fmt: skip
        rows = split.halo_of_targets
        torch.autograd.graph.increment_version(acc)  # read or saved by anybody else, it is an error
        # The same memory, but no view of acc: a user may write into a result.
        extreme = x.new_empty(0).set_(acc.untyped_storage(), acc.storage_offset(), acc.shape[1:], acc.stride()[1:])
        ties = acc.detach()[1] if len(acc) == 2 else None
        backend_for(rows, x).continue_extreme(
            rows, split.targets, split.inner_of_targets, x, weight, smallest, extreme, ties
        )
        ctx.split, ctx.parts = split, len(acc)
        ctx.save_for_backward(x, weight, extreme, ties)
        return extreme

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        extreme, ties = ctx.saved_tensors[2:]
        # torch.scatter_reduce counts the zeros that it starts from as one more tie, even with include_self=False.
        share = gradient / ties.add(extreme == 0)
        of_rows = _extreme_gradients(ctx, ctx.split.halo, extreme, share, 2)
        return None, share.expand(ctx.parts, *share.shape), *of_rows, None


def _extreme_gradients(
    ctx: Any, part: EdgeLayout, extreme: Tensor, share: Tensor, at: int
) -> tuple[Tensor | None, Tensor | None]:
    """As :func:`_sum_gradients`; each message equal to ``extreme`` gets ``share``."""
    x, weight = ctx.saved_tensors[:2]
    of_x = of_weight = None
    if ctx.needs_input_grad[at]:
        rows = part.by_source
        of_x = backend_for(rows, x).ties_rows(rows, x, weight, extreme, share)
    if weight is not None and ctx.needs_input_grad[at + 1]:
        rows = part.by_destination
        of_weight = backend_for(rows, x).tie_dot_edges(rows, x, share, weight, extreme)
    return of_x, of_weight
