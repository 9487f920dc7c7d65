"""A transport that counts what crosses, how long this rank waits for it, and records both while a recorder is on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.ir.timeline import StepCounters
from sylvie_fx.runtime.counters import Counters
from sylvie_fx.runtime.link_speed import LinkSpeed, measure_link, usual_link
from sylvie_fx.runtime.timeline import Recorder
from sylvie_fx.runtime.transport import Pending, ReduceOp, Transport


@dataclass
class Meter:
    """Counters of one rank.

    Attributes:
        exchanges: Halo exchanges started, forward and backward.
        bytes_sent: Payload bytes that this rank sent in them.
        bytes_reduced: Payload bytes that it sent for gradients, global reductions and control messages.
    """

    exchanges: int = 0
    bytes_sent: int = 0
    bytes_reduced: int = 0

    def reset(self) -> None:
        """Count from zero."""
        self.exchanges = self.bytes_sent = self.bytes_reduced = 0


class MeteredTransport:
    """Hands every call on to another transport; see Transport for the methods.

    Args:
        inner: The transport that does the work.

    Attributes:
        meter: What crossed.
        counters: What was waited for; a thread that waits in the background says so to them.
        recorder: Takes the spans on the wire and of waiting.
        marks: While the recorder is on, what had been counted at the start of each training step.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner, self.meter, self.counters = inner, Meter(), Counters()
        self.rank, self.size, self.timeout, self.threaded = inner.rank, inner.size, inner.timeout, inner.threaded
        self.host, self.processes = inner.host, inner.processes
        self._hosts: list[str] | None = None
        self.recorder = Recorder(inner.rank)
        self.marks: list[StepCounters] = []
        self._lock, self._base = threading.Lock(), inner.bytes_sent

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
        start = time.perf_counter()
        pending = self.inner.exchange(sends, receives, label)
        size = sum(t.numel() * t.element_size() for peer, t in enumerate(sends) if t is not None and peer != self.rank)
        with self._lock:  # lanes send beside the main thread
            self.meter.exchanges += 1
            self.meter.bytes_sent += size
        return _MeteredPending(pending, self, label, start, size)

    def all_reduce(self, tensor: Tensor, label: str, op: ReduceOp = "sum") -> Tensor:
        """See Transport.all_reduce."""
        start = time.perf_counter()
        result = self.inner.all_reduce(tensor, label, op)
        self._reduced(label, start)
        return result

    def start_all_reduce(self, tensor: Tensor, label: str, op: ReduceOp = "sum") -> Callable[[], Tensor]:
        """See Transport.start_all_reduce."""
        sent = time.perf_counter()
        inner = self.inner.start_all_reduce(tensor, label, op)

        def finish() -> Tensor:
            start = time.perf_counter()
            result = inner()
            self._count_reduced()
            self._waited(label, sent, start)
            return result

        return finish

    def all_gather_object(self, value: Any, label: str) -> list[Any]:
        """See Transport.all_gather_object."""
        start = time.perf_counter()
        result = self.inner.all_gather_object(value, label)
        self._reduced(label, start)
        return result

    def barrier(self, label: str) -> None:
        """See Transport.barrier."""
        start = time.perf_counter()
        self.inner.barrier(label)
        self._reduced(label, start)

    def same_host(self) -> list[bool]:
        """Whether each rank runs on the host of this one; asked once, by all ranks together."""
        if self._hosts is None:
            self._hosts = self.all_gather_object(self.host, "hosts")
        return [host == self.host for host in self._hosts]

    def link_speed(self, device: torch.device, measured: bool) -> LinkSpeed:
        """The speed of the links between ranks, which all ranks ask for together; nothing of it is counted."""
        if not self.processes:
            return LinkSpeed(1.0)
        before = self.inner.bytes_sent
        found = (measure_link if measured else usual_link)(self.inner, device)
        self._base += self.inner.bytes_sent - before
        return found

    def wires(self) -> str:
        """See Transport.wires."""
        return self.inner.wires()

    def next_number(self, name: str) -> int:
        """See Transport.next_number."""
        return self.inner.next_number(name)

    def refuse(self, reason: str) -> None:
        """See Transport.refuse."""
        self.inner.refuse(reason)

    def abort(self, reason: str) -> None:
        """See Transport.abort."""
        self.inner.abort(reason)

    def close(self) -> None:
        """See Transport.close."""
        self.inner.close()

    def reset(self) -> None:
        """Count from zero."""
        with self._lock:
            self.meter.reset()
            self._base = self.inner.bytes_sent
        self.counters.reset()

    def mark(self, step: int) -> None:
        """Note the counters as they are when a step begins."""
        self.recorder.step = step
        counted = self.counters.read()
        self.marks.append(
            StepCounters(
                self.rank, step, time.perf_counter(), self.meter.bytes_sent, self.meter.bytes_reduced,
                counted.wait_s, counted.hidden_s, counted.staleness,
            )
        )  # fmt: skip

    def _reduced(self, label: str, start: float) -> None:
        self._count_reduced()
        self._waited(label, start, start)

    def _count_reduced(self) -> None:
        with self._lock:  # whatever was sent and is no exchange; what other threads send meanwhile must not count twice
            self.meter.bytes_reduced = self.inner.bytes_sent - self._base - self.meter.bytes_sent

    def _waited(self, label: str, sent: float, start: float, size: int | None = None) -> None:
        """Something sent at one time was waited for from another one on."""
        end = time.perf_counter()
        self.counters.waited(end - start)
        if self.recorder.on:
            self.recorder.add("wire", label, sent, end, sent=size)
            if not self.counters.in_background:
                self.recorder.add("wait", label, start, end)


class _MeteredPending:
    def __init__(self, pending: Pending, transport: MeteredTransport, label: str, sent: float, size: int) -> None:
        self._pending, self._transport, self._label, self._sent, self._size = pending, transport, label, sent, size
        self._waited = False

    def wait(self, timeout: float | None = None) -> None:
        """See Pending.wait."""
        start = time.perf_counter()
        self._pending.wait(timeout)
        if not self._waited:
            self._waited = True
            self._transport._waited(self._label, self._sent, start, self._size)

    def done(self) -> bool:
        """See Pending.done."""
        return self._pending.done()
