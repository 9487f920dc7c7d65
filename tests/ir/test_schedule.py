"""The text form of schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from schedule_support import schedules

from sylvie_fx.ir.errors import VerifyError
from sylvie_fx.ir.schedule import Action, Schedule, Verb

TEXT = """\
rank 1
forward
  compute linear
  start 0 linear
  compute spmm_inner
  wait 0 age 1
  compute spmm_halo
  reduce loss
backward
  compute spmm_halo
  start 0 linear
  wait 0 age 2
  compute linear"""


def test_a_text_and_its_actions() -> None:
    schedule = Schedule.parse(TEXT)
    assert schedule.rank == 1
    assert schedule.actions[1] == Action(Verb.START, "linear", "forward", 0)
    assert schedule.actions[3] == Action(Verb.WAIT, "", "forward", 0, 1)
    assert schedule.actions[8] == Action(Verb.WAIT, "", "backward", 0, 2)
    assert schedule.actions[8].key == ("backward", "wait 0")
    assert str(schedule) == TEXT
    text = TEXT.splitlines()
    assert [(text[line - 1].strip(), str(action)) for line, action in schedule.lines()] == [
        (str(action), str(action)) for action in schedule.actions
    ]


def test_comments_and_spaces_do_not_count() -> None:
    assert str(Schedule.parse(TEXT.replace("\n", "  # why\n\n \n"))) == TEXT


@given(schedules())
@settings(deadline=None)
def test_a_text_says_all(one: list[Schedule]) -> None:
    assert Schedule.parse(str(one[0])) == one[0]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (3, "compute"),
        (3, "compute two words"),
        (4, "start x linear"),
        (4, "start -1 linear"),
        (4, "start 0"),
        (6, "wait 0 old 1"),
        (6, "wait 0 age -1"),
        (6, "wait 0"),
        (8, "fetch 3"),
        (2, "sideways"),
        (2, "rank 2"),
    ],
)
def test_a_line_that_is_no_action_is_named(line: int, wrong: str) -> None:
    lines = TEXT.splitlines()
    lines[line - 1] = wrong
    with pytest.raises(VerifyError, match=f"^line {line}: '{wrong}' is no line of a schedule"):
        Schedule.parse("\n".join(lines))


def test_actions_need_a_direction_and_a_schedule_a_rank() -> None:
    with pytest.raises(VerifyError, match=r"^line 2: 'compute a' is no line"):
        Schedule.parse("rank 0\ncompute a")
    with pytest.raises(VerifyError, match="names no rank"):
        Schedule.parse("forward\ncompute a")


def test_a_step_goes_backward_once() -> None:
    with pytest.raises(VerifyError, match="rank 0 goes forward again"):
        Schedule.parse("rank 0\nbackward\ncompute a\nforward\ncompute b")
