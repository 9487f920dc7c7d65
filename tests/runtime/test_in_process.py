from __future__ import annotations

import re
import threading
import time

import pytest
import torch
from transport_programs import DTYPES, autograd, counted, objects, polled, reductions, ring_of_dtypes, uneven

from sylvie_fx.ir.errors import CommError, OptionError
from sylvie_fx.runtime.in_process import InProcessGroup, InProcessTransport, run_ranks
from sylvie_fx.runtime.transport import Pending, Transport


def test_is_a_transport() -> None:
    transport = InProcessGroup(1).transport(0)
    assert isinstance(transport, Transport)
    assert isinstance(transport.exchange([None], [None], "none"), Pending)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_dtype_arrives(size: int) -> None:
    for rank, received in enumerate(run_ranks(size, ring_of_dtypes, timeout=10)):
        for number in range(len(DTYPES)):
            for peer in range(size):
                if peer != rank:
                    expected = torch.full((3, 2), peer + number).to(DTYPES[number]).to(torch.complex128)
                    assert torch.equal(received[number][peer], expected)


def test_uneven_messages_in_flight_together() -> None:
    results = run_ranks(3, uneven, timeout=10)
    assert results[0] == [[], [10.0], [20.0] * 2, [], [11.0], [21.0] * 2]
    assert results[2] == [[0.0] * 2, [10.0] * 3, [], [1.0] * 2, [11.0] * 3, []]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_reductions_have_the_same_bits_on_all_ranks(size: int) -> None:
    results = run_ranks(size, reductions, timeout=10)
    for name, value in results[0].items():
        assert all(torch.equal(value, other[name]) for other in results), name
    assert int(results[0]["scalar"]) == size * (size + 1) // 2
    assert results[0]["any"].tolist() == [size > 1, False]
    assert results[0]["empty"].shape == (0, 4)
    assert torch.equal(results[0]["strided"], results[0]["small"].t())
    assert results[0]["half"].dtype == torch.bfloat16


def test_sum_is_in_rank_order() -> None:
    parts = [torch.randn(5, 8191, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    results = run_ranks(3, lambda transport: transport.all_reduce(parts[transport.rank], "sum"), timeout=10)
    assert torch.equal(results[1], parts[0] + parts[1] + parts[2])


def test_objects_counters_polling_and_backward() -> None:
    assert run_ranks(3, objects, timeout=10)[1] == [{"rank": r, "text": "x" * 100 * r} for r in range(3)]
    assert run_ranks(3, counted, timeout=10) == [(40, 2)] * 3
    assert run_ranks(2, polled, timeout=10)[0][1].tolist() == [1.0] * 4
    assert [float(g) for g in run_ranks(3, autograd, timeout=10)] == [2 * 6 * (1 + 2 + 3)] * 3


def test_a_raising_rank_wakes_the_others_and_is_re_raised() -> None:
    woken: list[str] = []

    def program(transport: InProcessTransport) -> None:
        if transport.rank == 2:
            raise ValueError("no such layer")
        try:
            transport.barrier("before the layer")
        except CommError as error:
            woken.append(str(error))
            raise

    before = threading.active_count()
    started = time.monotonic()
    with pytest.raises(ValueError, match="no such layer") as caught:
        run_ranks(3, program, timeout=120)
    assert time.monotonic() - started < 100  # not by their timeout
    assert caught.value.__notes__ == ["raised by rank 2 of 3"]
    assert len(woken) == 2
    assert all("rank 2 failed. ValueError: no such layer" in text and "before the layer" in text for text in woken)
    assert threading.active_count() == before


def test_a_hung_rank_is_named_even_by_those_who_wait_for_others() -> None:
    release = threading.Event()

    def program(transport: InProcessTransport) -> str:
        if transport.rank == 2:
            release.wait(20)
            return ""
        # Rank 0 waits for rank 1, and rank 1 for the rank that hangs.
        peer = transport.rank + 1
        receives = [torch.empty(1) if p == peer else None for p in range(3)]
        try:
            transport.exchange([None] * 3, receives, "chain").wait(0.5 if transport.rank == 0 else 0.8)
        except CommError as error:
            return str(error)
        finally:
            if transport.rank == 1:
                release.set()
        return ""

    first, second, _ = run_ranks(3, program, timeout=10)
    assert "rank 0 can not go on with 'chain' (step 0): rank 2 sent nothing for 0.5 s" in first
    assert "rank 2 sent nothing" in second


def test_a_rank_that_finished_early_is_named_at_once() -> None:
    def program(transport: InProcessTransport) -> None:
        if transport.rank == 0:
            transport.barrier("only rank 0 comes here")

    with pytest.raises(CommError, match="rank 1 has finished without sending"):
        run_ranks(2, program, timeout=30)


def test_ranks_in_different_calls_name_both_and_their_lines() -> None:
    def program(transport: InProcessTransport) -> str:
        if transport.rank == 0:
            time.sleep(0.1)
        try:
            transport.exchange([torch.ones(1)] * 2, [torch.empty(1), torch.empty(1)], f"call {transport.rank}").wait(
                0.5 if transport.rank == 0 else 5.0
            )
        except CommError as error:
            return str(error)
        return ""

    first, second = run_ranks(2, program, timeout=10)
    assert re.search(
        r"test_in_process\.py:\d+: rank 0 can not go on with 'call 0' \(step 0\): rank 1 waits in 'call 1' \(step 0\) at "
        r"\S*test_in_process\.py:\d+\. the ranks do different things",
        first,
    ), first
    assert "rank 0 has finished without sending" in second


def test_a_refusal_is_told_while_the_rank_does_not_go_on() -> None:
    def program(transport: InProcessTransport) -> None:
        transport.refuse("PassError: everywhere")
        transport.barrier("next")
        if transport.rank == 1:
            transport.refuse("PassError: here alone")
            return
        transport.barrier("next")

    with pytest.raises(CommError, match=r"'next' \(step 1\).*PassError: here alone"):
        run_ranks(2, program, timeout=30)


def test_layouts_that_differ() -> None:
    def program(transport: InProcessTransport) -> None:
        size = 3 + transport.rank
        transport.exchange([torch.ones(size)] * 2, [torch.empty(size), torch.empty(size)], "halo").wait()

    with pytest.raises(CommError, match=r"expected . x torch.float32 from rank . in 'halo' \(step 0\) and got"):
        run_ranks(2, program, timeout=5)


def test_malformed_calls() -> None:
    transport = InProcessGroup(2).transport(0)
    with pytest.raises(CommError, match="given 1 sends for 2 ranks"):
        transport.exchange([None], [None, None], "x")
    with pytest.raises(CommError, match="rank 1 in receives is not contiguous"):
        transport.exchange([None, None], [None, torch.empty(2, 3).t()], "x")
    with pytest.raises(OptionError, match="booleans"):
        transport.all_reduce(torch.tensor([True]), "x")
    with pytest.raises(OptionError, match="'mean'"):
        transport.all_reduce(torch.ones(1), "x", "mean")  # type: ignore[arg-type]
    transport.close()
    with pytest.raises(CommError, match="closed"):
        transport.exchange([None, None], [None, None], "x")
    with pytest.raises(OptionError, match="at least one rank"):
        InProcessGroup(0)
    with pytest.raises(OptionError, match="positive"):
        InProcessGroup(1, timeout=0)
    with pytest.raises(OptionError, match="rank 2"):
        InProcessGroup(2).transport(2)
