"""One direction of an exchange over the steps: rows leave at the start, and arrive, perhaps steps later, at the wait."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.runtime.carrier import Carrier
from sylvie_fx.runtime.exchange import Link
from sylvie_fx.runtime.lanes import Courier, Handle


def movement(first: Tensor, second: Tensor, third: Tensor) -> float:
    """How far rows move in a step, relative to their norm, without what is drawn anew in each step.

    With noise of variance ``s`` and movement by ``m`` a step, rows are ``2 s + m^2`` apart after one step and ``2 s + 4 m^2`` after
    two. Rows that go to and fro are nearer after two steps than after one, which counts as well.

    Args:
        first, second, third: ``[rows, columns]`` of three steps in a row.

    >>> rows = torch.ones(2, 3)
    >>> [round(movement(rows, b, c), 3) for b, c in ((rows, rows), (1.1 * rows, 1.2 * rows), (2 * rows, rows))]
    [0.0, 0.083, 0.577]
    """
    power = float(third.square().sum())
    one = float((second - first).square().sum() + (third - second).square().sum()) / 2
    two = float((third - first).square().sum())
    return math.sqrt(abs(two - one) / 3 / power) if power > 0.0 else 0.0


class Direction:
    """One direction of one exchange over the steps: what is in flight, and the newest rows that have landed.

    Transfers are numbered from 0. Whoever collects transfer ``n`` with age ``a`` gets the rows of transfer ``n - a`` or,
    where ``a`` is larger than what has ever started, of the first one. Where no transfer started in some of the training
    steps between, it gets newer ones: none is older than the bound in steps. Which rows these are depends on no timing.

    Args:
        carrier: How rows travel.
        link: The exchange.
        label: Names it in errors.
        courier: Where the work runs.
        seed: Of the rounding.
        bound: The age that is never exceeded, in training steps.
        line: Whether old rows are extrapolated along the line through the last two arrivals.

    Attributes:
        landed: Number of the newest transfer that has arrived here, -1 for none.
        rows: What stands for it; None where it was added at once.
        waited_s: Seconds for which the computing thread has waited for arrivals; whoever reads it resets it.
        measuring: Whether ``drift`` is measured in the present step; three steps make one measurement.
        drift: How far the sent rows move from one step to the next, relative to their norm. What is drawn anew in each step,
            a dropout's mask, is no movement, for it moves them as far in two steps as in one.
    """

    def __init__(
        self, carrier: Carrier, link: Link, label: str, courier: Courier, seed: int, bound: int, line: bool = False
    ) -> None:
        self.carrier, self.label, self.bound = carrier, label, bound
        self._link, self._courier, self._seed = link, courier, seed
        self._flights: deque[tuple[int, float | None, Handle[Any], Handle[Tensor] | None]] = deque()
        self._started = 0
        self._updates: dict[int, int] = {}  # of the transfers that can still be wanted
        self._line = line
        self._slope: Tensor | None = None
        self.waited_s, self.drift, self.measuring = 0.0, 0.0, False
        self._before: list[Tensor] = []
        self.landed = -1
        self.rows: Tensor | None = None

    def start(self, values: Tensor, smooth: float | None, update: int | None = None) -> int:
        """Send rows.

        Args:
            values: ``[rows, columns]``; not written to until they have left.
            smooth: Weight of the past in the running average of what arrives; None for no average.
            update: Number of the training step; by default that of the transfer.

        Returns:
            The number of the transfer.
        """
        number = self._started
        self._started += 1
        self._updates[number] = number if update is None else update
        self._updates.pop(number - self.bound - 2, None)
        if smooth is not None and number and self._in_time(number, 1) == 0:
            smooth = 0.0  # the average begins anew: what is in it is too old
        if self.measuring:
            self._measure(values)
        what = f"{self.label} transfer {number}"
        sent = self._courier.send(lambda: self.carrier.start(values, self._link, self.label, number, self._seed), what)
        landing = None
        if self._courier.threaded:
            landing = self._courier.receive(
                lambda: self.carrier.finish(sent.result(), None, add=False, smooth=smooth), what
            )
        self._flights.append((number, smooth, sent, landing))
        return number

    def collect(self, number: int, age: int) -> Tensor:
        """The rows ``[arriving, columns]`` for a transfer; nobody writes to them afterwards.

        Raises:
            CommError: They did not come.
        """
        age = self._in_time(number, age)
        with self._courier.recorder.scope(staleness=age):
            self._land(number - age)
        assert self.rows is not None
        assert 0 <= number - self.landed <= self.bound, "no row is older than the bound"
        old = number - self.landed
        self._courier.counters.used(old)
        if old and self._slope is not None:
            return torch.add(self.rows, self._slope, alpha=old)
        return self.rows

    def collect_into(self, number: int, age: int, out: Tensor, places: Tensor) -> None:
        """Add the rows for a transfer to rows ``places`` of ``out``."""
        age = self._in_time(number, age)
        due = number - age
        # At the bound nobody can want the same rows again: they need not be kept, and are added as they are decoded.
        unwanted = age >= self.bound and (self.landed >= 0 or self.bound == 0)
        if unwanted and not self._line and not self._courier.threaded:
            self._land(due - 1)
            if self._flights and self._flights[0][0] == due:
                _, smooth, sent, _ = self._flights.popleft()
                with self._courier.recorder.scope(staleness=number - due):
                    self.carrier.finish(self._arrived(sent), out, add=True, smooth=smooth)
                self.rows, self.landed = None, due
                self._courier.counters.used(number - due)
                return
        out.index_add_(0, places, self.collect(number, age).to(out.dtype))

    def _in_time(self, number: int, age: int) -> int:
        """The largest age up to this one whose transfer is no more training steps old than the bound."""
        age = min(age, self.bound, number)
        while age and self._updates[number] - self._updates[number - age] > self.bound:
            age -= 1
        return age

    def _land(self, newest: int) -> None:
        """Take what has arrived, in order, up to a transfer; the first one where nothing has landed yet."""
        while self._flights and (self.landed < 0 or self._flights[0][0] <= newest):
            number, smooth, sent, landing = self._flights.popleft()
            if landing is None:
                rows = self.carrier.finish(self._arrived(sent), None, add=False, smooth=smooth)
            else:
                begun = time.perf_counter()
                rows = landing.result()
                self.waited_s += time.perf_counter() - begun
            if self._line:
                steps = self._updates.get(number, 0) - self._updates.get(number - 1, 0)
                self._slope = rows - self.rows if self.rows is not None and steps == 1 else None
            self.rows, self.landed = rows, number

    def _arrived(self, sent: Handle[Any]) -> Any:
        """A flight whose messages are here. To decode them is work, not waiting: it is no shorter for older rows."""
        flight = sent.result()
        begun = time.perf_counter()
        flight.pending.wait()
        self.waited_s += time.perf_counter() - begun
        return flight

    def _measure(self, values: Tensor) -> None:
        self._before = [t for t in self._before if t.shape == values.shape]
        if len(self._before) < 2:
            self._before.append(values.clone())
            return
        (first, second), self._before = self._before, []
        self.drift = movement(first, second, values)

    def settle(self) -> None:
        """Return when every transfer that was started has left."""
        for _, _, sent, _ in self._flights:
            sent.result()

    def drain(self) -> None:
        """Take everything that is in flight, so that no peer's message is left behind."""
        self._land(self._started)
