"""shard: keep this rank's rows of the data of one graph, as the same kinds of objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sylvie_fx.capture.held import HeldGraph, HeldKind
from sylvie_fx.capture.sparse import adjacency_parts, is_adjacency
from sylvie_fx.graphs.layout import RowLayout
from sylvie_fx.graphs.partition import partition_nodes
from sylvie_fx.graphs.sharded import ShardedGraph
from sylvie_fx.ir.errors import PartitionError
from sylvie_fx.runtime.digest import check_equal_across_ranks
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
        kinds: One of ``node edge edge_index src dst ids same`` for each loose tensor, where its shape does not tell.

    Returns:
        The same objects with this rank's rows; a single one if one was given, else a tuple.

    Raises:
        PartitionError: The data does not belong together, or is malformed.
        CommError: Ranks hold different graphs, models or options.
    """
    held = model.held
    leaves, spec = pytree.tree_flatten(data, is_leaf=_is_object)
    graphs = [v for v in (*leaves, *(h.value for h in held)) if _edges(v) is not None]
    loose = [(f"data[{i}]", v) for i, v in enumerate(leaves) if isinstance(v, Tensor) and not is_adjacency(v)]
    num_nodes = next((_nodes(g) for g in graphs if _nodes(g) is not None), None)
    num_edges = next((len(edges[1]) for g in graphs if (edges := _edges(g)) is not None), None)
    inferred = infer_kinds(loose, num_nodes, num_edges, kinds) if loose else []
    if num_nodes is None:
        num_nodes = next((len(t) for (_, t), k in zip(loose, inferred, strict=True) if k == "node"), None)
    if num_nodes is None:
        raise PartitionError(
            "nothing tells how many nodes the graph has", remedy="shard the node features together with the edges"
        )
    src, dst = _all_edges(graphs, loose, inferred)
    context = ShardContext(_partition(model, num_nodes, src, dst, partition), model.engine)
    _check_ranks(model, src, dst, context)
    device = next((p.device for p in model.module.parameters()), None)
    for name, tensor in loose:
        if device is not None and tensor.device != device:
            raise PartitionError(
                f"{name} is on {tensor.device}, but the model is on {device}",
                remedy=f"move it: tensor.to({str(device)!r})",
            )
    sharded: dict[int, Any] = {}
    for value in graphs:
        sharded[id(value)] = _shard_graph(context, value)
    model.adopt({id(h.value): sharded.get(id(h.value)) or _shard_held(context, h) for h in held})
    for (name, tensor), kind in sorted(zip(loose, inferred, strict=True), key=lambda pair: _ORDER.index(pair[1])):
        if id(tensor) not in sharded:
            _shard_loose(context, name, tensor, kind, loose, inferred, sharded)
    results = pytree.tree_unflatten([sharded.get(id(v), v) for v in leaves], spec)
    return results[0] if len(data) == 1 else results


_ORDER = ("edge_index", "src", "dst", "node", "edge", "ids", "same")


def _is_object(value: Any) -> bool:
    return isinstance(value, Tensor) or is_data(value) or is_dgl(value)


def is_dgl(value: Any) -> bool:
    """Whether it is a DGLGraph."""
    return any(c.__name__ == "DGLGraph" and c.__module__.startswith("dgl") for c in type(value).__mro__)


def _edges(value: Any) -> tuple[Tensor, Tensor] | None:
    """Source and destination of a graph object's edges; None for anything else."""
    if is_dgl(value):
        src, dst = value.edges(order="eid")
        return src, dst
    if is_data(value):
        return data_edges(value)
    if is_adjacency(value):
        parts = adjacency_parts(value)
        return parts.col, parts.row
    return None


def _nodes(value: Any) -> int | None:
    if is_dgl(value):
        return int(value.num_nodes())
    if is_data(value):
        return None if value.num_nodes is None else int(value.num_nodes)
    return int(value.shape[0])


def _all_edges(
    graphs: Sequence[Any], loose: Sequence[tuple[str, Tensor]], kinds: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """The edges of everything together, for the partition."""
    pairs = [edges for g in graphs if (edges := _edges(g)) is not None]
    pairs += [(t[0], t[1]) for (_, t), k in zip(loose, kinds, strict=True) if k == "edge_index"]
    sources = [t for (_, t), k in zip(loose, kinds, strict=True) if k == "src"]
    targets = [t for (_, t), k in zip(loose, kinds, strict=True) if k == "dst"]
    if len(sources) != len(targets):
        raise PartitionError("source ids without destination ids", remedy="shard src and dst together")
    pairs += list(zip(sources, targets, strict=True))
    if not pairs:
        none = torch.empty(0, dtype=torch.int64)
        return none, none
    return torch.cat([p[0].cpu() for p in pairs]), torch.cat([p[1].cpu() for p in pairs])


def _partition(model: DistributedModule, num_nodes: int, src: Tensor, dst: Tensor, partition: Any) -> ShardedGraph:
    size, rank = model.transport.size, model.transport.rank
    method = getattr(partition, "assignment", partition)
    owner = partition_nodes(num_nodes, src, dst, size, "metis" if method is None else method, model.options.seed)
    return ShardedGraph(RowLayout(owner, size), rank)


def _check_ranks(model: DistributedModule, src: Tensor, dst: Tensor, context: ShardContext) -> None:
    transport = model.transport
    if transport.size == 1:
        return
    check_equal_across_ranks(transport, "options", model.options, "shard")
    check_equal_across_ranks(transport, "graph", [src, dst, context.graph.num_nodes], "shard")
    check_equal_across_ranks(transport, "partition", context.graph.nodes.owner, "shard")
    state = {name: t.detach() for name, t in model.module.state_dict().items() if isinstance(t, Tensor)}
    check_equal_across_ranks(transport, "model", state, "shard")


def _shard_graph(context: ShardContext, value: Any) -> Any:
    if is_adjacency(value):
        return shard_adjacency(context, value, "the adjacency")
    if is_data(value):
        return shard_data(context, value, lambda name, t: _loose_attribute(context, name, t))
    from sylvie_fx.sharding.dgl import shard_dgl

    return shard_dgl(context, value)


def _loose_attribute(context: ShardContext, name: str, value: Tensor) -> Any:
    if (
        value.dim() == 1
        and not value.dtype.is_floating_point
        and value.dtype != torch.bool
        and name.endswith(("_idx", "_index", "_nid", "_ids"))
    ):
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
    if kind == "edge":
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
