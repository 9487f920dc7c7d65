"""Which rank holds which rows, in which order, and which rows must cross for an index to be read locally."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The assignment of the rows of one space to ranks; a rank holds its rows in ascending global order.

    Attributes:
        owner: int64 ``[rows]``, the rank of each row.
        parts: Number of ranks.
    """

    owner: Tensor
    parts: int

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each rank."""
        return [int(c) for c in torch.bincount(self.owner, minlength=self.parts)]

    @cached_property
    def position(self) -> Tensor:
        """int64 ``[rows]``: the place of each row among its owner's rows."""
        order = torch.argsort(self.owner, stable=True)
        starts = torch.zeros(self.parts, dtype=torch.int64)
        starts[1:] = torch.cumsum(torch.tensor(self.counts[:-1], dtype=torch.int64), 0)
        position = torch.empty_like(self.owner)
        position[order] = torch.arange(len(order)) - starts[self.owner[order]]
        return position

    def rows(self, rank: int) -> Tensor:
        """int64 ``[count]``: global indices of a rank's rows, ascending."""
        return torch.nonzero(self.owner == rank).flatten()

    def equal(self, other: RowLayout) -> bool:
        """Whether both assign every row alike."""
        return self.owner.shape == other.owner.shape and torch.equal(self.owner, other.owner)


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """What one rank sends and receives so that it can read an index locally.

    Attributes:
        own: Rows of the source that this rank holds.
        halo_ids: int64 ``[halo]``: global indices of the remote rows it needs, grouped by owner, ascending inside.
        receive_counts: Halo rows by owner.
        send_rows: For each peer the local positions of the rows that it needs, in the order of its halo.
        local_index: int64 ``[target rows here]``: where each target row finds its source, own rows first, then halo.
        total: Rows that cross between any two ranks; 0 means that the exchange can be left out on every rank.
    """

    own: int
    halo_ids: Tensor
    receive_counts: tuple[int, ...]
    send_rows: tuple[Tensor, ...]
    local_index: Tensor
    total: int

    @property
    def halo(self) -> int:
        """Halo rows of this rank."""
        return len(self.halo_ids)


def exchange_plan(source: RowLayout, target: RowLayout, index: Tensor | None, rank: int) -> ExchangePlan:
    """Plan the exchange by which ``target`` rows read rows ``index`` of ``source``.

    Every rank computes it from the same global data, so that both sides agree without a message.

    Args:
        source: Layout of the rows that are read.
        target: Layout of the rows that read.
        index: int64 ``[target rows]`` into the source rows; None for the identity.
        rank: Whose plan.
    """
    wanted = torch.arange(len(target.owner)) if index is None else index
    holder = source.owner[wanted]
    remote = holder != target.owner
    size = max(len(source.owner), 1)
    # One number for each (reader, holder, row), so that unique() both removes duplicates and sorts into halo order.
    keys = torch.unique((target.owner[remote] * source.parts + holder[remote]) * size + wanted[remote])
    reader, rest = keys // (size * source.parts), keys % (size * source.parts)
    owner, row = rest // size, rest % size
    mine = reader == rank
    halo_ids, halo_owner = row[mine], owner[mine]
    sends = []
    for peer in range(source.parts):
        to_peer = (reader == peer) & (owner == rank)
        sends.append(source.position[row[to_peer]])
    here = target.owner == rank
    need, need_holder = wanted[here], holder[here]
    own = source.counts[rank]
    local = source.position[need]
    away = need_holder != rank
    if len(halo_ids):
        halo_keys = halo_owner * size + halo_ids
        local[away] = own + torch.searchsorted(halo_keys, need_holder[away] * size + need[away])
    counts = torch.bincount(halo_owner, minlength=source.parts)
    return ExchangePlan(own, halo_ids, tuple(int(c) for c in counts), tuple(sends), local, len(keys))
