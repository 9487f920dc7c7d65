"""What the wire between ranks delivers: run by every rank, ``python -m sylvie_fx bench`` starts them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sylvie_fx.runtime.process_group import default_transport
from sylvie_fx.runtime.transport import Transport

_SMALLEST = 1024
_SECONDS = 0.5


@dataclass(frozen=True)
class Measurement:
    """The time of one kind of communication.

    Attributes:
        name: "exchange" (one message to and from each peer) or "all_reduce".
        size: Bytes of each message, or of the tensor.
        seconds: Of the slowest rank, per call.
        gigabits: Payload that each rank sent, per second.
    """

    name: str
    size: int
    seconds: float
    gigabits: float


def measure(transport: Transport, largest: int) -> Iterator[Measurement]:
    """Time exchanges and reductions of growing size; all ranks call it and get the same measurements.

    Args:
        transport: The wire.
        largest: Bytes of the largest message.
    """
    size = _SMALLEST
    while size <= max(largest, _SMALLEST):
        message = torch.zeros(size // 4)
        inbox = [torch.empty_like(message) for _ in range(transport.size)]
        yield _time(transport, "exchange", size, partial(_exchange, transport, message, inbox))
        yield _time(transport, "all_reduce", size, partial(transport.all_reduce, message, "bench sum"))
        size *= 16


def _exchange(transport: Transport, message: Tensor, inbox: Sequence[Tensor]) -> None:
    transport.exchange([message] * transport.size, inbox, "bench").wait()


def _time(transport: Transport, name: str, size: int, call: Callable[[], object]) -> Measurement:
    call()
    transport.barrier("bench")
    started = time.perf_counter()
    call()
    # All ranks have to take the same number of rounds.
    once = float(transport.all_reduce(torch.tensor(time.perf_counter() - started), "bench once", "max"))
    rounds = max(1, min(1000, int(_SECONDS / max(once, 1e-9))))
    transport.barrier("bench")
    before, started = transport.bytes_sent, time.perf_counter()
    for _ in range(rounds):
        call()
    took = float(transport.all_reduce(torch.tensor(time.perf_counter() - started), "bench took", "max"))
    sent = transport.bytes_sent - before
    return Measurement(name, size, took / rounds, sent * 8e-9 / took)


def main() -> None:
    """Measure, and print a table on rank 0."""
    transport = default_transport(timeout=60.0)
    found = list(measure(transport, int(float(sys.argv[1]) * 1e6)))
    if transport.rank == 0:
        table = Table(title=f"wire between {transport.size} processes", title_justify="left")
        for column in ("", "bytes", "ms a call", "Gbit/s sent by a rank"):
            table.add_column(column, justify="right")
        for one in found:
            table.add_row(one.name, f"{one.size:,}", f"{one.seconds * 1e3:.3f}", f"{one.gigabits:.2f}")
        Console().print(table)
    transport.close()


if __name__ == "__main__":
    main()
