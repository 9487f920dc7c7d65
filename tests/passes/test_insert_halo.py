from __future__ import annotations

import torch
from exchange_models import BothWays, Stack, Sum, compiled, graph, lines

import sylvie_fx
from sylvie_fx.ir.placement import Rows
from sylvie_fx.ir.program import meta
from sylvie_fx.passes.base import PassContext
from sylvie_fx.passes.insert_halo import InsertHalo

NAIVE = sylvie_fx.default_passes().without("place-halos", "fuse-aggregation", "quantize")


def test_a_gather_reads_the_halo() -> None:
    net = compiled(Sum(12, 4), *graph(), passes=NAIVE)
    assert lines(net, "sylvie.halo", "sylvie.gather", "sylvie.scatter") == [
        "halo_exchange_default = sylvie.halo_exchange(linear, 0, 0)",
        "gather_default = sylvie.gather(halo_exchange_default, select_6, 0)",
        "scatter_default = sylvie.scatter(gather_default, select_5, rows_0, sum, 0)",
    ]


def test_a_gather_by_the_index_that_is_scattered_to_is_local() -> None:
    class ToTarget(torch.nn.Module):
        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[1]])

    assert lines(compiled(ToTarget(), *graph(), passes=NAIVE), "sylvie.halo") == []


def test_edge_values_that_reach_both_ends_return_partial_sums() -> None:
    net = compiled(BothWays(12, 4), *graph(), passes=NAIVE)
    found = lines(net, "sylvie.halo")
    assert len([f for f in found if "halo_exchange" in f]) == 1
    assert len([f for f in found if "halo_reduce" in f]) == 1
    report = sylvie_fx.verify(BothWays(12, 4), *graph(), parts=3, partition="random")
    assert report.exact, report


def test_maxima_at_the_other_end_move_the_edge_values() -> None:
    class BothMax(BothWays):
        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            source, target = edge_index
            e = torch.tanh(self.linear(torch.cat([x[source], x[target]], -1)))
            zeros = e.new_zeros(x.shape[0], e.shape[1])
            index = source.unsqueeze(1).expand_as(e)
            return zeros.index_add(0, target, e) + zeros.scatter_reduce(0, index, e, "amax", include_self=False)

    net = compiled(BothMax(12, 4), *graph(), passes=NAIVE)
    assert len(lines(net, "sylvie.relayout")) == 1
    report = sylvie_fx.verify(BothMax(12, 4), *graph(), parts=3, partition="random")
    assert report.exact, report


def test_a_second_run_changes_nothing() -> None:
    net = compiled(Stack(Sum(12, 8), Sum(8, 4)), *graph(), passes=NAIVE)
    program = net.program("train")
    before = str(program)
    assert str(InsertHalo().run(program, PassContext())) == before


def test_an_exchange_keeps_the_placement_of_what_crosses() -> None:
    program = compiled(Sum(12, 4), *graph(), passes=NAIVE).program("train")
    node = next(n for n in program.graph.nodes if "halo_exchange" in n.name)
    assert meta(node).placement == Rows("N", 0, 1, 0)
