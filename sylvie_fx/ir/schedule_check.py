"""Whether schedules can run: every exchange awaited once, no deadlock, nothing too old."""

from __future__ import annotations

from collections.abc import Sequence

from sylvie_fx.ir.errors import VerifyError
from sylvie_fx.ir.schedule import Action, Exchange, Schedule, Verb
from sylvie_fx.ir.simulate import LinkModel, simulate
from sylvie_fx.ir.timeline import BACKWARD


def validate(schedules: Sequence[Schedule], bound: int, backward_bound: int | None = None) -> None:
    """Check the schedules of all ranks.

    Every start is awaited exactly once, and a wait comes after its start; no wait takes rows that are older than the
    bound; and all ranks come to the end of several steps, where messages between two ranks arrive in the order in which
    they were started and every exchange sends one to each peer.

    Args:
        schedules: One a rank.
        bound: How many steps old rows may be.
        backward_bound: The same for gradients; by default as ``bound``.

    Raises:
        VerifyError: Names the rank, the line of its text and the exchange.
    """
    for schedule in schedules:
        _check_alone(schedule, bound, bound if backward_bound is None else backward_bound)
    oldest = max((a.age for s in schedules for a in s.actions), default=0)
    # A wait of age a looks back a steps, so that one step more shows whether it goes on like that.
    simulate(schedules, {}, LinkModel(0.0, 1.0), lambda action, sender, receiver: 1, steps=oldest + 2)


def _check_alone(schedule: Schedule, bound: int, backward_bound: int) -> None:
    started: dict[Exchange, int] = {}
    awaited: dict[Exchange, int] = {}
    for line, action in schedule.lines():
        if action.exchange is None:
            continue
        key = action.exchange, action.direction
        here = _place(schedule, line)
        if action.verb is Verb.START:
            if key in started:
                raise VerifyError(f"{_called(action)} is started again, after line {started[key]}", where=here)
            started[key] = line
            continue
        if key not in started:
            raise VerifyError(
                f"{_called(action)} is awaited before it is started",
                where=here,
                why="the first step has nothing older to take",
            )
        if key in awaited:
            raise VerifyError(f"{_called(action)} is awaited again, after line {awaited[key]}", where=here)
        limit = backward_bound if action.direction == BACKWARD else bound
        if action.age > limit:
            raise VerifyError(f"{_called(action)} takes rows of age {action.age}, the bound is {limit}", where=here)
        awaited[key] = line
    for key in started.keys() - awaited.keys():
        number, direction = key
        raise VerifyError(
            f"exchange {number} {direction} is started and never awaited", where=_place(schedule, started[key])
        )


def _place(schedule: Schedule, line: int) -> str:
    return f"rank {schedule.rank}, line {line}"


def _called(action: Action) -> str:
    return f"exchange {action.exchange} {action.direction}"
