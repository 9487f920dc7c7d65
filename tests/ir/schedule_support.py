"""Random schedules that are valid, for the tests of their text, their check and their simulation."""

from __future__ import annotations

from hypothesis import strategies as st

from sylvie_fx.ir.schedule import Action, Schedule, Verb
from sylvie_fx.ir.timeline import BACKWARD, FORWARD

NAMES = ("linear", "spmm_default_1", "relu", "model.conv1")


@st.composite
def directions(draw: st.DrawFn, direction: str, ages: st.SearchStrategy[int]) -> list[Action]:
    """Actions of one direction: some exchanges, each started before it is awaited, between other actions."""
    exchanges = draw(st.integers(0, 3))
    reductions = draw(st.integers(0, 2))
    computes = draw(st.integers(0, 4))
    order = draw(st.permutations([*[*range(exchanges)] * 2, *["reduce"] * reductions, *["compute"] * computes]))
    seen: set[int] = set()
    actions = []
    for number, item in enumerate(order):
        if item == "compute":
            actions.append(Action(Verb.COMPUTE, draw(st.sampled_from(NAMES)), direction))
        elif item == "reduce":
            actions.append(Action(Verb.REDUCE, f"sum_{number}", direction))
        elif item in seen:
            actions.append(Action(Verb.WAIT, "", direction, item, draw(ages)))
        else:
            seen.add(item)
            actions.append(Action(Verb.START, draw(st.sampled_from(NAMES)), direction, item))
    return actions


@st.composite
def schedules(draw: st.DrawFn, ranks: int = 1, oldest: int = 2) -> list[Schedule]:
    """The same actions on every rank, with ages of their own."""
    ages = st.integers(0, oldest)
    actions = [*draw(directions(FORWARD, ages)), *draw(directions(BACKWARD, ages))]
    return [
        Schedule(
            rank,
            tuple(
                Action(a.verb, a.name, a.direction, a.exchange, draw(ages)) if a.verb is Verb.WAIT else a
                for a in actions
            ),
        )
        for rank in range(ranks)
    ]
