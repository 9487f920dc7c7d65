"""The coverage table as a document."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Protocol

from coverage_cases import Case

TITLES = {"pyg": "PyTorch Geometric", "dgl": "DGL", "torch": "Plain PyTorch"}


INTRODUCTION = """\
# Coverage

Every convolution of PyTorch Geometric and of DGL that takes a homogeneous graph, and some uses of them, trained for a
step or more on three simulated ranks (random partition, float64, train mode) on a random graph of 60 nodes and 300
edges with isolated nodes, self loops, parallel edges and a hub. Loss, every gradient and every buffer are compared with
the unmodified module on one device. *Exact* means a relative difference below 1e-10. Dropout uses the same masks. The
last section holds ways to write layers in plain PyTorch, among them what has to be refused.

Written by `make coverage-table`; the tests in `tests/coverage/` run the same cases.

| framework | cases | exact | refused | fails |
|---|---|---|---|---|
"""


class Row(Protocol):
    """What came of a case."""

    @property
    def case(self) -> Case: ...
    @property
    def status(self) -> str: ...
    @property
    def text(self) -> str: ...


def shorten(text: str) -> str:
    """The first line of a message, without the folders of source files."""
    line = (text.strip().splitlines() or [""])[0]
    return re.sub(r"[\w./-]*/(?=[\w-]+\.py)", "", line)


def document(rows: Sequence[Row]) -> str:
    """docs/coverage.md, the same for the same results."""
    lines = INTRODUCTION.splitlines()
    for name, title in TITLES.items():
        own = [r for r in rows if r.case.framework == name]
        counted = [sum(r.status == s for r in own) for s in ("exact", "refused", "fails")]
        if own:
            lines.append(
                f"| {title} | {len(own)} | {counted[0]} ({counted[0] / len(own):.0%}) | {counted[1]} | {counted[2]} |"
            )
    for name, title in TITLES.items():
        own = [r for r in rows if r.case.framework == name]
        if not own:
            continue
        lines += ["", f"## {title}", "", "| case | result | |", "|---|---|---|"]
        lines += [f"| {r.case.name} | {r.status} | {_detail(r)} |" for r in own]
        lines += ["", "Not tried:", ""]
        lines += [f"- {what}: {why}." for what, why in importlib.import_module(f"cases_{name}").NOT_TRIED.items()]
    return "\n".join(lines) + "\n"


def _detail(row: Row) -> str:
    if row.status == "exact":
        return f"tolerance {row.case.tolerance}: one device differs as much from itself" if row.case.tolerance else ""
    return shorten(row.text).replace("|", "\\|")
