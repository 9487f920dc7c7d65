"""The end of machines: what they leave under way when they are deleted, and when the process ends."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sylvie_fx.ir.errors import SylvieError

_NUMBERS = itertools.count()


class Drained(Protocol):
    """What can have transfers under way."""

    def drain(self) -> None:
        """Take all that is in flight."""


@dataclass(frozen=True)
class Remains:
    """What a machine leaves. It holds no machine, so that one can be deleted while this is kept.

    Attributes:
        directions: Take what is under way.
        close: Ends the threads; returns when they have ended.
        timeout: Seconds that a wait of either lasts at most.
    """

    directions: Sequence[Drained]
    close: Callable[[], None]
    timeout: float

    def end(self) -> None:
        """Take what is still under way, so that no peer waits for it to leave, and end the threads.

        What fails here has failed a step before, or its step was never wanted.
        """
        for direction in self.directions:
            with contextlib.suppress(SylvieError):
                direction.drain()
        self.close()


class _Closer:
    """One thread that ends what deleted machines leave; a process ends when it has ended everything.

    A deletion may come at any point of any thread, where waiting for a peer, or for a lock, could wait for ever: all that
    it does is to put a number into a queue.
    """

    def __init__(self) -> None:
        self._left: dict[int, Remains] = {}
        self._deleted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._patience = 5.0

    def expect(self, remains: Remains) -> Callable[[], None]:
        """Keep what a machine will leave; the function to call when it is deleted."""
        number = next(_NUMBERS)
        with self._lock:
            self._left[number] = remains
            self._patience = max(self._patience, remains.timeout + 5.0)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="sylvie_fx closer", daemon=True)
                self._thread.start()
        return lambda: self._deleted.put(number)

    def end_all(self) -> None:
        """End everything, in the order in which it was made, which is the same on every rank."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._deleted.put(None)
            thread.join(self._patience)  # once a wait has run out, a transport fails the others at once
        for number in sorted(self._left):
            self._end(number)

    def _work(self) -> None:
        while (number := self._deleted.get()) is not None:
            self._end(number)

    def _end(self, number: int) -> None:
        remains = self._left.pop(number, None)
        if remains is not None:
            remains.end()


_CLOSER = _Closer()
# A thread that waits for gloo while Python ends takes the process down with it, and a process that ends with rows under way
# leaves its peers waiting.
atexit.register(_CLOSER.end_all)


def expect(remains: Remains) -> Callable[[], None]:
    """Have what a machine leaves ended, at the latest at the end of the process.

    Returns:
        To be called when the machine is deleted: it does not wait.
    """
    return _CLOSER.expect(remains)
