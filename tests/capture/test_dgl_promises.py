"""What a capture takes for granted of the graph is checked on the real one; patches end with the capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dgl_support import Call, D, Function, capture, dgl, flat, inputs, random_graph
from torch import Tensor

from dgl.nn import pytorch as dglnn  # isort: skip

from sylvie_fx.capture.dgl_graph import StandInGraph
from sylvie_fx.capture.dgl_patches import patched_dgl
from sylvie_fx.ir.errors import CaptureError

pytestmark = pytest.mark.dgl


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
