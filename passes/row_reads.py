"""Spellings of a read of rows: index_select, index, gather, embedding, slice, flip along the row dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.program import Program, is_tensor, meta, shape
from sylvie_fx.ir.rules import wrap
from sylvie_fx.passes.base import refuse
from sylvie_fx.passes.build import Builder, replace
from sylvie_fx.passes.dependence import needs_gradient

aten = torch.ops.aten


def graph_only(builder: Builder, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node that is known to depend on the graph alone."""
    node = builder.call(op, *args, **kwargs)
    meta(node).static = True
    return node


def is_row_dim(program: Program, node: Any, dim: int) -> bool:
    """Whether a dimension of a value counts rows of the graph."""
    return is_tensor(node) and program.space_of(shape(node)[dim]) is not None


def _index_select(program: Program, node: fx.Node) -> None:
    source, dim, index = node.args[0], node.args[1], node.args[2]
    assert isinstance(source, fx.Node)
    _gather(program, node, source, index, wrap(dim, len(shape(source))))  # type: ignore[arg-type]


def _gather(program: Program, node: fx.Node, source: fx.Node, index: Any, dim: int) -> None:
    if not is_row_dim(program, source, dim):
        return  # a replicated table
    replace(node, read_rows(Builder(node), source, index, dim))


def read_rows(builder: Builder, source: fx.Node, index: Any, dim: int) -> fx.Node:
    """Rows of a value by a graph-only index, in front of the node that the builder builds for.

    Raises:
        PassError: The index depends on features.
    """
    node = builder.before
    if not (isinstance(index, fx.Node) and meta(index).static):
        raise refuse(node, "rows of the graph are picked by an index that depends on features",
                     "which rows must cross is then unknown before the step runs", "pick rows by edges or ids of the graph")  # fmt: skip
    if len(shape(index)) == 1:
        return source if _is_every_row(index, shape(source)[dim]) else builder.call(ops.gather, source, index, dim)
    # An index of several dimensions reads flat and is shaped afterwards.
    flat = graph_only(builder, aten.reshape.default, index, [-1])
    read = builder.call(ops.gather, source, flat, dim)
    tail = [
        s if isinstance(s, int) else graph_only(builder, aten.sym_size.int, index, d)
        for d, s in enumerate(index.meta["val"].shape)
    ]
    before, after = list(source.meta["val"].shape[:dim]), list(source.meta["val"].shape[dim + 1 :])
    return builder.call(aten.view.default, read, [*before, *tail, *after])


def _is_every_row(index: fx.Node, rows: Any) -> bool:
    """Whether an index is ``arange`` over all rows, so that reading by it changes nothing."""
    if index.target not in _ARANGES or shape(index)[0] != rows:
        return False
    args = index.args
    start = 0 if index.target is aten.arange.default else args[0]
    step = args[2] if index.target is aten.arange.start_step and len(args) > 2 else 1
    return bool(start == 0 and step == 1)


_ARANGES = frozenset({aten.arange.default, aten.arange.start, aten.arange.start_step})


def _index(program: Program, node: fx.Node) -> None:
    source, indices = node.args[0], node.args[1]
    assert isinstance(source, fx.Node)
    assert isinstance(indices, (list, tuple))
    used = [(d, i) for d, i in enumerate(indices) if isinstance(i, fx.Node)]
    rows = [d for d, i in used if is_row_dim(program, source, d) or _is_wide(i)]
    if not rows:
        return
    index = used[0][1]
    if len(used) == 1 and _is_wide(index):
        _by_wide_mask(program, node, source, index, used[0][0])
    elif len(used) == 1:
        if index.meta["val"].dtype == torch.bool:
            index = positions(node, index, rows[0])
        _gather(program, node, source, index, rows[0])
    elif len(used) == len(shape(source)) == 2 and rows == [0]:
        _entry_of_each_row(node, source, *(i for _, i in used))


def _is_wide(index: fx.Node) -> bool:
    return index.meta["val"].dtype == torch.bool and len(shape(index)) > 1


def _by_wide_mask(program: Program, node: fx.Node, source: fx.Node, mask: fx.Node, first: int) -> None:
    """``x[mask]`` with a mask ``[1, rows]``: the other dimensions of the mask have size one and go."""
    flat = [d for d, s in enumerate(shape(mask)) if s == 1]
    if len(flat) != len(shape(mask)) - 1:
        return
    builder = Builder(node)
    row = first + next(d for d in range(len(shape(mask))) if d not in flat)
    if not is_row_dim(program, source, row):
        return
    thin = builder.call(aten.squeeze.dims, mask, flat)
    meta(thin).static = meta(mask).static
    index = positions(node, thin, first)
    read = read_rows(builder, builder.call(aten.squeeze.dims, source, [first + d for d in flat]), index, first)
    read.meta["val"] = node.meta["val"]
    replace(node, read)


def _entry_of_each_row(node: fx.Node, source: fx.Node, rows: fx.Node, columns: fx.Node) -> None:
    """``x[rows, columns]``: rows by a graph-only index, then one entry of each."""
    if len(shape(rows)) != 1 or shape(rows) != shape(columns) or rows.meta["val"].dtype == torch.bool:
        return
    builder = Builder(node)
    read = read_rows(builder, source, rows, 0)
    column = builder.call(aten.unsqueeze.default, columns, 1)
    meta(column).static = meta(columns).static
    replace(node, builder.call(aten.squeeze.dim, builder.call(aten.gather.default, read, 1, column), 1))


def positions(node: fx.Node, mask: fx.Node, dim: int, like: fx.Node | None = None) -> fx.Node:
    """The rows where a graph-only mask holds, int64 ``[count]``; ``count`` is the size of ``like`` (or ``node``) along ``dim``."""
    if not meta(mask).static:
        raise refuse(node, "rows of the graph are picked by a mask that depends on features",
                     "the number of rows would differ from step to step", "multiply by the mask, or use torch.where")  # fmt: skip
    if len(shape(mask)) != 1:
        raise refuse(node, "a mask of several dimensions picks single entries", "entries of a row do not stay together",
                     "use torch.where or multiply by the mask")  # fmt: skip
    builder, val = Builder(node), mask.meta["val"]
    count = (like or node).meta["val"].shape[dim]
    nonzero = graph_only(builder, aten.nonzero.default, mask, val=val.new_empty((count, 1), dtype=torch.int64))
    return graph_only(builder, aten.select.int, nonzero, 1, 0, val=val.new_empty((count,), dtype=torch.int64))


def _gather_columns(program: Program, node: fx.Node) -> None:
    source, dim, index = node.args[0], node.args[1], node.args[2]
    assert isinstance(source, fx.Node)
    dim = wrap(dim, len(shape(source)))  # type: ignore[arg-type]
    if not is_row_dim(program, source, dim):
        return
    flat = one_dimensional(index, dim)
    if flat is not None:
        _gather(program, node, source, flat, dim)


def _embedding(program: Program, node: fx.Node) -> None:
    table, index, *rest = node.args
    padding, by_frequency = rest[0] if rest else -1, len(rest) > 1 and rest[1]
    assert isinstance(table, fx.Node)
    assert isinstance(index, fx.Node)
    node.args = (table, index, padding, by_frequency)  # sparse=True is left out: terms of ranks are added up dense
    every = is_row_dim(program, table, 0) and len(shape(index)) == 1 and _is_every_row(index, shape(table)[0])
    counted = any(program.space_of(size) is not None for size in shape(index))
    if by_frequency and counted and not every and needs_gradient(program, table):
        raise refuse(node, "an embedding with scale_grad_by_freq=True is read by rows of the graph",
                     "its gradient is divided by how often an id occurs, and a rank sees its own ids only",
                     "leave the option out and divide in a hook, which sees the whole gradient: counts = torch.bincount(ids, "
                     "minlength=rows).clamp(min=1) of the whole ids; weight.register_hook(lambda g: g / counts[:, None])")  # fmt: skip
    if not is_row_dim(program, table, 0):
        return  # a replicated table
    builder = Builder(node)
    read = read_rows(builder, table, index, 0)
    if isinstance(padding, int) and padding >= 0:  # rows read as padding have the table's values and no gradient
        at = builder.call(aten.unsqueeze.default, builder.call(aten.eq.Scalar, index, padding), -1)
        read = builder.call(aten.where.self, at, builder.call(aten.detach.default, read), read)
    replace(node, read)


def one_dimensional(index: Any, dim: int) -> fx.Node | None:
    """The 1-D tensor of which an index is a broadcast along ``dim``, or None."""
    node = index
    while isinstance(node, fx.Node) and len(shape(node)) > 0:
        sizes = shape(node)
        if node.op != "call_function" or node.target not in _BROADCASTS:
            return node if len(sizes) == 1 else None
        source = node.args[0]
        assert isinstance(source, fx.Node)
        length = sizes[dim] if dim < len(sizes) else None
        inner = shape(source)
        if len(sizes) == 1 and inner != sizes:
            return node
        if len(inner) == 1 and length is not None and inner[0] != length:
            return None
        node = source
    return None


_BROADCASTS = frozenset({
    aten.expand_as.default, aten.expand.default, aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.repeat.default,
    aten.broadcast_to.default, aten.clone.default, aten.contiguous.default,
})  # fmt: skip


def _slice(program: Program, node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    args = [*node.args[1:], *[None] * (4 - len(node.args[1:]))]
    dim, start, end, step = wrap(args[0] or 0, len(shape(source))), args[1] or 0, args[2], args[3] or 1  # type: ignore[arg-type]
    if not is_row_dim(program, source, dim):
        return
    if shape(source)[dim] == shape(node)[dim]:
        replace(node, source)
        return
    builder = Builder(node)
    size = source.meta["val"].new_empty((node.meta["val"].shape[dim],), dtype=torch.int64)
    index = graph_only(builder, aten.slice.Tensor, _every(builder, source, dim), 0, start, end, step, val=size)
    _gather(program, node, source, index, dim)


def _every(builder: Builder, source: fx.Node, dim: int) -> fx.Node:
    """The positions of all rows of a value."""
    length = graph_only(builder, aten.sym_size.int, source, dim)
    val = source.meta["val"].new_empty((source.meta["val"].shape[dim],), dtype=torch.int64)
    return graph_only(builder, aten.arange.start_step, 0, length, 1, dtype=torch.int64, device=val.device, val=val)


def _flip(program: Program, node: fx.Node) -> None:
    source, dims = node.args[0], node.args[1]
    assert isinstance(source, fx.Node)
    assert isinstance(dims, (list, tuple))
    wrapped = [wrap(d, len(shape(source))) for d in dims]  # type: ignore[arg-type]
    rows = [d for d in wrapped if is_row_dim(program, source, d)]
    if not rows:
        return
    builder = Builder(node)
    index = graph_only(builder, aten.flip.default, _every(builder, source, rows[0]), [0])
    read = read_rows(builder, source, index, rows[0])
    rest = [d for d in wrapped if d != rows[0]]
    replace(node, builder.call(aten.flip.default, read, rest) if rest else read)


def _take(program: Program, node: fx.Node) -> None:
    source, index = node.args
    assert isinstance(source, fx.Node)
    if len(shape(source)) == 1:  # of more dimensions it reads single entries of the flattened tensor
        _gather(program, node, source, index, 0)


SPELLINGS: Mapping[Any, Callable[[Program, fx.Node], None]] = {
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.gather.default: _gather_columns,
    aten.embedding.default: _embedding,
    aten.take.default: _take,
    aten.slice.Tensor: _slice,
    aten.flip.default: _flip,
}
