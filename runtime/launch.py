"""Start a script on several local processes, with torchrun's agent underneath."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sylvie_fx.ir.errors import OptionError

#: Seconds that processes have to end by themselves after a signal, before they are killed.
_SHUTDOWN_SECONDS = 5
_ENDED = -signal.SIGTERM
_LOOPBACK = ("lo", "lo0")


@dataclass(frozen=True)
class Launch:
    """What to start.

    Attributes:
        script: Path of a Python file.
        arguments: Its command line.
        processes: Number of ranks, all on this machine.
        threads: Threads of each rank; None shares the cores among the ranks.
        environment: Variables for every rank, beside the present ones.

    Raises:
        OptionError: Fewer than one process or thread, or no such script.
    """

    script: Path
    arguments: Sequence[str] = ()
    processes: int = 2
    threads: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values."""
        if self.processes < 1:
            raise OptionError(f"a script runs on at least one process, not {self.processes}")
        if self.threads is not None and self.threads < 1:
            raise OptionError(f"a process has at least one thread, not {self.threads}")
        if not self.script.is_file():
            raise OptionError(f"there is no script {self.script}")

    def variables(self) -> dict[str, str]:
        """What the environment of the ranks has besides the present one."""
        found = {"PYTHONUNBUFFERED": "1"}
        if self.threads is not None or "OMP_NUM_THREADS" not in os.environ:
            found["OMP_NUM_THREADS"] = str(self.threads or max(1, _cores() // self.processes))
        if "THP_MEM_ALLOC_ENABLE" not in os.environ:
            found["THP_MEM_ALLOC_ENABLE"] = "1"  # large tensors in large pages: fewer page faults in every step
        if "GLOO_SOCKET_IFNAME" not in os.environ and (loopback := _loopback()):
            # All ranks are here, and the address of the host's name may be one that nothing answers at.
            found["GLOO_SOCKET_IFNAME"] = loopback
        return {**found, **self.environment}


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended.

    Attributes:
        exitcode: 0, or the status of the first process that failed; 128 + signal, where a signal ended it.
        failures: One line for each process that failed, the first to fail first.
    """

    exitcode: int
    failures: tuple[str, ...] = ()


def launch(what: Launch) -> LaunchResult:
    """Run a script on several processes and wait for them; where one fails, or on a signal, the others are ended.

    Output of the processes, tracebacks included, goes where this process's goes.

    Args:
        what: The script and how to start it.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=what.processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the result says the same in one line
    with _environment(what.variables()):
        try:
            elastic_launch(config, sys.executable)(str(what.script), *what.arguments)
        except ChildFailedError as error:
            first = error.get_first_failure()[1].exitcode
            endings = [(rank, failure.exitcode) for rank, failure in error.failures.items()]
            # The agent ends the ranks that are left with SIGTERM, which is no failure of theirs.
            failures = tuple(
                f"rank {rank} {_ending(code)}" for rank, code in endings if code != _ENDED or first == _ENDED
            )
            return LaunchResult(first if first > 0 else 128 - first, failures)
        except SignalException as stopped:
            return LaunchResult(128 + stopped.sigval, (f"stopped by {stopped.sigval.name}",))
    return LaunchResult(0)


def _ending(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended with status {exitcode}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-exitcode).name}"
    return f"was ended by signal {-exitcode}"


def _cores() -> int:
    """Cores that this process may use, which containers and batch systems limit."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _loopback() -> str | None:
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in _LOOPBACK if name in names), None)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The agent hands its own environment to the ranks, so it has these for as long as it runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
