"""Timelines: order, totals of overlapping events, and the difference of counters."""

from __future__ import annotations

from sylvie_fx.ir.timeline import Event, StepCounters, Timeline


def test_events_are_in_the_order_of_their_starts() -> None:
    timeline = Timeline(
        (Event("compute", "b", 2.0, 3.0, 1), Event("compute", "a", 1.0, 4.0), Event("wait", "c", 3.0, 3.5))
    )
    assert [e.name for e in timeline.events] == ["a", "b", "c"]
    assert timeline.ranks == (0, 1)
    assert (timeline.start, timeline.seconds) == (1.0, 3.0)
    assert [e.name for e in timeline.select("compute", 1)] == ["b"]


def test_overlapping_events_count_once() -> None:
    spans = ((0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (7.0, 8.0))
    timeline = Timeline(tuple(Event("wire", "x", *span) for span in spans))
    assert timeline.total("wire", 0) == 6.0
    assert timeline.total("wait", 0) == 0.0


def test_an_empty_timeline() -> None:
    assert (Timeline(()).seconds, Timeline(()).start, Timeline(()).ranks) == (0.0, 0.0, ())


def test_counters_of_a_step_are_a_difference() -> None:
    before = StepCounters(1, 4, 0.5, 100, 10, 0.25, 0.5, {0: 2, 1: 1})
    after = StepCounters(1, 5, 0.75, 160, 30, 0.75, 0.5, {0: 2, 1: 4, 2: 1})
    assert before.until(after) == StepCounters(1, 4, 0.5, 60, 20, 0.5, 0.0, {1: 3, 2: 1})
