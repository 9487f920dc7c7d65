"""Transforms of a whole graph: self loops, reversed edges, both directions; and values given to all nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from sylvie_fx.capture.dgl_batch import OneBatch, Segments
from sylvie_fx.capture.dgl_graph import StandInGraph
from sylvie_fx.capture.dgl_index import StandInIndex, refusal
from sylvie_fx.capture.dgl_ops import reduce_edges
from sylvie_fx.dgl import dgl

_transforms = dgl.transforms.functional


def reverse(
    g: StandInGraph,
    copy_ndata: bool = True,
    copy_edata: bool = False,
    *,
    share_ndata: bool | None = None,
    share_edata: bool | None = None,
) -> StandInGraph:
    """The graph with every edge turned around."""
    turned = g.derive(g._graph.reverse(), _transforms.reverse)
    if copy_ndata if share_ndata is None else share_ndata:
        turned.ndata.update(g.ndata)
    if copy_edata if share_edata is None else share_edata:
        turned.edata.update(g.edata)
    return turned


def add_self_loop(
    g: StandInGraph, edge_feat_names: Sequence[str] | None = None, fill_data: Any = 1.0, etype: Any = None
) -> StandInGraph:
    """The graph with one more edge from each node to itself, after the others."""
    index, nodes = g._graph, g.nodes()
    looped = g.derive(
        StandInIndex(torch.cat([index.src, nodes]), torch.cat([index.dst, nodes]), index.size),
        lambda graph: _transforms.add_self_loop(graph, edge_feat_names, fill_data, etype),
    )
    looped.ndata.update(g.ndata)
    names = list(g.edata.keys()) if edge_feat_names is None else edge_feat_names
    for name in g.edata:
        value = g.edata[name]
        if name not in names:
            fill = value.new_zeros((index.size, *value.shape[1:]))
        elif isinstance(fill_data, str):
            fill = reduce_edges(index, value, fill_data)
        else:
            fill = value.new_full((index.size, *value.shape[1:]), fill_data)
        looped.edata[name] = torch.cat([value, fill])
    return looped


def remove_self_loop(g: StandInGraph, etype: Any = None) -> StandInGraph:
    """The graph without edges from a node to itself."""
    index = g._graph
    kept = (index.src != index.dst).nonzero().squeeze(-1)
    left = g.derive(
        StandInIndex(index.src.index_select(0, kept), index.dst.index_select(0, kept), index.size),
        _transforms.remove_self_loop,
    )
    left.ndata.update(g.ndata)
    for name in g.edata:
        left.edata[name] = g.edata[name].index_select(0, kept)
    return left


def add_reverse_edges(
    g: StandInGraph,
    readonly: object = None,
    copy_ndata: bool = True,
    copy_edata: bool = False,
    ignore_bipartite: bool = False,
    exclude_self: bool = True,
) -> StandInGraph:
    """The graph with, after its edges, each of them turned around (self loops only if asked for)."""
    src, dst = g._graph.src, g._graph.dst
    turned = (src != dst).nonzero().squeeze(-1) if exclude_self else g._graph.edge_ids()
    both = g.derive(
        StandInIndex(
            torch.cat([src, dst.index_select(0, turned)]),
            torch.cat([dst, src.index_select(0, turned)]),
            g._graph.size,
        ),
        lambda graph: _transforms.add_reverse_edges(graph, exclude_self=exclude_self),
    )
    if copy_ndata:
        both.ndata.update(g.ndata)
    if copy_edata:
        for name in g.edata:
            both.edata[name] = torch.cat([g.edata[name], g.edata[name].index_select(0, turned)])
    return both


def to_simple(
    g: StandInGraph,
    return_counts: str | None = "count",
    writeback_mapping: bool = False,
    copy_ndata: bool = True,
    copy_edata: bool = False,
    aggregator: str = "arbitrary",
) -> StandInGraph:
    """The graph with one edge in the place of parallel ones, ordered by source and destination."""
    if copy_edata or writeback_mapping:
        raise refusal("to_simple with edge features or a mapping", "only the edges and their counts are kept")
    index = g._graph
    keys, counts = (index.src.long() * index.size + index.dst).unique(return_counts=True)
    dtype = index.src.dtype
    simple = g.derive(
        StandInIndex((keys // index.size).to(dtype), (keys % index.size).to(dtype), index.size), _transforms.to_simple
    )
    if copy_ndata:
        simple.ndata.update(g.ndata)
    if return_counts is not None:
        simple.edata[return_counts] = counts
    return simple


def to_bidirected(g: StandInGraph, copy_ndata: bool = False, readonly: object = None) -> StandInGraph:
    """The simple graph with both directions of every edge."""
    both = add_reverse_edges(g, copy_ndata=copy_ndata)
    return to_simple(both, return_counts=None, copy_ndata=copy_ndata)


def graph(
    data: Any, *, num_nodes: Any = None, idtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
) -> StandInGraph:
    """A graph that the model builds itself from (symbolic) sources and destinations, ``[E]`` each."""
    if num_nodes is None:
        raise refusal(
            "dgl.graph without a number of nodes",
            "it would depend on the largest id in the edges",
            remedy="pass num_nodes",
        )
    src, dst = (ends if idtype is None else ends.to(idtype) for ends in data)
    return StandInGraph.unknown(StandInIndex(src, dst, num_nodes))


def heterograph(
    data_dict: Mapping[Any, Any], num_nodes_dict: Mapping[str, Any] | None = None, **kwargs: Any
) -> StandInGraph:
    """As :func:`graph`, in the form that takes a dict of relations: the one relation of a homogeneous graph."""
    (relation, data), *others = data_dict.items()
    if others or relation != ("_N", "_E", "_N"):
        raise refusal("a heterogeneous graph built in forward", "only homogeneous graphs are captured")
    return graph(data, num_nodes=None if num_nodes_dict is None else num_nodes_dict["_N"])


def is_symbolic(data: Any) -> bool:
    """Whether the first argument of :func:`graph` or :func:`heterograph` holds tensors of a capture."""
    if isinstance(data, Mapping):
        return any(is_symbolic(part) for part in data.values())
    return isinstance(data, tuple) and len(data) == 2 and all(is_fake(ends) for ends in data)


def broadcast_nodes(graph: StandInGraph, graph_feat: Tensor, *, ntype: str | None = None) -> Tensor:
    """The row of its graph for every node: ``[B, ...]``, of one graph also ``[...]``, to ``[N, ...]``."""
    return _broadcast(graph_feat, graph.num_nodes(), graph.batch_num_nodes())


def broadcast_edges(graph: StandInGraph, graph_feat: Tensor, *, etype: Any = None) -> Tensor:
    """The row of its graph for every edge: ``[B, ...]``, of one graph also ``[...]``, to ``[E, ...]``."""
    return _broadcast(graph_feat, graph.num_edges(), graph.batch_num_edges())


def _broadcast(value: Tensor, size: Any, sizes: OneBatch | Segments) -> Tensor:
    if isinstance(sizes, Segments):
        return value.index_select(0, sizes.member)
    row = value if value.dim() and value.shape[0] == 1 else value.unsqueeze(0)
    return row.expand(size, *row.shape[1:])
