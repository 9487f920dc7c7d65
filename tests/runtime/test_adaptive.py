"""Adaptive widths: the greedy choice, and the controller on in-process ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir.coding import Coding
from sylvie_fx.ir.errors import OptionError
from sylvie_fx.kernels.codec import decode, encode
from sylvie_fx.kernels.wire import CodecSpec, Rounding
from sylvie_fx.runtime.adaptive import WIDTHS, Measure, choose_widths, variance
from sylvie_fx.runtime.in_process import run_ranks
from sylvie_fx.runtime.transport import Transport

measures = st.lists(
    st.builds(Measure, st.floats(0.01, 1e6), st.floats(0.01, 1e6), st.integers(1, 1000), st.integers(1, 512)),
    min_size=1,
    max_size=8,
)


@given(measures, st.floats(1.0, 1e7))
@settings(deadline=None)
def test_a_budget_is_kept_and_spent(found: list[Measure], budget: float) -> None:
    widths = choose_widths(found, bytes_per_step=budget)
    spent = sum(m.rows * Coding(w).row_bytes(m.columns) for m, w in zip(found, widths, strict=True))
    least = sum(m.rows * Coding(1).row_bytes(m.columns) for m in found)
    assert spent <= max(budget, least)
    for i, (m, w) in enumerate(zip(found, widths, strict=True)):
        if w < 8:
            wider = WIDTHS[WIDTHS.index(w) + 1]
            price = m.rows * (Coding(wider).row_bytes(m.columns) - Coding(w).row_bytes(m.columns))
            assert price == 0 or spent + price > budget, (i, widths)


@given(measures, st.floats(0.001, 2.0))
@settings(deadline=None)
def test_an_error_target_is_met_where_eight_bits_can(found: list[Measure], error: float) -> None:
    for m, w in zip(found, choose_widths(found, relative_error=error), strict=True):
        assert w == 8 or variance(m.spread, w) <= error**2 * m.power
        if w > 1:
            narrower = WIDTHS[WIDTHS.index(w) - 1]
            assert variance(m.spread, narrower) > error**2 * m.power


@pytest.mark.parametrize("rounding", ["stochastic", "dithered"])
def test_the_measure_predicts_the_error_of_random_rounding(rounding: str) -> None:
    x, keys = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0)), torch.arange(2000)
    for bits in WIDTHS:
        spec = CodecSpec(bits, Rounding(rounding))
        message = encode(x, None, spec, 0, 0, keys)
        error = (decode(message, spec, len(x), 64, step=0, row_keys=keys) - x).square().sum().item()
        predicted = variance(Measure.of(x, None, rounding).spread, bits)
        if rounding == "dithered":
            assert abs(error / predicted - 1.0) < 0.05, bits
        # At one bit numbers lie far from both levels, which the uniform model behind the estimate does not know.
        assert 0.5 < error / predicted < 2.0, bits


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(600, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            h = torch.relu(layer(x))
            x = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
        return x


def test_ranks_agree_on_widths_and_keep_the_budget() -> None:
    generator = torch.Generator().manual_seed(0)
    x, edges = torch.randn(60, 600, generator=generator), torch.randint(60, (2, 300), generator=generator)
    model, cache = Net(), ProgramCache()

    def run(transport: Transport, budget: float) -> tuple[list[tuple[str, str]], int]:
        options = sylvie_fx.Options(bits="auto", bytes_per_step=budget, choose_every=5)
        net = sylvie_fx.DistributedModule(copy.deepcopy(model), options, sylvie_fx.default_passes(), transport, cache)
        data = net.shard(x, edges, partition="random")
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(4):
            before = transport.bytes_sent
            net(*data).sin().mean().backward()
            optimizer.step()  # rows that stand still differ in nothing from what the other end has
        machine = next(iter(net.engine._bindings.values())).machine
        return list(machine.codings.values()), transport.bytes_sent - before

    tight = run_ranks(3, lambda t: run(t, 1.0), 60.0)
    wide = run_ranks(3, lambda t: run(t, 1e9), 60.0)
    assert all(w == tight[0][0] for w, _ in tight), tight
    assert all("1-bit" in way for site in tight[0][0] for way in site), tight
    assert all("8-bit" in way for site in wide[0][0] for way in site), wide
    assert sum(b for _, b in tight) < sum(b for _, b in wide)


def test_a_budget_needs_adaptive_bits() -> None:
    with pytest.raises(OptionError, match="bytes_per_step"):
        sylvie_fx.Options(bits=1, bytes_per_step=1000)
