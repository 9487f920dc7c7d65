"""The aggregations agree with gathers and scatters in plain torch, values and gradients, on every implementation."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels import aggregate, aggregate_layout, aggregate_library
from sylvie_fx.kernels.aggregate import Drop, EdgeLayout, attention, sddmm, segment_reduce, segment_softmax, spmm


@pytest.fixture(params=["compiled", "reference"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on the C++ kernels and on the torch reference."""
    if request.param == "reference":
        monkeypatch.setattr(aggregate_library, "library", lambda: None)
    else:
        request.getfixturevalue("compiled_kernels")


@st.composite
def graphs(draw: st.DrawFn) -> EdgeLayout:
    """Isolated nodes, parallel edges, self loops, a hub; edges in any order, sorted, or none."""
    n_src, n_dst = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    pairs = draw(st.lists(st.tuples(st.integers(0, n_src - 1), st.integers(0, n_dst - 1)), max_size=24))
    if draw(st.booleans()):
        pairs += [(s, 0) for s in range(n_src)] * 3
    if draw(st.booleans()):
        pairs += [(i, i) for i in range(min(n_src, n_dst))]
    if draw(st.booleans()):
        pairs.sort(key=lambda pair: pair[1])
    edges = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    return EdgeLayout(edges[:, 0].contiguous(), edges[:, 1].contiguous(), n_src, n_dst)


examples = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def values(*shape: int, seed: int = 0, coarse: bool = False) -> Tensor:
    """float64 leaves; coarse ones are often equal."""
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    out = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (out.round() if coarse else out).requires_grad_()


def scatter(layout: EdgeLayout, messages: Tensor, reduce: str) -> Tensor:
    """What PyG does with messages."""
    out = messages.new_zeros(layout.n_dst, *messages.shape[1:])
    if reduce == "sum":
        return out.index_add(0, layout.dst, messages)
    index = layout.dst.view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
    return out.scatter_reduce(
        0, index, messages, {"max": "amax", "min": "amin"}.get(reduce, reduce), include_self=False
    )


def assert_same(ours: Callable[[], Tensor], plain: Callable[[], Tensor], *leaves: Tensor) -> None:
    """Equal values, and equal gradients of a function that weighs every value differently."""
    mine, theirs = ours(), plain()
    torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
    direction = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(5), dtype=theirs.dtype)
    gradients = [torch.autograd.grad(out, leaves, direction, allow_unused=True) for out in (mine, theirs)]
    for own, other, leaf in zip(*gradients, leaves, strict=True):
        torch.testing.assert_close(own, torch.zeros_like(leaf) if other is None else other, rtol=1e-11, atol=1e-12)


SHAPES = {  # values of a node, and of an edge's weight
    "plain": ((5,), None),
    "wide": ((150,), None),
    "one value": ((), None),
    "no values": ((0,), None),
    "edge weight": ((7,), ()),
    "edge weight as a column": ((17,), (1,)),
    "weight of each value": ((9,), (9,)),
    "heads": ((3, 5), (3,)),
    "heads, trailing one": ((2, 8), (2, 1)),
    "edge weight of heads": ((2, 3), ()),
    "heads of one value": ((4, 1), (4,)),
    "one head of many": ((3, 2), (1, 2)),
    "heads of vectors": ((2, 32), (2,)),
}


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("shape", SHAPES)
@given(layout=graphs())
@examples
def test_spmm(shape: str, reduce: str, layout: EdgeLayout) -> None:
    of_node, of_edge = SHAPES[shape]
    coarse = reduce in ("max", "min")
    x = values(layout.n_src, *of_node, coarse=coarse)
    weight = None if of_edge is None else values(layout.edges, *of_edge, coarse=coarse)

    def plain() -> Tensor:
        messages = x[layout.src]
        if weight is not None:
            messages = messages * weight.view(*weight.shape, *[1] * (messages.dim() - weight.dim()))
        return scatter(layout, messages, reduce)

    leaves = (x,) if weight is None else (x, weight)
    assert_same(lambda: spmm(layout, x, weight, reduce), plain, *leaves)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("of_edge", [(), (1,), (6,), (2, 3)])
@given(layout=graphs())
@examples
def test_segment_reduce(reduce: str, of_edge: tuple[int, ...], layout: EdgeLayout) -> None:
    e = values(layout.edges, *of_edge, coarse=True)
    assert_same(lambda: segment_reduce(layout, e, reduce), lambda: scatter(layout, e, reduce), e)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "dot"])
@pytest.mark.parametrize(
    "ends", [((5,), (5,)), ((2, 3), (2, 3)), ((4,), (1,)), ((3,), (2, 3)), ((1,), (1,)), ((70,), (70,))]
)
@given(layout=graphs())
@examples
def test_sddmm(op: str, ends: tuple[tuple[int, ...], tuple[int, ...]], layout: EdgeLayout) -> None:
    u, v = values(layout.n_src, *ends[0]), values(layout.n_dst, *ends[1], seed=1)

    def plain() -> Tensor:
        left, right = u[layout.src], v[layout.dst]
        if left.dim() < right.dim():
            left = left.unsqueeze(1)
        if op == "add":
            return left + right
        return left - right if op == "sub" else left * right if op == "mul" else (left * right).sum(-1)

    assert_same(lambda: sddmm(layout, u, v, op), plain, u, v)


def plain_softmax(layout: EdgeLayout, e: Tensor) -> Tensor:
    powers = (e - scatter(layout, e, "max").detach()[layout.dst]).exp()
    return powers / scatter(layout, powers, "sum")[layout.dst]


@pytest.mark.parametrize("heads", [(), (1,), (2,), (3,), (8,), (2, 2)])
@given(layout=graphs(), scale=st.sampled_from([1.0, 1e4]))
@examples
def test_segment_softmax(heads: tuple[int, ...], layout: EdgeLayout, scale: float) -> None:
    e = (values(layout.edges, *heads).detach() * scale).requires_grad_()
    assert_same(lambda: segment_softmax(layout, e), lambda: plain_softmax(layout, e), e)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dropout", [False, True])
@given(layout=graphs(), dim=st.sampled_from([0, 1, 4, 7, 16]))
@examples
def test_attention(heads: int, dropout: bool, layout: EdgeLayout, dim: int) -> None:
    x, source, target = (
        values(layout.n_src, heads, dim),
        values(layout.n_src, heads),
        values(layout.n_dst, heads, seed=2),
    )
    drop = Drop(torch.arange(layout.edges) * 3 + (1 << 40), 0.4, -7) if dropout else None

    def plain() -> Tensor:
        scores = torch.nn.functional.leaky_relu(source[layout.src] + target[layout.dst], 0.1)
        alpha = plain_softmax(layout, scores)
        if drop is not None:
            alpha = alpha * drop.mask(heads) * drop.scale
        return scatter(layout, x[layout.src] * alpha.unsqueeze(2), "sum")

    assert_same(lambda: attention(layout, x, source, target, 0.1, drop), plain, x, source, target)


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_zero_is_a_tie_of_its_own(reduce: str) -> None:
    # scatter_reduce counts the zeros that it starts from: dead activations must get the gradient that they get there.
    layout = EdgeLayout(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1]), 3, 2)
    x = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    assert_same(lambda: spmm(layout, x, None, reduce), lambda: scatter(layout, x[layout.src], reduce), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_floats_are_summed_in_float32(dtype: torch.dtype) -> None:
    layout = EdgeLayout(torch.arange(1000) % 7, torch.zeros(1000, dtype=torch.int64), 7, 2)
    x = torch.full((7, 3), 0.1, dtype=dtype, requires_grad=True)
    out = spmm(layout, x)
    assert out.dtype == dtype
    torch.testing.assert_close(out[0].float(), x.detach()[0].float() * 1000, rtol=4e-3, atol=0.0)
    (gradient,) = torch.autograd.grad(out.float().sum(), x)
    assert gradient.dtype == dtype
    assert segment_softmax(layout, torch.zeros(1000, dtype=dtype)).dtype == dtype


def test_nan_stays_in_its_row() -> None:
    layout = EdgeLayout(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 0, 1, 1]), 4, 2)
    x = torch.tensor([[torch.nan], [1.0], [2.0], [3.0]])
    for first in (x, x[[1, 0, 2, 3]]):
        for reduce in ("sum", "mean", "max", "min"):
            out = spmm(layout, first, None, reduce).flatten()
            assert out[0].isnan()
            assert out[1].isfinite()
        y = segment_softmax(layout, first.flatten())
        assert y[:2].isnan().all()
        torch.testing.assert_close(y[2:].sum(), torch.tensor(1.0))


def test_softmax_of_masked_edges_is_zero() -> None:
    layout = EdgeLayout(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0]), 3, 1)
    y = segment_softmax(layout, torch.tensor([0.0, -torch.inf, 0.0]))
    assert y.tolist() == [0.5, 0.0, 0.5]


def test_noncontiguous_operands() -> None:
    layout = EdgeLayout(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]), 2, 2)
    x, weight = torch.randn(6, 2).T, torch.randn(2, 3).T
    torch.testing.assert_close(spmm(layout, x, weight[:, 0]), scatter(layout, x[layout.src] * weight[:, :1], "sum"))


SMALL = EdgeLayout(torch.tensor([0, 1]), torch.tensor([1, 0]), 2, 3)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: spmm(SMALL, torch.zeros(3, 4)), "asks for 2 rows"),
        (lambda: spmm(SMALL, torch.zeros(2, 4, dtype=torch.int64)), "int64"),
        (lambda: spmm(SMALL, torch.zeros(2, 4), torch.zeros(2, 3)), "does not fit the messages"),
        (lambda: spmm(SMALL, torch.zeros(2, 4), torch.zeros(3)), "asks for 2 rows"),
        (lambda: spmm(SMALL, torch.zeros(2, 4), None, "median"), "median"),  # type: ignore[arg-type]
        (lambda: spmm(SMALL, torch.zeros(2, 4, device="meta")), "meta"),
        (lambda: sddmm(SMALL, torch.zeros(2, 4), torch.zeros(3, 5), "add"), "do not broadcast"),
        (lambda: sddmm(SMALL, torch.zeros(2), torch.zeros(3), "dot"), "values to sum"),
        (lambda: sddmm(SMALL, torch.zeros(2), torch.zeros(3), "pow"), "pow"),  # type: ignore[arg-type]
        (lambda: attention(SMALL, torch.zeros(2, 4), torch.zeros(2, 1), torch.zeros(3, 1)), "heads"),
        (lambda: attention(SMALL, torch.zeros(2, 1, 4), torch.zeros(2, 2), torch.zeros(3, 1)), "source_score"),
    ],
)
def test_what_does_not_fit_is_said(call: Callable[[], Tensor], said: str) -> None:
    with pytest.raises(KernelError, match=said):
        call()


def test_examples() -> None:
    for module in (aggregate, aggregate_layout):
        assert doctest.testmod(module).failed == 0
