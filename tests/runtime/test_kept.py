"""Kept values are computed once for the same inputs, and a user can not spoil them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.kernels import aggregate

NODES = 30
GENERATOR = torch.Generator().manual_seed(0)
X, EDGES = torch.randn(NODES, 6, generator=GENERATOR), torch.randint(NODES, (2, 120), generator=GENERATOR)


def neighbours(h: Tensor, edges: Tensor) -> Tensor:
    return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])


class Net(nn.Module):
    """Returns a layer of the aggregated inputs, and these."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        h = neighbours(x, edge_index)
        return self.linear(h), h.view(-1, 2, 3)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    real = aggregate.spmm

    def counted(layout: Any, x: Tensor, weight: Tensor | None = None, reduce: Any = "sum") -> Tensor:
        found.append(reduce)
        return real(layout, x, weight, reduce)

    monkeypatch.setattr(aggregate, "spmm", counted)
    return found


def test_an_aggregation_of_inputs_runs_once(calls: list[str]) -> None:
    model = Net()
    net = sylvie_fx.distribute(copy.deepcopy(model))
    x, edges = net.shard(X.clone(), EDGES)
    for _ in range(3):
        out, _ = net(x, edges)
        out.sum().backward()
    assert len(calls) == 1
    expected = model(X, EDGES)[0]
    torch.testing.assert_close(out.full(), expected)
    for _ in range(3):
        expected = model(X, EDGES)[0]
        expected.sum().backward()
    torch.testing.assert_close(net.linear.weight.grad, model.linear.weight.grad)


def test_changed_and_other_inputs_are_aggregated_again(calls: list[str]) -> None:
    model = Net()
    net = sylvie_fx.distribute(copy.deepcopy(model))
    x, edges = net.shard(X.clone(), EDGES)
    net(x, edges)
    with torch.no_grad():
        x.mul_(2.0)
    torch.testing.assert_close(net(x, edges)[0].full(), model(2 * X, EDGES)[0])
    torch.testing.assert_close(net(x * 0.5, edges)[0].full(), model(X, EDGES)[0])
    assert len(calls) == 3


def test_writing_into_a_result_changes_no_other() -> None:
    model = Net()
    net = sylvie_fx.distribute(copy.deepcopy(model))
    x, edges = net.shard(X.clone(), EDGES)
    first = net(x, edges)[1]
    second = net(x, edges)[1]
    with torch.no_grad():
        second.mul_(3.0)
    expected = model(X, EDGES)
    for found in (first, *reversed(net(x, edges))):
        torch.testing.assert_close(found.full(), expected[int(found.dim() == 3)])


def test_inference_mode_leaves_nothing_behind_that_training_can_not_use(calls: list[str]) -> None:
    net = sylvie_fx.distribute(Net())
    x, edges = net.shard(X.clone(), EDGES)
    with torch.inference_mode():
        net(x, edges)
    net(x, edges)[0].sum().backward()
    assert len(calls) == 2


def test_without_the_pass_every_step_aggregates(calls: list[str]) -> None:
    net = sylvie_fx.distribute(Net(), passes=sylvie_fx.default_passes().without("keep-aggregations"))
    x, edges = net.shard(X.clone(), EDGES)
    for _ in range(3):
        net(x, edges)
    assert len(calls) == 3
