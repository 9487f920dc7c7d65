"""How the edges of a graph lie for the aggregation kernels: sorted by the row they are reduced into, both ways.

A layout is made once for a graph. Edge values keep the natural order of edges everywhere; the kernels follow a
permutation where that order is not the sorted one, so edges that come sorted by destination cost least.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.ir.errors import KernelError

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Part:
    """Which edges of a graph are meant.

    Args:
        numbers: int64, their natural numbers, rising.
        of: Number of edges that the graph has.
    """

    numbers: Tensor
    of: int


@dataclass(frozen=True, eq=False)
class Rows:
    """Edges and the two rows that each joins, to be reduced into the first one.

    Args:
        row_index: int64 ``[edges]``, the row that each edge is reduced into, in natural order.
        column_index: int64 ``[edges]``, the row that each edge reads.
        rows: Rows of what is reduced into.
        columns: Rows of what is read.
        first: Columns below this one come first in each row; the others follow.
        part: Where these are not all edges of the graph: what the others are.
        constant: Addresses of edge values that never change.
    """

    row_index: Tensor
    column_index: Tensor
    rows: int
    columns: int
    first: int | None = None
    part: Part | None = None
    constant: frozenset[int] = frozenset()

    @property
    def edges(self) -> int:
        """Number of edges."""
        return self.row_index.numel()

    @property
    def narrow(self) -> bool:
        """Whether every index fits 32 bits, so that the C++ kernels can be called."""
        return max(self.edge_values, self.rows, self.columns) <= _INT32_MAX

    @property
    def edge_values(self) -> int:
        """Number of edge values that stand for the edges: as many as the graph has edges."""
        return self.edges if self.part is None else self.part.of

    @functools.cached_property
    def _order(self) -> Tensor | None:
        """Which of these edges stands at each place of the sorted order; None where they come sorted."""
        keys, limit = self.row_index, self.rows
        if self.first is not None:
            keys, limit = 2 * keys + (self.column_index >= self.first), 2 * limit
        if self.edges < 2 or bool((keys[1:] >= keys[:-1]).all()):
            return None
        return self._stored(_stable_order(keys, limit))

    @functools.cached_property
    def edge_ids(self) -> Tensor | None:
        """The natural number of each edge in sorted order, int32 where that fits; None where the two orders agree."""
        if self.part is None:
            return self._order
        numbers = self.part.numbers
        return self._stored(numbers if self._order is None else numbers[self._order])

    def sorted_values(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Edge values and the numbers to find them by; those that never change are sorted once, and need none."""
        if self.edge_ids is None or values.data_ptr() not in self.constant:
            return values, self.edge_ids
        key = values.data_ptr(), tuple(values.shape), values.stride()
        if key not in self._sorted:
            self._sorted[key] = values.index_select(0, self.edge_ids)
        return self._sorted[key], None

    @functools.cached_property
    def _sorted(self) -> dict[tuple[Any, ...], Tensor]:
        return {}

    @functools.cached_property
    def indptr(self) -> Tensor:
        """int64 ``[rows + 1]``, where each row's edges begin in sorted order."""
        indptr = self.row_index.new_zeros(self.rows + 1)
        torch.cumsum(torch.bincount(self.row_index, minlength=self.rows), 0, out=indptr[1:])
        return indptr

    @functools.cached_property
    def sorted_columns(self) -> Tensor:
        """``column_index`` in sorted order, int32 where that fits."""
        columns = self._stored(self.column_index)
        return columns if self._order is None else columns[self._order]

    @functools.cached_property
    def degrees(self) -> Tensor:
        """int64 ``[rows]``, edges of each row, one for a row without: a divisor for means."""
        return self.indptr.diff().clamp_(min=1)

    def _stored(self, index: Tensor) -> Tensor:
        return index.to(torch.int32) if self.narrow else index


def _stable_order(keys: Tensor, limit: int) -> Tensor:
    # Sorting 32-bit keys takes about half the time.
    return torch.sort(keys.to(torch.int32) if limit <= _INT32_MAX else keys, stable=True).indices


@dataclass(frozen=True, eq=False)
class EdgeLayout:
    """The edges of a graph, prepared for aggregation; immutable, and shared by every layer that uses the graph.

    Args:
        src: int64 ``[edges]``, the row that each edge starts from, in ``[0, n_src)``.
        dst: int64 ``[edges]``, the row that each edge ends in, in ``[0, n_dst)``.
        n_src: Number of sources.
        n_dst: Number of destinations.
        own: Number of this rank's own sources. Where it is given, the edges of each destination are reduced in this
            order: those from own sources, then those from the others, and these as :class:`SplitLayout
            <sylvie_fx.kernels.aggregate_split.SplitLayout>` reduces them, bit by bit.
        part: Where these are not all edges of the graph: edge values then stand for all of them, those of others are not
            read, and are zero in results.
        constant: Addresses of edge values that never change, of which a copy in sorted order is kept.

    Raises:
        KernelError: For indices that are not int64 vectors of one length on one device, or out of bounds.

    >>> layout = EdgeLayout(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]), 2, 2)
    >>> layout.by_destination.indptr.tolist(), layout.by_destination.sorted_columns.tolist()
    ([0, 1, 3], [1, 0, 1])
    """

    src: Tensor
    dst: Tensor
    n_src: int
    n_dst: int
    own: int | None = None
    part: Part | None = None
    constant: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.src.shape != self.dst.shape or self.src.dim() != 1 or self.src.device != self.dst.device:
            found = " and ".join(f"{tuple(index.shape)} on {index.device}" for index in (self.src, self.dst))
            raise KernelError("src and dst are not two vectors of one length on one device", why=f"they are {found}")
        for name, index, rows in (("src", self.src, self.n_src), ("dst", self.dst, self.n_dst)):
            if index.dtype != torch.int64:
                raise KernelError(f"{name} is {index.dtype}, not int64", remedy=f"pass {name}.long()")
            if index.numel() and (int(index.min()) < 0 or int(index.max()) >= rows):
                raise KernelError(
                    f"{name} goes from {int(index.min())} to {int(index.max())}, out of its {rows} rows",
                    remedy="pass the number of rows that the indices refer to",
                )

    @property
    def edges(self) -> int:
        """Number of edges."""
        return self.src.numel()

    @functools.cached_property
    def by_destination(self) -> Rows:
        """Edges to be reduced into their destinations, reading their sources."""
        return Rows(self.dst, self.src, self.n_dst, self.n_src, self.own, self.part, self.constant)

    @functools.cached_property
    def by_source(self) -> Rows:
        """The transpose: edges to be reduced into their sources, reading their destinations."""
        return Rows(self.src, self.dst, self.n_src, self.n_dst, None, self.part, self.constant)

    def rows(self, transposed: bool) -> Rows:
        """``by_source`` where ``transposed``, else ``by_destination``."""
        return self.by_source if transposed else self.by_destination

    @functools.cached_property
    def incoming(self) -> EdgeLayout:
        """Edges as the sources: aggregating over it reduces edge values into the edges' destinations."""
        return _incidence(self.by_destination)

    @functools.cached_property
    def outgoing(self) -> EdgeLayout:
        """Edges as the sources: aggregating over it reduces edge values into the edges' own sources."""
        return _incidence(self.by_source)

    @functools.cached_property
    def sorted_by_destination(self) -> Tensor | None:
        """Where each edge of ``by_source``, in its sorted order, stands in that of ``by_destination``; None for at once."""
        to, back = self.by_destination.edge_ids, self.by_source.edge_ids
        if to is None:
            return back
        places = torch.empty_like(to)
        places[to.long()] = torch.arange(len(to), dtype=to.dtype, device=to.device)
        return places if back is None else places[back.long()]

    def prepare(self, backward: bool = True) -> EdgeLayout:
        """Sort now instead of at the first use; the transpose as well where ``backward``. Returns itself."""
        for rows in (self.by_destination, self.by_source) if backward else (self.by_destination,):
            _ = rows.indptr, rows.sorted_columns
        return self


def _incidence(rows: Rows) -> EdgeLayout:
    edges = torch.arange(rows.edges, device=rows.row_index.device)
    layout = EdgeLayout(edges, rows.row_index, rows.edges, rows.rows)
    if rows.first is None and rows._order is not None:  # the same order: not sorted, and not kept, once more
        layout.by_destination.__dict__.update(_order=rows._order, sorted_columns=rows._order, indptr=rows.indptr)
    return layout
