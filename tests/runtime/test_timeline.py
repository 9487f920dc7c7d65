"""The recorder, and recordings of several ranks on one clock."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from sylvie_fx.ir.timeline import Event, StepCounters
from sylvie_fx.runtime.in_process import run_ranks
from sylvie_fx.runtime.timeline import Recorder, clock_offset, gather
from sylvie_fx.runtime.transport import Transport


def test_nothing_is_recorded_while_it_is_off() -> None:
    recorder = Recorder()
    with recorder.span("compute", "a", 0):
        recorder.add("wait", "b", 0.0, 1.0)
    assert recorder.take() == []
    assert recorder.span("compute", "a") is recorder.span("wait", "b"), "no object is made"


def test_spans_of_several_threads() -> None:
    recorder = Recorder(rank=3)
    recorder.on = True

    def work(name: str) -> None:
        with recorder.scope(direction="forward"), recorder.span("quantise", name, 7, exchange=2):
            pass

    thread = threading.Thread(target=work, args=("there",), name="sender")
    thread.start()
    thread.join()
    work("here")
    there, here = recorder.take()
    assert (there.thread, there.name, there.rank) == ("sender", "there", 3)
    assert (here.kind, here.step, here.exchange, here.direction) == ("quantise", 7, 2, "forward")
    assert here.end >= here.start
    assert recorder.take() == []


def test_an_event_says_what_its_scope_says_unless_it_knows_better() -> None:
    recorder = Recorder()
    recorder.on = True
    with recorder.scope(exchange=1, step=5):
        recorder.add("wait", "outer", 0.0, 1.0, step=6)
        with recorder.scope(exchange=2):
            recorder.add("wait", "inner", 0.0, 1.0, step=None)
        recorder.add("wait", "outer again", 0.0, 1.0)
    recorder.add("wait", "outside", 0.0, 1.0)
    assert [(e.exchange, e.step) for e in recorder.take()] == [(1, 6), (2, 5), (1, 5), (None, None)]


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(*[st.floats(0, 1)] * 4), min_size=1, max_size=6),
)
@settings(deadline=None)
def test_the_offset_of_clocks_is_within_its_error(offset: float, rounds: list[tuple[float, ...]]) -> None:
    """Two ranks enter barriers at any time and leave them any time after both have entered."""
    one, other = [], []
    for number, (enter, enter_other, delay, delay_other) in enumerate(rounds):
        start = 10.0 * number
        both = start + max(enter, enter_other)
        one.append((start + enter, both + delay))
        other.append((start + enter_other + offset, both + delay_other + offset))
    found, error = clock_offset(one, other)
    assert abs(found - offset) <= error + 1e-6


def test_recordings_are_gathered_on_every_rank() -> None:
    def rank(transport: Transport) -> tuple[list[tuple[int, str]], list[int], float]:
        events = [Event("compute", f"work {transport.rank}", transport.rank, transport.rank + 0.5, transport.rank)]
        timeline = gather(transport, events, [StepCounters(transport.rank, 0, 0.0, bytes_sent=transport.rank)])
        return (
            [(e.rank, e.name) for e in timeline.events],
            [s.bytes_sent for s in timeline.steps],
            timeline.events[2].start,
        )

    expected = ([(0, "work 0"), (1, "work 1"), (2, "work 2")], [0, 1, 2], 2.0)
    assert run_ranks(3, rank, 30.0) == [expected] * 3, "ranks of one process have one clock"
