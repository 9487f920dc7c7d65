"""Scores of nodes are taken in one sweep."""

from __future__ import annotations

import pytest
import torch
from pass_support import changes, compiled, graph
from torch import Tensor, nn
from torch_geometric.nn import GATConv

import sylvie_fx
from sylvie_fx.ir import ops
from sylvie_fx.passes.fuse_dots import FuseDots

aten = torch.ops.aten


class Scored(nn.Module):
    """Rows of 3 heads, scored by two vectors, whose neighbours' first scores are summed."""

    def __init__(self, keepdim: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12, dtype=torch.float64)
        self.a, self.b = (nn.Parameter(torch.randn(1, 3, 4, dtype=torch.float64)) for _ in range(2))
        self.keepdim = keepdim

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.linear(x).view(-1, 3, 4)
        s, t = (h * self.a).sum(-1, keepdim=self.keepdim), (self.b * h).sum(-1, keepdim=self.keepdim)
        return torch.zeros_like(s).index_add(0, edge_index[1], s[edge_index[0]]) * t


@pytest.mark.parametrize("keepdim", [False, True])
def test_all_scores_of_a_value_are_one_operator(keepdim: bool) -> None:
    program = compiled(Scored(keepdim), *graph(), link=0.01).program("train")
    dots = [n for n in program.graph.nodes if n.target is ops.row_dots]
    assert [len(n.args[1]) for n in dots] == [2]
    assert not [
        n for n in program.graph.nodes if n.target in (aten.mul.Tensor, aten.sum.dim_IntList) and n in dots[0].users
    ]
    assert not changes(FuseDots(), program)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("link", [0.01, 1000.0])
def test_it_is_exact(keepdim: bool, link: float) -> None:
    """Over a slow link inputs cross and rows are scored here; over a fast one scores cross."""
    options = sylvie_fx.Options(link=link)
    report = sylvie_fx.verify(Scored(keepdim), *graph(), parts=3, partition="random", steps=2, options=options)
    assert report.exact, report


def test_own_rows_are_scored_with_the_others() -> None:
    model = GATConv(12, 8, heads=2).double()
    program = compiled(model, *graph()).program("train")
    assert [len(n.args[1]) for n in program.graph.nodes if n.target is ops.row_dots] == [2]


class OtherProducts(nn.Module):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = x.view(-1, 3, 4)
        squared, read_twice = (h * h).sum(-1), h * torch.ones(1, 3, 4, dtype=torch.float64)
        s = squared + read_twice.sum(-1) + read_twice[:, :, 0] + (h * 2.0).sum(-1)
        return torch.zeros_like(s).index_add(0, edge_index[1], s[edge_index[0]])


def test_other_products_stay() -> None:
    program = compiled(OtherProducts(), *graph()).program("train")
    assert not [n for n in program.graph.nodes if n.target is ops.row_dots]
