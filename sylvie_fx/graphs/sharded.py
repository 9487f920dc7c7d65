"""One sharded graph on this rank: its row spaces, their layouts, and the whole of what the prologue reads."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sylvie_fx.graphs.layout import RowLayout
from sylvie_fx.ir.errors import PartitionError
from sylvie_fx.ir.placement import NODES

_numbers = itertools.count()


@dataclass(eq=False)
class Space:
    """A row space of sharded data.

    Attributes:
        name: ``N`` for nodes, ``E`` for edges, ``S``, ``S0`` … for rows picked by a list of node ids or a mask.
        layout: Which rank holds which row.
    """

    name: str
    layout: RowLayout

    @property
    def prefix(self) -> str:
        """The name without its number."""
        return self.name.rstrip("0123456789")

    @property
    def rows(self) -> int:
        """Global number of rows."""
        return len(self.layout.owner)


def space_name(prefix: str, taken: Collection[str]) -> str:
    """The first free name of a row space: ``S``, ``S0``, ``S1`` …"""
    if prefix not in taken:
        return prefix
    return next(name for i in itertools.count() if (name := f"{prefix}{i}") not in taken)


@dataclass(eq=False)
class ShardedGraph:
    """What one call of ``shard`` knows about its graph.

    Attributes:
        nodes: Partition of the nodes.
        rank: This rank.
        spaces: Row spaces by name.
    """

    nodes: RowLayout
    rank: int
    spaces: dict[str, Space] = field(default_factory=dict)
    number: int = field(default_factory=lambda: next(_numbers))
    _picked: weakref.WeakSet[Space] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self.spaces[NODES] = Space(NODES, self.nodes)

    @property
    def num_nodes(self) -> int:
        """Global number of nodes."""
        return len(self.nodes.owner)

    def add(self, prefix: str, layout: RowLayout) -> Space:
        """The space of a layout: a known one with that very layout, or a new one named after ``prefix``."""
        for known in self.spaces.values():
            if known.layout is layout or (known.name.startswith(prefix) and known.layout.equal(layout)):
                return known
        name = space_name(prefix, self.spaces)
        self.spaces[name] = Space(name, layout)
        return self.spaces[name]

    def subset(self, layout: RowLayout) -> Space:
        """The space with that layout, whatever it is called, or a new one for picked rows, forgotten when unused."""
        for known in (*self.spaces.values(), *self._picked):
            if known.layout.equal(layout):
                return known
        picked = Space(space_name("S", [known.name for known in (*self.spaces.values(), *self._picked)]), layout)
        self._picked.add(picked)
        return picked

    def edges(self, destination: Tensor) -> Space:
        """The space of edges with these destinations (int64 ``[E]``): an edge belongs to its destination's owner."""
        return self.add("E", RowLayout(self.nodes.owner[destination], self.nodes.parts))

    def check_ids(self, ids: Tensor, what: str) -> Tensor:
        """Node ids as int64, in range.

        Raises:
            PartitionError: They are not integers, or out of range.
        """
        if ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise PartitionError(f"{what} has dtype {ids.dtype}", remedy="give node ids as int64")
        if ids.numel():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.num_nodes:
                bad = low if low < 0 else high
                raise PartitionError(f"{what} names node {bad}, but the graph has {self.num_nodes} nodes",
                                     remedy="node ids go from 0 to num_nodes - 1")  # fmt: skip
        return ids.to(torch.int64)
