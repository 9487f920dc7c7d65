"""The sylvie:: operators: neighbour gathers and scatters, and everything that crosses ranks.

Gather, scatter and the keyed dropout are ordinary operators and run anywhere. An operator that crosses ranks has a
schema and a shape, so that programs print and propagate, but only a machine (runtime/machine.py) can run it: it
needs the transport and the exchange plan that its ``slot`` names.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.ir.errors import BranchError, SylvieError

_library = torch.library.Library("sylvie", "DEF")  # keeps the registrations alive for the life of the process


def _gather(x: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    return x.index_select(dim, index)


def _scatter(e: Tensor, index: Tensor, rows: int, reduce: str, dim: int = 0) -> Tensor:
    shape = list(e.shape)
    shape[dim] = rows
    out = e.new_zeros(shape)
    if reduce == "sum":
        return out.index_add(dim, index, e)
    view = [1] * e.dim()
    view[dim] = -1
    return out.scatter_reduce(dim, index.view(view).expand_as(e), e, reduce, include_self=False)


def _spmm(x: Tensor, src: Tensor, dst: Tensor, weight: Tensor | None, rows: int, reduce: str) -> Tensor:
    messages = x.index_select(0, src)
    if weight is not None:
        messages = messages * weight.reshape(*weight.shape, *[1] * (messages.dim() - weight.dim()))
    return _scatter(messages, dst, rows, reduce)


def _segment_softmax(e: Tensor, index: Tensor, rows: int) -> Tensor:
    powers = (e - _scatter(e.detach(), index, rows, "amax").index_select(0, index)).exp()
    return powers / _scatter(powers, index, rows, "sum").index_select(0, index)


def _sddmm(u: Tensor, src: Tensor, v: Tensor, dst: Tensor, op: str) -> Tensor:
    left, right = u.index_select(0, src), v.index_select(0, dst)
    if op in ("add", "sub"):
        return left + right if op == "add" else left - right
    return left * right if op == "mul" else (left * right).sum(-1)


def _row_dots(x: Tensor, vectors: list[Tensor]) -> Tensor:
    return torch.stack([(x * vector).sum(-1) for vector in vectors])


def _edge_scores(u: Tensor, src: Tensor, v: Tensor, dst: Tensor, vector: Tensor, negative_slope: float) -> Tensor:
    total = u.index_select(0, src) + v.index_select(0, dst)
    return (torch.nn.functional.leaky_relu(total, negative_slope) * vector).sum(-1)


def _attention(
    x: Tensor,
    src: Tensor,
    dst: Tensor,
    source_score: Tensor,
    target_score: Tensor,
    keep: Tensor | None,
    rows: int,
    negative_slope: float,
) -> Tensor:
    scores = torch.nn.functional.leaky_relu(_sddmm(source_score, src, target_score, dst, "add"), negative_slope)
    weight = _segment_softmax(scores, dst, rows)
    weight = weight if keep is None else weight * keep
    weight = weight.reshape(weight.shape[0], math.prod(weight.shape[1:]))
    heads = x.reshape(x.shape[0], weight.shape[1], -1)
    return _spmm(heads, src, dst, weight, rows, "sum").view(rows, *x.shape[1:])


def _signed(value: int) -> int:
    """The 32 low bits of a number as int32 holds them."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


_GOLDEN, _MIX_A, _MIX_B = _signed(0x9E3779B9), _signed(0x85EBCA6B), _signed(0xC2B2AE35)
_CHUNK = 1 << 16  # entries of a mask made at once, so that its passes stay in the cache


def _mix_(h: Tensor) -> Tensor:
    """The murmur3 finaliser in place on int32, whose products wrap; masked shifts are those of unsigned numbers."""
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(_MIX_A)
    h.bitwise_xor_((h >> 13).bitwise_and_(0x7FFFF)).mul_(_MIX_B)
    return h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF))


def keep_mask(keys: Tensor, columns: int, p: float, key: int) -> Tensor:
    """Which entries a dropout keeps, as a pure function of the row's global index, the column and ``key``.

    Args:
        keys: int64 ``[rows]``, global row indices.
        columns: Entries a row has.
        p: Probability that an entry is dropped.
        key: Any int; derived from the seed, the step and the call site.

    Returns:
        bool ``[rows, columns]``, independent of how rows are spread over ranks.
    """
    row = _mix_(keys.to(torch.int32) ^ ((keys >> 32).to(torch.int32) * _GOLDEN) ^ _signed(key))
    row = _mix_(row ^ _signed(key >> 32)).unsqueeze(1)
    column = torch.arange(columns, dtype=torch.int32, device=keys.device) * _GOLDEN
    threshold = min(round(p * 4294967296.0), 0xFFFFFFFF) - 2**31
    mask = torch.empty(len(keys), columns, dtype=torch.bool, device=keys.device)
    step = max(_CHUNK // max(columns, 1), 1) if keys.device.type == "cpu" else max(len(keys), 1)
    for start in range(0, len(keys), step):
        bits = _mix_(row[start : start + step] ^ column).bitwise_xor_(-(2**31))  # unsigned order as signed order
        torch.ge(bits, threshold, out=mask[start : start + step])
    return mask


def _node_dropout(x: Tensor, keys: Tensor, p: float, site: int, dim: int = 0, relu: bool = False) -> Tensor:
    raise SylvieError("sylvie::node_dropout needs the step and the seed", remedy="run the program through a Machine")


def keyed_dropout(x: Tensor, keys: Tensor, p: float, key: int, dim: int = 0, relu: bool = False) -> Tensor:
    """Dropout whose mask is a function of (key, global row, column): the same for every number of ranks.

    Args:
        x: ``[..., rows, ...]``, rows along ``dim``.
        keys: int64 ``[rows]``, global row indices.
        p: Probability of dropping an entry.
        key: Derived from seed, step and call site.
        dim: The dimension that carries the rows.
        relu: Whether negative entries are zero first.
    """
    x = x.relu() if relu else x
    if p >= 1.0:
        return x * 0.0
    moved = x.movedim(dim, 0)
    columns = moved[0].numel() if moved.shape[0] else 1
    mask = keep_mask(keys, max(columns, 1), p, key)
    mask = mask.view(moved.shape) if moved.numel() else mask.new_zeros(moved.shape)
    return x * mask.to(x.dtype).mul_(1.0 / (1.0 - p)).movedim(0, dim)


def check(condition: Tensor | bool, decided: str, where: str) -> None:
    """A decision of the capture that the prologue holds against the real graph.

    Args:
        condition: Whether it holds.
        decided: What was decided.
        where: The user's line.

    Raises:
        BranchError: It does not.
    """
    if not bool(condition):
        raise BranchError(f"the forward pass branches on the graph, captured where {decided}", where=where or None,
                          why="on this graph that does not hold",
                          remedy="express the branch with torch.where, or move it out of forward")  # fmt: skip


def check_size(value: Any, path: list[int | str], expected: int, decided: str, where: str = "") -> None:
    """As :func:`check`, of a size that depends on values and was taken for a number.

    Args:
        value: What an operator returned.
        path: How the size is found in it: indices, and ``size`` for the shape of a tensor.
        expected: What the capture took it for.
        decided: As a sentence.
        where: The user's line.
    """
    for step in path:
        value = value[step] if isinstance(step, int) else getattr(value, step)()
    check(value == expected, decided, where)


def _update_running(
    mean: Tensor, variance: Tensor, new_mean: Tensor, new_variance: Tensor, rows: int, momentum: float
) -> None:
    with torch.no_grad():
        unbiased = new_variance.detach() * (rows / max(rows - 1, 1))
        mean.lerp_(new_mean.detach().to(mean.dtype), momentum)
        variance.lerp_(unbiased.to(variance.dtype), momentum)


def _needs_machine(name: str) -> SylvieError:
    return SylvieError(f"sylvie::{name} crosses ranks", remedy="run the program through a Machine")


def _define(schema: str, implementation: object, key: str = "CompositeImplicitAutograd") -> None:
    _library.define(schema)
    _library.impl(schema.split("(")[0], implementation, key)


def _crossing(name: str) -> object:
    def run(*args: object) -> Tensor:
        raise _needs_machine(name)

    return run


_define("gather(Tensor x, Tensor index, int dim=0) -> Tensor", _gather)
_define("scatter(Tensor e, Tensor index, SymInt rows, str reduce, int dim=0) -> Tensor", _scatter)
_define("spmm(Tensor x, Tensor src, Tensor dst, Tensor? weight, SymInt rows, str reduce) -> Tensor", _spmm)
_define("segment_softmax(Tensor e, Tensor index, SymInt rows) -> Tensor", _segment_softmax)
_define("sddmm(Tensor u, Tensor src, Tensor v, Tensor dst, str op) -> Tensor", _sddmm)
_define(
    "edge_scores(Tensor u, Tensor src, Tensor v, Tensor dst, Tensor vector, float negative_slope) -> Tensor",
    _edge_scores,
)
_define(
    "attention(Tensor x, Tensor src, Tensor dst, Tensor source_score, Tensor target_score, Tensor? keep, "
    "SymInt rows, float negative_slope) -> Tensor",
    _attention,
)
_define("row_dots(Tensor x, Tensor[] vectors) -> Tensor", _row_dots)
_define("node_dropout(Tensor x, Tensor? keys, float p, int site, int dim=0, bool relu=False) -> Tensor", _node_dropout)
_define(
    "update_running(Tensor(a!) mean, Tensor(b!) variance, Tensor new_mean, Tensor new_variance, "
    "SymInt rows, float momentum) -> ()",
    _update_running,
)
for _schema in (
    "halo_exchange(Tensor x, int slot, int dim=0, int site=-1) -> Tensor",
    "halo_reduce(Tensor x, int slot, int dim=0, int site=-1) -> Tensor",
    "relayout(Tensor x, int slot, int dim=0, int site=-1) -> Tensor",
    "halo_start(Tensor x, int slot, int site) -> (Tensor own, Tensor ticket)",
    "halo_wait(Tensor ticket, int slot, int site) -> Tensor",
    "spmm_inner(Tensor own, Tensor src, Tensor dst, Tensor? weight, SymInt rows, str reduce, int slot) -> Tensor",
    "spmm_halo(Tensor partial, Tensor halo, Tensor src, Tensor dst, Tensor? weight, str reduce, int slot) -> Tensor",
    "sync_start(Tensor[] parameters, int[] positions) -> Tensor[]",
    "sync_finish(Tensor[] parameters) -> Tensor[]",
    "all_reduce(Tensor x, str op, bool shared=False) -> Tensor",
    "all_reduces(Tensor[] xs, str op, bool shared=False) -> Tensor[]",
    "replicated_output(Tensor x) -> Tensor",
    "sync_gradients(Tensor[] parameters) -> Tensor[]",
):
    _define(_schema, _crossing(_schema.split("(")[0]))

gather = torch.ops.sylvie.gather.default
scatter = torch.ops.sylvie.scatter.default
spmm = torch.ops.sylvie.spmm.default
segment_softmax = torch.ops.sylvie.segment_softmax.default
sddmm = torch.ops.sylvie.sddmm.default
edge_scores = torch.ops.sylvie.edge_scores.default
row_dots = torch.ops.sylvie.row_dots.default
attention = torch.ops.sylvie.attention.default
node_dropout = torch.ops.sylvie.node_dropout.default
update_running = torch.ops.sylvie.update_running.default
halo_exchange = torch.ops.sylvie.halo_exchange.default
halo_reduce = torch.ops.sylvie.halo_reduce.default
relayout = torch.ops.sylvie.relayout.default
halo_start = torch.ops.sylvie.halo_start.default
halo_wait = torch.ops.sylvie.halo_wait.default
spmm_inner = torch.ops.sylvie.spmm_inner.default
spmm_halo = torch.ops.sylvie.spmm_halo.default
sync_start = torch.ops.sylvie.sync_start.default
sync_finish = torch.ops.sylvie.sync_finish.default
all_reduce = torch.ops.sylvie.all_reduce.default
all_reduces = torch.ops.sylvie.all_reduces.default
replicated_output = torch.ops.sylvie.replicated_output.default
sync_gradients = torch.ops.sylvie.sync_gradients.default

CROSSING = frozenset({
    halo_exchange, halo_reduce, relayout, halo_start, halo_wait, spmm_inner, spmm_halo,
    all_reduce, all_reduces, replicated_output, sync_gradients, sync_start, sync_finish,
})  # fmt: skip
"""Operators that only a machine can run."""

EXCHANGES = frozenset({halo_exchange, halo_reduce, relayout, halo_start})
"""Operators that send rows. Their first arguments are the rows and the slot."""


def exchange_site(node: Any) -> int | None:
    """The site of a node that sends rows; None where quantize has not numbered it, or the node sends none."""
    if node.target is halo_start:
        return int(node.args[2])
    if node.target in EXCHANGES and len(node.args) > 3:
        return int(node.args[3])
    return None
