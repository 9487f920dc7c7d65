"""What a call gives does not depend on the calls before it: programs are found again only where they fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sylvie_fx.api import DistributedModule
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir.options import Options
from sylvie_fx.node_tensor import NodeTensor
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.runtime.in_process import run_ranks

NODES, EDGES, FEATURES = 19, 50, 200
FAST = 100.0  # Gbit/s: the hidden rows cross, and are not computed twice


def neighbours(h: Tensor, edges: Tensor) -> Tensor:
    return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])


class Net(nn.Module):
    """Two layers behind an aggregation that depends on inputs alone, and is kept where they need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, 32), nn.Linear(32, 32)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, edges: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        h = self.drop(self.one(neighbours(x * scale, edges)).relu())
        return self.two(neighbours(h, edges))


def make() -> Net:
    torch.manual_seed(0)
    return Net().double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NODES, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, NODES, (2, EDGES), generator=generator)


def both(script: Callable[..., Any], **options: Any) -> tuple[Any, list[Any]]:
    """What a script gives on the plain model, and on each of two ranks."""
    return script(make(), *data()), on_ranks(script, **options)


def on_ranks(script: Callable[..., Any], **options: Any) -> list[Any]:
    """What a script gives on each of two ranks."""
    model, cache = make(), ProgramCache()

    def rank(transport: Any) -> Any:
        net = DistributedModule(
            copy.deepcopy(model), Options(timeout=30, **options), default_passes(), transport, cache
        )
        found = script(net, *net.shard(*data(), partition="random"))
        return [t.full() if isinstance(t, NodeTensor) else t for t in found]

    return run_ranks(2, rank, 30)


def same(script: Callable[..., Any], **options: Any) -> None:
    expected, ranks = both(script, **options)
    for found in ranks:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_an_input_that_learns_after_training_steps() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        for _ in range(2):
            net(x, edges).pow(2).sum().backward()
        x.requires_grad_()
        for _ in range(2):
            net(x, edges).pow(2).sum().backward()
        found = [x.grad.clone()]
        x.requires_grad_(False)
        net(x, edges).pow(2).sum().backward()
        return [*found, x.grad, *(p.grad for p in net.parameters())]

    same(script)


def test_an_input_that_learns_after_an_evaluation() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        net.eval()
        with torch.no_grad():
            net(x, edges)
        x.requires_grad_()
        with torch.no_grad():
            out = net(x, edges)
        return [out, *torch.autograd.grad(net(x, edges).logsumexp(1).sum(), x)]

    same(script)


def test_a_number_for_all_nodes_that_learns_later() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        scale = torch.tensor(2.0, dtype=torch.float64)
        net(x, edges, scale).sum().backward()
        scale.requires_grad_()
        for _ in range(2):
            net(x, edges, scale).pow(2).sum().backward()
        return [scale.grad]

    same(script)


def test_a_line_outside_the_model_whose_rows_learn_later() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        first = neighbours(x, edges)
        x.requires_grad_()
        neighbours(x, edges).pow(2).sum().backward()
        return [first, x.grad]

    same(script)


# --- coded lines outside the model ------------------------------------------------------------------------------------


def scores(z: Any, edges: Any) -> Any:
    return (z[edges[0]] * z[edges[1]]).sum(-1)


@pytest.mark.parametrize("trained", [False, True])
def test_a_line_without_gradients_is_coded_as_an_evaluation(trained: bool) -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        z = net.eval()(x, edges)
        if trained:
            scores(z, edges).sum().backward(retain_graph=True)
        with torch.no_grad():
            return [z.detach(), scores(z, edges), scores(z.detach(), edges)]

    same(script, bits=1)


def test_a_line_with_gradients_is_coded_as_training_is_and_rounded_anew_each_time() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        z = net.eval()(x, edges)
        return [scores(z, edges).detach() for _ in range(2)]

    (expected, _), ranks = both(script, bits=1)
    for first, second in ranks:
        assert not torch.allclose(first, expected)
        assert not torch.allclose(first, second)


def test_lines_outside_the_model_remember_nothing_of_each_other() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        z = net(x, edges)
        for rows in (z, 3 * z + 1):
            neighbours(rows, edges).sum().backward(retain_graph=True)
        outside = [p for p, _ in net.engine.bound() if p is not net.program()]
        codings = [str(coding) for p in outside for coding in p.codings.values()]
        return [codings, ", ".join(map(str, net.program().codings.values()))]

    ranks = on_ranks(script, bits=1, staleness=1, link=FAST)
    for outside, inside in ranks:
        assert "shift" in inside
        assert any("1-bit" in coding for coding in outside)
        assert not any("shift" in coding for coding in outside)


# --- masks of dropout -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_every_call_draws_another_mask(training: bool) -> None:
    """Monte-Carlo dropout, in training mode without gradients or with the dropouts alone in training mode."""

    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        net.train(training)
        net.drop.p = 0.5
        net.drop.train()
        with torch.set_grad_enabled(not training):
            return [net(x, edges).detach() for _ in range(3)]

    _, (found, other) = both(script)
    assert not any(torch.allclose(found[i], found[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    torch.testing.assert_close(other, found, rtol=0, atol=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_backward_pass_has_the_mask_of_its_own_call(recompute: bool) -> None:
    def script(net: Any, x: Any, edges: Any, between: bool = True) -> list[Any]:
        net.drop.p = 0.5
        out = net(x, edges)
        if between:
            with torch.no_grad():
                net(x, edges)
        out.pow(2).sum().backward()
        return [out.detach(), *(p.grad for p in net.parameters())]

    _, undisturbed = both(lambda *given: script(*given, between=False), recompute=recompute)
    _, ranks = both(script, recompute=recompute)
    torch.testing.assert_close(ranks, undisturbed, rtol=1e-10, atol=1e-12)


def test_samples_between_training_steps_make_no_row_older() -> None:
    def script(net: Any, x: Any, edges: Any, between: bool = True) -> list[Any]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(6):
            if between:
                with torch.no_grad():
                    net(x, edges)
            optimizer.zero_grad()
            net(x, edges).pow(2).mean().backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    stale = {"staleness": 1, "stale": "last", "warm_up": 1, "link": FAST}
    expected, undisturbed = both(lambda *given: script(*given, between=False), **stale)
    assert not torch.allclose(undisturbed[0][-1], expected[-1])
    _, ranks = both(script, **stale)
    torch.testing.assert_close(ranks, undisturbed, rtol=1e-10, atol=1e-12)
