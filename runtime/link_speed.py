"""How fast rows cross between ranks: measured once, by all ranks together, and rounded so that all agree."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from sylvie_fx.runtime.transport import Transport

MESSAGE, ROUNDS, ENOUGH = 1 << 20, 6, 0.25
"""Bytes of a message, how often it is sent at most, and after how many seconds no further one is."""


@dataclass(frozen=True)
class LinkSpeed:
    """The slowest link of a ring of ranks.

    Attributes:
        link: Gbit/s that the compiler counts with, for each core that a rank computes with.
        measured: Gbit/s each way, while every rank sends and receives; None where it was given.
        cores: Cores of a rank; a GPU counts for :data:`GPU_CORES`.
    """

    link: float
    measured: float | None = None
    cores: int = 1

    def __str__(self) -> str:
        """For people to read."""
        if self.measured is None:
            return f"{self.link:g} Gbit/s a core"
        each = "" if self.cores == 1 else f" and {self.cores} cores a rank"
        return f"{self.link:g} Gbit/s a core, rounded from {self.measured:.2g} measured between ranks{each}"


GPU_CORES = 1000
"""A GPU multiplies matrices, and reads memory, about so many times as fast as one core of a processor."""


def measure_link(transport: Transport, device: torch.device) -> LinkSpeed:
    """Send around the ring of all ranks; every rank must call it.

    What is counted with is rounded to a power of ten, so that runs on one machine make the same program.

    Args:
        transport: How ranks talk.
        device: Where rows live.
    """
    rank, size = transport.rank, transport.size
    sent, received = (torch.zeros(MESSAGE, dtype=torch.uint8, device=device) for _ in range(2))
    sends = [sent if peer == (rank + 1) % size else None for peer in range(size)]
    receives = [received if peer == (rank - 1) % size else None for peer in range(size)]
    best, begin = math.inf, time.perf_counter()
    for number in range(ROUNDS):
        transport.barrier("link speed")
        start = time.perf_counter()
        transport.exchange(sends, receives, "link speed").wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = time.perf_counter() - start
        if number:  # the first one sets up connections
            best = min(best, took)
        over = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        if number and float(transport.all_reduce(over, "link speed", "max")) > ENOUGH:
            break
    cores = torch.get_num_threads() if device.type == "cpu" else GPU_CORES
    worst = torch.tensor([best, best * cores], dtype=torch.float64)
    slowest, counted = transport.all_reduce(worst, "link speed", "max").tolist()
    rate = 8e-9 * MESSAGE
    return LinkSpeed(10.0 ** round(math.log10(rate / counted)), rate / slowest, cores)
