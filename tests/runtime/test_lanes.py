from __future__ import annotations

import threading

import pytest

from sylvie_fx.ir.errors import CommError
from sylvie_fx.runtime.lanes import Courier, Lane


def test_jobs_run_in_order_in_one_thread() -> None:
    lane, seen = Lane("a lane", 5.0), []
    handles = [
        lane.submit(lambda i=i: seen.append(i) or threading.current_thread().name, f"job {i}") for i in range(20)
    ]
    assert {handle.result() for handle in handles} == {"a lane"}
    assert seen == list(range(20))
    lane.close()
    lane.close()


def test_an_error_is_raised_where_the_result_is_wanted() -> None:
    lane = Lane("sums", 5.0)

    def fail() -> None:
        raise ValueError("broken")

    handle = lane.submit(fail, "exchange 3 forward transfer 7")
    with pytest.raises(
        CommError, match="exchange 3 forward transfer 7 failed in the thread 'sums': ValueError: broken"
    ):
        handle.result()
    assert lane.submit(lambda: 5, "the next").result() == 5


def test_a_result_that_does_not_come_is_an_error() -> None:
    lane, release = Lane("slow", -4.9), threading.Event()
    handle = lane.submit(release.wait, "exchange 1 forward transfer 0")
    with pytest.raises(CommError, match="exchange 1 forward transfer 0 has not ended after"):
        handle.result()
    release.set()


def test_without_threads_work_runs_in_the_callers() -> None:
    courier, here = Courier("program 0", 5.0, threaded=False), []
    courier.send(lambda: here.append(threading.current_thread()), "send")
    assert here == [threading.main_thread()]
    arrival = courier.receive(lambda: here.append(threading.current_thread()), "receive")
    assert not arrival.done()
    arrival.result()
    arrival.result()
    assert here == [threading.main_thread()] * 2
    courier.close()
