"""shard gives the same kinds of objects with this rank's rows in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sylvie_fx.api import DistributedModule
from sylvie_fx.ir.errors import PartitionError
from sylvie_fx.ir.options import Options
from sylvie_fx.node_tensor import NodeTensor
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.runtime.in_process import run_ranks

NODES, EDGES = 11, 30
OWNER = torch.arange(NODES) % 2


def on_ranks(fn: Callable[[Any], Any]) -> list[Any]:
    model = nn.Linear(3, 2)
    return run_ranks(2, lambda t: fn(DistributedModule(model, Options(timeout=20), default_passes(), t)), 20)


@pytest.fixture
def edge_index() -> Tensor:
    return torch.randint(0, NODES, (2, EDGES), generator=torch.Generator().manual_seed(0))


def test_rows_are_those_of_the_owner_and_containers_are_kept(edge_index: Tensor) -> None:
    x = torch.randn(NODES, 3)

    def run(model: Any) -> Any:
        rank = model.transport.rank
        out = model.shard({"x": x, "more": [edge_index, 7]}, x, partition=OWNER)
        given, again = out
        assert given["x"] is again  # one object stays one object
        assert given["more"][1] == 7
        assert isinstance(given["x"], NodeTensor)
        torch.testing.assert_close(given["x"].local(), x[rank == OWNER])
        mine = OWNER[edge_index[1]] == rank  # an edge belongs to the owner of its destination
        assert torch.equal(given["more"][0].local(), edge_index[:, mine])
        return given["more"][0].full()

    for whole in on_ranks(run):
        assert torch.equal(whole, edge_index)


def test_adjacency(edge_index: Tensor) -> None:
    adj = torch.sparse_coo_tensor(edge_index, torch.rand(EDGES), (NODES, NODES), check_invariants=True).coalesce()

    def run(model: Any) -> None:
        own = model.shard(adj, partition=OWNER)
        assert tuple(own.shape) == (NODES, NODES)
        torch.testing.assert_close(own.local().to_dense(), adj.to_dense()[model.transport.rank == OWNER])

    on_ranks(run)


@pytest.mark.pyg
def test_pyg_data(edge_index: Tensor) -> None:
    from torch_geometric.data import Data

    data = Data(x=torch.randn(NODES, 3), edge_index=edge_index, edge_attr=torch.randn(EDGES, 2),
                y=torch.zeros(NODES, dtype=torch.int64), train_idx=torch.tensor([0, 5, 3]), name="a graph")  # fmt: skip

    def run(model: Any) -> None:
        own = model.shard(data, partition=OWNER)
        rank = model.transport.rank
        assert type(own) is Data
        assert own.name == "a graph"
        assert own.num_nodes == NODES
        torch.testing.assert_close(own.x.local(), data.x[rank == OWNER])
        torch.testing.assert_close(own.edge_attr.local(), data.edge_attr[OWNER[edge_index[1]] == rank])
        assert own.x[own.train_idx].full().shape == (3, 3)

    on_ranks(run)
    assert not isinstance(data.x, NodeTensor)


@pytest.mark.dgl
def test_dgl_graph(edge_index: Tensor) -> None:
    from sylvie_fx.dgl import dgl

    graph = dgl.graph((edge_index[0], edge_index[1]), num_nodes=NODES)
    graph.ndata["x"], graph.edata["w"] = torch.randn(NODES, 3), torch.rand(EDGES)

    def run(model: Any) -> None:
        own = model.shard(graph, partition=OWNER)
        rank = model.transport.rank
        assert isinstance(own, dgl.DGLGraph)
        assert (own.num_nodes(), own.num_edges()) == (NODES, EDGES)
        torch.testing.assert_close(own.ndata["x"].local(), graph.ndata["x"][rank == OWNER])
        torch.testing.assert_close(own.edata["w"].local(), graph.edata["w"][OWNER[edge_index[1]] == rank])
        torch.testing.assert_close(own.in_degrees().full(), graph.in_degrees())
        with pytest.raises(PartitionError, match="inside the model"):
            own.update_all(None, None)
        with pytest.raises(PartitionError, match="needs this rank's rows"):
            own.ndata["y"] = torch.zeros(NODES)

    on_ranks(run)
