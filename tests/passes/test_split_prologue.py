from __future__ import annotations

import pytest
import torch
from exchange_models import compiled, graph
from pass_support import Layer, after, changes, check_parity, targets
from torch import Tensor

import sylvie_fx
from sylvie_fx.ir.errors import BranchError, PassError
from sylvie_fx.passes.split_prologue import SplitPrologue
from sylvie_fx.runtime.bind import run_prologue


def normalised(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    every = torch.arange(x.size(0))
    row, col = torch.cat([e[0], every]), torch.cat([e[1], every])
    degree = torch.zeros(x.size(0), dtype=x.dtype).index_add(0, col, torch.ones(col.size(0), dtype=x.dtype))
    return torch.zeros(x.size(0), 4, dtype=x.dtype).index_add(0, col, m.a(x)[row] / degree[row].unsqueeze(1))


def buckets(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    degree = torch.bincount(e[1], minlength=x.size(0))
    out = m.a(x)
    for d in range(int(degree.max()) + 1):
        if (degree == d).any():
            out = torch.where((degree == d)[:, None], out * (d + 1), out)
    return out


def no_graph(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(m.a(x).relu())


def test_what_the_graph_determines_leaves_the_main_graph(golden) -> None:
    golden(after(normalised, "split-prologue"))


def test_equal_graph_only_values_are_one() -> None:
    def twice(m: Layer, x: Tensor, e: Tensor) -> Tensor:
        h = m.a(x)
        return torch.zeros_like(h).index_add(0, e[1], h[e[0]]) + torch.zeros_like(h).index_add(0, e[1], h[e[0]].relu())

    program = after(twice, "split-prologue")
    assert len(program.localized) == 2  # one source index, one destination index


def test_constants_from_sizes_stay_in_the_main_graph() -> None:
    def sum_of_constants(m: Layer, x: Tensor, e: Tensor) -> Tensor:
        return m.a(x) + torch.ones(x.size(0), 4, dtype=x.dtype)

    program = after(sum_of_constants, "split-prologue")
    assert "aten.ones" in targets(program)
    assert program.localized == {}


def test_parameters_are_never_graph_only() -> None:
    class Tied(Layer):
        def __init__(self) -> None:
            super().__init__(lambda m, x, e: m.second(m.first(m.a(x))))
            self.first = self.second = torch.nn.Linear(4, 4, dtype=torch.float64)  # two names of one parameter

    assert compiled(Tied(), *graph()).program("train").localized == {}


def test_without_graph_only_values_the_prologue_is_empty() -> None:
    program = after(no_graph, "split-prologue")
    assert [n.op for n in program.prologue.graph.nodes if n.op == "call_function"] == []


def test_a_second_run_changes_nothing() -> None:
    assert not changes(SplitPrologue(), after(normalised, "split-prologue"))


def test_decided_branches_are_checked_in_the_prologue() -> None:
    program = compiled(Layer(buckets), *graph()).program("train")
    whole = {
        i.name: torch.zeros(40, dtype=torch.bool) for i in program.inputs if i.static and i.name.startswith("marker_N")
    }
    whole |= {i.name: torch.zeros(200, dtype=torch.bool) for i in program.inputs if i.name.startswith("marker_E")}
    index = next(i.name for i in program.inputs if i.static and i.name not in whole)
    run_prologue(program.prologue, {**whole, index: graph()[1]})
    with pytest.raises(BranchError, match=r"test_split_prologue.py:\d+: .*branches on the graph"):
        run_prologue(program.prologue, {**whole, index: torch.zeros(2, 200, dtype=torch.int64)})


def test_a_branch_on_features_is_refused() -> None:
    def branch(m: Layer, x: Tensor, e: Tensor) -> Tensor:
        h = m.a(x)
        return h if h.sum() > 0 else -h

    with pytest.raises(PassError, match=r"test_split_prologue.py:\d+: a Python branch or number depends on values"):
        after(branch, "split-prologue")


@pytest.mark.parametrize("function", [normalised, buckets, no_graph])
def test_parity(function) -> None:
    check_parity(function)


def test_another_graph_is_captured_again_where_branches_differ() -> None:
    report = sylvie_fx.verify(Layer(buckets), *graph(seed=3), parts=2)
    assert report.exact, report
