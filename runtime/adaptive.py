"""Adaptive bits: measure how coarse each exchange's rows would be, and spend a budget of bytes where it helps most.

As in AdaQP (Wan, Zhao, Wu; MLSys 2023), and simpler: one width for each exchange and direction, chosen greedily. The
variance of stochastic rounding of a row to L levels over its span s is s^2 / (6 (L - 1)^2) a number on average, half of
that where rounding is dithered, so that one number an exchange (the sum of squared spans) tells the error at every width.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sylvie_fx.ir.coding import Coding
from sylvie_fx.ir.options import Options
from sylvie_fx.runtime.transport import Transport

if TYPE_CHECKING:
    from sylvie_fx.runtime.channel import Channel

log = logging.getLogger(__name__)

WIDTHS = (1, 2, 4, 8)


@dataclass
class Measure:
    """What one channel measured of the rows of one step, on one rank.

    Attributes:
        spread: Sum over rows of columns * span^2 / 6, dithered / 12: the variance at one level of width.
        power: Sum of squared numbers.
        rows: Rows sent.
        columns: Numbers a row.
    """

    spread: float = 0.0
    power: float = 0.0
    rows: int = 0
    columns: int = 0

    @staticmethod
    def of(rows: Tensor, reference: Tensor | None, rounding: str = "stochastic") -> Measure:
        """Measure rows ``[n, columns]``, or their difference to what the other end already has."""
        n, columns = rows.shape
        if n == 0 or columns == 0:
            return Measure(columns=columns)
        values = rows.to(torch.float32)
        coded = values if reference is None else values - reference
        low, high = coded.aminmax(dim=1)
        spread = (high - low).double().square().sum().item() * columns / (12.0 if rounding == "dithered" else 6.0)
        return Measure(spread, values.double().square().sum().item(), n, columns)

    def tensor(self) -> list[float]:
        """As numbers, for the sum over ranks."""
        return [self.spread, self.power, float(self.rows), float(self.columns)]


def variance(spread: float, bits: int) -> float:
    """Variance that a width adds to the rows that were measured."""
    return spread / (2.0**bits - 1.0) ** 2


def choose_widths(
    measures: Sequence[Measure], *, bytes_per_step: float | None = None, relative_error: float | None = None
) -> list[int]:
    """The width of each channel.

    Args:
        measures: One for each channel, summed over all ranks.
        bytes_per_step: All channels together send no more than this (never below one bit).
        relative_error: Every channel's error stays below this part of its rows' norm, at 8 bits at most.

    Returns:
        One of 1, 2, 4, 8 for each channel.

    >>> choose_widths([Measure(100.0, 10.0, 10, 16), Measure(1.0, 10.0, 10, 16)], bytes_per_step=150)
    [2, 1]
    """
    chosen = [0] * len(measures)
    if relative_error is not None:
        for i, m in enumerate(measures):
            while WIDTHS[chosen[i]] < 8 and variance(m.spread, WIDTHS[chosen[i]]) > relative_error**2 * m.power:
                chosen[i] += 1
        return [WIDTHS[c] for c in chosen]
    assert bytes_per_step is not None
    spent = sum(_bytes(m, 0) for m in measures)
    while True:
        best, gain = None, 0.0
        for i, m in enumerate(measures):
            if chosen[i] + 1 == len(WIDTHS) or not m.rows or m.power <= 0.0:
                continue
            price = _bytes(m, chosen[i] + 1) - _bytes(m, chosen[i])
            if spent + price > bytes_per_step:
                continue
            # Relative to the rows' own size: gradients are small, and count as much as features. Whole bytes make some
            # widths free.
            drop = variance(m.spread, WIDTHS[chosen[i]]) - variance(m.spread, WIDTHS[chosen[i] + 1])
            worth = drop / m.power / price if price else math.inf
            if worth > gain:
                best, gain = i, worth
        if best is None:
            return [WIDTHS[c] for c in chosen]
        spent += _bytes(measures[best], chosen[best] + 1) - _bytes(measures[best], chosen[best])
        chosen[best] += 1


class WidthController:
    """Chooses the widths of a machine's channels again every few steps; every rank makes the same choice.

    Args:
        channels: The channels with adaptive width, by site, each with its direction (True: backward).
        options: The options of distribute().
        transport: For the sum of what ranks measured.
    """

    def __init__(self, channels: Sequence[tuple[Channel, bool]], options: Options, transport: Transport) -> None:
        self.channels, self.options, self.transport = channels, options, transport

    def begin(self, step: int) -> None:
        """Called when a step begins, on every rank: measure in the second step of a period, choose in the third."""
        phase = step % self.options.choose_every
        for channel, _ in self.channels:
            channel.measuring = phase == 1
        if phase == 2 and self.channels:
            self._choose(step)

    def _choose(self, step: int) -> None:
        own = [(channel.measure or Measure()).tensor() for channel, _ in self.channels]
        total = self.transport.all_reduce(torch.tensor(own, dtype=torch.float64), f"widths step {step}")
        columns = self.transport.all_reduce(
            torch.tensor([o[3] for o in own], dtype=torch.float64), f"columns step {step}", "max"
        )
        measures = [
            Measure(s, p, int(r), int(c)) for (s, p, r, _), c in zip(total.tolist(), columns.tolist(), strict=True)
        ]
        budget = self.options.bytes_per_step
        error = None if budget is not None else self.options.relative_error
        widths = choose_widths(measures, bytes_per_step=budget, relative_error=error)
        for (channel, backward), bits in zip(self.channels, widths, strict=True):
            channel.coding = self.options.at_width(bits, backward)
        log.info("step %d: bits %s", step, widths)


def _bytes(measure: Measure, choice: int) -> float:
    return measure.rows * Coding(WIDTHS[choice]).row_bytes(measure.columns)
