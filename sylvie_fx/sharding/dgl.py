"""DGL graphs: a graph object with this rank's rows as ndata and edata, captured through the stand-in."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor

from sylvie_fx.capture.dgl_batch import Batch, batch_size, members
from sylvie_fx.capture.dgl_graph import StandInGraph
from sylvie_fx.capture.dgl_patches import patched_dgl
from sylvie_fx.capture.inputs import Expanded
from sylvie_fx.dgl import dgl
from sylvie_fx.ir.errors import PartitionError
from sylvie_fx.node_tensor import NodeTensor
from sylvie_fx.sharding.context import ShardContext


class Frame(MutableMapping[str, Any]):
    """Node or edge data: tensors with this rank's rows; a row count that does not fit is refused."""

    def __init__(self, space: Any, kind: str) -> None:
        self._space, self._kind = space, kind
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(value, NodeTensor) or value._sharding.space is not self._space:
            raise PartitionError(
                f"{self._kind}[{name!r}] = ... needs this rank's rows of a global tensor",
                remedy="compute it from sharded tensors, or set it on the graph before model.shard(graph)",
            )
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class ShardedDGLGraph(dgl.DGLGraph):  # type: ignore[misc]
    """This rank's share of a homogeneous DGLGraph; sizes are those of the whole graph.

    Message passing happens inside the distributed model; on this object it is refused.
    """

    def __init__(self, context: ShardContext, graph: Any) -> None:
        # No call of the base class: there is no C++ graph behind this object.
        src, dst = graph.edges(order="eid")
        self._whole = graph
        self._context = context
        self._src, self._dst = context.ends(src, dst, ("the graph's sources", "the graph's destinations"))
        self._marker = context.marker()
        self._batch: list[NodeTensor] = []
        if batch_size(graph) > 1:
            self._batch.append(context.nodes(members(graph.batch_num_nodes()), "batch_num_nodes"))
            edges, sizes = self._dst._sharding.space, graph.batch_num_edges()
            if len(sizes) != batch_size(graph):
                raise PartitionError(
                    f"the graph is a batch of {batch_size(graph)} graphs by its nodes and of {len(sizes)} by its edges",
                    remedy="call graph.set_batch_num_edges(...) too",
                )
            self._batch.append(context.rows(members(sizes), edges, "batch_num_edges"))
        self._node_frame = Frame(context.graph.spaces["N"], "ndata")
        self._edge_frame = Frame(self._dst._sharding.space, "edata")
        for name, value in graph.ndata.items():
            self._node_frame._values[name] = context.nodes(value, f"graph.ndata[{name!r}]")
        for name, value in graph.edata.items():
            self._edge_frame._values[name] = context.rows(value, self._dst._sharding.space, f"graph.edata[{name!r}]")

    ndata = property(lambda self: self._node_frame)
    srcdata = property(lambda self: self._node_frame)
    dstdata = property(lambda self: self._node_frame)
    edata = property(lambda self: self._edge_frame)
    device = property(lambda self: self._src.device)
    ntypes = property(lambda self: ["_N"])
    etypes = property(lambda self: ["_E"])
    is_block = property(lambda self: False)
    is_homogeneous = property(lambda self: True)
    idtype = property(lambda self: torch.int64)
    batch_size = property(lambda self: batch_size(self._whole))

    def batch_num_nodes(self, ntype: str | None = None) -> Tensor:
        """Numbers of nodes of the graphs of a batch, int64 ``[batch_size]``, the same on every rank."""
        sizes: Tensor = self._whole.batch_num_nodes()
        return sizes

    def batch_num_edges(self, etype: Any = None) -> Tensor:
        """Numbers of edges of the graphs of a batch, int64 ``[batch_size]``, the same on every rank."""
        sizes: Tensor = self._whole.batch_num_edges()
        return sizes

    def num_nodes(self, ntype: str | None = None) -> int:
        """Nodes of the whole graph."""
        return len(self._marker)

    def num_edges(self, etype: Any = None) -> int:
        """Edges of the whole graph."""
        return len(self._dst)

    number_of_nodes, number_of_edges = num_nodes, num_edges

    def in_degrees(self, v: Any = None, etype: Any = None) -> NodeTensor:
        """In-degrees of this rank's nodes."""
        return self._context.nodes(self._whole.in_degrees(), "in_degrees")

    def out_degrees(self, u: Any = None, etype: Any = None) -> NodeTensor:
        """Out-degrees of this rank's nodes."""
        return self._context.nodes(self._whole.out_degrees(), "out_degrees")

    def to(self, device: Any, **kwargs: Any) -> ShardedDGLGraph:
        """The graph itself, where it is on that device already."""
        if torch.device(device).type != self.device.type:
            raise PartitionError(
                f"a sharded graph is on {self.device}", remedy="move the graph before model.shard(graph)"
            )
        return self

    def int(self) -> ShardedDGLGraph:
        """The graph itself: ids are int64."""
        return self

    long = int

    def __repr__(self) -> str:
        here = len(self._marker.local())
        return f"ShardedDGLGraph({self.num_nodes()} nodes, {self.num_edges()} edges, {here} nodes here)"

    def __copy__(self) -> ShardedDGLGraph:
        clone = object.__new__(ShardedDGLGraph)
        clone.__dict__.update(self.__dict__)
        return clone


def _refused(name: str) -> Any:
    def method(self: ShardedDGLGraph, *args: Any, **kwargs: Any) -> NoReturn:
        raise PartitionError(
            f"graph.{name} on a sharded graph",
            why="its edges reach rows of other ranks",
            remedy="call it inside the model, or on the whole graph before model.shard(graph)",
        )

    return method


for _name in (
    "update_all", "apply_edges", "apply_nodes", "multi_update_all", "send_and_recv", "push", "pull", "local_scope",
    "local_var", "edges", "all_edges", "adj", "adj_external", "add_edges", "remove_edges", "add_nodes", "remove_nodes",
    "reverse", "subgraph", "edge_subgraph", "in_subgraph", "out_subgraph", "find_edges", "edge_ids", "nodes",
    "filter_nodes", "filter_edges",
):  # fmt: skip
    setattr(ShardedDGLGraph, _name, _refused(_name))


def shard_dgl(context: ShardContext, graph: Any) -> ShardedDGLGraph:
    """Keep this rank's rows of a homogeneous DGLGraph.

    Raises:
        PartitionError: The graph has several node or edge types.
    """
    if len(graph.ntypes) != 1 or len(graph.etypes) != 1:
        raise PartitionError(
            f"the graph has node types {graph.ntypes} and edge types {graph.etypes}",
            remedy="use a homogeneous graph: dgl.to_homogeneous(graph)",
        )
    if getattr(graph, "is_block", False):
        raise PartitionError("the graph is a block of sampled neighbours", remedy="shard the whole graph")
    return ShardedDGLGraph(context, graph)


class GraphFrontend:
    """Takes sharded DGL graphs apart."""

    @staticmethod
    def context() -> AbstractContextManager[None]:
        """DGL's functions work on the stand-in."""
        return patched_dgl()

    def matches(self, value: Any) -> bool:
        """Whether it is a sharded DGLGraph."""
        return isinstance(value, ShardedDGLGraph)

    def expand(self, value: ShardedDGLGraph) -> Expanded:
        """Edges, the marker of the nodes, ndata, edata, and the graph of each node and edge of a batch."""
        node_names, edge_names = list(value.ndata), list(value.edata)
        tensors: list[tuple[str, Tensor]] = [(".src", value._src), (".dst", value._dst), (".nodes", value._marker)]
        tensors += [(f".ndata[{n!r}]", value.ndata[n]) for n in node_names]
        tensors += [(f".edata[{n!r}]", value.edata[n]) for n in edge_names]

        tensors += zip((".batch_num_nodes", ".batch_num_edges"), value._batch, strict=False)
        count = value.batch_size

        def build(parts: Sequence[Tensor]) -> Any:
            src, dst, marker, *rest = parts
            batch = Batch(rest[-2], rest[-1], count) if count > 1 else None
            ndata = dict(zip(node_names, rest, strict=False))
            edata = dict(zip(edge_names, rest[len(node_names) :], strict=False))
            return StandInGraph(src, dst, marker, ndata, edata, real=value._whole, batch=batch)

        return Expanded(tensors, build, (tuple(node_names), tuple(edge_names), count))

    def check(self, stand_in: StandInGraph, value: ShardedDGLGraph) -> None:
        """Run the checks that the capture took for granted on the real graph."""
        stand_in.run_promises(value._whole)
