"""What happened when on which rank: the events that a recording measures, and that a simulated schedule predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KINDS = ("compute", "quantise", "dequantise", "wire", "wait")
"""What a rank does: computes, codes and decodes rows, has messages under way, waits for another rank."""

DECISION = "decision"
"""The kind of an event that takes no time: a controller has chosen the age of an exchange."""

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Event:
    """One thing that took time.

    Attributes:
        kind: One of :data:`KINDS`, or :data:`DECISION`.
        name: What: a node of the program, or an exchange.
        start: Seconds on the clock of rank 0.
        end: Likewise, not before ``start``.
        rank: Where.
        thread: Name of the thread.
        exchange: Number of the exchange (its site in the program), or None.
        direction: ``forward`` or ``backward``, or None where it belongs to neither.
        step: Training step, or None.
        staleness: For a wait: how many steps old the rows are that it took; for a decision, the age; or None.
        module: Path of the module that the node came from.
        program: Name of the program that ran: a model's, or of a function on its results, such as the loss.
        sent: Of an exchange on the wire: the payload bytes that this rank sent, to all peers; else None.
    """

    kind: str
    name: str
    start: float
    end: float
    rank: int = 0
    thread: str = "main"
    exchange: int | None = None
    direction: str | None = None
    step: int | None = None
    staleness: int | None = None
    module: str = ""
    program: str = ""
    sent: int | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class StepCounters:
    """What one rank sent and waited for in one training step.

    Attributes:
        rank: The rank.
        step: The step.
        start: When it began, seconds on the clock of rank 0.
        bytes_sent: Payload bytes of its exchanges.
        bytes_reduced: Payload bytes of gradients, global reductions and control messages.
        wait_s: Seconds that it waited for other ranks: communication that was not hidden.
        hidden_s: Seconds of communication behind which it computed.
        staleness: How many exchanges took rows of which age, in steps.
    """

    rank: int
    step: int
    start: float
    bytes_sent: int = 0
    bytes_reduced: int = 0
    wait_s: float = 0.0
    hidden_s: float = 0.0
    staleness: Mapping[int, int] = field(default_factory=dict)

    def until(self, later: StepCounters) -> StepCounters:
        """What was counted from these counters, taken when the step began, to later ones."""
        ages = {a: n - self.staleness.get(a, 0) for a, n in later.staleness.items()}
        return StepCounters(
            self.rank, self.step, self.start,
            later.bytes_sent - self.bytes_sent, later.bytes_reduced - self.bytes_reduced,
            later.wait_s - self.wait_s, later.hidden_s - self.hidden_s, {a: n for a, n in ages.items() if n},
        )  # fmt: skip


@dataclass(frozen=True)
class Timeline:
    """Events of all ranks, in the order of their starts.

    Attributes:
        events: The events.
        steps: Counters of each step and rank.
        clock_error_s: What the clocks of two ranks may differ by at most, after alignment.
    """

    events: tuple[Event, ...]
    steps: tuple[StepCounters, ...] = ()
    clock_error_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(sorted(self.events, key=lambda e: (e.start, e.end, e.rank))))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have events."""
        return tuple(sorted({e.rank for e in self.events}))

    @property
    def start(self) -> float:
        """When the first event begins; 0 without events."""
        return min((e.start for e in self.events), default=0.0)

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max((e.end for e in self.events), default=0.0) - self.start

    def select(self, kind: str | None = None, rank: int | None = None, direction: str | None = None) -> list[Event]:
        """The events of a kind, rank and direction, those that are given."""
        return [
            e
            for e in self.events
            if kind in (None, e.kind) and rank in (None, e.rank) and direction in (None, e.direction)
        ]

    def total(self, kind: str, rank: int) -> float:
        """Seconds of a kind on a rank, overlapping events counted once."""
        total, until = 0.0, float("-inf")
        for event in self.select(kind, rank):
            total += max(0.0, event.end - max(event.start, until))
            until = max(until, event.end)
        return total
