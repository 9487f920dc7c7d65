"""Every convolution of DGL, captured over symbolic sizes, against eager DGL on another graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import sylvie_fx.dgl  # noqa: F401  makes dgl importable

dgl = pytest.importorskip("dgl")

from dgl import function as fn  # noqa: E402
from dgl.nn import pytorch as dglnn  # noqa: E402

from sylvie_fx.capture.dgl_graph import StandInGraph  # noqa: E402
from sylvie_fx.capture.dgl_patches import patched_dgl  # noqa: E402
from sylvie_fx.ir.errors import CaptureError  # noqa: E402

pytestmark = pytest.mark.dgl
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

    def forward(
        self, src: Tensor, dst: Tensor, marker: Tensor, node: dict[str, Tensor], edge: dict[str, Tensor]
    ) -> Any:
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
    n, e = Dim("N", min=6), Dim("E", min=6)
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
    loss: Any = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in outputs if x.requires_grad
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters or not isinstance(loss, Tensor):
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


class Function(nn.Module):
    """A model that is one function of the graph and its node features, with a linear map to train."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.map, self.function = nn.Linear(D, D), function

    def forward(self, graph: Any, x: Tensor) -> Any:
        return self.function(graph, self.map(x))


def check_function(function: Callable[[Any, Tensor], Any], **kwargs: Any) -> StandInGraph:
    torch.manual_seed(4)
    return check(Function(function).double(), lambda m, g, n, e: m(g, n["x"]), dtype=torch.float64, **kwargs)


def refused(function: Callable[[Any, Tensor], Any]) -> str:
    with pytest.raises(CaptureError) as found:
        capture(Function(function), lambda m, g, n, e: m(g, n["x"]))
    return str(found.value)


# Message passing.


@pytest.mark.parametrize("message", ["copy_u", "u_add_v", "v_sub_u", "u_mul_e", "e_div_u", "u_dot_e", "e_dot_v"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_builtin_functions(message: str, reduce: str) -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        graph.ndata["h"], graph.edata["h"] = x.exp(), graph.edata["f"].exp()
        args = ("h", "m") if message.startswith("copy") else ("h", "h", "m")
        graph.update_all(getattr(fn, message)(*args), getattr(fn, reduce)("m", "out"))
        return graph.ndata["out"]

    check_function(forward)


def test_broadcast_of_heads() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        graph.ndata["h"], graph.edata["a"] = x.view(-1, 2, 2), graph.edata["w"]
        graph.update_all(fn.u_mul_e("h", "a", "m"), fn.sum("m", "h"))
        other = dgl.ops.u_mul_e_sum(graph, x, graph.edata["f"][:, :1])
        return graph.ndata["h"], other, dgl.ops.copy_e_mean(graph, graph.edata["f"])

    check_function(forward)


def test_message_function() -> None:
    def message(edges: Any) -> dict[str, Tensor]:
        src, dst, ids = edges.edges()
        assert edges.canonical_etype == ("_N", "_E", "_N")
        assert "w" in edges.data
        scale = (src - dst).abs() + 1 + ids - ids
        return {"m": torch.cat([edges.src["h"], edges.dst["h"]], -1).view(len(edges), 2, -1) / scale.view(-1, 1, 1)}

    def forward(graph: Any, x: Tensor) -> Any:
        graph.ndata["h"] = x
        graph.update_all(message, fn.mean("m", "h"), lambda nodes: {"h": nodes.data["h"].flatten(1) * 2, "k": x})
        graph.apply_edges(lambda edges: {"z": edges.src["h"] * edges.data["w"].unsqueeze(-1)})
        graph.apply_nodes(lambda nodes: {"h": nodes.data["h"] + nodes.data["k"].sum(-1, keepdim=True)})
        return graph.ndata["h"], graph.edata["z"], torch.ones(len(graph.nodes()), 1).to(x)

    check_function(forward)


REDUCERS: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "sum": lambda nodes: {"h": nodes.mailbox["m"].sum(1)},
    "sum-dim": lambda nodes: {"h": torch.sum(nodes.mailbox["m"], dim=1)},
    "mean-keepdim": lambda nodes: {"h": nodes.mailbox["m"].mean(dim=1, keepdim=True).squeeze(1)},
    "max": lambda nodes: {"h": torch.max(nodes.mailbox["m"], dim=1)[0]},
    "max-values": lambda nodes: {"h": nodes.mailbox["m"].max(1).values},
    "min-unpacked": lambda nodes: {"h": _first(*torch.min(nodes.mailbox["m"], 1))},
    "amax": lambda nodes: {"h": torch.amax(nodes.mailbox["m"], -2)},
    "bias": lambda nodes: {"h": nodes.mailbox["m"].sum(1) + 1.5},
    "own-data": lambda nodes: {"h": nodes.data["h"] * 0.5 + torch.relu(nodes.mailbox["m"]).mean(1)},
    "attention": lambda nodes: {
        "h": (torch.softmax((nodes.mailbox["m"] * nodes.data["h"].unsqueeze(1)).sum(-1), dim=1).unsqueeze(-1)
              * nodes.mailbox["m"]).sum(1)
    },
    "variance": lambda nodes: {
        "h": ((nodes.mailbox["m"] - nodes.mailbox["m"].mean(1, keepdim=True)) ** 2).mean(1)
    },
    "degree": lambda nodes: {"h": nodes.mailbox["m"].sum(1) / nodes.mailbox["m"].shape[1] ** 0.5},
    "two-mailboxes": lambda nodes: {
        "h": torch.cat([2 * nodes.mailbox["m"], nodes.mailbox["k"][:, :, :2]], dim=-1).sum(dim=1)
    },
    "nodes": lambda nodes: {"h": nodes.mailbox["m"].sum(1) + nodes.nodes().unsqueeze(-1), "n": _count(nodes)},
}  # fmt: skip


def _first(values: Tensor, positions: object) -> Tensor:
    return values


def _count(nodes: Any) -> Tensor:
    return torch.ones(nodes.batch_size(), 2)


@pytest.mark.parametrize("name", REDUCERS)
def test_reduce_function(name: str) -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        graph.ndata["h"] = x
        graph.update_all(lambda edges: {"m": edges.src["h"], "k": edges.data["f"]}, REDUCERS[name])
        return graph.ndata["h"]

    check_function(forward)


@pytest.mark.parametrize(
    ("reducer", "text"),
    [
        (lambda nodes: {"h": nodes.mailbox["m"][:, 0]}, "an index into the messages of a node"),
        (lambda nodes: {"h": torch.sort(nodes.mailbox["m"], dim=1)[0].sum(1)}, "sort over the messages of a node"),
        (lambda nodes: {"h": nodes.mailbox["m"].prod(1)}, "prod over the messages of a node"),
        (lambda nodes: {"h": nodes.mailbox["m"] * 2}, "'h' is not reduced"),
        (lambda nodes: {"h": nodes.mailbox["m"].sum()}, "sum over its whole mailbox"),
        (lambda nodes: {"h": nodes.mailbox["m"].view(-1, 4).sum(1)}, "a new shape of the mailbox"),
        (lambda nodes: {"h": nodes.data["h"]} if nodes.mailbox["m"].size(1) > 2 else {}, "the number of messages"),
        (lambda nodes: {"h": torch.max(nodes.mailbox["m"], dim=1)[1].float()}, "the position of a maximum"),
        (lambda nodes: {"h": torch.einsum("ndf->nf", nodes.mailbox["m"])}, "einsum on its mailbox"),
    ],
)
def test_refused_reduce_function(reducer: Callable[[Any], Any], text: str) -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        graph.ndata["h"] = x
        graph.update_all(fn.copy_u("h", "m"), reducer)
        return graph.ndata["h"]

    message = refused(forward)
    assert text in message
    assert "test_dgl_graph.py:" in message


def test_lstm_is_refused() -> None:
    model = dglnn.SAGEConv(D, 3, "lstm")
    with pytest.raises(CaptureError, match=r"sageconv\.py:\d+: .*lstm on its mailbox"):
        capture(model, lambda m, g, n, e: m(g, n["x"]))


@pytest.mark.parametrize(
    "function",
    [
        lambda g, x: g.pull([0], fn.copy_u("x", "m"), fn.sum("m", "h")),
        lambda g, x: g.send_and_recv([0], fn.copy_u("x", "m"), fn.sum("m", "h")),
        lambda g, x: g.adj(),
        lambda g, x: g.adj_external(scipy_fmt="csr"),
        lambda g, x: g.edge_subgraph([0]),
        lambda g, x: g.edges(order="srcdst"),
        lambda g, x: g.in_edges(0),
        lambda g, x: dgl.topk_nodes(g, "x", 3),
    ],
)
def test_refused_graph_operations(function: Callable[[Any, Tensor], Any]) -> None:
    message = refused(function)
    assert "can not be captured" in message
    assert "test_dgl_graph.py:" in message


# Frames and structure.


def test_scopes() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        with graph.local_scope():
            graph.ndata["h"] = x
            graph.edata["w"] = graph.edata["w"] * 2
            assert "h" in graph.ndata
            inner = graph.edata["w"]
        assert "h" not in graph.ndata
        copy = graph.local_var()
        copy.ndata["h"] = x
        assert "h" not in graph.ndata
        assert set(graph.edata) >= {"w", "f"}
        graph.ndata.update({"unscoped": x * 3})
        graph.nodes["_N"].data["t"] = x
        taken = graph.ndata.pop("t")
        return inner, graph.edata["w"], graph.ndata["unscoped"], taken, graph.edges["_E"].data["f"], graph.srcdata["x"]

    check_function(forward)


def test_structure() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        assert not graph.is_block
        assert graph.is_homogeneous
        assert (graph.ntypes, graph.etypes, graph.canonical_etypes) == (["_N"], ["_E"], [("_N", "_E", "_N")])
        assert (graph.srctypes, graph.dsttypes, graph.batch_size) == (["_N"], ["_N"], 1)
        graph = graph.to(x.device).formats(["coo", "csc"])
        graph.create_formats_()
        assert graph.idtype == torch.int64
        assert graph.int().idtype == torch.int32
        u, v, e = graph.edges(form="all", order="eid")
        sizes = graph.num_nodes() + graph.number_of_edges() + graph.num_src_nodes() + graph.number_of_dst_nodes()
        small = torch.tensor([0, 2])
        return (
            x * sizes, u, v, e, graph.all_edges("eid"), graph.nodes(), graph.has_nodes(small),
            graph.in_degrees(), graph.out_degrees(), graph.in_degrees(small), graph.out_degrees(small),
            *graph.find_edges(small), graph.int().in_degrees(),
        )  # fmt: skip

    check_function(forward)


def test_apply_on_subsets() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        few = torch.tensor([1, 3])
        graph.ndata["h"] = x
        graph.apply_edges(fn.u_add_v("h", "h", "s"), few)
        graph.apply_edges(lambda edges: {"t": edges.src["h"] * 2}, edges=few)
        graph.apply_nodes(lambda nodes: {"h": nodes.data["h"] * 3}, v=few)
        return graph.edata["s"], graph.edata["t"], graph.ndata["h"]

    check_function(forward)


@pytest.mark.parametrize(
    "transform",
    [
        lambda g: dgl.add_self_loop(g),
        lambda g: dgl.add_self_loop(g, ["f"], fill_data="mean"),
        lambda g: g.add_self_loop(),
        lambda g: dgl.remove_self_loop(g),
        lambda g: g.remove_self_loop().add_self_loop(),
        lambda g: dgl.reverse(g, copy_edata=True),
        lambda g: dgl.transforms.AddReverse(copy_edata=True)(g),
        lambda g: dgl.to_bidirected(g, copy_ndata=True),
        lambda g: dgl.to_simple(g, return_counts="n"),
        lambda g: dgl.add_edges(g, g.nodes()[:3], g.nodes()[:3]),
        lambda g: dgl.remove_edges(g, torch.tensor([1, 4])),
    ],
)
def test_transforms(transform: Callable[[Any], Any]) -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        graph = transform(graph)
        graph.ndata["h"] = x
        graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
        names = sorted(set(graph.edata) & {"w", "f", "kind", "n"})
        assert graph.ndata["x"].shape == x.shape
        return graph.ndata["h"], graph.in_degrees(), *graph.edges(), *(graph.edata[name] for name in names)

    check_function(forward)


def test_graph_built_in_forward() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        u, v = graph.edges()
        other = dgl.graph((v, u), num_nodes=graph.num_nodes())
        return dgl.ops.copy_u_sum(other, x), other.in_degrees()

    check_function(forward)
    assert "pass num_nodes" in refused(lambda g, x: dgl.graph(g.edges()).num_nodes() * x)


def test_readouts() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        graph.ndata["h"], graph.edata["h"] = x, graph.edata["f"]
        graph.ndata["a"] = x.sum(-1, keepdim=True)
        total = dgl.sum_nodes(graph, "h", "a")
        return (
            total,
            dgl.mean_nodes(graph, "h"), dgl.max_nodes(graph, "h"), dgl.readout_nodes(graph, "h", op="min"),
            dgl.softmax_nodes(graph, "h"), dgl.mean_edges(graph, "h"), dgl.softmax_edges(graph, "h"),
            dgl.broadcast_nodes(graph, total), dgl.broadcast_edges(graph, total),
        )  # fmt: skip

    check_function(forward)


def test_softmax_and_segments() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        f = graph.edata["f"]
        few = torch.tensor([0, 1, 2])
        lengths = torch.stack([torch.tensor(2), torch.tensor(0), torch.tensor(3)])
        return (
            dgl.nn.functional.edge_softmax(graph, f), dgl.ops.edge_softmax(graph, f, norm_by="src"),
            dgl.ops.edge_softmax(graph, f[:3], few), dgl.ops.segment_reduce(lengths, x[:5], "mean"),
            dgl.ops.gather_mm(x, torch.ones(3, D, 2).to(x), idx_b=graph.ndata["kind"]),
        )  # fmt: skip

    check_function(forward)


def test_multi_update_all() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        graph.ndata["h"] = x
        graph.multi_update_all({"_E": (fn.copy_u("h", "m"), fn.max("m", "out"))}, "sum")
        return graph.ndata["out"]

    check_function(forward)


# Promises.


def test_zero_degree_check_becomes_a_promise() -> None:
    model = dglnn.GraphConv(D, 3)
    _, stand_in, _ = capture(model, lambda m, g, n, e: m(g, n["x"]))
    assert len(stand_in.promises) == 1
    stand_in.run_promises(random_graph(9, 20, 1, covered=True))
    bare = random_graph(9, 20, 1)
    with pytest.raises(dgl.DGLError) as eager:
        model(bare, torch.zeros(9, D))
    with pytest.raises(dgl.DGLError) as promised:
        stand_in.run_promises(bare)
    assert str(promised.value) == str(eager.value)


def test_real_graph_decides() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        if (graph.in_degrees() == 0).any():
            graph = dgl.add_self_loop(graph)
        most = int(graph.in_degrees().max())
        return x * most + graph.in_degrees().unsqueeze(-1)

    call: Call = lambda m, g, n, e: m(g, n["x"])  # noqa: E731
    real = random_graph(37, 101, 5)
    module, stand_in, _ = capture(Function(forward), call, real=real)
    node, edge = inputs(real, 6, torch.float32)
    exported = module(*flat(real, node, edge))
    assert exported.shape == (37, D)
    assert [p.expected for p in stand_in.promises] == [True, int(dgl.add_self_loop(real).in_degrees().max())]
    stand_in.run_promises(real)
    with pytest.raises(CaptureError, match="capture again with this graph"):
        stand_in.run_promises(random_graph(9, 20, 1, covered=True))


def test_branch_that_only_raises_stays_as_an_assertion() -> None:
    call: Call = lambda m, g, n, e: m(g, e["w"] + torch.zeros(1))  # noqa: E731
    module, _, _ = capture(dglnn.EdgeWeightNorm("both"), call, covered=True)
    graph = random_graph(20, 40, 2, covered=True)
    node, edge = inputs(graph, 3, torch.float32)
    torch.testing.assert_close(module(*flat(graph, node, edge)), dglnn.EdgeWeightNorm("both")(graph, edge["w"]))
    with pytest.raises(RuntimeError, match="Non-positive edge weight"):
        module(*flat(graph, node, {**edge, "w": -edge["w"]}))


def test_watched_input_decides() -> None:
    graph = random_graph(11, 30, 0)
    seen = torch.zeros(30)
    src, dst = graph.edges()
    with patched_dgl():
        stand_in = StandInGraph(src, dst, 11, real=graph)
        stand_in.watch(seen, torch.ones(30))
        assert seen.min() == 1
        assert 1 in seen
    assert len(stand_in.promises) == 2


def test_patches_end() -> None:
    before = (dgl.reverse, dgl.ops.gspmm, dgl.nn.pytorch.linear.gather_mm, len, dglnn.GroupRevRes.forward)
    graph = random_graph(5, 9, 0)
    with patched_dgl():
        assert dgl.reverse is not before[0]
        assert dgl.reverse(graph).num_edges() == graph.num_edges()
    with pytest.raises(dgl.DGLError), patched_dgl():
        dglnn.GraphConv(D, 3)(graph, torch.zeros(5, D))
    assert before == (dgl.reverse, dgl.ops.gspmm, dgl.nn.pytorch.linear.gather_mm, len, dglnn.GroupRevRes.forward)
