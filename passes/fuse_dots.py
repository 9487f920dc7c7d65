"""Take the products of rows with vectors, as attention scores nodes, in one sweep over the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.placement import Rows
from sylvie_fx.ir.program import Program, placement, shape
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.build import Builder, copy_meta
from sylvie_fx.passes.build import replace as replace_node

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseDots(Pass):
    """Replace the products of rows of heads with vectors, summed over the last dimension, by one ``sylvie.row_dots``.

    No product is made, forward or backward, and rows that are scored by several vectors get one gradient of all of them.
    Own rows of a value on own and halo rows are scored there, and their scores are taken of all.

    Requires: place-halos, which may let a score's rows cross.
    Ensures: the same values up to rounding.

    Before::

        own = aten.slice(h, 0, 0, rows_0)
        mul = aten.mul(h, a)
        s = aten.sum(mul, [-1])
        mul_1 = aten.mul(own, b)
        t = aten.sum(mul_1, [-1])

    After::

        dots = sylvie.row_dots(h, [a, b])
        s = aten.select(dots, 0, 0)
        select = aten.select(dots, 0, 1)
        t = aten.slice(select, 0, 0, rows_0)
    """

    name: ClassVar[str] = "fuse-dots"

    def run(self, program: Program, context: PassContext) -> Program:
        """Fuse the products with each value."""
        order = {node: i for i, node in enumerate(program.graph.nodes)}
        found: dict[fx.Node, list[_Dot]] = {}
        for node in order:
            if (dot := _dot(node)) is not None:
                found.setdefault(dot.rows, []).append(dot)
        for dots in found.values():
            start = dots[0].product
            together = [d for d in dots if order[d.vector] < order[start] and order[d.rows] < order[start]]
            _fuse(together)
        return program


@dataclass(frozen=True)
class _Dot:
    product: fx.Node
    sum: fx.Node
    rows: fx.Node
    vector: fx.Node
    own: fx.Node | None  # how many of the rows are scored; None for all


def _dot(product: fx.Node) -> _Dot | None:
    if product.target is not aten.mul.Tensor or len(product.users) != 1 or len(shape(product)) != 3:
        return None
    total = next(iter(product.users))
    if total.target is not aten.sum.dim_IntList or len(total.args) < 2 or total.kwargs:
        return None
    if total.args[1] not in ([-1], (-1,), [2], (2,)):
        return None
    rows, vector = product.args
    if isinstance(vector, fx.Node) and isinstance(placement(vector), Rows):
        rows, vector = vector, rows
    if not isinstance(rows, fx.Node) or not isinstance(vector, fx.Node) or isinstance(placement(vector), Rows):
        return None
    place, sizes, dtype = placement(rows), shape(vector), product.meta["val"].dtype
    if not isinstance(place, Rows) or place.dim != 0 or shape(rows) != shape(product):
        return None
    if sizes[-2:] != shape(rows)[1:] or not (len(sizes) == 2 or (len(sizes) == 3 and sizes[0] == 1)):
        return None
    if not dtype.is_floating_point or {rows.meta["val"].dtype, vector.meta["val"].dtype} != {dtype}:
        return None
    own: fx.Node | None = None
    if rows.target is aten.slice.Tensor and rows.args[1:3] == (0, 0) and len(rows.args) == 4:
        whole, end = rows.args[0], rows.args[3]
        if not isinstance(whole, fx.Node) or not isinstance(end, fx.Node):
            return None
        rows, own = whole, end
    return _Dot(product, total, rows, vector, own)


def _fuse(dots: list[_Dot]) -> None:
    if not dots:
        return
    rows, start = dots[0].rows, dots[0].product
    place = placement(rows)
    assert isinstance(place, Rows)
    stacked = Builder(start).call(ops.row_dots, rows, [d.vector for d in dots], place=replace(place, dim=1))
    for k, dot in enumerate(dots):
        builder = Builder(dot.sum)
        score = builder.call(aten.select.int, stacked, 0, k, place=place)
        if dot.own is not None:
            score = builder.call(aten.slice.Tensor, score, 0, 0, dot.own, place=place)
        if len(dot.sum.args) > 2 and dot.sum.args[2]:
            score = builder.call(aten.unsqueeze.default, score, -1, place=place)
        copy_meta(dot.sum, score)
        replace_node(dot.sum, score)
        operands = dot.product.all_input_nodes
        dot.product.graph.erase_node(dot.product)
        for node in operands:
            if node.target is aten.slice.Tensor and not node.users:
                node.graph.erase_node(node)
