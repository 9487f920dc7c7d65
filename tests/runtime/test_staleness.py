"""How old the rows are that a rank computes with, whatever the order and delay of arrivals."""

from __future__ import annotations

import random
import time
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.graphs.layout import ExchangePlan
from sylvie_fx.runtime.direction import Direction
from sylvie_fx.runtime.exchange import Link
from sylvie_fx.runtime.in_process import InProcessGroup, InProcessTransport, run_ranks
from sylvie_fx.runtime.lanes import Courier
from sylvie_fx.runtime.transport import Pending

FEATURES = 2048
FAST = 100.0  # Gbit/s: the hidden rows cross, and are not computed twice


class NumberedFlight(NamedTuple):
    number: int
    pending: Pending


class Numbered:
    """A carrier whose rows are the number of their transfer, which it delays as long as it likes."""

    def __init__(self, delays: random.Random) -> None:
        self._delays = delays

    def start(self, values: Tensor, link: Link, label: str, step: int, seed: int) -> NumberedFlight:
        time.sleep(self._delays.choice([0.0, 0.0, 0.002]))
        return NumberedFlight(step, link.transport.exchange([None], [None], label))

    def finish(self, flight: NumberedFlight, out: Tensor | None, *, add: bool, smooth: float | None) -> Tensor:
        time.sleep(self._delays.choice([0.0, 0.0, 0.004]))
        return torch.tensor([[float(flight.number)]])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3), st.lists(st.integers(0, 5), min_size=1, max_size=12), st.booleans(), st.integers(0, 99))
def test_no_row_is_older_than_its_age_or_the_bound(bound: int, ages: list[int], threaded: bool, seed: int) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    transport = InProcessGroup(1, 5.0).transport(0)
    link = Link.make(ExchangePlan(0, empty, (0,), (empty,), empty, 0), transport, "x", torch.device("cpu"))
    courier = Courier("program 0", 5.0, threaded=threaded)
    direction = Direction(Numbered(random.Random(seed)), link, "exchange 0", courier, 0, bound)
    newest = 0
    for step, age in enumerate(ages):
        number = direction.start(torch.zeros(1, 1), None)
        assert number == step
        found = int(direction.collect(number, age))
        newest = max(newest, step - min(age, bound))  # what depends on the ages alone, and on no delay
        assert found == newest
        assert 0 <= step - found <= bound
    direction.drain()
    assert direction.landed == len(ages) - 1
    courier.close()


class Sum(nn.Module):
    """The sum over incoming edges of a linear layer, wide enough that its results cross and not its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.linear.weight)  # ranks are threads, and would draw from one generator

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.linear(x).relu()  # or the inputs would be summed, once, in front of the layer
        return torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])


def steps(weights: list[float], *, threaded: bool = False, fresh: tuple[int, ...] = (), **options: Any) -> list[Tensor]:
    """What each of two ranks has summed, when the weight is another in each step: ``[steps, own rows]``.

    Every node has one edge, from the node of the same place on the other rank; all features are one.
    """
    cache = ProgramCache()
    edges = torch.tensor([[0, 1, 2, 3], [2, 3, 0, 1]])

    def rank(transport: InProcessTransport) -> Tensor:
        transport.threaded = threaded
        net = sylvie_fx.DistributedModule(
            Sum(),
            sylvie_fx.Options(**{"warm_up": 1, "link": FAST, **options}),
            sylvie_fx.default_passes(),
            transport,
            cache,
        )
        x, e = net.shard(
            torch.ones(4, FEATURES, dtype=torch.float64),
            edges,
            partition=torch.tensor([0, 0, 1, 1]),
            kinds=["node", "edge_index"],
        )
        found = []
        for step, weight in enumerate(weights):
            with torch.no_grad():
                net.module.linear.weight.fill_(weight / FEATURES)
            with torch.set_grad_enabled(step not in fresh):
                out = net(x, e)
            if out.requires_grad:
                net.zero_grad()
                out.sum().backward()
            found.append(out.detach().as_subclass(Tensor).flatten())
        return torch.stack(found)

    return run_ranks(2, rank, 20.0)


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_rows_are_as_old_as_the_option_says(staleness: int, threaded: bool) -> None:
    for found in steps([1, 2, 3, 4, 5, 6], staleness=staleness, stale="last", threaded=threaded):
        assert found[:, 0].tolist() == pytest.approx([max(1, t - staleness) for t in range(1, 7)])


def test_a_refresh_and_a_warm_up_are_synchronous() -> None:
    found = steps([1, 2, 3, 4, 5, 6, 7, 8], staleness=1, stale="last", warm_up=2, refresh_every=3)[0]
    assert found[:, 0].tolist() == pytest.approx([1, 2, 2, 3, 5, 5, 6, 8])


def test_a_forward_pass_without_gradients_is_fresh() -> None:
    found = steps([1, 2, 3, 4, 5], staleness=2, stale="last", fresh=(2, 3))[0]
    assert found[:, 0].tolist() == pytest.approx([1, 1, 3, 4, 1])  # the last of three training steps


def test_the_average_follows_what_arrives() -> None:
    found = steps([1, 2, 4, 8], staleness=1, smoothing=0.75)[0]
    averages = [1.0, 0.75 * 1 + 0.25 * 2]
    averages.append(0.75 * averages[-1] + 0.25 * 4)
    assert found[:, 0].tolist() == pytest.approx([1.0, *averages])


def test_the_line_through_the_last_two_arrivals() -> None:
    found = steps([1, 2, 4, 8, 9], staleness=1, stale="line")[0]
    assert found[:, 0].tolist() == pytest.approx([1, 1, 3, 6, 12])


@pytest.mark.parametrize(
    ("staleness", "forward", "backward"),
    [(1, 1, 1), ({"forward": 1, "backward": 0}, 1, 0), ({"backward": 1}, 0, 1), ({"linear": 1}, 0, 0), ({"": 1}, 1, 1)],
)
def test_directions_and_layers_apart(staleness: Any, forward: int, backward: int) -> None:
    cache = ProgramCache()
    edges = torch.tensor([[0, 1], [1, 0]])

    def rank(transport: InProcessTransport) -> list[tuple[float, float]]:
        options = sylvie_fx.Options(staleness=staleness, stale="last", warm_up=1, link=FAST)
        net = sylvie_fx.DistributedModule(Sum(), options, sylvie_fx.default_passes(), transport, cache)
        x, e = net.shard(
            torch.ones(2, FEATURES, dtype=torch.float64),
            edges,
            partition=torch.tensor([0, 1]),
            kinds=["node", "edge_index"],
        )
        found = []
        for t in range(1, 6):
            with torch.no_grad():
                net.module.linear.weight.fill_(t / FEATURES)
            net.zero_grad()
            out = net(x, e)
            (out * t).sum().backward()
            gradient = net.module.linear.weight.grad
            found.append((float(out.detach().as_subclass(Tensor)[0]), float(gradient[0, 0]) / 2))
        return found

    for found in run_ranks(2, rank, 20.0):
        assert [f for f, _ in found] == pytest.approx([max(1, t - forward) for t in range(1, 6)])
        assert [b for _, b in found] == pytest.approx([max(1, t - backward) for t in range(1, 6)])


def test_decoding_is_not_counted_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decoded takes as long however old it is; only the wait for a message tells whether the wire is worth hiding."""
    now = [0.0]
    monkeypatch.setattr("sylvie_fx.runtime.direction.time.perf_counter", lambda: now[0])

    class Late:
        def wait(self, timeout: float | None = None) -> None:
            now[0] += 2.0

    class Slow:
        def start(self, *arguments: Any) -> NumberedFlight:
            return NumberedFlight(0, Late())  # type: ignore[arg-type]

        def finish(self, flight: NumberedFlight, out: Tensor | None, **rest: Any) -> Tensor:
            now[0] += 5.0
            return torch.zeros(1, 1)

    empty = torch.empty(0, dtype=torch.int64)
    transport = InProcessGroup(1, 5.0).transport(0)
    link = Link.make(ExchangePlan(0, empty, (0,), (empty,), empty, 0), transport, "x", torch.device("cpu"))
    direction = Direction(Slow(), link, "exchange 0", Courier("program 0", 5.0, threaded=False), 0, bound=0)
    direction.collect(direction.start(torch.zeros(1, 1), None), 0)
    direction.collect_into(
        direction.start(torch.zeros(1, 1), None), 0, torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)
    )
    assert direction.waited_s == 4.0
