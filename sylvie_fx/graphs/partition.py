"""Which rank owns which node: METIS, contiguous, random, or the user's own assignment, and how good the cut is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymetis
import torch
from torch import Tensor

from sylvie_fx.ir.errors import PartitionError


def partition_nodes(
    num_nodes: int,
    src: Tensor,
    dst: Tensor,
    parts: int,
    method: str | Tensor = "metis",
    seed: int = 0,
    balance: float = 1.03,
) -> Tensor:
    """The part of each node; no part is empty.

    Args:
        num_nodes: Number of nodes.
        src: Source of each edge, any integer dtype, shape (E,).
        dst: Destination of each edge, likewise.
        parts: Number of parts.
        method: "metis" (the fewest halo rows of what METIS finds by recursive bisection, k-way, and for its volume
            objective, on the symmetrised simple graph), "metis-volume" (the last of them), "hypergraph" (halo rows by
            Mt-KaHyPar, an extra), "contiguous" (equal ranges of node ids), "random" (equal parts of a permutation), or
            the user's own assignment, an integer tensor of shape (N,).
        seed: Decides the result together with the graph.
        balance: Largest part relative to the mean that METIS may make.

    Returns:
        int64 tensor of shape (N,) on the CPU, with values 0 to parts - 1.

    Raises:
        PartitionError: No nodes, more parts than nodes, malformed edges, or an assignment of the wrong length, dtype or
            range, or that leaves a part empty.

    >>> partition_nodes(4, torch.tensor([0, 2]), torch.tensor([1, 3]), 2, "contiguous")
    tensor([0, 0, 1, 1])
    """
    if num_nodes < 1:
        raise PartitionError("the graph has no nodes", remedy="a graph to distribute needs one node per rank at least")
    if parts < 1:
        raise PartitionError(f"a graph can not be split into {parts} parts")
    if parts > num_nodes:
        raise PartitionError(
            f"the graph has {num_nodes} nodes and can not be split into {parts} parts",
            why="every rank needs a node",
            remedy=f"start at most {num_nodes} ranks",
        )
    check_edges(num_nodes, src, dst)
    if isinstance(method, Tensor):
        return _check_assignment(method, num_nodes, parts)
    if method not in _METHODS:
        raise PartitionError(
            f"there is no partition method {method!r}",
            remedy=f"use {', '.join(_METHODS)} or a tensor with each node's part",
        )
    if balance < 1.0:
        raise PartitionError(f"balance is the largest part relative to the mean, so at least 1, not {balance}")
    if parts == 1:
        return torch.zeros(num_nodes, dtype=torch.int64)
    return _METHODS[method](num_nodes, src, dst, parts, seed, balance)


def check_edges(num_nodes: int, src: Tensor, dst: Tensor) -> None:
    """Raise a PartitionError where edges are not a pair of integer tensors of one length with ids below num_nodes."""
    for name, ids in (("source", src), ("destination", dst)):
        if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
            raise PartitionError(
                f"the {name} ids of the edges have dtype {ids.dtype}", remedy="node ids are integers, int64 best"
            )
        if ids.dim() != 1:
            raise PartitionError(f"the {name} ids of the edges have shape {tuple(ids.shape)}, not one dimension")
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= num_nodes):
            wrong = int(((ids < 0) | (ids >= num_nodes)).nonzero()[0])
            raise PartitionError(
                f"edge {wrong} has {name} {int(ids[wrong])}, outside the {num_nodes} nodes (0 to {num_nodes - 1})",
                remedy="give the number of nodes, if the last ones have no edges, or repair the edges",
            )
    if src.numel() != dst.numel():
        raise PartitionError(f"there are {src.numel()} edge sources and {dst.numel()} destinations")


@dataclass(frozen=True)
class PartitionQuality:
    """What a partition costs; an edge and its rows belong to the owner of its destination.

    Attributes:
        num_edges: Directed edges.
        edge_cut: Edges whose ends have different owners.
        nodes: Owned nodes of each part.
        edges: Owned edges of each part.
        halo: Rows that each part receives in one exchange: distinct remote sources of its edges.
    """

    num_edges: int
    edge_cut: int
    nodes: tuple[int, ...]
    edges: tuple[int, ...]
    halo: tuple[int, ...]

    @classmethod
    def measure(cls, assignment: Tensor, src: Tensor, dst: Tensor, parts: int) -> PartitionQuality:
        """The quality of an assignment, int64 (N,), for edges src → dst, integer (E,)."""
        owner = assignment[dst.to("cpu", torch.int64)]
        cut = assignment[src.to("cpu", torch.int64)] != owner
        num_nodes = assignment.numel()
        remote = torch.unique(owner[cut] * num_nodes + src.to("cpu", torch.int64)[cut])
        return cls(
            num_edges=dst.numel(),
            edge_cut=int(cut.sum()),
            nodes=_counts(assignment, parts),
            edges=_counts(owner, parts),
            halo=_counts(remote // num_nodes, parts),
        )

    @property
    def balance(self) -> float:
        """Nodes of the largest part relative to the mean."""
        return max(self.nodes) * len(self.nodes) / sum(self.nodes)

    @property
    def edge_balance(self) -> float:
        """Edges of the busiest part relative to the mean; 1 for a graph without edges."""
        return max(self.edges) * len(self.edges) / self.num_edges if self.num_edges else 1.0

    def __str__(self) -> str:
        """A table with one line a part."""
        share = self.edge_cut / self.num_edges if self.num_edges else 0.0
        head = (
            f"{len(self.nodes)} parts of {sum(self.nodes):,} nodes and {self.num_edges:,} edges: "
            f"{self.edge_cut:,} edges cut ({share:.1%}), {sum(self.halo):,} halo rows, "
            f"largest part {self.balance:.3f} of the mean ({self.edge_balance:.3f} in edges)"
        )
        rows = [("part", "nodes", "edges", "halo rows")]
        rows += [
            (str(part), f"{n:,}", f"{e:,}", f"{h:,}")
            for part, (n, e, h) in enumerate(zip(self.nodes, self.edges, self.halo, strict=True))
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join([head, *("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows)])


def _counts(values: Tensor, parts: int) -> tuple[int, ...]:
    return tuple(torch.bincount(values, minlength=parts).tolist())


def _check_assignment(assignment: Tensor, num_nodes: int, parts: int) -> Tensor:
    if assignment.dtype.is_floating_point or assignment.dtype.is_complex or assignment.dtype == torch.bool:
        raise PartitionError(f"the assignment of nodes to parts has dtype {assignment.dtype}", remedy="use int64")
    if tuple(assignment.shape) != (num_nodes,):
        raise PartitionError(
            f"the assignment has shape {tuple(assignment.shape)} for {num_nodes} nodes", remedy="give one part per node"
        )
    low, high = int(assignment.min()), int(assignment.max())
    if low < 0 or high >= parts:
        raise PartitionError(f"the assignment has values from {low} to {high}, where 0 to {parts - 1} are the parts")
    result = assignment.detach().to("cpu", torch.int64).clone()
    empty = [part for part, count in enumerate(_counts(result, parts)) if count == 0]
    if empty:
        raise PartitionError(
            f"the assignment leaves part{'s' if len(empty) > 1 else ''} {', '.join(map(str, empty))} of {parts} empty",
            why="every rank needs a node",
        )
    return result


def _contiguous(num_nodes: int, src: Tensor, dst: Tensor, parts: int, seed: int, balance: float) -> Tensor:
    del src, dst, seed, balance
    return torch.arange(num_nodes) * parts // num_nodes


def _random(num_nodes: int, src: Tensor, dst: Tensor, parts: int, seed: int, balance: float) -> Tensor:
    order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))
    return _contiguous(num_nodes, src, dst, parts, seed, balance)[order]


def _metis(num_nodes: int, src: Tensor, dst: Tensor, parts: int, seed: int, balance: float) -> Tensor:
    offsets, neighbours = _simple_graph(num_nodes, src, dst)
    if len(neighbours) == 0:  # METIS wants an edge
        return _contiguous(num_nodes, src, dst, parts, seed, balance)
    options = pymetis.Options(seed=seed, ufactor=max(1, round((balance - 1) * 1000)))
    adjacency = pymetis.CSRAdjacency(offsets, neighbours)

    def attempt(recursive: bool) -> Tensor:
        found = pymetis.part_graph(parts, adjacency=adjacency, options=options, recursive=recursive)
        assignment = torch.as_tensor(np.asarray(found.vertex_part), dtype=torch.int64)
        return _fill_empty_parts(assignment, np.diff(offsets), parts)

    # None is better on all graphs (benchmarks/partitions.py); bisection takes a fifth of the time of the others.
    return min(
        (attempt(True), attempt(False), _volume(num_nodes, src, dst, parts, seed, balance)),
        key=lambda assignment: sum(PartitionQuality.measure(assignment, src, dst, parts).halo),
    )


def _volume(num_nodes: int, src: Tensor, dst: Tensor, parts: int, seed: int, balance: float) -> Tensor:
    offsets, neighbours = _simple_graph(num_nodes, src, dst)
    if len(neighbours) == 0:
        return _contiguous(num_nodes, src, dst, parts, seed, balance)
    options = pymetis.Options(seed=seed, ufactor=max(1, round((balance - 1) * 1000)), objtype=pymetis.ObjType.VOL)
    adjacency = pymetis.CSRAdjacency(offsets, neighbours)
    found = pymetis.part_graph(parts, adjacency=adjacency, options=options, recursive=False)
    assignment = torch.as_tensor(np.asarray(found.vertex_part), dtype=torch.int64)
    return _fill_empty_parts(assignment, np.diff(offsets), parts)


def _hypergraph(num_nodes: int, src: Tensor, dst: Tensor, parts: int, seed: int, balance: float) -> Tensor:
    """Mt-KaHyPar (Gottesbüren et al., 2021), connectivity objective: a net a node, over it and whoever reads it.

    The connectivity of a net less one is the number of ranks that need a row of the node, so the objective is the
    number of halo rows itself.
    """
    try:
        import mtkahypar
    except ImportError as error:
        raise PartitionError(
            "the method hypergraph needs Mt-KaHyPar", remedy="pip install sylvie-fx[hypergraph]"
        ) from error
    src, dst = src.to("cpu", torch.int64), dst.to("cpu", torch.int64)
    proper = src != dst
    pins = torch.unique(src[proper] * num_nodes + dst[proper])
    readers = torch.split(pins % num_nodes, torch.bincount(pins // num_nodes, minlength=num_nodes).tolist())
    nets = [[node, *found.tolist()] for node, found in enumerate(readers) if len(found)]
    engine = _hypergraph_engine()
    mtkahypar.set_seed(seed)
    context = engine.context_from_preset(mtkahypar.PresetType.DEFAULT)
    context.set_partitioning_parameters(parts, max(balance - 1.0, 0.001), mtkahypar.Objective.KM1)
    context.logging = False
    graph = engine.create_hypergraph(context, num_nodes, len(nets), nets)
    assignment = torch.tensor(graph.partition(context).get_partition(), dtype=torch.int64)
    degrees = torch.bincount(torch.cat([src[proper], dst[proper]]), minlength=num_nodes)
    return _fill_empty_parts(assignment, degrees.numpy(), parts)


@functools.cache
def _hypergraph_engine() -> Any:
    """Mt-KaHyPar's thread pool, of which a process may start one."""
    import mtkahypar

    return mtkahypar.initialize(max(torch.get_num_threads(), 1))


def _simple_graph(num_nodes: int, src: Tensor, dst: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Offsets (N + 1,) and neighbours of the undirected graph without self loops and parallel edges."""
    src, dst = src.to("cpu", torch.int64), dst.to("cpu", torch.int64)
    proper = src != dst
    src, dst = src[proper], dst[proper]
    pairs = torch.unique(torch.cat([src * num_nodes + dst, dst * num_nodes + src]))
    degrees = torch.bincount(pairs // num_nodes, minlength=num_nodes)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    dtype = np.int32 if pairs.numel() < 2**31 else np.int64
    return offsets.numpy().astype(dtype), (pairs % num_nodes).numpy().astype(dtype)


def _fill_empty_parts(assignment: Tensor, degrees: np.ndarray, parts: int) -> Tensor:
    """Give each empty part the node with the fewest neighbours of the part that is largest then."""
    counts = torch.bincount(assignment, minlength=parts)
    for empty in (counts == 0).nonzero().flatten().tolist():
        largest = int(counts.argmax())
        members = (assignment == largest).nonzero().flatten()
        moved = members[int(np.argmin(degrees[members.numpy()]))]
        assignment[moved] = empty
        counts[largest] -= 1
        counts[empty] = 1
    return assignment


_METHODS: dict[str, Callable[[int, Tensor, Tensor, int, int, float], Tensor]] = {
    "metis": _metis,
    "metis-volume": _volume,
    "hypergraph": _hypergraph,
    "contiguous": _contiguous,
    "random": _random,
}
