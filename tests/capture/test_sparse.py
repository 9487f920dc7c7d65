"""The stand-in of a sparse adjacency: its parts, and what is refused with the user's line."""

from __future__ import annotations

import pytest
import torch
from sparse_support import COO, CSC, CSR, LAYOUTS, Model, adjacency, captured, edges
from torch import Tensor, nn

from sylvie_fx.capture.sparse import (
    adjacency_parts,
    is_adjacency,
    patched_sparse,
    rebuild_adjacency,
    stand_in_adjacency,
)
from sylvie_fx.ir.errors import CaptureError


def test_constructors_are_restored_after_an_error() -> None:
    before = torch.sparse.FloatTensor
    with pytest.raises(CaptureError), patched_sparse():
        torch.sparse.FloatTensor(torch.tensor([[0], [0]]), torch.ones(1))
    assert torch.sparse.FloatTensor is before
    assert not isinstance(torch.sparse_coo_tensor(size=(2, 2)), type(stand_in_adjacency(*_loop(), 2, COO)))


def _loop() -> tuple[Tensor, Tensor, None]:
    return torch.tensor([0]), torch.tensor([0]), None


def test_stand_in_prints_without_reading() -> None:
    adj = stand_in_adjacency(*_loop(), 2, CSR)
    assert repr(adj) == f"{adj}" == "StandInAdjacency(torch.sparse_csr, 2 x 2)"


REFUSED: dict[str, tuple[Model, str]] = {
    "to_dense": (lambda x, adj: adj.to_dense() @ x, "to_dense() on a sparse adjacency. Its result has N x N numbers"),
    "dense sum": (lambda x, adj: adj + torch.ones(20, 20), "the sum of a sparse adjacency and something dense"),
    "one plus": (lambda x, adj: 1 + adj, "the sum of a sparse adjacency and something dense"),
    "dense factor": (lambda x, adj: adj * (x @ x.t()), "a sparse adjacency and a dense matrix"),
    "square": (lambda x, adj: (adj @ adj) @ x, "the product of two sparse adjacencies"),
    "a row": (lambda x, adj: adj[0], "rows or columns picked out of a sparse adjacency"),
    "rows": (lambda x, adj: adj.index_select(0, torch.tensor([1])), "pick the rows of the product"),
    "joined": (lambda x, adj: torch.cat([adj, adj]), "sparse adjacencies joined into a larger matrix"),
    "linear": (lambda x, adj: nn.functional.linear(adj, x.t()), "'linear' on a sparse adjacency"),
    "exp": (lambda x, adj: adj.exp(), "'exp' on a sparse adjacency"),
    "blocks": (lambda x, adj: adj.to_sparse_bsr((2, 2)), "'to_sparse_bsr' on a sparse adjacency"),
    "attribute": (lambda x, adj: adj.imag, "'get:imag' on a sparse adjacency"),
    "reduction": (lambda x, adj: torch.sparse.mm(adj, x, "prod"), "a sparse product reduced by 'prod'"),
    "division": (lambda x, adj: adj / x, "a division with a sparse adjacency"),
    "addmm onto it": (lambda x, adj: torch.addmm(adj, x, x.t()), "addmm onto a sparse adjacency"),
    "another's places": (lambda x, adj: (adj * adj.t()) @ x, "elementwise product of two sparse matrices"),
    "three dimensions": (lambda x, adj: adj.transpose(0, 2), "dimension 2 of a sparse adjacency"),
    "three dimensional sum": (lambda x, adj: adj.to_sparse(1), "to_sparse(1) on a sparse adjacency"),
    "no size": (
        lambda x, adj: torch.sparse_coo_tensor(adj.indices(), adj.values()) @ x,
        "torch.sparse_coo_tensor without a size",
    ),
    "sparse vector": (
        lambda x, adj: torch.sparse_coo_tensor(adj.indices()[:1], adj.values(), (20,)),
        "torch.sparse_coo_tensor of 1 dimension",
    ),
    "vectors as values": (
        lambda x, adj: torch.sparse_coo_tensor(adj.indices(), x[adj.indices()[0]], (*adj.shape, 3)) @ x,
        "a sparse matrix whose values are vectors",
    ),
    "other layout's pieces": (lambda x, adj: adj.crow_indices(), "crow_indices() on a sparse matrix of layout"),
    "returned": (lambda x, adj: (x, adj * 2), "a sparse adjacency where only plain tensors can go"),
    "below torch": (lambda x, adj: torch.ops.aten.relu(adj.detach()), "a sparse adjacency"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model, text = REFUSED[name]
    with pytest.raises(CaptureError) as caught:
        captured(model, adjacency(20, COO, 0))
    assert text in str(caught.value)
    assert caught.value.where is not None
    # What is found only when it leaves the model has the place of the call.
    file = "sparse_support.py" if name == "below torch" else "test_sparse.py"
    assert name == "returned" or file in caught.value.where


def test_refused_layouts_and_shapes() -> None:
    with pytest.raises(CaptureError, match=r"layout torch\.sparse_bsr"):
        stand_in_adjacency(*_loop(), 2, torch.sparse_bsr)
    with pytest.raises(CaptureError, match=r"has the layout torch\.strided.*to_sparse_csr"):
        adjacency_parts(torch.eye(2))
    with pytest.raises(CaptureError, match=r"shape \(2, 3\).*square"):
        adjacency_parts(torch.ones(2, 3).to_sparse())
    with pytest.raises(CaptureError, match=r"shape \(2, 2, 1\)"):
        adjacency_parts(torch.ones(2, 2, 1).to_sparse(2))
    with pytest.raises(CaptureError, match=r"layout torch\.strided is asked for"):
        rebuild_adjacency(*_loop(), 2, 2, torch.strided)


@pytest.mark.parametrize("layout", [COO, CSR, CSC], ids=["coo", "csr", "csc"])
def test_parts_make_the_adjacency_again(layout: torch.layout) -> None:
    adj = adjacency(12, layout, 3, coalesced=False).requires_grad_()
    parts = adjacency_parts(adj)
    again = rebuild_adjacency(parts.row, parts.col, parts.value, 12, 12, layout, parts.coalesced)
    assert is_adjacency(again)
    assert again.layout is layout
    torch.testing.assert_close(again.to_dense(), adj.to_dense())
    assert parts.value.requires_grad
    ones = rebuild_adjacency(parts.row, parts.col, None, 12, 12, layout).values if layout is not COO else None
    assert ones is None or ones().eq(1).all()


@LAYOUTS
def test_parts_are_no_views_of_a_sparse_tensor(layout: torch.layout) -> None:
    parts = adjacency_parts(adjacency(12, layout, 3))
    for part in (parts.row, parts.col, parts.value):
        assert not part._is_view() or part._base.layout is torch.strided


def test_parts_keep_repeated_entries_in_their_order() -> None:
    row, col = edges(12, 5)
    parts = adjacency_parts(adjacency(12, COO, 5, coalesced=False))
    assert parts.row.equal(row)
    assert parts.col.equal(col)
    assert not parts.coalesced


def test_a_rank_gets_its_rows_over_more_columns() -> None:
    row, col, value = torch.tensor([1, 0, 1]), torch.tensor([4, 2, 0]), torch.tensor([1.0, 2.0, 3.0])
    expected = torch.zeros(2, 5).index_put((row, col), value)
    for layout in (COO, CSR, CSC):
        assert rebuild_adjacency(row, col, value, 2, 5, layout).to_dense().equal(expected)


def test_is_adjacency() -> None:
    assert is_adjacency(torch.eye(3).to_sparse_csc())
    assert not is_adjacency(torch.ones(2, 3).to_sparse())
    assert not is_adjacency(torch.eye(3))
    assert not is_adjacency([torch.eye(3).to_sparse()])
