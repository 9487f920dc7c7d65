"""Every convolution of PyTorch Geometric that takes a homogeneous graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from coverage_cases import WIDTH, Case, Named, edge_features, edges, features, mlp, types
from torch import Tensor, nn
from torch_geometric.utils import degree

D = WIDTH

NOT_TRIED = {
    "CuGraphGATConv, CuGraphRGCNConv, CuGraphSAGEConv": "need cuGraph and a GPU",
    "FusedGATConv": "needs dgNN and a GPU",
    "HANConv, HEATConv, HGTConv, HeteroConv": "take graphs of several node or edge types",
    "DynamicEdgeConv, GravNetConv, XConv": "take no graph: they look for neighbours, with an extension that is not installed",
    "PANConv, SplineConv": "need an extension that is not installed",
}
"""Convolutions that are not in the table, and why."""


def case(
    name: str,
    make: Callable[[], nn.Module],
    *more: Callable[[], Any],
    refusal: str | None = None,
    steps: int = 1,
    x: Callable[[], Any] = features,
) -> Case:
    return Case("pyg", name, lambda: (make(), (x(), edges(), *(m() for m in more))), refusal, steps)


def _sorted() -> Tensor:
    index = edges()
    return index[:, index[1].argsort(stable=True)]


def _weight() -> Tensor:
    return edge_features()


def _learned_weight() -> Tensor:
    return edge_features(gradient=True)


def _attr() -> Tensor:
    return edge_features(4)


def _learned_attr() -> Tensor:
    return edge_features(4, gradient=True)


def _pseudo() -> Tensor:
    return edge_features(2)


def _relations() -> Tensor:
    return types(3)


def _positions() -> Tensor:
    return features(3, seed=5)


def degrees() -> Tensor:
    return torch.bincount(degree(edges()[1], 60, dtype=torch.long))


class _WithX0(nn.Module):
    """GCN2Conv and FAConv take the first layer's features too."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(D, D), layer

    def forward(self, x: Tensor, edge_index: Tensor, *rest: Tensor) -> Tensor:
        x0 = self.first(x).relu()
        return self.layer(x0 * 0.5, x0, edge_index, *rest)


class _Then(nn.Module):
    """A layer without parameters behind one that has some."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(D, D), layer

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.layer(self.first(x), *rest)


class _Signed(nn.Module):
    """Positive edges and negative edges."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.layer(x, edge_index, edge_index.flip([0]))


class _Layers(nn.Module):
    """DNAConv attends to the outputs of all layers before it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.layer = nn.Linear(D, D), nn.Linear(D, D), layer

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.layer(torch.stack([self.first(x), self.second(x)], dim=1), edge_index)


class _Points(nn.Module):
    """Layers that take positions in front of the edges."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> Tensor:
        return self.layer(x, pos, edge_index)


class _Normals(_Points):
    """And normals behind the positions."""

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> Tensor:
        return self.layer(x, pos, nn.functional.normalize(pos.flip([1]), dim=1), edge_index)


class _First(nn.Module):
    """The first result of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *data: Tensor) -> Tensor:
        return self.layer(*data)[0]


CASES = [
    case("SimpleConv", lambda: pyg.SimpleConv()),
    case("SimpleConv mean, cat", lambda: pyg.SimpleConv("mean", "cat"), _weight),
    case("GCNConv", lambda: pyg.GCNConv(D, 5)),
    case("GCNConv weights", lambda: pyg.GCNConv(D, 5), _weight),
    case("GCNConv learned weights", lambda: pyg.GCNConv(D, 5), _learned_weight),
    case("GCNConv cached", lambda: pyg.GCNConv(D, 5, cached=True), steps=3),
    case("GCNConv improved", lambda: pyg.GCNConv(D, 5, improved=True)),
    case("GCNConv without loops", lambda: pyg.GCNConv(D, 5, add_self_loops=False)),
    case("GCNConv target to source", lambda: pyg.GCNConv(D, 5, flow="target_to_source", add_self_loops=False)),
    case("ChebConv", lambda: pyg.ChebConv(D, 5, K=3)),
    case("ChebConv rw, weights", lambda: pyg.ChebConv(D, 5, K=3, normalization="rw"), _weight),
    *[
        case(f"SAGEConv {a}", lambda a=a: pyg.SAGEConv(D, 5, aggr=a))
        for a in ("mean", "max", "min", "add", "mul", "std", "var")
    ],
    case("SAGEConv softmax", lambda: pyg.SAGEConv(D, 5, aggr="softmax", aggr_kwargs={"learn": True})),
    case(
        "SAGEConv powermean",
        lambda: pyg.SAGEConv(D, 5, aggr="powermean", aggr_kwargs={"learn": True, "p": 2.0}),
        x=lambda: features().abs() + 0.1,
    ),
    case("SAGEConv several", lambda: pyg.SAGEConv(D, 5, aggr=["mean", "max", "std"])),
    case("SAGEConv normalize, project", lambda: pyg.SAGEConv(D, 5, normalize=True, project=True)),
    case("SAGEConv median", lambda: pyg.SAGEConv(D, 5, aggr="median"), refusal="an index that depends on features"),
    Case(
        "pyg",
        "SAGEConv lstm",
        lambda: (pyg.SAGEConv(D, 5, aggr="lstm"), (features(), _sorted())),
        refusal="mixes rows of different nodes",
    ),
    case("GraphConv", lambda: pyg.GraphConv(D, 5), _weight),
    case("GatedGraphConv", lambda: pyg.GatedGraphConv(D, 3)),
    case("ResGatedGraphConv", lambda: pyg.ResGatedGraphConv(D, 5)),
    case("ResGatedGraphConv edge features", lambda: pyg.ResGatedGraphConv(D, 5, edge_dim=4), _attr),
    case("GATConv", lambda: pyg.GATConv(D, 5, heads=2)),
    case("GATConv dropout, edge features", lambda: pyg.GATConv(D, 5, heads=2, dropout=0.3, edge_dim=4), _attr),
    case(
        "GATConv learned edge features, residual",
        lambda: pyg.GATConv(D, 5, heads=2, edge_dim=4, residual=True, concat=False),
        _learned_attr,
    ),
    case("GATConv fill max", lambda: pyg.GATConv(D, 5, edge_dim=4, fill_value="max"), _learned_attr),
    case("GATConv attention weights", lambda: Named(pyg.GATConv(D, 5), return_attention_weights=True)),
    case("GATv2Conv", lambda: pyg.GATv2Conv(D, 5, heads=2, dropout=0.3, share_weights=True)),
    case("GATv2Conv edge features", lambda: pyg.GATv2Conv(D, 5, heads=2, edge_dim=4), _attr),
    case("TransformerConv", lambda: pyg.TransformerConv(D, 5, heads=2, dropout=0.3)),
    case(
        "TransformerConv beta, edge features", lambda: pyg.TransformerConv(D, 5, heads=2, beta=True, edge_dim=4), _attr
    ),
    case("AGNNConv", lambda: pyg.AGNNConv()),
    case("TAGConv", lambda: pyg.TAGConv(D, 5)),
    case("GINConv", lambda: pyg.GINConv(mlp(D), train_eps=True)),
    case(
        "GINConv batch norm",
        lambda: pyg.GINConv(nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))),
    ),
    case("GINEConv", lambda: pyg.GINEConv(mlp(D), edge_dim=4), _attr),
    case("ARMAConv", lambda: pyg.ARMAConv(D, 5, num_stacks=2, num_layers=2, dropout=0.2)),
    case("SGConv", lambda: pyg.SGConv(D, 5, K=2)),
    case("SGConv cached", lambda: pyg.SGConv(D, 5, K=2, cached=True), steps=3),
    case("SSGConv", lambda: pyg.SSGConv(D, 5, alpha=0.1, K=2)),
    case("APPNP", lambda: _Then(pyg.APPNP(3, 0.1))),
    case("APPNP dropout of edges", lambda: _Then(pyg.APPNP(3, 0.1, dropout=0.4))),
    case("MFConv", lambda: pyg.MFConv(D, 5)),
    case("RGCNConv", lambda: pyg.RGCNConv(D, 5, 3), _relations),
    case("RGCNConv bases", lambda: pyg.RGCNConv(D, 5, 3, num_bases=2), _relations),
    case("RGCNConv blocks", lambda: pyg.RGCNConv(D, 4, 3, num_blocks=2), _relations),
    case("FastRGCNConv", lambda: pyg.FastRGCNConv(D, 5, 3), _relations),
    case("FastRGCNConv bases", lambda: pyg.FastRGCNConv(D, 5, 3, num_bases=2), _relations),
    case("RGATConv", lambda: pyg.RGATConv(D, 5, 3, heads=2), _relations),
    case(
        "RGATConv within relation",
        lambda: pyg.RGATConv(
            D,
            5,
            3,
            num_bases=2,
            attention_mechanism="within-relation",
            attention_mode="multiplicative-self-attention",
            edge_dim=4,
        ),
        _relations,
        _attr,
    ),
    case("SignedConv", lambda: _Signed(pyg.SignedConv(D, 5, first_aggr=True))),
    case("DNAConv", lambda: _Layers(pyg.DNAConv(D, heads=2, groups=2, dropout=0.2))),
    case("PointNetConv", lambda: _Points(pyg.PointNetConv(mlp(D + 3), mlp(8))), _positions),
    case("GMMConv", lambda: pyg.GMMConv(D, 5, dim=2, kernel_size=3), _pseudo),
    case("GMMConv separate", lambda: pyg.GMMConv(D, 5, dim=2, kernel_size=3, separate_gaussians=True), _pseudo),
    case("NNConv", lambda: pyg.NNConv(D, 5, mlp(4, D * 5)), _attr),
    case("NNConv mean, learned edge features", lambda: pyg.NNConv(D, 5, mlp(4, D * 5), aggr="mean"), _learned_attr),
    case("CGConv", lambda: pyg.CGConv(D, 4, batch_norm=True), _attr),
    case("EdgeConv", lambda: pyg.EdgeConv(mlp(2 * D))),
    case(
        "EdgeConv batch norm",
        lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(2 * D, 8), nn.BatchNorm1d(8), nn.ReLU()), aggr="mean"),
    ),
    case("PPFConv", lambda: _Normals(pyg.PPFConv(mlp(D + 4), mlp(8))), _positions),
    case("FeaStConv", lambda: pyg.FeaStConv(D, 5, heads=2)),
    case("PointTransformerConv", lambda: _Points(pyg.PointTransformerConv(D, 5)), _positions),
    case("HypergraphConv", lambda: pyg.HypergraphConv(D, 5)),
    Case(
        "pyg",
        "HypergraphConv attention",
        lambda: (
            Named(pyg.HypergraphConv(D, 5, use_attention=True), "hyperedge_attr"),
            (features(), edges(), features(seed=3)[: int(edges()[1].max()) + 1].clone()),
        ),
        kinds=("node", "edge_index", "same"),
    ),
    case("LEConv", lambda: pyg.LEConv(D, 5), _weight),
    case(
        "PNAConv",
        lambda: pyg.PNAConv(
            D, 8, ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"], degrees(), towers=2
        ),
    ),
    case(
        "PNAConv edge features",
        lambda: pyg.PNAConv(
            D, 8, ["mean", "var", "sum"], ["identity", "linear", "inverse_linear"], degrees(), edge_dim=4
        ),
        _attr,
    ),
    case("ClusterGCNConv", lambda: pyg.ClusterGCNConv(D, 5, diag_lambda=0.1)),
    case("GENConv", lambda: pyg.GENConv(D, 5, learn_t=True)),
    case(
        "GENConv powermean",
        lambda: pyg.GENConv(D, 5, aggr="powermean", learn_p=True, msg_norm=True, learn_msg_scale=True, edge_dim=4),
        _attr,
    ),
    case("GCN2Conv", lambda: _WithX0(pyg.GCN2Conv(D, 0.1, 0.5, 1))),
    case("GCN2Conv own weights", lambda: _WithX0(pyg.GCN2Conv(D, 0.1, 0.5, 2, shared_weights=False)), _weight),
    Case(
        "pyg",
        "WLConv",
        lambda: (pyg.WLConv(), (types(3, 60), edges())),
        "not the same for every number of edges",
        slow=True,
    ),
    case("WLConvContinuous", lambda: pyg.WLConvContinuous(), _weight),
    case("FiLMConv", lambda: pyg.FiLMConv(D, 5)),
    case("FiLMConv relations", lambda: pyg.FiLMConv(D, 5, num_relations=3), _relations),
    case(
        "SuperGATConv",
        lambda: pyg.SuperGATConv(D, 5, heads=2, dropout=0.2, neg_sample_ratio=0.5),
        refusal="draws random numbers from random",
    ),
    case(
        "SuperGATConv negative edges given",
        lambda: pyg.SuperGATConv(D, 5, heads=2, attention_type="SD"),
        lambda: edges()[:, :120].flip(1),
    ),
    case("FAConv", lambda: _WithX0(pyg.FAConv(D, dropout=0.2))),
    case("EGConv", lambda: pyg.EGConv(D, 8, aggregators=["sum", "symnorm", "std", "max"], num_heads=4)),
    case("PDNConv", lambda: pyg.PDNConv(D, 5, 4, 6), _attr),
    case("GeneralConv", lambda: pyg.GeneralConv(D, 6)),
    case(
        "GeneralConv attention",
        lambda: pyg.GeneralConv(
            D, 6, in_edge_channels=4, heads=2, attention=True, attention_type="dot_product", l2_normalize=True
        ),
        _attr,
    ),
    case("LGConv", lambda: _Then(pyg.LGConv())),
    case("PointGNNConv", lambda: _Points(pyg.PointGNNConv(mlp(D, 3), mlp(D + 3), mlp(8))), _positions),
    case(
        "GPSConv",
        lambda: _Then(pyg.GPSConv(D, pyg.GCNConv(D, D), heads=2, dropout=0.2)),
        refusal="a dense product of all rows",
    ),
    case("GPSConv performer", lambda: _Then(pyg.GPSConv(D, pyg.GCNConv(D, D), heads=2, attn_type="performer"))),
    case("AntiSymmetricConv", lambda: pyg.AntiSymmetricConv(D, num_iters=2)),
    case("DirGNNConv", lambda: pyg.DirGNNConv(pyg.SAGEConv(D, 5))),
    case("DirGNNConv GATConv", lambda: pyg.DirGNNConv(pyg.GATConv(D, 5, add_self_loops=False))),
    case("MixHopConv", lambda: pyg.MixHopConv(D, 5)),
    case("MeshCNNConv", lambda: pyg.MeshCNNConv(D, 5), refusal="sizes of the graph are symbols"),
]
"""In the order of the documentation."""
