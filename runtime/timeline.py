"""Records what a rank does when, and puts the recordings of all ranks on one clock."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

from sylvie_fx.ir.timeline import Event, StepCounters, Timeline
from sylvie_fx.runtime.transport import Transport

_T = TypeVar("_T")
#: Barriers by which the clocks of ranks are compared.
_ROUNDS = 8
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Recorder:
    """Events of one rank; while it is off, a span costs one look at an attribute.

    Example:
        >>> recorder = Recorder()
        >>> recorder.on = True
        >>> with recorder.span("compute", "linear", 3):
        ...     pass
        >>> [(e.kind, e.name, e.step) for e in recorder.take()]
        [('compute', 'linear', 3)]

    Args:
        rank: The rank that the events are of.

    Attributes:
        on: Whether anything is recorded.
        step: The training step that the rank is in, for those who record.
    """

    def __init__(self, rank: int = 0) -> None:
        self.on, self.rank = False, rank
        self.step: int | None = None
        self._events: list[Event] = []
        self._local = threading.local()

    def span(self, kind: str, name: str, step: int | None = None, **where: Any) -> AbstractContextManager[None]:
        """A context whose duration is recorded, in whatever thread it runs.

        Args:
            kind: One of ``sylvie_fx.ir.timeline.KINDS``.
            name: What takes the time.
            step: The training step.
            **where: ``exchange``, ``direction``, ``staleness`` and ``module`` of the event.
        """
        return _Span(self, kind, name, {"step": step, **where}) if self.on else _NOTHING

    def add(self, kind: str, name: str, start: float, end: float, **where: Any) -> None:
        """Record what was measured by ``time.perf_counter()``; the same keywords as ``span``, and ``step``."""
        if self.on:
            given = {key: value for key, value in where.items() if value is not None}
            known = {**getattr(self._local, "scope", {}), **given}
            thread = threading.current_thread().name
            self._events.append(Event(kind, name, start, end, self.rank, thread, **known))

    def scope(self, **where: Any) -> AbstractContextManager[None]:
        """What events of this thread say, inside of the context, where they do not say it themselves."""
        return self._scoped(where) if self.on else _NOTHING

    def carried(self, job: Callable[[], _T]) -> Callable[[], _T]:
        """The job, whose events will say what those of this thread say now, whichever thread runs it."""
        if not self.on:
            return job
        scope: dict[str, Any] = getattr(self._local, "scope", {})

        def run() -> _T:
            with self.scope(**scope):
                return job()

        return run

    @contextlib.contextmanager
    def _scoped(self, where: dict[str, Any]) -> Iterator[None]:
        before = self.enter(**where)
        try:
            yield
        finally:
            self.leave(before)

    def enter(self, **where: Any) -> dict[str, Any]:
        """As ``scope``, until ``leave`` is given what this returns: for a beginning and an end in two callbacks."""
        before: dict[str, Any] = getattr(self._local, "scope", {})
        self._local.scope = {**before, **where}
        return before

    def leave(self, before: dict[str, Any]) -> None:
        """End what ``enter`` began."""
        self._local.scope = before

    def take(self) -> list[Event]:
        """The events so far, which are forgotten here."""
        events, self._events, self.step = self._events, [], None
        return events


class _Span:
    def __init__(self, recorder: Recorder, kind: str, name: str, where: dict[str, Any]) -> None:
        self._recorder, self._kind, self._name, self._where = recorder, kind, name, where

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.add(self._kind, self._name, self._start, time.perf_counter(), **self._where)


def gather(transport: Transport, events: Sequence[Event], steps: Sequence[StepCounters] = ()) -> Timeline:
    """The recordings of all ranks on the clock of rank 0, on every rank.

    Args:
        transport: The wire; all ranks must call this.
        events: Of this rank, on its own clock.
        steps: Likewise.

    Raises:
        CommError: A peer failed.
    """
    stamps = []
    for _ in range(_ROUNDS if transport.size > 1 else 0):
        entered = time.perf_counter()
        transport.barrier("timeline clocks")
        stamps.append((entered, time.perf_counter()))
    held = transport.all_gather_object((stamps, list(events), list(steps)), "timeline")
    moved: list[Event] = []
    counted: list[StepCounters] = []
    error = 0.0
    for stamps_of_rank, events_of_rank, steps_of_rank in held:
        offset, uncertain = clock_offset(held[0][0], stamps_of_rank)
        error = max(error, uncertain)
        moved += [dataclasses.replace(e, start=e.start - offset, end=e.end - offset) for e in events_of_rank]
        counted += [dataclasses.replace(s, start=s.start - offset) for s in steps_of_rank]
    return Timeline(tuple(moved), tuple(counted), error)


def clock_offset(reference: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """How much another clock is ahead of the reference, and by how much that may be wrong.

    Nobody leaves a barrier before everybody has entered it, so each round bounds the offset from both sides (Cristian,
    1989); the bounds of all rounds are intersected. Where they allow that there is no offset, the clocks are taken to be
    one, as those of processes on one host are.

    Args:
        reference: When the reference entered and left each barrier, seconds on its clock.
        other: Likewise on the other clock.

    Returns:
        The offset and the largest distance to a value that the bounds allow, in seconds.
    """
    pairs = list(zip(reference, other, strict=True))
    if not pairs:
        return 0.0, 0.0
    low = max(entered - left for (_, left), (entered, _) in pairs)
    high = min(left - entered for (entered, _), (_, left) in pairs)
    if low <= 0.0 <= high:
        return 0.0, max(-low, high)
    return (low + high) / 2, max(0.0, (high - low) / 2)
