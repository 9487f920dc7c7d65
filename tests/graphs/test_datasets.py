from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sylvie_fx.graphs import datasets
from sylvie_fx.graphs.datasets import GraphData, available, demo_graph, digits_graph, load_npz, normalise
from sylvie_fx.ir.errors import OptionError, PartitionError

TINY = {
    "edge_index": np.array([[0, 1, 1, 2], [1, 0, 2, 1]], dtype=np.int32),
    "y": np.array([0, 1, -1], dtype=np.int16),
    "train_mask": np.array([True, False, False]),
    "val_mask": np.array([False, True, False]),
    "test_mask": np.array([False, False, False]),
}
CSR = {
    "x_indptr": np.array([0, 2, 2, 3], dtype=np.int32),
    "x_indices": np.array([0, 3, 1], dtype=np.int32),
    "x_data": np.array([1, 5, 2], dtype=np.uint8),
    "x_shape": np.array([3, 4]),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SYLVIE_FX_DATA", str(tmp_path))
    return tmp_path


def check(graph: GraphData) -> None:
    nodes = graph.num_nodes
    assert graph.x.shape[0] == nodes
    assert graph.x.dtype == torch.float32
    assert graph.x.isfinite().all()
    assert graph.y.dtype == graph.edge_index.dtype == torch.int64
    assert int(graph.y.max()) < graph.num_classes
    assert int(graph.edge_index.max()) < nodes
    masks = torch.stack([graph.train_mask, graph.val_mask, graph.test_mask])
    assert masks.shape == (3, nodes)
    assert masks.sum(0).max() == 1
    assert (graph.y[masks.any(0)] >= 0).all()


def test_sparse_features_and_types(folder: Path) -> None:
    np.savez(folder / "tiny.npz", **TINY, **CSR)
    graph = load_npz("tiny")
    check(graph)
    assert graph.x.tolist() == [[1, 0, 0, 5], [0, 0, 0, 0], [0, 2, 0, 0]]
    assert str(graph) == "tiny: 3 nodes, 4 edges, 4 features, 2 classes"
    assert load_npz("tiny", "bin").x.sum() == 3


def test_dense_features(folder: Path) -> None:
    np.savez(folder / "tiny.npz", **TINY, x=np.ones((3, 2), dtype=np.float32))
    check(load_npz("tiny"))


def test_missing_graphs_and_arrays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(folder / "tiny.npz", **TINY)
    assert available() == ["tiny"]
    with pytest.raises(PartitionError, match=r"tiny\.npz lacks its features"):
        load_npz("tiny")
    with pytest.raises(FileNotFoundError, match="no graph 'reddit', only tiny"):
        load_npz("reddit")
    monkeypatch.setattr(datasets, "data_folder", lambda: None)
    with pytest.raises(FileNotFoundError, match="SYLVIE_FX_DATA"):
        load_npz("cora")


@pytest.mark.parametrize("how", ["row", "l2", "bin", "std"])
def test_normalised_features_are_finite(how: str) -> None:
    x = torch.tensor([[1.0, 3.0, 7.0], [0.0, 0.0, 7.0]])
    scaled = normalise(x, how)
    assert scaled.isfinite().all()
    assert not scaled[1, :2].any() or how == "std"
    if how == "row":
        assert scaled[0].sum() == pytest.approx(1.0)
    if how == "l2":
        assert scaled[0].norm() == pytest.approx(1.0)
    if how == "std":
        assert scaled.mean(0).abs().max() < 1e-6
        assert scaled[:, 2].abs().max() == 0


def test_unknown_normalisation() -> None:
    with pytest.raises(OptionError, match="'max'"):
        normalise(torch.ones(1, 1), "max")


def test_digits() -> None:
    graph = digits_graph()
    check(graph)
    assert (graph.num_nodes, graph.x.shape[1], graph.num_classes) == (1797, 64, 10)
    assert graph.x.max() == 1.0
    src, dst = graph.edge_index
    assert torch.equal(graph.edge_index, datasets.undirected(graph.edge_index, 1797))
    assert float((graph.y[src] == graph.y[dst]).float().mean()) > 0.9


def test_demo_graph_needs_neither_folder_nor_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_cora_of_pyg", lambda: None)
    assert demo_graph().name == "digits"
    np.savez(folder / "cora.npz", **TINY, **CSR)
    assert demo_graph().name == "cora"


def test_loading_that_fails_or_hangs_gives_nothing() -> None:
    def fail() -> GraphData:
        raise ConnectionError("no network")

    assert datasets._within(5, fail) is None


@pytest.mark.skipif("cora" not in available(), reason="cora is not in the folder of real graphs (SYLVIE_FX_DATA)")
def test_cora_is_cora() -> None:
    graph = load_npz("cora", "row")
    check(graph)
    assert (graph.num_nodes, graph.edge_index.shape[1], graph.x.shape[1], graph.num_classes) == (2708, 10556, 1433, 7)
    assert [int(m.sum()) for m in (graph.train_mask, graph.val_mask, graph.test_mask)] == [140, 500, 1000]
