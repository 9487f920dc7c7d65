"""A DGL graph over symbolic tensors: the graph API that models use, in plain torch gathers and scatters."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from sylvie_fx.capture.dgl_batch import Batch, OneBatch, Segments, batch_size
from sylvie_fx.capture.dgl_index import Size, StandInIndex, refusal, user_frame
from sylvie_fx.capture.dgl_len import symbolic_len
from sylvie_fx.capture.dgl_promises import Ledger, Promise, Replay, tag
from sylvie_fx.capture.size_numbers import size_as_number
from sylvie_fx.dgl import dgl

_REFUSED = (
    "pull", "push", "prop_nodes", "prop_edges", "adj", "adj_external", "adj_tensors",
    "adj_sparse", "adjacency_matrix", "inc", "edge_subgraph", "node_subgraph", "subgraph", "in_subgraph",
    "out_subgraph", "khop_in_subgraph", "khop_out_subgraph", "line_graph", "has_edges_between", "edge_ids",
    "in_edges", "out_edges", "predecessors", "successors", "add_nodes", "remove_nodes", "sample_neighbors",
    "to_networkx", "reorder_graph", "filter_nodes", "filter_edges", "set_batch_num_nodes",
    "set_batch_num_edges", "shared_memory", "metagraph",
)  # fmt: skip


class StandInGraph(dgl.DGLGraph):  # type: ignore[misc]
    """A homogeneous graph whose edges are (symbolic) tensors; use it within :func:`patched_dgl`.

    Args:
        src: Source of each edge, ``[E]``.
        dst: Destination of each edge, ``[E]``.
        marker: Any tensor with one row for each node, ``[N, ...]``: only its size is read. Or ``N`` itself.
        ndata: Features of nodes, ``[N, ...]`` each.
        edata: Features of edges, ``[E, ...]`` each.
        real: The graph that decides Python branches on degrees and the like; None to expect the ordinary outcome.
        batch: Where it is a batch of several graphs: which of them each node and edge belongs to.
    """

    _graph: StandInIndex
    _node_frames: list[Any]
    _edge_frames: list[Any]
    _ledger: Ledger
    _replay: Replay | None
    _batch: Batch | None

    def __init__(
        self,
        src: Tensor,
        dst: Tensor,
        marker: Tensor | Size,
        ndata: Mapping[str, Tensor] | None = None,
        edata: Mapping[str, Tensor] | None = None,
        *,
        real: Any = None,
        batch: Batch | None = None,
    ) -> None:
        num_nodes = marker.shape[0] if isinstance(marker, Tensor) else marker
        ledger = Ledger(real)
        self._set_up(StandInIndex(src, dst, num_nodes), ledger, lambda graph: graph)
        self._batch = batch
        tag(src, ledger, lambda graph: graph.edges()[0])
        tag(dst, ledger, lambda graph: graph.edges()[1])
        with symbolic_len():
            for name, value in (ndata or {}).items():
                self.ndata[name] = tag(value, ledger, functools.partial(_feature, "ndata", name))
            for name, value in (edata or {}).items():
                self.edata[name] = tag(value, ledger, functools.partial(_feature, "edata", name))

    def _set_up(self, index: StandInIndex, ledger: Ledger, replay: Replay | None) -> None:
        self._ledger, self._replay, self._batch = ledger, replay, None
        self._init(index, ["_N"], ["_E"], None, None)

    def derive(self, index: StandInIndex, transform: Callable[[Any], Any]) -> StandInGraph:
        """Another graph without features, that ``transform`` makes of the real one."""
        derived = StandInGraph.__new__(StandInGraph)
        replay = self._replay
        derived._set_up(index, self._ledger, None if replay is None else lambda graph: transform(replay(graph)))
        return derived

    @classmethod
    def unknown(cls, index: StandInIndex) -> StandInGraph:
        """A graph that belongs to no graph of the user, so that none decides its branches."""
        made = cls.__new__(cls)
        made._set_up(index, Ledger(), None)
        return made

    @property
    def promises(self) -> list[Promise]:
        """What the branches met so far took for granted, of this graph and of those derived from it."""
        return self._ledger.promises

    def run_promises(self, graph: Any) -> None:
        """Check every promise on a real graph.

        Raises:
            Exception: What the model itself raises for such a graph, such as DGL's ``DGLError``.
            CaptureError: The graph takes another branch than the captured program.
        """
        for promise in self.promises:
            promise.check(graph)

    def watch(self, value: Tensor, real: Tensor) -> None:
        """Let branches on another input be decided and checked like those on the graph.

        Args:
            value: The input as the model sees it while it is captured.
            real: Its real value.
        """
        tag(value, self._ledger, lambda graph: real)

    # Sizes, types, devices.

    @property
    def device(self) -> torch.device:
        """Where the edges are."""
        return self._graph.src.device

    def to(self, device: Any, **kwargs: Any) -> StandInGraph:
        """The graph itself: it lies where the model's inputs lie."""
        wanted = None if device is None else torch.device(device)
        if wanted is not None and wanted.type != self.device.type:
            raise refusal(
                f"a move to {wanted}",
                f"the inputs are on {self.device}",
                remedy="move the model and the graph to one device before",
            )
        return self

    def cpu(self) -> StandInGraph:
        """The graph itself, if it is there."""
        return self.to("cpu")

    def batch_num_nodes(self, ntype: str | None = None) -> OneBatch | Segments:
        """Sizes of the graphs of the batch; what a transform makes of a batch is one graph, as in DGL."""
        batch = self._batch
        return self._one_batch(self.num_nodes()) if batch is None else Segments(batch.nodes, batch.count)

    def batch_num_edges(self, etype: Any = None) -> OneBatch | Segments:
        """Numbers of edges of the graphs of the batch."""
        batch = self._batch
        return self._one_batch(self.num_edges()) if batch is None else Segments(batch.edges, batch.count)

    def _one_batch(self, size: Size) -> OneBatch:
        real, replay = self._ledger.real, self._replay
        if real is not None and replay is not None and batch_size(real) > 1 and batch_size(replay(real)) > 1:
            raise refusal("the sizes of a batch after a transform", "this transform keeps them in this version of DGL",
                          remedy="transform the graphs before dgl.batch()")  # fmt: skip
        return OneBatch((size,))

    def __getitem__(self, key: Any) -> StandInGraph:
        """The graph of one edge type: this one."""
        if key not in ("_E", ("_N", "_E", "_N"), slice(None)):
            raise dgl.DGLError(f'Invalid key "{key}". Must be one of the edge types.')
        return copy.copy(self)

    def clone(self) -> StandInGraph:
        """A copy with features of its own."""
        other: StandInGraph = self.local_var()
        return other

    # Structure.

    def find_edges(self, eid: Tensor, etype: Any = None) -> tuple[Tensor, Tensor]:
        """Ends of the edges with the given ids, ``[M]`` each."""
        eid = dgl.utils.prepare_tensor(self, eid, "eid")
        return self._graph.src.index_select(0, eid), self._graph.dst.index_select(0, eid)

    def has_nodes(self, vid: Any, ntype: str | None = None) -> Any:
        """Whether there are nodes with these ids."""
        return (vid >= 0) & (vid < self.num_nodes())

    def in_degrees(self, v: Any = dgl.base.ALL, etype: Any = None) -> Any:
        """Number of edges into each node, ``[N]``, or into the nodes ``v``."""
        return self._degrees(v, incoming=True)

    def out_degrees(self, u: Any = dgl.base.ALL, etype: Any = None) -> Any:
        """Number of edges out of each node, ``[N]``, or out of the nodes ``u``."""
        return self._degrees(u, incoming=False)

    def _degrees(self, nodes: Any, incoming: bool) -> Any:
        degrees, replay = self._graph.degrees(incoming), self._replay
        if replay is not None:
            tag(
                degrees,
                self._ledger,
                lambda graph: replay(graph).in_degrees() if incoming else replay(graph).out_degrees(),
            )
        if self._is_every(nodes, self._graph.size):
            return degrees
        found = degrees.index_select(0, dgl.utils.prepare_tensor(self, nodes, "nodes"))
        return found.item() if isinstance(nodes, int) else found

    @staticmethod
    def _is_every(ids: Any, size: Any) -> bool:
        """Whether ids that are Python numbers, or DGL's own mark, are those of all rows in order."""
        if isinstance(ids, (list, tuple)) and len(ids) > 1 and all(type(i) is int for i in ids):
            ids = range(len(ids)) if list(ids) == list(range(len(ids))) else ()
        return dgl.base.is_all(ids) or (isinstance(ids, range) and ids == range(size_as_number(size)))

    def send_and_recv(
        self, edges: Any, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None
    ) -> None:
        """:meth:`update_all` where ``edges`` are what ``edges()`` returns; nodes without messages keep what they have."""
        ends = edges if isinstance(edges, tuple) and len(edges) >= 2 else (None, None)
        if ends[0] is not self._graph.src or ends[1] is not self._graph.dst or apply_node_func is not None:
            raise refusal(
                "the method send_and_recv() for a part of the edges", "the captured program works on all of them",
                remedy="use update_all(), or send_and_recv(graph.edges(), ...) without a function for nodes",
            )  # fmt: skip
        self._promise_single_edges()
        results = dgl.core.message_passing(self, message_func, reduce_func, None)
        reached = self.in_degrees() > 0
        for name, value in results.items():
            before = self.ndata[name] if name in self.ndata else torch.zeros_like(value)
            results[name] = torch.where(reached.view(-1, *[1] * (value.dim() - 1)), value, before)
        self._set_n_repr(0, dgl.base.ALL, results)

    def _promise_single_edges(self) -> None:
        """Of parallel edges DGL sends one message along one of them, as often as there are edges: which is not said."""
        replay, remedy = self._replay, "use update_all(), which sends along every edge"
        if replay is None:
            raise refusal(
                "the method send_and_recv()", "edges were added or removed, and may be parallel", remedy=remedy
            )
        if self._ledger.real is not None and replay(self._ledger.real).is_multigraph:
            raise refusal(
                "the method send_and_recv() by the ends of edges",
                "of parallel edges DGL takes an arbitrary one",
                remedy=remedy,
            )
        self.promises.append(
            Promise("the graph had no parallel edges for send_and_recv(): is_multigraph was False", False,
                    lambda graph: replay(graph).is_multigraph, user_frame())
        )  # fmt: skip

    def add_edges(self, u: Any, v: Any, data: Mapping[str, Tensor] | None = None, etype: Any = None) -> None:
        """Append edges between nodes that exist, in place."""
        u, v = dgl.utils.prepare_tensor(self, u, "u"), dgl.utils.prepare_tensor(self, v, "v")
        size = v.shape[0] if isinstance(u.shape[0], int) and u.shape[0] == 1 else u.shape[0]
        u, v = u.expand(size), v.expand(size)
        old = self._graph
        self._graph = StandInIndex(torch.cat([old.src, u]), torch.cat([old.dst, v]), old.size)
        self._replay = self._batch = None
        if data is None:
            self._edge_frames[0].add_rows(size)
        else:
            self._edge_frames[0].append(dict(data))

    def remove_edges(self, eids: Any, etype: Any = None, store_ids: bool = False) -> None:
        """Remove edges by their ids, in place; the others keep their order."""
        eids = dgl.utils.prepare_tensor(self, eids, "eids")
        keep = torch.ones_like(self._graph.src, dtype=torch.bool).index_fill(0, eids.long(), False)
        kept = keep.nonzero().squeeze(-1)
        old = self._graph
        self._graph = StandInIndex(old.src.index_select(0, kept), old.dst.index_select(0, kept), old.size)
        self._edge_frames = [self._edge_frames[0].subframe(kept)]
        self._replay, batch = None, self._batch
        if batch is not None:
            self._batch = Batch(batch.nodes, batch.edges.index_select(0, kept), batch.count)
        if store_ids:
            self.edata[dgl.EID] = kept

    # Message passing.

    def update_all(self, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None) -> None:
        """Send messages along all edges and reduce them into ndata."""
        results = dgl.core.message_passing(self, message_func, reduce_func, apply_node_func)
        self._set_n_repr(0, dgl.base.ALL, results)

    def apply_edges(self, func: Any, edges: Any = dgl.base.ALL, etype: Any = None) -> None:
        """Compute edata from the ends of all edges, or of the edges with the given ids."""
        if dgl.core.is_builtin(func):
            results = dgl.core.invoke_gsddmm(self, func)
            if not dgl.base.is_all(edges):
                edges = dgl.utils.prepare_tensor(self, edges, "edges")
                results = {name: value.index_select(0, edges) for name, value in results.items()}
        else:
            if not dgl.base.is_all(edges):
                edges = dgl.utils.prepare_tensor(self, edges, "edges")
            results = dgl.core.invoke_edge_udf(self, edges, self.canonical_etypes[0], func)
        self._set_e_repr(0, edges, results)


def _feature(kind: str, name: str, graph: Any) -> Tensor:
    value: Tensor = getattr(graph, kind)[name]
    return value


def _transform(name: str) -> Callable[..., Any]:
    """The method of a transform: looked up when it is called, since it is replaced while capturing."""

    def method(self: StandInGraph, *args: Any, **kwargs: Any) -> Any:
        return getattr(dgl.transforms.functional, name)(self, *args, **kwargs)

    return method


def _refused(name: str) -> Callable[..., NoReturn]:
    def method(self: StandInGraph, *args: Any, **kwargs: Any) -> NoReturn:
        raise refusal(
            f"the method {name}()",
            "it reads or changes a part of the graph, or needs another form of it than edge lists",
        )

    return method


for _name in _REFUSED:
    setattr(StandInGraph, _name, _refused(_name))
for _name in ("reverse", "add_self_loop", "remove_self_loop", "to_simple"):
    setattr(StandInGraph, _name, _transform(_name))
