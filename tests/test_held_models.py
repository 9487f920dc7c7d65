"""Where the graph comes from: held by the model, or passed in every form; tables with a row for each node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.ir.errors import CaptureError

NODES, EDGES, WIDTH = 29, 90, 4
F64 = torch.float64


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(NODES, WIDTH, dtype=F64)


@pytest.fixture
def edge_index(x: Tensor) -> Tensor:
    return torch.randint(0, NODES, (2, EDGES))


def assert_exact(model: nn.Module, *data: Any, **arguments: Any) -> None:
    report = sylvie_fx.verify(model.to(F64), *data, parts=3, partition="random", timeout=60, **arguments)
    assert report.refused is None, report.refused
    assert report.exact, str(report)
    assert "sylvie.halo_" in report.program


def aggregate(h: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    return torch.zeros_like(h).index_add(0, dst, h[src])


class Layer(nn.Module):
    """One aggregation over edges that a subclass finds."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, 3)

    def edges(self) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        src, dst = self.edges()
        return h + aggregate(h.tanh(), src, dst)


# --- graphs that plain torch models hold ------------------------------------------------------------------------------


def holder(keep: Callable[[Any, Tensor], None], edges: Callable[[Any], Any]) -> Callable[[Tensor], Layer]:
    class Held(Layer):
        def __init__(self, edge_index: Tensor) -> None:
            super().__init__()
            keep(self, edge_index)

        def edges(self) -> Any:
            return edges(self)

    return Held


@pytest.mark.parametrize("model", [
    holder(lambda s, e: s.register_buffer("edge_index", e), lambda s: s.edge_index),
    holder(lambda s, e: setattr(s, "edge_index", e), lambda s: s.edge_index),
    holder(lambda s, e: setattr(s, "pair", (e[0], e[1])), lambda s: s.pair),
    holder(lambda s, e: setattr(s, "kept", {"to": e, "unused": e.flip(0)}), lambda s: s.kept["to"]),
    holder(lambda s, e: setattr(s, "kept", [e.flip(0), e]), lambda s: s.kept[1]),
], ids=["buffer", "attribute", "pair", "dict", "list"])  # fmt: skip
def test_held_edge_index(model: Callable[[Tensor], nn.Module], x: Tensor, edge_index: Tensor) -> None:
    assert_exact(model(edge_index), x)


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("buffer", [True, False])
def test_held_adjacency(layout: str, buffer: bool, x: Tensor, edge_index: Tensor) -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, 3)
            adj = adjacency(edge_index, layout)
            if buffer:
                self.register_buffer("adj", adj)
            else:
                self.adj = adj

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.adj, self.lin(x)) + self.adj @ self.lin(x).relu()

    assert_exact(Held(), x)


def adjacency(edge_index: Tensor, layout: str) -> Tensor:
    values = torch.rand(EDGES, dtype=F64)
    coo = torch.sparse_coo_tensor(edge_index.flip(0), values, (NODES, NODES), check_invariants=True).coalesce()
    return coo.to_sparse_csr() if layout == "csr" else coo


def test_another_graph_afterwards_is_noticed(x: Tensor, edge_index: Tensor) -> None:
    model = holder(lambda s, e: setattr(s, "edge_index", e), lambda s: s.edge_index)(edge_index)
    distributed = sylvie_fx.distribute(model.to(F64))
    with pytest.raises(CaptureError, match=r"model\.edge_index holds a graph that is not sharded"):
        distributed(x)
    rows = distributed.shard(x)
    before = distributed(rows).full()
    model.edge_index = edge_index.clone()  # equal
    torch.testing.assert_close(distributed(rows).full(), before)
    model.edge_index = edge_index.flip(0)
    with pytest.raises(CaptureError, match="another graph than the one that was sharded"):
        distributed(rows)
    rows = distributed.shard(x)
    torch.testing.assert_close(distributed(rows).full(), model(x).detach())


# --- tables with a row for each node ----------------------------------------------------------------------------------


class Table(nn.Module):
    """An embedding as features."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        if use == "parameter":
            self.table = nn.Parameter(torch.randn(NODES, WIDTH))
        else:
            self.emb = nn.Embedding(NODES, WIDTH)
        self.lin = nn.Linear(WIDTH, 3)

    def forward(self, edge_index: Tensor, ids: Tensor | None = None) -> Tensor:
        if self.use == "parameter":
            h = self.table
        elif self.use == "weight":
            h = self.emb.weight
        else:
            h = self.emb(ids)
        h = self.lin(h)
        return h + aggregate(h.tanh(), edge_index[0], edge_index[1])


@pytest.mark.parametrize("use", ["parameter", "weight"])
def test_table_used_directly(use: str, edge_index: Tensor) -> None:
    assert_exact(Table(use), edge_index, steps=3)


def test_table_read_by_ids(edge_index: Tensor) -> None:
    assert_exact(Table("ids"), edge_index, torch.arange(NODES), steps=3)


def test_table_that_is_a_weight(edge_index: Tensor) -> None:
    class OneHot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(NODES, 3))  # as many rows as nodes, since x has a column for each

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            h = x @ self.weight
            return h + aggregate(h.tanh(), edge_index[0], edge_index[1])

    assert_exact(OneHot(), torch.eye(NODES, dtype=F64), edge_index, steps=3)


def test_table_added_to_features_and_a_buffer_of_features(x: Tensor, edge_index: Tensor) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(NODES, 1))
            self.register_buffer("features", x)
            self.register_buffer("edge_index", edge_index)
            self.lin = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x + self.features) + self.bias
            return aggregate(h.tanh(), self.edge_index[0], self.edge_index[1])

    assert_exact(Both(), x, steps=3)


# --- graphs that are passed -------------------------------------------------------------------------------------------


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, src: Tensor, dst: Tensor, weight: Tensor) -> Tensor:
        h = self.lin(x)
        return torch.zeros_like(h).index_add(0, dst, h[src] * weight.unsqueeze(1))


def test_loose_ends_and_edge_weights_with_gradients(x: Tensor, edge_index: Tensor) -> None:
    weight = torch.rand(EDGES, dtype=F64, requires_grad=True)
    assert_exact(Loose(), x.clone().requires_grad_(), edge_index[0], edge_index[1], weight)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_adjacency_passed(layout: str, x: Tensor, edge_index: Tensor) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor, adj: Tensor) -> Tensor:
            return adj @ torch.tanh(adj @ self.lin(x))

    assert_exact(Product(), x, adjacency(edge_index, layout))


@pytest.mark.parametrize("form", ["ids", "int32", "slice"])
def test_loss_over_lists_of_nodes(form: str, x: Tensor, edge_index: Tensor) -> None:
    chosen = torch.randperm(NODES)[:9]
    labels = torch.randint(0, 3, (NODES,))
    data: list[Any] = [x, edge_index[0], edge_index[1], torch.rand(EDGES, dtype=F64), labels]
    data.append(slice(3, 17) if form == "slice" else chosen.to(torch.int32 if form == "int32" else torch.int64))

    def loss(model: Any, x: Any, src: Any, dst: Any, weight: Any, y: Any, ids: Any) -> Tensor:
        return F.cross_entropy(model(x, src, dst, weight)[ids], y[ids])

    assert_exact(Loose(), *data, loss=loss)


# --- PyG ---------------------------------------------------------------------------------------------------------------


@pytest.mark.pyg
class TestPyG:
    def data(self, x: Tensor, edge_index: Tensor, **more: Any) -> Any:
        from torch_geometric.data import Data

        return Data(x=x, edge_index=edge_index, **more)

    def test_data_passed_whole(self, x: Tensor, edge_index: Tensor) -> None:
        from torch_geometric.nn import GATConv

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = GATConv(WIDTH, 3, heads=2, edge_dim=2)

            def forward(self, data: Any) -> Tensor:
                return self.conv(data.x, data.edge_index, data.edge_attr)

        def loss(model: Any, data: Any) -> Tensor:
            return F.cross_entropy(model(data)[data.train_mask], data.y[data.train_mask])

        more = {"edge_attr": torch.randn(EDGES, 2, dtype=F64), "y": torch.randint(0, 6, (NODES,)),
                "train_mask": torch.rand(NODES) < 0.5}  # fmt: skip
        assert_exact(Net(), self.data(x, edge_index, **more), loss=loss)

    def test_data_with_adj_t(self, x: Tensor, edge_index: Tensor) -> None:
        from torch_geometric.nn import GCNConv

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = GCNConv(WIDTH, 3, normalize=False)

            def forward(self, data: Any) -> Tensor:
                return self.conv(data.x, data.adj_t)

        data = self.data(x, edge_index)
        del data.edge_index
        data.adj_t = adjacency(edge_index, "csr")
        assert_exact(Net(), data)

    def test_held_data(self, x: Tensor, edge_index: Tensor) -> None:
        from torch_geometric.nn import SAGEConv

        data = self.data(x, edge_index)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.data, self.conv = data, SAGEConv(WIDTH, 3)

            def forward(self) -> Tensor:
                return self.conv(self.data.x, self.data.edge_index)

        assert_exact(Net())


# --- DGL ---------------------------------------------------------------------------------------------------------------


@pytest.mark.dgl
class TestDGL:
    def graph(self, x: Tensor, edge_index: Tensor) -> Any:
        from sylvie_fx.dgl import dgl

        graph = dgl.graph((edge_index[0], edge_index[1]), num_nodes=NODES)
        graph.ndata["x"] = x
        graph.edata["w"] = torch.rand(EDGES, dtype=F64)
        return dgl.add_self_loop(graph)

    def test_held_graph(self, x: Tensor, edge_index: Tensor) -> None:
        graph = self.graph(x, edge_index)
        from dgl.nn import GraphConv

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.g, self.conv1, self.conv2 = graph, GraphConv(WIDTH, 8), GraphConv(8, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.conv2(self.g, self.conv1(self.g, x).relu())

        assert_exact(Net(), x)

    def test_held_graph_and_table(self, x: Tensor, edge_index: Tensor) -> None:
        graph = self.graph(x, edge_index)
        from dgl.nn import SAGEConv

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.graphs, self.conv = [graph], SAGEConv(WIDTH, 3, "mean")
                self.table = nn.Parameter(torch.randn(NODES, WIDTH))

            def forward(self) -> Tensor:
                return self.conv(self.graphs[0], self.table)

        assert_exact(Net(), steps=2)

    def test_edata_and_ndata_of_a_passed_graph(self, x: Tensor, edge_index: Tensor) -> None:
        graph = self.graph(x, edge_index)
        import dgl.function as fn

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(WIDTH, 3)

            def forward(self, g: Any) -> Tensor:
                with g.local_scope():
                    g.ndata["h"] = self.lin(g.ndata["x"])
                    g.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "o"))
                    return g.ndata["o"]

        assert_exact(Net(), graph)
