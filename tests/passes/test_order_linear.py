"""A linear layer stands on the side of aggregations where fewer columns are aggregated; the results stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exchange_models import Stack, Sum, compiled, graph
from pass_support import Layer, after, changes, check_parity, targets
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.ir import ops
from sylvie_fx.ir.program import Program, shape
from sylvie_fx.passes.order_linear import OrderLinear


def around(function: Any) -> str:
    """The products, aggregations and sums of a function's program after the pass, with their columns."""
    program = after(function, "order-linear")
    words = {"aten.linear": "linear", "sylvie.spmm": "spmm", "aten.add.Tensor": "add", "aten.div.Tensor": "div"}
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    named = zip(targets(program), nodes, strict=True)
    return " ".join(f"{words[name]}{shape(node)[1]}" for name, node in named if name in words)


def neighbours(h: Tensor, edges: Tensor) -> Tensor:
    return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])


def no_bias(layer: Layer, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, layer.a.weight)


def test_a_layer_goes_behind_what_is_aggregated_once() -> None:
    assert around(lambda layer, x, e: neighbours(no_bias(layer, x), e)) == "spmm12 linear4"


def test_a_layer_goes_in_front_of_a_wide_aggregation() -> None:
    hidden = lambda layer, x: torch.relu(layer.a(x))  # noqa: E731
    assert around(lambda layer, x, e: layer.b(neighbours(hidden(layer, x), e))) == "linear4 linear3 spmm3 add3"


def test_a_mean_written_as_a_quotient_moves_too() -> None:
    def function(layer: Layer, x: Tensor, e: Tensor) -> Tensor:
        total = neighbours(torch.relu(layer.a(x)), e)
        count = torch.zeros(x.shape[0], dtype=x.dtype).index_add(0, e[1], torch.ones(e.shape[1], dtype=x.dtype))
        return layer.b(total / count.clamp(min=1).unsqueeze(1).expand_as(total))

    assert around(function) == "linear4 linear3 spmm3 div3 add3"
    check_parity(function)


def test_a_sum_with_the_node_itself_moves_as_one() -> None:
    def function(layer: Layer, x: Tensor, e: Tensor) -> Tensor:
        h = torch.relu(layer.a(x))
        return layer.b(neighbours(h, e) + 1.5 * h)

    assert around(function) == "linear4 linear3 spmm3 add3 add3"
    check_parity(function)


def test_a_bias_behind_a_layer_becomes_part_of_it() -> None:
    assert around(lambda layer, x, e: neighbours(no_bias(layer, x), e) + layer.a.bias) == "spmm12 linear4"

    def function(layer: Layer, x: Tensor, e: Tensor) -> Tensor:
        return torch.relu(layer.a.bias + torch.mm(x, layer.a.weight.t()))

    found = targets(after(function, "order-linear"))
    assert (found.count("aten.addmm"), found.count("aten.mm"), found.count("aten.add.Tensor")) == (1, 0, 0)
    check_parity(function)


def test_several_hops_move_as_one() -> None:
    def function(layer: Layer, x: Tensor, e: Tensor) -> Tensor:
        return layer.b(neighbours(neighbours(torch.relu(layer.a(x)), e), e))

    assert around(function) == "linear4 linear3 spmm3 spmm3 add3"
    check_parity(function)


STAYS = {
    "a bias in front": lambda layer, x, e: neighbours(layer.a(x), e),
    "a bend between": lambda layer, x, e: layer.b(torch.relu(neighbours(torch.relu(layer.a(x)), e))),
    "a factor for each column": lambda layer, x, e: layer.b(neighbours(torch.relu(layer.a(x)), e) * layer.table[0]),
    "the aggregation is a result too": lambda layer, x, e: (lambda h: (layer.b(h), h))(
        neighbours(torch.relu(layer.a(x)), e)
    ),
    "two readers behind": lambda layer, x, e: (
        lambda h: (torch.relu(neighbours(h, e)), torch.tanh(neighbours(h.relu(), e)))
    )(no_bias(layer, x)),
    "no aggregation": lambda layer, x, e: layer.b(layer.a(x)),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_does_not_commute_stays(name: str) -> None:
    program = after(STAYS[name], "order-linear", before=True)
    assert not changes(OrderLinear(), program)


def test_a_value_that_is_not_kept_is_aggregated_at_every_step() -> None:
    program = after(lambda layer, x, e: neighbours(no_bias(layer, x), e), "order-linear", before=True)
    assert not changes(OrderLinear(keeps=False), program)
    assert changes(OrderLinear(), program)


def test_a_second_run_changes_nothing() -> None:
    program = after(lambda layer, x, e: layer.b(neighbours(torch.relu(no_bias(layer, x)), e)), "order-linear")
    assert not changes(OrderLinear(), program)


def widths(program: Program) -> list[int]:
    return [int(shape(n)[1]) for n in program.graph.nodes if n.target in (ops.spmm, ops.spmm_halo)]


def test_the_pass_can_be_left_out_and_results_stay() -> None:
    model = Stack(_NoBias(12, 6), _NoBias(6, 30), _NoBias(30, 3))
    without = sylvie_fx.default_passes().without("order-linear")
    assert widths(compiled(model, *graph(), passes=without).program("train")) == [6, 30, 3]
    assert widths(compiled(model, *graph()).program("train")) == [12, 6, 3]
    report = sylvie_fx.verify(model, *graph(), parts=3, partition="random", steps=2)
    assert report.exact, report


class _NoBias(nn.Module):
    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.sum = Sum(features, out)
        self.sum.linear.bias = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.sum(x, edge_index)


def test_no_layer_moves_in_front_of_an_exchange_whose_rows_may_be_old() -> None:
    class Narrow(nn.Module):
        """A layer that makes rows narrow, behind an aggregation of values that depend on parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(12, 64).double(), nn.Linear(64, 3).double()

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.last(neighbours(self.first(x).relu(), edge_index))

    def summed(**options: Any) -> list[int]:
        program = compiled(Narrow(), *graph(), **options).program("train")
        sums = (ops.spmm, ops.spmm_halo)
        return [int(shape(n)[1]) for n in program.graph.nodes if n.target in sums]

    assert summed() == [3]
    assert summed(staleness=1) == [64]
