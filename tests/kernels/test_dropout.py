"""The compiled dropout has the bits of the one that specifies it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from sylvie_fx.ir import ops
from sylvie_fx.kernels import dropout

compiled = pytest.mark.usefixtures("compiled_kernels")


@compiled
@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**40), max_size=40), st.sampled_from([(), (1,), (5,), (2, 9), (70,), (0,)]),
    st.sampled_from([0.0, 0.1, 0.5, 0.999999]), st.integers(0, 2**64 - 1), st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
)  # fmt: skip
def test_the_same_bits(
    ids: list[int], shape: tuple[int, ...], p: float, key: int, dtype: torch.dtype, relu: bool
) -> None:
    keys = torch.tensor(ids, dtype=torch.int64)
    x, gradient = torch.randn(2, len(ids), *shape, dtype=dtype)
    results, gradients = [], []
    for drop in (dropout.keyed_dropout, ops.keyed_dropout):
        leaf = x.clone().requires_grad_()
        results.append(drop(leaf, keys, p, key, 0, relu))
        gradients += torch.autograd.grad(results[-1], leaf, gradient)
    assert torch.equal(*results)
    assert torch.equal(*gradients)
    assert results[0].stride() == results[1].stride()


@compiled
def test_rows_along_another_dimension() -> None:
    x, keys = torch.randn(3, 7, 4), torch.arange(7) * 5
    for given_x in (x, x.transpose(0, 2)):
        assert torch.equal(
            dropout.keyed_dropout(given_x, keys, 0.5, 99, 1), ops.keyed_dropout(given_x, keys, 0.5, 99, 1)
        )


@compiled
@pytest.mark.parametrize("relu", [False, True])
def test_gradients(relu: bool) -> None:
    x, keys = torch.randn(6, 5, dtype=torch.float64, requires_grad=True), torch.arange(6)
    assert gradcheck(lambda t: dropout.keyed_dropout(t, keys, 0.4, 7, 0, relu), (x,))
    assert gradgradcheck(lambda t: dropout.keyed_dropout(t, keys, 0.4, 7, 0, relu), (x,))


@compiled
def test_behind_a_relu_not_a_number_stays_one_and_what_it_keeps_from_is_zero() -> None:
    x = torch.tensor([[float("nan"), -1.0, float("inf"), 2.0]], requires_grad=True)
    y = dropout.keyed_dropout(x, torch.arange(1), 0.0, 3, 0, True)
    torch.testing.assert_close(y, x.relu(), equal_nan=True)
    (gradient,) = torch.autograd.grad(y, x, torch.tensor([[1.0, float("inf"), 2.0, 3.0]]))
    assert gradient.tolist() == [[1.0, 0.0, 2.0, 3.0]]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@compiled
@pytest.mark.usefixtures("threads")
def test_threads_change_no_bit() -> None:
    x, keys = torch.randn(9000, 100), torch.arange(9000)
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        results.append(dropout.keyed_dropout(x, keys, 0.5, 3))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_the_kernel_does_not_take_goes_to_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "library", lambda: None)
    x, keys = torch.ones(50, 8, dtype=dtype, requires_grad=True), torch.arange(50)
    out = dropout.keyed_dropout(x, keys, 0.5, 11)
    assert torch.equal(out, ops.keyed_dropout(x, keys, 0.5, 11))
    assert 0.3 < float((out == 0).float().mean()) < 0.7
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, out.detach())
    assert torch.equal(dropout.keyed_dropout(x, keys, 1.0, 11), torch.zeros_like(x))
