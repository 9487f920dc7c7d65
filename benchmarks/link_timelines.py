"""Recordings of the variants of benchmarks/link.py, and what a simulation makes of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sylvie_fx
from sylvie_fx.ir.schedule import Schedule, Verb
from sylvie_fx.ir.simulate import LinkModel, measured_bytes, measured_seconds, simulate
from sylvie_fx.ir.timeline import Timeline

#: Seconds of a message without content, the part of the bits that are payload, and bytes of a reduction.
LATENCY, GOODPUT, REDUCTION = 150e-6, 0.955, 30_000


def record(runs: Mapping[str, tuple[Any, Callable[[], Any]]], prefix: str) -> Iterator[tuple[str, Timeline, Schedule]]:
    """Three epochs of each variant; written as a trace, and where matplotlib is installed as a figure, if there is a prefix."""
    for name, (model, epoch) in runs.items():
        if not isinstance(model, sylvie_fx.DistributedModule):
            continue
        epoch()
        with model.profile() as profile:
            for _ in range(3):
                epoch()
        yield name, profile.timeline, Schedule.of(model.program())
        if prefix:
            path = f"{prefix}{name.replace(' ', '-')}"
            profile.save(f"{path}.json")
            try:
                profile.figure(f"{path}.png")
            except sylvie_fx.SylvieError as error:
                print(error, file=sys.stderr)


def simulated_step(timeline: Timeline, schedule: Schedule, bytes_per_second: float, lanes: bool) -> tuple[float, float]:
    """Seconds of a step of the model alone, and of its operators alone, from the least time that each operator took."""
    ranks = timeline.ranks
    link = LinkModel(LATENCY, GOODPUT * bytes_per_second / max(len(ranks) - 1, 1))
    seconds = measured_seconds(timeline, min)
    schedules = [Schedule(rank, schedule.actions) for rank in ranks]
    short, long = (
        simulate(schedules, seconds, link, measured_bytes(timeline, REDUCTION), steps, lanes).seconds
        for steps in (4, 8)
    )
    computed = sum(seconds.get(a.key, 0.0) for a in schedule.actions if a.verb is Verb.COMPUTE)
    return (long - short) / 4, computed
