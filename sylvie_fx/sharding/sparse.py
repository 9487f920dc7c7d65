"""Sparse adjacency matrices: sharded by rows, captured through the stand-in."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.capture.inputs import Expanded
from sylvie_fx.capture.sparse import adjacency_parts, rebuild_adjacency, stand_in_adjacency
from sylvie_fx.node_tensor import NodeTensor
from sylvie_fx.sharding.context import ShardContext


class ShardedAdjacency:
    """This rank's rows of a square sparse matrix.

    Attributes:
        row: Row of each entry, :class:`NodeTensor` over the entries.
        col: Column of each entry.
        value: Value of each entry.
        layout: The layout of the matrix that was sharded.
        shape: Global shape.
    """

    def __init__(
        self,
        row: NodeTensor,
        col: NodeTensor,
        value: NodeTensor,
        marker: NodeTensor,
        layout: torch.layout,
        coalesced: bool,
    ) -> None:
        self.row, self.col, self.value, self.marker = row, col, value, marker
        self.layout, self.coalesced = layout, coalesced

    @property
    def shape(self) -> torch.Size:
        """Global shape, ``[N, N]``."""
        return torch.Size([self.marker.shape[0]] * 2)

    def size(self, dim: int | None = None) -> Any:
        """Global shape, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def local(self) -> Tensor:
        """This rank's rows as a matrix ``[own rows, N]`` of the original layout; columns keep their global numbers."""
        position = self.marker._sharding.space.layout.position.to(self.row.device)
        return rebuild_adjacency(
            position[self.row.local()],
            self.col.local(),
            self.value.local(),
            len(self.marker.local()),
            self.shape[1],
            self.layout,
        )

    def __repr__(self) -> str:
        return f"ShardedAdjacency({tuple(self.shape)}, {self.row.shape[0]} entries, {self.layout})"


def shard_adjacency(context: ShardContext, adj: Tensor, what: str) -> ShardedAdjacency:
    """Keep the rows of an adjacency that belong to this rank's nodes: an entry belongs to the owner of its row."""
    parts = adjacency_parts(adj)
    col, row = context.ends(parts.col, parts.row, (f"the columns of {what}", f"the rows of {what}"))
    value = context.rows(parts.value, row._sharding.space, f"the values of {what}")
    return ShardedAdjacency(row, col, value, context.marker(), parts.layout, parts.coalesced)


class SparseFrontend:
    """Takes sharded adjacencies apart."""

    @staticmethod
    def context() -> AbstractContextManager[None]:
        """Nothing: the capture always knows them."""
        return contextlib.nullcontext()

    def check(self, stand_in: Any, value: ShardedAdjacency) -> None:
        """Nothing is taken for granted."""

    def matches(self, value: Any) -> bool:
        """Whether it is a sharded adjacency."""
        return isinstance(value, ShardedAdjacency)

    def expand(self, value: ShardedAdjacency) -> Expanded:
        """Row, column, value and the marker of the nodes."""
        tensors: list[tuple[str, Tensor]] = [
            (".row", value.row),
            (".col", value.col),
            (".value", value.value),
            (".nodes", value.marker),
        ]

        def build(parts: Sequence[Tensor]) -> Any:
            row, col, entries, marker = parts
            return stand_in_adjacency(row, col, entries, marker.shape[0], value.layout, value.coalesced)

        return Expanded(tensors, build, (str(value.layout), value.coalesced))
