"""Channels: start and finish apart, several transfers in flight, smoothing, states, buffers that are used again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sylvie_fx.graphs.layout import RowLayout, exchange_plan
from sylvie_fx.ir.coding import Coding
from sylvie_fx.ir.errors import CommError
from sylvie_fx.runtime.channel import Channel, keys_arriving, keys_sent
from sylvie_fx.runtime.exchange import Link
from sylvie_fx.runtime.in_process import run_ranks
from sylvie_fx.runtime.transport import Transport

PARTS, ROWS, COLUMNS = 4, 60, 32
SHIFT = Coding(1, "dithered", "shift")
CODINGS = [
    Coding(1),
    SHIFT,
    Coding(1, "stochastic", "shift"),
    Coding(2, "dithered", "shift"),
    Coding(1, "rotated", "shift"),
    Coding(4, "dithered"),
    Coding(1, "nearest", "difference"),
    Coding(1, "nearest", "feedback"),
    Coding(16, "nearest"),
]


def on_ranks(run: Callable[[Transport, Link, Channel], Any], coding: Coding = SHIFT) -> list[Any]:
    """Run a function on every rank with a channel towards the halo; rank 3 owns rows that nobody needs."""
    generator = torch.Generator().manual_seed(3)
    owner = torch.randint(PARTS, (ROWS,), generator=generator)
    source, target = torch.randint(ROWS, (2, 150), generator=generator)
    source = source[owner[source] != 3]
    nodes, edges = RowLayout(owner, PARTS), RowLayout(owner[target[: len(source)]], PARTS)

    def rank(transport: Transport) -> Any:
        link = Link.make(
            exchange_plan(nodes, edges, source, transport.rank), transport, "exchange", torch.device("cpu")
        )
        rows = torch.cat(link.send_rows)
        sent = tuple(len(s) for s in link.send_rows)
        keys = keys_sent(nodes.rows(transport.rank)[rows], transport)
        arriving = keys_arriving(link.plan.halo_ids, link.plan.receive_counts)
        return run(transport, link, Channel(coding, rows, keys, sent, link.plan.receive_counts, arriving, None))

    return run_ranks(PARTS, rank, 30.0)


def rows_of(link: Link, step: int, rank: int) -> Tensor:
    return torch.randn(link.plan.own, COLUMNS, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_three_in_flight_give_what_one_at_a_time_gives(coding: Coding) -> None:
    """Even where another thread finishes than the one that starts; the result is the halo rows alone."""

    def run(transport: Transport, link: Link, channel: Channel) -> tuple[list[Tensor], list[Tensor]]:
        twin, halo = replace(channel, _wires={}), link.plan.halo
        alone = []
        for step in range(6):
            out = torch.full((halo, COLUMNS), torch.nan)
            twin.transfer(rows_of(link, step, transport.rank), out, link, f"alone {step}", step, 7, add=False)
            alone.append(out)
        together = [torch.full((halo, COLUMNS), torch.nan) for _ in range(6)]
        for first in (0, 3):
            flights = []
            for step in range(first, first + 3):
                values = rows_of(link, step, transport.rank)
                flights.append(channel.start(values, link, f"together {step}", step, 7))
                values.fill_(torch.nan)  # free again

            def finish(first: int = first, flights: Any = flights) -> None:
                for step in range(first, first + 3):
                    channel.finish(flights[step - first], together[step], add=False)

            other = threading.Thread(target=finish)
            other.start()
            other.join()
        return alone, together

    for alone, together in on_ranks(run, coding):
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one, other)


def test_a_plain_exchange_adds_peer_after_peer() -> None:
    """At 8 bits, values that the levels hold exactly: repeated rows are added, in the rows at ``places``."""

    def run(transport: Transport, link: Link, towards: Channel) -> None:
        back = Channel(
            Coding(8),
            None,
            keys_sent(link.plan.halo_ids, transport),
            towards.receive_counts,
            towards.send_counts,
            torch.zeros_like(towards.keys),
            towards.rows,
        )
        out = torch.ones(link.plan.own, COLUMNS)
        values = torch.full((link.plan.halo, COLUMNS), float(transport.rank + 1))
        back.transfer(values, out, link, "back", 0, 0, add=True)
        expected = torch.ones(link.plan.own, COLUMNS)
        for peer, rows in enumerate(link.send_rows):
            expected[rows] += peer + 1
        assert torch.equal(out, expected)

    on_ranks(run)


def test_smoothing_averages_what_arrives_with_a_decay_that_may_change() -> None:
    def run(transport: Transport, link: Link, channel: Channel) -> None:
        twin, expected = replace(channel, _wires={}), torch.zeros(0)
        for step, decay in enumerate((0.9, 0.5, 0.8, 0.0, 0.7)):
            values = rows_of(link, step, transport.rank)
            plain, smooth = (torch.zeros(link.plan.halo, COLUMNS) for _ in range(2))
            twin.transfer(values, plain, link, f"plain {step}", step, 7, add=False)
            flight = channel.start(values, link, f"smooth {step}", step, 7)
            channel.finish(flight, smooth, add=False, smooth=decay)
            expected = plain if step == 0 else decay * expected + (1 - decay) * plain
            torch.testing.assert_close(smooth, expected)
            assert channel.average is not None
            assert torch.equal(channel.average, smooth)

    on_ranks(run)


def test_a_state_is_gone_on_from_exactly() -> None:
    def run(transport: Transport, link: Link, channel: Channel) -> None:
        def go(through: Channel, step: int, name: str) -> Tensor:
            out = torch.zeros(link.plan.halo, COLUMNS)
            flight = through.start(rows_of(link, step, transport.rank), link, f"{name} {step}", step, 7)
            with pytest.raises(CommError, match="while 1 transfers are in flight"):
                through.state()
            through.finish(flight, out, add=False, smooth=0.5)
            return out

        for step in range(3):
            go(channel, step, "first")
        saved = channel.state()
        assert set(saved) == {"sent", "received", "average"}
        expected = [go(channel, step, "on") for step in range(3, 6)]
        again = replace(channel, sent=None, received=None, average=None, _started=0, _finished=0)
        again.load_state(saved)
        assert all(torch.equal(e, go(again, step, "again")) for step, e in zip(range(3, 6), expected, strict=True))
        with pytest.raises(CommError, match="does not belong to this exchange"):
            again.load_state({"sent": torch.zeros(1000, COLUMNS)})

    on_ranks(run)


def test_buffers_are_used_again() -> None:
    """As many are made as were in flight at once, however many steps follow."""

    def run(transport: Transport, link: Link, channel: Channel) -> set[int]:
        out = torch.zeros(link.plan.halo, COLUMNS)
        seen = set()
        flights = [channel.start(rows_of(link, 0, transport.rank), link, f"step {step}", step, 7) for step in (0, 1)]
        for step in range(2, 60):
            channel.finish(flights.pop(0), out, add=False)
            flights.append(channel.start(rows_of(link, step, transport.rank), link, f"step {step}", step, 7))
            if step > 10:
                seen |= {flights[-1].sent.data_ptr(), flights[-1].arrived.data_ptr()}
        for flight in flights:
            channel.finish(flight, out, add=False)
        return seen - {0}

    assert all(len(seen) <= 4 for seen in on_ranks(run))


@pytest.mark.parametrize(
    ("coding", "expected"), [(SHIFT, [32, 4, 4, 1, 1]), (Coding(1, "rotated", "shift"), [32, 4, 4, 1, 1])]
)
def test_the_first_transfers_take_more_bits(coding: Coding, expected: list[int]) -> None:
    """The two ends stay of one mind over the change of widths: rows that stand still arrive better and better."""

    def run(transport: Transport, link: Link, channel: Channel) -> tuple[list[int], list[Tensor]]:
        bits, outs = [], []
        for step in range(5):
            flight = channel.start(rows_of(link, min(step, 1), transport.rank), link, f"step {step}", step, 7)
            bits.append(flight.wire.outgoing.spec.bits)
            outs.append(channel.finish(flight, None, add=False))
        channel.coding = Coding(32)
        exact = torch.zeros(link.plan.halo, COLUMNS)
        channel.transfer(rows_of(link, 1, transport.rank), exact, link, "exact", 9, 7, add=False)
        return bits, [(out - exact).norm() for out in outs]

    for bits, errors in on_ranks(run, replace(coding, warm_up=3)):
        assert bits == expected
        assert errors[1] < 0.1 * errors[0] or errors[0] == 0
        assert errors[4] < errors[1] or errors[0] == 0


def test_transfers_are_finished_in_order() -> None:
    def run(transport: Transport, link: Link, channel: Channel) -> None:
        values = rows_of(link, 0, transport.rank)
        first, second = (channel.start(values, link, f"step {step}", step, 7) for step in range(2))
        out = torch.zeros(link.plan.halo, COLUMNS)
        with pytest.raises(AssertionError, match="in the order"):
            channel.finish(second, out, add=False)
        channel.finish(first, out, add=False)
        channel.finish(second, out, add=False)

    on_ranks(run)


def test_a_measurement_is_of_the_difference_to_the_shift() -> None:
    def run(transport: Transport, link: Link, channel: Channel) -> None:
        values, out = rows_of(link, 0, transport.rank), torch.zeros(link.plan.halo, COLUMNS)
        for step in range(2):
            channel.measuring = step == 1
            channel.transfer(values, out, link, f"step {step}", step, 7, add=False)
        assert channel.measure is not None
        assert channel.measure.rows == len(channel.keys)
        assert channel.measure.spread == 0.0  # the first message was exact, and the rows stand still

    on_ranks(run)
