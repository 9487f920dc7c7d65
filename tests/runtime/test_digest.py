from __future__ import annotations

import dataclasses
import enum

import numpy as np
import pytest
import torch

from sylvie_fx.ir.errors import CommError, OptionError
from sylvie_fx.runtime.digest import check_equal_across_ranks, digest
from sylvie_fx.runtime.in_process import InProcessTransport, run_ranks


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Options:
    bits: int = 1
    staleness: str = "auto"


VALUES = [
    torch.arange(6), torch.arange(6).reshape(2, 3), torch.arange(6.0), torch.arange(6) == 1, torch.zeros(0), None,
    torch.eye(2).to_sparse(), torch.eye(3).to_sparse_csr(), torch.ones(3, dtype=torch.bfloat16), np.arange(6),
    np.arange(6.0), torch.tensor(1), 1, 1.0, True, "1", b"1", [1, 2], [[1], 2], [[1, 2]], {"a": 1}, {"a": {"b": 1}},
    {1, 2}, Colour.RED, Colour.BLUE, Options(), Options(bits=2), 2**70, -1, float("nan"), complex(1, 2), np.float32(1),
    "", [], {}, (("a",), "b"),
]  # fmt: skip


def test_distinct_values_have_distinct_digests() -> None:
    assert len({digest(value) for value in VALUES}) == len(VALUES)


def test_equal_values_have_equal_digests() -> None:
    assert digest(torch.arange(6).reshape(2, 3).t()) == digest(torch.tensor([[0, 3], [1, 4], [2, 5]]))
    assert digest({3, 1, 2}) == digest({2, 3, 1})
    assert digest([1, "a"]) == digest((1, "a"))
    assert digest(torch.ones(2, requires_grad=True)) == digest(torch.ones(2))
    # A fixed value: digests of different processes and machines are compared.
    assert digest(torch.arange(3)) == "a00fa0ca4321a0a7a13674ebeef02fa9"


def test_unknown_types_are_refused() -> None:
    with pytest.raises(OptionError, match="a function can not be compared across ranks"):
        digest({"f": lambda: 0}["f"])


def test_the_rank_that_differs_is_named() -> None:
    def program(transport: InProcessTransport) -> str:
        check_equal_across_ranks(transport, "graph", torch.arange(4), "check graph")
        try:
            check_equal_across_ranks(transport, "options", Options(2 if transport.rank == 1 else 1), "check options")
        except CommError as error:
            return str(error)
        return ""

    texts = run_ranks(3, program, timeout=10)
    assert len(set(texts)) == 1
    assert "rank 1 of 3 holds another options than the rest" in texts[0]
    assert "rank 1 has Options(bits=2, staleness='auto')" in texts[0]
    texts = run_ranks(2, program, timeout=10)
    assert "the 2 ranks hold 2 different values of options" in texts[0]
