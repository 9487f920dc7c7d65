"""Each spelling of a sparse product is captured and equals torch on another graph."""

from __future__ import annotations

import pytest
import torch
from sparse_support import COO, CSC, CSR, LAYOUTS, Model, adjacency, captured, check, features, real
from torch import Tensor

from sylvie_fx.capture.sparse import (
    adjacency_parts,
)

PRODUCTS: dict[str, Model] = {
    "operator": lambda x, adj: adj @ x,
    "torch.sparse.mm": lambda x, adj: torch.sparse.mm(adj, x),
    "torch.spmm": lambda x, adj: torch.spmm(adj, x),
    "torch.mm": lambda x, adj: torch.mm(adj, x),
    "torch.matmul": lambda x, adj: torch.matmul(adj, x),
    "keywords": lambda x, adj: torch.mm(input=adj, mat2=x),
    "mm": lambda x, adj: adj.mm(x),
    "matmul": lambda x, adj: adj.matmul(x),
    "vector": lambda x, adj: adj @ x[:, 0],
    "mv": lambda x, adj: torch.mv(adj, x[:, 1]),
    "torch.sparse.addmm": lambda x, adj: torch.sparse.addmm(x, adj, x, beta=0.5, alpha=2.0),
    "torch.addmm": lambda x, adj: torch.addmm(x, adj, x),
    "two hops": lambda x, adj: adj @ torch.relu(adj @ x),
    "scaled": lambda x, adj: (adj * 2) @ x,
    "scaled from the left": lambda x, adj: (0.5 * adj) @ x,
    "negative": lambda x, adj: (-adj) @ x,
    "clone": lambda x, adj: adj.clone() @ x,
    "detach": lambda x, adj: adj.detach() @ x,
    "size": lambda x, adj: (adj @ x) / adj.size(0) + adj.shape[1] + adj.numel(),
    "questions": lambda x, adj: (
        adj @ x if isinstance(adj, Tensor) and adj.layout in (COO, CSR) and adj.ndim == 2 else x
    ),
    "layout": lambda x, adj: adj @ x if adj.is_sparse != adj.is_sparse_csr and adj.dtype == x.dtype else x,
    "device": lambda x, adj: adj.to(x.device).cpu() @ x if adj.device == x.device and not adj.is_cuda else x,
    "sum": lambda x, adj: x * adj.sum(),
    "as coo": lambda x, adj: adj.to_sparse_coo() @ x,
    "as csr": lambda x, adj: (adj.to_sparse_csr() if adj.layout is COO else adj) @ x,
}
COO_ONLY: dict[str, Model] = {
    "t": lambda x, adj: adj.t() @ x,
    "T": lambda x, adj: adj.T @ x,
    "transpose": lambda x, adj: adj.transpose(0, 1) @ x,
    "dense first": lambda x, adj: x.t() @ adj,
    "dense first, mm": lambda x, adj: torch.mm(x.t(), adj),
    "vector first": lambda x, adj: x[:, 0] @ adj,
    "coalesce": lambda x, adj: (adj if adj.is_coalesced() else adj.coalesce()) @ x,
    "coalesced values": lambda x, adj: adj.coalesce().values().exp().sum() + x,
    "pieces": lambda x, adj: torch.zeros_like(x).index_add(
        0, adj.coalesce().indices()[0], x[adj.coalesce().indices()[1]] * adj.coalesce().values()[:, None] ** 2
    ),
    "transposed pieces": lambda x, adj: x[adj.t().coalesce().indices()[0]].cumsum(0)[:5],
    "built": lambda x, adj: torch.sparse_coo_tensor(adj._indices(), adj._values() * 2, adj.size()) @ x,
    "divided": lambda x, adj: (adj / 3) @ x,
    "sum with the transpose": lambda x, adj: (adj + adj.t()) @ x,
    "sum, then squared": lambda x, adj: (adj + adj.t().coalesce()).coalesce().pow(2) @ x,
    "difference": lambda x, adj: (adj - 0.5 * adj) @ x,
    "squared": lambda x, adj: (adj * adj) @ x if adj.is_coalesced() else adj.coalesce().pow(2) @ x,
    "powers": lambda x, adj: torch.sqrt(adj.abs()) @ x,
    "row sums": lambda x, adj: torch.sparse.sum(adj, dim=1).to_dense().unsqueeze(1) * x,
    "column sums": lambda x, adj: torch.sparse.sum(adj, dim=(0,)).to_dense().unsqueeze(1) * x,
    "sum method": lambda x, adj: adj.sum(dim=1).to_dense().pow(0.5)[:-1].unsqueeze(1) * x[:-1],
    "column factor": lambda x, adj: (adj * x[:, :1]) @ x,
    "row factor": lambda x, adj: (x[:, 0] * adj) @ x,
    "softmax": lambda x, adj: torch.sparse.softmax(adj, 1) @ x,
    "column softmax": lambda x, adj: torch.sparse.softmax(adj, dim=0) @ x,
    "log softmax": lambda x, adj: torch.sparse.log_softmax(adj, 1) @ x,
    "identity": lambda x, adj: (adj + torch.eye(adj.size(0), dtype=x.dtype).to_sparse()) @ x,
    "double": lambda x, adj: adj.double() @ x,
    "batch": lambda x, adj: torch.matmul(adj, torch.stack([x, 2 * x])),
}
CSR_ONLY: dict[str, Model] = {
    "mean": lambda x, adj: torch.sparse.mm(adj, x, "mean"),
    "amax": lambda x, adj: torch.sparse.mm(adj, x, "amax"),
    "min": lambda x, adj: torch.sparse.mm(adj, x, reduce="min"),
    "degrees": lambda x, adj: x * adj.crow_indices().diff().unsqueeze(1),
    "degrees by hand": lambda x, adj: x / (adj.crow_indices()[1:] - adj.crow_indices()[:-1]).clamp(min=1).unsqueeze(1),
    "expanded": lambda x, adj: (
        x[torch.arange(adj.size(0)).repeat_interleave(adj.crow_indices().diff())] * adj.values().unsqueeze(1)
    ),
    "built": lambda x, adj: (
        torch.sparse_csr_tensor(adj.crow_indices(), adj.col_indices(), adj.values() * 2, adj.size()) @ x
    ),
    "built from other pointers": lambda x, adj: (
        torch.sparse_csr_tensor(adj.crow_indices() + 0, adj.col_indices(), adj.values(), (x.size(0), x.size(0))) @ x
    ),
    "pointers": lambda x, adj: x * adj.crow_indices()[:-1].unsqueeze(1),
    "as csc": lambda x, adj: adj.to_sparse_csc() @ x,
    "as transposed csr": lambda x, adj: adj.t().to_sparse_csr() @ x,
    "summed": lambda x, adj: adj.sum(dim=1, keepdim=True).to_dense() * x,
}
# torch has no gradient for these, or an error in its backward.
NO_GRADIENT = {"mean", "min", "amax", "as csc", "as transposed csr", "summed", "powers", "column factor", "row factor"}
NO_GRADIENT |= {"sum method", "softmax", "column softmax", "log softmax"}


@LAYOUTS
@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name: str, layout: torch.layout) -> None:
    check(PRODUCTS[name], layout)


@pytest.mark.parametrize("coalesced", [True, False], ids=["coalesced", "uncoalesced"])
@pytest.mark.parametrize("name", COO_ONLY)
def test_coo(name: str, coalesced: bool) -> None:
    check(COO_ONLY[name], COO, coalesced, gradient=name not in NO_GRADIENT)


@pytest.mark.parametrize("name", CSR_ONLY)
def test_csr(name: str) -> None:
    check(CSR_ONLY[name], CSR, gradient=name not in NO_GRADIENT)


@LAYOUTS
def test_implicit_values_multiply_nothing(layout: torch.layout) -> None:
    def model(x: Tensor, adj: Tensor) -> Tensor:
        adj = adj.to(x.device)
        return (adj @ x) + adj.values().sum()

    program = captured(model, adjacency(20, layout, 0), implicit=True)
    assert not any("mul" in str(node.target) for node in program.graph.nodes)
    parts = adjacency_parts(adjacency(33, layout, 1))
    x = features(33)
    result = program.module()(x, parts.row, parts.col, None, torch.ones(33, dtype=torch.bool))
    torch.testing.assert_close(result, real(parts, torch.ones_like(parts.value)) @ x + parts.row.numel())


def test_csc() -> None:
    check(lambda x, adj: adj @ x, CSC, gradient=False)
    check(lambda x, adj: adj.t() @ (adj.to_sparse_csr() @ x), CSC, gradient=False)
    check(
        lambda x, adj: torch.sparse_csc_tensor(adj.ccol_indices(), adj.row_indices(), adj.values(), adj.shape) @ x,
        CSC,
        gradient=False,
    )


def test_edges_dropped_in_forward() -> None:
    """The thinning of LightGCN-like models, with its constructor of old."""

    def model(x: Tensor, adj: Tensor) -> Tensor:
        assert isinstance(adj, torch.sparse.DoubleTensor)
        index, value = adj._indices(), adj.values()
        row, col = index
        keep = row != col
        thinned = torch.sparse.DoubleTensor(index[:, keep], value[keep] * 2, torch.Size(adj.shape))
        return thinned @ x

    check(model, COO)


def test_adjacency_built_from_edges() -> None:
    def model(x: Tensor, adj: Tensor) -> Tensor:
        edge_index = adj.indices() * 1
        size = (x.shape[0], x.shape[0])
        made = torch.sparse_coo_tensor(edge_index, adj.values(), size, dtype=x.dtype).coalesce()
        degree = torch.sparse.sum(made, dim=1).to_dense().clamp(min=1e-3).pow(-0.5)
        return degree.unsqueeze(1) * (made @ (degree.unsqueeze(1) * x))

    check(model, COO)


def test_incidence_matrix_need_not_be_square() -> None:
    def model(x: Tensor, adj: Tensor) -> Tensor:
        row, value = adj.indices()[0], adj.values()
        edge = torch.arange(row.shape[0])
        incidence = torch.sparse_coo_tensor(torch.stack([row, edge]), value, (x.shape[0], row.shape[0]))
        return incidence @ (incidence.t() @ x)

    check(model, COO)


def test_sampled_product() -> None:
    check(
        lambda x, adj: torch.sparse.sampled_addmm(adj, x, x.t(), beta=0.5, alpha=3.0) @ x,
        CSR,
        gradient=False,
    )
