"""Starting real ranks in tests: spawned processes over gloo, each with a free port and a time limit."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

DEADLINE, PATIENCE = 240.0, 600.0
"""Seconds. All ranks must have ended by the deadline, which is below pytest's own; a loaded machine takes a minute to start
three processes. A rank whose waits may last as long as PATIENCE, and that waits for their end, has no result by then."""


@dataclass(frozen=True)
class RankOutcome:
    """How one process ended.

    Attributes:
        value: What the function returned.
        error: Its traceback as text, or None.
        exitcode: Exit status; negative is the signal that killed it.
        seconds: From the start of the function to its end; to the death, where it was killed.
    """

    value: Any
    error: str | None
    exitcode: int | None
    seconds: float


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_processes(size: int, fn: Callable[..., Any], *args: Any, timeout: float = DEADLINE) -> list[Any]:
    """Call ``fn(*args)`` in ``size`` processes that have torchrun's variables set; give each rank's result.

    ``fn`` is a top-level function of a test module, which every process loads from its file; arguments and results are
    pickled. A transport is ``ProcessGroupTransport.from_environment(timeout)`` in it.

    Args:
        size: Number of processes.
        fn: What every rank runs.
        args: Its arguments.
        timeout: Seconds until all must have ended.

    Raises:
        AssertionError: A rank raised, died, or did not end in time.
    """
    outcomes = run_processes_unchecked(size, fn, *args, timeout=timeout)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank} raised:\n{outcome.error}"
        assert outcome.exitcode == 0, f"rank {rank} ended with {outcome.exitcode}"
    return [outcome.value for outcome in outcomes]


def run_processes_unchecked(
    size: int, fn: Callable[..., Any], *args: Any, timeout: float = DEADLINE, stuck: Collection[int] = ()
) -> list[RankOutcome]:
    """``run_processes`` for ranks that are meant to fail: how each ended, without raising.

    Args:
        size: Number of processes.
        fn: What every rank runs.
        args: Its arguments.
        timeout: Seconds until all must have ended.
        stuck: Ranks that will not end by themselves; they are killed when the others have ended.
    """
    context = multiprocessing.get_context("spawn")
    source = (inspect.getfile(fn), fn.__qualname__)
    port = free_port()
    deadline = time.monotonic() + timeout
    processes, pipes = [], []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(there, rank, size, port, source, args), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    outcomes: dict[int, RankOutcome] = {}
    for rank in sorted(range(size), key=lambda rank: rank in stuck):
        process, pipe = processes[rank], pipes[rank]
        if rank in stuck:
            process.kill()
        value, error, seconds = None, f"no result within {timeout:g} s", float("nan")
        if wait([pipe], max(0.0, deadline - time.monotonic())):
            try:
                value, error, seconds = pickle.loads(pipe.recv_bytes())
            except EOFError:
                error, seconds = "died without a result", timeout - (deadline - time.monotonic())
        process.join(max(0.0, min(60.0, deadline - time.monotonic())))
        if process.is_alive():
            process.kill()
            process.join()
        outcomes[rank] = RankOutcome(value, error, process.exitcode, seconds)
    return [outcomes[rank] for rank in range(size)]


def _rank_main(pipe: Connection, rank: int, size: int, port: int, source: tuple[str, str], args: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch  # after the number of threads is known

    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        result = (_load(*source)(*args), None)
    except BaseException:  # a process boundary: shown by the test
        result = (None, traceback.format_exc())
    # Not pipe.send: torch would share the memory of tensors, which ends with this process.
    pipe.send_bytes(pickle.dumps((*result, time.monotonic() - started)))
    pipe.close()


def _load(path: str, name: str) -> Callable[..., Any]:
    """A function of a file, whatever the test runner calls the module."""
    spec = importlib.util.spec_from_file_location("rank_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function
