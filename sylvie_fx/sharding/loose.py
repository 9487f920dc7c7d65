"""What loose tensors are: node rows, edge rows, an edge_index, lists of node ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from sylvie_fx.ir.errors import OptionError, PartitionError

KINDS = ("node", "edge", "edge_index", "pair", "src", "dst", "ids", "same")


def infer_kinds(
    named: Sequence[tuple[str, Tensor]],
    num_nodes: int | None,
    num_edges: int | None,
    given: Sequence[str | None] | None,
    tables: Collection[int] = (),
) -> tuple[list[str], int]:
    """The kind of each tensor, and the number of nodes.

    Args:
        named: ``(name, tensor)`` in the order in which the user gave them.
        num_nodes: Known from a graph object among the data, else None.
        num_edges: Likewise.
        given: Kinds by the user, None where they are to be inferred.
        tables: Numbers of rows of the model's tables, one of which tells the number of nodes where the data does not.

    Raises:
        PartitionError: Node rows and edge rows can not be told apart, or nothing tells the number of nodes.
        OptionError: A given kind is unknown, or there are not as many as tensors.
    """
    if given is not None and len(given) != len(named):
        raise OptionError(
            f"{len(given)} kinds for {len(named)} tensors", remedy="give one kind for each tensor, None to infer it"
        )
    kinds: list[str | None] = list(given) if given is not None else [None] * len(named)
    for kind in kinds:
        if kind is not None and kind not in KINDS:
            raise OptionError(f"unknown kind {kind!r}", remedy=f"choose from {', '.join(KINDS)}")
    tensors = [t for _, t in named]
    for i, tensor in enumerate(tensors):
        if kinds[i] is None and tensor.dim() == 2 and tensor.shape[0] == 2 and _is_index(tensor):
            kinds[i] = "edge_index"
    num_edges = num_edges if num_edges is not None else _edge_count(tensors, kinds)
    if num_nodes is None:
        num_nodes = _node_count(named, kinds, num_edges, tables)
    if num_edges is None:
        num_edges = _pair(tensors, kinds, num_nodes)
    if num_nodes == num_edges and any(
        k is None and t.dim() and t.shape[0] == num_nodes for k, t in zip(kinds, tensors, strict=True)
    ):
        raise PartitionError(
            f"the graph has as many nodes as edges ({num_nodes})",
            why="node rows and edge rows can not be told apart",
            remedy=f"name them: shard(..., kinds=[...]) with {', '.join(KINDS)}",
        )
    pairs = [0 if kind != "edge_index" else tensor.shape[1] for kind, tensor in zip(kinds, tensors, strict=True)]
    found = [
        kind or _by_length(name, tensor, num_nodes, num_edges, pairs[:i])
        for i, (kind, (name, tensor)) in enumerate(zip(kinds, named, strict=True))
    ]
    return found, num_nodes


def _is_index(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point and tensor.dtype != torch.bool


def _edge_count(tensors: Sequence[Tensor], kinds: Sequence[str | None]) -> int | None:
    for tensor, kind in zip(tensors, kinds, strict=True):
        if kind == "edge_index":
            return tensor.shape[1]
        if kind in ("edge", "src", "dst"):
            return tensor.shape[0]
    return None


def _node_count(
    named: Sequence[tuple[str, Tensor]], kinds: Sequence[str | None], num_edges: int | None, tables: Collection[int]
) -> int:
    for (_, tensor), kind in zip(named, kinds, strict=True):
        if kind == "node":
            return tensor.shape[0]
    free = [t for (_, t), k in zip(named, kinds, strict=True) if k is None and t.dim()]
    features = [t.shape[0] for t in free if t.dim() > 1]
    masks = [t.shape[0] for t in free if t.dtype == torch.bool]
    ends = [t for (_, t), k in zip(named, kinds, strict=True) if k in ("edge_index", "src", "dst") and t.numel()]
    largest = max((int(t.max()) for t in ends), default=-1)
    for fits in (lambda size: size > largest, lambda size: True):  # a tensor with too few rows is not believed at once
        for sizes in (features, masks, [t.shape[0] for t in free]):
            counted = Counter(s for s in sizes if s != num_edges and fits(s))
            if counted:
                return counted.most_common(1)[0][0]
    if features:
        return features[0]
    fitting = [size for size in tables if ends and size > largest]
    if len(fitting) == 1:
        return fitting[0]
    raise PartitionError(
        "nothing tells how many nodes the graph has", remedy="shard the node features together with the edges"
    )


def _pair(tensors: Sequence[Tensor], kinds: list[str | None], num_nodes: int) -> int | None:
    """Two 1-D integer tensors of one length, one after the other, are source and destination."""
    for i in range(len(tensors) - 1):
        a, b = tensors[i], tensors[i + 1]
        if (
            kinds[i] is None
            and kinds[i + 1] is None
            and _is_index(a)
            and _is_index(b)
            and a.dim() == b.dim() == 1
            and a.shape == b.shape
            and a.shape[0] != num_nodes
        ):
            kinds[i], kinds[i + 1] = "src", "dst"
            return a.shape[0]
    return None


def _by_length(name: str, tensor: Tensor, num_nodes: int, num_edges: int | None, pairs: Collection[int]) -> str:
    if tensor.dim() and tensor.shape[0] == num_nodes:
        return "node"
    if tensor.dim() and num_edges is not None and tensor.shape[0] == num_edges:
        return "edge"
    if tensor.dim() and tensor.shape[0] and tensor.shape[0] in pairs:
        return "pair"
    if tensor.dim() == 1 and _is_index(tensor):
        return "ids"
    if tensor.dim() == 2 and num_nodes > 2 and tensor.dtype.is_floating_point and tensor.shape[0] > num_nodes // 2:
        raise PartitionError(
            f"{name} has {tensor.shape[0]} rows, but the graph has {num_nodes} nodes and {num_edges or 0} edges",
            remedy="give one row for each node or edge, or name its kind: shard(..., kinds=[...])",
        )
    return "same"
