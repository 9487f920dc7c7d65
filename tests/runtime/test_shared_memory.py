from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sylvie_fx.ir.errors import CommError
from sylvie_fx.runtime.local_links import connect_local
from sylvie_fx.runtime.shared_memory import INLINE_BYTES, Key, SharedMemoryLink, supported

pytestmark = pytest.mark.skipif(not supported(), reason="links through shared memory are made of what Linux has")

LARGE = 3 * INLINE_BYTES


@pytest.fixture
def ends() -> Iterator[tuple[SharedMemoryLink, SharedMemoryLink]]:
    """Both ends of a link, in one process."""
    links = [SharedMemoryLink(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    yield links[0], links[1]
    for link in links:
        link.close()


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def message(size: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def taken(link: SharedMemoryLink, label: str, step: int, size: int, deadline: float | None = None) -> Tensor:
    into = torch.empty(size, dtype=torch.uint8)
    link.take(Key(label, step, size), into, soon() if deadline is None else deadline)
    return into


@pytest.mark.parametrize("size", [1, INLINE_BYTES, INLINE_BYTES + 1, LARGE, 1 << 20])
def test_bytes_arrive_and_what_is_sent_may_change_at_once(ends: tuple[SharedMemoryLink, ...], size: int) -> None:
    one, other = ends
    sent = message(size)
    one.send("halo", 0, sent, soon())
    expected = sent.clone()
    sent.zero_()
    assert torch.equal(taken(other, "halo", 0, size), expected)


def test_messages_are_told_apart_by_label_step_and_size(ends: tuple[SharedMemoryLink, ...]) -> None:
    one, other = ends
    keys = [("a", 0, 5), ("a", 1, 5), ("b", 0, 5), ("a", 0, LARGE), ("a", 0, LARGE + 1)]
    for seed, (label, step, size) in enumerate(keys):
        one.send(label, step, message(size, seed), soon())
    for seed, (label, step, size) in reversed(list(enumerate(keys))):
        assert torch.equal(taken(other, label, step, size), message(size, seed))


def test_what_has_arrived_and_waits_is_known(ends: tuple[SharedMemoryLink, ...]) -> None:
    one, other = ends
    one.send("a", 0, message(5), soon())
    one.send("b", 1, message(LARGE), soon())
    assert other.untaken() == [Key("a", 0, 5), Key("b", 1, LARGE)]
    taken(other, "a", 0, 5)
    assert other.untaken() == [Key("b", 1, LARGE)]
    assert one.untaken() == []


def test_messages_of_one_key_keep_their_order(ends: tuple[SharedMemoryLink, ...]) -> None:
    one, other = ends
    for seed in range(4):
        one.send("halo", 0, message(LARGE, seed), soon())
    for seed in range(4):
        assert torch.equal(taken(other, "halo", 0, LARGE), message(LARGE, seed))


def test_memory_that_was_read_is_used_again(ends: tuple[SharedMemoryLink, ...]) -> None:
    one, other = ends
    descriptors = len(os.listdir("/proc/self/fd"))
    for step in range(20):
        for link, peer in ((one, other), (other, one)):
            link.send("halo", step, message(LARGE, step), soon())
            assert torch.equal(taken(peer, "halo", step, LARGE), message(LARGE, step))
    assert one._blocks == other._blocks == 1
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_both_ends_may_send_more_than_the_socket_holds(ends: tuple[SharedMemoryLink, ...]) -> None:
    count = 3000
    failed: list[BaseException] = []

    def run(link: SharedMemoryLink, seed: int) -> None:
        try:
            for step in range(count):
                link.send("halo", step, message(500, seed), soon())
            for step in range(count):
                assert torch.equal(taken(link, "halo", step, 500), message(500, 1 - seed))
        except BaseException as error:  # a thread's boundary: raised below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(link, seed)) for seed, link in enumerate(ends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failed


def test_threads_that_wait_at_one_link_each_get_theirs(ends: tuple[SharedMemoryLink, ...]) -> None:
    one, other = ends
    found: dict[int, Tensor] = {}
    sizes = {step: (10, LARGE)[step % 2] for step in range(8)}

    def wait(step: int) -> None:
        found[step] = taken(other, "halo", step, sizes[step])

    threads = [threading.Thread(target=wait, args=(step,)) for step in sizes]
    for thread in threads:
        thread.start()
    for step in reversed(sizes):
        one.send("halo", step, message(sizes[step], step), soon())
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(found[step], message(size, step)) for step, size in sizes.items())


def test_a_wait_that_lasts_too_long(ends: tuple[SharedMemoryLink, ...]) -> None:
    one, other = ends
    with pytest.raises(TimeoutError):
        taken(other, "halo", 0, 5, soon(0.05))
    one.send("halo", 0, message(5), soon())  # the link goes on
    assert torch.equal(taken(other, "halo", 0, 5), message(5))


def test_a_peer_that_takes_nothing(ends: tuple[SharedMemoryLink, ...]) -> None:
    def fill() -> None:
        for step in range(100_000):
            ends[0].send("halo", step, message(500), soon(0.05))

    with pytest.raises(TimeoutError):
        fill()


@pytest.mark.parametrize("size", [5, LARGE])
def test_what_a_peer_sent_before_it_ended_is_still_to_be_had(ends: tuple[SharedMemoryLink, ...], size: int) -> None:
    one, other = ends
    other.send("unread", 0, message(5), soon())  # which makes the kernel report a reset connection
    one.send("halo", 0, message(size), soon())
    one.stop()
    one.close()
    assert torch.equal(taken(other, "halo", 0, size), message(size))
    assert other.has(Key("halo", 1, size))
    with pytest.raises(ConnectionError):
        taken(other, "halo", 1, size)
    with pytest.raises(ConnectionError):
        other.send("halo", 1, message(size), soon())


def test_the_end_wakes_every_thread_of_both_ends(ends: tuple[SharedMemoryLink, ...]) -> None:
    raised: list[str] = []

    def wait(link: SharedMemoryLink, step: int) -> None:
        try:
            taken(link, "halo", step, 5)
        except ConnectionError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=wait, args=(link, step)) for link in ends for step in range(3)]
    for thread in threads:
        thread.start()
    ends[0].stop()
    for thread in threads:
        thread.join(60)
    assert raised == ["the connection has ended"] * 6


def test_done_is_asked_without_waiting(ends: tuple[SharedMemoryLink, ...]) -> None:
    one, other = ends
    key = Key("halo", 0, LARGE)
    assert not other.has(key)
    one.send("halo", 0, message(LARGE), soon())
    assert other.has(key)
    assert other.has(key)
    taken(other, *key)
    assert not other.has(key)


# --- finding one another --------------------------------------------------------------------------------------------


def meet(hosts: list[str], **changes: object) -> dict[int, object]:
    """What connect_local gives each rank; ranks are threads."""
    meeting = threading.Barrier(len(hosts), timeout=30)
    rounds: list[list[str]] = [[""] * len(hosts) for _ in range(2)]
    results: dict[int, object] = {}

    def rank(number: int) -> None:
        turn = iter(rounds)

        def gather(text: str) -> list[str]:
            values = next(turn)
            values[number] = text
            meeting.wait()
            return values

        try:
            results[number] = connect_local(number, hosts[number], gather)
        except CommError as error:
            results[number] = error
            meeting.abort()
        except threading.BrokenBarrierError as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_ranks_of_a_host_are_connected_each_with_each() -> None:
    links = meet(["a", "b", "a", "a"])
    assert {rank: sorted(found) for rank, found in links.items()} == {0: [2, 3], 1: [], 2: [0, 3], 3: [0, 2]}
    for one, other in ((0, 2), (0, 3), (2, 3)):
        for here, there in ((one, other), (other, one)):
            links[here][there].send("halo", here, message(5, here), soon())
        for here, there in ((one, other), (other, one)):
            assert torch.equal(taken(links[here][there], "halo", there, 5), message(5, there))
    for found in links.values():
        for link in found.values():
            link.close()


def test_a_socket_that_can_not_be_reached_is_an_error_that_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(token: str, rank: int) -> socket.socket:
        raise PermissionError("operation not permitted")

    monkeypatch.setattr("sylvie_fx.runtime.local_links._called", refused)
    outcome = meet(["a", "a"])[1]
    assert str(outcome) == (
        "rank 1 could not connect to rank 0 of its host through a Unix socket. operation not permitted. give each rank a "
        "value of its own of SYLVIE_FX_HOST: they then talk as ranks of different hosts do."
    )
