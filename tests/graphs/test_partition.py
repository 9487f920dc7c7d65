from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from sylvie_fx.graphs.generators import block_model, grid_graph
from sylvie_fx.graphs.partition import PartitionQuality, partition_nodes
from sylvie_fx.ir.errors import PartitionError


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, Tensor, Tensor, int]:
    nodes = draw(st.integers(1, 40))
    ends = st.lists(st.integers(0, nodes - 1), min_size=0, max_size=80)
    pairs = list(zip(draw(ends), draw(ends), strict=False))
    edges = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    return nodes, edges[:, 0], edges[:, 1], draw(st.integers(1, nodes))


@settings(max_examples=60, deadline=None)
@given(graphs(), st.sampled_from(["metis", "contiguous", "random"]), st.integers(0, 5))
def test_every_node_has_a_part_and_no_part_is_empty(
    graph: tuple[int, Tensor, Tensor, int], method: str, seed: int
) -> None:
    nodes, src, dst, parts = graph
    assignment = partition_nodes(nodes, src, dst, parts, method, seed)
    assert assignment.shape == (nodes,)
    assert assignment.dtype == torch.int64
    assert assignment.unique().tolist() == list(range(parts))
    assert torch.equal(assignment, partition_nodes(nodes, src, dst, parts, method, seed))
    quality = PartitionQuality.measure(assignment, src, dst, parts)
    assert sum(quality.nodes) == nodes
    assert sum(quality.edges) == quality.num_edges == len(src)
    for part in range(parts):
        remote = {int(s) for s, d in zip(src, dst, strict=True) if assignment[d] == part and assignment[s] != part}
        assert quality.halo[part] == len(remote)


def test_metis_cuts_less_than_random_and_keeps_the_balance() -> None:
    graph = grid_graph(40, 40)
    src, dst = graph.edge_index
    qualities = {}
    for method in ("metis", "random", "contiguous"):
        assignment = partition_nodes(1600, src, dst, 4, method, balance=1.05)
        qualities[method] = PartitionQuality.measure(assignment, src, dst, 4)
    assert qualities["metis"].edge_cut < 0.05 * qualities["metis"].num_edges < 0.1 * qualities["random"].edge_cut
    assert qualities["metis"].balance <= 1.05
    assert qualities["random"].nodes == qualities["contiguous"].nodes == (400,) * 4


def test_seeds_decide() -> None:
    src, dst = block_model(500).edge_index
    one, other = (partition_nodes(500, src, dst, 3, "random", seed) for seed in (0, 1))
    assert not torch.equal(one, other)


def test_other_integer_types_and_directions() -> None:
    src, dst = grid_graph(8, 8).edge_index
    one_way = src < dst
    expected = partition_nodes(64, src, dst, 4)
    assert torch.equal(partition_nodes(64, src[one_way].int(), dst[one_way].int(), 4), expected)


def test_given_assignment() -> None:
    given_parts = torch.tensor([1, 0, 1], dtype=torch.int32)
    result = partition_nodes(3, torch.tensor([0]), torch.tensor([1]), 2, given_parts)
    assert result.tolist() == [1, 0, 1]
    assert result.dtype == torch.int64


EDGE = (torch.tensor([0]), torch.tensor([1]))


@pytest.mark.parametrize(
    ("nodes", "edges", "parts", "options", "message"),
    [
        (0, (EDGE[0][:0], EDGE[0][:0]), 1, {}, "no nodes"),
        (2, EDGE, 3, {}, "2 nodes and can not be split into 3 parts. every rank needs a node. start at most 2 ranks"),
        (2, EDGE, 0, {}, "into 0 parts"),
        (
            2,
            EDGE,
            2,
            {"method": "louvain"},
            "no partition method 'louvain'. use metis, metis-volume, hypergraph, contiguous, random",
        ),
        (2, EDGE, 2, {"balance": 0.9}, "balance"),
        (2, EDGE, 2, {"method": torch.tensor([0, 1, 0])}, r"shape \(3,\) for 2 nodes"),
        (2, EDGE, 2, {"method": torch.tensor([0.0, 1.0])}, "dtype torch.float32"),
        (2, EDGE, 2, {"method": torch.tensor([0, 2])}, "values from 0 to 2"),
        (2, EDGE, 2, {"method": torch.tensor([-1, 1])}, "values from -1 to 1"),
        (3, EDGE, 3, {"method": torch.tensor([0, 0, 0])}, "leaves parts 1, 2 of 3 empty"),
        (2, (torch.tensor([0, 0]), torch.tensor([1, 7])), 2, {}, r"edge 1 has destination 7, outside the 2 nodes"),
        (2, (torch.tensor([-1]), torch.tensor([1])), 2, {}, "edge 0 has source -1"),
        (2, (torch.tensor([0.0]), torch.tensor([1])), 2, {}, "dtype torch.float32"),
        (2, (torch.tensor([[0]]), torch.tensor([1])), 2, {}, "one dimension"),
        (2, (torch.tensor([0, 1]), torch.tensor([1])), 2, {}, "2 edge sources and 1 destinations"),
    ],
)
def test_malformed(
    nodes: int, edges: tuple[Tensor, Tensor], parts: int, options: dict[str, object], message: str
) -> None:
    with pytest.raises(PartitionError, match=message):
        partition_nodes(nodes, *edges, parts, **options)  # type: ignore[arg-type]


def test_quality_reads_as_a_table() -> None:
    src, dst = torch.tensor([0, 0, 1, 2]), torch.tensor([1, 2, 2, 0])
    text = str(PartitionQuality.measure(torch.tensor([0, 0, 1]), src, dst, 2))
    assert text.splitlines() == [
        "2 parts of 3 nodes and 4 edges: 3 edges cut (75.0%), 3 halo rows, "
        "largest part 1.333 of the mean (1.000 in edges)",
        "part  nodes  edges  halo rows",
        "   0      2      2          1",
        "   1      1      2          2",
    ]
    assert "0 edges cut (0.0%)" in str(PartitionQuality.measure(torch.tensor([0]), src[:0], dst[:0], 1))


@pytest.mark.parametrize("method", ["metis-volume", "hypergraph"])
def test_methods_for_halo_rows_cover_every_node_and_keep_the_balance(method: str) -> None:
    if method == "hypergraph":
        pytest.importorskip("mtkahypar", reason="Mt-KaHyPar is an extra without wheels for every platform")
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(500, (2, 3000), generator=generator)
    assignment = partition_nodes(500, src, dst, 4, method, seed=1)
    assert sorted(set(assignment.tolist())) == [0, 1, 2, 3]
    random = PartitionQuality.measure(partition_nodes(500, src, dst, 4, "random"), src, dst, 4)
    found = PartitionQuality.measure(assignment, src, dst, 4)
    assert sum(found.halo) < sum(random.halo)
    assert found.balance <= 1.06
