"""The C++ aggregations agree with the reference on every instruction set, and with themselves on every thread."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels import aggregate_cpu as cpu
from sylvie_fx.kernels import aggregate_library
from sylvie_fx.kernels import aggregate_reference as reference
from sylvie_fx.kernels.aggregate import Drop, EdgeLayout, attention, segment_softmax, spmm
from sylvie_fx.kernels.aggregate_backend import backend_for, kernel_name

compiled = pytest.mark.usefixtures("compiled_kernels")

WIDTHS = [
    (1, 1),
    (1, 2),
    (1, 7),
    (1, 100),
    (1, 128),
    (1, 300),
    (8, 8),
    (4, 32),
    (8, 16),
    (3, 7),
    (5, 12),
    (2, 3),
    (8, 1),
]
EMPTY = [(1, 0), (0, 3)]


def _graph(order: str, n_src: int = 50, n_dst: int = 40, edges: int = 400) -> EdgeLayout:
    generator = torch.Generator().manual_seed(edges)
    src = torch.randint(n_src, (edges,), generator=generator)
    dst = torch.randint(n_dst - 3, (edges,), generator=generator)
    dst[::3] = 0  # a hub
    return EdgeLayout(src, dst.sort().values if order == "sorted" else dst, n_src, n_dst)


@compiled
@pytest.mark.parametrize("isa", aggregate_library.ISA_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", ["sorted", "random"])
@pytest.mark.parametrize(("heads", "dim"), WIDTHS + EMPTY)
def test_agrees_with_the_reference(heads: int, dim: int, order: str, dtype: torch.dtype, isa: int) -> None:
    layout = _graph(order)
    rows, back = layout.by_destination, layout.by_source
    generator = torch.Generator().manual_seed(heads * 1000 + dim)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    # Sums of up to 130 terms, in another order and with fused multiply-adds.
    near = {"rtol": 3e-5, "atol": 3e-5} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-12}
    x, v, share = values(50, heads, dim), values(40, heads, dim), values(40, heads, dim)
    weight, source, target = values(400, heads), values(50, heads), values(40, heads)
    coarse = x.round()
    for w in (None, weight):
        for mean in (False, True):
            divisors = rows.degrees if mean else None
            torch.testing.assert_close(
                cpu.sum_rows(rows, x, w, divisors, isa=isa), reference.sum_rows(rows, x, w, divisors), **near
            )
        for smallest in (False, True):
            extreme, ties = cpu.extreme_rows(rows, coarse, w, smallest, True, isa=isa)
            same, equal = reference.extreme_rows(rows, coarse, w, smallest, True)
            assert equal is not None
            assert torch.equal(extreme, same)
            assert ties is not None
            assert torch.equal(ties, equal)
            assert torch.equal(cpu.extreme_rows(rows, coarse, w, smallest, False, isa=isa)[0], same)
            torch.testing.assert_close(
                cpu.ties_rows(back, coarse, w, same, share, isa=isa),
                reference.ties_rows(back, coarse, w, same, share), **near,
            )  # fmt: skip
            torch.testing.assert_close(
                cpu.tie_dot_edges(rows, coarse, share, weight, same, isa=isa),
                reference.tie_dot_edges(rows, coarse, share, weight, same), **near,
            )  # fmt: skip
    for op in ("add", "sub", "mul"):
        assert torch.equal(cpu.combine_edges(rows, x, v, op, isa=isa), reference.combine_edges(rows, x, v, op))
    torch.testing.assert_close(cpu.dot_edges(rows, x, v, isa=isa), reference.dot_edges(rows, x, v), **near)
    y = reference.softmax_edges(rows, weight * 20)
    torch.testing.assert_close(cpu.softmax_edges(rows, weight * 20, isa=isa), y, **near)
    torch.testing.assert_close(
        cpu.softmax_gradient(rows, y, weight, isa=isa), reference.softmax_gradient(rows, y, weight), **near
    )
    for drop in (None, Drop(torch.arange(400) + (1 << 33), 0.5, 1 << 63)):
        operands = (rows, x, source, target, 0.2, drop)
        for own, other in zip(cpu.attention(*operands, isa=isa), reference.attention(*operands), strict=True):
            torch.testing.assert_close(own, other, **near)
        operands += (reference.attention(*operands)[1], share)
        both = cpu.attention_gradient(*operands, isa=isa), reference.attention_gradient(*operands)
        for own, other in zip(*both, strict=True):
            torch.testing.assert_close(own, other, **near)
        sums = (back, layout.sorted_by_destination, both[1][0], share)
        for own, other in zip(cpu.attention_sources(*sums, isa=isa), reference.attention_sources(*sums), strict=True):
            torch.testing.assert_close(own, other, **near)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@compiled
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("order", ["sorted", "random"])
def test_threads_change_no_bit(order: str) -> None:
    layout = _graph(order, 3000, 2000, 40000)
    torch.manual_seed(0)
    leaves = [torch.randn(*size, requires_grad=True) for size in ((3000, 4, 16), (40000, 4), (3000, 4), (2000, 4))]
    x, weight, source, target = leaves
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        outs = [
            *(spmm(layout, x, w, reduce) for w in (None, weight) for reduce in ("sum", "mean", "max", "min")),
            segment_softmax(layout, weight),
            attention(layout, x, source, target),
        ]
        gradients = [torch.autograd.grad(out.square().sum(), leaves, allow_unused=True) for out in outs]
        results.append(outs + [g for per_out in gradients for g in per_out if g is not None])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("isa", aggregate_library.ISA_NAMES)
def test_softmax_is_as_precise_as_torch(dtype: torch.dtype, isa: int) -> None:
    layout = EdgeLayout(torch.arange(1001), torch.zeros(1001, dtype=torch.int64), 1001, 1)
    e = torch.linspace(-100, 0, 1001, dtype=torch.float64).unsqueeze(1)
    exact = torch.softmax(e.to(dtype).double(), 0)
    ours = cpu.softmax_edges(layout.by_destination, e.to(dtype), isa=isa).double()
    normal = exact > torch.finfo(dtype).tiny * 1e2  # below, powers are flushed to zero
    error = ((ours - exact).abs() / exact)[normal].max()
    assert error < 8 * torch.finfo(dtype).eps


def test_without_a_compiler_the_reference_serves_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(aggregate_library, "__file__", str(tmp_path / "aggregate_library.py"))
    aggregate_library.library.cache_clear()
    try:
        rows = _graph("random").by_destination
        with caplog.at_level(logging.WARNING):
            assert backend_for(rows, torch.zeros(1)) is backend_for(rows, torch.zeros(1)) is reference
        assert [record.message.count("build_ext") for record in caplog.records] == [1]
        with pytest.raises(KernelError, match="not compiled"):
            aggregate_library.instruction_set()
    finally:
        aggregate_library.library.cache_clear()


@compiled
def test_kernels_of_other_sources_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    aggregate_library.library.cache_clear()
    try:
        monkeypatch.setattr(aggregate_library, "SumCall", aggregate_library.TiesCall)
        monkeypatch.setattr(aggregate_library, "_Run", aggregate_library.SumCall)
        with pytest.raises(KernelError, match="compiled from other sources"):
            aggregate_library.library()
    finally:
        aggregate_library.library.cache_clear()


@compiled
def test_what_the_kernels_do_not_take_goes_to_the_reference() -> None:
    rows = _graph("random").by_destination
    assert backend_for(rows, torch.zeros(1)) is cpu
    assert backend_for(rows, torch.zeros(1, dtype=torch.bfloat16)) is reference
    assert backend_for(rows, torch.zeros(1, device="meta")) is reference


@compiled
def test_names_say_what_serves() -> None:
    cpu_device, isa = torch.device("cpu"), aggregate_library.instruction_set()
    assert kernel_name(torch.float64, cpu_device) == f"C++ {isa}"
    assert kernel_name(torch.bfloat16, cpu_device) == f"C++ {isa} in float32"
    assert kernel_name(torch.int64, cpu_device) == kernel_name(torch.float32, torch.device("cuda")) == "torch"
