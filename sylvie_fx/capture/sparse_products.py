"""Products and reductions of a stand-in adjacency: gather by column, multiply, scatter by row.

Importing this module registers them. Shapes: ``E`` entries, ``N`` nodes, ``F`` features.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from sylvie_fx.capture.sparse_layout import Entries
from sylvie_fx.capture.sparse_tensor import StandInAdjacency, handles, refuse

_REDUCTIONS = {"sum": "sum", "mean": "mean", "max": "amax", "amax": "amax", "min": "amin", "amin": "amin"}


@handles("mm", "matmul", "mv", "__matmul__", "_sparse_mm")
def _product(*args: Any, **kwargs: Any) -> Tensor:
    """``adj @ x`` and ``x @ adj``, ``x`` a vector or a matrix, with a reduction other than the sum if asked for."""
    left, right, *rest = (*args, *kwargs.values())
    if isinstance(left, StandInAdjacency) and isinstance(right, StandInAdjacency):
        refuse(
            "the product of two sparse adjacencies",
            "its entries are the two-hop neighbours, which are not known from the edges alone",
            "Multiply one after the other, adj @ (adj @ x), or pass the product as an input of its own",
        )
    reduce = rest[0] if rest else "sum"
    if reduce not in _REDUCTIONS:
        refuse(f"a sparse product reduced by {reduce!r}", f"known are {', '.join(_REDUCTIONS)}")
    if isinstance(left, StandInAdjacency):
        return _spread(left.stored(), right, _REDUCTIONS[reduce])
    if left.dim() == 1:
        return _spread(right.stored().transposed(), left, _REDUCTIONS[reduce])
    return _spread(right.stored().transposed(), left.transpose(-1, -2), _REDUCTIONS[reduce]).transpose(-1, -2)


@handles("addmm", "_sparse_addmm")
def _addmm(mat: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta * mat + alpha * (mat1 @ mat2)`` where one of the factors is the adjacency."""
    if isinstance(mat, StandInAdjacency):
        refuse("addmm onto a sparse adjacency", "its result has N x N numbers, for N nodes")
    product = _product(mat1, mat2)
    if alpha != 1:
        product = product * alpha
    return cast(Tensor, product + (mat if beta == 1 else mat * beta))


@handles("sampled_addmm", "_sparse_sampled_addmm", "sparse_sampled_addmm")
def _sampled_addmm(adj: StandInAdjacency, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``mat1 @ mat2`` at the places of the adjacency only, plus its values."""
    stored = adj.stored()
    scores = (mat1.index_select(0, stored.row) * mat2.t().index_select(0, stored.col)).sum(-1)
    return adj.remade(stored.with_value(scores * alpha + stored.weights() * beta))


@handles("_sparse_sum", "sum")
def _sum(
    adj: StandInAdjacency, dim: int | tuple[int, ...] | None = None, keepdim: bool = False, **kwargs: Any
) -> Tensor:
    """The sum of the values, per row or per column: a dense vector, on which a later ``to_dense()`` does nothing."""
    stored = adj.stored()
    weights = stored.weights().to(kwargs["dtype"]) if kwargs.get("dtype") else stored.weights()
    axes = {d % adj.dim() for d in ((0, 1) if dim is None else (dim,) if isinstance(dim, int) else dim)}
    if axes == {0, 1}:
        return weights.sum()
    if axes == {1}:
        sums = _scattered(weights, stored.row, stored.n_rows)
        return sums.unsqueeze(1) if keepdim else sums
    if axes == {0}:
        sums = _scattered(weights, stored.col, stored.n_cols)
        return sums.unsqueeze(0) if keepdim else sums
    return refuse(f"a sum over the dimensions {dim} of a sparse matrix", "only rows and columns are known")


@handles("_sparse_softmax")
def _softmax(adj: StandInAdjacency, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """The softmax of each row's (or column's) entries; what is not stored counts as minus infinity."""
    merged = _typed(adj, dtype)
    _, exponentials, sums = _shares(merged, dim)
    return adj.remade(merged.with_value(exponentials / sums), coalesced=True)


@handles("_sparse_log_softmax")
def _log_softmax(adj: StandInAdjacency, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """The logarithm of the softmax."""
    merged = _typed(adj, dtype)
    shifted, _, sums = _shares(merged, dim)
    return adj.remade(merged.with_value(shifted - sums.log()), coalesced=True)


def _typed(adj: StandInAdjacency, dtype: torch.dtype | None) -> Entries:
    merged = adj.merged()
    return merged if dtype is None else merged.with_value(merged.weights().to(dtype))


def _shares(entries: Entries, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each entry less the largest of its row (or column), its exponential, and the row's sum of those: all ``[E]``."""
    by_row = dim % 2 == 1
    index, size = (entries.row, entries.n_rows) if by_row else (entries.col, entries.n_cols)
    weights = entries.weights()
    start = weights.new_zeros((size, *weights.shape[1:]))
    place = index.view(-1, *[1] * (weights.dim() - 1)).expand_as(weights)
    top = start.scatter_reduce(0, place, weights.detach(), "amax", include_self=False)
    shifted = weights - top.index_select(0, index)
    exponentials = shifted.exp()
    return shifted, exponentials, _scattered(exponentials, index, size).index_select(0, index)


def _scattered(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sums ``[size, ...]`` of the values ``[E, ...]`` that have the same index ``[E]``."""
    return values.new_zeros((size, *values.shape[1:])).index_add(0, index, values)


def _spread(entries: Entries, dense: Tensor, reduce: str) -> Tensor:
    """The product of the matrix with ``dense``: ``[N]``, ``[N, F]`` or, for sums only, ``[B, N, F]``."""
    if entries.value is not None and entries.value.dim() > 1:
        refuse("a product with a sparse matrix whose values are vectors", "torch does not define it either")
    dim = max(dense.dim() - 2, 0)
    torch._check(dense.shape[dim] == entries.n_cols, lambda: "the columns of the adjacency and the rows differ")
    messages = dense.index_select(dim, entries.col)
    if entries.value is not None:
        messages = messages * (entries.value if dense.dim() == 1 else entries.value.unsqueeze(-1))
    shape = (*dense.shape[:dim], entries.n_rows, *dense.shape[dim + 1 :])
    if reduce == "sum":
        return messages.new_zeros(shape).index_add(dim, entries.row, messages)
    if dim != 0:
        refuse(f"a batched sparse product reduced by {reduce!r}", "torch does not define it either")
    index = entries.row if dense.dim() == 1 else entries.row.unsqueeze(-1).expand_as(messages)
    return messages.new_zeros(shape).scatter_reduce(0, index, messages, reduce, include_self=False)
