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
    n, e = Dim("N", min=8, max=2**31), Dim("E", min=8, max=2**40)
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
    if not gradient:
        check_gradients(program, layout, coalesced)
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
        torch.testing.assert_close(mine, theirs)
    return program


def check_gradients(program: ExportedProgram, layout: torch.layout, coalesced: bool) -> None:
    """Compare with finite differences, for what torch itself has no gradient of."""
    parts = adjacency_parts(adjacency(8, layout, 2, coalesced))
    marker = torch.ones(8, dtype=torch.bool)

    def run(x: Tensor, value: Tensor) -> Tensor:
        result: Tensor = program.module()(x, parts.row, parts.col, value, marker)
        return result

    inputs = (features(8).requires_grad_(), parts.value.clone().requires_grad_())
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


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
    assert name == "returned" or "test_sparse.py" in caught.value.where


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


class First(nn.Module):
    """The first output of a layer that returns several."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        result = self.layer(x, adj)
        return result[0] if isinstance(result, tuple) else result


PYG_LAYERS: dict[str, Callable[[Any], nn.Module]] = {
    "GCNConv": lambda pyg: pyg.GCNConv(3, 4),
    "GCNConv, improved": lambda pyg: pyg.GCNConv(3, 4, improved=True),
    "GCNConv, no loops": lambda pyg: pyg.GCNConv(3, 4, add_self_loops=False),
    "GCNConv, plain": lambda pyg: pyg.GCNConv(3, 4, normalize=False),
    "SAGEConv": lambda pyg: pyg.SAGEConv(3, 4),
    "SAGEConv, max": lambda pyg: pyg.SAGEConv(3, 4, aggr="max"),
    "SAGEConv, two": lambda pyg: pyg.SAGEConv(3, 4, aggr=["mean", "max"]),
    "GraphConv": lambda pyg: pyg.GraphConv(3, 4),
    "GINConv": lambda pyg: pyg.GINConv(nn.Linear(3, 4)),
    "GATConv": lambda pyg: pyg.GATConv(3, 4, heads=2),
    "GATConv, no loops": lambda pyg: pyg.GATConv(3, 4, heads=2, add_self_loops=False),
    "GATv2Conv": lambda pyg: pyg.GATv2Conv(3, 4, heads=2),
    "TransformerConv": lambda pyg: pyg.TransformerConv(3, 4, heads=2),
    "SGConv": lambda pyg: pyg.SGConv(3, 4, K=2),
    "APPNP": lambda pyg: pyg.APPNP(3, 0.1),
    "TAGConv": lambda pyg: pyg.TAGConv(3, 4),
    "LGConv": lambda pyg: pyg.LGConv(),
    "LEConv": lambda pyg: pyg.LEConv(3, 4),
    "PNAConv": lambda pyg: pyg.PNAConv(3, 4, ["mean", "std"], ["identity"], torch.tensor([1, 2, 3])),
    "GCN model": lambda pyg: pyg.GCN(3, 4, 2, 4),
}


@pytest.mark.pyg
@pytest.mark.filterwarnings("ignore")
@LAYOUTS
@pytest.mark.parametrize("name", PYG_LAYERS)
def test_pyg_layer_with_adj_t(name: str, layout: torch.layout) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    layer = First(PYG_LAYERS[name](pyg)).double()
    program = captured(layer, adjacency(20, layout, 0)).module()
    parts, x = adjacency_parts(adjacency(33, layout, 1)), features(33)
    results = [
        program(x, parts.row, parts.col, parts.value.clone().requires_grad_(), torch.ones(33, dtype=torch.bool)),
        layer(x, adjacency(33, layout, 1)),
    ]
    torch.testing.assert_close(results[0], results[1])
    parameters = list(layer.parameters())
    if parameters:
        mine, theirs = (torch.autograd.grad(r.square().sum(), parameters, allow_unused=True) for r in results)
        torch.testing.assert_close(mine, theirs)
