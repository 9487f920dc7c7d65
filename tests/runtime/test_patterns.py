"""Ways in which scripts call a model whose exchanges are under way for several steps."""

from __future__ import annotations

import copy
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.runtime.in_process import InProcessTransport, run_ranks

NODES = 40
FEATURES = 1024
FAST = 100.0  # Gbit/s: the hidden rows cross, and are not computed twice


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(FEATURES, 8), SAGEConv(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def graph() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(NODES, FEATURES, generator=generator) / 32, torch.randint(NODES, (2, 160), generator=generator)


def on_ranks(script: Callable[..., Any], models: int = 1, *, threaded: bool = False, **options: Any) -> list[Any]:
    """Run ``script(make, x, edge_index)`` on two ranks; ``make()`` gives the next distributed model and its data."""
    torch.manual_seed(0)
    originals, cache = [Net() for _ in range(models)], ProgramCache()
    given = {"warm_up": 1, **options}

    def rank(transport: InProcessTransport) -> Any:
        transport.threaded = threaded
        nets = []
        for original in originals:
            net = sylvie_fx.DistributedModule(
                copy.deepcopy(original),
                sylvie_fx.Options(link=FAST, **given),
                sylvie_fx.default_passes(),
                transport,
                cache,
            )
            nets.append((net, *net.shard(*graph(), partition="random")))
        result = script(*nets)
        assert all("halo_start" in str(net.program("train")) for net, *_ in nets)
        return result

    return run_ranks(2, rank, 30.0)


def gradients(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def exact(passes: int = 1) -> Tensor:
    """Gradients of one device, summed over a number of passes."""
    torch.manual_seed(0)
    net = Net()
    for _ in range(passes):
        (net(*graph()) ** 2).sum().backward()
    return gradients(net)


THREADS = pytest.mark.parametrize("threaded", [False, True], ids=["one thread", "threads"])


@THREADS
def test_gradients_accumulate_over_passes(threaded: bool) -> None:
    def script(one: tuple[Any, ...]) -> Tensor:
        net, x, edges = one
        for _ in range(3):
            (net(x, edges) ** 2).sum().backward()
        return gradients(net)

    for found in on_ranks(script, threaded=threaded):
        torch.testing.assert_close(found, exact(3), rtol=1e-4, atol=1e-5)


@THREADS
@pytest.mark.parametrize("together", [True, False], ids=["one backward", "one by one"])
def test_several_forward_passes_before_backward(threaded: bool, together: bool) -> None:
    def script(one: tuple[Any, ...]) -> Tensor:
        net, x, edges = one
        losses = [(net(x, edges) ** 2).sum() for _ in range(3)]
        if together:
            torch.stack(losses).sum().backward()
        else:
            for loss in losses:
                loss.backward()
        return gradients(net)

    for found in on_ranks(script, threaded=threaded):
        torch.testing.assert_close(found, exact(3), rtol=1e-4, atol=1e-5)
    # The weights do not move, so that the oldest rows are the newest.
    for found in on_ranks(script, threaded=threaded, staleness=2, stale="last"):
        torch.testing.assert_close(found, exact(3), rtol=1e-4, atol=1e-5)


@THREADS
def test_passes_without_backward_leave_nothing_behind(threaded: bool) -> None:
    def script(one: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        net, x, edges = one
        for _ in range(4):
            net(x, edges)  # nobody asks for its gradient
            net.eval()
            with torch.no_grad():
                evaluated = net(x, edges)
            net.train()
            with torch.no_grad():
                net(x, edges)
            net.zero_grad()
            (net(x, edges) ** 2).sum().backward()
        return gradients(net), evaluated.detach().square().sum().as_subclass(Tensor)

    torch.manual_seed(0)
    loss = Net()(*graph()).square().sum()
    for options in ({}, {"staleness": 2}, {"staleness": 1, "stale": "line"}):
        for found, evaluated in on_ranks(script, threaded=threaded, **options):
            torch.testing.assert_close(found, exact(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(evaluated, loss.detach(), rtol=1e-5, atol=0.0)


@THREADS
def test_two_models_take_turns(threaded: bool) -> None:
    def script(one: tuple[Any, ...], two: tuple[Any, ...]) -> Tensor:
        (first, x, edges), (second, y, links) = one, two
        for _ in range(4):
            outs = first(x, edges), second(y, links)
            first.zero_grad()
            (outs[0] ** 2).sum().backward()
            second(y, links)
        return gradients(first)

    for staleness in (0, 1):
        for found in on_ranks(script, 2, threaded=threaded, staleness=staleness):
            torch.testing.assert_close(found, exact(), rtol=1e-4, atol=1e-5)


def test_an_epoch_may_be_left_early() -> None:
    def script(one: tuple[Any, ...]) -> Tensor:
        net, x, edges = one
        for step in range(7):
            net.zero_grad()
            out = net(x, edges)
            if step % 2:
                continue  # between forward and backward
            (out**2).sum().backward()
        return gradients(net)

    for found in on_ranks(script, threaded=True, staleness=1):
        torch.testing.assert_close(found, exact(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("staleness", [0, 2])
def test_memory_does_not_grow_over_500_steps(staleness: int) -> None:
    def script(one: tuple[Any, ...]) -> tuple[int, int]:
        net, x, edges = one
        optimizer, sizes = torch.optim.SGD(net.parameters(), 1e-3), []
        for step in range(500):
            optimizer.zero_grad()
            (net(x, edges) ** 2).mean().backward()
            optimizer.step()
            if step in (99, 499):
                net.transport.barrier("measured together")
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        crossings = [c for b in net.engine._bindings.values() for c in b.machine._turns.now.values()]
        assert all(len(d._flights) <= staleness for c in crossings for d in (c.out, c.back))
        return sizes[0], sizes[1]

    tracemalloc.start()
    try:
        results = on_ranks(script, threaded=True, staleness=staleness, bits=1)
    finally:
        tracemalloc.stop()
    for before, after in results:
        assert after - before < 200_000, "Python's own memory; a leaked flight or label an exchange would be more"


def test_an_error_of_a_lane_is_raised_at_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from sylvie_fx.ir.errors import CommError
    from sylvie_fx.runtime.carrier import ExactCarrier

    plain = ExactCarrier.start

    def start(self: ExactCarrier, values: Tensor, link: Any, label: str, step: int, seed: int) -> Any:
        if link.transport.rank == 1 and step == 3 and "forward" in label:
            raise ValueError("the sender broke")
        return plain(self, values, link, label, step, seed)

    monkeypatch.setattr(ExactCarrier, "start", start)

    def script(one: tuple[Any, ...]) -> None:
        net, x, edges = one
        for _ in range(6):
            (net(x, edges) ** 2).sum().backward()

    with pytest.raises(
        CommError, match=r"exchange 0 site \d forward transfer 3 failed in the thread .*: ValueError: the sender"
    ):
        on_ranks(script, threaded=True)
