"""Neighbour aggregations in plain torch: the specification, and what serves where no kernel is compiled.

Every function takes :class:`~sylvie_fx.kernels.aggregate_layout.Rows`: each edge reads the row ``column_index`` of one
operand and belongs to the row ``row_index`` of the result. ``x`` is ``[columns, H, D]`` (heads, values a head); a
weight is ``[edges, H]``, edge values lie in natural order. Nothing here is differentiated: gradients are explicit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from sylvie_fx.kernels.aggregate_layout import Rows
from sylvie_fx.kernels.dropout import Drop

Combination = Literal["add", "sub", "mul"]


def _messages(rows: Rows, x: Tensor, index: Tensor, weight: Tensor | None) -> Tensor:
    messages = x.index_select(0, index)
    if weight is not None and rows.part is not None:
        weight = weight.index_select(0, rows.part.numbers)
    return messages if weight is None else messages * weight.unsqueeze(-1)


def _for_all(rows: Rows, values: Tensor) -> Tensor:
    """Results of a part's edges among zeros for the others."""
    if rows.part is None:
        return values
    return values.new_zeros(rows.edge_values, *values.shape[1:]).index_copy(0, rows.part.numbers, values)


def sum_rows(rows: Rows, x: Tensor, weight: Tensor | None, divisors: Tensor | None) -> Tensor:
    """``[rows, H, D]``: the sum of each row's messages, divided by ``divisors`` ``[rows]``; zero without edges."""
    out = x.new_zeros(rows.rows, *x.shape[1:]).index_add_(
        0, rows.row_index, _messages(rows, x, rows.column_index, weight)
    )
    return out if divisors is None else out / divisors.view(-1, 1, 1)


def continue_sum(
    rows: Rows, targets: Tensor, x: Tensor, weight: Tensor | None, divisors: Tensor | None, out: Tensor
) -> None:
    """Add each row's messages to row ``targets[row]`` of ``out`` ``[., H, D]`` and divide that by ``divisors[row]``.

    Args:
        rows: The edges.
        targets: int64 ``[rows]``, no row twice.
        x: ``[columns, H, D]``.
        weight: ``[edges, H]`` or None.
        divisors: int64 ``[rows]`` or None.
        out: The sums so far; other rows than ``targets`` are left alone.
    """
    sums = out.index_select(0, targets).index_add_(0, rows.row_index, _messages(rows, x, rows.column_index, weight))
    out.index_copy_(0, targets, sums if divisors is None else sums / divisors.view(-1, 1, 1))


def extreme_rows(
    rows: Rows, x: Tensor, weight: Tensor | None, smallest: bool, count: bool
) -> tuple[Tensor, Tensor | None]:
    """``[rows, H, D]``: each row's largest (smallest) message, zero without edges; ``count``: how many equal it."""
    messages = _messages(rows, x, rows.column_index, weight)
    index = rows.row_index.view(-1, 1, 1).expand_as(messages)
    out = x.new_zeros(rows.rows, *x.shape[1:])
    out = out.scatter_reduce(0, index, messages, "amin" if smallest else "amax", include_self=False)
    if not count:
        return out, None
    equal = (messages == out.index_select(0, rows.row_index)).to(x.dtype)
    return out, torch.zeros_like(out).index_add_(0, rows.row_index, equal)


def continue_extreme(
    rows: Rows,
    targets: Tensor,
    before: Tensor,
    x: Tensor,
    weight: Tensor | None,
    smallest: bool,
    out: Tensor,
    ties: Tensor | None,
) -> None:
    """Let each row's messages compete with row ``targets[row]`` of ``out``, the extreme of ``before[row]`` messages.

    Args:
        rows: The edges; every row has one.
        targets: int64 ``[rows]``, no row twice.
        before: int64 ``[rows]``; where it is zero, what stands in ``out`` does not count.
        x: ``[columns, H, D]``.
        weight: ``[edges, H]`` or None.
        smallest: Keep the smallest, not the largest.
        out: ``[., H, D]``, the extremes so far; other rows than ``targets`` are left alone.
        ties: ``[., H, D]``, how many messages are equal to them, kept up to date; or None.
    """
    new, equal = extreme_rows(rows, x, weight, smallest, True)
    assert equal is not None
    old, empty = out.index_select(0, targets), (before == 0).view(-1, 1, 1)
    beyond = (new < old if smallest else new > old) | new.isnan() | empty
    out.index_copy_(0, targets, new.where(beyond, old))
    if ties is not None:
        known = ties.index_select(0, targets)
        ties.index_copy_(0, targets, equal.where(beyond, known + equal * (new == old)))


def ties_rows(rows: Rows, x: Tensor, weight: Tensor | None, extreme: Tensor, share: Tensor) -> Tensor:
    """The gradient of ``x`` through :func:`extreme_rows`.

    Args:
        rows: The transpose of the rows that ``extreme`` was computed with.
        x: ``[rows, H, D]``.
        weight: ``[edges, H]`` or None.
        extreme: ``[columns, H, D]``.
        share: ``[columns, H, D]``, the gradient that each of the messages equal to the extreme gets.
    """
    messages = _messages(rows, x, rows.row_index, weight)
    shares = _messages(rows, share, rows.column_index, weight)
    shares = shares.where(messages == extreme.index_select(0, rows.column_index), 0)
    return torch.zeros_like(x).index_add_(0, rows.row_index, shares)


def dot_edges(rows: Rows, u: Tensor, v: Tensor) -> Tensor:
    """``[edges, H]``: ``u`` ``[columns, H, D]`` times ``v`` ``[rows, H, D]`` at an edge's ends, summed over D."""
    return _for_all(rows, (u.index_select(0, rows.column_index) * v.index_select(0, rows.row_index)).sum(-1))


def tie_dot_edges(rows: Rows, u: Tensor, v: Tensor, weight: Tensor, extreme: Tensor) -> Tensor:
    """As :func:`dot_edges`, of those values only whose message is the row's ``extreme`` ``[rows, H, D]``."""
    is_extreme = _messages(rows, u, rows.column_index, weight) == extreme.index_select(0, rows.row_index)
    products = u.index_select(0, rows.column_index) * v.index_select(0, rows.row_index)
    return _for_all(rows, products.where(is_extreme, 0).sum(-1))


def combine_edges(rows: Rows, u: Tensor, v: Tensor, op: Combination) -> Tensor:
    """``[edges, H, D]``: ``u`` ``[columns, H, D]`` op ``v`` ``[rows, H, D]`` at the two ends of each edge."""
    left, right = u.index_select(0, rows.column_index), v.index_select(0, rows.row_index)
    if op == "add":
        return _for_all(rows, left + right)
    return _for_all(rows, left - right if op == "sub" else left * right)


def softmax_edges(rows: Rows, e: Tensor) -> Tensor:
    """``[edges, H]``: the softmax of ``e`` over the edges of each row."""
    index = rows.row_index.view(-1, 1).expand_as(e)
    largest = e.new_zeros(rows.rows, e.shape[1]).scatter_reduce(0, index, e, "amax", include_self=False)
    powers = (e - largest.index_select(0, rows.row_index)).exp()
    total = torch.zeros_like(largest).index_add_(0, rows.row_index, powers)
    return powers / total.index_select(0, rows.row_index)


def softmax_gradient(rows: Rows, y: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of ``e`` from that of ``y = softmax_edges(rows, e)``."""
    total = y.new_zeros(rows.rows, y.shape[1]).index_add_(0, rows.row_index, y * gradient)
    return y * (gradient - total.index_select(0, rows.row_index))


def _raw_scores(rows: Rows, source_score: Tensor, target_score: Tensor) -> Tensor:
    return source_score.index_select(0, rows.column_index) + target_score.index_select(0, rows.row_index)


def attention(
    rows: Rows, x: Tensor, source_score: Tensor, target_score: Tensor, negative_slope: float, drop: Drop | None
) -> tuple[Tensor, Tensor]:
    """Softmax-weighted sums of neighbours.

    Args:
        rows: The edges.
        x: ``[columns, H, D]``.
        source_score: ``[columns, H]``.
        target_score: ``[rows, H]``.
        negative_slope: Of the leaky ReLU on the sum of the two.
        drop: Dropout of the softmax, with a key for each edge; or None.

    Returns:
        The sums ``[rows, H, D]``, and the softmax ``[edges, H]`` in the sorted order of the edges, negative where dropped.
    """
    scores = torch.nn.functional.leaky_relu(_raw_scores(rows, source_score, target_score), negative_slope)
    alpha, kept = softmax_edges(rows, scores), None
    weight = alpha
    if drop is not None:
        kept = drop.mask(alpha.shape[1])
        weight = alpha * kept.to(alpha.dtype).mul_(drop.scale)
        alpha = torch.where(kept, alpha, -alpha)
    return sum_rows(rows, x, weight, None), alpha if rows.edge_ids is None else alpha[rows.edge_ids]


def attention_gradient(
    rows: Rows,
    x: Tensor,
    source_score: Tensor,
    target_score: Tensor,
    negative_slope: float,
    drop: Drop | None,
    alpha: Tensor,
    gradient: Tensor,
) -> tuple[Tensor, Tensor]:
    """What :func:`attention` leaves to be summed by source, and the gradient of ``target_score``.

    Args:
        alpha: ``[edges, H]`` as it was returned.
        gradient: ``[rows, H, D]`` of the sums; the others as for :func:`attention`.

    Returns:
        ``[edges, 2, H]`` in sorted order: each edge's weight, and the gradient of its raw score; and ``[rows, H]``.
    """
    ids = rows.edge_ids
    signed = alpha if ids is None else torch.empty_like(alpha).index_copy_(0, ids.long(), alpha)
    softmax, factor = signed.abs(), torch.ones((), dtype=alpha.dtype, device=alpha.device)
    if drop is not None:
        factor = signed.signbit().logical_not_().to(alpha.dtype).mul_(drop.scale)
    of_scores = softmax_gradient(rows, softmax, dot_edges(rows, x, gradient) * factor)
    positive = _raw_scores(rows, source_score, target_score) > 0
    of_raw = torch.where(positive, of_scores, of_scores * negative_slope)
    values = torch.stack((softmax * factor, of_raw), dim=1)
    of_target = torch.zeros_like(target_score).index_add_(0, rows.row_index, of_raw)
    return values if ids is None else values[ids], of_target


def attention_sources(
    rows: Rows, places: Tensor | None, edge_values: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` ``[rows, H, D]`` and ``source_score`` ``[rows, H]`` through :func:`attention`.

    Args:
        rows: The transpose of the rows that :func:`attention` was computed with.
        places: int ``[edges]``, where each of its edges, in its own sorted order, stands in that of the others; None: at once.
        edge_values: ``[edges, 2, H]`` from :func:`attention_gradient`.
        gradient: ``[columns, H, D]`` of the sums.
    """
    found = edge_values if places is None else edge_values[places]
    ids = rows.edge_ids
    values = found if ids is None else torch.empty_like(found).index_copy_(0, ids.long(), found)
    of_source = values.new_zeros(rows.rows, values.shape[2]).index_add_(0, rows.row_index, values[:, 1])
    return sum_rows(rows, gradient, values[:, 0], None), of_source


_PIECE = 1 << 16  # values of edges that are in the making at once


def _sums(rows: Rows, x: Tensor, own: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """``x[column] + own[row]`` of one piece of the edges after the other, in memory that the next piece takes."""
    step = max(_PIECE // max(own.shape[1] * own.shape[2], 1), 1)
    a, b = (own.new_empty(min(step, rows.edges), *own.shape[1:]) for _ in range(2))
    for start in range(0, rows.edges, step):
        at = slice(start, min(start + step, rows.edges))
        size = at.stop - start
        torch.index_select(x, 0, rows.column_index[at], out=a[:size])
        torch.index_select(own, 0, rows.row_index[at], out=b[:size])
        yield at, a[:size].add_(b[:size])


def scores(rows: Rows, x: Tensor, own: Tensor, vector: Tensor, negative_slope: float) -> Tensor:
    """``[edges, H]``: ``vector`` ``[H, D]`` times the leaky ReLU of ``x`` ``[columns, H, D]`` plus ``own`` ``[rows, H, D]``."""
    out = own.new_empty(rows.edges, own.shape[1])
    for at, z in _sums(rows, x, own):
        torch.sum(torch.nn.functional.leaky_relu_(z, negative_slope).mul_(vector), -1, out=out[at])
    return out


def scores_gradient(
    rows: Rows, x: Tensor, own: Tensor, vector: Tensor, negative_slope: float, gradient: Tensor, of_vector: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of ``own`` and, where it is asked for, of ``vector`` through :func:`scores`.

    Args:
        rows: The edges; their transpose, with ``x`` and ``own`` exchanged, gives the gradient of ``x``.
        x: ``[columns, H, D]``.
        own: ``[rows, H, D]``.
        vector: ``[H, D]``.
        negative_slope: Of the leaky ReLU.
        gradient: ``[edges, H]``, of the scores.
        of_vector: Whether the gradient of the vector is asked for.
    """
    of_own, total = torch.zeros_like(own), torch.zeros_like(vector)
    for at, z in _sums(rows, x, own):
        piece = gradient[at].unsqueeze(-1)
        slopes = (z > 0).to(z.dtype).mul_(1.0 - negative_slope).add_(negative_slope).mul_(piece)
        of_own.index_add_(0, rows.row_index[at], slopes * vector)
        total += slopes.mul_(z).sum(0)
    return of_own, total if of_vector else None
