"""A transport that counts what crosses and how long this rank waits for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sylvie_fx.runtime.transport import Pending, ReduceOp, Transport


@dataclass
class Meter:
    """Counters of one rank.

    Attributes:
        exchanges: Halo exchanges started, forward and backward.
        bytes_sent: Payload bytes that this rank sent in them.
        bytes_reduced: Payload bytes that it sent for gradients, global reductions and control messages.
        wait_s: Seconds that it waited for others.
    """

    exchanges: int = 0
    bytes_sent: int = 0
    bytes_reduced: int = 0
    wait_s: float = 0.0

    def reset(self) -> None:
        """Count from zero."""
        self.exchanges = self.bytes_sent = self.bytes_reduced = 0
        self.wait_s = 0.0


class MeteredTransport:
    """Hands every call on to another transport; see Transport for the methods.

    Args:
        inner: The transport that does the work.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner, self.meter = inner, Meter()
        self.rank, self.size, self.timeout = inner.rank, inner.size, inner.timeout

    @property
    def bytes_sent(self) -> int:
        """Payload bytes sent since the start."""
        return self.inner.bytes_sent

    @property
    def messages_sent(self) -> int:
        """Messages sent since the start."""
        return self.inner.messages_sent

    def exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], label: str) -> Pending:
        """See Transport.exchange."""
        before = self.inner.bytes_sent
        pending = self.inner.exchange(sends, receives, label)
        self.meter.exchanges += 1
        self.meter.bytes_sent += self.inner.bytes_sent - before
        return _MeteredPending(pending, self.meter)

    def all_reduce(self, tensor: Tensor, label: str, op: ReduceOp = "sum") -> Tensor:
        """See Transport.all_reduce."""
        before, start = self.inner.bytes_sent, time.perf_counter()
        result = self.inner.all_reduce(tensor, label, op)
        self._waited(before, start)
        return result

    def all_gather_object(self, value: Any, label: str) -> list[Any]:
        """See Transport.all_gather_object."""
        before, start = self.inner.bytes_sent, time.perf_counter()
        result = self.inner.all_gather_object(value, label)
        self._waited(before, start)
        return result

    def barrier(self, label: str) -> None:
        """See Transport.barrier."""
        before, start = self.inner.bytes_sent, time.perf_counter()
        self.inner.barrier(label)
        self._waited(before, start)

    def abort(self, reason: str) -> None:
        """See Transport.abort."""
        self.inner.abort(reason)

    def close(self) -> None:
        """See Transport.close."""
        self.inner.close()

    def _waited(self, bytes_before: int, start: float) -> None:
        self.meter.bytes_reduced += self.inner.bytes_sent - bytes_before
        self.meter.wait_s += time.perf_counter() - start


class _MeteredPending:
    def __init__(self, pending: Pending, meter: Meter) -> None:
        self._pending, self._meter = pending, meter

    def wait(self, timeout: float | None = None) -> None:
        """See Pending.wait."""
        start = time.perf_counter()
        self._pending.wait(timeout)
        self._meter.wait_s += time.perf_counter() - start

    def done(self) -> bool:
        """See Pending.done."""
        return self._pending.done()
