"""Placement rules of operators that move or reshape dimensions."""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch

from sylvie_fx.ir.placement import REPLICATED, Placement, Rows
from sylvie_fx.ir.rules import Call, Outcome, Refused, is_replicated, placement_rule, pointwise, same_rows, wrap

aten = torch.ops.aten

_REMEDY = "keep the dimension that counts nodes or edges intact, in front of the dimensions it is merged with"


def _product(sizes: tuple[sympy.Expr, ...]) -> sympy.Expr:
    return sympy.expand(sympy.prod(sizes)) if sizes else sympy.Integer(1)


@placement_rule(
    aten.view.default, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten, aten.view_as, aten.reshape_as
)
def reshape(call: Call) -> Outcome:
    """A reshape is row-local where the row dimension survives, alone or as the leading factor of a merged dimension."""
    source = call.arg(0)
    place = call.place(source)
    if is_replicated(place):
        return Outcome(REPLICATED)
    assert isinstance(place, Rows)
    shape, out = call.shape(source), call.out_shape
    before = _product(shape[: place.dim])
    rows = sympy.expand(shape[place.dim] / place.factor)
    for dim in range(len(out)):
        if sympy.expand(_product(out[:dim]) - before) != 0:
            continue
        ratio = sympy.simplify(out[dim] / rows)
        if not ratio.is_Integer:
            continue
        factor = int(ratio)
        if factor >= 1:
            return Outcome(Rows(place.space, dim, factor))
    raise Refused("the reshape mixes rows of different nodes or edges", _REMEDY)


@placement_rule(aten.permute)
def permute(call: Call) -> Outcome:
    """Rows move with their dimension."""
    place = call.place(call.arg(0))
    if not isinstance(place, Rows):
        return Outcome(place)
    order = [wrap(d, len(call.out_shape)) for d in call.arg(1)]
    return Outcome(Rows(place.space, order.index(place.dim), place.factor))


@placement_rule(aten.transpose.int, aten.t.default, aten.numpy_T, aten.mT, aten.swapaxes, aten.swapdims, aten.adjoint)
def transpose(call: Call) -> Outcome:
    """Rows move with their dimension."""
    place = call.place(call.arg(0))
    if not isinstance(place, Rows):
        return Outcome(place)
    rank = len(call.out_shape)
    named_dims = call.op in (aten.transpose.int, aten.swapaxes.default, aten.swapdims.default)
    a, b = (wrap(call.arg(1), rank), wrap(call.arg(2), rank)) if named_dims else (rank - 2, rank - 1)
    if rank < 2:
        return Outcome(place)
    return Outcome(Rows(place.space, {a: b, b: a}.get(place.dim, place.dim), place.factor))


@placement_rule(aten.movedim, aten.moveaxis)
def movedim(call: Call) -> Outcome:
    """Rows move with their dimension."""
    place = call.place(call.arg(0))
    if not isinstance(place, Rows):
        return Outcome(place)
    rank = len(call.out_shape)
    source = [wrap(d, rank) for d in _as_list(call.arg(1))]
    target = [wrap(d, rank) for d in _as_list(call.arg(2))]
    order: list[int | None] = [None] * rank
    for s, t in zip(source, target, strict=True):
        order[t] = s
    rest = iter(d for d in range(rank) if d not in source)
    full = [next(rest) if d is None else d for d in order]
    return Outcome(Rows(place.space, full.index(place.dim), place.factor))


def _as_list(value: Any) -> list[int]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


@placement_rule(aten.unsqueeze)
def unsqueeze(call: Call) -> Outcome:
    """A new dimension of size one."""
    place = call.place(call.arg(0))
    if not isinstance(place, Rows):
        return Outcome(place)
    dim = wrap(call.arg(1), len(call.out_shape))
    return Outcome(Rows(place.space, place.dim + (dim <= place.dim), place.factor))


@placement_rule(aten.squeeze)
def squeeze(call: Call) -> Outcome:
    """Dimensions of size one go; a row dimension has no fixed size and stays."""
    place = call.place(call.arg(0))
    if not isinstance(place, Rows):
        return Outcome(place)
    shape = call.shape(call.arg(0))
    dims = (
        range(len(shape)) if call.op is aten.squeeze.default else [wrap(d, len(shape)) for d in _as_list(call.arg(1))]
    )
    gone = [d for d in dims if shape[d] == 1]
    return Outcome(Rows(place.space, place.dim - sum(d < place.dim for d in gone), place.factor))


@placement_rule(aten.expand, aten.expand_as, aten.broadcast_to)
def expand(call: Call) -> Outcome:
    """Broadcasting: rows keep their dimension, counted from the back."""
    source = call.arg(0)
    place = call.place(source)
    rank = len(call.out_shape)
    if isinstance(place, Rows):
        return Outcome(Rows(place.space, place.dim + rank - len(call.shape(source)), place.factor))
    if call.op is aten.expand_as.default and isinstance(other := call.place(call.arg(1)), Rows):
        return Outcome(Rows(other.space, other.dim, other.factor))
    return Outcome(call.rows_of_size(call.out_shape) or REPLICATED)


@placement_rule(
    aten.select.int, aten.narrow, aten.slice.Tensor, aten.unbind, aten.split, aten.split_with_sizes, aten.chunk,
    aten.tensor_split, aten.cumsum, aten.cumprod, aten.flip, aten.sort, aten.topk, aten.argsort, aten.softmax.int,
    aten.log_softmax.int, aten._softmax, aten._log_softmax, aten.roll, aten.logcumsumexp, aten.diff, aten.glu,
    aten.unfold, aten.repeat_interleave.self_int, aten.cummax, aten.cummin, aten.kthvalue, aten.median.dim, aten.mode,
    aten.renorm, aten.select_scatter, aten.slice_scatter,
)  # fmt: skip
def along_dim(call: Call) -> Outcome:
    """Operators that work along one dimension: row-local as long as it is not the row dimension."""
    source = call.arg(0)
    place = call.place(source)
    if not isinstance(place, Rows):
        others = call.sharded()
        if others:
            raise Refused("a replicated tensor is written with rows of nodes or edges", "make both of them rows")
        return call.spread(REPLICATED)
    rank = len(call.shape(source))
    dims = [wrap(d, rank) for d in _dims(call)]
    name = call.op.overloadpacket.__name__
    if place.dim in dims:
        return _along_rows(call, place, name)
    dim = place.dim
    if name in ("select", "unbind"):
        dim -= sum(d < place.dim for d in dims)
    if name in ("select_scatter", "slice_scatter"):
        same_rows([place, *(p for _, p in call.sharded())])
    return call.spread(Rows(place.space, dim, place.factor))


def _dims(call: Call) -> list[int]:
    for name in ("dim", "dims", "dimension"):
        if any(a.name == name for a in call.op._schema.arguments):
            value = call.named(name)
            return _as_list(value) if value is not None else [0]
    return [-1]


def _along_rows(call: Call, place: Rows, name: str) -> Outcome:
    if name in ("softmax", "log_softmax", "_softmax", "_log_softmax") and place.factor == 1:
        return Outcome(place, crosses=True)
    if name == "repeat_interleave":
        return Outcome(Rows(place.space, place.dim, place.factor * int(call.arg(1))))
    if name == "slice" and _whole(call):
        return Outcome(place)
    reasons = {
        "sort": "it sorts over all rows of the graph", "argsort": "it sorts over all rows of the graph",
        "topk": "it selects the largest over all rows of the graph", "kthvalue": "it ranks all rows of the graph",
        "select": "it takes one row of the whole graph by its position",
    }  # fmt: skip
    raise Refused(
        reasons.get(name, f"aten.{name} works along the dimension that is spread over the ranks"),
        "compute it outside the model on gathered rows, or replace it by a reduction (sum, mean, max, softmax)",
    )


def _whole(call: Call) -> bool:
    source = call.arg(0)
    return call.shape(source) == call.out_shape


@placement_rule(aten.cat, aten.concat, aten.concatenate, aten.stack, aten.hstack, aten.vstack, aten.column_stack)
def cat(call: Call) -> Outcome:
    """Joining along another dimension than the rows'; along the rows' it is split by canonicalize."""
    tensors = call.arg(0)
    places = [call.place(t) for t in tensors]
    found = [p for p in places if isinstance(p, Rows)]
    if not found:
        return Outcome(REPLICATED)
    name = call.op.overloadpacket.__name__
    rank = len(call.shape(tensors[0]))
    if name == "stack":
        dim = wrap(call.arg(1, default=0), rank + 1)
    elif name in ("hstack", "column_stack"):
        dim = 1 if rank > 1 else 0
    else:
        dim = 0 if name == "vstack" else wrap(call.arg(1, default=0), rank)
    row_dim = found[0].dim
    if name == "stack":
        row_dim += dim <= row_dim
    elif dim == row_dim:
        return _cat_rows(call, places, dim)
    if len(found) < len(places):
        raise Refused(
            "it joins rows of nodes or edges with a replicated tensor of the same length", "make both of them rows"
        )
    same_rows(found)
    if len({p.dim for p in found}) > 1:
        raise Refused("it joins tensors whose rows lie along different dimensions", "transpose one of them first")
    return Outcome(Rows(found[0].space, row_dim, found[0].factor))


def _cat_rows(call: Call, places: list[Placement], dim: int) -> Outcome:
    if not all(isinstance(p, Rows) and p.factor == 1 for p in places):
        raise Refused(
            "it appends replicated rows to rows of nodes or edges", "append rows that belong to nodes or edges"
        )
    out = call.rows_of_size(call.out_shape)
    assert out is not None
    return Outcome(Rows(out.space, dim))


@placement_rule(aten.repeat, aten.tile)
def repeat(call: Call) -> Outcome:
    """Repetition along other dimensions than the rows'."""
    source = call.arg(0)
    place = call.place(source)
    if not isinstance(place, Rows):
        return Outcome(call.rows_of_size(call.out_shape) or REPLICATED)
    dim = place.dim + len(call.out_shape) - len(call.shape(source))
    if call.out_shape[dim] != call.shape(source)[place.dim]:
        raise Refused("it repeats all rows of the graph one after the other", "index the rows explicitly")
    return Outcome(Rows(place.space, dim, place.factor))


@placement_rule(
    aten.zeros, aten.ones, aten.full, aten.empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty,
)  # fmt: skip
def factory(call: Call) -> Outcome:
    """Constant tensors: made where they are needed, from sizes alone."""
    return Outcome(call.rows_of_size(call.out_shape) or REPLICATED)


placement_rule(
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.clone, aten.contiguous, aten.detach,
    aten.to, aten._to_copy, aten.type_as, aten.alias, aten.lift_fresh_copy, aten.masked_fill, aten.where, aten.clamp,
    aten.nan_to_num, aten.isnan, aten.isinf, aten.isfinite, aten.prelu, aten.addcmul, aten.addcdiv, aten.lerp, aten.hardtanh,
    aten.relu6, aten.celu, aten.selu, aten.mish, aten.silu, aten.gelu, aten.softplus, aten.dropout, aten.square, aten.float_power,
    aten.true_divide, aten.divide, aten.multiply, aten.subtract, aten.negative, aten.absolute, aten.arccos, aten.arctan,
    aten.isclose, aten.logical_and, aten.logical_or, aten.logical_not, aten.logical_xor, aten.copy, aten.one_hot, aten.log_sigmoid,
    aten.hardshrink, aten.softshrink, aten._assert_tensor_metadata, aten.real, aten.imag, aten.rsub,
    aten.view.dtype, aten.masked_fill_, aten.hardsigmoid, aten.hardswish, aten.erfc, aten.special_expit, aten.logit, aten.xlogy,
    aten.special_xlogy, aten.floor_divide, aten.remainder, aten.greater, aten.less, aten.greater_equal, aten.less_equal,
    aten.not_equal, aten.maximum, aten.minimum, aten.sigmoid, aten.tanh, aten.rsqrt, aten.threshold, aten.elu, aten.leaky_relu,
    aten.fmod, aten.clip, aten.polar, aten.complex, aten.atan2, aten.arctan2, aten.bucketize, aten.data, aten.requires_grad_,
    aten._conj, aten.conj, aten.conj_physical, aten.resolve_conj, aten.resolve_neg, aten._neg_view, aten.angle,
    aten.view_as_complex, aten.view_as_real,
)(pointwise)  # fmt: skip


@placement_rule(aten.one_hot)
def one_hot(call: Call) -> Outcome:
    """One more dimension behind the rows."""
    return Outcome(call.place(call.arg(0)))


@placement_rule(aten.isin.Tensor_Tensor, aten.searchsorted.Tensor)
def looked_up(call: Call) -> Outcome:
    """Each entry is looked for in a table that every rank has."""
    entries, table = call.arg(0), call.arg(1)
    if call.op is aten.searchsorted.Tensor:
        entries, table = table, entries
    if isinstance(call.place(table), Rows):
        raise Refused(
            "entries are looked for in rows that are spread over the ranks", "look for them in a replicated tensor"
        )
    return Outcome(call.place(entries))


@placement_rule(aten.pad, aten.constant_pad_nd)
def pad(call: Call) -> Outcome:
    """Padding of dimensions behind the rows'."""
    source = call.arg(0)
    place = call.place(source)
    if not isinstance(place, Rows):
        return Outcome(place)
    if call.shape(source)[place.dim] != call.out_shape[place.dim]:
        raise Refused("it pads the dimension that is spread over the ranks", "pad the features instead")
    return Outcome(place)


def elements_per_row(shape: tuple[sympy.Expr, ...], place: Rows) -> int:
    """Entries of a tensor that belong to one row."""
    return place.factor * math.prod(int(s) for d, s in enumerate(shape) if d != place.dim)
