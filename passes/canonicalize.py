"""Bring every spelling of a gather, a scatter and a dropout to one operator each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.program import Program, is_tensor, meta, shape
from sylvie_fx.ir.rules import wrap
from sylvie_fx.passes.base import Pass, PassContext, refuse
from sylvie_fx.passes.build import Builder, copy_meta, replace
from sylvie_fx.passes.static import is_random, mark_static

aten = torch.ops.aten


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Rewrite index_select, index, gather, scatter_add, index_add, scatter_reduce, index_put … along rows to sylvie ops.

    Requires: functionalize.
    Ensures: every read or write of rows by a graph-only index is a ``sylvie.gather`` or ``sylvie.scatter`` with a 1-D
    index; constants depend on sizes alone; every dropout is a ``sylvie.node_dropout`` that knows its call site.

    Before::

        view = aten.view(dst, [-1, 1])
        expand = aten.expand_as(view, e)
        out = aten.scatter_add(zeros, 0, expand, e)

    After::

        out = sylvie.scatter(e, dst, N, sum, 0)
    """

    name: ClassVar[str] = "canonicalize"

    def run(self, program: Program, context: PassContext) -> Program:
        """Rewrite each operator that matches."""
        sites = 0
        for node in list(program.graph.nodes):
            if node.target in _CONSTANTS:
                _CONSTANTS[node.target](node)
        mark_static(program)
        for node in list(program.graph.nodes):
            if node.op != "call_function":
                continue
            if is_random(node):
                sites = _dropout(node, sites)
            elif node.target in _SPELLINGS and not meta(node).static:
                _SPELLINGS[node.target](program, node)
        program.graph.eliminate_dead_code(lambda n: _has_effect(n))
        return program


def _has_effect(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or (
        isinstance(node.target, torch._ops.OpOverload) and (node.target._schema.is_mutable or node.target is aten.batch_norm.default)
    )


# --- constants -----------------------------------------------------------------------------------------------------


def _sizes(builder: Builder, tensor: fx.Node) -> list[Any]:
    return [
        s if isinstance(s, int) else builder.call(aten.sym_size.int, tensor, d)
        for d, s in enumerate(tensor.meta["val"].shape)
    ]  # fmt: skip


def _constant(value: Callable[[fx.Node], Any], like: bool) -> Callable[[fx.Node], None]:
    def rewrite(node: fx.Node) -> None:
        builder, source, val = Builder(node), node.args[0], node.meta["val"]
        assert isinstance(source, fx.Node)
        size = _sizes(builder, source) if like else node.args[1]
        new = builder.call(aten.full.default, size, value(node), dtype=val.dtype, device=val.device, val=val)
        replace(node, new)

    return rewrite


_CONSTANTS: dict[Any, Callable[[fx.Node], None]] = {
    aten.new_zeros.default: _constant(lambda n: 0, like=False),
    aten.new_ones.default: _constant(lambda n: 1, like=False),
    aten.new_empty.default: _constant(lambda n: 0, like=False),
    aten.new_full.default: _constant(lambda n: n.args[2], like=False),
    aten.zeros_like.default: _constant(lambda n: 0, like=True),
    aten.ones_like.default: _constant(lambda n: 1, like=True),
    aten.empty_like.default: _constant(lambda n: 0, like=True),
    aten.full_like.default: _constant(lambda n: n.args[1], like=True),
}


# --- dropout -------------------------------------------------------------------------------------------------------


def _dropout(node: fx.Node, site: int) -> int:
    source, p = node.args[0], node.args[1]
    assert isinstance(source, fx.Node)
    if node.target is aten.feature_dropout.default:
        raise refuse(node, "feature dropout (Dropout1d, Dropout2d) drops whole channels", "its mask is drawn for all rows at once",
                     "use nn.Dropout")  # fmt: skip
    new = Builder(node).call(ops.node_dropout, source, None, p, site, val=node.meta["val"])
    copy_meta(node, new)
    meta(new).site = site
    replace(node, new)
    return site + 1


# --- gathers -------------------------------------------------------------------------------------------------------


def _is_row_dim(program: Program, node: Any, dim: int) -> bool:
    return is_tensor(node) and program.space_of(shape(node)[dim]) is not None


def _index_select(program: Program, node: fx.Node) -> None:
    source, dim, index = node.args[0], node.args[1], node.args[2]
    assert isinstance(source, fx.Node)
    _gather(program, node, source, index, wrap(dim, len(shape(source))))  # type: ignore[arg-type]


def _gather(program: Program, node: fx.Node, source: fx.Node, index: Any, dim: int) -> None:
    if not _is_row_dim(program, source, dim):
        return  # a replicated table
    if not (isinstance(index, fx.Node) and meta(index).static):
        raise refuse(node, "rows of the graph are picked by an index that depends on features",
                     "which rows must cross is then unknown before the step runs", "pick rows by edges or ids of the graph")  # fmt: skip
    builder = Builder(node)
    if len(shape(index)) == 1:
        new = builder.call(ops.gather, source, index, dim, val=node.meta["val"])
    else:  # an index of several dimensions reads flat and is shaped afterwards
        flat = builder.call(aten.reshape.default, index, [-1])
        meta(flat).static = True
        read = builder.call(ops.gather, source, flat, dim)
        tail = [s if isinstance(s, int) else builder.call(aten.sym_size.int, index, d) for d, s in enumerate(index.meta["val"].shape)]
        before, after = list(source.meta["val"].shape[:dim]), list(source.meta["val"].shape[dim + 1 :])
        new = builder.call(aten.view.default, read, [*before, *tail, *after], val=node.meta["val"])
    replace(node, new)


def _index(program: Program, node: fx.Node) -> None:
    source, indices = node.args[0], node.args[1]
    assert isinstance(source, fx.Node)
    assert isinstance(indices, (list, tuple))
    used = [(d, i) for d, i in enumerate(indices) if i is not None]
    row_dims = [d for d in range(len(shape(source))) if _is_row_dim(program, source, d)]
    if len(used) == 1 and used[0][0] in row_dims:
        dim, index = used[0]
        assert isinstance(index, fx.Node)
        if index.meta["val"].dtype == torch.bool:
            index = _positions(node, index, dim)
        _gather(program, node, source, index, dim)


def _positions(node: fx.Node, mask: fx.Node, dim: int) -> fx.Node:
    """The rows where a graph-only mask holds, int64 ``[count]``."""
    if not meta(mask).static:
        raise refuse(node, "rows of the graph are picked by a mask that depends on features",
                     "the number of rows would differ from step to step", "multiply by the mask, or use torch.where")  # fmt: skip
    if len(shape(mask)) != 1:
        raise refuse(node, "a mask of several dimensions picks single entries", "entries of a row do not stay together",
                     "use torch.where or multiply by the mask")  # fmt: skip
    builder = Builder(node)
    count = node.meta["val"].shape[dim]
    nonzero = builder.call(aten.nonzero.default, mask, val=mask.meta["val"].new_empty((count, 1), dtype=torch.int64))
    flat = builder.call(aten.select.int, nonzero, 1, 0, val=mask.meta["val"].new_empty((count,), dtype=torch.int64))
    meta(nonzero).static = meta(flat).static = True
    return flat


def _gather_columns(program: Program, node: fx.Node) -> None:
    source, dim, index = node.args[0], node.args[1], node.args[2]
    assert isinstance(source, fx.Node)
    dim = wrap(dim, len(shape(source)))  # type: ignore[arg-type]
    if not _is_row_dim(program, source, dim):
        return
    flat = one_dimensional(index, dim)
    if flat is not None:
        _gather(program, node, source, flat, dim)


def _embedding(program: Program, node: fx.Node) -> None:
    table, index = node.args[0], node.args[1]
    assert isinstance(table, fx.Node)
    _gather(program, node, table, index, 0)


def one_dimensional(index: Any, dim: int) -> fx.Node | None:
    """The 1-D tensor of which an index is a broadcast along ``dim``, or None."""
    node = index
    while isinstance(node, fx.Node) and len(shape(node)) > 0:
        sizes = shape(node)
        if len(sizes) == 1:
            return node
        if node.op != "call_function" or node.target not in _BROADCASTS:
            return None
        source = node.args[0]
        assert isinstance(source, fx.Node)
        length = sizes[dim] if dim < len(sizes) else None
        inner = shape(source)
        if len(inner) == 1 and length is not None and inner[0] != length:
            return None
        node = source
    return None


_BROADCASTS = frozenset({
    aten.expand_as.default, aten.expand.default, aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.repeat.default,
    aten.broadcast_to.default, aten.clone.default, aten.contiguous.default,
})  # fmt: skip


# --- scatters ------------------------------------------------------------------------------------------------------


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
    used = [(d, i) for d, i in enumerate(indices) if i is not None]
    if not (len(used) == 1 and _is_row_dim(program, base, used[0][0])):
        return
    dim, index = used[0]
    builder = Builder(node)
    if accumulate:
        _scatter(program, node, base, dim, index, source, "sum", include_self=True)
        return
    if index.meta["val"].dtype != torch.bool:
        raise refuse(node, "rows are overwritten at an integer index",
                     "where an index repeats, which write wins is undefined", "use a boolean mask, or index_add")  # fmt: skip
    view = [1] * len(shape(base))
    view[dim] = -1
    shaped = builder.call(aten.view.default, index, view)
    meta(shaped).static = meta(index).static
    if isinstance(source, fx.Node) and len(shape(source)) > dim and program.space_of(shape(source)[dim]) is not None:
        count = source.meta["val"].shape[dim]
        val = index.meta["val"]
        nonzero = builder.call(aten.nonzero.default, index, val=val.new_empty((count, 1), dtype=torch.int64))
        flat = builder.call(aten.select.int, nonzero, 1, 0, val=val.new_empty((count,), dtype=torch.int64))
        meta(nonzero).static = meta(flat).static = True
        rows = builder.call(aten.sym_size.int, index, 0)
        meta(rows).static = True
        source = builder.call(ops.scatter, source, flat, rows, "sum", dim, val=base.meta["val"])
    replace(node, builder.call(aten.where.self, shaped, source, base))


def _scatter(program: Program, node: fx.Node, base: Any, dim: Any, index: Any, source: Any, reduce: str, *, include_self: bool) -> None:
    assert isinstance(base, fx.Node)
    dim = wrap(dim, len(shape(base)))
    if not (_is_row_dim(program, base, dim) or _is_row_dim(program, source, dim)):
        return
    flat = one_dimensional(index, dim)
    if flat is None or not meta(flat).static:
        raise refuse(node, "rows of the graph are written by an index that depends on features or differs from column to column",
                     "which rows must cross is then unknown before the step runs", "write rows by edges or ids of the graph")  # fmt: skip
    builder = Builder(node)
    rows = base.meta["val"].shape[dim]
    if not isinstance(rows, int):
        rows = builder.call(aten.sym_size.int, base, dim)
        meta(rows).static = True
    base_val = base.meta["val"]
    if len(base_val.shape) > len(source.meta["val"].shape):
        source = builder.call(aten.expand_as.default, source, base)
    val = base_val if source.meta["val"].dtype == base_val.dtype else None
    new = builder.call(ops.scatter, source, flat, rows, reduce, dim, val=val)
    if include_self and not _is_constant(base, 0 if reduce == "sum" else None):
        if reduce != "sum":
            new = _include_base(node, builder, base, new, flat, rows, reduce, dim)
        else:
            new = builder.call(aten.add.Tensor, base, new)
    replace(node, new)


def _include_base(node: fx.Node, builder: Builder, base: fx.Node, new: fx.Node, flat: fx.Node, rows: Any, reduce: str, dim: int) -> fx.Node:
    """``include_self=True`` for max and min: rows that nothing is written to keep the base's value."""
    pick = {"amax": aten.maximum.default, "amin": aten.minimum.default}.get(reduce)
    if pick is None:
        raise refuse(node, f"scatter_reduce '{reduce}' with include_self=True", "the base counts as one more value", "pass include_self=False")
    val = base.meta["val"]
    ones = builder.call(aten.full.default, [flat.meta["val"].shape[0] if isinstance(flat.meta["val"].shape[0], int)
                                            else builder.call(aten.sym_size.int, flat, 0)], 1, dtype=torch.int64, device=val.device)  # fmt: skip
    counts = builder.call(ops.scatter, ones, flat, rows, "sum", 0)
    view = [1] * len(val.shape)
    view[dim] = -1
    written = builder.call(aten.view.default, builder.call(aten.gt.Scalar, counts, 0), view)
    for n in (ones, counts, written):
        meta(n).static = True
    both = builder.call(pick, base, new)
    return builder.call(aten.where.self, written, both, base)


def _is_constant(node: fx.Node, value: int | None) -> bool:
    return value is not None and (
        (node.target is aten.full.default and node.args[1] == value) or (node.target is aten.zeros.default and value == 0)
    )


# --- rows by position ----------------------------------------------------------------------------------------------


def _slice(program: Program, node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    args = [*node.args[1:], *[None] * (4 - len(node.args[1:]))]
    dim, start, end, step = wrap(args[0] or 0, len(shape(source))), args[1] or 0, args[2], args[3] or 1  # type: ignore[arg-type]
    if not _is_row_dim(program, source, dim):
        return
    if shape(source)[dim] == shape(node)[dim]:
        replace(node, source)
        return
    builder = Builder(node)
    length = builder.call(aten.sym_size.int, source, dim)
    every = builder.call(aten.arange.start_step, 0, length, 1, dtype=torch.int64, device=source.meta["val"].device)
    size = source.meta["val"].new_empty((node.meta["val"].shape[dim],), dtype=torch.int64)
    index = builder.call(aten.slice.Tensor, every, 0, start, end, step, val=size)
    for n in (length, every, index):
        meta(n).static = True
    _gather(program, node, source, index, dim)


def _flip(program: Program, node: fx.Node) -> None:
    source, dims = node.args[0], node.args[1]
    assert isinstance(source, fx.Node)
    assert isinstance(dims, (list, tuple))
    rows = [d for d in dims if _is_row_dim(program, source, wrap(d, len(shape(source))))]  # type: ignore[arg-type]
    if len(dims) == 1 and rows:
        builder = Builder(node)
        dim = wrap(dims[0], len(shape(source)))  # type: ignore[arg-type]
        length = builder.call(aten.sym_size.int, source, dim)
        every = builder.call(aten.arange.start_step, 0, length, 1, dtype=torch.int64, device=source.meta["val"].device)
        index = builder.call(aten.flip.default, every, [0])
        for n in (length, every, index):
            meta(n).static = True
        _gather(program, node, source, index, dim)


_SPELLINGS: dict[Any, Callable[[Program, fx.Node], None]] = {
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.gather.default: _gather_columns,
    aten.embedding.default: _embedding,
    aten.scatter_add.default: _scatter_add,
    aten.scatter_reduce.two: _scatter_reduce,
    aten.index_add.default: _index_add,
    aten.index_put.default: _index_put,
    aten.slice.Tensor: _slice,
    aten.flip.default: _flip,
}
