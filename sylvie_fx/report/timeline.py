"""A timeline as a trace file, a figure and a table; measured and simulated ones alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sylvie_fx.ir.errors import SylvieError
from sylvie_fx.ir.timeline import BACKWARD, DECISION, KINDS, Event, StepCounters, Timeline

#: From the cool of work to the warm of standing still.
_COLOURS = {"compute": "#4878a8", "quantise": "#6acc64", "dequantise": "#2e8b57", "wire": "#e8b04a", "wait": "#d65f5f"}
#: Lanes of a rank in the figure, from the top: what a lane shows.
_LANES = (("compute",), ("quantise", "dequantise"), ("wire",), ("wait",))


def chrome_trace(timeline: Timeline) -> str:
    """The Trace Event Format (Google, "Trace Event Format", 2016), which Perfetto and chrome://tracing read.

    A rank is a process and a thread a thread. Messages under way overlap, so they are asynchronous events.

    Args:
        timeline: What happened.

    Returns:
        JSON; times in microseconds since the first event.
    """
    records: list[dict[str, Any]] = []
    threads: dict[tuple[int, str], int] = {}
    for rank in timeline.ranks:
        records.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
    for event in timeline.events:
        key = event.rank, event.thread
        if key not in threads:
            threads[key] = sum(1 for rank, _ in threads if rank == event.rank)
            named = {"ph": "M", "name": "thread_name", "pid": event.rank, "tid": threads[key]}
            records.append({**named, "args": {"name": event.thread}})
    for number, event in enumerate(timeline.events):
        records += _records(event, number, threads[event.rank, event.thread], timeline.start)
    for step in timeline.steps:
        records += _counters(step, timeline.start)
    return json.dumps({"traceEvents": records, "displayTimeUnit": "ms"})


def _records(event: Event, number: int, thread: int, origin: float) -> Iterator[dict[str, Any]]:
    fields = ("exchange", "direction", "step", "staleness", "module", "program", "sent")
    args = {name: value for name in fields if (value := getattr(event, name)) not in (None, "")}
    name = f"{event.name} ({event.module})" if event.module else event.name
    if event.direction == BACKWARD and event.kind == "compute":
        name += " backward"
    start, end = 1e6 * (event.start - origin), 1e6 * (event.end - origin)
    base = {"name": name, "cat": event.kind, "pid": event.rank, "tid": thread}
    if event.kind == DECISION:
        yield {**base, "ph": "i", "s": "p", "ts": start, "args": args}
    elif event.kind == "wire":
        yield {**base, "ph": "b", "id": number, "ts": start, "args": args}
        yield {**base, "ph": "e", "id": number, "ts": end}
    else:
        yield {**base, "ph": "X", "ts": start, "dur": end - start, "args": args}


def _counters(step: StepCounters, origin: float) -> Iterator[dict[str, Any]]:
    base = {"ph": "C", "pid": step.rank, "tid": 0, "ts": 1e6 * (step.start - origin)}
    yield {**base, "name": "bytes a step", "args": {"exchanges": step.bytes_sent, "reductions": step.bytes_reduced}}
    yield {**base, "name": "ms a step", "args": {"waited": 1e3 * step.wait_s, "hidden": 1e3 * step.hidden_s}}
    if step.staleness:
        ages = {f"{age} steps old": count for age, count in sorted(step.staleness.items())}
        yield {**base, "name": "exchanges a step", "args": ages}


def draw(timeline: Timeline, path: str | Path) -> None:
    """Draw a timeline: four lanes a rank (compute, coding, wire, waiting), backward hatched, steps dotted, decisions marked.

    Args:
        timeline: What happened.
        path: A file whose ending names the format: ``.png``, ``.svg``, ``.pdf``.

    Raises:
        SylvieError: matplotlib is not installed, or does not know the format.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise SylvieError(
            "drawing a timeline needs matplotlib",
            remedy="pip install 'sylvie-fx[plot]', or save() a trace and open it at ui.perfetto.dev",
        ) from None
    ranks = timeline.ranks
    figure = Figure(figsize=(12, 1.2 + 1.3 * max(len(ranks), 1)), layout="constrained")
    axes = figure.add_subplot()
    rows = len(_LANES) + 1
    for position, rank in enumerate(ranks):
        for lane, kinds in enumerate(_LANES):
            for kind in kinds:
                for direction, hatch in ((None, ""), (BACKWARD, "////")):
                    chosen = [e for e in timeline.select(kind, rank) if (e.direction == BACKWARD) == bool(direction)]
                    spans = [(1e3 * (e.start - timeline.start), 1e3 * e.seconds) for e in chosen]
                    bars = axes.broken_barh(spans, (position * rows + lane, 0.9), facecolor=_COLOURS[kind])
                    bars.set(hatch=hatch, edgecolor="white", linewidth=0.0)
        decided = [1e3 * (e.start - timeline.start) for e in timeline.select(DECISION, rank)]
        axes.plot(decided, [position * rows - 0.15] * len(decided), "v", color="black", markersize=4)
    for step in timeline.steps:
        if step.rank == ranks[0]:
            axes.axvline(1e3 * (step.start - timeline.start), color="#888888", linewidth=0.7, linestyle=":")
    labels = ["/".join(dict.fromkeys(kinds)) for kinds in _LANES]
    axes.set_yticks(
        [position * rows + lane + 0.45 for position in range(len(ranks)) for lane in range(len(_LANES))],
        [f"rank {rank} {label}" if not lane else label for rank in ranks for lane, label in enumerate(labels)],
    )
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    handles = [Patch(facecolor=_COLOURS[kind], label=kind) for kind in KINDS]
    handles.append(Patch(facecolor="#bbbbbb", hatch="////", edgecolor="white", label="backward"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise SylvieError(f"a timeline can not be drawn as {Path(path).name}: {error}") from None


def summary(timeline: Timeline) -> str:
    """Milliseconds of each kind by rank, and counters a step, as a table in Markdown."""
    lines = [f"{1e3 * timeline.seconds:.1f} ms; clocks agree within {1e6 * timeline.clock_error_s:.0f} µs", ""]
    lines.append(f"| rank | {' ms | '.join(KINDS)} ms | bytes a step | waited ms a step | hidden ms a step |")
    lines.append("| ---: " * (len(KINDS) + 4) + "|")
    for rank in timeline.ranks:
        steps = [s for s in timeline.steps if s.rank == rank]
        count = max(len(steps), 1)
        cells = [f"{1e3 * timeline.total(kind, rank):.1f}" for kind in KINDS]
        cells.append(f"{sum(s.bytes_sent + s.bytes_reduced for s in steps) / count:.0f}")
        cells += [f"{1e3 * sum(getattr(s, name) for s in steps) / count:.1f}" for name in ("wait_s", "hidden_s")]
        lines.append(f"| {rank} | {' | '.join(cells)} |")
    return "\n".join(lines)
