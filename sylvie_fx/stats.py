"""Counters of one rank, as DistributedModule.stats gives them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sylvie_fx.ir.options import Options
from sylvie_fx.ir.program import Program
from sylvie_fx.report.explain import exchange_rows
from sylvie_fx.runtime.bind import Bound


@dataclass(frozen=True)
class Stats:
    """What one rank has sent and waited for since the last reset.

    Attributes:
        calls: Calls of the model.
        exchanges: Halo exchanges, forward and backward.
        bytes_sent: Payload bytes that this rank sent in them.
        bytes_float32: What it would have sent, had every exchange of every call carried its rows uncoded.
        bytes_reduced: Payload bytes of gradients, global reductions and control messages.
        wait_s: Seconds that it waited for other ranks: communication that was not hidden.
        hidden_s: Seconds of communication behind which it computed.
        staleness: How many exchanges used rows of which age, in steps; empty where all are synchronous.
    """

    calls: int
    exchanges: int
    bytes_sent: int
    bytes_float32: int
    bytes_reduced: int
    wait_s: float
    hidden_s: float
    staleness: dict[int, int]


def uncoded_bytes(program: Program, bound: Bound) -> int:
    """Payload bytes that this rank would send in one call, forward and backward, if rows crossed as they are."""
    plain = dataclasses.replace(program, codings={})
    return sum(row.bytes or 0 for row in exchange_rows(plain, bound, Options()))
