from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from transport_programs import DTYPES, autograd, counted, objects, polled, reductions, ring_of_dtypes, uneven

from support import PATIENCE, run_processes, run_processes_unchecked
from sylvie_fx.ir.errors import CommError, OptionError
from sylvie_fx.runtime.in_process import run_ranks
from sylvie_fx.runtime.process_group import ProcessGroupTransport, default_transport
from sylvie_fx.runtime.transport import Transport

pytestmark = pytest.mark.dist

PROGRAMS = {f.__name__: f for f in (ring_of_dtypes, uneven, reductions, objects, counted, polled, autograd)}


WAYS = ("one host", "hosts apart")
"""Through shared memory, and over gloo."""


def place(way: str) -> None:
    """Make a host of its own of this process, or leave it beside the others."""
    if way == "hosts apart":
        os.environ["SYLVIE_FX_HOST"] = f"host {os.environ['RANK']}"


def run_programs(way: str) -> dict[str, object]:
    place(way)
    transport = ProcessGroupTransport.from_environment(PATIENCE)
    assert isinstance(transport, Transport)
    results = {name: program(transport) for name, program in PROGRAMS.items()}
    assert ("through shared memory" in transport.wires()) == (way == "one host")
    transport.close()
    transport.close()
    assert not dist.is_initialized()
    return results


@pytest.mark.parametrize(("size", "way"), [(2, "one host"), (3, "hosts apart")])
def test_same_bits_as_in_process_ranks(size: int, way: str) -> None:
    outcomes = run_processes(size, run_programs, way)
    for name, program in PROGRAMS.items():
        expected = run_ranks(size, program, timeout=20)
        for rank in range(size):
            assert _same(outcomes[rank][name], expected[rank]), (name, rank)
    assert len(outcomes[0]["ring_of_dtypes"]) == len(DTYPES)


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and all(_same(value, other[key]) for key, value in one.items())
    return one == other


def two_hosts() -> tuple[str, dict[str, object]]:
    """Ranks 0 and 2 share a host."""
    os.environ["SYLVIE_FX_HOST"] = f"host {int(os.environ['RANK']) % 2}"
    transport = ProcessGroupTransport.from_environment(PATIENCE)
    results = {name: program(transport) for name, program in PROGRAMS.items()}
    wires = transport.wires()
    transport.close()
    return wires, results


def test_both_kinds_of_links_in_one_exchange() -> None:
    outcomes = run_processes(3, two_hosts)
    assert [near for near, _ in outcomes] == [
        "messages travel through shared memory with ranks 2, over gloo",
        "messages travel over gloo",
        "messages travel through shared memory with ranks 0, over gloo",
    ]
    for name, program in PROGRAMS.items():
        expected = run_ranks(3, program, timeout=20)
        for rank in range(3):
            assert _same(outcomes[rank][1][name], expected[rank]), (name, rank)


def fail(way: str, how: str, culprit: int) -> tuple[str, str]:
    """Rank ``culprit`` fails in its second step; the others give what they were told, twice."""
    place(way)
    transport = default_transport(PATIENCE)
    transport.barrier("start")
    transport.all_reduce(torch.ones(3), "loss")
    if how in SILENT:  # not before: one process may start long after another
        transport.timeout = 5.0
    if transport.rank == culprit:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "exit":
            raise SystemExit(3)
        elif how == "abort":
            transport.abort("ValueError: bad layer")
        time.sleep(PATIENCE)
    texts = []
    for label in ("loss", "next"):
        try:
            transport.all_reduce(torch.ones(3), label)
            texts.append("")
        except CommError as error:
            texts.append(str(error))
    return texts[0], texts[1]


SILENT = ("hang", "stop")
"""Failures that nothing but a timeout can find."""


@pytest.mark.parametrize(
    ("how", "culprit", "expected", "way"),
    [
        ("kill", 2, "its process ended or was killed", "one host"),
        *[("kill", 0, "its process ended or was killed", way) for way in WAYS],  # rank 0 takes the store with it
        ("exit", 1, "its process ended or was killed", "hosts apart"),
        *[("abort", 1, "failed. ValueError: bad layer", way) for way in WAYS],
        ("hang", 1, "sent nothing for ", "hosts apart"),
        *[("stop", 0, "sent nothing for ", way) for way in WAYS],  # the store does not answer either
    ],
)
def test_a_failing_rank_is_named(way: str, how: str, culprit: int, expected: str) -> None:
    stuck = [culprit] if how in (*SILENT, "abort") else []
    outcomes = run_processes_unchecked(3, fail, way, how, culprit, stuck=stuck)
    for rank, outcome in enumerate(outcomes):
        if rank == culprit:
            continue
        assert outcome.error is None, outcome.error
        first, second = outcome.value
        assert f"rank {rank} can not go on with 'loss' (step 1): rank {culprit}" in first
        assert expected in first
        assert f"'next' (step 0): rank {culprit}" in second


def sizes_differ(way: str) -> str:
    place(way)
    transport = ProcessGroupTransport.from_environment(PATIENCE)
    transport.barrier("start")
    transport.timeout = 2.0  # not before: one process may start long after another
    size = 3 + transport.rank
    try:
        transport.exchange([torch.ones(size)] * 2, [torch.empty(size), torch.empty(size)], "halo").wait()
    except CommError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", WAYS)
def test_messages_of_another_size_are_never_delivered(way: str) -> None:
    # gloo would end the process of the receiver.
    texts = run_processes(2, sizes_differ, way)
    assert all("'halo' (step 0): rank" in text for text in texts)
    if way == "one host":
        assert any("it in another size, " in text for text in texts)


def diverge(way: str) -> str:
    """Rank 0 alone makes a call, while the others go on."""
    place(way)
    transport = default_transport(PATIENCE)
    transport.barrier("start")
    transport.timeout = 3.0 if transport.rank == 0 else PATIENCE
    try:
        transport.all_reduce(torch.ones(3), "metric" if transport.rank == 0 else "step")
    except CommError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("size", "way"), [(3, "one host"), (2, "hosts apart")])
def test_ranks_in_different_calls_name_both_and_their_lines(way: str, size: int) -> None:
    texts = run_processes(size, diverge, way)
    line = r"\S*test_process_group\.py:\d+"
    for rank, text in enumerate(texts):
        mine, theirs, other = ("step", "metric", "0") if rank else ("metric", "step", "[12]")
        said = rf"^{line}: rank {rank} can not go on with '{mine}' \(step 0\): rank {other} waits in '{theirs}' \(step 0\) at {line}"
        assert re.search(said, text), text
        assert "the ranks do different things" in text
        assert "make the same calls in the same order on every rank" in text


def refuse() -> str:
    """All ranks refuse something and go on; then rank 1 refuses alone, and ends."""
    transport = default_transport(PATIENCE)
    transport.refuse("PassError: everywhere")
    total = transport.all_reduce(torch.ones(3), "next model")
    assert torch.equal(total, torch.full((3,), 2.0))
    if transport.rank == 1:
        transport.refuse("PassError: here alone")
        return ""
    try:
        transport.all_reduce(torch.ones(3), "next model")
    except CommError as error:
        return str(error)
    return ""


def test_a_refusal_ends_no_group_and_is_told_by_the_end_of_the_process() -> None:
    assert "rank 1 failed. PassError: here alone" in run_processes(2, refuse)[0]


def poll_for_a_dead_rank(way: str) -> str:
    place(way)
    transport = ProcessGroupTransport.from_environment(PATIENCE)
    transport.barrier("start")
    if transport.rank == 1:
        return ""
    flight = transport.exchange([None] * 2, [None, torch.empty(4)], "stale")
    while not flight.done():
        time.sleep(0.01)
    try:
        flight.wait()
    except CommError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("way", WAYS)
def test_an_error_in_the_background_is_raised_by_wait(way: str) -> None:
    text = run_processes_unchecked(2, poll_for_a_dead_rank, way)[0].value
    assert "rank 1 closed its connection during 'stale' (step 0)" in text


def subgroup() -> float:
    dist.init_process_group("gloo")
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return 0.0
    transport = ProcessGroupTransport(group, timeout=PATIENCE)
    total = transport.all_reduce(torch.tensor([float(dist.get_rank())]), "sum")
    transport.close()
    assert dist.is_initialized()
    return float(total)


def test_a_group_of_some_processes() -> None:
    assert run_processes(3, subgroup) == [0.0, 3.0, 3.0]


def alone_among_two() -> str:
    if os.environ["RANK"] == "1":
        return ""
    try:
        ProcessGroupTransport.from_environment(1)
    except CommError as error:
        return str(error)
    return "no error"


def test_a_rank_that_never_comes() -> None:
    text = run_processes(2, alone_among_two)[0]
    assert "rank 0 could not meet the other ranks within 1 s" in text


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CommError, match=r"RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set. start the script"):
        ProcessGroupTransport.from_environment()
    with pytest.raises(CommError, match="no process group"):
        ProcessGroupTransport()
    with pytest.raises(OptionError, match="positive"):
        ProcessGroupTransport(timeout=-1)
    assert default_transport().size == 1
