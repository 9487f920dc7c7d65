"""DGL models captured over symbolic sizes, against eager DGL on another graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import sylvie_fx.dgl  # noqa: F401  makes dgl importable

dgl = pytest.importorskip("dgl")


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
