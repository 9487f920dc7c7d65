"""Which values are kept from one step to the next."""

from __future__ import annotations

from typing import Any

import torch
from pass_support import Layer, after, changes
from torch import Tensor

from sylvie_fx.ir.program import Program, meta
from sylvie_fx.passes.keep_aggregations import KeepAggregations
from sylvie_fx.report.explain import aggregation_text


def neighbours(h: Tensor, edges: Tensor) -> Tensor:
    return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])


def kept(program: Program) -> list[str]:
    return [n.name for n in program.graph.nodes if meta(n).kept]


def marked(function: Any) -> Program:
    return after(function, "keep-aggregations")


def test_the_last_value_of_inputs_alone_is_kept() -> None:
    program = marked(lambda layer, x, e: layer.a(torch.tanh(neighbours(neighbours(x, e), e))))
    assert kept(program) == ["tanh"]
    lines = aggregation_text(program).splitlines()[1:]
    assert [line.endswith("once for the same inputs") for line in lines] == [True, True]


def test_what_a_parameter_or_a_mask_is_in_is_not() -> None:
    def function(layer: Layer, x: Tensor, e: Tensor) -> Tensor:
        return neighbours(torch.nn.functional.dropout(x, 0.5), e).sum() + neighbours(layer.a(x), e).sum()

    assert kept(marked(function)) == []
    assert "once" not in aggregation_text(marked(function))


def test_what_is_cheap_to_compute_is_not() -> None:
    assert kept(marked(lambda layer, x, e: layer.a(torch.tanh(x)))) == []


def test_a_second_run_changes_nothing() -> None:
    program = marked(lambda layer, x, e: layer.a(neighbours(x, e)))
    before = kept(program)
    assert not changes(KeepAggregations(), program)
    assert kept(program) == before != []
