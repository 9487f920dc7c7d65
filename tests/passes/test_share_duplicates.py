"""What is computed twice from the same operands is computed once."""

from __future__ import annotations

import torch
from pass_support import Layer, after, changes, check_parity, targets
from torch import Tensor

from sylvie_fx.passes.share_duplicates import ShareDuplicates


def neighbours(h: Tensor, edges: Tensor) -> Tensor:
    return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])


def twice(layer: Layer, x: Tensor, e: Tensor) -> Tensor:
    return neighbours(layer.a(x), e) * torch.tanh(neighbours(layer.a(x), e))


def test_an_aggregation_and_what_it_reads_are_computed_once() -> None:
    assert targets(after(twice, "share-duplicates", before=True)).count("sylvie.spmm") == 2
    found = targets(after(twice, "share-duplicates"))
    assert [found.count(name) for name in ("sylvie.spmm", "aten.linear", "sylvie.halo_exchange")] == [1, 1, 1]
    check_parity(twice)


def test_random_masks_stay_apart() -> None:
    def function(layer: Layer, x: Tensor, e: Tensor) -> Tensor:
        h = layer.a(x)
        return torch.nn.functional.dropout(h, 0.5) - torch.nn.functional.dropout(h, 0.5)

    assert not changes(ShareDuplicates(), after(function, "share-duplicates", before=True))


def test_other_operands_are_others() -> None:
    def function(layer: Layer, x: Tensor, e: Tensor) -> Tensor:
        h = layer.a(x)
        return neighbours(h, e) + neighbours(h, e.flip(0)) + (h * 1) + (h * 1.0) + (h * 2)

    assert not changes(ShareDuplicates(), after(function, "share-duplicates", before=True))


def test_a_second_run_changes_nothing() -> None:
    assert not changes(ShareDuplicates(), after(twice, "share-duplicates"))
