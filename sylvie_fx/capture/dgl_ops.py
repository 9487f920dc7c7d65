"""DGL's kernels (generalised SpMM and SDDMM, edge softmax, segments, typed products) in plain torch operations."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.capture.dgl_batch import Segments
from sylvie_fx.capture.dgl_index import StandInIndex, refusal

# Typed products with at most this many types are masked sums; beyond, each row gathers its matrix.
MASKED_TYPES = 32


def reduce_edges(index: StandInIndex, messages: Tensor, reduce: str) -> Tensor:
    """Reduce the messages into each node; zero for a node without any.

    Args:
        index: The graph.
        messages: ``[E, ...]``.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.

    Returns:
        ``[N, ...]``.
    """
    return reduce_rows(messages, index.dst, index.size, reduce)


def reduce_rows(rows: Tensor, into: Tensor, size: Any, reduce: str) -> Tensor:
    """Reduce rows ``[E, ...]`` into ``size`` rows by the index ``into`` ``[E]``; zero where none arrives."""
    into = into if into.dtype == torch.int64 else into.long()
    fresh = rows.new_zeros((size, *rows.shape[1:]))
    if reduce in ("sum", "mean"):
        total = fresh.index_add(0, into, rows)
        if reduce == "sum":
            return total
        count = into.new_zeros(size).index_add(0, into, torch.ones_like(into)).clamp(min=1).to(total.dtype)
        return total / count.reshape(-1, *(1,) * (rows.dim() - 1))
    if reduce not in ("max", "min"):
        raise refusal(f"the reduction {reduce!r}", "only sum, mean, max and min are known")
    target = into.reshape(-1, *(1,) * (rows.dim() - 1)).expand(-1, *rows.shape[1:])
    return fresh.scatter_reduce(0, target, rows, f"a{reduce}", include_self=False)


def at_edges(index: StandInIndex, data: Tensor, target: str) -> Tensor:
    """Bring data of source nodes (``u``), destination nodes (``v``) or edges (``e``) to the edges, ``[E, ...]``."""
    if target == "e":
        return data
    return data.index_select(0, index.src if target == "u" else index.dst)


def gather_row(data: Tensor, row_index: Tensor) -> Tensor:
    """The rows of ``data`` that ``row_index`` ``[M]`` names, ``[M, ...]``."""
    return data.index_select(0, row_index)


def gsddmm(
    index: StandInIndex,
    op: str,
    lhs: Tensor | None,
    rhs: Tensor | None,
    lhs_target: str = "u",
    rhs_target: str = "v",
) -> Tensor:
    """One value for each edge from the values of its ends or its own, ``[E, ...]``."""
    if op == "copy_lhs" and lhs is not None:
        return at_edges(index, lhs, lhs_target)
    if op == "copy_rhs" and rhs is not None:
        return at_edges(index, rhs, rhs_target)
    if lhs is None or rhs is None:
        raise refusal(f"the message {op!r}", "one of its operands is missing")
    left, right = _aligned(at_edges(index, lhs, lhs_target), at_edges(index, rhs, rhs_target))
    match op:
        case "add":
            return left + right
        case "sub":
            return left - right
        case "mul":
            return left * right
        case "div":
            return left / right
        case "dot":
            return (left * right).sum(-1, keepdim=True)
    raise refusal(f"the message {op!r}", "only copies, add, sub, mul, div and dot are known")


def _aligned(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Ones after the first dimension of the one with fewer dimensions, as DGL broadcasts."""
    rank = max(left.dim(), right.dim())
    return _with_rank(left, rank), _with_rank(right, rank)


def _with_rank(value: Tensor, rank: int) -> Tensor:
    return (
        value.reshape(value.shape[0], *(1,) * (rank - value.dim()), *value.shape[1:]) if value.dim() < rank else value
    )


def gspmm(index: StandInIndex, op: str, reduce: str, lhs: Tensor | None, rhs: Tensor | None) -> Tensor:
    """Messages from sources ``[N, ...]`` and edges ``[E, ...]``, reduced into their destinations, ``[N, ...]``."""
    return reduce_edges(index, gsddmm(index, op, lhs, rhs, "u", "e"), reduce)


def edge_softmax(index: StandInIndex, logits: Tensor, edges: Tensor | None = None, norm_by: str = "dst") -> Tensor:
    """Softmax over the edges that share a destination (or a source).

    Args:
        index: The graph.
        logits: ``[E, ...]``, or one row for each of ``edges``.
        edges: Ids of the edges to normalise over; None for all.
        norm_by: ``"dst"`` or ``"src"``.
    """
    ends = index.dst if norm_by == "dst" else index.src
    return softmax_rows(logits, ends if edges is None else ends.index_select(0, edges), index.size)


def softmax_rows(logits: Tensor, into: Tensor, size: Any) -> Tensor:
    """Softmax of rows ``[E, ...]`` over the groups that the index ``into`` ``[E]`` names."""
    largest = reduce_rows(logits.detach(), into, size, "max")
    raised = (logits - largest.index_select(0, into)).exp()
    return raised / reduce_rows(raised, into, size, "sum").index_select(0, into)


def segment_reduce(lengths: Any, value: Tensor, reducer: str = "sum") -> Tensor:
    """Reduce consecutive segments of rows, ``[B, ...]``; one segment reduces all rows.

    Args:
        lengths: ``[B]``, segments, or a sequence of one size: the whole of ``value``.
        value: ``[M, ...]``.
        reducer: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
    """
    if len(lengths) != 1:
        return reduce_rows(value, _segment_of_row(lengths, value), lengths.shape[0], reducer)
    match reducer:
        case "sum":
            return value.sum(0, keepdim=True)
        case "mean":
            return value.mean(0, keepdim=True)
        case "max":
            return value.amax(0, keepdim=True)
        case "min":
            return value.amin(0, keepdim=True)
    raise refusal(f"the readout {reducer!r}", "only sum, mean, max and min are known")


def segment_softmax(lengths: Any, value: Tensor) -> Tensor:
    """Softmax within consecutive segments of rows, ``[M, ...]``."""
    if len(lengths) == 1:
        return value.softmax(0)
    return softmax_rows(value, _segment_of_row(lengths, value), lengths.shape[0])


def gather_mm(a: Tensor, b: Tensor, *, idx_b: Tensor) -> Tensor:
    """Multiply each row by the matrix of its type.

    Args:
        a: ``[M, D1]``.
        b: ``[R, D1, D2]``.
        idx_b: ``[M]``, the type of each row.

    Returns:
        ``[M, D2]``.
    """
    if b.shape[0] > MASKED_TYPES:
        return torch.bmm(a.unsqueeze(1), b.index_select(0, idx_b)).squeeze(1)
    parts = [torch.where((idx_b == kind).unsqueeze(-1), a, 0.0) @ b[kind] for kind in range(b.shape[0])]
    return functools.reduce(torch.add, parts)


def segment_mm(a: Tensor, b: Tensor, seglen_a: Tensor) -> Tensor:
    """Multiply consecutive segments of rows ``[M, D1]`` by one matrix of ``[R, D1, D2]`` each, ``[M, D2]``."""
    return gather_mm(a, b, idx_b=_segment_of_row(seglen_a, a))


def _segment_of_row(lengths: Tensor | Segments, value: Tensor) -> Tensor:
    if isinstance(lengths, Segments):
        return lengths.member
    kinds = torch.arange(lengths.shape[0], device=value.device)
    return kinds.repeat_interleave(lengths.to(value.device), output_size=value.shape[0])
