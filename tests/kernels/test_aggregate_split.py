"""An aggregation in two parts has the bits of the one that sees all edges, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels import aggregate_backend, aggregate_reference
from sylvie_fx.kernels.aggregate import EdgeLayout, Reduce, spmm
from sylvie_fx.kernels.aggregate_split import SplitLayout, spmm_halo, spmm_inner

compiled = pytest.mark.usefixtures("compiled_kernels")
REDUCTIONS: tuple[Reduce, ...] = ("sum", "mean", "max", "min")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
OWN, HALO, DESTINATIONS = 9, 6, 11


def in_parts(layout: EdgeLayout, own: int, x: Tensor, weight: Tensor | None, reduce: Reduce) -> Tensor:
    split = SplitLayout(layout, own)
    acc = spmm_inner(split, x[:own], weight, reduce)
    return spmm_halo(split, acc, x[own:], weight, reduce)


def graph(pairs: list[tuple[int, int]], own: int = OWN, n_src: int = OWN + HALO) -> EdgeLayout:
    edges = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    return EdgeLayout(edges[:, 0], edges[:, 1], n_src, DESTINATIONS, own)


def same_bits(layout: EdgeLayout, own: int, x: Tensor, weight: Tensor | None, reduce: Reduce) -> None:
    leaves = [x] if weight is None else [x, weight]
    whole, parts = spmm(layout, x, weight, reduce), in_parts(layout, own, x, weight, reduce)
    assert torch.equal(whole, parts)
    assert whole.dtype == parts.dtype
    up = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1)).to(whole.dtype)
    for one, other in zip(torch.autograd.grad(whole, leaves, up), torch.autograd.grad(parts, leaves, up), strict=True):
        assert torch.equal(one, other)


EDGES = st.lists(st.tuples(st.integers(0, OWN + HALO - 1), st.integers(0, DESTINATIONS - 2)), max_size=60)
SHAPES = (((5,), None), ((5,), (1,)), ((37,), ()), ((2, 20), (2,)), ((3, 7), (3,)), ((160,), ()), ((4,), (4,)))


@compiled
@settings(deadline=None, max_examples=150)
@given(EDGES, st.sampled_from(REDUCTIONS), st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.integers(0, 10**6))
def test_the_bits_are_those_of_one_aggregation(
    pairs: list[tuple[int, int]],
    reduce: Reduce,
    dtype: torch.dtype,
    shapes: tuple[tuple[int, ...], tuple[int, ...] | None],
    seed: int,
) -> None:
    layout, generator = graph(pairs), torch.Generator().manual_seed(seed)
    values, weights = shapes
    coarse = reduce in ("max", "min")  # so that messages are equal, zero among them

    def leaf(*size: int) -> Tensor:
        drawn = torch.randn(size, generator=generator)
        return (drawn.round() if coarse else drawn).to(dtype).requires_grad_()

    x = leaf(OWN + HALO, *values)
    same_bits(layout, OWN, x, None if weights is None else leaf(len(pairs), *weights), reduce)


@compiled
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("own", [0, 40, 60])
def test_hubs_and_parts_without_an_edge(own: int, reduce: Reduce) -> None:
    generator = torch.Generator().manual_seed(own)
    src, dst = torch.randint(60, (3000,), generator=generator), torch.randint(50, (3000,), generator=generator)
    src[::4], dst[1::3] = 55, 3
    layout = EdgeLayout(src, dst, 60, 70, own)
    x = torch.randn(60, 4, 16, generator=generator).requires_grad_()
    weight = torch.randn(3000, 4, generator=generator).requires_grad_()
    same_bits(layout, own, x, weight, reduce)
    same_bits(layout, own, x, None, reduce)


@compiled
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_nan_and_infinity_travel_alike(reduce: Reduce) -> None:
    layout = graph([(0, 0), (10, 0), (1, 1), (11, 1), (12, 2), (2, 2), (3, 3), (13, 3)])
    x = torch.randn(OWN + HALO, 3)
    x[10], x[1], x[12], x[3] = torch.nan, torch.nan, torch.inf, -torch.inf
    whole, parts = spmm(layout, x, None, reduce), in_parts(layout, OWN, x, None, reduce)
    torch.testing.assert_close(whole, parts, rtol=0, atol=0, equal_nan=True)


PAIRS = [(0, 2), (10, 2), (1, 0), (1, 0), (12, 0), (4, 2), (2, 1), (14, 5), (14, 5), (3, 3), (9, 2)]


def doubles(*size: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradients(reduce: Reduce) -> None:
    leaves = doubles(OWN + HALO, 2, 3), doubles(len(PAIRS), 2)
    assert gradcheck(lambda x, w: in_parts(graph(PAIRS), OWN, x, w, reduce), leaves, nondet_tol=0.0)
    if reduce in ("sum", "mean"):
        assert gradgradcheck(lambda x, w: in_parts(graph(PAIRS), OWN, x, w, reduce), leaves)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_without_compiled_kernels_it_agrees_to_rounding(reduce: Reduce, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = doubles(OWN + HALO, 2, 3), doubles(len(PAIRS), 2)
    wanted = spmm(graph(PAIRS), x, weight, reduce)
    expected = torch.autograd.grad(wanted.square().sum(), (x, weight))
    monkeypatch.setattr(aggregate_backend.aggregate_library, "available", lambda: False)
    assert aggregate_backend.backend_for(graph(PAIRS).by_destination, x) is aggregate_reference
    found = in_parts(graph(PAIRS), OWN, x, weight, reduce)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), (x, weight)), expected)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_one_part_alone_asks_for_a_gradient(reduce: Reduce) -> None:
    x = doubles(OWN + HALO, 4)
    whole = spmm(graph(PAIRS), x, None, reduce).square().sum()
    (wanted,) = torch.autograd.grad(whole, x)
    split = SplitLayout(graph(PAIRS), OWN).prepare()
    for chosen, rows in enumerate((slice(None, OWN), slice(OWN, None))):
        ends = [x.detach()[:OWN], x.detach()[OWN:]]
        ends[chosen].requires_grad_()
        out = spmm_halo(split, spmm_inner(split, ends[0], None, reduce), ends[1], None, reduce)
        assert torch.equal(torch.autograd.grad(out.square().sum(), ends[chosen])[0], wanted[rows])


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_the_sum_so_far_becomes_the_result(reduce: Reduce) -> None:
    split, x = SplitLayout(graph(PAIRS), OWN), torch.randn(OWN + HALO, 4)
    with torch.no_grad():
        acc = spmm_inner(split, x[:OWN], None, reduce)
        out = spmm_halo(split, acc, x[OWN:], None, reduce)
    assert out.data_ptr() == acc.data_ptr()
    assert acc.numel() == out.numel()  # nothing is counted where no gradient is asked for


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a_result_may_be_written_into(reduce: Reduce) -> None:
    x = doubles(OWN + HALO, 4)
    wanted = (
        torch.autograd.grad((spmm(graph(PAIRS), x, None, reduce) * 2).sum(), x) if reduce in ("sum", "mean") else None
    )
    out = in_parts(graph(PAIRS), OWN, x, None, reduce)
    out.mul_(2)
    if wanted is not None:
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], wanted[0])
    else:  # which messages are extreme can not be told any more
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_what_does_not_fit_is_refused() -> None:
    split, x = SplitLayout(graph(PAIRS), OWN), torch.randn(OWN + HALO, 4)
    acc = spmm_inner(split, x[:OWN])
    with pytest.raises(KernelError, match="acc is not of these operands"):
        spmm_halo(split, acc, torch.randn(HALO, 5))
    with pytest.raises(KernelError, match="acc is not of these operands"):
        spmm_halo(split, acc, torch.randn(HALO, 4, dtype=torch.float64))
    with pytest.raises(KernelError, match="x_halo is"):
        spmm_halo(split, acc, x)
    with pytest.raises(KernelError, match="16 own rows of 15"):
        SplitLayout(graph(PAIRS), OWN + HALO + 1)
    with pytest.raises(KernelError, match="reduce is 'prod'"):
        spmm_inner(split, x[:OWN], None, "prod")  # type: ignore[arg-type]
    with torch.no_grad():
        acc = spmm_inner(split, x[:OWN], None, "max")
    with pytest.raises(KernelError, match="gradients off"):
        spmm_halo(split, acc, x[OWN:].requires_grad_(), None, "max")
