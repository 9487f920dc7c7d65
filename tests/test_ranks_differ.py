"""Ranks that hold other things, call in another order, raise or die: the others are told, and none waits for ever."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sylvie_fx
from small_net import KINDS, Net, data, on_ranks
from support import PATIENCE, RankOutcome, run_processes_unchecked
from sylvie_fx.api import DistributedModule
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir.errors import CommError
from sylvie_fx.ir.options import Options
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.runtime.in_process import run_ranks


def rows_of_two_masks(model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Right answers and rows by the name of a mask; the sums over them are programs that only the masks tell apart."""
    x, edge_index, y, mask = data()
    own_x, own_edges, own_y, train, test = model.shard(x, edge_index, y, mask, ~mask, kinds=[*KINDS, "node"])
    right = (model(own_x, own_edges).argmax(1) == own_y).float()
    return {"train": right[train], "test": right[test]}


def test_ranks_that_sum_in_another_order_are_told_instead_of_swapping_their_sums() -> None:
    def run(model: Any) -> None:
        rows = rows_of_two_masks(model)
        for name in sorted(rows, reverse=model.transport.rank == 1):
            float(rows[name].sum())

    model, cache = Net(), ProgramCache()

    def in_time(transport: Any) -> None:
        run(DistributedModule(copy.deepcopy(model), Options(timeout=2), default_passes(), transport, cache))

    line = r"test_ranks_differ\.py:\d+"
    said = rf"{line}: rank . can not go on with 'program sum \w+ .*rank . waits in 'program sum \w+ .* at \S*{line}\. the ranks do"
    with pytest.raises(CommError, match=said):
        run_ranks(2, in_time, 2)


def test_a_rank_may_compute_on_its_rows_alone() -> None:
    """As for a print on one rank: what sends nothing needs no other rank, and names nothing that comes later."""

    def run(model: Any) -> list[float]:
        rows = rows_of_two_masks(model)
        if model.transport.rank == 1:
            str(rows["train"] * 2 + 1)
        return [float(one.sum()) for one in rows.values()]

    one, other = on_ranks(2, run)
    assert one == other


# --- real processes ----------------------------------------------------------------------------------------------------


def ranks_differ(what: str) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank if what == "model" else 0)
    model = sylvie_fx.distribute(Net(), timeout=PATIENCE, bits=1 if what == "options" and rank else 32)
    x, edge_index, y, mask = data()
    if rank and what == "graph":
        edge_index[0, 0] = (edge_index[0, 0] + 1) % len(x)
    if rank and what == "data":
        mask = ~mask
    model.shard(x, edge_index, y, mask, partition=torch.arange(12).add(rank if what == "partition" else 0) % 2)


def rank_raises() -> None:
    class Raising(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            if os.environ["RANK"] == "1" and not self.training:
                raise ZeroDivisionError("no such layer")
            return super().forward(x, edge_index)

    torch.manual_seed(0)
    train_then(Raising(), lambda model: model.eval())


def rank_is_killed() -> None:
    def die(model: Any) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    train_then(Net(), die)


def train_then(net: nn.Module, act: Callable[[Any], Any]) -> None:
    model = sylvie_fx.distribute(net, timeout=PATIENCE)
    x, edge_index, y, mask = model.shard(*data(), partition="random")
    for step in range(4):
        if step == 2:
            act(model)
        loss = F.cross_entropy(model(x, edge_index)[mask], y[mask])
        if loss.requires_grad:
            loss.backward()


def outcomes(fn: Callable[..., None], *args: Any) -> list[RankOutcome]:
    return run_processes_unchecked(2, fn, *args)


@pytest.mark.dist
@pytest.mark.parametrize("what", ["model", "options", "graph", "data", "partition"])
def test_ranks_that_differ_find_out_in_shard(what: str) -> None:
    for outcome in outcomes(ranks_differ, what):
        assert outcome.error is not None
        assert "CommError" in outcome.error
        assert f"different values of {what}" in outcome.error


@pytest.mark.dist
def test_a_rank_that_raises_ends_the_others() -> None:
    first, second = outcomes(rank_raises)
    assert second.error is not None
    assert "ZeroDivisionError" in second.error or "no such layer" in second.error
    assert first.error is not None
    assert "rank 1" in first.error


@pytest.mark.dist
def test_a_killed_rank_ends_the_others() -> None:
    first, second = outcomes(rank_is_killed)
    assert second.exitcode == -signal.SIGKILL
    assert first.error is not None
    assert "CommError" in first.error
    assert "rank 1" in first.error
