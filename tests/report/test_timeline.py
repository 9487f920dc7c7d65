"""Timelines as traces, figures and tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sylvie_fx.ir.errors import SylvieError
from sylvie_fx.ir.timeline import Event, StepCounters, Timeline
from sylvie_fx.report.timeline import chrome_trace, draw, summary

TIMELINE = Timeline(
    (
        Event("compute", "linear", 5.0, 5.25, 0, "main", direction="forward", step=3, module="conv1"),
        Event("wire", "exchange 0", 5.25, 5.75, 0, "sender", exchange=0, direction="forward", step=3),
        Event("wire", "exchange 1", 5.5, 5.875, 0, "sender", exchange=1, direction="forward", step=3),
        Event("wait", "exchange 0", 5.5, 5.75, 0, "main", exchange=0, direction="forward", step=3, staleness=1),
        Event("decision", "age 1", 5.75, 5.75, 0, "main", exchange=0, direction="forward", step=3, staleness=1),
        Event("compute", "linear", 6.0, 6.5, 1, "main", direction="backward", step=3),
    ),
    (StepCounters(0, 3, 5.0, 1000, 24, 0.25, 0.125, {1: 2}),),
)


def test_a_trace_has_processes_threads_spans_and_counters() -> None:
    records = json.loads(chrome_trace(TIMELINE))["traceEvents"]
    names = {(r["pid"], r.get("tid")): r["args"]["name"] for r in records if r["ph"] == "M"}
    assert names == {(0, None): "rank 0", (1, None): "rank 1", (0, 0): "main", (0, 1): "sender", (1, 0): "main"}
    spans = [(r["name"], r["cat"], r["pid"], r["tid"], r["ts"], r["dur"]) for r in records if r["ph"] == "X"]
    assert spans == [
        ("linear (conv1)", "compute", 0, 0, 0.0, 250_000.0),
        ("exchange 0", "wait", 0, 0, 500_000.0, 250_000.0),
        ("linear backward", "compute", 1, 0, 1_000_000.0, 500_000.0),
    ]
    (decision,) = (r for r in records if r["ph"] == "i")
    assert (decision["name"], decision["ts"], decision["args"]["staleness"]) == ("age 1", 750_000.0, 1)
    begins = {r["id"]: r for r in records if r["ph"] == "b"}
    ends = {r["id"]: r for r in records if r["ph"] == "e"}
    assert len(begins) == 2, "messages that overlap are asynchronous"
    assert sorted((begins[i]["name"], begins[i]["ts"], ends[i]["ts"]) for i in begins) == [
        ("exchange 0", 250_000.0, 750_000.0),
        ("exchange 1", 500_000.0, 875_000.0),
    ]
    (waited,) = (r["args"] for r in records if r.get("cat") == "wait")
    assert waited == {"exchange": 0, "direction": "forward", "step": 3, "staleness": 1}
    counters = {r["name"]: r["args"] for r in records if r["ph"] == "C"}
    assert counters == {
        "bytes a step": {"exchanges": 1000, "reductions": 24},
        "ms a step": {"waited": 250.0, "hidden": 125.0},
        "exchanges a step": {"1 steps old": 2},
    }


def test_a_table() -> None:
    rows = [line.split("|")[1:-1] for line in summary(TIMELINE).splitlines()[4:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["0", "250.0", "0.0", "0.0", "625.0", "250.0", "1024", "250.0", "125.0"],
        ["1", "500.0", "0.0", "0.0", "0.0", "0.0", "0", "0.0", "0.0"],
    ]


def test_without_matplotlib_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SylvieError, match=r"needs matplotlib.*sylvie-fx\[plot\]"):
        draw(TIMELINE, tmp_path / "timeline.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_figure(tmp_path: Path, ending: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib (the extra plot)")
    path = tmp_path / f"timeline.{ending}"
    draw(TIMELINE, path)
    assert path.read_bytes().startswith(magic)
    if ending == "svg":
        assert all(
            text in path.read_text() for text in ("rank 0 compute", "rank 1 compute", "dequantise", "milliseconds")
        )


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib (the extra plot)")
    with pytest.raises(SylvieError, match=r"timeline\.banana"):
        draw(TIMELINE, tmp_path / "timeline.banana")
