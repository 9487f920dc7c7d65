"""shard: keep this rank's rows of the data of one graph, as the same kinds of objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sylvie_fx.capture.held import HeldGraph, HeldKind
from sylvie_fx.capture.sparse import adjacency_parts, is_adjacency
from sylvie_fx.graphs.sharded import ShardedGraph
from sylvie_fx.ir.errors import PartitionError
from sylvie_fx.ir.placement import EDGES, NODES
from sylvie_fx.sharding.agree import check_ranks, make_graph, tensors_of
from sylvie_fx.sharding.context import ShardContext
from sylvie_fx.sharding.loose import infer_kinds
from sylvie_fx.sharding.pyg import data_edges, is_data, shard_data
from sylvie_fx.sharding.sparse import shard_adjacency

if TYPE_CHECKING:
    from sylvie_fx.api import DistributedModule


def shard(model: DistributedModule, data: tuple[Any, ...], partition: Any, kinds: Sequence[str | None] | None) -> Any:
    """Keep this rank's rows; every rank calls it with the whole data of the same graph.

    Args:
        model: The distributed model.
        data: Graphs and tensors that belong together: DGLGraph, PyG Data, sparse adjacency, ``edge_index`` ``[2, E]``,
            ``src, dst``, node tensors ``[N, ...]``, edge tensors ``[E, ...]``, lists of node ids, in any containers.
        partition: ``"metis"`` (default), ``"contiguous"``, ``"random"``, an int64 ``[N]`` tensor with the rank of each
            node, or a :class:`PartitionBook`.
        kinds: One of ``node edge edge_index pair src dst ids same`` for each loose tensor, where its shape does not tell;
            ``pair`` is a row for each pair of nodes of the nearest ``edge_index`` of that length in front of it, such as
            labels for link prediction. In a PyG Data they are told by name: ``edge_label_index`` and ``edge_label``.

    Returns:
        The same objects with this rank's rows; a single one if one was given, else a tuple.

    Raises:
        PartitionError: The data does not belong together, or is malformed.
        CommError: Ranks hold different graphs, models or options.
    """
    model.holdings.refresh()
    held = model.holdings.graphs
    leaves, spec = pytree.tree_flatten(data, is_leaf=_is_object)
    objects = {id(v): v for v in (*leaves, *(h.value for h in held))}
    graphs = [v for v in objects.values() if _is_graph(v)]
    indices = {id(h.value): h.value for h in held if not _is_graph(h.value)}
    loose = [(f"data[{i}]", v) for i, v in enumerate(leaves) if isinstance(v, Tensor) and not is_adjacency(v)]
    num_nodes = next((_nodes(g) for g in graphs if _nodes(g) is not None), None)
    pairs = [edges for v in (*graphs, *indices.values()) if (edges := _edges(v)) is not None]
    num_edges = len(pairs[0][1]) if pairs else None
    joined = _joined(model, [t for _, t in loose]) if not pairs and partition is None else None
    if joined is not None:
        num_nodes = joined.num_nodes
        num_edges = joined.spaces[EDGES].rows if EDGES in joined.spaces else None
    inferred: list[str] = []
    if loose:
        inferred, num_nodes = infer_kinds(loose, num_nodes, num_edges, kinds, model.holdings.table_sizes())
    if num_nodes is None:
        raise PartitionError(
            "nothing tells how many nodes the graph has", remedy="shard the node features together with the edges"
        )
    device = next((p.device for p in model.module.parameters()), None)
    for name, tensor in [*loose, *[(f"the {type(v).__name__}", t) for v in graphs for t in tensors_of(v)]]:
        if device is not None and tensor.device != device:
            raise PartitionError(
                f"{name} is on {tensor.device}, but the model is on {device}",
                remedy=f"move it: tensor.to({str(device)!r})",
            )
    pairs += _loose_edges(loose, inferred)
    src, dst = (torch.cat([pair[i].cpu() for pair in pairs] or [_NO_IDS]) for i in range(2))
    check_ranks(model, [src, dst, num_nodes], [tensors_of(v) for v in leaves])
    model.engine.ask_link(device or torch.device("cpu"))
    graph = joined if joined is not None and not pairs else make_graph(model, num_nodes, src, dst, partition)
    context = ShardContext(graph, model.engine, graph.spaces.get(EDGES))
    sharded: dict[int, Any] = {}
    for value in graphs:
        sharded[id(value)] = _shard_graph(context, value)
    for place in held:
        if id(place.value) in indices:
            sharded[id(place.value)] = _shard_held(context, place)
    kept = {str(h): sharded[id(h.value)] for h in held}
    model.holdings.adopt(kept, context.graph)
    for (name, tensor), kind in sorted(zip(loose, inferred, strict=True), key=lambda pair: _ORDER.index(pair[1])):
        if id(tensor) not in sharded:
            _shard_loose(context, name, tensor, kind, loose, inferred, sharded)
    results = pytree.tree_unflatten([sharded.get(id(v), v) for v in leaves], spec)
    return results[0] if len(data) == 1 else results


_ORDER = ("edge_index", "src", "dst", "node", "edge", "pair", "ids", "same")


def _joined(model: DistributedModule, loose: Sequence[Tensor]) -> ShardedGraph | None:
    """The graph of an earlier call, where tensors without edges can be rows of it or lists of its nodes."""
    graph = model.holdings.graph
    if graph is None or not loose:
        return None
    sizes = {space.rows for name, space in graph.spaces.items() if name in (NODES, EDGES)}
    fitting = [t.dim() == 0 or t.shape[0] in sizes or _is_id_list(t) for t in loose]
    return graph if all(fitting) else None


def _is_id_list(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and not tensor.dtype.is_floating_point and tensor.dtype != torch.bool


def _is_object(value: Any) -> bool:
    return isinstance(value, Tensor) or is_data(value) or is_dgl(value)


def is_dgl(value: Any) -> bool:
    """Whether it is a DGLGraph."""
    return any(c.__name__ == "DGLGraph" and c.__module__.startswith("dgl") for c in type(value).__mro__)


def _edges(value: Any) -> tuple[Tensor, Tensor] | None:
    """Source and destination of a graph's edges; None for anything else, and for an edge_index that a user passes."""
    if is_dgl(value):
        src, dst = value.edges(order="eid")
        return src, dst
    if is_data(value):
        return data_edges(value)
    if is_adjacency(value):
        parts = adjacency_parts(value)
        return parts.col, parts.row
    if isinstance(value, tuple) or (isinstance(value, Tensor) and value.dim() == 2):  # held, so known to be edges
        return value[0], value[1]
    return None


def _is_graph(value: Any) -> bool:
    return is_dgl(value) or is_data(value) or is_adjacency(value)


def _nodes(value: Any) -> int | None:
    if is_dgl(value):
        return int(value.num_nodes())
    if is_data(value):
        return None if value.num_nodes is None else int(value.num_nodes)
    return int(value.shape[0])


_NO_IDS = torch.empty(0, dtype=torch.int64)


def _loose_edges(loose: Sequence[tuple[str, Tensor]], kinds: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
    """The edges among loose tensors."""
    pairs = [(t[0], t[1]) for (_, t), k in zip(loose, kinds, strict=True) if k == "edge_index"]
    sources = [t for (_, t), k in zip(loose, kinds, strict=True) if k == "src"]
    targets = [t for (_, t), k in zip(loose, kinds, strict=True) if k == "dst"]
    if len(sources) != len(targets):
        raise PartitionError("source ids without destination ids", remedy="shard src and dst together")
    return [*pairs, *zip(sources, targets, strict=True)]


def _shard_graph(context: ShardContext, value: Any) -> Any:
    if is_adjacency(value):
        return shard_adjacency(context, value, "the adjacency")
    if is_data(value):
        return shard_data(context, value, lambda name, t: _loose_attribute(context, name, t))
    from sylvie_fx.sharding.dgl import shard_dgl

    return shard_dgl(context, value)


def _loose_attribute(context: ShardContext, name: str, value: Tensor) -> Any:
    if _is_id_list(value) and name.endswith(("_idx", "_index", "_nid", "_ids")):
        return context.ids(value, name)
    return value


def _shard_loose(
    context: ShardContext,
    name: str,
    tensor: Tensor,
    kind: str,
    loose: Sequence[tuple[str, Tensor]],
    kinds: Sequence[str],
    sharded: dict[int, Any],
) -> None:
    make: dict[str, Callable[[], Any]] = {
        "node": lambda: context.nodes(tensor, name),
        "edge_index": lambda: context.edge_index(tensor, name),
        "ids": lambda: context.ids(tensor, name),
        "same": lambda: tensor,
    }
    if kind == "pair":
        before = loose[: next(i for i, (_, t) in enumerate(loose) if t is tensor)]
        found = [
            t for (_, t), k in zip(before, kinds, strict=False) if k == "edge_index" and t.shape[1:] == tensor.shape[:1]
        ]
        if not found:
            raise PartitionError(
                f"{name} of shape {tuple(tensor.shape)} has a row for each pair, but no index [2, pairs] of that length is "
                "in front of it",
                remedy="shard the index of the pairs in front of it, in the same call",
            )
        sharded[id(tensor)] = context.rows(tensor, sharded[id(found[-1])]._sharding.space, name)
    elif kind == "edge":
        if context.edges is None:
            raise PartitionError(
                f"{name} has a row for each edge, but there are no edges", remedy="shard the edge_index too"
            )
        sharded[id(tensor)] = context.rows(tensor, context.edges, name)
    elif kind in ("src", "dst"):
        sources = [t for (_, t), k in zip(loose, kinds, strict=True) if k == "src"]
        targets = [t for (_, t), k in zip(loose, kinds, strict=True) if k == "dst"]
        at = next(i for i, t in enumerate(sources if kind == "src" else targets) if t is tensor)
        pair = context.ends(sources[at], targets[at], ("the sources", "the destinations"))
        sharded[id(sources[at])], sharded[id(targets[at])] = pair
    else:
        sharded[id(tensor)] = make[kind]()


def _shard_held(context: ShardContext, held: HeldGraph) -> Any:
    if held.kind is HeldKind.EDGE_INDEX:
        return context.edge_index(held.value, str(held))
    if held.kind is HeldKind.EDGE_PAIR:
        src, dst = held.value
        return context.ends(src, dst, (f"the sources of {held}", f"the destinations of {held}"))
    return _shard_graph(context, held.value)
