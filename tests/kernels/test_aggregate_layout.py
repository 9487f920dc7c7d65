"""The prepared layout of a graph's edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels.aggregate_layout import EdgeLayout, Part, Rows


def _check(rows: Rows) -> None:
    order = torch.arange(rows.edges) if rows.edge_ids is None else rows.edge_ids.long()
    sorted_rows = rows.row_index[order]
    assert torch.equal(order.sort().values, torch.arange(rows.edges))
    assert torch.equal(sorted_rows, torch.repeat_interleave(torch.arange(rows.rows), rows.indptr.diff()))
    assert torch.equal(rows.sorted_columns.long(), rows.column_index[order])
    same_row = sorted_rows[1:] == sorted_rows[:-1]
    assert bool((order[1:] > order[:-1])[same_row].all())  # edges of a row stay in natural order


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=30))
def test_both_ways(pairs: list[tuple[int, int]]) -> None:
    edges = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    layout = EdgeLayout(edges[:, 0], edges[:, 1], 7, 5)
    for rows in (layout.by_destination, layout.by_source, layout.incoming.by_destination, layout.outgoing.by_source):
        _check(rows)
    assert layout.rows(False) is layout.by_destination
    assert layout.rows(True) is layout.by_source


def test_own_sources_come_first() -> None:
    layout = EdgeLayout(torch.tensor([3, 0, 2, 1, 3]), torch.tensor([1, 1, 0, 1, 1]), 4, 2, own=2)
    assert layout.by_destination.sorted_columns.tolist() == [2, 0, 1, 3, 3]
    assert layout.by_source.sorted_columns.tolist() == [1, 1, 0, 1, 1]
    assert EdgeLayout(torch.tensor([0, 2, 1]), torch.tensor([0, 0, 1]), 3, 2, own=1).by_destination.edge_ids is None


def test_a_sorted_graph_has_no_permutation_and_small_indices() -> None:
    layout = EdgeLayout(torch.tensor([2, 0, 1]), torch.tensor([0, 0, 1]), 3, 3).prepare()
    assert layout.by_destination.edge_ids is None
    assert layout.by_destination.sorted_columns.dtype == torch.int32
    assert layout.by_source.edge_ids is not None
    assert layout.by_source.edge_ids.dtype == torch.int32
    assert layout.by_destination.degrees.tolist() == [2, 1, 1]


def test_constant_values_are_sorted_once_and_others_are_found_by_number() -> None:
    constant, other = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    rows = EdgeLayout(torch.tensor([0, 1, 0]), torch.tensor([1, 0, 0]), 2, 2, constant=frozenset([constant.data_ptr()]))
    values, ids = rows.by_destination.sorted_values(constant.view(-1, 1))
    assert values.flatten().tolist() == [2.0, 3.0, 1.0]
    assert ids is None
    assert rows.by_destination.sorted_values(constant.view(-1, 1))[0] is values
    values, ids = rows.by_destination.sorted_values(other)
    assert values is other
    assert ids is not None
    assert ids.tolist() == [1, 2, 0]


def test_edges_of_a_part_keep_their_numbers_in_the_graph() -> None:
    part = EdgeLayout(torch.tensor([1, 0]), torch.tensor([1, 0]), 2, 2, part=Part(torch.tensor([1, 3]), 5))
    assert part.by_destination.edge_values == 5
    assert part.by_destination.edge_ids is not None
    assert part.by_destination.edge_ids.tolist() == [3, 1]
    assert part.by_destination.sorted_columns.tolist() == [0, 1]


def test_edges_as_sources_share_the_order_of_their_rows() -> None:
    layout = EdgeLayout(torch.tensor([1, 0, 1]), torch.tensor([0, 0, 1]), 2, 2)
    shared = layout.outgoing.by_destination
    assert shared.edge_ids is layout.by_source.edge_ids
    _check(shared)


def test_what_does_not_fit_32_bits_keeps_64() -> None:
    layout = EdgeLayout(torch.tensor([2**40, 0]), torch.tensor([0, 0]), 2**40 + 1, 1)
    assert not layout.by_destination.narrow
    assert layout.by_destination.sorted_columns.tolist() == [2**40, 0]


@pytest.mark.parametrize(
    ("src", "dst", "said"),
    [
        ([0, 1], [0], "one length"),
        ([0, 3], [0, 0], "src goes from 0 to 3"),
        ([0, 0], [-1, 0], "dst goes from -1"),
        ([0.0], [0.0], "int64"),
    ],
)
def test_what_is_no_graph_is_refused(src: list[int], dst: list[int], said: str) -> None:
    with pytest.raises(KernelError, match=said):
        EdgeLayout(torch.tensor(src), torch.tensor(dst), 2, 2)
