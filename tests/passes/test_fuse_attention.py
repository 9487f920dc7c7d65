from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from exchange_models import compiled, graph, lines
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.passes.base import PassContext
from sylvie_fx.passes.fuse_attention import FuseAttention, FuseScores


def softmax(e: Tensor, target: Tensor, nodes: int) -> Tensor:
    into = target.view(-1, *[1] * (e.dim() - 1)).expand_as(e)
    zeros = e.new_zeros(nodes, *e.shape[1:])
    raised = (e - zeros.scatter_reduce(0, into, e.detach(), "amax", include_self=False)[target]).exp()
    return raised / (zeros.index_add(0, target, raised) + 1e-16)[target]


class Additive(nn.Module):
    """Attention with scores of both ends: GAT, in plain torch."""

    def __init__(self, heads: int = 3, dropout: float = 0.3, keep_weights: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4 * heads, dtype=torch.float64)
        self.left = nn.Parameter(torch.randn(heads, 4, dtype=torch.float64))
        self.right = nn.Parameter(torch.randn(heads, 4, dtype=torch.float64))
        self.heads, self.dropout, self.keep_weights = heads, dropout, keep_weights

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        source, target = edge_index
        h = self.linear(x).view(-1, self.heads, 4)
        left, right = (h * self.left).sum(-1), (h * self.right).sum(-1)
        weight = softmax(F.leaky_relu(left[source] + right[target], 0.1), target, x.shape[0])
        kept = F.dropout(weight, self.dropout, self.training)
        out = torch.zeros_like(h).index_add(0, target, kept.unsqueeze(-1) * h[source]).flatten(1)
        return (out, weight) if self.keep_weights else out


class Scores(nn.Module):
    """Scores of edges from both ends, summed up; ``kind`` chooses how."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12, dtype=torch.float64)
        self.vector = nn.Parameter(torch.randn(1, 3, 4, dtype=torch.float64))
        self.kind = kind

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        q, k = self.linear(x).view(-1, 3, 4), x.view(-1, 3, 4)
        if self.kind == "dot":
            e = (q[target] * k[source]).sum(-1)
        elif self.kind == "both at once":
            e = (F.leaky_relu(q[target] + k[source], 0.2) * self.vector).sum(dim=-1)
        elif self.kind == "relu":
            e = (self.vector * F.relu(q[source] + k[target])).sum(dim=-1)
        else:
            combined = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}[self.kind](q[source], k[target])
            e = torch.tanh(combined).sum(-1)
        return q.new_zeros(x.shape[0], 3).index_add(0, target, e)


def test_attention_is_one_operator() -> None:
    net = compiled(Additive(dropout=0.0), *graph())
    assert lines(net, "sylvie.attention", "sylvie.gather", "sylvie.scatter", "spmm", "softmax", "leaky") == [
        "attention_default = sylvie.attention(view_2, getitem_6, getitem_5, select_int, slice_tensor_2, None, rows_0, 0.1)"
    ]


def test_dropout_of_its_weights_becomes_a_mask() -> None:
    net = compiled(Additive(), *graph())
    (mask,) = lines(net, "sylvie.node_dropout")
    assert mask.split("(")[1].startswith("full")
    assert len(lines(net, "sylvie.attention")) == 1


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_attention_is_exact(heads: int, mode: str) -> None:
    model = Additive(heads).train(mode == "train")
    x, edge_index = graph()
    report = sylvie_fx.verify(model, x, edge_index.clamp(max=36), parts=3, partition="random")
    assert report.exact, report
    assert report.program.count("sylvie.attention(") == 1


def test_weights_that_are_read_elsewhere_stay() -> None:
    report = sylvie_fx.verify(Additive(keep_weights=True), *graph(), parts=3, partition="random")
    assert report.exact, report
    assert "sylvie.attention(" not in report.program
    assert report.program.count("sylvie.segment_softmax(") == 1


GOLDEN = {
    "dot": "sylvie.sddmm(",
    "add": "sylvie.sddmm(",
    "sub": "sylvie.sddmm(",
    "mul": "sylvie.sddmm(",
    "both at once": "sylvie.edge_scores(",
    "relu": "sylvie.edge_scores(",
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_scores_of_both_ends_are_one_operator(kind: str) -> None:
    report = sylvie_fx.verify(Scores(kind), *graph(), parts=3, partition="random")
    assert report.exact, report
    assert report.program.count(GOLDEN[kind]) == 1
    assert "sylvie.gather(" not in report.program


def test_ends_that_are_no_row_of_a_scatter_stay() -> None:
    class Pairs(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return (x[edge_index[0]] * x[edge_index[1]]).sum(-1)

    assert lines(compiled(Pairs(), *graph()), "sddmm") == []


@pytest.mark.parametrize("one", [FuseAttention(), FuseScores()], ids=lambda p: p.name)
def test_a_second_run_changes_nothing(one: FuseAttention | FuseScores) -> None:
    for model in (Additive(), Scores("dot"), Scores("both at once")):
        program = compiled(model, *graph()).program("train")
        before = str(program)
        assert str(one.run(program, PassContext())) == before


def test_explain_names_what_is_fused_and_why_a_scatter_is_not() -> None:
    assert "sylvie.attention, fused" in compiled(Additive(), *graph()).explain()
    text = compiled(Scores("add"), *graph()).explain()
    assert "sylvie.sddmm, fused" in text
    assert "sylvie.scatter, not fused: the messages are made on the edges by sum" in text
