from __future__ import annotations

import pytest
import torch
from exchange_models import compiled, graph, lines
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.passes.base import PassContext
from sylvie_fx.passes.fuse_softmax import FuseSoftmax


class Softmax(nn.Module):
    """Edge softmax of scores of both ends, in the spelling that the arguments choose."""

    def __init__(
        self, constant: float = 0.0, detach: bool = True, shift: str = "own", behind: bool = False, heads: int = 2
    ) -> None:
        super().__init__()
        self.constant, self.detach, self.shift, self.behind = constant, detach, shift, behind
        self.score = nn.Linear(24, heads, dtype=torch.float64)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        e = torch.tanh(self.score(torch.cat([x[source], x[target]], -1))) * 3
        zeros = e.new_zeros(x.shape[0], e.shape[1])
        known = e.detach() if self.detach else e
        if self.shift == "own":
            into = target.unsqueeze(1).expand_as(e)
            raised = (e - zeros.scatter_reduce(0, into, known, "amax", include_self=False)[target]).exp()
        else:
            raised = (e if self.shift == "none" else e - known.max()).exp()
        total = zeros.index_add(0, target, raised)
        total = total[target] + self.constant if self.behind else (total + self.constant)[target]
        weight = raised / total
        return torch.cat([zeros.index_add(0, target, weight * weight), x], 1)


SPELLINGS = {
    "PyG": Softmax(1e-16),
    "DGL": Softmax(),
    "attached maximum": Softmax(1e-16, detach=False),
    "constant behind the gather": Softmax(1e-16, behind=True),
    "without maximum": Softmax(shift="none"),
    "one head": Softmax(1e-16, heads=1),
}


def test_the_parts_of_a_softmax_become_one_operator() -> None:
    net = compiled(Softmax(1e-16), *graph())
    assert lines(net, "segment_softmax", "aten.exp", "aten.div", "amax")[:-1] == [
        "segment_softmax_default = sylvie.segment_softmax(mul, getitem_5, rows_0)"
    ]


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_recognised_and_exact(name: str) -> None:
    x, edge_index = graph()
    edge_index = edge_index.clamp(max=36)  # the last nodes have no edges
    edge_index[:, :2] = torch.tensor([[37, 0], [0, 37]])  # and one node a single one
    report = sylvie_fx.verify(SPELLINGS[name], x, edge_index, parts=3, partition="random")
    assert report.exact, report
    assert report.program.count("sylvie.segment_softmax(") == 1
    assert "aten.exp" not in report.program


@pytest.mark.parametrize(
    "model", [Softmax(1e-3), Softmax(1e-16, shift="all"), Softmax(1e-16, shift="none")], ids=["large", "all", "none"]
)
def test_a_constant_that_is_not_lost_in_rounding_stays(model: Softmax) -> None:
    report = sylvie_fx.verify(model, *graph(), parts=3, partition="random")
    assert report.exact, report
    assert "segment_softmax" not in report.program


def test_a_quotient_over_other_rows_stays() -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            source, target = edge_index
            raised = x[source].exp()
            total = torch.zeros_like(x).index_add(0, target, raised)
            return torch.zeros_like(x).index_add(0, target, raised / total[source])

    assert lines(compiled(Other(), *graph()), "segment_softmax") == []


def test_a_second_run_changes_nothing() -> None:
    program = compiled(Softmax(), *graph()).program("train")
    before = str(program)
    assert str(FuseSoftmax().run(program, PassContext())) == before


def test_scores_beyond_the_exponential_are_safe() -> None:
    net = sylvie_fx.distribute(Softmax(shift="none"))
    x, edge_index = net.shard(1e3 * graph()[0], graph()[1])
    assert bool(torch.isfinite(net(x, edge_index)).all())
