"""PyG Data objects: the same kind of object with this rank's rows in it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.capture.inputs import Expanded
from sylvie_fx.capture.sparse import is_adjacency
from sylvie_fx.node_tensor import NodeTensor
from sylvie_fx.sharding.context import ShardContext
from sylvie_fx.sharding.sparse import ShardedAdjacency, shard_adjacency


def is_data(value: Any) -> bool:
    """Whether it is a homogeneous PyG ``Data``."""
    return any(c.__name__ == "Data" and c.__module__.startswith("torch_geometric") for c in type(value).__mro__)


def data_edges(data: Any) -> tuple[Tensor, Tensor] | None:
    """Source and destination of a Data's edges."""
    if data.get("edge_index") is not None:
        return data.edge_index[0], data.edge_index[1]
    adj = data.get("adj_t")
    if adj is not None and is_adjacency(adj):
        from sylvie_fx.capture.sparse import adjacency_parts

        parts = adjacency_parts(adj)
        return parts.col, parts.row
    return None


def shard_data(context: ShardContext, data: Any, loose: Callable[[str, Tensor], Any]) -> Any:
    """A Data of the same class with this rank's rows.

    Args:
        context: The graph.
        data: The Data.
        loose: Shards an attribute that is neither of nodes nor of edges by its shape.
    """
    result = copy.copy(data)
    if data.get("edge_index") is not None:
        result.edge_index = context.edge_index(data.edge_index, "data.edge_index")
    tensors = {name: v for name, v in data.to_dict().items() if isinstance(v, Tensor) and name != "edge_index"}
    for name in [name for name, value in tensors.items() if _is_pairs(name, value)]:
        index = result[name] = context.pairs(tensors.pop(name), f"data.{name}")
        label = name.removesuffix("_index")
        if label in tensors:  # PyG's is_edge_attr goes by the length, which is that of the edges by chance
            result[label] = context.rows(tensors.pop(label), index._sharding.space, f"data.{label}")
    for name, value in tensors.items():
        if is_adjacency(value):
            result[name] = shard_adjacency(context, value, f"data.{name}")
        elif data.is_node_attr(name):
            result[name] = context.nodes(value, f"data.{name}")
        elif data.is_edge_attr(name) and context.edges is not None:
            result[name] = context.rows(value, context.edges, f"data.{name}")
        else:
            result[name] = loose(f"data.{name}", value)
    return result


def _is_pairs(name: str, value: Tensor) -> bool:
    """Whether it is a second index of node pairs, as RandomLinkSplit makes them for link prediction."""
    integers = not value.dtype.is_floating_point and value.dtype != torch.bool
    return name.endswith(("label_index", "_edge_index")) and value.dim() == 2 and value.shape[0] == 2 and integers


class DataFrontend:
    """Takes sharded Data objects apart."""

    @staticmethod
    def context() -> AbstractContextManager[None]:
        """Nothing: the capture always knows them."""
        return contextlib.nullcontext()

    def check(self, stand_in: Any, value: Any) -> None:
        """Nothing is taken for granted."""

    def matches(self, value: Any) -> bool:
        """Whether it is a Data with sharded tensors in it."""
        return is_data(value)

    def expand(self, value: Any) -> Expanded:
        """Every tensor of the Data, adjacencies in parts."""
        from sylvie_fx.sharding.sparse import SparseFrontend

        items = [(k, v) for k, v in value.to_dict().items() if isinstance(v, (Tensor, ShardedAdjacency))]
        tensors: list[tuple[str, Tensor]] = []
        builders: list[tuple[str, Callable[[Sequence[Tensor]], Any]]] = []
        for name, item in items:
            start = len(tensors)
            if isinstance(item, ShardedAdjacency):
                parts = SparseFrontend().expand(item)
                tensors += [(f".{name}{suffix}", t) for suffix, t in parts.tensors]
                end = len(tensors)
                builders.append((name, lambda ts, b=parts.build, s=start, e=end: b(ts[s:e])))  # type: ignore[misc]
            else:
                tensors.append((f".{name}", item))
                builders.append((name, lambda ts, s=start: ts[s]))  # type: ignore[misc]

        def build(parts: Sequence[Tensor]) -> Any:
            stand_in = copy.copy(value)
            for name, builder in builders:
                stand_in[name] = builder(parts)
            return stand_in

        constants = tuple(
            (k, repr(v)) for k, v in value.to_dict().items() if not isinstance(v, (Tensor, ShardedAdjacency))
        )
        return Expanded(tensors, build, constants)


def has_sharded(value: Any) -> bool:
    """Whether any tensor of a Data is sharded."""
    return any(isinstance(v, (NodeTensor, ShardedAdjacency)) for v in value.to_dict().values())
