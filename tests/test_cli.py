from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sylvie_fx import cli, doctor
from sylvie_fx.graphs.book import PartitionBook
from sylvie_fx.ir.errors import CommError
from sylvie_fx.runtime.launch import Launch, LaunchResult


def test_help_lists_the_commands() -> None:
    result = subprocess.run([sys.executable, "-m", "sylvie_fx", "--help"], capture_output=True, text=True, check=True)
    for name in ("run", "doctor", "partition", "explain", "verify", "bench"):
        assert f"    {name}" in result.stdout


@pytest.mark.parametrize("arguments", [[], ["train"], ["run"], ["partition", "cora"], ["run", "-n", "two", "x.py"]])
def test_command_lines_that_can_not_be_understood(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_run_hands_everything_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Launch] = []

    def fake(what: Launch) -> LaunchResult:
        started.append(what)
        return LaunchResult(3, ("rank 1 ended with status 3",))

    monkeypatch.setattr(cli, "launch", fake)
    script = tmp_path / "train.py"
    script.touch()
    line = ["run", "-n", "3", "--threads", "2", "--timeout", "5", "--bits", "1", str(script), "--bits", "x", "-n", "9"]
    assert cli.main(line) == 3
    variables = {"SYLVIE_FX_TIMEOUT": "5.0", "SYLVIE_FX_BITS": "1"}
    assert started == [Launch(script, ["--bits", "x", "-n", "9"], 3, 2, variables)]
    assert capsys.readouterr().err == "sylvie_fx: rank 1 ended with status 3\n"


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "none.py"]) == 1
    assert capsys.readouterr().err == "OptionError: there is no script none.py.\n"


@pytest.mark.parametrize("kind", ["npz", "npy", "pt", "pt dict"])
def test_partition_writes_a_book(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    edge_index = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    graph, book = tmp_path / f"graph.{kind.split()[0]}", tmp_path / "book"
    nodes = [] if kind in ("npz", "pt dict") else ["--nodes", "5"]
    if kind == "npz":
        np.savez(graph, edge_index=edge_index.numpy(), y=np.zeros(5))
    elif kind == "npy":
        np.save(graph, edge_index.numpy())
    else:
        torch.save({"edge_index": edge_index, "x": torch.zeros(5, 2)} if kind == "pt dict" else edge_index, graph)
    assert cli.main(["partition", str(graph), "--parts", "2", "--seed", "3", "-o", str(book), *nodes]) == 0
    assert PartitionBook.load(book).num_nodes == 5
    assert "2 parts of 5 nodes and 4 edges: 0 edges cut" in capsys.readouterr().out


def test_partition_of_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.npz"
    np.savez(other, x=1)
    assert cli.main(["partition", str(other), "--parts", "2"]) == 1
    assert "has no edge_index" in capsys.readouterr().err
    assert cli.main(["partition", str(tmp_path / "none.npz"), "--parts", "2"]) == 1
    assert "there is no file" in capsys.readouterr().err


SCRIPT = """
import torch

class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(900, 3)

    def forward(self, x, edge_index):
        h = self.linear(x)
        return torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])

def build():
    torch.manual_seed(0)
    return Sum(), (torch.randn(30, 900), torch.randint(30, (2, 120))), None

if __name__ == "__main__":
    raise SystemExit("main() must not run")
"""


def test_verify_builds_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "model.py"
    script.write_text(SCRIPT)
    assert cli.main(["verify", str(script), "--parts", "3"]) == 0
    assert capsys.readouterr().out.startswith("exact on 3 parts: largest relative difference")


def test_verify_fails_where_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "model.py"
    script.write_text(SCRIPT.replace("return torch.zeros_like(h)", "h = h.sort(0).values; return torch.zeros_like(h)"))
    assert cli.main(["verify", str(script), "--parts", "3"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("refused: ")
    assert "model.py:11" in shown


def test_explain_shows_the_exchanges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "model.py"
    script.write_text(SCRIPT)
    assert cli.main(["explain", str(script), "--parts", "3", "--bits", "1", "--program"]) == 0
    shown = capsys.readouterr().out
    assert "8-bit dithered shift" in shown
    assert "sylvie.halo_start(linear" in shown


def test_notes_of_an_error_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(path: Path, **options: Any) -> str:
        error = CommError("rank 1 failed")
        error.__notes__ = ["raised by rank 1 of 2"]
        raise error

    monkeypatch.setattr(cli, "explain_script", fail)
    assert cli.main(["explain", "model.py"]) == 1
    assert capsys.readouterr().err == "CommError: rank 1 failed.\nraised by rank 1 of 2\n"


def test_doctor_finds_what_the_tests_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    findings = {finding.name: finding for finding in doctor.examine()}
    assert list(findings) == ["python", "torch", "gloo", "CUDA", "C++ kernels", "METIS", "DGL", "PyG", "graphs"]
    assert all(name in shown for name in findings)
    assert torch.__version__ in findings["torch"].detail
    assert findings["METIS"].state is doctor.State.OK


def test_doctor_calls_broken_what_fails_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> doctor.Finding:
        raise OSError("libmetis.so: cannot open")

    monkeypatch.setattr(doctor, "_metis", fail)
    finding = next(finding for finding in doctor.examine() if finding.name == "METIS")
    assert finding == doctor.Finding("METIS", doctor.State.BROKEN, "OSError: libmetis.so: cannot open")
    assert cli.main(["doctor"]) == 1


@pytest.mark.dist
def test_bench_measures_the_wire() -> None:
    command = [sys.executable, "-m", "sylvie_fx", "bench", "-n", "2", "--megabytes", "0.001"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "wire between 2 processes" in result.stdout
    assert "all_reduce" in result.stdout
