"""How much communication was hidden, how much was waited for, and how old the rows were that were used."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Counted:
    """Counters at one moment.

    Attributes:
        wait_s: Seconds of waiting for other ranks.
        hidden_s: Seconds of communication behind which the rank computed.
        staleness: Age in steps to the number of exchanges that used rows of that age.
    """

    wait_s: float
    hidden_s: float
    staleness: dict[int, int]


class Counters:
    """Counters of one rank; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock, self._local = threading.Lock(), threading.local()
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        with self._lock:
            self._wait_s = self._hidden_s = 0.0
            self._staleness: Counter[int] = Counter()

    def waited(self, seconds: float) -> None:
        """The computation stood still for another rank; in a background thread it did not, and nothing is counted."""
        if not self.in_background:
            with self._lock:
                self._wait_s += seconds

    def hid(self, seconds: float) -> None:
        """A message was under way while the rank computed."""
        with self._lock:
            self._hidden_s += seconds

    def used(self, staleness: int) -> None:
        """An exchange gave rows that are so many steps old."""
        with self._lock:
            self._staleness[staleness] += 1

    @property
    def in_background(self) -> bool:
        """Whether this thread has said that it waits in the background."""
        return getattr(self._local, "background", False)

    @contextlib.contextmanager
    def background(self) -> Iterator[None]:
        """Where this thread waits, the computation goes on: the whole body of a communication thread."""
        self._local.background = True
        try:
            yield
        finally:
            self._local.background = False

    def read(self) -> Counted:
        """The counters now."""
        with self._lock:
            return Counted(self._wait_s, self._hidden_s, dict(sorted(self._staleness.items())))
