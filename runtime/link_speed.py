"""How fast rows cross between ranks: assumed from where they run, or measured by all ranks together."""

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
        why: Where the number is from; empty where it was given.
        measured: Gbit/s each way, while every rank sends and receives; None where it was not measured.
        cores: Cores of a rank; a GPU counts for :data:`GPU_CORES`.
    """

    link: float
    why: str = ""
    measured: float | None = None
    cores: int = 1

    def __str__(self) -> str:
        """For people to read."""
        if self.measured is None:
            return f"{self.link:g} Gbit/s a core" + (f", as is usual {self.why}" if self.why else "")
        each = "" if self.cores == 1 else f" and {self.cores} cores a rank"
        return f"{self.link:g} Gbit/s a core, rounded from {self.measured:.2g} measured between ranks{each}"


GPU_CORES = 1000
"""A GPU multiplies matrices, and reads memory, about so many times as fast as one core of a processor."""


def usual_link(transport: Transport, device: torch.device) -> LinkSpeed:
    """What ranks that run where these do can count on; every rank must call it.

    It depends on nothing that varies between runs, so that the same script makes the same program each time.

    Args:
        transport: How ranks talk.
        device: Where rows live.
    """
    found = transport.all_gather_object((transport.host, torch.get_num_threads()), "link speed")
    if len({host for host, _ in found}) > 1:
        return LinkSpeed(1.0, "between hosts")
    if device.type == "cuda":
        return LinkSpeed(1.0, "between the GPUs of a host")
    return LinkSpeed(10.0 / max(threads for _, threads in found), "between the processes of a host")


def measure_link(transport: Transport, device: torch.device) -> LinkSpeed:
    """Send around the ring of all ranks; every rank must call it.

    What is counted with is rounded to a power of ten, so that runs on one quiet machine make the same program; on a busy
    one, or near a rounding step, they may not.

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
    return LinkSpeed(10.0 ** round(math.log10(rate / counted)), "", rate / slowest, cores)
