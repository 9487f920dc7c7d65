"""Layouts and exchange plans: both sides agree, every row is found, nothing crosses that need not."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sylvie_fx.graphs.layout import RowLayout, exchange_plan


@st.composite
def cases(draw: st.DrawFn) -> tuple[RowLayout, RowLayout, torch.Tensor]:
    parts = draw(st.integers(1, 5))
    rows = draw(st.integers(1, 30))
    readers = draw(st.integers(0, 60))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    source = RowLayout(torch.randint(parts, (rows,), generator=generator), parts)
    target = RowLayout(torch.randint(parts, (readers,), generator=generator), parts)
    return source, target, torch.randint(rows, (readers,), generator=generator)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_every_rank_reads_its_rows_after_the_exchange(case: tuple[RowLayout, RowLayout, torch.Tensor]) -> None:
    source, target, index = case
    values = torch.arange(len(source.owner), dtype=torch.float64) * 10 + 3
    plans = [exchange_plan(source, target, index, rank) for rank in range(source.parts)]
    for rank, plan in enumerate(plans):
        own = values[source.rows(rank)]
        halo = []
        for peer in range(source.parts):
            sent = values[source.rows(peer)][plans[peer].send_rows[rank]]
            assert len(sent) == plan.receive_counts[peer]
            halo.append(sent)
        available = torch.cat([own, *halo])
        assert torch.equal(available[plan.local_index], values[index[target.rows(rank)]])
        assert torch.equal(torch.cat(halo), values[plan.halo_ids])
        assert len(plan.halo_ids.unique()) == plan.halo
        assert not (source.owner[plan.halo_ids] == rank).any()
    assert sum(p.halo for p in plans) == plans[0].total
    assert len({p.total for p in plans}) == 1


def test_layouts_cover_every_row_once() -> None:
    layout = RowLayout(torch.tensor([2, 0, 1, 0, 2, 2]), 4)
    assert layout.counts == [2, 1, 3, 0]
    assert layout.rows(3).numel() == 0
    found = torch.cat([layout.rows(r) for r in range(4)])
    assert sorted(found.tolist()) == list(range(6))
    for rank in range(4):
        assert layout.position[layout.rows(rank)].tolist() == list(range(layout.counts[rank]))


def test_the_identity_between_equal_layouts_moves_nothing() -> None:
    layout = RowLayout(torch.tensor([0, 1, 1, 0]), 2)
    plan = exchange_plan(layout, RowLayout(layout.owner.clone(), 2), None, 1)
    assert plan.total == 0
    assert plan.local_index.tolist() == [0, 1]
