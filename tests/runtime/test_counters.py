"""Counters of waiting, hiding and staleness, from several threads."""

from __future__ import annotations

import threading

from sylvie_fx.runtime.counters import Counted, Counters


def test_all_threads_count_together() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(1000):
            counters.waited(0.5)
            counters.hid(0.25)
            counters.used(1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.read() == Counted(2000.0, 1000.0, {1: 4000})
    counters.reset()
    assert counters.read() == Counted(0.0, 0.0, {})


def test_waiting_in_the_background_is_no_waiting() -> None:
    counters = Counters()
    with counters.background():
        assert counters.in_background
        counters.waited(1.0)
        counters.used(0)
    counters.waited(0.5)
    assert counters.read() == Counted(0.5, 0.0, {0: 1})
