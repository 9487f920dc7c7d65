"""The aggregation kernels in C++, as functions of tensors.

Same functions as :mod:`sylvie_fx.kernels.aggregate_reference`, of dense float32 or float64 tensors in host memory.
Sums are taken in another order than torch's, so results agree to rounding; they do not depend on the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sylvie_fx.kernels.aggregate_layout import Rows
from sylvie_fx.kernels.aggregate_library import (
    BEST_ISA,
    AttentionCall,
    EdgeCall,
    ExtremeCall,
    ScoresCall,
    SoftmaxCall,
    SourcesCall,
    SumCall,
    TiesCall,
    launch,
    pointer,
)
from sylvie_fx.kernels.aggregate_reference import Combination
from sylvie_fx.kernels.dropout import Drop

_OPERATIONS = {"add": 0, "sub": 1, "mul": 2, "dot": 3, "tie_dot": 4}


def _weights(rows: Rows, weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Dense weights of the edges, and the numbers to find them by."""
    if weight is None:
        return None, None
    values, ids = rows.sorted_values(weight)
    return values.contiguous(), ids


def sum_rows(rows: Rows, x: Tensor, weight: Tensor | None, divisors: Tensor | None, *, isa: int = BEST_ISA) -> Tensor:
    """As :func:`sylvie_fx.kernels.aggregate_reference.sum_rows`.

    Args:
        rows: The edges.
        x: ``[columns, H, D]``.
        weight: ``[edges, H]`` or None.
        divisors: int64 ``[rows]`` or None.
        isa: The best instruction set to use, a key of ``ISA_NAMES``; the machine's own is the other bound.
    """
    out = x.new_empty(rows.rows, x.shape[1], x.shape[2])
    _sum_into(rows, x, weight, divisors, None, out, isa)
    return out


def continue_sum(
    rows: Rows,
    targets: Tensor,
    x: Tensor,
    weight: Tensor | None,
    divisors: Tensor | None,
    out: Tensor,
    *,
    isa: int = BEST_ISA,
) -> None:
    """As :func:`sylvie_fx.kernels.aggregate_reference.continue_sum`; ``out`` is dense."""
    _sum_into(rows, x, weight, divisors, targets, out, isa)


def _sum_into(
    rows: Rows,
    x: Tensor,
    weight: Tensor | None,
    divisors: Tensor | None,
    targets: Tensor | None,
    out: Tensor,
    isa: int,
) -> None:
    x, (weight, ids) = x.contiguous(), _weights(rows, weight)
    call = SumCall(
        x.data_ptr(), pointer(weight), out.data_ptr(), pointer(divisors), pointer(targets), x.shape[1], x.shape[2]
    )
    launch("sum", rows, call, x.dtype, isa, ids)


def extreme_rows(
    rows: Rows, x: Tensor, weight: Tensor | None, smallest: bool, count: bool, *, isa: int = BEST_ISA
) -> tuple[Tensor, Tensor | None]:
    """As :func:`sylvie_fx.kernels.aggregate_reference.extreme_rows`."""
    out = x.new_empty(rows.rows, x.shape[1], x.shape[2])
    ties = torch.empty_like(out) if count else None
    _extreme_into(rows, x, weight, smallest, None, None, out, ties, isa)
    return out, ties


def continue_extreme(
    rows: Rows,
    targets: Tensor,
    before: Tensor,
    x: Tensor,
    weight: Tensor | None,
    smallest: bool,
    out: Tensor,
    ties: Tensor | None,
    *,
    isa: int = BEST_ISA,
) -> None:
    """As :func:`sylvie_fx.kernels.aggregate_reference.continue_extreme`; ``out`` and ``ties`` are dense."""
    _extreme_into(rows, x, weight, smallest, targets, before, out, ties, isa)


def _extreme_into(
    rows: Rows,
    x: Tensor,
    weight: Tensor | None,
    smallest: bool,
    targets: Tensor | None,
    before: Tensor | None,
    out: Tensor,
    ties: Tensor | None,
    isa: int,
) -> None:
    x, (weight, ids) = x.contiguous(), _weights(rows, weight)
    call = ExtremeCall(
        x.data_ptr(), pointer(weight), out.data_ptr(), pointer(ties), pointer(targets), pointer(before),
        x.shape[1], x.shape[2], smallest, 0,
    )  # fmt: skip
    launch("extreme", rows, call, x.dtype, isa, ids)


def ties_rows(
    rows: Rows, x: Tensor, weight: Tensor | None, extreme: Tensor, share: Tensor, *, isa: int = BEST_ISA
) -> Tensor:
    """As :func:`sylvie_fx.kernels.aggregate_reference.ties_rows`."""
    x, extreme, share = x.contiguous(), extreme.contiguous(), share.contiguous()
    weight, ids = _weights(rows, weight)
    out = torch.empty_like(x)
    call = TiesCall(
        x.data_ptr(), pointer(weight), extreme.data_ptr(), share.data_ptr(), out.data_ptr(), x.shape[1], x.shape[2]
    )
    launch("ties", rows, call, x.dtype, isa, ids)
    return out


def dot_edges(rows: Rows, u: Tensor, v: Tensor, *, isa: int = BEST_ISA) -> Tensor:
    """As :func:`sylvie_fx.kernels.aggregate_reference.dot_edges`."""
    return _edges(rows, u, v, "dot", None, None, isa).squeeze(-1)


def tie_dot_edges(rows: Rows, u: Tensor, v: Tensor, weight: Tensor, extreme: Tensor, *, isa: int = BEST_ISA) -> Tensor:
    """As :func:`sylvie_fx.kernels.aggregate_reference.tie_dot_edges`."""
    return _edges(rows, u, v, "tie_dot", weight.contiguous(), extreme.contiguous(), isa).squeeze(-1)


def combine_edges(rows: Rows, u: Tensor, v: Tensor, op: Combination, *, isa: int = BEST_ISA) -> Tensor:
    """As :func:`sylvie_fx.kernels.aggregate_reference.combine_edges`."""
    return _edges(rows, u, v, op, None, None, isa)


def _edges(
    rows: Rows, u: Tensor, v: Tensor, op: str, weight: Tensor | None, extreme: Tensor | None, isa: int
) -> Tensor:
    u, v, heads, dim = u.contiguous(), v.contiguous(), u.shape[1], u.shape[2]
    make = u.new_empty if rows.part is None else u.new_zeros
    out = make((rows.edge_values, heads, 1 if op in ("dot", "tie_dot") else dim))
    call = EdgeCall(
        u.data_ptr(), v.data_ptr(), out.data_ptr(), pointer(weight), pointer(extreme), heads, dim, _OPERATIONS[op], 0
    )
    launch("edges", rows, call, u.dtype, isa, rows.edge_ids)
    return out


def softmax_edges(rows: Rows, e: Tensor, *, isa: int = BEST_ISA) -> Tensor:
    """As :func:`sylvie_fx.kernels.aggregate_reference.softmax_edges`."""
    e = e.contiguous()
    out = torch.empty_like(e)
    launch("softmax", rows, SoftmaxCall(e.data_ptr(), None, out.data_ptr(), e.shape[1]), e.dtype, isa, rows.edge_ids)
    return out


def softmax_gradient(rows: Rows, y: Tensor, gradient: Tensor, *, isa: int = BEST_ISA) -> Tensor:
    """As :func:`sylvie_fx.kernels.aggregate_reference.softmax_gradient`."""
    y, gradient = y.contiguous(), gradient.contiguous()
    out = torch.empty_like(y)
    call = SoftmaxCall(y.data_ptr(), gradient.data_ptr(), out.data_ptr(), y.shape[1])
    launch("softmax", rows, call, y.dtype, isa, rows.edge_ids)
    return out


def attention(
    rows: Rows,
    x: Tensor,
    source_score: Tensor,
    target_score: Tensor,
    negative_slope: float,
    drop: Drop | None,
    *,
    isa: int = BEST_ISA,
) -> tuple[Tensor, Tensor]:
    """As :func:`sylvie_fx.kernels.aggregate_reference.attention`."""
    x, heads, dim = x.contiguous(), x.shape[1], x.shape[2]
    out, alpha = x.new_empty(rows.rows, heads, dim), x.new_empty(rows.edges, heads)
    _attend(rows, x, source_score, target_score, negative_slope, drop, alpha, isa, out=out)
    return out, alpha


def attention_gradient(
    rows: Rows,
    x: Tensor,
    source_score: Tensor,
    target_score: Tensor,
    negative_slope: float,
    drop: Drop | None,
    alpha: Tensor,
    gradient: Tensor,
    *,
    isa: int = BEST_ISA,
) -> tuple[Tensor, Tensor]:
    """As :func:`sylvie_fx.kernels.aggregate_reference.attention_gradient`."""
    x, gradient, heads = x.contiguous(), gradient.contiguous(), x.shape[1]
    values, of_target = x.new_empty(rows.edges, 2, heads), x.new_empty(rows.rows, heads)
    results = {"gradient": gradient, "edge_values": values, "target_gradient": of_target}
    _attend(
        rows, x, source_score, target_score, negative_slope, drop, alpha.contiguous(), isa, backward=True, **results
    )
    return values, of_target


def _attend(
    rows: Rows, x: Tensor, source_score: Tensor, target_score: Tensor, negative_slope: float, drop: Drop | None,
    alpha: Tensor, isa: int, backward: bool = False, **others: Tensor,
) -> None:  # fmt: skip
    source_score, target_score = source_score.contiguous(), target_score.contiguous()
    keys = ids = None
    if drop is not None:
        keys, ids = rows.sorted_values(drop.keys)
        keys = keys.contiguous()
    call = AttentionCall(
        x=x.data_ptr(), source_score=source_score.data_ptr(), target_score=target_score.data_ptr(), keys=pointer(keys),
        alpha=alpha.data_ptr(), heads=x.shape[1], dim=x.shape[2], negative_slope=negative_slope, backward=backward,
        **{name: tensor.data_ptr() for name, tensor in others.items()},
    )  # fmt: skip
    if drop is not None:
        call.scale, call.threshold, call.key = drop.scale, drop.threshold, drop.key & 0xFFFFFFFFFFFFFFFF
    launch("attention", rows, call, x.dtype, isa, ids)


def attention_sources(
    rows: Rows, places: Tensor | None, edge_values: Tensor, gradient: Tensor, *, isa: int = BEST_ISA
) -> tuple[Tensor, Tensor]:
    """As :func:`sylvie_fx.kernels.aggregate_reference.attention_sources`."""
    gradient, edge_values, (heads, dim) = gradient.contiguous(), edge_values.contiguous(), gradient.shape[1:]
    out, of_source = gradient.new_empty(rows.rows, heads, dim), gradient.new_empty(rows.rows, heads)
    call = SourcesCall(
        gradient.data_ptr(), edge_values.data_ptr(), out.data_ptr(), of_source.data_ptr(), heads, dim
    )  # fmt: skip
    launch("sources", rows, call, gradient.dtype, isa, places)
    return out, of_source


def scores(rows: Rows, x: Tensor, own: Tensor, vector: Tensor, negative_slope: float, *, isa: int = BEST_ISA) -> Tensor:
    """As :func:`sylvie_fx.kernels.aggregate_reference.scores`."""
    x, own, vector = x.contiguous(), own.contiguous(), vector.contiguous()
    heads, dim = vector.shape
    out = x.new_empty(rows.edges, heads)
    call = ScoresCall(
        x.data_ptr(), own.data_ptr(), vector.data_ptr(), None, out.data_ptr(), None, heads, dim, negative_slope
    )
    launch("scores", rows, call, x.dtype, isa, rows.edge_ids)
    return out


def scores_gradient(
    rows: Rows,
    x: Tensor,
    own: Tensor,
    vector: Tensor,
    negative_slope: float,
    gradient: Tensor,
    of_vector: bool,
    *,
    isa: int = BEST_ISA,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`sylvie_fx.kernels.aggregate_reference.scores_gradient`."""
    x, own, vector, gradient = x.contiguous(), own.contiguous(), vector.contiguous(), gradient.contiguous()
    heads, dim = vector.shape
    out = own.new_empty(rows.rows, heads, dim)
    parts = torch.empty_like(out) if of_vector else None
    call = ScoresCall(
        x.data_ptr(), own.data_ptr(), vector.data_ptr(), gradient.data_ptr(), out.data_ptr(), pointer(parts),
        heads, dim, negative_slope,
    )  # fmt: skip
    if rows.edges == 0:  # an empty gradient may have no address, which would ask for scores
        return out.zero_(), None if parts is None else parts.sum(0).zero_()
    launch("scores", rows, call, x.dtype, isa, rows.edge_ids)
    return out, None if parts is None else parts.sum(0)
