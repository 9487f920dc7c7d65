from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir.errors import OptionError
from sylvie_fx.runtime import adaptor
from sylvie_fx.runtime.direction import movement
from sylvie_fx.runtime.in_process import InProcessTransport, run_ranks

FEATURES = 2048
FAST = 100.0  # Gbit/s: the hidden rows cross, and are not computed twice


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 4, dtype=torch.float64)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.linear(x).relu()
        return torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])


def train(steps: int, rate: float, **options: Any) -> list[tuple[dict[int, int], list[Any], str]]:
    """Histogram of ages, decisions and explain() of each of two ranks."""
    torch.manual_seed(0)
    model, cache = Layer(), ProgramCache()
    x, edges = torch.randn(30, FEATURES, dtype=torch.float64), torch.randint(30, (2, 200))

    def rank(transport: InProcessTransport) -> tuple[dict[int, int], list[Any], str]:
        net = sylvie_fx.DistributedModule(
            copy.deepcopy(model),
            sylvie_fx.Options(staleness="auto", link=FAST, **options),
            sylvie_fx.default_passes(),
            transport,
            cache,
        )
        own, e = net.shard(x, edges, partition="random")
        optimizer = torch.optim.SGD(net.parameters(), rate)
        for _ in range(steps):
            optimizer.zero_grad()
            (net(own, e) ** 2).mean().backward()
            optimizer.step()
        machine = next(iter(net.engine._bindings.values())).machine
        return net.stats.staleness, machine._adaptor.decisions, net.explain()

    return run_ranks(2, rank, 60.0)


def ages(decisions: list[Any], step: int) -> set[int]:
    return {age for at, _, _, age, _, _ in decisions if at == step}


def test_slow_exchanges_of_steady_rows_get_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptor, "WORTH", 0.0)  # ranks that are threads wait for each other, if only a little
    results = train(30, 1e-6)
    for histogram, decisions, text in results:
        assert ages(decisions, 5) == {1}
        assert histogram == {0: 10, 1: 50}
        assert "age 1 since step 5" in text
        assert "up to 1, adaptive" in text
    assert results[0][1] == results[1][1], "all ranks decide alike"


def test_nothing_gets_stale_where_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptor, "WORTH", 1e9)
    for histogram, decisions, _ in train(12, 1e-6):
        assert ages(decisions, 5) == {0}
        assert histogram == {0: 24}


def test_rows_that_move_too_far_are_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptor, "WORTH", 0.0)
    monkeypatch.setattr(adaptor, "PERIOD", 6)
    for _, decisions, _ in train(12, 1e-6, drift=1e-9):
        assert ages(decisions, 5) == {0}
        assert ages(decisions, 11) == {0}
    for _, decisions, _ in train(12, 1e-6, drift=10.0):
        assert ages(decisions, 11) == {1}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"staleness": "sometimes"}, "staleness='sometimes'"),
        ({"staleness": 1.5}, "staleness=1.5"),
        ({"staleness": {"conv1": -1}}, "staleness\\['conv1'\\]=-1"),
        ({"staleness": "auto", "warm_up": 2}, "warm_up=2"),
        ({"smoothing": 1.0}, "smoothing=1.0"),
        ({"stale": "guess"}, "stale='guess'"),
        ({"drift": 0.0}, "drift=0.0"),
        ({"refresh_every": -1}, "refresh_every=-1"),
        ({"link": 0}, "link=0"),
        ({"link": "fast"}, "link='fast'"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        sylvie_fx.Options(**options)


def test_movement_is_told_from_masks() -> None:
    """Of 640,000 numbers, whose sums of squares are known to 0.4 %: noise of 1 of the rows' norm looks like at most 0.06."""
    rows, way = torch.randn(10000, 64), torch.randn(10000, 64)
    masked = [torch.nn.functional.dropout(rows, 0.5) for _ in range(3)]
    assert movement(*masked) < 0.06
    moving = [torch.nn.functional.dropout(rows + 0.3 * k * way, 0.5) for k in range(3)]
    assert 0.15 < movement(*moving) < 0.3
    assert abs(movement(rows, rows + 0.3 * way, rows + 0.6 * way) - 0.3 / 1.36**0.5) < 0.01
    assert movement(rows, -rows, rows) > 1.0
