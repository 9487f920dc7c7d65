from __future__ import annotations

from typing import Any

import pytest
from pass_support import after, changes, check_parity, targets
from torch import Tensor

from sylvie_fx.passes.merge_reductions import MergeReductions


def mean_of_all(layer: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    h = layer.a(x)
    return h.sum() / h.square().sum()


def one_sum_needs_another(layer: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    h = layer.a(x)
    return (h * h.sum()).sum()


def one_sum_goes_back_to_the_rows(layer: Any, x: Tensor, edge_index: Tensor) -> Any:
    h = layer.a(x)
    total, squares = h.sum(0), h.square().sum(0)
    return h - total * squares.rsqrt(), total


def a_term_of_the_parameters(layer: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return layer.a(x).sum() * layer.table.norm() + layer.a(x).square().sum()


def two_results_of_one_sum(layer: Any, x: Tensor, edge_index: Tensor) -> Any:
    total = layer.a(x).square().sum(0)
    return total.sqrt(), total.sum() * layer.table.norm()


def reductions(function: Any) -> list[str]:
    program = after(function, "merge-reductions")
    return [n.strip().split(" = ")[1].split("  ")[0] for n in str(program).splitlines() if "sylvie.all_reduce" in n]


def test_sums_side_by_side_are_one_message() -> None:
    assert reductions(mean_of_all) == ["sylvie.all_reduces([sum_dim_int_list, sum_dim_int_list_1], sum, True)"]


def test_a_sum_that_needs_another_is_left_alone() -> None:
    assert changes(MergeReductions(), after(mean_of_all, "merge-reductions", before=True))
    assert not changes(MergeReductions(), after(one_sum_needs_another, "merge-reductions", before=True))


def test_backward_sends_nothing_only_where_the_result_is_computed_from_sums_alone() -> None:
    found = reductions(one_sum_needs_another)
    assert [one.endswith(", True)") for one in found] == [False, True]
    assert [one.endswith(", True)") for one in reductions(one_sum_goes_back_to_the_rows)] == [False]
    assert not any(one.endswith(", True)") for one in reductions(a_term_of_the_parameters))
    assert not any(one.endswith(", True)") for one in reductions(two_results_of_one_sum))


def test_a_result_of_sums_alone_keeps_its_gradient_on_every_rank() -> None:
    assert "sylvie.replicated_output" not in targets(after(mean_of_all, "merge-reductions"))
    assert "sylvie.replicated_output" in targets(after(a_term_of_the_parameters, "merge-reductions"))


@pytest.mark.parametrize("function", [
    mean_of_all, one_sum_needs_another, one_sum_goes_back_to_the_rows, a_term_of_the_parameters, two_results_of_one_sum,
])  # fmt: skip
def test_the_same_numbers(function: Any) -> None:
    check_parity(function)
