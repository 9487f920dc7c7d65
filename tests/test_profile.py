"""model.profile() on several ranks."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir.program import Program
from sylvie_fx.ir.schedule import Schedule, Verb
from sylvie_fx.ir.schedule_check import validate
from sylvie_fx.ir.simulate import LinkModel, measured_bytes, measured_seconds, simulate
from sylvie_fx.ir.timeline import KINDS, Event, Timeline
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.profile import Profile
from sylvie_fx.runtime.in_process import InProcessTransport, run_ranks
from sylvie_fx.runtime.transport import Transport

STEPS = 2


class Sums(nn.Module):
    """Two layers that add up neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            h = torch.relu(layer(x))
            x = torch.zeros_like(h).index_add(0, dst, h[src])
        return x


def profiled(bits: int, tmp_path: Path, threaded: bool = False) -> tuple[list[Timeline], list[Any], Program]:
    """The timelines that two ranks get of two steps, their stats, and the program."""
    torch.manual_seed(0)
    model, x, y = Sums(), torch.randn(60, 6), torch.randint(3, (60,))
    src, dst = torch.randint(60, (2, 240))
    cache, options = ProgramCache(), sylvie_fx.Options(bits=bits)

    def rank(transport: InProcessTransport) -> tuple[Timeline, Any, Program]:
        transport.threaded = threaded
        net = sylvie_fx.DistributedModule(copy.deepcopy(model), options, default_passes(), transport, cache)
        own, s, d, labels = net.shard(x, src, dst, y, partition="random")

        def step() -> None:
            net.zero_grad()
            F.cross_entropy(net(own, s, d), labels).backward()

        step()
        net.reset_stats()
        with net.profile() as profile:
            for _ in range(STEPS):
                step()
        stats = net.stats
        step()  # nothing of it is recorded
        profile.save(tmp_path / "timeline.json")
        assert "| 0 |" in str(profile)
        return profile.timeline, stats, net.program()

    results = run_ranks(2, rank, 60.0)
    return [timeline for timeline, _, _ in results], [stats for _, stats, _ in results], results[0][2]


def test_every_rank_has_the_events_of_all(tmp_path: Path) -> None:
    (timeline, other), stats, _ = profiled(1, tmp_path)
    assert timeline == other
    assert timeline.ranks == (0, 1)
    assert {e.kind for e in timeline.events} == set(KINDS)
    assert all(e.end >= e.start for e in timeline.events)
    for rank in (0, 1):
        for direction in ("forward", "backward"):
            layers = [e for e in timeline.select("compute", rank, direction) if e.module == "second" and e.step == 2]
            assert layers, f"the second layer runs {direction} on rank {rank}"
            waits = [
                (e.exchange, e.staleness) for e in timeline.select("wait", rank, direction) if e.exchange is not None
            ]
            assert waits == [(1, 0)] * STEPS, "the inputs, exchange 0, crossed in the first step"
        steps = [s for s in timeline.steps if s.rank == rank]
        assert [s.step for s in steps] == [1, 2]
        assert sum(s.bytes_sent for s in steps) == stats[rank].bytes_sent
        assert sum(s.wait_s for s in steps) == pytest.approx(stats[rank].wait_s)
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]


def test_a_wait_lies_between_what_makes_its_rows_and_what_reads_them(tmp_path: Path) -> None:
    (timeline, _), _, _ = profiled(32, tmp_path)
    for rank in (0, 1):
        forward = [e for e in timeline.select(rank=rank, direction="forward") if e.step == 1 and e.kind != "wire"]
        names = [e.name for e in forward]
        (wait,) = (i for i, e in enumerate(forward) if e.kind == "wait" and e.exchange == 1)
        layer = [i for i, e in enumerate(forward) if e.module == "second"]
        assert layer[-1] < wait, "the second layer's rows cross"
        assert any("spmm" in name for name in names[wait:]), "the aggregation reads what arrived"


def test_what_lanes_do_is_told_from_what_the_rank_waits_for(tmp_path: Path) -> None:
    (timeline, _), _, _ = profiled(1, tmp_path, threaded=True)
    for rank in (0, 1):
        main = {e.thread for e in timeline.select("compute", rank)}
        assert len(main) == 1
        assert {e.thread for e in timeline.select("wait", rank)} <= main, "a lane that waits holds up nobody"
        for kind, lane in (("quantise", "send"), ("wire", "receive"), ("dequantise", "receive")):
            events = [e for e in timeline.select(kind, rank) if e.exchange is not None]
            assert {e.thread.split()[-1] for e in events} == {lane}
            found = [(e.exchange, e.direction, e.step) for e in events]
            assert found == [(1, direction, step) for step in (1, 2) for direction in ("forward", "backward")]
            assert kind != "wire" or all(e.sent for e in events)


def test_a_schedule_overlaps_and_its_backward_pass_is_the_mirror_image(tmp_path: Path) -> None:
    _, _, program = profiled(1, tmp_path)
    actions = Schedule.of(program).actions
    forward, backward = ([a for a in actions if a.direction == direction] for direction in ("forward", "backward"))
    (start,) = (i for i, a in enumerate(forward) if a.verb is Verb.START)
    (wait,) = (i for i, a in enumerate(forward) if a.verb is Verb.WAIT)
    assert [a.name for a in forward[start + 1 : wait]] == ["spmm_inner_default"]
    turned = {Verb.START: Verb.WAIT, Verb.WAIT: Verb.START, Verb.COMPUTE: Verb.COMPUTE}
    expected = [(turned[a.verb], a.exchange) for a in reversed(forward)]
    gradients = [(Verb.START, 2), (Verb.WAIT, 2)]  # one bucket
    assert [(a.verb, a.exchange) for a in backward] == [*expected, *gradients]
    assert Schedule.parse(str(Schedule.of(program))) == Schedule.of(program)


def test_a_simulation_has_the_order_of_the_recording(tmp_path: Path) -> None:
    (timeline, _), _, program = profiled(1, tmp_path)
    schedules = [Schedule.of(program, rank) for rank in (0, 1)]
    validate(schedules, 0)
    link = LinkModel(1e-4, 1e8)
    predicted = simulate(schedules, measured_seconds(timeline), link, measured_bytes(timeline, 1000), steps=2)
    known = {a.key for a in schedules[0].actions}

    def order(events: list[Event]) -> list[tuple[str, str | None, str | int]]:
        """What a rank does, without reductions; several functions of autograd in one node count once."""
        found: list[tuple[str, str | None, str | int]] = []
        for e in events:
            if e.kind != "wire" and (
                e.exchange in program.codings or ((e.direction, e.name) in known and e.kind == "compute")
            ):
                item = e.kind, e.direction, e.name if e.exchange is None else e.exchange
                found += [item] if found[-1:] != [item] else []
        return found

    (name,) = {e.program for e in timeline.events if e.module == "second"}
    assert {e.program for e in timeline.select("compute") if e.step == STEPS} > {name}, "the loss is another program"
    for rank in (0, 1):
        measured = [e for e in timeline.select(rank=rank) if e.step == STEPS and e.program == name]
        expected = [e for e in predicted.select(rank=rank) if e.step == 1]
        assert order(measured) == order(expected)


def test_a_timeline_is_refused_inside_the_block_on_every_rank(tmp_path: Path) -> None:
    model, x, y = Sums(), torch.randn(60, 6), torch.randint(3, (60,))
    src, dst = torch.randint(60, (2, 240))
    cache = ProgramCache()

    def rank(transport: InProcessTransport) -> list[str]:
        net = sylvie_fx.DistributedModule(copy.deepcopy(model), sylvie_fx.Options(), default_passes(), transport, cache)
        own, s, d, _ = net.shard(x, src, dst, y, partition="random")
        said = []
        for use in (Profile.save, Profile.figure):
            try:
                with net.profile() as profile:
                    net(own, s, d)
                    use(profile, tmp_path / "t")
            except sylvie_fx.SylvieError as error:  # as a script may do that goes on without a profile
                said.append(str(error))
        net(own, s, d).sum()
        return said

    for said in run_ranks(2, rank, 20.0):
        assert len(said) == 2
        for text in said:
            assert re.search(r"test_profile\.py:\d+: there is no timeline yet\. .* behind the block", text), text


def test_a_block_that_raises_gathers_nothing() -> None:
    torch.manual_seed(0)
    net = sylvie_fx.distribute(Sums())
    profile = net.profile()
    with pytest.raises(ZeroDivisionError), profile:
        raise ZeroDivisionError
    with pytest.raises(sylvie_fx.SylvieError, match="the block of this profile raised"):
        _ = profile.timeline
    with net.profile() as again, pytest.raises(sylvie_fx.SylvieError, match="already"), net.profile():
        pass
    assert again.timeline.events == ()


def test_a_stale_program_has_its_ages_in_its_schedule_and_its_waits() -> None:
    torch.manual_seed(0)
    model, x, y = Sums(), torch.randn(60, 6), torch.randint(3, (60,))
    src, dst = torch.randint(60, (2, 240))
    cache, options = ProgramCache(), sylvie_fx.Options(staleness={"forward": 2, "backward": 1}, warm_up=1)

    def rank(transport: Transport) -> tuple[list[tuple[int, int]], list[tuple[int, int]], Schedule]:
        net = sylvie_fx.DistributedModule(copy.deepcopy(model), options, default_passes(), transport, cache)
        own, s, d, labels = net.shard(x, src, dst, y, partition="random")
        optimizer = torch.optim.SGD(net.parameters(), 0.01)  # a step ends when parameters change
        with net.profile() as profile:
            for _ in range(6):
                optimizer.zero_grad()
                F.cross_entropy(net(own, s, d), labels).backward()
                optimizer.step()
        forward, backward = (
            [(e.step, e.staleness) for e in profile.timeline.select("wait", 0, direction) if e.exchange == 1]
            for direction in ("forward", "backward")
        )
        return forward, backward, Schedule.of(net.program())

    forward, backward, schedule = run_ranks(2, rank, 60.0)[0]
    text = str(schedule)
    assert text.count("wait 1 age 2") == 1
    assert text.count("wait 1 age 1") == 1
    validate([schedule, Schedule(1, schedule.actions)], 2, 1)
    with pytest.raises(sylvie_fx.SylvieError, match="age 2, the bound is 1"):
        validate([schedule, Schedule(1, schedule.actions)], 1)
    assert forward, "the first steps are synchronous, then nothing has to be waited for in every step"
    assert max(age for _, age in forward) == 2
    assert max(age for _, age in backward) == 1


def test_decisions_of_the_adaptor_are_events() -> None:
    torch.manual_seed(0)
    model, x = Sums(), torch.randn(60, 6)
    src, dst = torch.randint(60, (2, 240))
    cache, options = ProgramCache(), sylvie_fx.Options(staleness="auto", warm_up=3)

    def rank(transport: Transport) -> Timeline:
        net = sylvie_fx.DistributedModule(copy.deepcopy(model), options, default_passes(), transport, cache)
        own, s, d = net.shard(x, src, dst, partition="random")
        optimizer = torch.optim.SGD(net.parameters(), 0.01)  # a step ends when parameters change
        with net.profile() as profile:
            for _ in range(5):
                net(own, s, d).sum().backward()
                optimizer.step()
        return profile.timeline

    decisions = run_ranks(2, rank, 60.0)[0].select("decision")
    assert sorted((e.rank, e.exchange, e.direction, e.step) for e in decisions) == [
        (rank, 1, direction, 3) for rank in (0, 1) for direction in ("backward", "forward")
    ]
    assert all("of a step" in e.name and e.staleness in (0, 1) for e in decisions)
