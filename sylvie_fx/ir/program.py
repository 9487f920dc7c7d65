"""A program: the FX graph of a captured model, what is known of every value, and everything the machine must bind."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from sylvie_fx.ir.coding import ExchangeCoding
from sylvie_fx.ir.pace import Pace, Tier
from sylvie_fx.ir.placement import NODES, REPLICATED, Component, Layout, Placement, Rows
from sylvie_fx.ir.rules import expression, shape_of
from sylvie_fx.ir.source import user_line

KEY = "sylvie"
"""The one key of ``node.meta`` under which :class:`Meta` lives."""


@dataclass
class Meta:
    """What the passes know of one value.

    Attributes:
        placement: Where its rows live; None before infer_placement. A tuple for an operator with several results.
        static: It depends on the graph alone (split_prologue).
        where: ``file:line`` of the user's code that made it.
        module: Path of the module that made it, empty for the root.
        site: For a dropout: its position among the dropouts of the forward pass, part of the mask's key.
        crosses: It combines rows of different ranks, and is to be rewritten.
        considered: For an exchange: values that could have crossed instead, and the bytes a row that they would cost.
        kept: Its value is kept from one step to the next, for as long as the inputs stay (keep_aggregations).
        unfused: For a scatter: why it is not one operator with what makes its messages (fuse_aggregation).
    """

    placement: Placement | tuple[Placement, ...] | None = None
    static: bool = False
    where: str = ""
    module: str = ""
    site: int | None = None
    crosses: bool = False
    considered: tuple[tuple[str, float], ...] = ()
    kept: bool = False
    unfused: str = ""


@dataclass(frozen=True)
class Input:
    """One tensor that enters the program.

    Attributes:
        name: Name of its placeholder.
        rows: Its placement.
        static: Part of the graph's structure: it may be folded into the prologue.
        path: How a person would name it: ``args[1]``, ``graph.ndata['feat']``, ``self.g``.
    """

    name: str
    rows: Placement
    static: bool
    path: str


@dataclass(frozen=True)
class Localized:
    """A main placeholder that is bound when data is sharded: a prologue result, laid out for one component.

    Attributes:
        value: Name of the prologue output.
        placement: Rows of a component, or replicated.
        index_into: For an index: the component whose rows it names, so that it is renumbered; None for plain data.
        index_space: Its row space.
        slot: For an index that reads halo rows: the exchange that brings them.
        halo: For plain data that is needed on halo rows too: the exchange that they belong to.
    """

    value: str
    placement: Placement
    index_into: int | None = None
    index_space: str = NODES
    slot: int | None = None
    halo: int | None = None

    def __str__(self) -> str:
        text = f"{self.value} {self.placement}"
        if self.index_into is not None:
            text += f" -> {self.index_space}#{self.index_into}"
        text += f" slot {self.slot}" if self.slot is not None else ""
        return text + (f" with halo of slot {self.halo}" if self.halo is not None else "")


@dataclass
class Slot:
    """One kind of exchange: which rows cross, for which index; bound to a plan when data is sharded.

    Attributes:
        number: The slot's number in the program.
        kind: ``gather`` brings the remote rows that an index reads; ``relayout`` moves rows to another component.
        source: Component of the rows that are sent, and its row space.
        target: Component whose ranks need them, and its row space.
        index: Prologue value that maps target rows to source rows; None for the identity (relayout).
    """

    number: int
    kind: str
    source: tuple[int, str]
    target: tuple[int, str]
    index: str | None

    def __str__(self) -> str:
        by = f" by {self.index}" if self.index else ""
        (source, source_space), (target, target_space) = self.source, self.target
        return f"slot {self.number}: {self.kind} {source_space}#{source} -> {target_space}#{target}{by}"


@dataclass(eq=False)
class Program:
    """The captured model on its way to the machine.

    Attributes:
        module: The main FX graph and the original parameters and buffers it reads.
        inputs: What enters, in the order of the call's flattened tensors.
        sizes: Row space name to its size expression in the capture's symbols.
        mode: ``train`` or ``eval``.
        prologue: Graph-only computation, run once on the whole graph; None before split_prologue.
        components: Layouts by number. 0 is the entry layout of every space.
        slots: Exchanges by number.
        localized: Main placeholder name to what it is bound to.
        counts: Main placeholder name to ``(component, space)``: number of this rank's rows.
        numbers: Main placeholder name to the prologue output that holds a global number.
        row_ids: Main placeholder name to ``(component, space)``: the global indices of this rank's rows.
        codings: Exchange site to how its rows travel (quantize).
        near: Exchange site to how its rows travel to ranks of the same host, where a policy says that apart.
        paces: Exchange site to how old its rows may be (split-exchanges); sites that are not in it are synchronous.
    """

    module: fx.GraphModule
    inputs: list[Input]
    sizes: dict[str, sympy.Expr]
    mode: str
    prologue: fx.GraphModule | None = None
    components: dict[int, Component] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    localized: dict[str, Localized] = field(default_factory=dict)
    counts: dict[str, tuple[int, str]] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    row_ids: dict[str, tuple[int, str]] = field(default_factory=dict)
    codings: dict[int, ExchangeCoding] = field(default_factory=dict)
    paces: dict[int, Pace] = field(default_factory=dict)
    near: dict[int, Tier] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        """The main graph."""
        return self.module.graph

    def space_of(self, size: sympy.Expr) -> str | None:
        """The row space of a size expression, or None if no row symbol is in it."""
        if not size.free_symbols:
            return None
        for name, known in self.sizes.items():
            if known == size:
                return name
        names = {known: name for name, known in self.sizes.items() if known.is_Symbol}
        space = str(size.subs({known: sympy.Symbol(name) for known, name in names.items()}))
        self.sizes[space] = size
        return space

    def rows_of_shape(self, shape: tuple[sympy.Expr, ...]) -> Rows | None:
        """The rows that a shape implies by itself: its one symbolic dimension; None without one or with several."""
        found = [(d, s) for d, size in enumerate(shape) if (s := self.space_of(size)) is not None]
        return Rows(found[0][1], found[0][0]) if len(found) == 1 else None

    def component(self, space: str, layout: Layout) -> Component:
        """A new component."""
        number = max(self.components, default=0) + 1
        self.components[number] = Component(number, space, layout)
        return self.components[number]

    def slot(self, kind: str, source: tuple[int, str], target: tuple[int, str], index: str | None) -> Slot:
        """The slot of that exchange, made if there is none yet."""
        for known in self.slots:
            if (known.kind, known.source, known.target, known.index) == (kind, source, target, index):
                return known
        self.slots.append(Slot(len(self.slots), kind, source, target, index))
        return self.slots[-1]

    def bound_input(self, table: dict[str, Any], prefix: str, key: Any, val: Any, place: Placement) -> fx.Node:
        """The main placeholder that ``table`` binds to ``key``, made in front of the graph if there is none yet."""
        for name, known in table.items():
            if known == key:
                found: fx.Node = next(n for n in self.graph.nodes if n.name == name)
                return found
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            node = self.graph.placeholder(prefix)
        node.meta["val"] = val
        node.meta[KEY] = Meta(placement=place, static=True)
        table[node.name] = key
        return node

    def count(self, component: int, space: str, val: Any) -> fx.Node:
        """The placeholder of this rank's number of rows of a component."""
        return self.bound_input(self.counts, f"rows_{component}", (component, space), val, REPLICATED)

    def snapshot(self) -> Program:
        """A copy of the program as it stands, sharing parameters."""
        return Program(
            _copy_module(self.module), list(self.inputs), dict(self.sizes), self.mode,
            _copy_module(self.prologue) if self.prologue is not None else None,
            copy.copy(self.components), copy.copy(self.slots), dict(self.localized),
            dict(self.counts), dict(self.numbers),
            dict(self.row_ids), dict(self.codings), dict(self.paces), dict(self.near),
        )  # fmt: skip

    def __str__(self) -> str:
        from sylvie_fx.ir.printing import program_text

        return program_text(self)


def _copy_module(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def meta(node: fx.Node) -> Meta:
    """The typed metadata of a node, made on first use from what the capture recorded."""
    known = node.meta.get(KEY)
    if known is None:
        known = node.meta[KEY] = Meta(where=user_line(node.meta.get("stack_trace")), module=_module_path(node))
    assert isinstance(known, Meta)
    return known


def placement(node: fx.Node) -> Placement:
    """Placement of a single-result node; replicated where nothing else is known."""
    place = meta(node).placement
    return place if isinstance(place, Rows) else REPLICATED


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    path = str(paths[-1]) if paths else ""
    return path.removeprefix("model").removeprefix(".")


def halo_count(slot: int) -> int:
    """The key in ``Program.counts`` of own plus halo rows of a slot (components are 0 and above)."""
    return -1 - slot


def is_tensor(node: Any) -> bool:
    """Whether an FX argument is a node with a single tensor as result."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_number(node: Any) -> bool:
    """Whether an FX argument is a node whose result is a symbolic or Python number."""
    return isinstance(node, fx.Node) and isinstance(
        node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)
    )


def size_expression(node: fx.Node) -> sympy.Expr | None:
    """The size expression of a symbolic integer node."""
    value = node.meta.get("val")
    return expression(value) if isinstance(value, (torch.SymInt, int)) else None


def shape(node: fx.Node) -> tuple[sympy.Expr, ...]:
    """Symbolic global shape of a node's tensor."""
    return shape_of(node.meta.get("val"))
