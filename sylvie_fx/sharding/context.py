"""Makes sharded tensors of one graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sylvie_fx.engine import Engine
from sylvie_fx.graphs.layout import RowLayout
from sylvie_fx.graphs.sharded import ShardedGraph, Space
from sylvie_fx.ir.errors import PartitionError
from sylvie_fx.leaves import Sharding
from sylvie_fx.node_tensor import NodeTensor, node_tensor


@dataclass(eq=False)
class ShardContext:
    """The graph that one call of ``shard`` works on.

    Attributes:
        graph: Partition and row spaces.
        engine: This rank's engine.
        edges: The space of the graph's edges; None for a graph without edges to shard by.
    """

    graph: ShardedGraph
    engine: Engine
    edges: Space | None = None

    def nodes(self, whole: Tensor, what: str) -> NodeTensor:
        """Node rows of a tensor ``[N, ...]``."""
        return self.rows(whole, self.graph.spaces["N"], what)

    def rows(self, whole: Tensor, space: Space, what: str, dim: int = 0, *, index: bool = False) -> NodeTensor:
        """This rank's rows of a tensor.

        Args:
            whole: The global tensor.
            space: The row space of dimension ``dim``.
            what: How a person would name it.
            dim: The dimension that carries the rows.
            index: The values name nodes.

        Raises:
            PartitionError: The number of rows is not the space's.
        """
        if whole.dim() <= dim or whole.shape[dim] != space.rows:
            kind = "nodes" if space.name == "N" else "edges" if self.edges in (None, space) else "pairs"
            remedy = f"give one row for each of the {kind}"
            if kind == "edges":
                remedy += '; what belongs to the pairs of a second index is of kind "pair"'
            raise PartitionError(
                f"{what} has shape {tuple(whole.shape)}, but the graph has {space.rows} {kind}", remedy=remedy
            )
        own = space.layout.rows(self.graph.rank).to(whole.device)
        local = whole.detach().index_select(dim, own)
        structural = not whole.dtype.is_floating_point or space.name != "N"
        if whole.requires_grad and not whole.is_leaf:
            raise PartitionError(
                f"{what} is the result of a computation that requires gradients",
                why="its history is on the whole graph",
                remedy="shard the tensors it was computed from, and compute it inside the model",
            )
        sharding = Sharding(self.graph, space, dim, whole.detach() if structural else None, index, given=index)
        result = node_tensor(local, sharding, self.engine)
        if whole.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                result.requires_grad_(
                    True
                )  # after wrapping, so that the wrapper is the leaf that collects the gradient
        return result

    def edge_index(self, whole: Tensor, what: str, flow: int = 1) -> NodeTensor:
        """Edge columns of an index ``[2, E]``: an edge belongs to the owner of row ``flow``, its destination."""
        result = self.pairs(whole, what, flow)
        self.edges = self.edges or result._sharding.space
        return result

    def pairs(self, whole: Tensor, what: str, flow: int = 1) -> NodeTensor:
        """Columns of an index of node pairs ``[2, P]``, laid out as edges are, which need not be edges of the graph."""
        ids = self.graph.check_ids(whole, what)
        if ids.dim() != 2 or ids.shape[0] != 2:
            raise PartitionError(f"{what} has shape {tuple(whole.shape)}", remedy="an edge_index is [2, edges]")
        return self.rows(ids, self.graph.edges(ids[flow].cpu()), what, 1, index=True)

    def ends(self, src: Tensor, dst: Tensor, what: tuple[str, str]) -> tuple[NodeTensor, NodeTensor]:
        """Edge rows of a pair of node ids ``[E]``: an edge belongs to the owner of its destination."""
        src, dst = self.graph.check_ids(src, what[0]), self.graph.check_ids(dst, what[1])
        space = self.graph.edges(dst.cpu())
        self.edges = self.edges or space
        return self.rows(src, space, what[0], index=True), self.rows(dst, space, what[1], index=True)

    def ids(self, whole: Tensor, what: str) -> NodeTensor:
        """A list of node ids ``[k]``: an id belongs to the owner of its node."""
        ids = self.graph.check_ids(whole, what)
        layout = RowLayout(self.graph.nodes.owner[ids.cpu()], self.graph.nodes.parts)
        return self.rows(ids, self.graph.add("S", layout), what, index=True)

    def marker(self) -> NodeTensor:
        """A bool for each node that costs no memory: it stands for the number of nodes."""
        return self.nodes(torch.zeros(1, dtype=torch.bool).expand(self.graph.num_nodes), "the nodes")
