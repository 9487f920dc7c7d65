"""A ReLU becomes part of the dropout behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_support import compiled, graph
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.ir import ops


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8, dtype=torch.float64), nn.Linear(8, 3, dtype=torch.float64)
        self.between = between

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.between(self.first(x), self.training)
        sums = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
        return self.second(sums)


def behind_relu(h: Tensor, training: bool) -> Tensor:
    return nn.functional.dropout(torch.relu(h), 0.4, training)


def read_twice(h: Tensor, training: bool) -> Tensor:
    raised = torch.relu(h)
    return nn.functional.dropout(raised, 0.4, training) + raised


def in_front(h: Tensor, training: bool) -> Tensor:
    return torch.relu(nn.functional.dropout(h, 0.4, training))


@pytest.mark.parametrize(
    ("between", "relu", "fused"), [(behind_relu, 0, True), (read_twice, 1, False), (in_front, 1, False)]
)
def test_where_a_dropout_alone_reads_it(between: Callable[..., Tensor], relu: int, fused: bool) -> None:
    nodes = list(compiled(Net(between), *graph()).program("train").graph.nodes)
    assert sum(n.target is torch.ops.aten.relu.default for n in nodes) == relu
    assert [n.args[5:] for n in nodes if n.target is ops.node_dropout] == [(True,) if fused else ()]


@pytest.mark.parametrize("parts", [1, 3])
def test_it_is_exact(parts: int) -> None:
    model = Net(behind_relu)
    report = sylvie_fx.verify(model, *graph(), parts=parts, partition="random", steps=3)
    assert report.exact, report
