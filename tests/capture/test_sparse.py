"""Each spelling of a sparse product is captured with N and E as symbols and equals torch on another graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from sylvie_fx.capture.sparse import (
    adjacency_parts,
    is_adjacency,
    patched_sparse,
    rebuild_adjacency,
    stand_in_adjacency,
)
from sylvie_fx.ir.errors import CaptureError

Model = Callable[..., Any]
COO, CSR, CSC = torch.sparse_coo, torch.sparse_csr, torch.sparse_csc
LAYOUTS = pytest.mark.parametrize("layout", [COO, CSR], ids=["coo", "csr"])


def edges(nodes: int, seed: int) -> tuple[Tensor, Tensor]:
    """A random graph with a hub (0), self loops, parallel edges and an isolated last node; unsorted."""
    random = torch.Generator().manual_seed(seed)
    row, col = torch.randint(0, nodes - 1, (2, 4 * nodes), generator=random)
    hub = torch.arange(1, nodes - 1)
    row = torch.cat([row, torch.zeros_like(hub), torch.tensor([2, 3, 3])])
    col = torch.cat([col, hub, torch.tensor([2, 1, 1])])
    return row, col


def adjacency(nodes: int, layout: torch.layout, seed: int, coalesced: bool = True) -> Tensor:
    row, col = edges(nodes, seed)
    value = torch.rand(row.numel(), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    adj = torch.sparse_coo_tensor(torch.stack([row, col]), value, (nodes, nodes))
    if layout is COO and not coalesced:
        return adj
    return {COO: adj.coalesce, CSR: adj.to_sparse_csr, CSC: adj.to_sparse_csc}[layout]()


class Wrapper(nn.Module):
    """Builds the stand-in from plain inputs, as the capture does."""

    def __init__(self, model: Model, layout: torch.layout, coalesced: bool) -> None:
        super().__init__()
        self.model, self.layout, self.coalesced = model, layout, coalesced

    def forward(self, x: Tensor, row: Tensor, col: Tensor, value: Tensor | None, marker: Tensor) -> Any:
        with patched_sparse():
            adj = stand_in_adjacency(row, col, value, marker.shape[0], self.layout, self.coalesced)
            return self.model(x, adj)


def features(nodes: int) -> Tensor:
    return torch.randn(nodes, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(nodes))


def captured(model: Model, adj: Tensor, implicit: bool = False) -> ExportedProgram:
    parts = adjacency_parts(adj)
    n, e = Dim("N"), Dim("E")
    value = None if implicit else parts.value.clone().requires_grad_(parts.value.is_floating_point())
    marker = torch.ones(parts.num_nodes, dtype=torch.bool)
    return export(
        Wrapper(model, parts.layout, parts.coalesced),
        (features(parts.num_nodes), parts.row, parts.col, value, marker),
        dynamic_shapes=({0: n}, {0: e}, {0: e}, None if implicit else {0: e}, {0: n}),
        strict=False,
    )


def real(parts: Any, value: Tensor) -> Tensor:
    size = (parts.num_nodes, parts.num_nodes)
    if parts.layout is COO:
        pair = torch.stack([parts.row, parts.col])
        return torch.sparse_coo_tensor(pair, value, size, is_coalesced=parts.coalesced or None)
    coo = torch.sparse_coo_tensor(torch.stack([parts.row, parts.col]), value, size)
    return coo.to_sparse_csr() if parts.layout is CSR else coo.to_sparse_csc()


def check(model: Model, layout: torch.layout, coalesced: bool = True, gradient: bool = True) -> ExportedProgram:
    """Capture on 20 nodes, run on 33, compare results and gradients of features and values with torch."""
    program = captured(model, adjacency(20, layout, 0, coalesced))
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in ("x", "row", "col", "value", "marker"):
            assert isinstance(node.meta["val"].shape[0], torch.SymInt)
        assert "sparse" not in str(node.target), node
    parts = adjacency_parts(adjacency(33, layout, 1, coalesced))
    results, gradients = [], []
    for run in ("captured", "torch"):
        x = features(33).requires_grad_(gradient)
        value = parts.value.clone().requires_grad_(gradient)
        if run == "captured":
            result = program.module()(x, parts.row, parts.col, value, torch.ones(33, dtype=torch.bool))
        else:
            result = model(x, real(parts, value))
            result = result.to_dense() if result.layout is not torch.strided else result
        results.append(result.detach())
        if gradient:
            weight = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)
            inputs = [t for t in (x, value) if t.requires_grad]
            gradients.append(torch.autograd.grad((result * weight).sum(), inputs, allow_unused=True))
    torch.testing.assert_close(results[0], results[1])
    for mine, theirs in zip(*gradients, strict=True) if gradient else ():
        torch.testing.assert_close(mine, theirs if theirs is None or theirs.layout is torch.strided else theirs)
    return program


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
    "cast": lambda x, adj: adj.to(torch.float32).double() @ x,
    "clone": lambda x, adj: adj.clone() @ x,
    "detach": lambda x, adj: adj.detach() @ x,
    "size": lambda x, adj: (adj @ x) / adj.size(0) + adj.shape[1] + len(adj),
    "questions": lambda x, adj: adj @ x if isinstance(adj, Tensor) and adj.layout in (COO, CSR) and adj.ndim == 2 else x,
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
    "identity": lambda x, adj: (adj + torch.eye(adj.size(0), dtype=x.dtype).to_sparse()) @ x
    if False
    else (adj + torch.eye(adj.size(0)).to_sparse().to(x.dtype)) @ x,
    "batch": lambda x, adj: torch.matmul(adj, torch.stack([x, 2 * x])),
}
CSR_ONLY: dict[str, Model] = {
    "mean": lambda x, adj: torch.sparse.mm(adj, x, "mean"),
    "amax": lambda x, adj: torch.sparse.mm(adj, x, "amax"),
    "min": lambda x, adj: torch.sparse.mm(adj, x, reduce="min"),
    "degrees": lambda x, adj: x * adj.crow_indices().diff().unsqueeze(1),
    "degrees by hand": lambda x, adj: x / (adj.crow_indices()[1:] - adj.crow_indices()[:-1]).clamp(min=1).unsqueeze(1),
    "expanded": lambda x, adj: x[torch.arange(adj.size(0)).repeat_interleave(adj.crow_indices().diff())]
    * adj.values().unsqueeze(1),
    "built": lambda x, adj: torch.sparse_csr_tensor(
        adj.crow_indices(), adj.col_indices(), adj.values() * 2, adj.size()
    )
    @ x,
    "built from other pointers": lambda x, adj: torch.sparse_csr_tensor(
        adj.crow_indices() + 0, adj.col_indices(), adj.values(), (x.size(0), x.size(0))
    )
    @ x,
    "pointers": lambda x, adj: x * adj.crow_indices()[:-1].unsqueeze(1),
    "as csc": lambda x, adj: adj.to_sparse_csc() @ x,
    "as transposed csr": lambda x, adj: adj.t().to_sparse_csr() @ x,
    "summed": lambda x, adj: adj.sum(dim=1, keepdim=True).to_dense() * x,
}
# torch has no gradient of the values, or none at all, for these.
FORWARD_ONLY = {"dense first, mm", "mean", "min", "amax", "as csc", "as transposed csr", "summed"}


@LAYOUTS
@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name: str, layout: torch.layout) -> None:
    check(PRODUCTS[name], layout)


@pytest.mark.parametrize("coalesced", [True, False], ids=["coalesced", "uncoalesced"])
@pytest.mark.parametrize("name", COO_ONLY)
def test_coo(name: str, coalesced: bool) -> None:
    check(COO_ONLY[name], COO, coalesced, gradient=name not in FORWARD_ONLY)


@pytest.mark.parametrize("name", CSR_ONLY)
def test_csr(name: str) -> None:
    check(CSR_ONLY[name], CSR, gradient=name not in FORWARD_ONLY)
