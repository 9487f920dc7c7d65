from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from sylvie_fx.ir import ops
from sylvie_fx.kernels.dropout import Drop
from sylvie_fx.runtime.aggregation import Aggregations, drawn_inside

NODES, EDGES = 9, 40


def ends() -> tuple[Tensor, Tensor]:
    source, target = torch.randint(NODES - 1, (2, EDGES), generator=torch.Generator().manual_seed(0)).unbind(0)
    return source, target


def values(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


SOURCE, TARGET = ends()
CALLS = {
    "spmm": (ops.spmm, (values(NODES, 2, 3), SOURCE, TARGET, values(EDGES, 2), NODES, "sum")),
    "extreme": (ops.spmm, (values(NODES, 4), SOURCE, TARGET, None, NODES, "amax")),
    "scatter": (ops.scatter, (values(EDGES, 4), TARGET, NODES, "mean", 0)),
    "scatter along columns": (ops.scatter, (values(3, EDGES), TARGET, NODES, "sum", 1)),
    "softmax": (ops.segment_softmax, (values(EDGES, 2, 1), TARGET, NODES)),
    "sddmm": (ops.sddmm, (values(NODES, 2, 3), SOURCE, values(NODES, 2, 3, seed=1), TARGET, "dot")),
    "scores": (
        ops.edge_scores,
        (values(NODES, 2, 3), SOURCE, values(NODES, 2, 3, seed=1), TARGET, values(1, 2, 3, seed=2), 0.2),
    ),
    "attention": (
        ops.attention,
        (
            values(NODES, 2, 3), SOURCE, TARGET, values(NODES, 2, 1, seed=1), values(NODES, 2, 1, seed=2),
            torch.rand(EDGES, 2, 1, dtype=torch.float64), NODES, 0.2,
        ),
    ),
}  # fmt: skip


CALLS["attention without heads"] = (
    ops.attention, (values(NODES, 3), SOURCE, TARGET, values(NODES, seed=1), values(NODES, seed=2), None, NODES, 0.2)
)  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_kernels_compute_what_the_operators_define(name: str) -> None:
    target, args = CALLS[name]
    node = fx.Graph().call_function(target, args)
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    found, expected = Aggregations().run(node, args), target(*args)
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, leaves, gradient), torch.autograd.grad(expected, leaves, gradient), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_attention_draws_a_mask_that_nothing_else_reads() -> None:
    x, src, dst, source, target, _, rows, slope = CALLS["attention"][1]
    drop = Drop(torch.arange(EDGES) + 5, 0.5, 3)
    mask = drop.mask(2).to(x.dtype).mul_(2).unsqueeze(2)
    args = (x, src, dst, source, target, drop, rows, slope)
    found = Aggregations().run(fx.Graph().call_function(ops.attention, args), args)
    torch.testing.assert_close(found, ops.attention(x, src, dst, source, target, mask, rows, slope))


def test_only_masks_of_ones_are_drawn_inside() -> None:
    def masks(second_reader: bool, p: float) -> list[str]:
        graph = fx.Graph()
        x, src, dst, s, t, keys = (graph.placeholder(n) for n in ("x", "src", "dst", "s", "t", "keys"))
        ones = graph.call_function(torch.ops.aten.full.default, ([EDGES, 2], 1))
        mask = graph.call_function(ops.node_dropout, (ones, keys, p, 0, 0))
        graph.call_function(ops.attention, (x, src, dst, s, t, mask, NODES, 0.2))
        other = graph.call_function(ops.node_dropout, (s, keys, p, 1, 0))
        graph.output((mask, other) if second_reader else other)
        return sorted(n.name for n in drawn_inside(graph))

    assert masks(False, 0.5) == ["full_default", "node_dropout_default"]
    assert masks(True, 0.5) == []
    assert masks(False, 1.0) == []


def test_integers_take_the_operator_itself() -> None:
    args = (torch.arange(EDGES), TARGET, NODES, "sum", 0)
    node = fx.Graph().call_function(ops.scatter, args)
    assert torch.equal(Aggregations().run(node, args), ops.scatter(*args))


def test_one_layout_serves_the_operators_of_a_graph() -> None:
    kernels = Aggregations()
    for name in ("spmm", "softmax", "sddmm", "attention"):
        target, args = CALLS[name]
        kernels.run(fx.Graph().call_function(target, args), args)
    assert len(kernels._layouts) == 1
