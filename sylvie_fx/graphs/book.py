"""A partition on disk: computed once, offline, and read by every rank."""

from __future__ import annotations

import os
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from sylvie_fx.graphs.partition import PartitionQuality, partition_nodes
from sylvie_fx.ir.errors import PartitionError

#: Written into every file; a reader refuses another.
_FORMAT = 1
_KEYS = ("format", "assignment", "parts", "method", "num_edges", "edge_cut", "nodes", "edges", "halo")


@dataclass(frozen=True, eq=False)
class PartitionBook:
    """Who owns which node, and what the cut costs.

    Attributes:
        assignment: int64 (N,), the part of each node.
        parts: Number of parts.
        method: How it was made: "metis", "contiguous", "random" or "given".
        quality: The cost of the cut.
    """

    assignment: Tensor
    parts: int
    method: str
    quality: PartitionQuality

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the graph."""
        return self.assignment.numel()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the book as .npz without pickle; the file appears at once or not at all.

        Args:
            path: Where to; taken as it is, without another suffix.
        """
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        small = self.assignment.to(torch.int32 if self.parts > 2**15 else torch.int16)
        try:
            with partial.open("wb") as file:
                np.savez_compressed(
                    file,
                    format=_FORMAT,
                    assignment=small.numpy(),
                    parts=self.parts,
                    method=self.method,
                    **asdict(self.quality),
                )
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PartitionBook:
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            PartitionError: The file is something else, or damaged.
        """
        try:
            with zipfile.ZipFile(path):  # np.load takes other formats as well
                pass
            with np.load(path, allow_pickle=False) as file:
                missing = [key for key in _KEYS if key not in file.files]
                fields = {} if missing else {key: file[key] for key in _KEYS}
        except (zipfile.BadZipFile, ValueError, EOFError) as error:
            raise PartitionError(f"{path} is not a partition book", why=str(error)) from error
        if missing or int(fields["format"]) != _FORMAT:
            raise PartitionError(
                f"{path} is not a partition book of format {_FORMAT}",
                why=f"it lacks {', '.join(missing)}" if missing else f"its format is {int(fields['format'])}",
                remedy="write it again with `python -m sylvie_fx partition`",
            )
        nodes, edges, halo = (tuple(int(v) for v in fields[key]) for key in ("nodes", "edges", "halo"))
        quality = PartitionQuality(int(fields["num_edges"]), int(fields["edge_cut"]), nodes, edges, halo)
        assignment = torch.from_numpy(fields["assignment"]).to(torch.int64)
        return cls(assignment, int(fields["parts"]), str(fields["method"]), quality)

    def __str__(self) -> str:
        """The method and the table of the quality."""
        return f"{self.method}: {self.quality}"


def partition(
    graph: Any,
    parts: int,
    *,
    method: str | Tensor = "metis",
    seed: int = 0,
    balance: float = 1.03,
    num_nodes: int | None = None,
) -> PartitionBook:
    """Split the nodes of a graph.

    Args:
        graph: A DGLGraph, a PyG Data (edge_index or adj_t), an edge_index of shape (2, E), a (src, dst) pair, or a
            square sparse adjacency (torch COO, CSR or CSC, or torch_sparse) whose row i aggregates its columns.
        parts: Number of parts.
        method: "metis", "contiguous", "random", or each node's part as an integer tensor (N,).
        seed: Decides the result together with the graph.
        balance: Largest part relative to the mean that METIS may make.
        num_nodes: Number of nodes, where edges alone do not tell it; else the largest id plus one.

    Raises:
        PartitionError: The graph is of another kind, malformed, or can not be split so.
    """
    known, src, dst = edges_of(graph)
    if num_nodes is None:
        num_nodes = known if known is not None else _largest_id(src, dst) + 1
    elif known is not None and known != num_nodes:
        raise PartitionError(f"the graph has {known} nodes, not {num_nodes}")
    assignment = partition_nodes(num_nodes, src, dst, parts, method, seed, balance)
    quality = PartitionQuality.measure(assignment, src, dst, parts)
    return PartitionBook(assignment, parts, "given" if isinstance(method, Tensor) else method, quality)


def edges_of(graph: Any) -> tuple[int | None, Tensor, Tensor]:
    """Number of nodes (None where edges alone are known), sources and destinations of any kind of graph.

    Args:
        graph: As ``partition`` takes it.

    Raises:
        PartitionError: A graph of another kind.
    """
    if isinstance(graph, Tensor):
        return _edges_of_tensor(graph)
    if isinstance(graph, tuple | list) and len(graph) == 2 and all(isinstance(ids, Tensor) for ids in graph):
        return None, graph[0], graph[1]
    if _is_dgl(graph):
        if not getattr(graph, "is_homogeneous", True):
            raise PartitionError("the DGLGraph has several node or edge types", remedy="use dgl.to_homogeneous first")
        src, dst = graph.edges()
        return int(graph.num_nodes()), src, dst
    if hasattr(graph, "coo") and hasattr(graph, "sparse_sizes"):  # torch_sparse.SparseTensor
        row, column, _ = graph.coo()
        return _square(tuple(graph.sparse_sizes())), column, row
    if getattr(graph, "edge_index", None) is not None:
        _, src, dst = _edges_of_tensor(graph.edge_index)
        return getattr(graph, "num_nodes", None), src, dst
    if getattr(graph, "adj_t", None) is not None:
        return edges_of(graph.adj_t)
    raise PartitionError(
        f"a {type(graph).__name__} is not a graph that can be partitioned",
        remedy="pass a DGLGraph, a PyG Data, an edge_index (2, E), a (src, dst) pair or a sparse adjacency",
    )


class _DGLGraph(Protocol):
    def num_nodes(self) -> int: ...
    def edges(self) -> tuple[Tensor, Tensor]: ...


def _is_dgl(graph: Any) -> TypeGuard[_DGLGraph]:
    return callable(getattr(graph, "num_nodes", None)) and callable(getattr(graph, "edges", None))


def _edges_of_tensor(graph: Tensor) -> tuple[int | None, Tensor, Tensor]:
    if graph.layout == torch.strided:
        if graph.dim() != 2 or graph.shape[0] != 2:
            raise PartitionError(f"an edge_index has shape (2, E), not {tuple(graph.shape)}")
        return None, graph[0], graph[1]
    # The sparse layouts: row i of adj @ x aggregates the columns of row i.
    size = _square(tuple(graph.shape))
    coo = graph.detach().to_sparse(layout=torch.sparse_coo).coalesce()
    row, column = coo.indices()
    return size, column, row


def _square(shape: tuple[int, ...]) -> int:
    if len(shape) != 2 or shape[0] != shape[1]:
        raise PartitionError(
            f"the adjacency has shape {shape}", why="only a square one is a graph over one set of nodes"
        )
    return int(shape[0])


def _largest_id(src: Tensor, dst: Tensor) -> int:
    return max((int(ids.max()) for ids in (src, dst) if ids.numel()), default=-1)
