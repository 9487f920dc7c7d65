from __future__ import annotations

import copy

from exchange_models import Sum, compiled, graph, lines
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.passes.base import PassContext
from sylvie_fx.passes.sync_gradients import SyncGradients

ONE_BUCKET = sylvie_fx.default_passes().without("bucket-gradients")


class LossInside(nn.Module):
    """Returns rows and a loss with a term of the parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Sum(12, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(x, edge_index)
        return out, out.square().mean() + 0.1 * self.layer.linear.weight.norm()


def test_parameters_are_read_through_one_synchronisation() -> None:
    found = lines(compiled(Sum(12, 4), *graph(), passes=ONE_BUCKET), "sync_gradients", "synced")
    assert found[0] == "sync_gradients_default = sylvie.sync_gradients([model_linear_weight, model_linear_bias])"
    assert len([f for f in found if "sync_gradients(" in f]) == 1


def test_replicated_results_are_marked() -> None:
    assert len(lines(compiled(LossInside(), *graph()), "replicated_output")) == 1
    assert lines(compiled(Sum(12, 4), *graph(), passes=ONE_BUCKET), "replicated_output") == []


def test_frozen_parameters_are_left_alone() -> None:
    model = Sum(12, 4)
    model.linear.weight.requires_grad_(False)
    found = lines(compiled(model, *graph(), passes=ONE_BUCKET), "sync_gradients(")
    assert found == ["sync_gradients_default = sylvie.sync_gradients([model_linear_bias])"]


def test_a_second_run_changes_nothing() -> None:
    program = compiled(LossInside(), *graph(), passes=ONE_BUCKET).program("train")
    before = str(program)
    assert str(SyncGradients().run(program, PassContext())) == before


def test_gradients_of_a_loss_inside_are_exact() -> None:
    def loss(model: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
        out, inner = model(x, edge_index)
        return inner * 2.0 + out.tanh().sum()

    report = sylvie_fx.verify(LossInside(), *graph(), parts=3, partition="random", loss=loss)
    assert report.exact, report


def test_one_all_reduce_for_all_gradients() -> None:
    from sylvie_fx.engine import ProgramCache
    from sylvie_fx.runtime.in_process import run_ranks

    x, edges = graph()
    cache, model = ProgramCache(), Sum(12, 4)

    def rank(transport: object) -> list[str]:
        labels: list[str] = []
        plain = transport.start_all_reduce
        transport.start_all_reduce = lambda t, label, op="sum": labels.append(label) or plain(t, label, op)
        own = copy.deepcopy(model)
        net = sylvie_fx.DistributedModule(own, sylvie_fx.Options(), ONE_BUCKET, transport, cache)
        net(*net.shard(x, edges)).sum().backward()
        return [label for label in labels if "parameters" in label]

    one, other = run_ranks(2, rank, 60.0)
    assert one == other
    assert [label.split()[:2] + label.split()[3:] for label in one] == [["program", "train", "parameters", "gradients"]]
