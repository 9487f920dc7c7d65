"""What loose tensors are taken for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sylvie_fx.ir.errors import OptionError, PartitionError
from sylvie_fx.sharding.loose import infer_kinds

X, Y, MASK = torch.randn(9, 4), torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.bool)
EDGE_INDEX = torch.randint(0, 9, (2, 30))
WEIGHT, SRC, DST = torch.rand(30), EDGE_INDEX[0], EDGE_INDEX[1]
IDS, CLASS_WEIGHT = torch.tensor([1, 4, 5]), torch.rand(3)


@pytest.mark.parametrize(("tensors", "kinds", "nodes"), [
    ([X, EDGE_INDEX, Y, MASK], ["node", "edge_index", "node", "node"], 9),
    ([X, EDGE_INDEX, WEIGHT, IDS, CLASS_WEIGHT], ["node", "edge_index", "edge", "ids", "same"], 9),
    ([X, SRC, DST, WEIGHT], ["node", "src", "dst", "edge"], 9),
    ([EDGE_INDEX, torch.rand(30, 2), MASK], ["edge_index", "edge", "node"], 9),
    ([X, Y], ["node", "node"], 9),
    ([X, EDGE_INDEX, torch.tensor(3)], ["node", "edge_index", "same"], 9),
    ([X, EDGE_INDEX[:, :0]], ["node", "edge_index"], 9),
])  # fmt: skip
def test_kinds(tensors: list[Tensor], kinds: list[str], nodes: int) -> None:
    named = [(f"data[{i}]", t) for i, t in enumerate(tensors)]
    assert infer_kinds(named, None, None, None) == (kinds, nodes)


def test_a_table_of_the_model_tells_the_number_of_nodes() -> None:
    assert infer_kinds([("e", EDGE_INDEX)], None, None, None, {64, 3}) == (["edge_index"], 64)
    with pytest.raises(PartitionError, match="nothing tells how many nodes"):
        infer_kinds([("e", EDGE_INDEX)], None, None, None, {64, 32})


def test_given_kinds_win() -> None:
    square = torch.randint(0, 9, (2, 9))
    named = [("x", X), ("e", square), ("w", torch.rand(9))]
    with pytest.raises(PartitionError, match="as many nodes as edges"):
        infer_kinds(named, None, None, None)
    assert infer_kinds(named, None, None, ["node", None, "edge"])[0] == ["node", "edge_index", "edge"]


@pytest.mark.parametrize(("kinds", "message"), [
    (["node"], "1 kinds for 2 tensors"),
    (["node", "edges"], "unknown kind 'edges'"),
])  # fmt: skip
def test_malformed_kinds(kinds: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        infer_kinds([("x", X), ("e", EDGE_INDEX)], None, None, kinds)
