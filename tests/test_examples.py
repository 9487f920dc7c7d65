"""Every example runs, is exact, and gives on two processes what it gives on one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import sylvie_fx
from sylvie_fx.ir.errors import PassError
from sylvie_fx.script import load_script

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = [
    pytest.param("dgl_gcn", marks=pytest.mark.dgl),
    pytest.param("pyg_gat", marks=pytest.mark.pyg),
    "torch_sage",
]


def run(*arguments: str, timeout: float = 150) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_exact(name: str) -> None:
    script = load_script(EXAMPLES / f"{name}.py")
    report = sylvie_fx.verify(script.model, *script.data, loss=script.loss, parts=3)
    assert report.exact, str(report)


@pytest.mark.dist
@pytest.mark.dgl
def test_two_processes_print_what_one_prints() -> None:
    script = str(EXAMPLES / "dgl_gcn.py")
    pattern = re.compile(r"epoch +(\d+)  loss ([\d.]+)  test accuracy ([\d.]+)")
    alone = {e: (float(a), float(b)) for e, a, b in pattern.findall(run(script))}
    spread = pattern.findall(run("-m", "sylvie_fx", "run", "-n", "2", script))
    assert len(alone) == 50
    assert len(spread) == 100  # both ranks
    for epoch, loss, accuracy in spread:
        assert (float(loss), float(accuracy)) == pytest.approx(alone[epoch], abs=1.2e-5)


@pytest.mark.dist
@pytest.mark.pyg
def test_demo() -> None:
    shown = run(str(EXAMPLES / "demo.py"), "--epochs", "6")
    difference = re.search(r"largest difference over 6 epochs: (\S+)", shown)
    assert difference is not None, shown
    assert float(difference[1]) < 1e-5
    assert "exchanges of the train program" in shown


def test_custom_pass(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("custom_pass")
    example.main()
    assert re.search(r"limit-halo +unchanged", capsys.readouterr().out)
    passes = sylvie_fx.default_passes().insert_after("place-halos", example.LimitHalo(columns=8))
    import torch

    model = sylvie_fx.distribute(example.Sum(32, 16), passes=passes)
    x, edge_index = model.shard(torch.randn(100, 32), torch.randint(100, (2, 600)))
    with pytest.raises(PassError, match=r"custom_pass.py:\d+: .* numbers a row.*the limit is 8"):
        model(x, edge_index)
