"""Sizes that are shapes become this rank's numbers of rows; sizes that are numbers stay the global ones."""

from __future__ import annotations

import operator

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.placement import REPLICATED, Rows
from sylvie_fx.ir.program import Program, meta

aten = torch.ops.aten

SHAPED = {
    aten.view.default: 1, aten.reshape.default: 1, aten._unsafe_view.default: 1, aten.expand.default: 1, aten.repeat.default: 1,
    aten.full.default: 0, aten.zeros.default: 0, aten.ones.default: 0, aten.empty.memory_format: 0, aten.broadcast_to.default: 1,
    aten.unflatten.int: 2, aten.tile.default: 1,
}  # fmt: skip
"""Operators that take a shape, and the position of that argument."""


def localise_sizes(program: Program) -> None:
    """Replace sizes that are shapes by local counts, and give dropouts their rows' global indices."""
    for node in list(program.graph.nodes):
        place = meta(node).placement
        if not isinstance(place, Rows):
            continue
        assert place.component is not None
        if node.target in SHAPED:
            position = SHAPED[node.target]
            shape_argument = node.args[position]
            assert isinstance(shape_argument, (list, tuple))
            sizes = list(shape_argument)
            at = place.dim if node.target is not aten.unflatten.int else -1
            if 0 <= at < len(sizes) and isinstance(sizes[at], fx.Node):
                node.update_arg(position, [*sizes[:at], _count(program, node, place), *sizes[at + 1 :]])
        elif node.target is ops.scatter:
            node.update_arg(2, _count(program, node, place))
        elif node.target is ops.node_dropout and node.args[1] is None:
            size = node.meta["val"].shape[place.dim]
            ids = node.meta["val"].new_empty((size,), dtype=torch.int64)
            rows = Rows(place.space, 0, 1, place.component)
            keys = program.bound_input(
                program.row_ids, f"ids_{place.component}", (place.component, place.space), ids, rows
            )
            node.args = (node.args[0], keys, *node.args[2:4], place.dim)
    for name in list(program.numbers):
        node = next(n for n in program.graph.nodes if n.name == name)
        if not node.users:
            program.graph.erase_node(node)
            del program.numbers[name]


def _count(program: Program, node: fx.Node, place: Rows) -> fx.Node:
    assert place.component is not None
    size = node.meta["val"].shape[place.dim]
    count = program.count(place.component, place.space, size)
    if place.factor == 1:
        return count
    with program.graph.inserting_before(node):
        scaled = program.graph.call_function(operator.mul, (count, place.factor))
    scaled.meta["val"] = size
    meta(scaled).placement = REPLICATED
    return scaled
