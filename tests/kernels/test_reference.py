"""What the codec promises, on the torch reference: bounds, unbiasedness, variance, special rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sylvie_fx.kernels import reference
from sylvie_fx.kernels.hashing import stream_word
from sylvie_fx.kernels.wire import CodecSpec, Rounding

FLOAT_MAX = torch.finfo(torch.float32).max

LEVELS = (Rounding.STOCHASTIC, Rounding.NEAREST, Rounding.DITHERED)
"""What rounds to levels beside a value; test_rotation.py has the other."""


def _round_trip(x: torch.Tensor, spec: CodecSpec, step: int = 0) -> torch.Tensor:
    keys = torch.arange(x.shape[0])
    header, codes = reference.encode_rows(x, spec, stream_word(1, step), keys)
    return reference.decode_rows(header, codes, spec, x.shape[1], stream_word(1, step), keys)


def _header(x: torch.Tensor, spec: CodecSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(lo, step, quantum)`` in float64 ``[rows]``."""
    header, _ = reference.encode_rows(x, spec, stream_word(1, 0), torch.arange(x.shape[0]))
    fields = header.to(torch.int64)
    k = ((fields[:, 0] | fields[:, 1] << 8) ^ 0x8000) - 0x8000
    quantum = torch.pow(2.0, fields[:, 3].double() - 127)
    return k * quantum, fields[:, 2] * quantum / ((1 << spec.bits) - 1), quantum


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=5, max_size=5),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(LEVELS),
)
def test_any_finite_row_comes_back_within_a_step(rows: list[list[float]], bits: int, rounding: Rounding) -> None:
    x = torch.tensor(rows, dtype=torch.float32)
    spec = CodecSpec(bits, rounding)
    # Nearest rounding at one bit has levels inside the range; the range's own grid bounds it all the same.
    low, step, quantum = _header(x, CodecSpec(bits))
    high = low + (step * ((1 << bits) - 1) / quantum).round() * quantum  # an integer of quanta
    y = _round_trip(x, spec).double()
    assert y.isfinite().all()
    error = (y - x.double()).abs().amax(1)
    halved = rounding is Rounding.DITHERED or (rounding is Rounding.NEAREST and bits > 1)
    bound = step * (0.5 if halved else 1.0)
    slack = 2.0**-14 * step + 2.0**-22 * x.double().abs().amax(1)
    centroid = 2 * quantum if rounding is Rounding.NEAREST and bits == 1 else 0.0
    assert (error <= bound + slack + centroid).all()
    # The levels cover the row, and waste at most two quanta.
    tiny = quantum * 2.0**-126  # what is so much smaller than the quantum that it underflows counts as zero
    assert (low <= x.double().amin(1) + tiny).all()
    assert (high >= x.double().amax(1) - tiny).all()
    spread = x.double().amax(1) - x.double().amin(1)
    assert (high - low <= spread + 2 * quantum).all()


def test_the_span_is_tight_where_the_offset_is_moderate() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 256, generator=generator) + 100 * torch.randn(1000, 1, generator=generator)
    _, step, _ = _header(x, CodecSpec(1))
    spread = (x.amax(1) - x.amin(1)).double()
    assert (step / spread).max() < 1 + 2 / 126


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
@pytest.mark.parametrize("offset", [0.0, 1.0, -1e3, 1e6])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_stochastic_rounding_is_unbiased(scale: float, offset: float, bits: int) -> None:
    """The mean of 4000 roundings of each of 40 values.

    A mean misses by more than 6 of its standard deviations less than once in 5e8; with 4000 means in all cases
    together a false alarm has a chance below 1e-5. A bias of 10% of the standard deviation of one value, or of about
    5% of a step, is found surely. Allowed on top: what the specification names.
    """
    draws, cols = 4000, 40
    generator = torch.Generator().manual_seed(bits)
    row = (torch.rand(cols, generator=generator) + offset) * scale
    x = row.float().expand(draws, cols).contiguous()
    spec = CodecSpec(bits)
    y = _round_trip(x, spec).double()
    exact = x[0].double()
    if bits == 16:
        below = torch.pow(2.0, torch.floor(torch.log2(exact.abs().clamp(min=1e-40))) - 7)
        step, position = below, torch.remainder(exact.abs() / below, 1.0)
    else:
        low, steps, _ = _header(x[:1], spec)
        step = steps.expand(cols)
        position = torch.remainder((exact - low) / step, 1.0)
    deviation = step * (position * (1 - position)).sqrt()
    allowed = 6 * deviation / draws**0.5 + 2.0**-14 * step + 2.0**-24 * exact.abs()
    assert ((y.mean(0) - exact).abs() <= allowed).all()
    # Each value lies on one of the two levels around it, so its variance is the smallest that unbiased rounding has.
    variance = (y - exact).square().mean(0)
    rounding = 2.0**-23 * exact.abs()  # of the value to float32, beside which a step may be small
    assert (variance.sqrt() <= 1.01 * step / 2 + rounding).all()
    slack = 6 * step.square() / 4 / draws**0.5 + rounding * (2 * deviation + rounding) + 2.0**-12 * step.square()
    assert ((variance - deviation.square()).abs() <= slack).all()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("offset", [0.0, -1e3, 1e6])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_dithered_rounding_is_unbiased_with_an_error_uniform_over_a_step(
    scale: float, offset: float, bits: int
) -> None:
    """As the test above: 1440 means that may miss by 6 deviations, a false alarm below 3e-6.

    The error's variance is step^2 / 12 wherever the value lies; from 4000 draws it is known to 1.5% (one deviation), and
    10% are allowed: 6.7 deviations.
    """
    draws, cols = 4000, 40
    row = (torch.rand(cols, generator=torch.Generator().manual_seed(bits)) + offset) * scale
    x, spec = row.float().expand(draws, cols).contiguous(), CodecSpec(bits, Rounding.DITHERED)
    error = _round_trip(x, spec).double() - x.double()
    _, steps, _ = _header(x[:1], spec)
    step, rounding = steps.item(), 2.0**-23 * x[0].double().abs()  # of the value to float32
    assert (error.mean(0).abs() <= 6 * step / 12**0.5 / draws**0.5 + 2.0**-14 * step + rounding).all()
    assert (error.abs() <= 0.5001 * step + rounding).all()
    variance = error.square().mean(0)
    assert ((variance - step**2 / 12).abs() <= 0.1 * step**2 / 12 + rounding * (step + rounding)).all()


def test_dithered_codes_are_the_stochastic_ones() -> None:
    x, keys = torch.randn(20, 100), torch.arange(20)
    for bits in (1, 2, 4, 8):
        messages = [
            reference.encode_rows(x, CodecSpec(bits, rounding), stream_word(1, 2), keys)
            for rounding in (Rounding.STOCHASTIC, Rounding.DITHERED)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*messages, strict=True))


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_ends_of_the_range_are_exact(bits: int) -> None:
    x = torch.tensor([[0.0, 1.0, 0.3], [-1.0, 3.0, 0.1], [256.0, 511.0, 300.0]])
    for step in range(50):
        y = _round_trip(x, CodecSpec(bits), step)
        assert torch.equal(y[:, :2], x[:, :2])


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("rounding", LEVELS)
def test_special_rows_have_defined_results_and_leave_others_alone(
    bits: int, rounding: Rounding, corner_rows: Callable[[int], torch.Tensor]
) -> None:
    x = corner_rows(37)
    spec = CodecSpec(bits, rounding)
    y = _round_trip(x, spec)
    assert y[5].isnan().all()
    assert y[10].isnan().all()
    assert (y[6] == torch.inf).all()
    assert (y[7] == -torch.inf).all()
    assert torch.equal(y[3], torch.zeros(37))
    assert torch.equal(y[13], torch.ones(37))
    ordinary = [row for row in range(64) if row not in (5, 6, 7, 10)]
    assert y[ordinary].isfinite().all()
    keys = torch.arange(64)
    for row in (0, 8, 9, 20, 63):
        header, codes = reference.encode_rows(x[row : row + 1], spec, stream_word(1, 0), keys[row : row + 1])
        assert torch.equal(
            reference.decode_rows(header, codes, spec, 37, stream_word(1, 0), keys[row : row + 1]), y[row : row + 1]
        )


def test_bfloat16_keeps_what_is_not_finite_and_stays_finite_otherwise() -> None:
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, FLOAT_MAX, -FLOAT_MAX, 1.0, 0.0]])
    for rounding in (Rounding.STOCHASTIC, Rounding.NEAREST):
        y = _round_trip(x, CodecSpec(16, rounding))
        assert y[0, 0].isnan()
        assert torch.equal(y[0, 1:3], x[0, 1:3])
        assert y[0, 3:].isfinite().all()
        assert torch.equal(y[0, 5:], x[0, 5:])
    x = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    assert torch.equal(_round_trip(x, CodecSpec(16, Rounding.NEAREST)), x.bfloat16().float())


def test_nearest_at_one_bit_is_contractive() -> None:
    """Its error is below the values' variance (2 / pi of it for normal values), where the extremes give 6 times it."""
    x = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    y = _round_trip(x, CodecSpec(1, Rounding.NEAREST))
    variance = (x - x.mean(1, keepdim=True)).square().sum(1)
    ratio = (x - y).square().sum(1) / variance
    assert ratio.max() < 0.6
    assert ratio.mean() < 1 - 2 / torch.pi + 0.03


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("cols", [0, 1, 7, 31, 32, 33, 63, 64, 65, 100, 128, 1030])
def test_packing_inverts(bits: int, cols: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, cols), generator=torch.Generator().manual_seed(cols))
    packed = reference.pack(codes, bits)
    assert packed.shape == (5, CodecSpec(bits).code_bytes(cols))
    assert torch.equal(reference.unpack(packed, bits, cols), codes)
