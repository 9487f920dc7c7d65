"""model.profile(): what every rank did in a block of code, as a trace, a figure and counters."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import TracebackType

from sylvie_fx.ir.errors import SylvieError
from sylvie_fx.ir.timeline import Timeline
from sylvie_fx.node_tensor import caller_line
from sylvie_fx.report.timeline import chrome_trace, draw, summary
from sylvie_fx.runtime.metered import MeteredTransport
from sylvie_fx.runtime.timeline import gather


class Profile:
    """A recording; ``DistributedModule.profile`` makes it.

    All ranks enter and leave its ``with`` block together. Where the block raises, nothing is gathered.

    Args:
        transport: The wire of this rank.
    """

    def __init__(self, transport: MeteredTransport) -> None:
        self._transport = transport
        self._timeline: Timeline | None = None
        self._raised = False

    def __enter__(self) -> Profile:
        recorder = self._transport.recorder
        if recorder.on:
            raise SylvieError("a profile of this model is being recorded already", remedy="end its with block first")
        recorder.take()
        self._transport.marks.clear()
        recorder.on = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wire = self._transport
        if wire.marks:
            wire.mark(wire.marks[-1].step + 1)
        wire.recorder.on = False
        events, marks = wire.recorder.take(), list(wire.marks)
        wire.marks.clear()
        self._raised = kind is not None
        if kind is None:
            steps = [before.until(after) for before, after in itertools.pairwise(marks)]
            self._timeline = gather(wire.inner, events, steps)

    @property
    def timeline(self) -> Timeline:
        """The events and counters of all ranks.

        Raises:
            SylvieError: The ``with`` block has not ended, or it raised.
        """
        if self._timeline is None:
            raise SylvieError(
                "the block of this profile raised, and nothing was gathered"
                if self._raised
                else "there is no timeline yet",
                where=caller_line(),
                why="" if self._raised else "ranks gather it together at the end of the with block",
                remedy="call save() and figure() behind the block, indented as the with line is, on every rank",
            )
        return self._timeline

    def save(self, path: str | Path) -> None:
        """Write a trace that ui.perfetto.dev and chrome://tracing open; rank 0 writes, the others do nothing.

        Args:
            path: A ``.json`` file, replaced if it is there.

        Raises:
            SylvieError: On every rank, where there is no timeline.
        """
        timeline = self.timeline  # where only rank 0 raised, the others would wait for it at the end of the block
        if self._transport.rank == 0:
            Path(path).write_text(chrome_trace(timeline), encoding="utf-8")

    def figure(self, path: str | Path) -> None:
        """Draw compute, coding, wire and waiting of each rank; rank 0 draws, the others do nothing.

        Args:
            path: A ``.png``, ``.svg`` or ``.pdf`` file, replaced if it is there.

        Raises:
            SylvieError: On every rank, where there is no timeline; matplotlib is not installed.
        """
        timeline = self.timeline
        if self._transport.rank == 0:
            draw(timeline, path)

    def __str__(self) -> str:
        return summary(self.timeline) if self._timeline else "a profile that has not ended"
