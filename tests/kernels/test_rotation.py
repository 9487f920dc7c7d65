"""Rotated rounding: what arrives has the row's own product with it, an error of pi/2 - 1, and next to no bias on full rows."""

from __future__ import annotations

import math

import pytest
import torch

from sylvie_fx.ir.coding import rotated_width
from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels import reference
from sylvie_fx.kernels.hashing import stream_word
from sylvie_fx.kernels.rotation import hadamard
from sylvie_fx.kernels.wire import CodecSpec, MessageLayout, Rounding, Variant

SPEC = CodecSpec(1, Rounding.ROTATED)
WIDTHS = (32, 45, 64, 128, 172, 256, 512, 1024)


def arrived(x: torch.Tensor, step: int = 0) -> torch.Tensor:
    """Rows there and back, each with random signs of its own."""
    stream, keys = stream_word(5, step), torch.arange(x.shape[0])
    return reference.decode_rows(*reference.encode_rows(x, SPEC, stream, keys), SPEC, x.shape[1], stream, keys)


def test_the_transform_is_orthogonal() -> None:
    matrix = hadamard(torch.eye(64))
    assert torch.equal(matrix @ matrix.T, 64 * torch.eye(64))
    assert torch.equal(matrix.abs(), torch.ones(64, 64))


@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_what_arrives_has_the_rows_product_with_it_and_the_error_of_theory(cols: int, scale: float) -> None:
    """Of 4000 rows the mean error is known to under 1 % (one deviation); short rows have a little less than the limit.

    Of a row that is filled up, as much of it is missing as there are zeros.
    """
    x = torch.randn(4000, cols, generator=torch.Generator().manual_seed(cols)) * scale
    y, power = arrived(x).double(), x.double().square().sum(1)
    torch.testing.assert_close((y * x.double()).sum(1), power, rtol=1e-5, atol=0.0)
    error = ((y - x.double()).square().sum(1) / power).mean().item()
    limit = (math.pi / 2 - 1) * cols / rotated_width(cols)
    assert 0.97 * limit - 1 / rotated_width(cols) < error < 1.03 * limit


@pytest.mark.parametrize("cols", WIDTHS)
def test_full_rows_arrive_without_bias(cols: int) -> None:
    """The mean over 4000 draws has an error of 0.012 of the row; at most as much again may be bias."""
    row = torch.rand(cols, generator=torch.Generator().manual_seed(cols)) + 1.0
    bias = arrived(row.expand(4000, cols).contiguous()).double().mean(0) - row
    assert bias.norm() / row.norm() < 0.024


def test_one_number_is_exact_and_zeros_stay() -> None:
    x = torch.zeros(64, 64)
    x[torch.arange(63), torch.arange(63)] = torch.linspace(-3.0, 3.0, 63)
    torch.testing.assert_close(arrived(x), x, rtol=1e-6, atol=0.0)


def test_what_a_nearly_empty_row_loses_arrives_against_a_shift() -> None:
    x = torch.zeros(8, 64)
    x[:, 5], x[:, 40] = 1.0, torch.linspace(-0.9, 0.9, 8)
    assert torch.equal(arrived(x).count_nonzero(1), torch.ones(8, dtype=torch.int64))
    known = torch.zeros_like(x)
    for step in range(30):
        known += 2 / math.pi * arrived(x - known, step)
    torch.testing.assert_close(known, x, rtol=0.0, atol=1e-3)


def test_rows_that_are_not_finite_arrive_as_such() -> None:
    x = torch.randn(4, 128)
    x[0, 3], x[1, 7], x[2, 9] = math.nan, math.inf, -math.inf
    y = arrived(x)
    assert y[0].isnan().all()
    assert (y[1] == math.inf).all()
    assert (y[2] == -math.inf).all()
    assert y[3].isfinite().all()


def test_it_takes_one_bit_and_up_to_1024_numbers() -> None:
    with pytest.raises(KernelError, match="rotated rounding at 2 bits"):
        CodecSpec(2, Rounding.ROTATED)
    with pytest.raises(KernelError, match="with feedback coding"):
        CodecSpec(1, Rounding.ROTATED, Variant.FEEDBACK)
    with pytest.raises(KernelError, match="rows of 1025 numbers"):
        MessageLayout((3,), 1025, SPEC)
