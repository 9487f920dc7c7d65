"""benchmarks/link.py: its network comes and goes, and where there can be none it says why in one sentence."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import link
import link_network


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(
        link_network.NoNetwork, match=r"^benchmarks/link\.py makes .*, which only root may do: run it with sudo$"
    ):
        link_network.check()


def test_without_its_programs_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(link_network.NoNetwork, match=r"needs the programs ip and tc \(package iproute2\): no tc$"):
        link_network.check()


@pytest.mark.parametrize("size", [2, 3])
def test_a_network_is_limited_and_gone_afterwards(size: int) -> None:
    try:
        with link_network.network(size, "1gbit") as net:
            assert len(set(net.addresses)) == size
            for name in net.names:
                shown = subprocess.run(
                    ["tc", "-n", name, "qdisc", "show", "dev", link_network.INTERFACE], capture_output=True, text=True
                )
                assert "tbf" in shown.stdout
                assert "1Gbit" in shown.stdout
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert not any(name in left for name in net.names)
    except link_network.NoNetwork as error:
        pytest.skip(str(error))


def test_a_table() -> None:
    def row(seconds: list[float], **others: object) -> dict[str, object]:
        known = {
            "seconds": seconds,
            "cpu_s": seconds,
            "sent": 1e6,
            "wait_s": 0.5,
            "simulated_s": None,
            "computed_s": None,
        }
        return {**known, "refused": None, **others}

    found = {
        "wire": 9.5e8,
        "halo": [100, 120],
        "variants": {
            "float32 sync": row([1.0, 1.0, 1.5]),
            "1 bit stale": row([0.25, 0.2, 0.3], simulated_s=0.3, computed_s=0.2),
            "1 bit auto": row([], refused="this version takes no auto."),
            "bound: no exchange": row([0.2, 0.2]),
        },
    }
    sizes = {"features": 4, "hidden": 8, "layers": 3, "classes": 2, "nodes": 10, "edges": 20}
    options = argparse.Namespace(ranks=2, model="gcn", **sizes)
    console = Console(file=io.StringIO(), width=250)
    console.print(link.epochs_table(options, "1gbit", found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "float32 sync spends 80.0% in communication" in text
    lines = {
        cells[1].strip(): [c.strip() for c in cells[2:-1]]
        for line in text.splitlines()
        if len(cells := line.split("│")) > 3
    }
    assert lines["1 bit stale"] == [
        "250.0 (100.0)", "200.0", "1.00", "500.0", "1.25", "4.00", "80%", "93.8%", "300.0 (1.50 x)",
    ]  # fmt: skip
    assert lines["1 bit auto"][0] == "this version takes no auto."
    assert lines["bound: no exchange"][4:6] == ["1.00", "5.00"]


def test_a_table_of_times_to_accuracy() -> None:
    def run(base: list[float], stale: list[float]) -> dict[str, object]:
        seconds = {"seconds": [9.0, 9.0, 0.5, 0.5]}
        return {
            "float32 sync": {**seconds, "test": base},
            "1 bit stale": {"seconds": [9.0, 9.0, 0.25, 0.25], "test": stale},
            "1 bit auto": {"refused": "no."},
        }

    table = Table(*["", "variant", "best", "ms", "epochs", "seconds"])
    runs = [
        run([50.0, 70.0, 80.0, 79.5], [60.0, 79.0, 70.0, 82.0]),
        run([50.0, 90.0, 90.5, 60.0], [60.0, 61.0, 62.0, 63.0]),
    ]
    link.accuracy_rows(table, "cora GCN", runs)
    rows = list(zip(*(list(column.cells) for column in table.columns), strict=True))
    assert rows == [
        ("cora GCN", "float32 sync", "85.2", "500.0", "2.5", "1.25"),
        ("cora GCN", "1 bit stale", "72.5", "250.0", "2 (1 of 2)", "0.50"),
        ("cora GCN", "1 bit auto", "no.", "", "", ""),
    ]
