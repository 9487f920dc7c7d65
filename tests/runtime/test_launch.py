from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sylvie_fx.ir.errors import OptionError
from sylvie_fx.runtime.launch import Launch, LaunchResult, launch

pytestmark = pytest.mark.dist


def script_in(folder: Path, body: str) -> Path:
    """A script that writes its process id to a file named by its rank, and then does what the body says."""
    head = """
        import os, pathlib, signal, sys, time
        rank, folder = int(os.environ["RANK"]), pathlib.Path(__file__).parent
        (folder / f"pid{rank}").write_text(str(os.getpid()))
    """
    path = folder / "script.py"
    path.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    return path


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ends(pids: list[int], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_every_rank_runs_with_arguments_and_variables(tmp_path: Path) -> None:
    body = """
        shown = [os.environ[n] for n in ("WORLD_SIZE", "OMP_NUM_THREADS", "EXTRA")] + sys.argv[1:]
        (folder / f"out{rank}").write_text(" ".join(shown))
    """
    what = Launch(script_in(tmp_path, body), ["--a", "b c"], processes=3, threads=2, environment={"EXTRA": "x"})
    assert launch(what) == LaunchResult(0)
    assert [(tmp_path / f"out{rank}").read_text() for rank in range(3)] == ["3 2 x --a b c"] * 3
    assert "EXTRA" not in os.environ


@pytest.mark.parametrize(
    ("ending", "exitcode", "text"),
    [
        ("raise SystemExit(7)", 7, "rank 1 ended with status 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was ended by SIGKILL"),
    ],
)
def test_a_failing_rank_ends_the_others(tmp_path: Path, ending: str, exitcode: int, text: str) -> None:
    body = f"""
        if rank == 1:
            while not (folder / "pid0").exists():
                time.sleep(0.01)
            {ending}
        time.sleep(600)
    """
    result = launch(Launch(script_in(tmp_path, body), processes=2))
    assert result == LaunchResult(exitcode, (text,))
    assert ends([int((tmp_path / "pid0").read_text())])


@pytest.mark.parametrize("stubborn", [False, True])
def test_ctrl_c_leaves_no_process(tmp_path: Path, stubborn: bool) -> None:
    body = """
        if STUBBORN:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        (folder / f"ready{rank}").touch()
        time.sleep(600)
    """
    script = script_in(tmp_path, body.replace("STUBBORN", str(stubborn)))
    command = [sys.executable, "-m", "sylvie_fx", "run", "-n", "2", str(script)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped by SIGINT" in stderr
    assert ends([int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)])


def test_threads_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = script_in(tmp_path, "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    variables = Launch(script, processes=1000).variables()
    assert variables["OMP_NUM_THREADS"] == "1"
    assert variables.get("GLOO_SOCKET_IFNAME") in (None, "lo", "lo0")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert Launch(script).variables() == {"PYTHONUNBUFFERED": "1", "THP_MEM_ALLOC_ENABLE": "1"}
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    assert Launch(script).variables() == {"PYTHONUNBUFFERED": "1"}


def test_malformed(tmp_path: Path) -> None:
    script = script_in(tmp_path, "")
    with pytest.raises(OptionError, match="at least one process, not 0"):
        Launch(script, processes=0)
    with pytest.raises(OptionError, match="at least one thread"):
        Launch(script, threads=0)
    with pytest.raises(OptionError, match="there is no script"):
        Launch(tmp_path / "none.py")
