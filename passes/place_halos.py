"""Choose which values cross: a minimum cut of the row-local dataflow in front of the gathers of one exchange."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx
import torch
from torch import fx
from torch._ops import OpOverload

from sylvie_fx.ir import ops
from sylvie_fx.ir.effects import has_effect
from sylvie_fx.ir.placement import REPLICATED, Rows
from sylvie_fx.ir.program import Meta, Program, halo_count, is_number, is_tensor, meta, placement, shape
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.build import Builder, copy_meta
from sylvie_fx.passes.dependence import depends_on_inputs_alone, needs_gradient
from sylvie_fx.passes.local_sizes import SHAPED

aten = torch.ops.aten

FLOPS, SWEPT, MESSAGE = 50.0, 10.0, 50.0
"""Of one core, as measured: operations of a matrix product and bytes read or written a nanosecond; nanoseconds that a
row takes for being in one message more, where a message has some thousands."""

MOVED = 3.0
"""How many times its time may be spent so that a product of a dropout's rows need not cross at few bits (docs/design.md)."""

_PRODUCTS = frozenset({aten.linear.default, aten.mm.default, aten.matmul.default, aten.addmm.default, aten.bmm.default})

_FIXED = frozenset(
    {
        ops.gather,
        ops.scatter,
        ops.spmm,
        ops.halo_exchange,
        ops.halo_reduce,
        ops.relayout,
        ops.all_reduce,
        ops.all_reduces,
    }
)


@dataclass(frozen=True)
class PlaceHalos(Pass):
    """Let the values cross that cost the least time, and recompute what is row-local on the halo rows.

    A gather needs a value on own and halo rows; what lies between two aggregations can be computed on either side of
    the wire. For each exchange the values that cross are a minimum cut (Ford and Fulkerson, 1956; networkx) between
    what only the owner can know (inputs, aggregated neighbours) and what is gathered. A value's capacity is the time that a
    row of it takes in a step with its codec, forward and backward: its bytes over the link, and the sweeps over memory that
    collect and spread it. An input without gradient crosses once and costs nothing; recomputing costs its operations and
    sweeps. What a dropout made does not cross where the code is relative to what crossed before, and what a product made of
    that crosses only where no more bytes cross in front of the dropout, in less than three times the time.

    Requires: insert-halo.
    Ensures: what crosses is enough for every gather of the exchange.

    Before::

        a = sylvie.halo_exchange(score, 0, 0)      # score = (h * w).sum(-1)
        b = sylvie.halo_exchange(h, 0, 0)

    After::

        b = sylvie.halo_exchange(h, 0, 0)
        mul = aten.mul(b, w)
        a = aten.sum(mul, [-1])
    """

    name: ClassVar[str] = "place-halos"

    def run(self, program: Program, context: PassContext) -> Program:
        """Cut in front of each exchange, once."""
        cuts = []
        for slot in program.slots:
            needed = [n for n in program.graph.nodes if n.target is ops.halo_exchange and n.args[1] == slot.number]
            needed = [n for n in needed if not meta(n).considered]
            cut = _Cut(program, context, slot.number, *slot.source)
            for exchanges in cut.groups(needed):
                cut.apply(exchanges)
            cuts.append(cut)
        for cut in cuts:  # after all of them: a value on own and halo rows of one slot is no source for another
            cut.share()
        return program


class _Cut:
    def __init__(self, program: Program, context: PassContext, slot: int, component: int, space: str) -> None:
        self.program, self.options, self.slot, self.link = program, context.options, slot, context.link
        self.space, self.component = space, component
        self.extended: dict[fx.Node, fx.Node] = {}
        self.needed_by: dict[fx.Node, Meta] = {}

    def groups(self, exchanges: list[fx.Node]) -> list[list[fx.Node]]:
        """Exchanges whose values are computed from common ones are cut together."""
        found: list[tuple[set[fx.Node], list[fx.Node]]] = []
        for node in exchanges:
            # Graph-only values are read by all layers, and cost nothing: they tie no exchanges together.
            region = {n for n in self._region([node.args[0]]) if self._can_cross(n)}  # type: ignore[list-item]
            members = [node]
            apart = []
            for other, theirs in found:
                if region.isdisjoint(other):
                    apart.append((other, theirs))
                else:
                    region, members = region | other, theirs + members
            found = [*apart, (region, members)]
        return [members for _, members in found]

    def apply(self, exchanges: list[fx.Node]) -> None:
        """Move one group of exchanges to the minimum cut."""
        order = {n: i for i, n in enumerate(self.program.graph.nodes)}
        # What serves several modules travels as the first of them asks for.
        for exchange in sorted(exchanges, key=order.__getitem__):
            for node in self._region([exchange.args[0]]):  # type: ignore[list-item]
                self.needed_by.setdefault(node, meta(exchange))
        wanted = [n.args[0] for n in exchanges]
        region = self._region(wanted)  # type: ignore[arg-type]
        crossing = self._minimum(region, wanted, 1.0)  # type: ignore[arg-type]
        if any(self._moves(n) for n in crossing):
            steady = self._minimum(region, wanted, MOVED)  # type: ignore[arg-type]
            if sum(map(self._bytes, steady)) <= sum(map(self._bytes, crossing)):
                crossing = steady
        could = [n for n in region if self._can_cross(n) and not self._jumps(n)]
        considered = tuple(sorted(((n.name, round(self._bytes(n), 1)) for n in could), key=lambda c: c[1]))
        for value in sorted(crossing, key=order.__getitem__):
            anchor = value.next
            while anchor.op in ("placeholder", "get_attr"):
                anchor = anchor.next
            place = placement(value)
            assert isinstance(place, Rows)
            node = Builder(anchor).call(
                ops.halo_exchange, value, self.slot, place.dim, val=value.meta["val"], place=place
            )
            known = meta(node)
            reader = self.needed_by[value]
            known.where, known.module, known.considered = reader.where, reader.module, considered[:8]
            self.extended[value] = node
        for node in exchanges:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            new = self._extend(source)
            node.replace_all_uses_with(new)
            self.program.graph.erase_node(node)

    def _is_ours(self, node: fx.Node) -> bool:
        place = meta(node).placement
        return isinstance(place, Rows) and place.space == self.space and place.component == self.component

    def _recomputable(self, node: fx.Node) -> bool:
        """A row-local operator on rows of the component and replicated values."""
        if node.op == "placeholder":
            return node.name in self.program.localized or node.name in self.program.row_ids
        if (
            node.op != "call_function"
            or not isinstance(node.target, OpOverload)
            or node.target in _FIXED
            or not is_tensor(node)
        ):
            return False
        if node.target._schema.is_mutable or meta(node).crosses:
            return False
        for operand in node.all_input_nodes:
            if is_number(operand) or not isinstance(meta(operand).placement, Rows):
                if isinstance(meta(operand).placement, tuple):
                    return False
                continue
            if not self._is_ours(operand):
                return False
        return True

    def _region(self, wanted: Iterable[fx.Node]) -> list[fx.Node]:
        """The gathered values and everything row-local that they are computed from."""
        seen: dict[fx.Node, None] = {}
        stack = list(wanted)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen[node] = None
            if self._recomputable(node):
                stack += [n for n in node.all_input_nodes if self._is_ours(n)]
        return list(seen)

    def _can_cross(self, node: fx.Node) -> bool:
        return (is_tensor(node) and node.op != "placeholder") or (
            node.op == "placeholder" and not self._recomputable(node)
        )

    def _jumps(self, node: fx.Node) -> bool:
        """Whether a value is a dropout's, or as good as that, and would be coded against what crossed before.

        A new mask each step is a jump that such a code spends its bits on (docs/design.md); what is in front of the mask
        has as many numbers, and the mask is drawn by node.
        """
        return self._is_followed(node) and self._is_masked(node, through_products=False)

    def _moves(self, node: fx.Node) -> bool:
        """Whether a value is computed from a dropout's: its rows are what a code that follows them is worst at."""
        return self._is_followed(node) and self._is_masked(node, through_products=True)

    def _is_followed(self, node: fx.Node) -> bool:
        coding = self.options.coding(self.program.mode, self.needed_by[node].module, _columns(node))
        return coding.forward.variant != "plain"

    def _is_masked(self, node: fx.Node, through_products: bool) -> bool:
        seen, stack = set(), [node]
        while stack:
            current = stack.pop()
            if current in seen or not self._recomputable(current) or not isinstance(current.target, OpOverload):
                continue
            seen.add(current)
            if current.target is ops.node_dropout:
                return True
            local = torch.Tag.pointwise in current.target.tags
            if local or (through_products and (current.target in _PRODUCTS or _is_view(current.target))):
                stack += [n for n in current.all_input_nodes if self._is_ours(n)]
        return False

    def _bytes(self, node: fx.Node) -> float:
        """Bytes a row and step, forward and backward."""
        if depends_on_inputs_alone(self.program, node):
            return 0.0
        val, columns = node.meta["val"], _columns(node)
        coding = self.options.coding(self.program.mode, self.needed_by[node].module, columns)
        size = val.element_size()
        total = coding.forward.row_bytes(columns, size)
        if self._learns(node):
            total += coding.backward.row_bytes(columns, size)
        return total

    def _sent(self, node: fx.Node) -> float:
        """Nanoseconds a row and step: on the link, and in memory where it is collected, copied and spread."""
        wire = self._bytes(node)
        if wire == 0.0:
            return 0.0
        return 8 * wire / self.link + 3 * self._swept(node) + MESSAGE

    def _recomputed(self, node: fx.Node) -> float:
        """Nanoseconds a row and step."""
        target = node.target
        if node.op != "call_function" or not isinstance(target, OpOverload):
            return 0.0
        if target in _PRODUCTS:
            first = node.args[1 if target is aten.addmm.default else 0]
            assert isinstance(first, fx.Node)
            last = shape(first)[-1]
            directions = 1
            if self._learns(node):
                directions += 1 + self._learns(first)
            return _columns(node) * 2 * (1 if last.free_symbols else int(last)) * directions / FLOPS
        return 0.0 if _is_view(target) else self._swept(node)

    def _swept(self, node: fx.Node) -> float:
        """Nanoseconds that one reading and one writing of a row take, and as much for its gradient's."""
        directions = 2 if self._learns(node) else 1
        size: int = node.meta["val"].element_size()
        return 2 * directions * _columns(node) * size / SWEPT

    def _learns(self, node: fx.Node) -> bool:
        return self.program.mode == "train" and needs_gradient(self.program, node)

    def _minimum(self, region: list[fx.Node], wanted: list[fx.Node], moved: float) -> list[fx.Node]:
        """The values of a minimum cut, of which those that move cost ``moved`` times their time.

        Capacities are whole picoseconds, so that ties are ties.
        """
        network = nx.DiGraph()
        network.add_node("owner")
        network.add_node("halo")
        for node in region:
            enters, leaves = (node, "in"), (node, "out")
            if self._can_cross(node) and not self._jumps(node):
                times = moved if self._moves(node) else 1.0
                network.add_edge(enters, leaves, capacity=round(1000 * times * self._sent(node)) + 1)
            else:
                network.add_edge(enters, leaves)
            if not self._recomputable(node):
                network.add_edge("owner", enters)  # without capacity: infinite
            else:
                network.add_edge("owner", enters, capacity=round(1000 * self._recomputed(node)))
                for operand in node.all_input_nodes:
                    if self._is_ours(operand):
                        network.add_edge((operand, "out"), enters)
        for node in wanted:
            network.add_edge((node, "out"), "halo")
        _, (owner_side, _) = nx.minimum_cut(network, "owner", "halo")
        return [n for n in region if (n, "in") in owner_side and (n, "out") not in owner_side]

    def _extend(self, node: fx.Node) -> fx.Node:
        """The value on own and halo rows."""
        if node in self.extended:
            return self.extended[node]
        if node.op == "placeholder":
            new = self._extended_placeholder(node)
        else:
            operands = {n: self._extend(n) for n in node.all_input_nodes if self._is_ours(n)}
            anchor = max([node, *operands.values()])
            with self.program.graph.inserting_after(anchor):
                new = self.program.graph.node_copy(node, lambda n: operands.get(n, n))
            copy_meta(node, new)
            if node.target in SHAPED:
                position = SHAPED[node.target]
                new.update_arg(position, fx.node.map_arg(new.args[position], self._extended_count))
        self.extended[node] = new
        return new

    def _extended_placeholder(self, node: fx.Node) -> fx.Node:
        program, place = self.program, placement(node)
        if node.name in program.row_ids:
            key = (halo_count(self.slot), self.space)
            return program.bound_input(program.row_ids, f"ids_halo_{self.slot}", key, node.meta["val"], place)
        bound = replace(program.localized[node.name], halo=self.slot)
        new = program.bound_input(program.localized, f"{node.name}_halo", bound, node.meta["val"], place)
        meta(new).where, meta(new).module = meta(node).where, meta(node).module
        return new

    def _extended_count(self, number: fx.Node) -> fx.Node:
        program = self.program
        if program.counts.get(number.name) == (self.component, self.space):
            key = (halo_count(self.slot), self.space)
            return program.bound_input(program.counts, f"rows_halo_{self.slot}", key, number.meta["val"], REPLICATED)
        if number.op == "call_function":  # a multiple of the count
            with program.graph.inserting_after(number):
                new = program.graph.node_copy(number, lambda n: self._extended_count(n))
            copy_meta(number, new)
            return new
        return number

    def share(self) -> None:
        """Own rows of a value that was extended are read from there, so that they are computed once."""
        graph = self.program.graph
        recomputed = [(n, e) for n, e in self.extended.items() if n.op == "call_function" and e.target is n.target]
        for node, extended in reversed(recomputed):
            if not node.users or not extended.users:
                continue  # erased below, with what only it has read
            place = placement(node)
            assert isinstance(place, Rows)
            if place.factor != 1 or any(user < extended for user in node.users):
                continue
            count = self.program.count(self.component, self.space, node.meta["val"].shape[place.dim])
            with graph.inserting_after(extended):
                own = graph.call_function(aten.slice.Tensor, (extended, place.dim, 0, count))
            copy_meta(node, own)
            node.replace_all_uses_with(own, delete_user_cb=lambda user, own=own: user is not own)  # type: ignore[misc]
            graph.erase_node(node)
        graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or has_effect(n))


def _is_view(target: OpOverload) -> bool:
    return bool(target._schema.returns) and target._schema.returns[0].alias_info is not None


def _columns(node: fx.Node) -> int:
    """Numbers in a row."""
    return math.prod(int(s) for s in shape(node) if not s.free_symbols)
