"""What ranks must agree on before they shard: options, model, data, and the partition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sylvie_fx.graphs.book import PartitionBook
from sylvie_fx.graphs.layout import RowLayout
from sylvie_fx.graphs.partition import partition_nodes
from sylvie_fx.graphs.sharded import ShardedGraph
from sylvie_fx.ir.errors import PartitionError
from sylvie_fx.runtime.digest import check_equal_across_ranks

if TYPE_CHECKING:
    from sylvie_fx.api import DistributedModule


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a tensor, a PyG Data or a DGLGraph; nothing of anything else."""
    if isinstance(value, Tensor):
        return [value]
    if hasattr(value, "ndata"):
        frames = [*value.ndata.items(), *value.edata.items()]  # values() of DGL's frames are not tensors
        return [*value.edges(order="eid"), *[tensor for _, tensor in frames]]
    if hasattr(value, "to_dict"):
        return [v for v in value.to_dict().values() if isinstance(v, Tensor)]
    return []


def check_ranks(model: DistributedModule, graph: list[Any], data: list[list[Tensor]]) -> None:
    """Compare by digest what all ranks must hold alike.

    Raises:
        CommError: Names what differs and on which ranks.
    """
    if model.transport.size == 1:
        return
    # Not state_dict(): modules may compute in it, and spectral norms then make a step.
    tensors = [*model.module.named_parameters(), *model.module.named_buffers()]
    state = {name: t.detach() for name, t in tensors if t.layout is torch.strided}
    for name, value in (("options", model.options), ("graph", graph), ("model", state), ("data", data)):
        check_equal_across_ranks(model.transport, name, value, "shard")


def make_graph(model: DistributedModule, num_nodes: int, src: Tensor, dst: Tensor, partition: Any) -> ShardedGraph:
    """Partition a graph over the ranks.

    Args:
        model: Whose ranks.
        num_nodes: Number of nodes.
        src: Source of each edge.
        dst: Destination of each edge.
        partition: As ``shard`` takes it.

    Raises:
        PartitionError: The partition is for another graph or number of ranks.
        CommError: Ranks hold different partitions.
    """
    size, rank = model.transport.size, model.transport.rank
    method = "metis" if partition is None else partition
    if isinstance(method, PartitionBook):
        if method.parts != size:
            raise PartitionError(
                f"the partition has {method.parts} parts, but there are {size} ranks",
                remedy=f"make a partition with {size} parts, or start {method.parts} processes",
            )
        method = method.assignment
    owner = partition_nodes(num_nodes, src, dst, size, method, model.options.seed)
    if size > 1:
        check_equal_across_ranks(model.transport, "partition", owner, "shard")
    return ShardedGraph(RowLayout(owner, size), rank)
