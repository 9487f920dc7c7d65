"""Real processes that are slow, stopped or killed while exchanges are under way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sylvie_fx
from support import free_port, run_processes, run_processes_unchecked

pytestmark = pytest.mark.dist

FEATURES, STEPS = 1024, 8
FAST = 100.0  # Gbit/s: the hidden rows cross, and are not computed twice


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.linear(x).relu()
        return torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])


def train(how: str, staleness: int, timeout: float) -> tuple[list[float], dict[int, int], str]:
    """What each step sums over the one edge from the other rank, when the weight is the number of the step."""
    torch.manual_seed(0)
    net = sylvie_fx.distribute(Sum(), staleness=staleness, stale="last", warm_up=1, timeout=timeout, link=FAST)
    net.transport.threaded = True  # also where there is one core a rank
    rank = net.transport.rank
    x, edges = net.shard(
        torch.ones(2, FEATURES, dtype=torch.float64), torch.tensor([[0, 1], [1, 0]]),
        partition=torch.tensor([0, 1]), kinds=["node", "edge_index"],
    )  # fmt: skip
    found, error = [], ""
    try:
        for step in range(1, STEPS + 1):
            if rank == 1 and step == 4:
                _misbehave(how)
            with torch.no_grad():
                net.module.linear.weight.fill_(step / FEATURES)
            out = net(x, edges)
            (out * step).sum().backward()
            found.append(float(out.detach().as_subclass(Tensor)[0]))
    except sylvie_fx.ir.errors.CommError as raised:
        error = str(raised)
    return found, net.stats.staleness, error


def _misbehave(how: str) -> None:
    if how == "slow":
        time.sleep(1.0)
    elif how == "stopped":
        own = os.getpid()
        # Another process lets this one go on, which can not do so itself.
        subprocess.Popen(
            [sys.executable, "-c", f"import os, time; time.sleep(2); os.kill({own}, {int(signal.SIGCONT)})"]
        )
        os.kill(own, signal.SIGSTOP)
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["slow", "stopped"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_bound_holds_when_a_rank_is_late(how: str, staleness: int) -> None:
    for found, histogram, error in run_processes(2, train, how, staleness, 60.0, timeout=180.0):
        assert error == ""
        assert found == pytest.approx([max(1, t - staleness) for t in range(1, STEPS + 1)])
        assert max(histogram) == staleness
        assert sum(histogram.values()) == 2 * STEPS


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_killed_rank_is_named(staleness: int) -> None:
    outcomes = run_processes_unchecked(2, train, "killed", staleness, 20.0, timeout=180.0, stuck=())
    assert outcomes[1].exitcode == -signal.SIGKILL
    found, _, error = outcomes[0].value
    assert len(found) < STEPS
    assert "rank 1" in error
    assert "exchange 0 site 0" in error or "all_reduce" in error


SCRIPT = """
import sys, time, torch
sys.path.insert(0, {folder!r})
import sylvie_fx
from test_faults import FAST, FEATURES, Sum
torch.manual_seed(0)
net = sylvie_fx.distribute(Sum(), staleness=1, link=FAST)
net.transport.threaded = True
x, edges = net.shard(torch.ones(2, FEATURES, dtype=torch.float64), torch.tensor([[0, 1], [1, 0]]),
                     partition=torch.tensor([0, 1]), kinds=["node", "edge_index"])
for step in range(100_000):
    net(x, edges).sum().backward()
    if step == 3:
        print("training", flush=True)
"""


LATE = """
import atexit, os, sys, threading, time
def lanes(): return [t.name for t in threading.enumerate() if t.name.startswith("program")]
def say(text): sys.stdout.write(text + chr(10))  # at once: both ranks write here
atexit.register(lambda: say(f"left {{lanes()}}"))
sys.path.insert(0, {folder!r})
import torch, sylvie_fx; torch.manual_seed(0)
from test_faults import FAST, FEATURES, Sum
def train():
    net = sylvie_fx.distribute(Sum(), staleness=1, link=FAST)
    net.transport.threaded = True
    x, edges = net.shard(torch.ones(2, FEATURES, dtype=torch.float64), torch.tensor([[0, 1], [1, 0]]),
                         partition=torch.tensor([0, 1]), kinds=["node", "edge_index"])
    for step in range(8):
        if step == 7 and os.environ["RANK"] == "0":
            exchange = net.transport.exchange
            def late(*args):
                time.sleep(2.0)
                return exchange(*args)
            net.transport.exchange = late
        net(x, edges).sum().backward()
    return len(lanes())
say(f"has {{train()}}")
"""


def test_no_thread_waits_for_rows_when_python_ends(tmp_path: Path) -> None:
    """Rank 0 sends its last rows long after rank 1 has deleted its model and come to its end."""
    script = tmp_path / "late.py"
    script.write_text(LATE.format(folder=str(Path(__file__).resolve().parent)))
    here = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "sylvie_fx", "run", "-n", "2", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120.0, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("has 3") == 2, "there were threads to wait for"
    assert ended.stdout.count("left []") == 2, ended.stdout


def test_an_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    here = Path(__file__).resolve().parent
    script.write_text(SCRIPT.format(folder=str(here)))
    paths = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "MASTER_PORT": str(free_port())}
    launcher = subprocess.Popen(
        [sys.executable, "-m", "sylvie_fx", "run", "-n", "2", str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    lines: list[str] = []
    started = threading.Event()

    def read() -> None:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            lines.append(line)
            if "training" in line:
                started.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert started.wait(120.0), "".join(lines)
        os.killpg(launcher.pid, signal.SIGINT)
        launcher.wait(60.0)
        deadline = time.monotonic() + 30.0
        while _alive(launcher.pid) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not _alive(launcher.pid), "processes of the session are left"
    finally:
        if _alive(launcher.pid):
            os.killpg(launcher.pid, signal.SIGKILL)
        reader.join(10.0)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
