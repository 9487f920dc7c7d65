"""Schedules that can not run are refused, with rank, line and exchange."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from schedule_support import schedules

from sylvie_fx.ir.errors import VerifyError
from sylvie_fx.ir.schedule import Schedule
from sylvie_fx.ir.schedule_check import validate


def ranks(*bodies: str) -> list[Schedule]:
    """One schedule for each body, whose actions are separated by commas and whose directions by a bar."""
    found = []
    for rank, body in enumerate(bodies):
        forward, _, backward = body.partition("|")
        lines = ["forward", *forward.split(","), *(["backward", *backward.split(",")] if backward else [])]
        found.append(Schedule.parse("\n".join([f"rank {rank}", *lines])))
    return found


def check(message: str, *bodies: str, bound: int = 0, backward_bound: int | None = None) -> None:
    with pytest.raises(VerifyError, match=message):
        validate(ranks(*bodies), bound, backward_bound)


@given(schedules(ranks=3, oldest=2))
@settings(deadline=None)
def test_equal_schedules_within_the_bound_can_run(all_ranks: list[Schedule]) -> None:
    validate(all_ranks, 2)


def test_every_start_is_awaited_once() -> None:
    good = "start 0 a, wait 0 age 0"
    check("^rank 1, line 3: exchange 0 forward is started and never awaited", good, "start 0 a")
    check("^rank 1, line 5: exchange 0 forward is awaited again, after line 4", good, good + ", wait 0 age 0")
    check(
        "^rank 1, line 4: exchange 0 forward is started again, after line 3", good, "start 0 a, start 0 a, wait 0 age 0"
    )


def test_nothing_is_awaited_that_was_not_started() -> None:
    check("^rank 0, line 3: exchange 2 forward is awaited before it is started", "wait 2 age 0, start 2 a")
    check("awaited before it is started.*first step has nothing older", "wait 2 age 1, start 2 a", bound=1)
    check("^rank 0, line 6: exchange 0 backward is awaited before", "start 0 a, wait 0 age 0 | wait 0 age 0")


def test_rows_are_no_older_than_the_bound() -> None:
    both = "start 0 a, wait 0 age 1 | start 0 a, wait 0 age 2"
    check("^rank 0, line 7: exchange 0 backward takes rows of age 2, the bound is 1", both, both, bound=1)
    check("^rank 0, line 4: exchange 0 forward takes rows of age 1, the bound is 0", both, both, backward_bound=2)
    validate(ranks(both, both), 1, 2)


def test_ranks_that_wait_for_each_other() -> None:
    check(
        r"^rank 0, line 4, step 0: exchange 0 forward never ends: it waits for rank 1, which stands at line 4 of step 0, "
        r"`wait 1 age 0`\. messages between",
        "start 0 a, wait 0 age 0, start 1 b, wait 1 age 0",
        "start 1 b, wait 1 age 0, start 0 a, wait 0 age 0",
    )


def test_a_message_waits_behind_those_that_were_started_before_it() -> None:
    """Rank 1 wants exchange 1 first, but exchange 0 is in front of it on the wire, and rank 1 does not take it yet."""
    check(
        "^rank 0, line 5, step 0: exchange 1 forward never ends",
        "start 0 a, start 1 b, wait 1 age 0, wait 0 age 0",
        "start 1 b, wait 1 age 0, start 0 a, wait 0 age 0",
    )


def test_a_reduction_and_an_exchange_in_another_order() -> None:
    check(
        "^rank 0, line 3, step 0: loss forward never ends: it waits for rank 1, which stands at line 4",
        "reduce loss, start 0 a, wait 0 age 0",
        "start 0 a, wait 0 age 0, reduce loss",
    )


def test_a_rank_that_does_not_take_part() -> None:
    check("waits for rank 1, which has ended", "start 0 a, wait 0 age 0", "compute a")


def test_ranks_may_take_rows_of_different_ages() -> None:
    validate(ranks("start 0 a, wait 0 age 1", "start 0 a, wait 0 age 0"), 1)


def test_one_rank_given_twice() -> None:
    with pytest.raises(VerifyError, match=r"ranks \[0, 0\], one of them twice"):
        validate(ranks("compute a") * 2, 0)
