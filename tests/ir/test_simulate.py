"""The simulator: what it predicts by hand, and what must hold for every schedule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_support import NAMES, schedules

from sylvie_fx.ir.errors import VerifyError
from sylvie_fx.ir.schedule import Action, Schedule, Verb
from sylvie_fx.ir.simulate import LinkModel, measured_bytes, measured_seconds, simulate
from sylvie_fx.ir.timeline import BACKWARD, FORWARD, Event, Timeline

RANKS = 3
SECONDS = {
    (direction, name): 0.25 * (i + 1)
    for i, (direction, name) in enumerate((d, n) for d in (FORWARD, BACKWARD) for n in (*NAMES, "start 0", "wait 1"))
}


def size(action: Action, sender: int, receiver: int) -> int:
    """Bytes that differ by pair, and are none for one of them."""
    return 100 * ((2 * sender + receiver + (action.exchange or 0)) % 4)


def both(text: str) -> list[Schedule]:
    return [Schedule.parse(f"rank {rank}\nforward\n{text}") for rank in (0, 1)]


def spans(timeline: Timeline, rank: int = 0) -> list[tuple[str, str, float, float]]:
    return [(e.kind, e.name, e.start, e.end) for e in timeline.select(rank=rank)]


def test_what_is_computed_meanwhile_hides_the_wire() -> None:
    text = "compute a\nstart 0 a\ncompute b\nwait 0 age 0\ncompute c"
    seconds = {("forward", "a"): 1.0, ("forward", "b"): 2.0, ("forward", "c"): 1.0, ("forward", "wait 0"): 0.5}
    timeline = simulate(both(text), seconds, LinkModel(0.5, 100.0), lambda action, a, b: 250)
    assert spans(timeline) == [
        ("compute", "a", 0.0, 1.0),
        ("compute", "b", 1.0, 3.0),
        ("wire", "exchange 0 to rank 1", 1.0, 4.0),
        ("wait", "exchange 0", 3.0, 4.0),
        ("dequantise", "exchange 0", 4.0, 4.5),
        ("compute", "c", 4.5, 5.5),
    ]


def test_lanes_code_and_decode_beside_the_operators() -> None:
    text = "compute a\nstart 0 a\nstart 1 a\ncompute b\nwait 1 age 0\nwait 0 age 0"
    seconds = {("forward", "a"): 1.0, ("forward", "b"): 3.0, ("forward", "start 0"): 0.5, ("forward", "start 1"): 0.5,
               ("forward", "wait 0"): 0.25, ("forward", "wait 1"): 0.25}  # fmt: skip
    timeline = simulate(both(text), seconds, LinkModel(0.0, 100.0), lambda action, a, b: 100, lanes=True)
    assert [s for s in spans(timeline) if s[0] != "wire"] == [
        ("compute", "a", 0.0, 1.0),
        ("quantise", "exchange 0", 1.0, 1.5),
        ("compute", "b", 1.0, 4.0),
        ("quantise", "exchange 1", 1.5, 2.0),
        ("dequantise", "exchange 0", 2.5, 2.75),
        ("dequantise", "exchange 1", 3.5, 3.75),
        ("wait", "exchange 1", 4.0, 4.0),
        ("wait", "exchange 0", 4.0, 4.0),
    ]
    assert {e.thread for e in timeline.select("quantise")} == {"send"}
    without = simulate(both(text), seconds, LinkModel(0.0, 100.0), lambda action, a, b: 100)
    assert (timeline.seconds, without.seconds) == (4.0, 5.5)


def test_a_stale_wait_takes_the_step_before() -> None:
    text = "compute a\nstart 0 a\nwait 0 age 1\ncompute b"
    seconds = {("forward", "a"): 1.0, ("forward", "b"): 1.0}
    timeline = simulate(both(text), seconds, LinkModel(0.0, 100.0), lambda action, a, b: 150, steps=3)
    waits = [(e.step, e.start, e.end, e.staleness) for e in timeline.select("wait", 0)]
    assert waits == [(0, 1.0, 2.5, 0), (1, 4.5, 4.5, 1), (2, 6.5, 6.5, 1)], "the first step is synchronous"


def test_messages_of_a_link_are_one_behind_the_other() -> None:
    text = "start 0 a\nstart 1 b\nwait 1 age 0\nwait 0 age 0"
    timeline = simulate(both(text), {}, LinkModel(0.0, 100.0), lambda action, a, b: 100)
    assert [(e.exchange, e.start, e.end) for e in timeline.select("wire", 0)] == [(0, 0.0, 1.0), (1, 1.0, 2.0)]
    assert [(e.exchange, e.end) for e in timeline.select("wait", 0)] == [(1, 2.0), (0, 2.0)]


def test_a_slow_rank_is_waited_for() -> None:
    fast, slow = (Schedule.parse(f"rank {r}\nforward\n{t}reduce sum") for r, t in enumerate(("", "compute a\n")))
    timeline = simulate([fast, slow], {("forward", "a"): 3.0}, LinkModel(0.25, 100.0), lambda action, a, b: 50)
    assert [(e.rank, e.start, e.end) for e in timeline.select("wait")] == [(0, 0.0, 3.75), (1, 3.0, 3.75)]


def test_links_are_physical() -> None:
    for latency, rate in ((-1.0, 1.0), (0.0, 0.0), (float("nan"), 1.0)):
        with pytest.raises(VerifyError, match="there is no link"):
            LinkModel(latency, rate)


def computed(schedule: Schedule, lanes: bool) -> float:
    """Seconds of the main thread in a step."""
    beside = (Verb.REDUCE, Verb.START, Verb.WAIT) if lanes else (Verb.REDUCE,)
    return sum(SECONDS.get(a.key, 0.0) for a in schedule.actions if a.verb not in beside)


def sent(schedule: Schedule, other: int) -> int:
    """Bytes to a rank in a step."""
    return sum(size(a, schedule.rank, other) for a in schedule.actions if a.verb in (Verb.START, Verb.REDUCE))


links = st.builds(LinkModel, st.floats(0, 2), st.floats(10, 10_000))


@given(schedules(RANKS), links, st.integers(1, 4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_faster_than_the_processor_nor_than_the_wire(
    all_ranks: Sequence[Schedule], link: LinkModel, steps: int, lanes: bool
) -> None:
    timeline = simulate(all_ranks, SECONDS, link, size, steps, lanes)
    for schedule in all_ranks:
        assert timeline.seconds >= steps * computed(schedule, lanes) - 1e-6
        for other in range(RANKS):
            if other != schedule.rank:
                assert timeline.seconds >= steps * sent(schedule, other) / link.bytes_per_second - 1e-6


@given(schedules(RANKS), links, links, st.integers(1, 4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_better_link_is_never_slower(
    all_ranks: Sequence[Schedule], one: LinkModel, two: LinkModel, steps: int, lanes: bool
) -> None:
    better = LinkModel(min(one.latency, two.latency), max(one.bytes_per_second, two.bytes_per_second))
    slow = simulate(all_ranks, SECONDS, one, size, steps, lanes)
    assert simulate(all_ranks, SECONDS, better, size, steps, lanes).seconds <= slow.seconds + 1e-6


@given(schedules(RANKS), links, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_staleness_is_never_slower_and_stays_within_its_age(
    all_ranks: Sequence[Schedule], link: LinkModel, steps: int
) -> None:
    fresh = [
        Schedule(s.rank, tuple(Action(a.verb, a.name, a.direction, a.exchange) for a in s.actions)) for s in all_ranks
    ]
    stale = simulate(all_ranks, SECONDS, link, size, steps)
    assert stale.seconds <= simulate(fresh, SECONDS, link, size, steps).seconds + 1e-6
    for schedule in all_ranks:
        ages = {(a.exchange, a.direction): a.age for a in schedule.actions if a.verb is Verb.WAIT}
        for event in stale.select("wait", schedule.rank):
            if event.exchange is not None:
                assert event.step is not None
                assert event.staleness == min(ages[event.exchange, event.direction or ""], event.step)


@given(schedules(RANKS), links)
@settings(max_examples=60, deadline=None)
def test_a_rank_does_one_thing_at_a_time_in_order(all_ranks: Sequence[Schedule], link: LinkModel) -> None:
    timeline = simulate(all_ranks, SECONDS, link, size, 2)
    for schedule in all_ranks:
        own = [e for e in timeline.select(rank=schedule.rank) if e.kind != "wire"]
        # Several events may begin at the same time, so their order of that time is not asked for.
        assert all(b.start >= a.end - 1e-9 for a, b in itertools.pairwise(own) if b.start > a.start)
        names = [a.name for a in schedule.actions if a.verb is Verb.COMPUTE]
        assert sorted(e.name for e in own if e.kind == "compute") == sorted(2 * names)


def test_seconds_of_a_recording() -> None:
    def event(
        kind: str, name: str, seconds: float, step: int, direction: str = FORWARD, exchange: int | None = None,
        program: str = "program 0",
    ) -> Event:  # fmt: skip
        return Event(kind, name, 1.0, 1.0 + seconds, 0, "main", exchange, direction, step, program=program)

    timeline = Timeline(
        (
            event("compute", "linear", 1.0, 0), event("compute", "linear", 3.0, 1), event("compute", "linear", 2.0, 2),
            event("compute", "linear", 1.0, 0, BACKWARD), event("compute", "linear", 4.0, 0, BACKWARD),
            event("quantise", "label", 0.5, 0, FORWARD, 2), event("dequantise", "label", 0.25, 0, FORWARD, 2),
            event("wait", "label", 9.0, 0, FORWARD, 2),
            event("compute", "linear", 1.0, 0, program="loss"),
        )
    )  # fmt: skip
    assert measured_seconds(timeline) == {
        ("forward", "linear"): 2.0,
        ("backward", "linear"): 5.0,
        ("forward", "start 2"): 0.5,
        ("forward", "wait 2"): 0.25,
    }
    assert measured_seconds(timeline, min)["forward", "linear"] == 1.0


def test_bytes_of_a_recording() -> None:
    def wire(rank: int, sent: int | None, exchange: int | None = 1) -> Event:
        return Event("wire", "label", 0.0, 1.0, rank, "main", exchange, FORWARD, 0, sent=sent)

    timeline = Timeline((wire(0, 200), wire(0, 240), wire(0, 400), wire(1, 80), wire(2, 0), wire(2, None, None)))
    sizes = measured_bytes(timeline, 7)
    start, reduce = Action(Verb.START, "linear", FORWARD, 1), Action(Verb.REDUCE, "loss")
    assert [sizes(start, 0, 1), sizes(start, 1, 0), sizes(start, 2, 1), sizes(reduce, 0, 1)] == [120, 40, 0, 7]
