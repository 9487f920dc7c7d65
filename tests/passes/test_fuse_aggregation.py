from __future__ import annotations

import torch
from exchange_models import Attention, Sum, compiled, graph, lines
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.passes.base import PassContext
from sylvie_fx.passes.fuse_aggregation import FuseAggregation


class Weighted(nn.Module):
    """Weighted sums: a number a head of each edge."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        h = x.view(-1, 3, 4)
        weight = torch.sigmoid((h[source] * h[target]).sum(-1, keepdim=True))
        return torch.zeros_like(h).index_add(0, target, weight * h[source])


def test_a_sum_over_neighbours_is_one_product() -> None:
    found = lines(compiled(Sum(12, 4), *graph()), "spmm", "sylvie.gather", "sylvie.scatter")
    assert found == ["spmm_default = sylvie.spmm(linear_1, select_6, select_5, None, rows_0, sum)"]


def test_weights_for_each_edge_and_head_are_part_of_the_product() -> None:
    assert len(lines(compiled(Weighted(), *graph()), "spmm")) == 1
    assert len(lines(compiled(Attention(12, 4), *graph()), "spmm")) == 1


def test_messages_that_differ_from_feature_to_feature_stay_as_they_are() -> None:
    class Gated(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            source, target = edge_index
            return torch.zeros_like(x).index_add(0, target, x[source] * torch.sigmoid(x[target]))

    net = compiled(Gated(), *graph())
    assert lines(net, "spmm") == []
    assert len(lines(net, "sylvie.scatter")) == 1


def test_a_second_run_changes_nothing() -> None:
    program = compiled(Weighted(), *graph()).program("train")
    before = str(program)
    assert str(FuseAggregation().run(program, PassContext())) == before


def test_products_are_exact() -> None:
    for model in (Sum(12, 4), Weighted(), Attention(12, 4)):
        report = sylvie_fx.verify(model, *graph(), parts=3, partition="random")
        assert report.exact, report
