"""Exchanges of a process group that are in flight: between hosts, within a host, between GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sylvie_fx.ir.errors import CommError
from sylvie_fx.runtime.shared_memory import Key, SharedMemoryLink
from sylvie_fx.runtime.transport import Pending

#: A background wait ends when its connection does; gloo wants a number nevertheless.
_NO_LIMIT = timedelta(days=7)


class Loser(Protocol):
    """A transport, as its waits see it.

    Attributes:
        timeout: Seconds that a wait lasts where nothing else is said.
    """

    timeout: float

    def lost(self, peer: int, name: str, error: Exception | None, waited: float) -> CommError:
        """What to raise when a wait for a peer has failed."""


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: wires differ in the dtypes that they take, and none looks at the values."""
    return tensor.reshape(-1).view(torch.uint8)


class NearPending:
    """Messages from ranks of the same host, through shared memory, beside those from other hosts.

    Args:
        transport: For its timeout and its errors.
        name: The exchange, in errors.
        parts: For each message: who sends it, through what, what it must be, and where it goes.
        far: The rest of the exchange.
    """

    def __init__(
        self,
        transport: Loser,
        name: str,
        parts: Sequence[tuple[int, SharedMemoryLink, Key, Tensor]],
        far: Pending,
    ) -> None:
        self._transport, self._name, self._parts, self._far = transport, name, list(parts), far

    def wait(self, timeout: float | None = None) -> None:
        """See Pending.wait."""
        started, timeout = time.monotonic(), self._transport.timeout if timeout is None else timeout
        while self._parts:
            peer, link, key, buffer = self._parts[0]
            try:
                link.take(key, raw(buffer), started + timeout)
            except (ConnectionError, TimeoutError) as error:
                raise self._transport.lost(peer, self._name, error, time.monotonic() - started) from error
            self._parts.pop(0)
        self._far.wait(max(0.001, started + timeout - time.monotonic()))

    def done(self) -> bool:
        """See Pending.done."""
        return all(link.has(key) for _, link, key, _ in self._parts) and self._far.done()


class HostPending:
    """Messages through host memory, waited for in the calling thread unless somebody asks whether they are done."""

    def __init__(self, transport: Loser, name: str) -> None:
        self._transport, self._name = transport, name
        self._parts: list[tuple[int, dist.Work, Tensor, Tensor | None]] = []
        self._watcher: threading.Thread | None = None
        self._error: CommError | None = None

    def add(self, peer: int, work: dist.Work | None, host: Tensor, target: Tensor | None) -> None:
        """One message; ``host`` lives until it is through, and is copied to ``target`` where that is another tensor."""
        assert work is not None, "gloo gives a work for every member of the group"
        self._parts.append((peer, work, host, target))

    def wait(self, timeout: float | None = None) -> None:
        """See Pending.wait."""
        timeout = self._transport.timeout if timeout is None else timeout
        if self._watcher is not None:
            self._watcher.join(timeout)
            missing = [peer for peer, *_ in self._parts]
            if self._watcher.is_alive() and missing:
                raise self._transport.lost(missing[0], self._name, None, timeout)
            if self._error is not None:
                raise self._error
        else:
            self._drain(time.monotonic(), timeout)

    def done(self) -> bool:
        """See Pending.done; gloo can not be asked, so the first call starts a thread that waits."""
        if not self._parts:
            return True
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name=f"wait {self._name}", daemon=True)
            self._watcher.start()
        return not self._watcher.is_alive()

    def _watch(self) -> None:
        try:
            self._drain(time.monotonic(), None)
        except CommError as error:  # a thread's boundary: raised by wait
            self._error = error

    def _drain(self, started: float, timeout: float | None) -> None:
        while self._parts:
            peer, work, host, target = self._parts[0]
            left = None if timeout is None else max(0.001, started + timeout - time.monotonic())
            try:
                work.wait(_NO_LIMIT if left is None else timedelta(seconds=left))
            except RuntimeError as error:
                raise self._transport.lost(peer, self._name, error, time.monotonic() - started) from error
            if target is not None and target is not host:
                target.copy_(host)
            self._parts.pop(0)


class DevicePending:
    """Messages between devices: ``wait`` orders the current stream after them and does not block the host."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = list(works)

    def wait(self, timeout: float | None = None) -> None:
        """See Pending.wait; NCCL's own watchdog ends a process whose peer is gone."""
        del timeout
        for work in self._works:
            work.wait()
        self._works.clear()

    def done(self) -> bool:
        """See Pending.done."""
        return all(work.is_completed() for work in self._works)
