"""User-defined message and reduce functions, called once for all edges and all nodes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.capture.dgl_index import refusal
from sylvie_fx.capture.dgl_mailbox import Mailbox, is_reduced
from sylvie_fx.dgl import dgl


def call_edge_function(graph: Any, edges: Any, etype: Any, func: Callable[[Any], Any], *, orig_eid: Any = None) -> Any:
    """Call a function on all edges, or on those with the given ids.

    Args:
        graph: The stand-in graph.
        edges: DGL's ALL, or ids ``[M]``.
        etype: The one edge type.
        func: Takes an EdgeBatch, returns a dict of ``[M, ...]``.
        orig_eid: Ids that the function sees in the place of the graph's own.
    """
    if dgl.base.is_all(edges):
        src, dst, ids = graph.edges(form="all")
        data = graph._edge_frames[0]
    else:
        src, dst = graph.find_edges(edges)
        ids, data = edges, graph._edge_frames[0].subframe(edges)
    nodes = graph._node_frames[0]
    batch = dgl.udf.EdgeBatch(
        graph, ids if orig_eid is None else orig_eid, etype, nodes.subframe(src), data, nodes.subframe(dst)
    )
    return _checked(func, func(batch))


def call_reduce_function(
    graph: Any, func: Callable[[Any], Any], messages: Mapping[str, Tensor], *, orig_nid: Any = None
) -> dict[str, Tensor]:
    """Call a reduce function once for all nodes; nodes without messages get zero, as DGL gives them.

    Args:
        graph: The stand-in graph.
        func: Takes a NodeBatch with a mailbox, returns a dict of one row a node.
        messages: ``[E, ...]`` each.
        orig_nid: Ids that the function sees in the place of the graph's own.
    """
    index = graph._graph
    degrees = index.degrees(incoming=True)
    at_least_one = degrees.clamp(min=1)
    mailbox = {name: Mailbox(value, index, at_least_one) for name, value in messages.items()}
    nodes = graph.nodes() if orig_nid is None else orig_nid
    batch = dgl.udf.NodeBatch(graph, nodes, graph.ntypes[0], graph._node_frames[0], msgs=mailbox)
    batch.batch_size = functools.partial(_no_size_of_bucket, func)
    results = {}
    for name, value in _checked(func, func(batch)).items():
        if not isinstance(value, Tensor):
            raise refusal(
                f"a reduce function whose {name!r} is not reduced",
                "it returns one row a message, where one a node is needed",
                where=location(func),
                remedy="reduce over dimension 1 of the mailbox",
            )
        results[name] = value if is_reduced(value) else _zero_where_none_arrives(value, degrees)
    return results


def _no_size_of_bucket(func: Callable[[Any], Any]) -> int:
    raise refusal(
        "batch_size() in a reduce function",
        "DGL calls the function once for the nodes of each in-degree, and the captured program once for all nodes",
        where=location(func),
        remedy="leave that dimension to torch (-1 in a view), and reduce over dimension 1 of the mailbox",
    )


def _zero_where_none_arrives(value: Tensor, degrees: Tensor) -> Tensor:
    reached = (degrees > 0).reshape(-1, *(1,) * (value.dim() - 1))
    return torch.where(reached, value, torch.zeros_like(value))


def location(func: Callable[..., Any]) -> str | None:
    """``file:line`` of a function, as far as it has one."""
    while isinstance(func, functools.partial):
        func = func.func
    func = inspect.unwrap(func)
    code = getattr(func, "__code__", None)
    if code is None and callable(func):
        code = getattr(type(func).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None


def _checked(func: Callable[..., Any], result: Any) -> dict[str, Any]:
    if not isinstance(result, Mapping):
        raise refusal(
            f"a function that returns a {type(result).__name__}",
            "DGL expects a dict of tensors",
            where=location(func),
            remedy="return a dict",
        )
    return dict(result)
