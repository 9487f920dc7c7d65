"""Insert the exchanges: halo rows before gathers, partial sums after scatters, moved rows where layouts differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.placement import REPLICATED, Layout, Rows
from sylvie_fx.ir.program import Localized, Program, halo_count, meta, placement
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.build import Builder


@dataclass(frozen=True)
class InsertHalo(Pass):
    """Give every gather and scatter whose rows are not provably on this rank the exchange that brings or returns them.

    Requires: infer-placement.
    Ensures: every gather reads own and halo rows, every scatter writes own rows; the same value crosses once for the
    same index. Whether an exchange moves any row is known when data is sharded; one that moves none is left out.

    Before::

        m = sylvie.gather(h, src)

    After::

        halo = sylvie.halo_exchange(h, 0)
        m = sylvie.gather(halo, src)
    """

    name: ClassVar[str] = "insert-halo"

    def run(self, program: Program, context: PassContext) -> Program:
        """Insert exchanges in front of gathers, and behind or in front of scatters."""
        crossed: dict[tuple[fx.Node, int], fx.Node] = {}
        for node in list(program.graph.nodes):
            if node.target is ops.gather:
                _before_gather(program, node, crossed)
            elif node.target is ops.scatter and isinstance(placement(node), Rows):
                _around_scatter(program, node)
        return program


def _is_local(program: Program, index: Localized) -> bool:
    """The layout of the edge-like rows is the one that this index gives them."""
    assert isinstance(index.placement, Rows)
    component = index.placement.component
    known = program.components[component].layout if component else Layout("entry")
    return known == Layout("by", index=index.value, target=index.index_into, target_space=index.index_space)


def _before_gather(program: Program, node: fx.Node, crossed: dict[tuple[fx.Node, int], fx.Node]) -> None:
    source, index = node.args[0], node.args[1]
    assert isinstance(source, fx.Node)
    assert isinstance(index, fx.Node)
    bound = program.localized[index.name]
    if bound.slot is not None or _is_local(program, bound):
        return
    assert isinstance(bound.placement, Rows)
    assert bound.index_into is not None
    slot = program.slot("gather", (bound.index_into, bound.index_space), _rows_of(bound.placement), bound.value)
    key = (source, slot.number)
    if key not in crossed:
        # Right behind the value itself, so that a later gather of the same value finds the exchange in front of it.
        anchor = source.next
        while anchor.op in ("placeholder", "get_attr"):
            anchor = anchor.next
        crossed[key] = Builder(anchor).call(
            ops.halo_exchange, source, slot.number, node.args[2], val=source.meta["val"], place=placement(source)
        )
        meta(crossed[key]).where, meta(crossed[key]).module = meta(node).where, meta(node).module
    node.update_arg(0, crossed[key])
    node.update_arg(1, _index_variant(program, index, replace(bound, slot=slot.number)))


def _rows_of(place: Rows) -> tuple[int, str]:
    return place.component or 0, place.space


def _index_variant(program: Program, index: fx.Node, bound: Localized) -> fx.Node:
    node = program.bound_input(program.localized, index.name, bound, index.meta["val"], bound.placement)
    meta(node).where, meta(node).module = meta(index).where, meta(index).module
    if not index.users:
        program.localized.pop(index.name, None)
        program.graph.erase_node(index)
    return node


def _around_scatter(program: Program, node: fx.Node) -> None:
    source, index, _, reduce, dim = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(index, fx.Node)
    bound = program.localized[index.name]
    if bound.slot is not None or _is_local(program, bound):
        return
    place, out = placement(source), placement(node)
    assert isinstance(place, Rows)
    assert isinstance(out, Rows)
    assert bound.index_into is not None
    if reduce == "sum":
        slot = program.slot("gather", (bound.index_into, bound.index_space), _rows_of(place), bound.value)
        node.update_arg(1, _index_variant(program, index, replace(bound, slot=slot.number)))
        key = (halo_count(slot.number), out.space)
        rows = program.bound_input(
            program.counts, f"rows_halo_{slot.number}", key, node.meta["val"].shape[out.dim], REPLICATED
        )
        node.update_arg(2, rows)
        following = Builder(node.next)
        reduced = following.call(ops.halo_reduce, node, slot.number, dim, val=node.meta["val"], place=out)
        meta(reduced).where, meta(reduced).module = meta(node).where, meta(node).module
        node.replace_all_uses_with(reduced, delete_user_cb=lambda user: user is not reduced)
        return
    layout = Layout("by", index=bound.value, target=bound.index_into, target_space=bound.index_space)
    known = [c.number for c in program.components.values() if c.layout == layout and c.space == place.space]
    component = known[0] if known else program.component(place.space, layout).number
    slot = program.slot("relayout", _rows_of(place), (component, place.space), None)
    moved = replace(place, component=component)
    value = Builder(node).call(ops.relayout, source, slot.number, dim, val=source.meta["val"], place=moved)
    node.update_arg(0, value)
    node.update_arg(1, _index_variant(program, index, replace(bound, placement=Rows(place.space, 0, 1, component))))
