"""Several passes of one training step: old rows and gradients are those of the same pass of the steps before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.runtime.in_process import InProcessTransport, run_ranks
from sylvie_fx.runtime.turns import MOST

FEATURES = 2048
FAST = 100.0  # Gbit/s: the hidden rows cross, and are not computed twice
STALE = {"staleness": 1, "stale": "last", "warm_up": 1}


class Sum(nn.Module):
    """The sum over incoming edges of a linear layer, wide enough that its results cross and not its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.linear(x).relu()  # or the inputs would be summed, once, in front of the layer
        return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])


def script(run: Callable[[Any, Any, Any], Any], **options: Any) -> Any:
    """What ``run(net, x, edges)`` gives on the first of two ranks; each node has one edge, from the other rank."""
    cache, model = ProgramCache(), Sum()

    def rank(transport: InProcessTransport) -> Any:
        own = Sum()
        own.load_state_dict(model.state_dict())
        chosen = sylvie_fx.Options(**{**STALE, "link": FAST, **options})
        net = sylvie_fx.DistributedModule(own, chosen, sylvie_fx.default_passes(), transport, cache)
        x, edges = net.shard(
            torch.ones(2, FEATURES, dtype=torch.float64),
            torch.tensor([[0, 1], [1, 0]]),
            partition=torch.tensor([0, 1]),
            kinds=["node", "edge_index"],
        )
        return run(net, x, edges)

    first, second = run_ranks(2, rank, 20.0)
    assert first == second
    return first


def fill(net: Any, weight: float) -> None:
    """A step of an optimizer: with features of one, the sum is the weight."""
    with torch.no_grad():
        net.module.linear.weight.fill_(weight / FEATURES)


def number(out: Any) -> float:
    return round(float(out.detach().local()[0]), 6)


def gradient(net: Any) -> float:
    """The gradient of the weight, in units of a loss that is the sum of both results."""
    return round(float(net.module.linear.weight.grad[0, 0]) / 2, 6)


@pytest.mark.parametrize("options", [
    {}, {"bits": 8}, {"policy": {"intra_host": {"bits": 8}, "inter_host": {"bits": 32}}},
])  # fmt: skip
@pytest.mark.parametrize("together", [True, False])
def test_two_views_keep_apart(together: bool, options: dict[str, Any]) -> None:
    """One backward pass for both, or one for each as gradients are accumulated."""

    def run(net: Any, x: Any, edges: Any) -> Any:
        found = []
        for t in range(1, 7):
            fill(net, t)
            net.zero_grad()
            if together:
                one, ten = net(x, edges), net(10 * x, edges)
                (t * one.sum() + t * ten.sum()).backward()
            else:
                one = net(x, edges)
                (t * one.sum()).backward()
                ten = net(10 * x, edges)
                (t * ten.sum()).backward()
            found.append((number(one), number(ten), gradient(net)))
        return found

    ages = [max(1, t - 1) for t in range(1, 7)]
    found = script(run, **options)
    assert [f[0] for f in found] == pytest.approx(ages, rel=0.02)
    assert [f[1] for f in found] == pytest.approx([10 * t for t in ages], rel=0.02)
    # The gradient of the hidden rows that come back is as old as they are; that of x is 1, that of 10 x ten times that.
    assert [f[2] for f in found] == pytest.approx([11 * t for t in ages], rel=0.02)


def test_averages_keep_apart() -> None:
    def run(net: Any, x: Any, edges: Any) -> Any:
        found = []
        for t in range(1, 5):
            fill(net, t)
            one, ten = net(x, edges), net(10 * x, edges)
            (one.sum() + ten.sum()).backward()
            found.append((number(one), number(ten)))
        return found

    averages = [1.0, 1.0, 0.5 * 1 + 0.5 * 2, 0.5 * 1.5 + 0.5 * 3]
    for (one, ten), expected in zip(script(run, stale="average", smoothing=0.5), averages, strict=True):
        assert (one, ten) == pytest.approx((expected, 10 * expected))


def test_a_pass_that_was_left_out_of_a_step_is_new() -> None:
    """Its rows would be older than the bound, in training steps."""

    def run(net: Any, x: Any, edges: Any) -> Any:
        found = []
        for t in range(1, 8):
            fill(net, t)
            net(x, edges).sum().backward()
            if t not in (3, 4):
                found.append(number(net(x, edges)))
        return found

    assert script(run) == pytest.approx([1, 1, 5, 5, 6])


def test_another_program_takes_steps_too() -> None:
    def run(net: Any, x: Any, edges: Any) -> Any:
        found = []
        for t in range(1, 9):
            fill(net, t)
            net.module.linear.weight.requires_grad_(t not in (4, 5))
            found.append(number(net(x, edges)))
        return found

    assert script(run) == pytest.approx([1, 1, 2, 4, 4, 6, 6, 7])


def test_samples_between_training_steps_change_nothing() -> None:
    def run(net: Any, x: Any, edges: Any) -> Any:
        found = []
        for t in range(1, 5):
            fill(net, t)
            with torch.no_grad():
                assert number(net(100 * x, edges)) == 100 * t
            found.append(number(net(x, edges)))
        return found

    assert script(run) == pytest.approx([1, 1, 2, 3])
    assert script(run, stale="average", smoothing=0.5) == pytest.approx([1, 1, 1.5, 2.25])


def test_a_second_backward_pass_through_a_forward_pass_is_synchronous() -> None:
    def run(net: Any, x: Any, edges: Any) -> Any:
        found = []
        for t in range(1, 5):
            fill(net, t)
            out, weight = net(x, edges).sum(), net.module.linear.weight
            pair = [torch.autograd.grad(t * scale * out, weight, retain_graph=True)[0] for scale in (1, 100)]
            found.append(tuple(round(float(g[0, 0]) / 2, 6) for g in pair))
        return found

    assert script(run) == [(max(1, t - 1), 100 * t) for t in range(1, 5)]


def test_passes_with_the_same_parameters_beyond_the_eighth_are_synchronous() -> None:
    def run(net: Any, x: Any, edges: Any) -> Any:
        found = []
        for t in range(1, 4):
            fill(net, t)
            found.append([number(net(scale * x, edges)) / scale for scale in range(1, MOST + 3)])
        text = net.explain()
        assert f"{MOST + 2} passes with the same parameters" in text
        return found

    assert script(run) == [[max(1, t - 1)] * MOST + [t] * 2 for t in range(1, 4)]


def test_all_passes_have_the_widths_that_were_chosen_last() -> None:
    def run(net: Any, x: Any, edges: Any) -> Any:
        for t in range(1, 7):
            fill(net, t)
            (net(x, edges).sum() + net(10 * x, edges).sum()).backward()
        (turns,) = (b.machine._turns for b in net.engine._bindings.values() if b.machine._turns._stale)
        return [[str(way.coding) for c in crossings.values() for way in c.channels()] for crossings in turns.every()]

    first, second = script(run, bits="auto", bytes_per_step=1, choose_every=3)
    assert first == second
    assert all(coding.startswith("1-bit") for coding in first)
