"""The stored entries of a sparse matrix as three parallel tensors, and what a layout asks of their order."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import torch
from torch import Tensor


class Order(enum.Enum):
    """What is known about the order of the entries of a sparse matrix.

    ``BY_ROW`` and ``BY_COLUMN`` entries are final: they are what ``coalesce`` or a compressed layout hands out.
    ``DISTINCT`` entries need sorting only. ``ANY`` entries may repeat a pair, and then their values add up.
    """

    BY_ROW = "by row"
    BY_COLUMN = "by column"
    DISTINCT = "distinct"
    ANY = "any"

    def transposed(self) -> Order:
        """The order of the same entries after rows and columns have changed places."""
        return {Order.BY_ROW: Order.BY_COLUMN, Order.BY_COLUMN: Order.BY_ROW}.get(self, self)


@dataclass(frozen=True)
class Entries:
    """Entry ``i`` of a sparse matrix stands at ``(row[i], col[i])`` and has the value ``value[i]``.

    Attributes:
        row: int64 ``[E]``.
        col: int64 ``[E]``.
        value: ``[E]`` or ``[E, ...]`` of any dtype, or ``None`` where every entry is 1.
        n_rows: Rows of the matrix; a symbol while capturing.
        n_cols: Columns of the matrix; a symbol while capturing.
        order: What is known about the order of the entries.
    """

    row: Tensor
    col: Tensor
    value: Tensor | None
    n_rows: int
    n_cols: int
    order: Order

    def weights(self) -> Tensor:
        """The values ``[E, ...]``, written out as ones of the default dtype where they are implicit."""
        if self.value is not None:
            return self.value
        return torch.ones_like(self.row, dtype=torch.get_default_dtype())

    def with_value(self, value: Tensor) -> Entries:
        """The same places with other values ``[E, ...]``."""
        return replace(self, value=value)

    def transposed(self) -> Entries:
        """The entries of the transposed matrix; nothing is moved."""
        return Entries(self.col, self.row, self.value, self.n_cols, self.n_rows, self.order.transposed())

    def same_places(self, other: Entries) -> bool:
        """Whether both have the very same index tensors, so that their values belong together entry by entry."""
        return self.row is other.row and self.col is other.col

    def ordered(self, wanted: Order) -> Entries:
        """The entries sorted by row (or by column) first, with repeated places merged where they may occur.

        Args:
            wanted: ``Order.BY_ROW`` or ``Order.BY_COLUMN``.
        """
        if self.order is wanted:
            return self
        if wanted is Order.BY_COLUMN:
            return self.transposed().ordered(Order.BY_ROW).transposed()
        key = self.row * self.n_cols + self.col
        if self.order is not Order.ANY:
            moved = torch.argsort(key, stable=True)
            value = None if self.value is None else self.value.index_select(0, moved)
            row, col = self.row.index_select(0, moved), self.col.index_select(0, moved)
            return replace(self, row=row, col=col, value=value, order=wanted)
        key, group = torch.unique(key, return_inverse=True)
        torch._check(key.shape[0] > 0)  # models ask whether there are edges, and the count is not known yet
        weights = self.weights()
        merged = weights.new_zeros((key.shape[0], *weights.shape[1:])).index_add(0, group, weights)
        row, col = (torch.zeros_like(key).scatter(0, group, index) for index in (self.row, self.col))
        return replace(self, row=row, col=col, value=merged, order=wanted)


def final_order(layout: torch.layout) -> Order:
    """The order in which a coalesced or compressed matrix of this layout keeps its entries."""
    return Order.BY_COLUMN if layout is torch.sparse_csc else Order.BY_ROW


def counts(index: Tensor, size: int) -> Tensor:
    """How often each of ``0 … size - 1`` occurs in ``index`` (int64 ``[E]``): int64 ``[size]``."""
    return index.new_zeros(size).index_add(0, index, torch.ones_like(index))
