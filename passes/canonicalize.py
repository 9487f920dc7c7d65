"""Bring every spelling of a gather, a scatter and a dropout to one operator each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.effects import has_effect
from sylvie_fx.ir.program import Program, meta
from sylvie_fx.passes import row_reads, row_writes
from sylvie_fx.passes.base import Pass, PassContext, refuse
from sylvie_fx.passes.build import Builder, copy_meta, replace
from sylvie_fx.passes.static import is_random, mark_static
from sylvie_fx.passes.unmerge import unmerge

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
        unmerge(program)
        mark_static(program)
        for node in list(program.graph.nodes):
            if node.op != "call_function":
                continue
            if node.target is ops.node_dropout:
                sites = max(sites, int(node.args[3]) + 1)
            elif is_random(node):
                sites = _dropout(node, sites)
            elif node.target in SPELLINGS and not meta(node).static:
                SPELLINGS[node.target](program, node)
        program.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or has_effect(n))
        return program


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


SPELLINGS: Mapping[Any, Callable[[Program, fx.Node], None]] = {**row_reads.SPELLINGS, **row_writes.SPELLINGS}
"""How each operator that may read or write rows is rewritten."""
