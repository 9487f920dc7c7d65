"""The runs of benchmarks/accuracy.py in a file, and the table that is made of them."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FIELDS = ("data", "model", "parts", "code", "epochs", "seed", "accuracy", "loss", "seconds")
ENOUGH = 10
HEADER = """# Accuracy of one-bit exchanges

Test accuracy at the best validation epoch and final training loss, mean and standard deviation over seeds; made by
`python benchmarks/accuracy.py` from the runs in accuracy.csv. The difference is paired by seed, with its 95 % interval
(Student's t). "Holds": the mean lies within 0.2 points below float32 or above it, or the interval holds zero; open with
fewer than ten seeds. Runs are added as they are made: what is not in the table has not been run. Features of
facebook_pages, coauthor_* and wordnet are projected to 256 at random, for both sides. "Cold" is `warm_up=1`: no step at the
beginning takes more than one bit but the first, as it was when these runs were made. "Auto" is `staleness="auto"`. Only GAT on
wordnet and "auto" ran since rows of other widths are rotated and values in front of a dropout are preferred (design.md).
Machine: 2 shared cores.

| data | model | parts | code | seeds | float32 | coded | difference, 95% | holds | loss float32 | loss coded | s a run |
| --- | --- | --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |
"""


class Run(NamedTuple):
    """What tells one run from all others; ``parts`` is a number and a method, ``code`` a width and a variant."""

    data: str
    model: str
    parts: str
    code: str
    epochs: int
    seed: int


class Results:
    """Runs and what they gave, kept in a file of comma-separated values.

    Args:
        path: The file; made with the first run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[Run, tuple[float, float, float]] = {}
        if path.exists():
            with path.open(newline="") as file:
                for line in csv.DictReader(file):
                    names = (line[f] for f in FIELDS[:4])
                    run = Run(*names, int(line["epochs"]), int(line["seed"]))
                    self.found[run] = float(line["accuracy"]), float(line["loss"]), float(line["seconds"])

    def __contains__(self, run: Run) -> bool:
        """Whether a run has been made."""
        return run in self.found

    def add(self, run: Run, accuracy: float, loss: float, seconds: float) -> None:
        """Keep a run, at once."""
        self.found[run] = accuracy, loss, seconds
        fresh = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if fresh:
                writer.writerow(FIELDS)
            writer.writerow([*run, f"{accuracy:.3f}", f"{loss:.5f}", f"{seconds:.1f}"])


def interval(differences: Sequence[float]) -> float:
    """Half the 95% interval of the mean of paired differences (Student's t)."""
    n = len(differences)
    if n < 2:
        return math.inf
    from scipy.stats import t

    return float(t.ppf(0.975, n - 1) * statistics.stdev(differences) / math.sqrt(n))


def markdown(results: Results, order: Sequence[str]) -> str:
    """The table: a line for each data set, model, partition and code with two seeds or more.

    Args:
        results: All runs.
        order: Of the data sets.
    """
    groups: dict[tuple[str, str, str, str], list[tuple[tuple[float, float, float], tuple[float, float, float]]]] = {}
    for run, coded in results.found.items():
        exact = results.found.get(run._replace(parts="1 contiguous", code="32"))
        if run.code != "32" and exact is not None:
            groups.setdefault(run[:4], []).append((exact, coded))
    lines = [
        _line(group, pairs)
        for group, pairs in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), *item[0][1:]))
        if len(pairs) > 1
    ]
    return HEADER + "".join(lines)


def _line(
    group: tuple[str, ...], pairs: Sequence[tuple[tuple[float, float, float], tuple[float, float, float]]]
) -> str:
    accuracies, losses = ([[run[i] for run in runs] for runs in zip(*pairs, strict=True)] for i in (0, 1))
    differences = [coded - exact for exact, coded in zip(*accuracies, strict=True)]
    mean, half = statistics.mean(differences), interval(differences)
    spread = (f"{statistics.mean(side):.2f} ± {statistics.stdev(side):.2f}" for side in accuracies)
    cells = [
        *group, str(len(pairs)), *spread, f"{mean:+.2f} ± {half:.2f}",
        "open" if len(pairs) < ENOUGH else "yes" if mean >= -0.2 or abs(mean) <= half else "no",
        *(f"{statistics.mean(side):.3f}" for side in losses),
        f"{statistics.mean(coded[2] for _, coded in pairs):.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |\n"
