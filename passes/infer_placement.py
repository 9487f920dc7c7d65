"""Infer where every value lives, choose the layouts of edge-like values, and make sizes local where they are shapes."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

import sylvie_fx.ir.rules_index
import sylvie_fx.ir.rules_math
import sylvie_fx.ir.rules_shape  # noqa: F401  (all three fill the registry)
from sylvie_fx.ir import ops
from sylvie_fx.ir.placement import NODES, REPLICATED, Placement, Rows
from sylvie_fx.ir.program import Localized, Program, is_number, is_tensor, meta, shape
from sylvie_fx.ir.rules import Call, Refused, find_rule
from sylvie_fx.passes.base import Pass, PassContext, refuse
from sylvie_fx.passes.build import copy_meta
from sylvie_fx.passes.components import Components
from sylvie_fx.passes.local_sizes import localise_sizes
from sylvie_fx.passes.static import FACTORIES

aten = torch.ops.aten


@dataclass(frozen=True)
class InferPlacement(Pass):
    """Give every value a placement by the rule of its operator, and every edge-like component a layout.

    Requires: split-prologue.
    Ensures: every node has a placement; a graph-only value is laid out once for each component that reads it; a size
    that is a shape is this rank's number of rows, a size that is a number stays the global one.

    Before::

        h = aten.view(x, [size, 2, 8])
        m = sylvie.gather(h, src)

    After::

        rows_0 = count(#0 N)
        h = aten.view(x, [rows_0, 2, 8])    # rows[N]
        m = sylvie.gather(h, src)           # rows[E]#1
    """

    name: ClassVar[str] = "infer-placement"

    def run(self, program: Program, context: PassContext) -> Program:
        """Infer once; a program whose output has been placed is left alone."""
        output = next(n for n in program.graph.nodes if n.op == "output")
        if meta(output).placement is None:
            _Inference(program).run(output)
        return program


@dataclass(frozen=True)
class _Use:
    """A value that adapts to its reader's layout, where it is read."""

    user: fx.Node
    value: fx.Node
    component: int
    index_into: int | None = None
    index_space: str = NODES


class _Inference:
    def __init__(self, program: Program) -> None:
        self.program, self.components = program, Components()
        self.place: dict[fx.Node, Any] = {}
        self.adaptive: set[fx.Node] = set()
        self.uses: list[_Use] = []
        self.entries = {i.name: i for i in program.inputs}

    def run(self, output: fx.Node) -> None:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self.place[node] = REPLICATED
            elif node.op == "call_function":
                self._call(node)
        self._outputs(output)
        final = self.components.settle(self.program)
        self._write(final)
        self._adapt(final)
        localise_sizes(self.program)
        meta(output).placement = REPLICATED

    # --- placements --------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        if not is_tensor(node):
            self.place[node] = REPLICATED
            return
        entry = self.entries.get(node.name) if node.name not in self.program.localized else None
        if entry is not None:
            self.place[node] = entry.rows if isinstance(entry.rows, Rows) else REPLICATED
            if isinstance(entry.rows, Rows):
                self.place[node] = replace(entry.rows, component=0)
                if entry.rows.space != NODES:
                    self.adaptive.add(node)
            return
        found = [d for d in shape(node) if self.program.space_of(d) is not None]
        if len(found) > 1:
            user = next(iter(node.users))
            raise refuse(user, "it uses a dense matrix of rows by rows", "it does not fit in 1/k of the memory",
                         "use the edges of the graph, or a sparse adjacency")  # fmt: skip
        rows = self.program.rows_of_shape(shape(node))
        self.place[node] = replace(rows, component=0) if rows else REPLICATED
        if rows:
            self.adaptive.add(node)

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            place = self.place[source]
            self.place[node] = place[index] if isinstance(place, tuple) else place
            return
        if is_number(node) or not isinstance(node.target, OpOverload):
            self.place[node] = REPLICATED
            if not is_number(node):
                raise refuse(
                    node, f"{node.target} is not an operator", "its effect on rows is unknown", "use torch operators"
                )
            if any(isinstance(self.place.get(n), Rows) for n in node.all_input_nodes):
                raise self._host_sync(node)
            return
        if node.target is ops.gather:
            self._gather(node)
        elif node.target is ops.scatter:
            self._scatter(node)
        else:
            self._by_rule(node)

    def _host_sync(self, node: fx.Node) -> Exception:
        return refuse(node, f"{node.target} turns rows of the graph into a Python number", "each rank would read a number of its own",
                      "reduce over the rows first, and keep the result a tensor")  # fmt: skip

    def _gather(self, node: fx.Node) -> None:
        source, index, dim = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, fx.Node)
        place = self.place[source]
        if not isinstance(place, Rows) or place.dim != dim or place.factor != 1:
            raise refuse(node, "rows are picked from a value that does not hold one entry a row in that dimension",
                         "its rows are spread over the ranks in another dimension", "reshape it to [rows, ...] first")  # fmt: skip
        space = self.program.space_of(shape(index)[0])
        if space is None:
            raise refuse(node, "a fixed number of rows of the graph is read by position", "every rank would need them",
                         "use a mask and a reduction")  # fmt: skip
        into = self._entry_component(source, place)
        out = self.components.new(space)
        self.components.gathers.append((out, self._prologue_value(index), into, place.space))
        self.uses.append(_Use(node, index, out, into, place.space))
        if source in self.adaptive:
            self.uses.append(_Use(node, source, into))
        self.place[node] = Rows(space, place.dim, 1, out)

    def _prologue_value(self, index: fx.Node) -> str:
        return self.program.localized[index.name].value

    def _entry_component(self, source: fx.Node, place: Rows) -> int:
        """The component in which an operand is read; a value that adapts is read as it entered."""
        assert place.component is not None
        if source in self.adaptive and source.target in FACTORIES:
            return self.components.new(place.space)
        return place.component

    def _scatter(self, node: fx.Node) -> None:
        source, index, _, _, dim = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, fx.Node)
        place = self.place[source]
        own = self.program.space_of(shape(index)[0])
        if not isinstance(place, Rows) or place.dim != dim or place.factor != 1 or place.space != own:
            raise refuse(node, "rows are written from a value that does not hold one entry for each index",
                         "its rows are spread over the ranks in another dimension", "reshape it to [edges, ...] first")  # fmt: skip
        space = self.program.space_of(shape(node)[dim])  # type: ignore[index]
        if space is None:  # a table of fixed length, the same on every rank: rows of all ranks are combined in it
            self._meet(node, [n for n in (source, index) if isinstance(self.place[n], Rows)], REPLICATED)
            self.place[node] = REPLICATED
            meta(node).crosses = True
            return
        component = self.components.new(own) if source in self.adaptive else place.component
        assert component is not None
        target = self.components.new(space)
        self.components.scatters.append((component, self._prologue_value(index), target, space))
        self.uses.append(_Use(node, index, component, target, space))
        if source in self.adaptive:
            self.uses.append(_Use(node, source, component))
        self.place[node] = Rows(space, place.dim, 1, target)

    def _by_rule(self, node: fx.Node) -> None:
        op = node.target
        assert isinstance(op, OpOverload)
        sharded = [n for n in node.all_input_nodes if isinstance(self.place.get(n), Rows)]
        call = Call(node, lambda n: self.place[n], self.program.rows_of_shape)
        rule = find_rule(op) if op is not ops.node_dropout else _dropout_rule
        if rule is None:
            if sharded:
                raise refuse(
                    node, f"{op} has no placement rule", "how it treats rows that are spread over ranks is unknown",
                    f"register one: @sylvie_fx.placement_rule(torch.ops.{str(op).replace('::', '.')})",
                )  # fmt: skip
            self.place[node] = REPLICATED
            return
        try:
            outcome = rule(call)
        except Refused as reason:
            raise refuse(node, f"{op} can not be distributed", reason.why, reason.remedy) from None
        known = meta(node)
        known.crosses = outcome.crosses
        if (
            isinstance(outcome.out, Rows)
            and op in (aten.cat.default, aten.concat.default)
            and self._joins(node, outcome.out)
        ):
            return
        component = self._meet(node, sharded, outcome.out)
        placed = tuple(outcome.out) if isinstance(outcome.out, tuple) else (outcome.out,)
        done = tuple(replace(p, component=component) if isinstance(p, Rows) else p for p in placed)
        self._check(node, done)
        self.place[node] = done if isinstance(outcome.out, tuple) else done[0]
        if op in FACTORIES and isinstance(self.place[node], Rows):
            self.adaptive.add(node)

    def _meet(self, node: fx.Node, sharded: list[fx.Node], out: Any) -> int:
        """The component in which the operands of a row-local operator meet."""
        spaces = [self.place[n].space for n in sharded] or [
            p.space for p in (out if isinstance(out, tuple) else (out,)) if isinstance(p, Rows)
        ]
        if not spaces:
            return 0
        component: int | None = None
        for n in sharded:
            if n in self.adaptive:
                continue
            own = self.place[n].component
            component = own if component is None else self.components.union(component, own)
        if component is None:
            component = self.components.new(spaces[0])
        for n in sharded:
            if n in self.adaptive:
                self.uses.append(_Use(node, n, component))
        return component

    def _joins(self, node: fx.Node, out: Rows) -> bool:
        """A concatenation along rows: the result has a component of its own, of which the operands are parts."""
        tensors = node.args[0]
        assert isinstance(tensors, (list, tuple))
        if all(self.place[t].space == out.space for t in tensors):  # type: ignore[index]
            return False
        whole = self.components.new(out.space)
        parts = []
        for t in tensors:
            assert isinstance(t, fx.Node)
            place = self.place[t]
            part = self.components.new(place.space)
            parts.append(part)
            self.uses.append(_Use(node, t, part))
        self.components.joins.append((whole, parts))
        self.place[node] = replace(out, component=whole)
        return True

    def _check(self, node: fx.Node, places: tuple[Placement, ...]) -> None:
        """The symbolic shape must agree with what the rule said, or the operator mixes rows in a way it did not see."""
        value = node.meta["val"]
        for place, val in zip(places, value if isinstance(value, (tuple, list)) else (value,), strict=True):
            if not isinstance(val, torch.Tensor):
                continue
            sizes = [s.node.expr if isinstance(s, torch.SymInt) else sympy.Integer(s) for s in val.shape]
            dims = [d for d, s in enumerate(sizes) if s.free_symbols]
            wanted = [place.dim] if isinstance(place, Rows) else []
            if dims != wanted:
                raise refuse(node, f"{node.target} makes a result of shape {[str(s) for s in val.shape]}",
                             "rows of the graph stand in a dimension where they can not be spread over ranks",
                             "keep one dimension that counts nodes or edges")  # fmt: skip

    def _outputs(self, output: fx.Node) -> None:
        assert isinstance(output.args[0], (list, tuple))
        results = [v for v in output.args[0] if isinstance(v, fx.Node)]
        for value in results:
            place = self.place[value]
            if not isinstance(place, Rows):
                continue
            entry = any(isinstance(i.rows, Rows) and i.rows.space == place.space for i in self.program.inputs)
            if entry and (value in self.adaptive or place.space != NODES):
                self.uses.append(_Use(output, value, 0))
            elif value in self.adaptive:
                # Graph-only rows of a space of the model's own: laid out like what is computed there.
                places = [self.place[v] for v in results if v not in self.adaptive]
                alike = [
                    p.component
                    for p in places
                    if isinstance(p, Rows) and p.space == place.space and p.component is not None
                ]
                self.uses.append(_Use(output, value, alike[0] if alike else self.components.new(place.space)))

    # --- rewriting ---------------------------------------------------------------------------------------------------

    def _write(self, final: dict[int, int]) -> None:
        def settle(place: Placement) -> Placement:
            if not isinstance(place, Rows) or place.component is None:
                return place
            return replace(place, component=final[self.components.find(place.component)])

        for node, place in self.place.items():
            meta(node).placement = tuple(map(settle, place)) if isinstance(place, tuple) else settle(place)

    def _adapt(self, final: dict[int, int]) -> None:
        made: dict[tuple[fx.Node, int, int | None, str], fx.Node] = {}
        for use in self.uses:
            component = final[self.components.find(use.component)]
            into = final[self.components.find(use.index_into)] if use.index_into is not None else None
            key = (use.value, component, into, use.index_space)
            if key not in made:
                made[key] = self._variant(use, component, into)
            if made[key] is not use.value:
                use.user.replace_input_with(use.value, made[key])
        graph = self.program.graph
        for node in list(self.adaptive):
            if not node.users and node.name not in self.entries and node.op != "output":
                self.program.localized.pop(node.name, None)
                graph.erase_node(node)

    def _variant(self, use: _Use, component: int, into: int | None) -> fx.Node:
        """The value as one component reads it."""
        program, value = self.program, use.value
        place = replace(self.place[value], component=component)
        if value.name in program.localized:
            bound = Localized(program.localized[value.name].value, place, into, use.index_space)
            node = program.bound_input(program.localized, value.name, bound, value.meta["val"], place)
            meta(node).where, meta(node).module = meta(value).where, meta(value).module
            return node
        current = meta(value).placement
        if value.target not in FACTORIES and isinstance(current, Rows) and current.component == component:
            return value
        after = value if value.op != "placeholder" else [n for n in program.graph.nodes if n.op == "placeholder"][-1]
        with program.graph.inserting_after(after):
            if value.target in FACTORIES:
                node = program.graph.node_copy(value)
            else:
                source = current.component if isinstance(current, Rows) else 0
                slot = program.slot("relayout", (source or 0, place.space), (component, place.space), None)
                node = program.graph.call_function(ops.relayout, (value, slot.number, place.dim))
        copy_meta(value, node)
        meta(node).placement = place
        return node


def _dropout_rule(call: Call) -> Any:
    from sylvie_fx.ir.rules import Outcome

    place = call.place(call.arg(0))
    if isinstance(place, Rows) and place.factor != 1:
        raise Refused("dropout on rows that are merged with another dimension", "apply dropout before the reshape")
    return Outcome(place)
