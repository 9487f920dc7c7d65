"""Real sparse adjacencies: taken apart into index and value tensors, and put together again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sylvie_fx.ir.errors import CaptureError

_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


class AdjacencyParts(NamedTuple):
    """A square adjacency as plain tensors, its entries in the order in which it stores them.

    Attributes:
        row: int64 ``[E]``.
        col: int64 ``[E]``.
        value: ``[E]``, differentiable where the adjacency requires a gradient.
        layout: ``torch.sparse_coo``, ``torch.sparse_csr`` or ``torch.sparse_csc``.
        num_nodes: ``N``.
        coalesced: Whether entries are sorted and each place occurs once; true for the compressed layouts.
    """

    row: Tensor
    col: Tensor
    value: Tensor
    layout: torch.layout
    num_nodes: int
    coalesced: bool


def is_adjacency(value: object) -> bool:
    """Whether ``value`` is a square sparse matrix of layout COO, CSR or CSC."""
    if not isinstance(value, Tensor) or value.layout not in _LAYOUTS:
        return False
    return value.dim() == 2 and value.size(0) == value.size(1)


def adjacency_parts(adj: Tensor) -> AdjacencyParts:
    """Take a real adjacency apart.

    Args:
        adj: Sparse ``[N, N]``, COO, CSR or CSC, one number an entry. Repeated COO entries are kept apart.

    Raises:
        CaptureError: It is not square, has vectors as values, or has another layout.

    >>> adj = torch.eye(3).to_sparse_csr()
    >>> parts = adjacency_parts(adj)
    >>> parts.row.tolist(), parts.col.tolist(), parts.num_nodes
    ([0, 1, 2], [0, 1, 2], 3)
    """
    if adj.layout not in _LAYOUTS:
        raise CaptureError(
            f"An adjacency has the layout {adj.layout}",
            why="only torch.sparse_coo, torch.sparse_csr and torch.sparse_csc list their edges one by one",
            remedy="Convert it with to_sparse_csr() first",
        )
    if adj.dim() != 2 or adj.size(0) != adj.size(1):
        raise CaptureError(
            f"A sparse adjacency has the shape {tuple(adj.shape)}",
            why="rows and columns of an adjacency are the same nodes, and each entry is one number",
            remedy="Pass a square [N, N] matrix; give edge features as a tensor of their own",
        )
    if adj.layout is torch.sparse_coo:
        if adj.requires_grad:
            adj = adj.coalesce()
        row, col = adj._indices().unbind(0)
        value = _values(adj) if adj.is_coalesced() else adj._values()
        return AdjacencyParts(row, col, value, adj.layout, adj.size(0), adj.is_coalesced())
    if adj.layout is torch.sparse_csr:
        row, col = _expanded(adj.crow_indices()), adj.col_indices().long()
    else:
        row, col = adj.row_indices().long(), _expanded(adj.ccol_indices())
    return AdjacencyParts(row, col, _values(adj), adj.layout, adj.size(0), True)


def rebuild_adjacency(
    row: Tensor,
    col: Tensor,
    value: Tensor | None,
    n_rows: int,
    n_cols: int,
    layout: torch.layout,
    coalesced: bool = False,
) -> Tensor:
    """Make a sparse matrix again, such as a rank's own rows over its own and its neighbours' columns.

    Args:
        row: int64 ``[E]``; entries keep their order if this is sorted (CSR), else are sorted stably by it.
        col: int64 ``[E]``; the same for CSC.
        value: ``[E]`` or ``None`` for ones of the default dtype.
        n_rows: Rows of the matrix.
        n_cols: Columns of the matrix.
        layout: ``torch.sparse_coo``, ``torch.sparse_csr`` or ``torch.sparse_csc``.
        coalesced: For COO, mark the entries as coalesced as they lie.

    Raises:
        CaptureError: The layout is another one.
    """
    if value is None:
        value = torch.ones(row.numel(), device=row.device)
    if layout is torch.sparse_coo:
        marked = True if coalesced else None
        return torch.sparse_coo_tensor(torch.stack([row, col]), value, (n_rows, n_cols), is_coalesced=marked)
    if layout is torch.sparse_csr:
        pointers, plain, value = _compressed(row, col, value, n_rows)
        return torch.sparse_csr_tensor(pointers, plain, value, (n_rows, n_cols))
    if layout is torch.sparse_csc:
        pointers, plain, value = _compressed(col, row, value, n_cols)
        return torch.sparse_csc_tensor(pointers, plain, value, (n_rows, n_cols))
    raise CaptureError(
        f"An adjacency of layout {layout} is asked for",
        why="only torch.sparse_coo, torch.sparse_csr and torch.sparse_csc can be made from a list of edges",
        remedy="Ask for one of them",
    )


def _values(adj: Tensor) -> Tensor:
    """The values ``[E]``, cut loose from the matrix where no gradient needs it: torch.export takes no view of one."""
    return adj.values() if adj.requires_grad else adj.values().detach()


def _expanded(pointers: Tensor) -> Tensor:
    """The sorted index int64 ``[E]`` of pointers ``[N + 1]``."""
    rows = torch.arange(pointers.numel() - 1, device=pointers.device)
    return rows.repeat_interleave(pointers.long().diff())


def _compressed(major: Tensor, minor: Tensor, value: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pointers ``[size + 1]``, minor index and values ``[E]`` in the stable order of the major index."""
    order = torch.argsort(major, stable=True)
    pointers = torch.cat([major.new_zeros(1), torch.bincount(major, minlength=size).cumsum(0)])
    return pointers, minor[order], value[order]
