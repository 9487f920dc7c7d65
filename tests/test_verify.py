"""verify() finds what is wrong, says what is refused, and compares dropout with the same masks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.ir import ops
from sylvie_fx.ir.program import Program
from sylvie_fx.verify import relative_difference

NODES, EDGES = 20, 60


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # No bias in front of the norm: its gradient is zero but for rounding, of which Adam makes a step.
        self.one, self.norm, self.two = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = F.dropout(self.norm(self.one(x)), 0.3, self.training)
        h = torch.zeros_like(h).index_add(0, edge_index[1], F.dropout(h[edge_index[0]], 0.2, self.training)).relu()
        h = self.two(h)
        return torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(NODES, 4, dtype=torch.float64), torch.randint(0, NODES, (2, EDGES))


@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("partition", ["metis", "random"])
def test_dropout_and_batch_norm_are_exact(parts: int, partition: str, data: tuple[Tensor, Tensor]) -> None:
    report = sylvie_fx.verify(Net().double(), *data, parts=parts, partition=partition, steps=3)
    assert report.exact, str(report)
    assert {"loss 0", "loss 2", "gradient one.weight", "buffer norm.running_mean"} <= set(report.per_tensor)
    assert str(report).startswith(f"exact on {parts} parts: largest relative difference ")
    assert (report.bytes_sent > 0) is (parts > 1)


def test_eval_mode_and_the_model_is_not_changed(data: tuple[Tensor, Tensor]) -> None:
    model = Net().double().eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    report = sylvie_fx.verify(model, *data, parts=3)
    assert report.exact, str(report)
    assert "program eval" in report.program
    torch.testing.assert_close(model.state_dict(), before)
    assert not model.training


def test_twenty_steps_of_adam_in_float32(data: tuple[Tensor, Tensor]) -> None:
    x, edge_index = data
    report = sylvie_fx.verify(Net(), x.float(), edge_index, parts=4, partition="random", steps=20)
    assert report.largest < 1e-4, str(report)


def test_a_pass_that_breaks_the_program_is_found(data: tuple[Tensor, Tensor]) -> None:
    @dataclass(frozen=True)
    class Forget(sylvie_fx.Pass):
        """Leave out the sum over ranks of a reduction."""

        name: ClassVar[str] = "forget"

        def run(self, program: Program, context: Any) -> Program:
            for node in list(program.graph.nodes):
                if node.target is ops.all_reduce:
                    node.replace_all_uses_with(node.args[0])
                    program.graph.erase_node(node)
            return program

    passes = sylvie_fx.default_passes().without("sample-check").insert_after("global-reductions", Forget())
    report = sylvie_fx.verify(Net().double(), *data, parts=2, partition="random", passes=passes)
    assert not report.exact
    assert report.largest > 1e-3
    assert "NOT exact" in str(report)


def test_refusal(data: tuple[Tensor, Tensor]) -> None:
    class Dense(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return torch.softmax(x @ x.T, dim=1) @ super().forward(x, edge_index)

    report = sylvie_fx.verify(Dense().double(), *data, parts=2)
    assert report.refused is not None
    assert "test_verify.py:" in report.refused
    assert not report.exact
    assert report.largest == float("inf")
    assert str(report).startswith("refused: ")


def test_errors_of_the_model_itself_are_named(data: tuple[Tensor, Tensor]) -> None:
    class Broken(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            raise ValueError("no such thing")

    report = sylvie_fx.verify(Broken().double(), *data, parts=2)
    assert re.search(r"test_verify.py:\d+: .*ValueError: no such thing", report.refused or "")


@pytest.mark.parametrize(("expected", "found", "difference"), [
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0.25),
    (torch.tensor([float("nan")]), torch.tensor([float("nan")]), 0.0),
    (torch.zeros(2), None, 0.0),
    (torch.ones(2), None, float("inf")),
    (None, None, 0.0),
    (torch.ones(2), torch.ones(3), float("inf")),
    (torch.zeros(0), torch.zeros(0), 0.0),
])  # fmt: skip
def test_relative_difference(expected: Tensor | None, found: Tensor | None, difference: float) -> None:
    assert relative_difference(expected, found) == difference


def test_buffers_are_compared_before_adam_turns_rounding_into_steps() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)  # the bias has no gradient but rounding

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.norm(
                torch.zeros_like(x).index_add(0, edge_index[1], self.lin(x)[edge_index[0]]) + self.lin(x)
            )
            return out

    x = torch.randn(30, 4, dtype=torch.float64)
    report = sylvie_fx.verify(
        Normalised().double(), x, torch.randint(30, (2, 90)), parts=3, partition="random", steps=5
    )
    assert report.per_tensor["buffer norm.running_mean"] < 1e-12
    assert max(v for k, v in report.per_tensor.items() if k.startswith("buffer")) < 1e-12
