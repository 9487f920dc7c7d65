"""Graphs held by modules are found wherever models keep them, and come back after being replaced."""

from __future__ import annotations

from collections import namedtuple
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from sylvie_fx.capture.held import HeldGraph, HeldKind, find_held, find_node_parameters, graph_kind, replaced
from sylvie_fx.capture.sparse import adjacency_parts, patched_sparse, stand_in_adjacency

Pair = namedtuple("Pair", ["edge_index", "weight"])


class DGLGraph:
    """Only its names count: DGL itself is not imported by the search."""

    __module__ = "dgl.heterograph"


class Layer(nn.Module):
    def __init__(self, graph: Any) -> None:
        super().__init__()
        self.g = graph
        self.linear = nn.Linear(3, 3)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.graph = DGLGraph()
        self.layers = nn.ModuleList([Layer(self.graph)])
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("adj", torch.eye(4).to_sparse())
        self.register_buffer("edge_index", torch.tensor([[0, 1, 2], [1, 2, 3]]))
        self.register_buffer("last", torch.ones(2))
        self.register_buffer("absent", None)
        self.ends = (torch.tensor([0, 1]), torch.tensor([1, 2]))
        self.hops = [torch.eye(4).to_sparse_csr(), "text", torch.ones(4, 4)]
        self.cached = Pair(torch.tensor([[0, 1], [1, 0]]), torch.ones(2))
        self.relations = {"cites": torch.eye(4).to_sparse(), 7: torch.tensor([[0], [1]])}
        self.frozen = nn.Parameter(torch.tensor([[3], [2]]), requires_grad=False)
        # None of these is a graph.
        self.ids = torch.arange(6)
        self.table = torch.zeros(3, 2, dtype=torch.int64)
        self.floats = torch.zeros(2, 3)
        self.uneven = (torch.arange(2), torch.arange(3))
        self.incidence = torch.ones(4, 3).to_sparse()


def test_finds_each_place() -> None:
    model = Holder()
    found = [(str(h), h.kind) for h in find_held(model)]
    assert found == [
        ("model.frozen", HeldKind.EDGE_INDEX),
        ("model.adj", HeldKind.ADJACENCY),
        ("model.edge_index", HeldKind.EDGE_INDEX),
        ("model.graph", HeldKind.DGL_GRAPH),
        ("model.ends", HeldKind.EDGE_PAIR),
        ("model.hops[0]", HeldKind.ADJACENCY),
        ("model.cached[0]", HeldKind.EDGE_INDEX),
        ("model.relations['cites']", HeldKind.ADJACENCY),
        ("model.relations[7]", HeldKind.EDGE_INDEX),
        ("model.layers.0.g", HeldKind.DGL_GRAPH),
    ]
    places = {str(h): h for h in find_held(model)}
    assert places["model.layers.0.g"].value is places["model.graph"].value is model.graph
    assert places["model.layers.0.g"].module is model.layers[0]


def test_finds_nothing_in_an_ordinary_model() -> None:
    assert find_held(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Embedding(4, 2))) == []


def test_replaced_and_restored_also_after_an_error() -> None:
    model = Holder()
    held = find_held(model)
    kept = {name: vars(model)[name] for name in ("graph", "ends", "hops", "cached", "relations")}
    buffers = dict(model.named_buffers())
    stand_ins = [f"stand-in {index}" for index in range(len(held))]
    with suppress(ZeroDivisionError), replaced(held, stand_ins):
        assert model.frozen == "stand-in 0"
        assert model.adj == "stand-in 1"
        assert model.graph == "stand-in 3"
        assert model.layers[0].g == "stand-in 9"
        assert model.hops[0] == "stand-in 5"
        assert model.hops[1:] == kept["hops"][1:]
        assert isinstance(model.cached, Pair)
        assert model.cached.edge_index == "stand-in 6"
        assert model.relations == {"cites": "stand-in 7", 7: "stand-in 8"}
        assert list(model._buffers) == ["scale", "last", "absent"]
        model.graph = None
        raise ZeroDivisionError
    assert all(vars(model)[name] is value for name, value in kept.items())
    assert [h.value for h in find_held(model)] == [h.value for h in held]
    assert list(model._buffers) == ["scale", "adj", "edge_index", "last", "absent"]
    assert all(dict(model.named_buffers())[name] is value for name, value in buffers.items())
    assert "adj" not in vars(model)


def test_each_graph_needs_a_stand_in() -> None:
    model = Holder()
    held = find_held(model)
    with pytest.raises(ValueError, match="zip"), replaced(held, ["one"]):
        pass
    assert [h.value for h in find_held(model)] == [h.value for h in held]


class Propagation(nn.Module):
    """A common shape of a model: the normalised adjacency is a buffer."""

    def __init__(self, adj: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("adj", adj)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.adj, self.linear(x))


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module, held: list[HeldGraph]) -> None:
        super().__init__()
        self.model = model
        self.held = held

    def forward(self, x: Tensor, row: Tensor, col: Tensor, value: Tensor) -> Any:
        (place,) = self.held
        adj = stand_in_adjacency(row, col, value, x.shape[0], place.value.layout)
        with patched_sparse(), replaced(self.held, [adj]):
            return self.model(x)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
def test_a_held_adjacency_becomes_an_input(layout: torch.layout) -> None:
    def random_adjacency(nodes: int) -> Tensor:
        return (torch.rand(nodes, nodes) < 0.3).float().to_sparse(layout=layout)

    model = Propagation(random_adjacency(10))
    held = find_held(model)
    parts = adjacency_parts(model.adj)
    n, e = Dim("N", min=4), Dim("E", min=4)
    with replaced(held, [None]):  # a sparse buffer can not be lifted into the program
        program = export(
            Wrapper(model, held),
            (torch.rand(10, 3), parts.row, parts.col, parts.value),
            dynamic_shapes=({0: n}, {0: e}, {0: e}, {0: e}),
            strict=False,
        )
    assert not program.graph_signature.buffers
    assert isinstance(model.adj, Tensor)
    assert "adj" in model._buffers
    model.adj = random_adjacency(17)
    other, x = adjacency_parts(model.adj), torch.rand(17, 3)
    torch.testing.assert_close(program.module()(x, other.row, other.col, other.value), model(x))


@pytest.mark.pyg
def test_pyg_data() -> None:
    geometric = pytest.importorskip("torch_geometric")
    data = geometric.data.Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
    (held,) = find_held(Layer(data))
    assert held.kind is HeldKind.PYG_DATA
    assert held.value is data


@pytest.mark.pyg
def test_cache_of_a_pyg_layer() -> None:
    layers = pytest.importorskip("torch_geometric.nn")
    layer = layers.GCNConv(3, 4, cached=True)
    layer(torch.ones(3, 3), torch.tensor([[0, 1], [1, 2]]))
    assert [str(h) for h in find_held(layer)] == ["model._cached_edge_index[0]"]


def test_graph_kind_of_other_things() -> None:
    for value in (None, 3, "text", torch.ones(3, 3), torch.eye(2, dtype=torch.int64)[:1], object()):
        assert graph_kind(value) is None


class Table(nn.Module):
    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(nodes, 4)
        self.bias = nn.Parameter(torch.zeros(nodes))
        self.weight = nn.Parameter(torch.zeros(4, nodes))
        self.register_buffer("degree", torch.ones(nodes, 1))
        self.register_buffer("adj", torch.eye(nodes).to_sparse())
        self.register_buffer("count", torch.tensor(nodes))
        self.register_buffer("absent", None)
        self.linear = nn.Linear(4, nodes)
        self.norm = nn.BatchNorm1d(nodes)
        self.more = nn.ParameterList([torch.zeros(nodes, 2), torch.zeros(2)])
        self.shared = self.embedding


def test_parameters_with_a_row_per_node() -> None:
    model = Table(9)
    found = find_node_parameters(model, 9)
    assert [path for path, _ in found] == ["bias", "degree", "embedding.weight", "more.0"]
    assert dict(found)["embedding.weight"] is model.embedding.weight
    assert find_node_parameters(model, 5) == []


def test_a_table_may_be_the_model_itself() -> None:
    table = nn.Embedding(6, 2)
    assert find_node_parameters(table, 6) == [("weight", table.weight)]
