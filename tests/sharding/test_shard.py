"""shard gives the same kinds of objects with this rank's rows in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sylvie_fx
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


class Scores(nn.Module):
    """A layer, and the product of both ends of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor, edge_index: Tensor, pairs: Tensor) -> Tensor:
        h = self.linear(x)
        h = h + torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
        return (h[pairs[0]] * h[pairs[1]]).sum(-1)


@pytest.mark.pyg
@pytest.mark.parametrize("undirected", [True, False])
def test_link_prediction_with_pyg(edge_index: Tensor, undirected: bool) -> None:
    from torch_geometric.data import Data
    from torch_geometric.transforms import RandomLinkSplit
    from torch_geometric.utils import to_undirected

    edges = to_undirected(edge_index) if undirected else edge_index
    splits = RandomLinkSplit(is_undirected=undirected)(Data(x=torch.randn(NODES, 3), edge_index=edges))
    assert (splits[0].edge_label_index.shape == splits[0].edge_index.shape) == undirected

    def loss(model: Any, data: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            model(data.x, data.edge_index, data.edge_label_index), data.edge_label
        )

    for data in splits:
        report = sylvie_fx.verify(Scores(), data, parts=2, loss=loss, timeout=20, steps=1)
        assert report.exact, report


KINDS = ["node", "edge_index", "edge_index", "pair"]


@pytest.mark.parametrize(("kinds", "pairs"), [(None, 7), (KINDS, 7), (KINDS, EDGES)])
def test_loose_labels_of_pairs(edge_index: Tensor, kinds: list[str] | None, pairs: int) -> None:
    index = edge_index.flip(0)[:, :pairs]  # owned by the other ends
    given = torch.randn(NODES, 3), edge_index, index, torch.rand(pairs)

    def loss(model: Any, x: Tensor, edges: Tensor, index: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(model(x, edges, index), labels)

    report = sylvie_fx.verify(Scores(), *given, parts=2, loss=loss, kinds=kinds, timeout=20, steps=1)
    assert report.exact, report


def test_labels_without_their_pairs(edge_index: Tensor) -> None:
    x, labels = torch.randn(NODES, 3), torch.rand(5)

    def run(model: Any) -> None:
        with pytest.raises(PartitionError, match=r"data\[2\] of shape \(5,\) has a row for each pair, but no index"):
            model.shard(x, edge_index, labels, kinds=["node", None, "pair"])

    on_ranks(run)


@pytest.mark.pyg
def test_rows_that_are_too_few_are_counted_against_what_they_belong_to(edge_index: Tensor) -> None:
    from torch_geometric.data import Data

    x, pairs, labels = torch.randn(NODES, 3), edge_index[:, :7], torch.rand(6)
    data = Data(x=x, edge_index=edge_index, edge_label_index=pairs, edge_label=labels)

    def run(model: Any) -> None:
        with pytest.raises(PartitionError, match=r"data.edge_label has shape \(6,\), but the graph has 7 pairs"):
            model.shard(data)
        with pytest.raises(PartitionError, match=r'has 30 edges. .* the pairs of a second index is of kind "pair"'):
            model.shard(x, edge_index, pairs, labels, kinds=["node", None, None, "edge"])

    on_ranks(run)


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
