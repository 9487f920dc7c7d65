"""Where the work of communication runs: lanes of one thread each beside the main thread, or the main thread itself."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, Protocol, TypeVar

import torch

from sylvie_fx.ir.errors import CommError, SylvieError
from sylvie_fx.runtime.counters import Counters
from sylvie_fx.runtime.timeline import Recorder

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


def spare_core() -> bool:
    """Whether every rank of this host has a core besides the one that it computes on.

    Where it has not, threads of communication only take turns with the computation and with each other, which costs more
    than it hides: gloo moves bytes in a thread of its own in any case.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > 1


class Handle(Protocol[_T_co]):
    """The result of a job, now or later."""

    def result(self) -> _T_co:
        """Wait for it.

        Raises:
            CommError: The job failed, or did not end in time; the text names the exchange and its step.
        """

    def done(self) -> bool:
        """Whether ``result`` would return at once."""


class Lane:
    """One thread that runs jobs in the order in which they are given. The thread starts with the first job.

    A daemon thread, not an executor's: Python would wait for that one at the end before anybody could tell it to end.

    Args:
        name: Of the thread.
        timeout: Seconds that a result is waited for.
        counters: Take the time for which results are waited for.
        recorder: Takes the same as events.
    """

    def __init__(
        self, name: str, timeout: float, counters: Counters | None = None, recorder: Recorder | None = None
    ) -> None:
        self._name, self._timeout = name, timeout
        self._counters, self._recorder = counters or Counters(), recorder or Recorder()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any], str] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], _T], what: str) -> Handle[_T]:
        """Run a job behind those that were given before.

        Args:
            job: What to run.
            what: Names the exchange and step in errors.
        """
        if self._thread is None:
            threads = torch.get_num_threads()
            self._thread = threading.Thread(target=self._work, args=(threads,), name=self._name, daemon=True)
            self._thread.start()
        future: Future[_T] = Future()
        self._jobs.put((job, future, what))
        return _Awaited(future, self._timeout, what, self._counters, self._recorder)

    def close(self) -> None:
        """Return when the thread has ended, after the jobs that it has; a second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(self._timeout + 5.0)

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)  # a new thread would use every core
        with self._counters.background():
            self._run_jobs()

    def _run_jobs(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, future, what = entry
            try:
                future.set_result(job())
            except SylvieError as error:  # a thread's boundary: raised by result()
                future.set_exception(error)
            except BaseException as error:
                text = f"{what} failed in the thread {self._name!r}: {type(error).__name__}: {error}"
                wrapped = CommError(text)
                wrapped.__cause__ = error
                future.set_exception(wrapped)
            del job, future, entry  # an idle thread keeps no tensor alive


class _Awaited(Generic[_T]):
    def __init__(self, future: Future[_T], timeout: float, what: str, counters: Counters, recorder: Recorder) -> None:
        self._future, self._timeout, self._what = future, timeout, what
        self._counters, self._recorder = counters, recorder

    def result(self) -> _T:
        """See Handle.result."""
        if self._future.done():
            return self._future.result()
        start = time.perf_counter()
        try:
            # The transport gives up first, and knows who is to blame.
            return self._future.result(self._timeout + 5.0)
        except FutureTimeout as error:
            raise CommError(
                f"{self._what} has not ended after {self._timeout + 5.0:g} s", why="its thread is blocked"
            ) from error
        finally:
            end = time.perf_counter()
            self._counters.waited(end - start)
            if self._recorder.on and not self._counters.in_background:
                self._recorder.add("wait", self._what, start, end)

    def done(self) -> bool:
        """See Handle.done."""
        return self._future.done()


class Here(Generic[_T]):
    """A job that the thread which wants the result runs itself, when it does."""

    def __init__(self, job: Callable[[], _T]) -> None:
        self._job: Callable[[], _T] | None = job
        self._result: _T

    def result(self) -> _T:
        """See Handle.result."""
        if self._job is not None:
            self._result = self._job()
            self._job = None
        return self._result

    def done(self) -> bool:
        """See Handle.done."""
        return self._job is None


class Courier:
    """The lanes of one machine: what leaves, what arrives, and the sums of gradients, each in its own order.

    Args:
        name: Of the machine.
        timeout: Seconds that a result is waited for.
        threaded: Whether the lanes are threads; else sending happens at once, and arrivals and sums are handled by who wants
            them. That is right where there is no wire to hide behind, and on a GPU, whose streams are the lanes.
        counters: Take the time for which the main thread waits.
        recorder: Takes the same as events.
    """

    def __init__(
        self,
        name: str,
        timeout: float,
        *,
        threaded: bool,
        counters: Counters | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.threaded = threaded
        self.counters, self.recorder = counters or Counters(), recorder or Recorder()
        kinds = ("send", "receive", "sum") if threaded else ()
        self._lanes = {kind: Lane(f"{name} {kind}", timeout, self.counters, self.recorder) for kind in kinds}

    def send(self, job: Callable[[], _T], what: str) -> Handle[_T]:
        """Encode and post."""
        job = self.recorder.carried(job)
        if self.threaded:
            return self._lanes["send"].submit(job, what)
        handle = Here(job)
        handle.result()
        return handle

    def receive(self, job: Callable[[], _T], what: str) -> Handle[_T]:
        """Wait for an arrival and decode it."""
        job = self.recorder.carried(job)
        return self._lanes["receive"].submit(job, what) if self.threaded else Here(job)

    def sum(self, begin: Callable[[], Callable[[], _T]], what: str) -> Handle[_T]:
        """Sum over ranks: ``begin`` sends, and what it returns ends the sum."""
        if self.threaded:
            return self._lanes["sum"].submit(self.recorder.carried(lambda: begin()()), what)
        return Here(self.recorder.carried(begin()))

    def close(self) -> None:
        """Return when the threads have ended, after the jobs that they have; a second call does nothing."""
        for lane in self._lanes.values():
            lane.close()
