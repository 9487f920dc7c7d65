"""What a forward pass does with sizes as numbers, on graphs of other sizes than the capture's sample."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_support import Layer
from torch import Tensor, nn

import sylvie_fx
import sylvie_fx.capture.export


def data(nodes: int = 40, edges: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(nodes, 12, generator=generator, dtype=torch.float64)
    return x, torch.randint(nodes, (2, edges), generator=generator)


def spread(x: Tensor, e: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, e[1], x[e[0]])


USES: dict[str, Callable[[Layer, Tensor, Tensor], Any]] = {
    "float": lambda m, x, e: spread(m.a(x), e).sum(0) / float(x.size(0)),
    "sqrt": lambda m, x, e: spread(m.a(x), e) / math.sqrt(x.size(0)),
    "log of a sum": lambda m, x, e: m.a(x) * math.log(x.size(0) + e.size(1)),
    "quotient": lambda m, x, e: spread(m.a(x), e) * float(e.size(1) / x.size(0)),
    "tensor": lambda m, x, e: m.a(x) * torch.log(torch.tensor(float(x.size(0)))),
    "loop": lambda m, x, e: sum(m.a(x) * i for i in range(x.size(0) // 10)),
    "comparison": lambda m, x, e: spread(m.a(x), e) if x.size(0) > 100 else m.a(x),
    "power": lambda m, x, e: m.a(x) * x.size(0) ** -0.5,
    "entries": lambda m, x, e: m.a(x).sum() / x.numel(),
    "two sizes": lambda m, x, e: m.a(x) if e.size(1) == 5 * x.size(0) else spread(m.a(x), e),
    "divisible": lambda m, x, e: spread(m.a(x), e) if x.size(0) % 2 else m.a(x),
    "length of a table": lambda m, x, e: torch.zeros(int(x.size(0)), 4).double().index_add(0, e[1], m.a(x)[e[0]]),
    "rows of a mask": lambda m, x, e: m.a(x[e[0].bincount(minlength=x.size(0)) > 4]).sum(0)
    / float(x[e[0].bincount(minlength=x.size(0)) > 4].size(0)),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_sizes_as_numbers_are_exact(use: str) -> None:
    report = sylvie_fx.verify(Layer(USES[use]), *data(), parts=2, partition="random")
    assert report.exact, report


def test_one_model_on_graphs_of_several_sizes(caplog: pytest.LogCaptureFixture) -> None:
    model = Layer(lambda m, x, e: m.a(x) / math.sqrt(x.size(0)) if x.size(0) > 50 else m.a(x) * float(e.size(1)))
    net = sylvie_fx.distribute(model)
    with caplog.at_level(logging.INFO, "sylvie_fx"):
        for nodes in (40, 60, 40, 307):
            given = data(nodes)
            assert torch.allclose(net(*net.shard(*given)).local(), model(*given))
            # 307 nodes are as many as the sample has.
            assert ("captured again, on the whole graph: " in net.explain()) == (nodes != 307), net.explain()
    assert "captured again, on the whole graph" in caplog.text
    assert "the model is run" not in caplog.text  # sizes are known without running it


@pytest.mark.parametrize("nodes", [3, 9])
def test_a_graph_of_few_rows_where_the_pass_differs_for_fewer(nodes: int) -> None:
    def pairs(m: Layer, x: Tensor, e: Tensor) -> Tensor:
        return m.a(x) + (x[e[0]][1:] * x[e[1]][:-1]).sum()

    report = sylvie_fx.verify(Layer(pairs), *data(nodes, 20), parts=2, partition="random")
    assert report.exact, report


def test_batch_norm_on_few_rows() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.norm = nn.Linear(12, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor, e: Tensor) -> Tensor:
            return self.norm(spread(self.lin(x), e))

    report = sylvie_fx.verify(Normalised().double(), *data(5, 9), parts=2, partition="random")
    assert report.exact, report


REFUSED: dict[str, tuple[Callable[[Layer, Tensor, Tensor], Any], str]] = {
    "reshape": (lambda m, x, e: m.a(x).reshape(4, -1).sum(1), "the reshape mixes rows"),
    "fixed table": (lambda m, x, e: m.a(x) + torch.ones(307, 1).double(), "not the same for every number of nodes"),
    "other table": (lambda m, x, e: m.a(x) + torch.ones(60, 1).double(), "must match the size"),
    "single rows": (lambda m, x, e: sum(m.a(x)[i] for i in range(x.size(0) // 40)), "by its position"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_line(case: str) -> None:
    function, message = REFUSED[case]
    report = sylvie_fx.verify(Layer(function), *data(), parts=2)
    assert report.refused is not None
    assert message in report.refused
    assert "test_size_numbers.py:" in report.refused


def test_the_module_that_fixes_a_size_is_named() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer(REFUSED["other table"][0])

        def forward(self, x: Tensor, e: Tensor) -> Tensor:
            out: Tensor = self.inner(x, e)
            return out

    report = sylvie_fx.verify(Outer(), *data(), parts=2)
    assert report.refused is not None
    assert "in module 'inner'" in report.refused


def test_a_loop_over_nodes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sylvie_fx.capture.export, "MOST_CALLS", 50)
    report = sylvie_fx.verify(Layer(lambda m, x, e: sum(m.a(x) * i for i in range(x.size(0)))), *data(), parts=1)
    assert report.refused is not None
    assert "loops over nodes or edges" in report.refused
    assert "test_size_numbers.py:" in report.refused
