"""When every action of a schedule begins and ends, predicted from the time of operators and a model of the links."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sylvie_fx.ir.errors import VerifyError
from sylvie_fx.ir.schedule import Action, Schedule, Verb
from sylvie_fx.ir.timeline import Event, Timeline

BytesOf = Callable[[Action, int, int], int]
"""Bytes that a start or a reduction sends: the action, the sender and the receiver; 0 is no message."""

Pick = Callable[[Sequence[float]], float]
"""One number for several."""


@dataclass(frozen=True)
class LinkModel:
    """A wire of its own from each rank to each other one, whose messages arrive in the order in which they were started.

    Where all links of a rank share one, give each the part that is left for it.

    Attributes:
        latency: Seconds between the end of sending a message and its arrival.
        bytes_per_second: Rate.

    Raises:
        VerifyError: A negative latency, or a rate that is not positive.
    """

    latency: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bytes_per_second > 0):
            raise VerifyError(
                f"there is no link with latency {self.latency} s and {self.bytes_per_second} bytes a second"
            )


def simulate(
    schedules: Sequence[Schedule],
    op_seconds: Mapping[tuple[str, str], float],
    link: LinkModel,
    bytes_of: BytesOf,
    steps: int = 1,
    lanes: bool = False,
) -> Timeline:
    """Predict a run of several steps.

    A rank does one action after the other, and messages are under way meanwhile. A message begins when its sender and its
    receiver have both started the exchange and everything before it on its link is through; a wait ends when everything
    has arrived and the own messages are through. A wait of age a in step t takes what was started in step t - a, or in the
    first step.

    Args:
        schedules: One a rank.
        op_seconds: Seconds by :attr:`Action.key`; for starts and waits, of coding and decoding. What is not listed takes
            none, such as the backward pass of operators on indices.
        link: The wires.
        bytes_of: Sizes of messages.
        steps: How often the schedules run.
        lanes: Coding and decoding run beside the operators, one transfer behind the other, on cores that are free.

    Returns:
        Events of the kinds that a recording has.

    Raises:
        VerifyError: Some ranks wait for each other, or for what is never sent; names rank, line and exchange.
    """
    run = _Run(schedules, op_seconds, link, bytes_of, steps, lanes)
    while any(run.advance(rank) for rank in run.programs):
        pass
    run.check_finished()
    return Timeline(tuple(run.events))


def measured_seconds(
    timeline: Timeline, pick: Pick = statistics.median, program: str | None = None
) -> dict[tuple[str, str], float]:
    """Seconds by :attr:`Action.key` in a recording, for ``op_seconds``.

    Args:
        timeline: A recording.
        pick: One number for several ranks and steps; ``min`` where other programs disturbed the recording.
        program: Whose; by default of the program that computed longest.
    """
    computed: dict[str, float] = defaultdict(float)
    for event in timeline.select("compute"):
        computed[event.program] += event.seconds
    if program is None:
        program = max(computed, key=lambda name: computed[name], default="")
    sums: dict[tuple[str, str], dict[tuple[int, int | None], float]] = defaultdict(lambda: defaultdict(float))
    verbs = {"quantise": "start", "dequantise": "wait"}
    for event in timeline.events:
        if event.kind in ("compute", *verbs) and event.direction is not None and event.program == program:
            name = event.name if event.kind == "compute" else f"{verbs[event.kind]} {event.exchange}"
            # A node may be several functions of autograd.
            sums[event.direction, name][event.rank, event.step] += event.seconds
    return {key: pick(list(found.values())) for key, found in sums.items()}


def measured_bytes(timeline: Timeline, otherwise: int) -> BytesOf:
    """Sizes of messages in a recording, for ``bytes_of``: of each exchange, direction and sender, equal for all receivers.

    Args:
        timeline: A recording.
        otherwise: Bytes of what was not recorded as an exchange, such as reductions.
    """
    sent: dict[tuple[int | None, str | None, int], list[int]] = defaultdict(list)
    for event in timeline.select("wire"):
        if event.sent is not None:
            sent[event.exchange, event.direction, event.rank].append(event.sent)
    peers = max(len(timeline.ranks) - 1, 1)

    def bytes_of(action: Action, sender: int, receiver: int) -> int:
        found = sent.get((action.exchange, action.direction, sender))
        return otherwise if found is None else round(statistics.median(found) / peers)

    return bytes_of


class _Message(NamedTuple):
    """What belongs together on all ranks."""

    step: int
    key: tuple[str, str]


class _Run:
    """The state of a simulation."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        op_seconds: Mapping[tuple[str, str], float],
        link: LinkModel,
        bytes_of: BytesOf,
        steps: int,
        lanes: bool,
    ) -> None:
        self.programs = {
            s.rank: [(step, line, action) for step in range(steps) for line, action in s.lines()] for s in schedules
        }
        if len(self.programs) != len(schedules):
            raise VerifyError(f"the schedules are of ranks {sorted(s.rank for s in schedules)}, one of them twice")
        self.op_seconds, self.link, self.bytes_of = op_seconds, link, bytes_of
        self.events: list[Event] = []
        ranks = list(self.programs)
        self._at, self._now = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0.0)
        self._posted: dict[int, dict[_Message, float]] = {rank: {} for rank in ranks}
        pairs = [(a, b) for a in ranks for b in ranks if a != b]
        self._queues: dict[tuple[int, int], list[tuple[_Message, Action]]] = {pair: [] for pair in pairs}
        self._free = dict.fromkeys(pairs, 0.0)
        self._sent: dict[tuple[int, int], dict[_Message, float]] = {pair: {} for pair in pairs}
        self._lanes = lanes
        self._sending, self._receiving = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0.0)
        self._expected: dict[int, list[tuple[_Message, Action]]] = {rank: [] for rank in ranks}
        self._decoded: dict[int, dict[_Message, float]] = {rank: {} for rank in ranks}

    def advance(self, rank: int) -> bool:
        """Do actions of a rank until it has to wait for something that is not known yet; gives whether it did any."""
        first = self._at[rank]
        program = self.programs[rank]
        while self._at[rank] < len(program):
            step, _, action = program[self._at[rank]]
            if action.verb is Verb.COMPUTE:
                self._busy(rank, step, action, "compute", action.name)
            else:
                message = _message(step, action)
                if action.verb is not Verb.WAIT and message not in self._posted[rank]:
                    ready = self._code(rank, step, action) if action.verb is Verb.START else self._now[rank]
                    self._post(rank, message, action, ready)
                if action.verb is not Verb.START and not self._wait(rank, step, message, action):
                    break
            self._at[rank] += 1
        return self._at[rank] > first

    def _busy(self, rank: int, step: int, action: Action, kind: str, name: str) -> None:
        """Time of the processor; what takes none is no event, but for operators, whose order is worth seeing."""
        took = self.op_seconds.get(action.key, 0.0)
        if took or kind == "compute":
            self._event(kind, name, self._now[rank], self._now[rank] + took, rank, step, action)
        self._now[rank] += took

    def _code(self, rank: int, step: int, action: Action) -> float:
        """When the rows of an exchange are coded."""
        if not self._lanes:
            self._busy(rank, step, action, "quantise", _title(action))
            return self._now[rank]
        took = self.op_seconds.get(action.key, 0.0)
        begin = max(self._now[rank], self._sending[rank])
        self._sending[rank] = begin + took
        if took:
            self._event("quantise", _title(action), begin, begin + took, rank, step, action, thread="send")
        self._expected[rank].append((_message(step, action), action))
        return begin + took

    def _post(self, rank: int, message: _Message, action: Action, ready: float) -> None:
        """A rank is ready to send and to receive."""
        self._posted[rank][message] = ready
        for other in self.programs:
            if other != rank:
                if self.bytes_of(action, rank, other):
                    self._queues[rank, other].append((message, action))
                self._pump(rank, other)
                self._pump(other, rank)

    def _pump(self, sender: int, receiver: int) -> None:
        """Send what has both ends ready, first come first served."""
        pair = sender, receiver
        queue = self._queues[pair]
        while queue and queue[0][0] in self._posted[receiver]:
            message, action = queue.pop(0)
            ready = max(self._posted[sender][message], self._posted[receiver][message])
            begin = max(self._free[pair], ready)
            through = begin + self.bytes_of(action, sender, receiver) / self.link.bytes_per_second
            self._free[pair] = self._sent[pair][message] = through
            name = f"{_title(action)} to rank {receiver}"
            self._event("wire", name, begin, through + self.link.latency, sender, message.step, action)

    def _wait(self, rank: int, step: int, message: _Message, action: Action) -> bool:
        """Go on when a message is there, if that is known."""
        laned = self._lanes and action.verb is Verb.WAIT
        there = self._decode(rank, message) if laned else self._arrival(rank, message, action)
        if there is None:
            return False
        until = max(self._now[rank], there)
        self._event("wait", _title(action), self._now[rank], until, rank, step, action, step - message.step)
        self._now[rank] = until
        if action.verb is Verb.WAIT and not self._lanes:
            self._busy(rank, step, action, "dequantise", _title(action))
        return True

    def _arrival(self, rank: int, message: _Message, action: Action) -> float | None:
        """When everything has arrived and the own messages are through; None while that is not known."""
        until = 0.0
        for other in self.programs:
            if other == rank:
                continue
            # Whether a peer sends in an exchange is known from its size, not from whether it has done so yet.
            for pair, delay in (((other, rank), self.link.latency), ((rank, other), 0.0)):
                if self.bytes_of(action, *pair):
                    if message not in self._sent[pair]:
                        return None
                    until = max(until, self._sent[pair][message] + delay)
        return until

    def _decode(self, rank: int, message: _Message) -> float | None:
        """When a transfer is decoded, behind those that were started before it; None while that is not known."""
        expected, decoded = self._expected[rank], self._decoded[rank]
        while message not in decoded and expected:
            first, start = expected[0]
            arrival = self._arrival(rank, first, start)
            if arrival is None:
                return None
            expected.pop(0)
            begin = max(arrival, self._receiving[rank])
            took = self.op_seconds.get((start.direction, f"wait {start.exchange}"), 0.0)
            decoded[first] = self._receiving[rank] = begin + took
            if took:
                self._event("dequantise", _title(start), begin, begin + took, rank, first.step, start, thread="receive")
        return decoded.get(message)

    def _event(
        self,
        kind: str,
        name: str,
        start: float,
        end: float,
        rank: int,
        step: int,
        action: Action,
        age: int | None = None,
        thread: str = "main",
    ) -> None:
        self.events.append(Event(kind, name, start, end, rank, thread, action.exchange, action.direction, step, age))

    def check_finished(self) -> None:
        """Raise where a rank stands still for ever."""
        for rank, program in self.programs.items():
            if self._at[rank] == len(program):
                continue
            step, line, action = program[self._at[rank]]
            message = _message(step, action)
            others = []
            for other in self.programs:
                if other != rank and self._missing(rank, other, message, action):
                    others.append(f"rank {other}, which {self._standing(other)}")
            raise VerifyError(
                f"{_title(action)} {action.direction} never ends: it waits for {' and for '.join(others)}",
                where=f"rank {rank}, line {line}, step {step}",
                why="messages between two ranks arrive in the order in which they were started",
            )

    def _missing(self, rank: int, other: int, message: _Message, action: Action) -> bool:
        return any(
            self.bytes_of(action, *pair) and message not in self._sent[pair] for pair in ((other, rank), (rank, other))
        )

    def _standing(self, rank: int) -> str:
        program = self.programs[rank]
        if self._at[rank] == len(program):
            return "has ended"
        step, line, action = program[self._at[rank]]
        return f"stands at line {line} of step {step}, `{action}`"


def _message(step: int, action: Action) -> _Message:
    """What an action sends or waits for."""
    key = action.key if action.verb is Verb.REDUCE else (action.direction, f"exchange {action.exchange}")
    return _Message(max(step - action.age, 0), key)


def _title(action: Action) -> str:
    return action.name if action.verb is Verb.REDUCE else f"exchange {action.exchange}"
