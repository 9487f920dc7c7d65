"""Every convolution of DGL that takes a homogeneous graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sylvie_fx.dgl  # noqa: F401  (makes DGL importable)

import dgl  # isort: skip
import dgl.nn.pytorch as dglnn
import torch
from coverage_cases import NODES, WIDTH, Case, Named, edges, features, mlp, types
from torch import Tensor, nn

D = WIDTH

NOT_TRIED = {
    "CuGraphGATConv, CuGraphRelGraphConv, CuGraphSAGEConv": "need cuGraph and a GPU",
    "DenseChebConv, DenseGraphConv, DenseSAGEConv": "take a dense adjacency matrix of all nodes by all nodes, no graph",
}
"""Convolutions that are not in the table, and why."""


def graph(*, loops: bool = False, simple: bool = False) -> Any:
    """The graph of the cases.

    Args:
        loops: With a self loop at every node, where a layer refuses nodes without neighbours.
        simple: Without parallel edges.
    """
    src, dst = edges()
    made = dgl.graph((src, dst), num_nodes=NODES)
    made = dgl.to_simple(made) if simple else made
    return dgl.add_self_loop(made) if loops else made


def _rows(width: int | None = None, *, loops: bool = False, gradient: bool = False) -> Tensor:
    count = graph(loops=loops).num_edges()
    shape = (count,) if width is None else (count, width)
    values = torch.rand(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.1
    return values.requires_grad_(gradient)


def case(
    name: str,
    make: Callable[[], nn.Module],
    *more: Callable[[], Any],
    refusal: str | None = None,
    steps: int = 1,
    loops: bool = False,
    simple: bool = False,
    x: Callable[[], Any] = features,
) -> Case:
    return Case(
        "dgl", name, lambda: (make(), (graph(loops=loops, simple=simple), x(), *(m() for m in more))), refusal, steps
    )


def _loops(name: str, make: Callable[[], nn.Module], *more: Callable[[], Any], **rest: Any) -> Case:
    return case(name, make, *more, loops=True, **rest)


def _relations() -> Tensor:
    return types(3)


class _Then(nn.Module):
    """A layer without parameters behind one that has some."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(D, D), layer

    def forward(self, g: Any, x: Tensor, *rest: Tensor) -> Any:
        return self.layer(g, self.first(x), *rest)


class _Weighted(nn.Module):
    """EdgeWeightNorm in front of a GraphConv."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.norm, self.layer = dglnn.EdgeWeightNorm(norm), dglnn.GraphConv(D, 5, norm="none")

    def forward(self, g: Any, x: Tensor, weight: Tensor) -> Tensor:
        return self.layer(g, x, edge_weight=self.norm(g, weight))


class _WithX0(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(D, D), layer

    def forward(self, g: Any, x: Tensor, *rest: Tensor) -> Tensor:
        x0 = self.first(x).relu()
        return self.layer(g, x0 * 0.5, x0, *rest)


class _Positions(nn.Module):
    """EGNNConv moves coordinates as well."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, g: Any, x: Tensor, *rest: Tensor) -> Any:
        return self.layer(g, x, x[:, :3] * 0.3, *rest)


CASES = [
    _loops("GraphConv", lambda: dglnn.GraphConv(D, 5)),
    case("GraphConv zero in-degree", lambda: dglnn.GraphConv(D, 5, allow_zero_in_degree=True)),
    _loops("GraphConv right", lambda: dglnn.GraphConv(D, 12, norm="right", activation=torch.tanh)),
    _loops(
        "GraphConv left, weights",
        lambda: Named(dglnn.GraphConv(D, 5, norm="left"), "edge_weight"),
        lambda: _rows(loops=True),
    ),
    _loops(
        "GraphConv learned weights",
        lambda: Named(dglnn.GraphConv(D, 5, norm="none"), "edge_weight"),
        lambda: _rows(loops=True, gradient=True),
    ),
    _loops("EdgeWeightNorm both", lambda: _Weighted("both"), lambda: _rows(loops=True)),
    _loops("EdgeWeightNorm right, learned", lambda: _Weighted("right"), lambda: _rows(loops=True, gradient=True)),
    _loops("GATConv", lambda: dglnn.GATConv(D, 5, 2)),
    _loops(
        "GATConv dropout, residual",
        lambda: dglnn.GATConv(D, 5, 2, feat_drop=0.2, attn_drop=0.3, residual=True, activation=torch.relu),
    ),
    _loops("GATConv attention", lambda: Named(dglnn.GATConv(D, 5, 2), get_attention=True)),
    case("GATConv zero in-degree, weights", lambda: dglnn.GATConv(D, 5, 2, allow_zero_in_degree=True), lambda: _rows()),
    _loops("GATv2Conv", lambda: dglnn.GATv2Conv(D, 5, 2, feat_drop=0.2, attn_drop=0.3, residual=True)),
    _loops("GATv2Conv shared weights", lambda: dglnn.GATv2Conv(D, 5, 2, share_weights=True)),
    _loops("EGATConv", lambda: dglnn.EGATConv(D, 4, 5, 6, 2), lambda: _rows(4, loops=True)),
    _loops(
        "EGATConv attention, learned",
        lambda: Named(dglnn.EGATConv(D, 4, 5, 6, 2), get_attention=True),
        lambda: _rows(4, loops=True, gradient=True),
    ),
    _loops("EdgeGATConv", lambda: dglnn.EdgeGATConv(D, 4, 5, 2, attn_drop=0.3), lambda: _rows(4, loops=True)),
    case("TAGConv", lambda: dglnn.TAGConv(D, 5, k=2)),
    case("TAGConv weights", lambda: dglnn.TAGConv(D, 5, k=2), lambda: _rows()),
    case("RelGraphConv", lambda: dglnn.RelGraphConv(D, 6, 3), _relations),
    case(
        "RelGraphConv basis",
        lambda: dglnn.RelGraphConv(D, 6, 3, regularizer="basis", num_bases=2, layer_norm=True, dropout=0.2),
        _relations,
    ),
    case(
        "RelGraphConv bdd",
        lambda: dglnn.RelGraphConv(D, 6, 3, regularizer="bdd", num_bases=2),
        _relations,
        lambda: _rows(1),
    ),
    *[case(f"SAGEConv {a}", lambda a=a: dglnn.SAGEConv(D, 5, a, feat_drop=0.2)) for a in ("mean", "gcn", "pool")],
    case(
        "SAGEConv mean, weights, norm",
        lambda: dglnn.SAGEConv(D, 12, "mean", norm=lambda h: nn.functional.normalize(h), activation=torch.relu),
        lambda: _rows(),
    ),
    case("SAGEConv lstm", lambda: dglnn.SAGEConv(D, 5, "lstm"), refusal="a reduce function with lstm on its mailbox"),
    _loops("SGConv", lambda: dglnn.SGConv(D, 5, k=2)),
    _loops("SGConv cached", lambda: dglnn.SGConv(D, 5, k=2, cached=True), steps=2),
    case("APPNPConv", lambda: _Then(dglnn.APPNPConv(3, 0.1))),
    case("APPNPConv dropout of edges", lambda: _Then(dglnn.APPNPConv(3, 0.1, edge_drop=0.4))),
    *[case(f"GINConv {a}", lambda a=a: dglnn.GINConv(mlp(D), a, learn_eps=True)) for a in ("sum", "mean", "max")],
    case("GINEConv", lambda: dglnn.GINEConv(mlp(D), learn_eps=True), lambda: _rows(D)),
    case("GatedGraphConv", lambda: dglnn.GatedGraphConv(D, 10, 2, 3), _relations),
    case("GatedGraphConv one type", lambda: dglnn.GatedGraphConv(D, 10, 2, 1)),
    case("GatedGCNConv", lambda: dglnn.GatedGCNConv(D, 4, 8, dropout=0.2), lambda: _rows(4)),
    case("GatedGCNConv learned", lambda: dglnn.GatedGCNConv(D, 4, 5, residual=False), lambda: _rows(4, gradient=True)),
    *[
        _loops(f"GMMConv {a}", lambda a=a: dglnn.GMMConv(D, 5, 2, 3, a, residual=True), lambda: _rows(2, loops=True))
        for a in ("sum", "mean", "max")
    ],
    case("ChebConv", lambda: dglnn.ChebConv(D, 5, 3)),
    case("ChebConv lambda given", lambda: Named(dglnn.ChebConv(D, 5, 3), lambda_max=[2.0])),
    _loops("AGNNConv", lambda: dglnn.AGNNConv()),
    *[
        case(f"NNConv {a}", lambda a=a: dglnn.NNConv(D, 5, mlp(4, D * 5), a, residual=True), lambda: _rows(4))
        for a in ("sum", "mean", "max")
    ],
    _loops("EdgeConv", lambda: dglnn.EdgeConv(D, 5)),
    _loops("EdgeConv batch norm", lambda: dglnn.EdgeConv(D, 5, batch_norm=True)),
    case(
        "AtomicConv",
        lambda: dglnn.AtomicConv(torch.tensor([12.0, 12.0]), torch.tensor([0.0, 2.0]), torch.tensor([4.0, 4.0])),
        lambda: _rows(1),
        x=lambda: types(9, NODES).view(-1, 1).double(),
    ),
    case(
        "AtomicConv features to use",
        lambda: dglnn.AtomicConv(
            torch.tensor([12.0, 12.0]), torch.tensor([0.0, 2.0]), torch.tensor([4.0, 4.0]), torch.tensor([6.0, 8.0])
        ),
        lambda: _rows(1),
        x=lambda: types(9, NODES).view(-1, 1).double(),
    ),
    case("CFConv", lambda: dglnn.CFConv(D, 4, 6, 5), lambda: _rows(4)),
    _loops("DotGatConv", lambda: dglnn.DotGatConv(D, 5, 2)),
    _loops("DotGatConv attention", lambda: Named(dglnn.DotGatConv(D, 5, 2), get_attention=True)),
    _loops("TWIRLSConv", lambda: dglnn.TWIRLSConv(D, 4, 8, prop_step=3, dropout=0.2)),
    _loops(
        "TWIRLSConv attention",
        lambda: dglnn.TWIRLSConv(D, 4, 8, prop_step=4, attention=True, num_mlp_after=2, norm="batch", tau=0.2),
    ),
    _loops("TWIRLSUnfoldingAndAttention", lambda: _Then(dglnn.TWIRLSUnfoldingAndAttention(D, 1.0, 1.0, 3))),
    _loops("GCN2Conv", lambda: _WithX0(dglnn.GCN2Conv(D, 1, activation=torch.relu))),
    _loops(
        "GCN2Conv weights",
        lambda: _WithX0(dglnn.GCN2Conv(D, 2, project_initial_features=False)),
        lambda: _rows(loops=True),
    ),
    case("HGTConv", lambda: dglnn.HGTConv(D, 3, 2, 2, 3, dropout=0.2), lambda: types(2, NODES), _relations),
    case("HGTConv norm", lambda: dglnn.HGTConv(D, 4, 2, 2, 3, use_norm=True), lambda: types(2, NODES), _relations),
    _loops("GroupRevRes", lambda: _Then(dglnn.GroupRevRes(dglnn.GraphConv(4, 4), 2))),
    case("EGNNConv", lambda: _Positions(dglnn.EGNNConv(D, 8, 5))),
    case("EGNNConv edge features", lambda: _Positions(dglnn.EGNNConv(D, 8, 5, 4)), lambda: _rows(4)),
    case("PNAConv", lambda: dglnn.PNAConv(D, 8, ["mean", "max", "sum"], ["identity", "amplification"], 2.5)),
    case(
        "PNAConv towers",
        lambda: dglnn.PNAConv(
            D,
            8,
            ["mean", "min", "std", "var"],
            ["identity", "attenuation"],
            2.5,
            dropout=0.2,
            num_towers=2,
            edge_feat_size=4,
        ),
        lambda: _rows(4),
    ),
    # The gradient of the bias in front of the moments is zero but for rounding, which the root of a number near
    # zero magnifies: one device differs by 0.5 from itself when the order of the edges changes.
    Case(
        "dgl",
        "PNAConv moments",
        lambda: (dglnn.PNAConv(D, 8, ["moment3", "moment4", "moment5"], ["identity"], 2.5), (graph(), features())),
        tolerance=0.5,
    ),
    case(
        "DGNConv",
        lambda: Named(
            dglnn.DGNConv(D, 8, ["dir1-av", "dir1-dx", "sum"], ["identity", "amplification"], 2.5), "eig_vec"
        ),
        lambda: features(3, seed=9),
    ),
]
"""In the order of the documentation."""
