"""Both ends of a program on a graph: what it reads of the whole graph, and what its results are rows of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sylvie_fx.graphs.layout import RowLayout
from sylvie_fx.graphs.sharded import ShardedGraph, Space
from sylvie_fx.ir.placement import Rows
from sylvie_fx.ir.program import Program, meta
from sylvie_fx.leaves import Leaf, Sharding, names_of
from sylvie_fx.runtime.bind import Binder


def whole_inputs(program: Program, leaves: Sequence[Leaf], spaces: Sequence[Space]) -> dict[str, Tensor]:
    """The static inputs of a program on the whole graph."""
    whole = {}
    for item, leaf in zip(program.inputs, leaves, strict=False):
        if item.static:
            assert leaf.sharding is not None
            assert leaf.sharding.whole is not None
            whole[item.name] = leaf.sharding.whole
    for item, space in zip(program.inputs[len(leaves) :], spaces, strict=True):
        whole[item.name] = torch.zeros(1, dtype=torch.bool).expand(space.rows)
    return whole


def results_of(program: Program, binder: Binder, graph: ShardedGraph, spaces: Sequence[Space]) -> list[Sharding | None]:
    """What each result of a program is rows of; None where it is the same on every rank."""
    entries = {name: space for space, name in names_of(spaces).items()}
    output = next(n for n in program.graph.nodes if n.op == "output")
    found: list[Sharding | None] = []
    for node in output.args[0]:
        place = meta(node).placement
        if not isinstance(place, Rows):
            found.append(None)
            continue
        space = None if place.component or place.factor > 1 else entries.get(place.space)
        if space is None:
            layout = binder.layout(place.component or 0, place.space)
            if place.factor > 1:  # a user sees entries, not the rows that they belong to
                layout = RowLayout(layout.owner.repeat_interleave(place.factor), layout.parts)
            space = graph.subset(layout)
        found.append(Sharding(graph, space, place.dim, *_structure(program, binder, node.name, space, graph)))
    return found


def _structure(
    program: Program, binder: Binder, name: str, space: Space, graph: ShardedGraph
) -> tuple[Tensor | None, bool]:
    """The whole of a result that depends on the graph alone, and whether its values may name nodes."""
    known = program.localized.get(name)
    if known is None or known.index_into is not None or known.slot is not None or known.halo is not None:
        return None, False
    whole: Tensor = binder.results[known.value]
    if whole.dtype.is_floating_point and space is graph.spaces["N"]:
        return None, False
    integers = not whole.dtype.is_floating_point and whole.dtype != torch.bool and whole.numel() > 0
    return whole, integers and int(whole.min()) >= 0 and int(whole.max()) < graph.num_nodes
