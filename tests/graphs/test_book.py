from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sylvie_fx.graphs.book import PartitionBook, edges_of, partition
from sylvie_fx.graphs.generators import grid_graph
from sylvie_fx.ir.errors import PartitionError

GRAPH = grid_graph(6, 6)
SRC, DST = GRAPH.edge_index


def test_saved_and_loaded(tmp_path: Path) -> None:
    book = partition(GRAPH.edge_index, 3)
    path = tmp_path / "parts.book"
    book.save(path)
    loaded = PartitionBook.load(path)
    assert torch.equal(loaded.assignment, book.assignment)
    assert loaded.assignment.dtype == torch.int64
    assert (loaded.parts, loaded.method, loaded.quality, loaded.num_nodes) == (3, "metis", book.quality, 36)
    assert str(loaded) == str(book)
    assert str(book).startswith("metis: 3 parts of 36 nodes")
    assert [p.name for p in tmp_path.iterdir()] == ["parts.book"]


def test_files_that_are_no_books(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PartitionBook.load(tmp_path / "none.npz")
    text = tmp_path / "text.npz"
    text.write_text("not a zip file")
    empty = tmp_path / "empty.npz"
    empty.write_bytes(b"")
    for path in (text, empty):
        with pytest.raises(PartitionError, match="is not a partition book"):
            PartitionBook.load(path)
    array = tmp_path / "array.npy"
    np.save(array, np.zeros(3))
    with pytest.raises(PartitionError, match="is not a partition book"):
        PartitionBook.load(array)
    other = tmp_path / "other.npz"
    np.savez(other, x=1)
    with pytest.raises(PartitionError, match="it lacks format, assignment"):
        PartitionBook.load(other)
    damaged = tmp_path / "damaged.npz"
    partition(GRAPH.edge_index, 3).save(damaged)
    damaged.write_bytes(damaged.read_bytes()[:-40])
    with pytest.raises(PartitionError, match="is not a partition book"):
        PartitionBook.load(damaged)


def graphs_of_every_kind() -> dict[str, Any]:
    weights = torch.ones(len(SRC))
    adjacency = torch.sparse_coo_tensor(torch.stack([DST, SRC]), weights, (36, 36))
    torch_sparse = SimpleNamespace(coo=lambda: (DST, SRC, None), sparse_sizes=lambda: (36, 36))
    return {
        "edge_index": GRAPH.edge_index,
        "pair": (SRC, DST),
        "pyg": SimpleNamespace(edge_index=GRAPH.edge_index, num_nodes=36),
        "pyg adj_t": SimpleNamespace(edge_index=None, adj_t=adjacency),
        "coo": adjacency,
        "csr": adjacency.to_sparse_csr(),
        "csc": adjacency.to_sparse_csc(),
        "torch_sparse": torch_sparse,
        "dgl": SimpleNamespace(num_nodes=lambda: 36, edges=lambda: (SRC, DST), is_homogeneous=True),
    }


@pytest.mark.parametrize("kind", list(graphs_of_every_kind()))
def test_every_kind_of_graph(kind: str) -> None:
    graph = graphs_of_every_kind()[kind]
    _, src, dst = edges_of(graph)
    assert sorted(zip(src.tolist(), dst.tolist(), strict=True)) == sorted(zip(SRC.tolist(), DST.tolist(), strict=True))
    assert torch.equal(partition(graph, 4).assignment, partition(GRAPH.edge_index, 4).assignment)


def test_direction_of_an_adjacency() -> None:
    # adj @ x: row 0 aggregates row 1, so the edge goes from 1 to 0.
    _, src, dst = edges_of(torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (2, 2)))
    assert (src.tolist(), dst.tolist()) == ([1], [0])


@pytest.mark.pyg
def test_real_pyg() -> None:
    data = pytest.importorskip("torch_geometric.data").Data(edge_index=GRAPH.edge_index, num_nodes=40)
    assert partition(data, 4, method="random").num_nodes == 40


@pytest.mark.dgl
def test_real_dgl() -> None:
    pytest.importorskip("sylvie_fx.dgl")
    import dgl

    graph = dgl.graph((SRC, DST), num_nodes=40)
    assert partition(graph, 4, method="random").num_nodes == 40


def test_number_of_nodes() -> None:
    assert partition(GRAPH.edge_index, 2, num_nodes=50).num_nodes == 50
    assert partition(torch.zeros(2, 0, dtype=torch.int64), 2, num_nodes=2).assignment.tolist() == [0, 1]
    with pytest.raises(PartitionError, match="no nodes"):
        partition(torch.zeros(2, 0, dtype=torch.int64), 1)
    with pytest.raises(PartitionError, match="36 nodes, not 50"):
        partition(graphs_of_every_kind()["pyg"], 2, num_nodes=50)


def test_method_of_a_given_assignment() -> None:
    assert partition(GRAPH.edge_index, 2, method=torch.arange(36) % 2).method == "given"


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (torch.zeros(3, 5, dtype=torch.int64), r"shape \(2, E\), not \(3, 5\)"),
        (torch.zeros(2, 3).to_sparse(), r"shape \(2, 3\). only a square one"),
        (
            SimpleNamespace(num_nodes=lambda: 3, edges=lambda: (SRC, DST), is_homogeneous=False),
            "several node or edge types",
        ),
        ("graph", "a str is not a graph"),
    ],
)
def test_what_is_no_graph(graph: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        partition(graph, 2)
