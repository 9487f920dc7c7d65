"""Order the program so that exchanges start as early and are waited for as late as the dataflow allows."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import ClassVar

from torch import fx
from torch._ops import OpOverload

from sylvie_fx.ir import ops
from sylvie_fx.ir.program import Program
from sylvie_fx.passes.base import Pass, PassContext

_START, _WORK, _WAIT = range(3)


@dataclass(frozen=True)
class Schedule(Pass):
    """Reorder the main graph: what an exchange needs first, waiting last, everything else in between in its old order.

    The backward pass follows by itself: autograd runs what was recorded last first, so the gradients of halo rows leave
    before the inner edges are worked on, and are waited for afterwards.

    Requires: split-exchanges.
    Ensures: no value changes; operators that write keep their order among themselves.

    Before::

        start = sylvie.halo_start(h, 0, 0)
        halo = sylvie.halo_wait(ticket, 0, 0)
        out = sylvie.spmm_halo(inner, halo, src, dst, weight, 'sum', 0)
        root = aten.linear(x, w)

    After::

        start = sylvie.halo_start(h, 0, 0)
        root = aten.linear(x, w)
        halo = sylvie.halo_wait(ticket, 0, 0)
        out = sylvie.spmm_halo(inner, halo, src, dst, weight, 'sum', 0)
    """

    name: ClassVar[str] = "schedule"

    def run(self, program: Program, context: PassContext) -> Program:
        """Sort the nodes."""
        nodes = list(program.graph.nodes)
        order = _ordered(nodes)
        anchor = None
        for node in order:
            if anchor is not None:
                anchor.append(node)
            anchor = node
        return program


def _ordered(nodes: list[fx.Node]) -> list[fx.Node]:
    place = {node: i for i, node in enumerate(nodes)}
    needs = {node: set(node.all_input_nodes) for node in nodes}
    _keep_writes(nodes, needs)
    readers: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for node in nodes:
        for needed in needs[node]:
            readers[needed].append(node)
    urgent = _urgent(nodes, needs)
    missing = {node: len(needs[node]) for node in nodes}

    def entry(node: fx.Node) -> tuple[int, int, int]:
        if node.op == "output":
            return _WAIT + 1, 0, place[node]
        if node.op in ("placeholder", "get_attr"):
            return -1, 0, place[node]
        if node.target is ops.halo_wait:
            return _WAIT, 0, place[node]
        return (_START if node in urgent else _WORK), 0, place[node]

    ready = [(*entry(node), node.name, node) for node in nodes if not missing[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)[-1]
        order.append(node)
        for reader in readers[node]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (*entry(reader), reader.name, reader))
    return order


def _keep_writes(nodes: list[fx.Node], needs: dict[fx.Node, set[fx.Node]]) -> None:
    """An operator that writes stays behind whatever stands in front of it and reads the same values, and the reverse."""
    for at, writer in enumerate(nodes):
        if not (isinstance(writer.target, OpOverload) and writer.target._schema.is_mutable):
            continue
        touched = set(writer.all_input_nodes)
        for i, other in enumerate(nodes):
            if i != at and touched.intersection(other.all_input_nodes):
                needs[other if i > at else writer].add(writer if i > at else other)


def _urgent(nodes: list[fx.Node], needs: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    """Starts of exchanges and everything that they need."""
    urgent: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.target is ops.halo_start or node in urgent:
            urgent.add(node)
            urgent |= needs[node]
    return urgent
