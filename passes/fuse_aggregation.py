"""Fuse gather, multiply and scatter into one sparse product, which makes no value of edges by features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.placement import Rows
from sylvie_fx.ir.program import Program, is_tensor, meta, placement, shape
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.build import Builder, copy_meta, replace

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseAggregation(Pass):
    """Replace scatter(weight * gather(x)) by one ``sylvie.spmm``.

    Requires: insert-halo.
    Ensures: a sum, mean, max or min over neighbours, weighted by a number or a number a head of each edge, is one
    operator; anything else between gather and scatter is left as it is, and its metadata says why.

    Before::

        g = sylvie.gather(halo, src)
        m = aten.mul(w, g)
        out = sylvie.scatter(m, dst, rows_0, sum)

    After::

        out = sylvie.spmm(halo, src, dst, w, rows_0, sum)
    """

    name: ClassVar[str] = "fuse-aggregation"

    def run(self, program: Program, context: PassContext) -> Program:
        """Fuse each scatter whose messages match."""
        for node in list(program.graph.nodes):
            if node.target is ops.scatter and (reason := _fuse(node)):
                meta(node).unfused = reason
        program.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or n.target not in _ERASABLE)
        return program


_ERASABLE = frozenset({ops.gather, aten.mul.Tensor, aten.view.default, aten.unsqueeze.default, aten.reshape.default})


def _fuse(node: fx.Node) -> str:
    """Fuse a scatter with what makes its messages, or tell why it is not."""
    messages, dst, rows, reduce, dim = (*node.args, 0)[:5]
    assert isinstance(messages, fx.Node)
    if dim != 0 or len(shape(messages)) > 3:
        return "the rows are not the first of at most three dimensions"
    if reduce not in ("sum", "mean", "amax", "amin"):
        return f"there is no kernel for {reduce}"
    weight = None
    if messages.target is ops.gather:
        gather = messages
    elif messages.target is aten.mul.Tensor and reduce in ("sum", "mean"):
        found = _weighted(messages)
        if found is None:
            return "the messages are products, but not of gathered rows with one weight an edge or head"
        gather, weight = found
        if len(messages.users) != 1:
            return "something else reads the messages"
    else:
        return f"the messages are made on the edges by {getattr(messages.target, '_opname', None) or messages.name}"
    if gather.args[2] != 0 or placement(gather) != placement(messages):
        return "the rows are not gathered where they are reduced"
    if shape(gather) != shape(messages) or gather.meta["val"].dtype != messages.meta["val"].dtype:
        return "the weights change the shape or type of the messages"
    builder = Builder(node)
    if weight is not None:
        weight = _flat_weight(builder, weight, gather)
        if weight is None:
            return "the weights differ from feature to feature"
    new = builder.call(ops.spmm, gather.args[0], gather.args[1], dst, weight, rows, reduce, val=node.meta["val"])
    copy_meta(node, new)
    replace(node, new)
    return ""


def _weighted(product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    a, b = product.args[0], product.args[1]
    for gather, weight in ((a, b), (b, a)):
        if isinstance(gather, fx.Node) and gather.target is ops.gather and is_tensor(weight):
            assert isinstance(weight, fx.Node)
            place = placement(weight)
            if isinstance(place, Rows) and place.dim + len(shape(product)) == len(shape(weight)):
                return gather, weight
    return None


def _flat_weight(builder: Builder, weight: fx.Node, gather: fx.Node) -> fx.Node | None:
    """The weight as ``[edges]`` or ``[edges, heads]``; None if it differs from feature to feature."""
    sizes, messages = shape(weight), shape(gather)
    if weight.meta["val"].dtype != gather.meta["val"].dtype:
        return None
    if all(s == 1 for s in sizes[1:]):
        wanted: list[Any] = [-1]
    elif len(messages) == 3 and len(sizes) == 3 and sizes[1] == messages[1] and sizes[2] == 1:
        wanted = [-1, int(sizes[1])]
    else:
        return None
    if len(sizes) == len(wanted):
        return weight
    val = weight.meta["val"]
    shaped = val.new_empty((val.shape[0], *wanted[1:]))
    flat = builder.call(aten.view.default, weight, wanted, val=shaped)
    copy_meta(weight, flat)
    flat.meta["val"] = shaped
    return flat
