from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sylvie_fx.graphs.datasets import GraphData
from sylvie_fx.graphs.generators import block_model, grid_graph, power_law_graph, random_graph

GENERATORS: dict[str, Callable[[int], GraphData]] = {
    "random": lambda seed: random_graph(50, 300, 8, 3, seed),
    "power_law": lambda seed: power_law_graph(50, 300, 8, 3, seed),
    "grid": lambda seed: grid_graph(5, 10, 8, 3, seed),
    "block": lambda seed: block_model(50, 3, features=8, seed=seed),
}


@pytest.mark.parametrize("name", list(GENERATORS))
def test_one_seed_one_graph(name: str) -> None:
    graph, again, other = GENERATORS[name](0), GENERATORS[name](0), GENERATORS[name](1)
    assert torch.equal(graph.edge_index, again.edge_index)
    assert torch.equal(graph.x, again.x)
    assert not torch.equal(graph.x, other.x)
    assert graph.x.shape == (50, 8)
    assert int(graph.edge_index.max()) < 50
    assert int(graph.y.max()) < graph.num_classes == 3
    assert (graph.train_mask.int() + graph.val_mask.int() + graph.test_mask.int() == 1).all()


def test_random_graph_has_the_number_of_edges() -> None:
    assert random_graph(10, 77).edge_index.shape == (2, 77)


def test_grid() -> None:
    assert grid_graph(2, 2).edge_index.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3], [1, 2, 0, 3, 0, 3, 1, 2]]


def test_block_model_has_the_asked_homophily_and_degree() -> None:
    graph = block_model()
    src, dst = graph.edge_index
    assert (graph.num_nodes, graph.num_classes, graph.x.shape[1]) == (4000, 12, 32)
    assert float((graph.y[src] == graph.y[dst]).float().mean()) == pytest.approx(0.3, abs=0.02)
    assert len(src) / 4000 == pytest.approx(14, abs=0.3)
    assert torch.equal(graph.edge_index.flip(0)[:, torch.argsort(dst * 4000 + src)], graph.edge_index)


def test_block_model_with_a_class_without_nodes() -> None:
    assert block_model(nodes=3, classes=12).num_nodes == 3


def test_power_law_has_hubs_and_leaves() -> None:
    degrees = torch.bincount(power_law_graph(2000, 10000).edge_index[0], minlength=2000)
    assert degrees.max() > 20 * degrees.float().mean()
    assert degrees.median() < degrees.float().mean()
