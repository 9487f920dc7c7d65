"""Every convolution of DGL, captured over symbolic sizes, against eager DGL on another graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

pytestmark = pytest.mark.dgl

import sylvie_fx.dgl  # noqa: E402, F401

dgl = pytest.importorskip("dgl")

from dgl import function as fn  # noqa: E402
from dgl.nn import pytorch as dglnn  # noqa: E402

from sylvie_fx.capture.dgl_graph import StandInGraph  # noqa: E402
from sylvie_fx.capture.dgl_patches import patched_dgl  # noqa: E402
from sylvie_fx.ir.errors import CaptureError  # noqa: E402

D = 4
Call = Callable[[Any, Any, dict[str, Tensor], dict[str, Tensor]], Any]


def random_graph(nodes: int, edges: int, seed: int, covered: bool = False) -> Any:
    """A hub, an isolated node, self loops, parallel edges; ``covered``: each node has an in-edge."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(0, nodes - 1, (edges,), generator=generator)
    dst = torch.randint(0, nodes - 1, (edges,), generator=generator)
    hub, every = torch.zeros(nodes - 1, dtype=torch.long), torch.arange(nodes - 1)
    few = torch.tensor([1, 2, 2])
    src = torch.cat([src, every, src[:3], few])
    dst = torch.cat([dst, hub, dst[:3], few])
    if covered:
        src, dst = torch.cat([src, torch.arange(nodes)]), torch.cat([dst, torch.arange(nodes)])
    return dgl.graph((src, dst), num_nodes=nodes)


def inputs(graph: Any, seed: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    n, e = graph.num_nodes(), graph.num_edges()
    node = {"x": normal(n, D), "pos": normal(n, 3), "kind": torch.randint(0, 3, (n,), generator=generator)}
    edge = {
        "w": normal(e).abs() + 0.1,
        "f": normal(e, D),
        "kind": torch.randint(0, 3, (e,), generator=generator),
        "len": normal(e, 1).abs(),
    }
    return node, edge


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module, call: Call, real: Any = None) -> None:
        super().__init__()
        self.model, self.call, self.real = model, call, real
        self.graphs: list[Any] = []

    def forward(self, src: Tensor, dst: Tensor, marker: Tensor, node: dict[str, Tensor], edge: dict[str, Tensor]) -> Any:
        with patched_dgl():
            graph = StandInGraph(src, dst, marker, node, edge, real=self.real)
            result = self.call(self.model, graph, node, edge)
        _SEEN.append(graph)
        return result


_SEEN: list[Any] = []


def capture(
    model: nn.Module, call: Call, dtype: torch.dtype = torch.float32, covered: bool = False, real: Any = None
) -> tuple[nn.Module, StandInGraph, Any]:
    """The exported module, the stand-in that the model saw, and the exported program."""
    graph = random_graph(11, 30, 0, covered)
    node, edge = inputs(graph, 1, dtype)
    n, e = Dim("N", min=2), Dim("E", min=2)
    sizes = ({0: e}, {0: e}, {0: n}, {k: {0: n} for k in node}, {k: {0: e} for k in edge})
    _SEEN.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            Wrapper(model, call, real), flat(graph, node, edge), dynamic_shapes=sizes, strict=False
        )
    return program.module(), _SEEN[-1], program


def flat(graph: Any, node: dict[str, Tensor], edge: dict[str, Tensor]) -> tuple[Any, ...]:
    src, dst = graph.edges()
    return src, dst, torch.zeros(graph.num_nodes(), dtype=torch.bool), node, edge


def with_data(graph: Any, node: dict[str, Tensor], edge: dict[str, Tensor]) -> Any:
    graph.ndata.update(node)
    graph.edata.update(edge)
    return graph


def as_list(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [x for part in result for x in as_list(part)]


def gradients(outputs: list[Tensor], model: nn.Module, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in outputs)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        return []
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def check(model: nn.Module, call: Call, *, dtype: torch.dtype = torch.float32, covered: bool = False) -> StandInGraph:
    """Capture on one graph, compare on another of different size; returns the stand-in."""
    exported, stand_in, program = capture(model, call, dtype, covered)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name.startswith(("src", "dst", "marker", "node", "edge")):
            assert isinstance(node.meta["val"].shape[0], torch.SymInt), node
    graph = random_graph(37, 101, 5, covered)
    node_data, edge_data = inputs(graph, 6, dtype)
    ours = as_list(exported(*flat(graph, node_data, edge_data)))
    theirs = as_list(call(model, with_data(graph, node_data, edge_data), node_data, edge_data))
    assert len(ours) == len(theirs)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **tolerance)
    for mine, other in zip(gradients(ours, model, 7), gradients(theirs, model, 7), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5) if dtype == torch.float32 else (
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)
        )
    return stand_in


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    call: Call = lambda m, g, n, e: m(g, n["x"])
    covered: bool = False
    float64: bool = False
    known: tuple[str, ...] = field(default=())


def mlp(i: int, o: int) -> nn.Module:
    return nn.Sequential(nn.Linear(i, 5), nn.ReLU(), nn.Linear(5, o))


WEIGHTED: Call = lambda m, g, n, e: m(g, n["x"], edge_weight=e["w"])  # noqa: E731
WITH_F: Call = lambda m, g, n, e: m(g, n["x"], e["f"])  # noqa: E731
KINDS: Call = lambda m, g, n, e: m(g, n["x"], e["kind"])  # noqa: E731

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
        f"GMMConv-{kind}": Case(
            lambda kind=kind: dglnn.GMMConv(D, 3, D, 2, kind, allow_zero_in_degree=True), WITH_F
        )
        for kind in ("sum", "mean", "max")
    },
    "ChebConv": Case(lambda: dglnn.ChebConv(D, 3, 3)),
    "ChebConv-lambda": Case(lambda: dglnn.ChebConv(D, 3, 3), lambda m, g, n, e: m(g, n["x"], lambda_max=[1.7])),
    "TAGConv": Case(lambda: dglnn.TAGConv(D, 3, 2)),
    "TAGConv-weighted": Case(lambda: dglnn.TAGConv(D, 3, 2), WEIGHTED, covered=True),
    "SGConv": Case(lambda: dglnn.SGConv(D, 3, 2, allow_zero_in_degree=True)),
    "SGConv-cached": Case(lambda: dglnn.SGConv(D, 3, 2, cached=True, allow_zero_in_degree=True)),
    "APPNPConv": Case(lambda: dglnn.APPNPConv(3, 0.1)),
    "APPNPConv-weighted": Case(lambda: dglnn.APPNPConv(3, 0.1), WEIGHTED, covered=True),
    "AGNNConv": Case(lambda: dglnn.AGNNConv(allow_zero_in_degree=True)),
    "DotGatConv": Case(lambda: dglnn.DotGatConv(D, 3, 2, allow_zero_in_degree=True)),
    "GatedGraphConv": Case(lambda: dglnn.GatedGraphConv(D, 5, 2, 1)),
    "GatedGraphConv-typed": Case(
        lambda: dglnn.GatedGraphConv(D, 5, 2, 3), lambda m, g, n, e: m(g, n["x"], g.edata["kind"])
    ),
    "GatedGCNConv": Case(lambda: dglnn.GatedGCNConv(D, D, D, dropout=0.0), WITH_F),
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
            ["mean", "max", "min", "sum", "std", "var", "moment3"],
            ["identity", "amplification", "attenuation"],
            2.5,
            num_towers=2,
            edge_feat_size=D,
        ),
        WITH_F,
    ),
    "DGNConv": Case(
        lambda: dglnn.DGNConv(D, D, ["dir1-av", "dir1-dx", "sum"], ["identity", "amplification"], 2.5),
        lambda m, g, n, e: m(g, n["x"], eig_vec=n["pos"]),
    ),
    "EGNNConv": Case(
        lambda: dglnn.EGNNConv(D, 5, 3, D), lambda m, g, n, e: m(g, n["x"], n["pos"], e["f"])
    ),
    "GroupRevRes": Case(
        lambda: dglnn.GroupRevRes(dglnn.GraphConv(2, 2, allow_zero_in_degree=True), 2),
        lambda m, g, n, e: m._forward(g, n["x"]) if not isinstance(g, StandInGraph) else m(g, n["x"]),
    ),
    "TWIRLSConv": Case(
        lambda: dglnn.TWIRLSConv(D, 3, 5, 2, dropout=0.0, attention=True, tau=0.2, T=-1, p=1, use_eta=False, attn_bef=True)
        if False
        else dglnn.TWIRLSConv(D, 3, 5, 2, dropout=0.0, inp_dropout=0.0)
    ),
    "TWIRLSConv-attention": Case(
        lambda: dglnn.TWIRLSConv(D, 3, 5, 2, dropout=0.0, inp_dropout=0.0, attention=True)
    ),
    "DenseFree-SumPooling": Case(dglnn.SumPooling),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_convolution(name: str, mode: str) -> None:
    torch.manual_seed(3)
    case = CASES[name]
    model = case.make()
    model.train(mode == "train")
    check(model, case.call, covered=case.covered)
