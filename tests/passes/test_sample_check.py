from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from exchange_models import Stack, Sum, compiled, graph
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.ir.errors import VerifyError
from sylvie_fx.ir.program import Program


@dataclass(frozen=True)
class Break(sylvie_fx.Pass):
    """Turns every ReLU into a tanh."""

    name: ClassVar[str] = "break"

    def run(self, program: Program, context: sylvie_fx.PassContext) -> Program:
        for node in program.graph.nodes:
            if node.target is torch.ops.aten.relu.default:
                node.target = torch.ops.aten.tanh.default
        return program


def test_a_pass_that_changes_the_meaning_is_found() -> None:
    model = Stack(Sum(12, 8), Sum(8, 4))
    with pytest.raises(VerifyError, match="result 0 of the program on the sample"):
        compiled(model, *graph(), passes=sylvie_fx.default_passes().insert_before("sample-check", Break()))


def test_a_table_that_is_smaller_than_the_sample_is_no_fault() -> None:
    class Ids(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(40, 3, dtype=torch.float64)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.table(torch.arange(x.size(0))) + x[:, :3]

    report = sylvie_fx.verify(Ids(), *graph(), parts=3, partition="random")
    assert report.exact, report


def test_writes_into_views_of_views_reach_the_memory() -> None:
    class Chain(nn.Module):
        """Written as PyG's coalesce writes its keys: in place, on the result of an in-place operator on a slice."""

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            keys = x.new_empty(x.size(0), 5)
            keys[:, 0] = -1.0
            keys[:, 1:] = x[:, :4]
            keys[:, 1:].mul_(2.0).add_(x[:, 4:8])
            return keys

    report = sylvie_fx.verify(Chain(), *graph(), parts=3, partition="random")
    assert report.exact, report
