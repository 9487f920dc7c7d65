"""Programs as they are after a pass, for the tests of one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from exchange_models import compiled, graph
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.ir.program import Program
from sylvie_fx.passes.base import Pass, PassContext


class Layer(nn.Module):
    """A function ``(layer, x, edge_index)`` of two linear layers, a vector and a table, as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(12, 4, dtype=torch.float64), nn.Linear(4, 3, dtype=torch.float64)
        self.table = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.function(self, x, edge_index)


def after(function: Callable[..., Any], name: str, *, before: bool = False) -> Program:
    """The program of a function after a pass of the default pipeline, or in front of it."""
    names = sylvie_fx.default_passes().names
    dropped = names[names.index(name) + (not before) :]
    passes = sylvie_fx.default_passes().without(*dropped)
    return compiled(Layer(function), *graph(), passes=passes).program("train")


def changes(one: Pass, program: Program) -> bool:
    """Whether a pass changes a program."""
    text = str(program)
    return str(one.run(program, PassContext())) != text


def targets(program: Program) -> list[str]:
    """The operators of the main graph in order."""
    from sylvie_fx.ir.printing import operator_name

    return [operator_name(n.target) for n in program.graph.nodes if n.op == "call_function"]


def check_parity(function: Callable[..., Any], steps: int = 1) -> None:
    """The distributed function equals the one on one device."""
    report = sylvie_fx.verify(
        Layer(function), *graph(), parts=3, partition="random", steps=steps,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05),
    )  # fmt: skip
    assert report.exact, report
