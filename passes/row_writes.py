"""Spellings of a write of rows: scatter_add, index_add, scatter_reduce, index_put, index_copy along the row dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.program import Program, meta, shape
from sylvie_fx.ir.rules import wrap
from sylvie_fx.passes.base import refuse
from sylvie_fx.passes.build import Builder, replace
from sylvie_fx.passes.row_reads import graph_only, is_row_dim, one_dimensional, positions

aten = torch.ops.aten


def _scatter_add(program: Program, node: fx.Node) -> None:
    base, dim, index, source = node.args[:4]
    _scatter(program, node, base, dim, index, source, "sum", include_self=True)


def _scatter_reduce(program: Program, node: fx.Node) -> None:
    base, dim, index, source, reduce = node.args[:5]
    include = node.args[5] if len(node.args) > 5 else node.kwargs.get("include_self", True)
    _scatter(program, node, base, dim, index, source, str(reduce), include_self=bool(include))


def _index_add(program: Program, node: fx.Node) -> None:
    base, dim, index, source = node.args[:4]
    alpha = node.kwargs.get("alpha", 1)
    if alpha != 1:
        source = Builder(node).call(aten.mul.Tensor, source, alpha)
    _scatter(program, node, base, dim, index, source, "sum", include_self=True)


def _index_put(program: Program, node: fx.Node) -> None:
    base, indices, source = node.args[:3]
    accumulate = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    assert isinstance(base, fx.Node)
    assert isinstance(indices, (list, tuple))
    used = [(d, i) for d, i in enumerate(indices) if isinstance(i, fx.Node)]
    if not (len(used) == 1 and is_row_dim(program, base, used[0][0])):
        return
    dim, index = used[0]
    if index.meta["val"].dtype == torch.bool:
        _put_by_mask(program, node, base, index, source, dim, accumulate=bool(accumulate))
    elif accumulate:
        _scatter(program, node, base, dim, index, source, "sum", include_self=True)
    else:
        _overwrite(program, node, base, dim, index, source)


def _index_copy(program: Program, node: fx.Node) -> None:
    base, dim, index, source = node.args[:4]
    assert isinstance(base, fx.Node)
    assert isinstance(dim, int)
    dim = wrap(dim, len(shape(base)))
    if is_row_dim(program, base, dim):
        _overwrite(program, node, base, dim, index, source)


def _index_fill(program: Program, node: fx.Node) -> None:
    base, dim, index, value = node.args[:4]
    assert isinstance(base, fx.Node)
    assert isinstance(dim, int)
    dim = wrap(dim, len(shape(base)))
    if is_row_dim(program, base, dim):
        builder = Builder(node)
        op = aten.where.self if isinstance(value, fx.Node) else aten.where.ScalarSelf
        replace(node, builder.call(op, _written(builder, base, dim, _static_index(node, index, dim)), value, base))


def _put_by_mask(
    program: Program, node: fx.Node, base: fx.Node, mask: fx.Node, source: Any, dim: int, *, accumulate: bool
) -> None:
    builder = Builder(node)
    shaped = builder.call(aten.view.default, mask, [-1 if d == dim else 1 for d in range(len(shape(base)))])
    meta(shaped).static = meta(mask).static
    if isinstance(source, fx.Node) and len(shape(source)) > dim and program.space_of(shape(source)[dim]) is not None:
        flat = positions(node, mask, dim, like=source)
        rows = graph_only(builder, aten.sym_size.int, mask, 0)
        source = builder.call(ops.scatter, source, flat, rows, "sum", dim, val=base.meta["val"])
    value = builder.call(aten.add.Tensor, base, source) if accumulate else source
    replace(node, builder.call(aten.where.self, shaped, value, base))


def _overwrite(program: Program, node: fx.Node, base: fx.Node, dim: int, index: Any, source: Any) -> None:
    """Rows overwritten at an integer index. Where it repeats, the last write wins, and every write gets the gradient.

    That is what one device computes: the backward of index_put and index_copy reads the gradient at every index.
    """
    builder = Builder(node)
    flat = _static_index(node, index, dim)
    written, val = _written(builder, base, dim, flat), base.meta["val"]
    if not (
        isinstance(source, fx.Node) and len(shape(source)) > dim and program.space_of(shape(source)[dim]) is not None
    ):
        if (
            isinstance(source, fx.Node)
            and len(shape(source)) > dim
            and shape(source)[dim] != 1
            and len(shape(source)) == len(shape(base))
        ):
            raise refuse(
                node,
                "a fixed number of rows of the graph is written",
                "every rank would need them",
                "use a boolean mask",
            )
        replace(node, builder.call(aten.where.self, written, source, base))
        return
    if source.meta["val"].dtype != val.dtype:
        source = builder.call(aten._to_copy.default, source, dtype=val.dtype)
    rows, length = graph_only(builder, aten.sym_size.int, base, dim), graph_only(builder, aten.sym_size.int, flat, 0)
    order = graph_only(
        builder, aten.arange.start_step, 0, length, 1, dtype=torch.int64, device=val.device, val=flat.meta["val"]
    )
    last = graph_only(builder, ops.scatter, order, flat, rows, "amax", 0)
    wins = graph_only(
        builder,
        aten.eq.Tensor,
        graph_only(builder, aten.index_select.default, last, 0, flat, val=flat.meta["val"]),
        order,
    )
    wins = graph_only(builder, aten.view.default, wins, [-1 if d == dim else 1 for d in range(len(shape(base)))])
    value = builder.call(
        ops.scatter, builder.call(aten.where.ScalarOther, wins, source, 0), flat, rows, "sum", dim, val=val
    )
    if val.dtype.is_floating_point:
        every = builder.call(ops.scatter, source, flat, rows, "sum", dim, val=val)
        zero = builder.call(aten.sub.Tensor, every, builder.call(aten.detach.default, every))
        value = builder.call(aten.add.Tensor, builder.call(aten.detach.default, value), zero)
    replace(node, builder.call(aten.where.self, written, value, base))


def _segment_reduce(program: Program, node: fx.Node) -> None:
    """Segments of consecutive rows, of graph-only lengths: each row is written to the number of its segment."""
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    named = dict(node.kwargs) | {a.name: given for a, given in zip(arguments, node.args, strict=False)}
    source, lengths, offsets, axis = named["data"], named.get("lengths"), named.get("offsets"), named.get("axis", 0)
    assert isinstance(source, fx.Node)
    given = lengths if lengths is not None else offsets
    if (
        axis != 0
        or named.get("initial") is not None
        or not isinstance(given, fx.Node)
        or len(shape(given)) != 1
        or not meta(given).static
    ):
        return
    builder, reduce, val = Builder(node), str(named["reduce"]), node.meta["val"]
    count_val = given.meta["val"].new_empty((val.shape[0],), dtype=torch.int64)
    if lengths is None:
        given = graph_only(builder, aten.diff.default, given, val=count_val)
    count = graph_only(builder, aten.sym_size.int, source, 0)
    index_val = given.meta["val"].new_empty((source.meta["val"].shape[0],), dtype=torch.int64)
    index = graph_only(builder, aten.repeat_interleave.Tensor, given, output_size=count, val=index_val)
    rows = graph_only(builder, aten.sym_size.int, given, 0)
    spelled = {"max": "amax", "min": "amin"}.get(reduce, reduce)
    new = builder.call(ops.scatter, source, index, rows, spelled, 0, val=val)
    empty = {"sum": 0.0, "mean": math.nan, "max": -math.inf, "min": math.inf, "prod": 1.0}[reduce]
    if empty != 0.0:
        filled = graph_only(builder, aten.gt.Scalar, given, 0, val=count_val.to(torch.bool))
        shaped = graph_only(builder, aten.view.default, filled, [-1] + [1] * (len(val.shape) - 1))
        new = builder.call(aten.where.ScalarOther, shaped, new, empty, val=val)
    replace(node, new)


def _static_index(node: fx.Node, index: Any, dim: int) -> fx.Node:
    flat = one_dimensional(index, dim)
    if flat is None or not meta(flat).static:
        raise refuse(node, "rows of the graph are written by an index that depends on features or differs from column to column",
                     "which rows must cross is then unknown before the step runs", "write rows by edges or ids of the graph")  # fmt: skip
    return flat


def _scatter(
    program: Program, node: fx.Node, base: Any, dim: Any, index: Any, source: Any, reduce: str, *, include_self: bool
) -> None:
    assert isinstance(base, fx.Node)
    assert isinstance(source, fx.Node)
    dim = wrap(dim, len(shape(base)))
    into_rows = is_row_dim(program, base, dim)
    if not into_rows and not is_row_dim(program, source, dim):
        return
    flat = _static_index(node, index, dim) if into_rows else one_dimensional(index, dim)
    if flat is None:
        raise refuse(node, "rows of the graph are added up by an index that differs from column to column",
                     "it has no form as one scatter of rows", "use one index for all columns")  # fmt: skip
    builder = Builder(node)
    rows, base_val = base.meta["val"].shape[dim], base.meta["val"]
    if not isinstance(rows, int):
        rows = graph_only(builder, aten.sym_size.int, base, dim)
    if len(base_val.shape) > len(source.meta["val"].shape):
        source = builder.call(aten.expand_as.default, source, base)
    val = base_val if source.meta["val"].dtype == base_val.dtype else None
    new = builder.call(ops.scatter, source, flat, rows, reduce, dim, val=val)
    if include_self and not (reduce == "sum" and _is_constant(base, 0)):
        new = (
            builder.call(aten.add.Tensor, base, new)
            if reduce == "sum"
            else _include_base(builder, base, new, flat, reduce, dim)
        )
    replace(node, new)


def _include_base(builder: Builder, base: fx.Node, new: fx.Node, flat: fx.Node, reduce: str, dim: int) -> fx.Node:
    """``include_self=True`` for max, min and prod: rows that nothing is written to keep the base's value."""
    pick = {"amax": aten.maximum.default, "amin": aten.minimum.default, "prod": aten.mul.Tensor}.get(reduce)
    if pick is None:
        raise refuse(builder.before, f"scatter_reduce '{reduce}' with include_self=True", "the base counts as one more value",
                     "pass include_self=False")  # fmt: skip
    both = new if reduce == "prod" and _is_constant(base, 1) else builder.call(pick, base, new)
    return builder.call(aten.where.self, _written(builder, base, dim, flat), both, base)


def _written(builder: Builder, base: fx.Node, dim: int, flat: fx.Node) -> fx.Node:
    """Which rows an index writes, shaped to broadcast with ``base``."""
    count, rows = flat.meta["val"].shape[0], base.meta["val"].shape[dim]
    count = count if isinstance(count, int) else graph_only(builder, aten.sym_size.int, flat, 0)
    rows = rows if isinstance(rows, int) else graph_only(builder, aten.sym_size.int, base, dim)
    val = base.meta["val"].new_empty((flat.meta["val"].shape[0],), dtype=torch.int64)
    ones = graph_only(builder, aten.full.default, [count], 1, dtype=torch.int64, device=val.device, val=val)
    written = graph_only(builder, aten.gt.Scalar, graph_only(builder, ops.scatter, ones, flat, rows, "sum", 0), 0)
    return graph_only(builder, aten.view.default, written, [-1 if d == dim else 1 for d in range(len(shape(base)))])


def _is_constant(node: fx.Node, value: int) -> bool:
    return bool(
        (node.target is aten.full.default and node.args[1] == value)
        or (node.target is aten.zeros.default and value == 0)
        or (node.target is aten.ones.default and value == 1)
    )


SPELLINGS: Mapping[Any, Callable[[Program, fx.Node], None]] = {
    aten.scatter_add.default: _scatter_add,
    aten.scatter_reduce.two: _scatter_reduce,
    aten.index_add.default: _index_add,
    aten.index_put.default: _index_put,
    aten.index_copy.default: _index_copy,
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_fill.int_Tensor: _index_fill,
    aten.segment_reduce.default: _segment_reduce,
}
