"""Every convolution of DGL is captured and equals eager DGL on another graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from dgl_support import Call, D, check
from torch import nn

from dgl.nn import pytorch as dglnn  # isort: skip

from sylvie_fx.capture.dgl_graph import StandInGraph

pytestmark = pytest.mark.dgl


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    call: Call = lambda m, g, n, e: m(g, n["x"])
    covered: bool = False
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float64)  # train, eval


def mlp(i: int, o: int) -> nn.Module:
    return nn.Sequential(nn.Linear(i, 5), nn.ReLU(), nn.Linear(5, o))


WEIGHTED: Call = lambda m, g, n, e: m(g, n["x"], edge_weight=e["w"])  # noqa: E731
WITH_F: Call = lambda m, g, n, e: m(g, n["x"], e["f"])  # noqa: E731
KINDS: Call = lambda m, g, n, e: m(g, n["x"], e["kind"])  # noqa: E731
SINGLE = (torch.float32, torch.float32)  # DGL's own forward makes float32 tensors

CASES = {
    **{
        f"GraphConv-{norm}": Case(lambda norm=norm: dglnn.GraphConv(D, 3, norm=norm, allow_zero_in_degree=True))
        for norm in ("none", "both", "right", "left")
    },
    "GraphConv-wide": Case(lambda: dglnn.GraphConv(D, 9, allow_zero_in_degree=True, activation=torch.relu)),
    "GraphConv-checked": Case(lambda: dglnn.GraphConv(D, 3), covered=True),
    "GraphConv-weighted": Case(lambda: dglnn.GraphConv(D, 3, norm="none", allow_zero_in_degree=True), WEIGHTED),
    **{
        f"EdgeWeightNorm-{norm}": Case(
            lambda norm=norm: dglnn.EdgeWeightNorm(norm), lambda m, g, n, e: m(g, e["w"]), covered=True
        )
        for norm in ("both", "right", "none")
    },
    **{f"SAGEConv-{kind}": Case(lambda kind=kind: dglnn.SAGEConv(D, 3, kind)) for kind in ("mean", "pool", "gcn")},
    "SAGEConv-narrow": Case(lambda: dglnn.SAGEConv(D, 7, "mean")),
    "SAGEConv-weighted": Case(lambda: dglnn.SAGEConv(D, 3, "mean"), WEIGHTED),
    **{
        f"GINConv-{kind}": Case(lambda kind=kind: dglnn.GINConv(mlp(D, 3), kind, learn_eps=True))
        for kind in ("sum", "mean", "max")
    },
    "GINEConv": Case(lambda: dglnn.GINEConv(mlp(D, 3), learn_eps=True), WITH_F),
    "GATConv": Case(lambda: dglnn.GATConv(D, 3, 2, residual=True, allow_zero_in_degree=True)),
    "GATConv-checked": Case(lambda: dglnn.GATConv(D, 3, 2), covered=True),
    "GATConv-attention": Case(
        lambda: dglnn.GATConv(D, 3, 2, allow_zero_in_degree=True),
        lambda m, g, n, e: m(g, n["x"], edge_weight=e["w"], get_attention=True),
    ),
    "GATv2Conv": Case(lambda: dglnn.GATv2Conv(D, 3, 2, residual=True, allow_zero_in_degree=True)),
    "EGATConv": Case(lambda: dglnn.EGATConv(D, D, 3, 2, 2), WITH_F, covered=True),
    "EdgeGATConv": Case(lambda: dglnn.EdgeGATConv(D, D, 3, 2, allow_zero_in_degree=True), WITH_F),
    "EdgeConv": Case(lambda: dglnn.EdgeConv(D, 3, allow_zero_in_degree=True)),
    "EdgeConv-batchnorm": Case(lambda: dglnn.EdgeConv(D, 3, batch_norm=True, allow_zero_in_degree=True)),
    **{
        f"NNConv-{kind}": Case(lambda kind=kind: dglnn.NNConv(D, 3, nn.Linear(D, D * 3), kind, residual=True), WITH_F)
        for kind in ("sum", "mean", "max")
    },
    "CFConv": Case(lambda: dglnn.CFConv(D, D, 3, 2), WITH_F),
    **{
        f"GMMConv-{kind}": Case(lambda kind=kind: dglnn.GMMConv(D, 3, D, 2, kind, allow_zero_in_degree=True), WITH_F)
        for kind in ("sum", "mean", "max")
    },
    "ChebConv": Case(lambda: dglnn.ChebConv(D, 3, 3)),
    "ChebConv-lambda": Case(lambda: dglnn.ChebConv(D, 3, 3), lambda m, g, n, e: m(g, n["x"], lambda_max=[1.7])),
    "TAGConv": Case(lambda: dglnn.TAGConv(D, 3, 2)),
    "TAGConv-weighted": Case(lambda: dglnn.TAGConv(D, 3, 2), WEIGHTED, covered=True),
    "SGConv": Case(lambda: dglnn.SGConv(D, 3, 2, allow_zero_in_degree=True)),
    "SGConv-cached": Case(lambda: dglnn.SGConv(D, 3, 2, cached=True, allow_zero_in_degree=True)),
    "APPNPConv": Case(lambda: dglnn.APPNPConv(3, 0.1), dtypes=SINGLE),
    "APPNPConv-weighted": Case(lambda: dglnn.APPNPConv(3, 0.1), WEIGHTED, covered=True),
    "AGNNConv": Case(lambda: dglnn.AGNNConv(allow_zero_in_degree=True)),
    "DotGatConv": Case(lambda: dglnn.DotGatConv(D, 3, 2, allow_zero_in_degree=True)),
    "GatedGraphConv": Case(lambda: dglnn.GatedGraphConv(D, 5, 2, 1)),
    "GatedGraphConv-typed": Case(
        lambda: dglnn.GatedGraphConv(D, 5, 2, 3), lambda m, g, n, e: m(g, n["x"], g.edata["kind"])
    ),
    "GCN2Conv": Case(
        lambda: dglnn.GCN2Conv(D, 1, allow_zero_in_degree=True), lambda m, g, n, e: m(g, n["x"], n["x"] + 1)
    ),
    "GCN2Conv-weighted": Case(
        lambda: dglnn.GCN2Conv(D, 1, project_initial_features=False, allow_zero_in_degree=True),
        lambda m, g, n, e: m(g, n["x"], n["x"] + 1, edge_weight=e["w"]),
        covered=True,
    ),
    "AtomicConv": Case(
        lambda: dglnn.AtomicConv(torch.tensor([2.0, 3.0]), torch.tensor([0.5, 1.0]), torch.tensor([1.0, 2.0])),
        lambda m, g, n, e: m(g, n["x"][:, :1], e["len"]),
    ),
    "AtomicConv-features": Case(
        lambda: dglnn.AtomicConv(
            torch.tensor([2.0, 3.0]), torch.tensor([0.5, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0])
        ),
        lambda m, g, n, e: m(g, n["kind"].unsqueeze(-1).to(n["x"]), e["len"]),
    ),
    "RelGraphConv": Case(lambda: dglnn.RelGraphConv(D, 6, 3, layer_norm=True), KINDS),
    "RelGraphConv-many": Case(lambda: dglnn.RelGraphConv(D, 6, 40), KINDS),
    "RelGraphConv-basis": Case(lambda: dglnn.RelGraphConv(D, 6, 3, "basis", 2), KINDS),
    "RelGraphConv-bdd": Case(
        lambda: dglnn.RelGraphConv(D, 6, 3, "bdd", 2), lambda m, g, n, e: m(g, n["x"], e["kind"], e["w"].unsqueeze(-1))
    ),
    "HGTConv": Case(
        lambda: dglnn.HGTConv(D, 3, 2, 3, 3, dropout=0.0, use_norm=True),
        lambda m, g, n, e: m(g, n["x"], n["kind"], e["kind"]),
    ),
    "PNAConv": Case(
        lambda: dglnn.PNAConv(
            D,
            D,
            ["mean", "max", "min", "sum", "std", "var", "moment4"],
            ["identity", "amplification", "attenuation"],
            2.5,
            num_towers=2,
            edge_feat_size=D,
        ),
        WITH_F,
        dtypes=(torch.float64, torch.float64),  # roots of variances that vanish for nodes with one message
    ),
    "DGNConv": Case(
        lambda: dglnn.DGNConv(D, D, ["dir1-av", "dir1-dx", "sum"], ["identity", "amplification"], 2.5),
        lambda m, g, n, e: m(g, n["x"], eig_vec=n["pos"]),
    ),
    "EGNNConv": Case(lambda: dglnn.EGNNConv(D, 5, 3, D), lambda m, g, n, e: m(g, n["x"], n["pos"], e["f"])),
    "GroupRevRes": Case(
        lambda: dglnn.GroupRevRes(dglnn.GraphConv(2, 2, allow_zero_in_degree=True), 2),
        lambda m, g, n, e: m._forward(g, n["x"]) if not isinstance(g, StandInGraph) else m(g, n["x"]),
    ),
    "TWIRLSConv": Case(lambda: dglnn.TWIRLSConv(D, 3, 5, 2, dropout=0.0, inp_dropout=0.0), dtypes=SINGLE),
    "TWIRLSConv-attention": Case(
        lambda: dglnn.TWIRLSConv(D, 3, 5, 2, dropout=0.0, inp_dropout=0.0, attention=True), dtypes=SINGLE
    ),
    **{f"{kind}Pooling": Case(lambda kind=kind: getattr(dglnn, f"{kind}Pooling")()) for kind in ("Sum", "Avg", "Max")},
    "GlobalAttentionPooling": Case(
        lambda: dglnn.GlobalAttentionPooling(nn.Linear(D, 1), nn.Linear(D, 3)),
        lambda m, g, n, e: m(g, n["x"], get_attention=True),
    ),
    "WeightAndSum": Case(lambda: dglnn.WeightAndSum(D)),
    "Set2Set": Case(lambda: dglnn.Set2Set(D, 2, 1)),
    "HeteroGraphConv": Case(
        lambda: dglnn.HeteroGraphConv({"_E": dglnn.SAGEConv(D, 3, "mean")}),
        lambda m, g, n, e: m(g, {"_N": n["x"]})["_N"],
    ),
}
if hasattr(dglnn, "GatedGCNConv"):  # DGL 2
    CASES["GatedGCNConv"] = Case(lambda: dglnn.GatedGCNConv(D, D, D, dropout=0.0), WITH_F)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_convolution(name: str, mode: str) -> None:
    torch.manual_seed(3)
    case = CASES[name]
    dtype = case.dtypes[mode == "eval"]
    model = case.make().to(dtype).train(mode == "train")
    check(model, case.call, dtype=dtype, covered=case.covered)
