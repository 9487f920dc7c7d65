from __future__ import annotations

import pytest
import torch

from sylvie_fx.ir import ops
from sylvie_fx.ir.errors import BranchError, SylvieError


def test_gather_and_scatter_are_adjoint() -> None:
    x = torch.randn(7, 3, dtype=torch.float64)
    index = torch.randint(7, (20,))
    y = torch.randn(20, 3, dtype=torch.float64)
    left = (ops.gather(x, index) * y).sum()
    right = (x * ops.scatter(y, index, 7, "sum")).sum()
    assert torch.allclose(left, right)


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin", "prod"])
def test_scatter_along_another_dimension(reduce: str) -> None:
    x, index = torch.randn(3, 9, 2, dtype=torch.float64), torch.tensor([0, 1, 1, 4, 0, 0, 2, 2, 2])
    along = ops.scatter(x, index, 5, reduce, 1)
    assert torch.equal(along, ops.scatter(x.movedim(1, 0), index, 5, reduce).movedim(0, 1))
    assert not along[:, 3].any()  # what nothing is written to is zero


def test_a_mask_depends_on_key_row_and_column_alone() -> None:
    rows = torch.randperm(1000)
    whole = ops.keep_mask(torch.arange(1000), 16, 0.3, 12345)
    assert torch.equal(ops.keep_mask(rows, 16, 0.3, 12345), whole[rows])
    assert not torch.equal(ops.keep_mask(torch.arange(1000), 16, 0.3, 12346), whole)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_a_mask_keeps_the_right_share_everywhere(p: float) -> None:
    mask = ops.keep_mask(torch.arange(20000), 8, p, 7).double()
    spread = 5 * (p * (1 - p) / 20000) ** 0.5
    assert (mask.mean(0) - (1 - p)).abs().max() <= spread + 1e-9  # each column
    assert (mask.view(8, -1).mean(1) - (1 - p)).abs().max() <= spread + 1e-9  # each block of rows


def test_masks_of_neighbouring_keys_rows_and_columns_are_independent() -> None:
    a, b = (ops.keep_mask(torch.arange(20000), 8, 0.5, key).double() * 2 - 1 for key in (1, 2))
    bound = 5 / (20000 * 8) ** 0.5
    assert (a * b).mean().abs() < bound
    assert (a[1:] * a[:-1]).mean().abs() < bound
    assert (a[:, 1:] * a[:, :-1]).mean().abs() < bound


def test_dropout_scales_what_it_keeps() -> None:
    x = torch.ones(4000, 4, dtype=torch.float64, requires_grad=True)
    out = ops.keyed_dropout(x, torch.arange(4000), 0.25, 3)
    assert set(out.unique().tolist()) == {0.0, 1 / 0.75}
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())
    assert not ops.keyed_dropout(x, torch.arange(4000), 1.0, 3).any()
    assert ops.keyed_dropout(x[:0], torch.arange(0), 0.5, 3).shape == (0, 4)


@pytest.mark.parametrize("op", [ops.all_reduce, ops.halo_exchange, ops.relayout, ops.node_dropout])
def test_what_crosses_ranks_needs_a_machine(op) -> None:
    arguments = {ops.all_reduce: ("sum",), ops.node_dropout: (None, 0.5, 0)}.get(op, (0,))
    with pytest.raises(SylvieError, match="Machine"):
        op(torch.ones(2, 2), *arguments)


def test_checks_name_what_was_decided() -> None:
    ops.check(torch.tensor(True), "item is 3", "model.py:7")
    with pytest.raises(BranchError, match=r"model.py:7: .*captured where item is 3.*does not hold"):
        ops.check(False, "item is 3", "model.py:7")
    ops.check_size((0, torch.ones(3, 2)), [1, "size", 0], 3, "a size is 3")
    with pytest.raises(BranchError, match="a size is 4"):
        ops.check_size(torch.ones(3, 2), ["size", 0], 4, "a size is 4")
