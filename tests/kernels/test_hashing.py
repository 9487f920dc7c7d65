"""The thresholds are uniform and independent. Inputs are fixed, so a passing test passes always; the bounds are what
a fresh set of inputs would exceed less than once in 10,000 runs of the file (z of 5 over fewer than 100 statistics).
"""

from __future__ import annotations

import torch

from sylvie_fx.kernels.hashing import stream_word, thresholds

ROWS, COLS = 2000, 192


def _uniform(seed: int, step: int, first: int = 0) -> torch.Tensor:
    keys = torch.arange(first, first + ROWS)
    return (thresholds(stream_word(seed, step), keys, COLS).double() + 0.5) / 65536 - 0.5


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """In standard deviations of independent uniform values."""
    return float((a * b).sum() * 12 / a.numel() ** 0.5)


def test_thresholds_are_uniform() -> None:
    values = thresholds(stream_word(1, 2), torch.arange(ROWS), COLS)
    assert values.min() >= 0
    assert values.max() < 65536
    counts = torch.bincount((values >> 8).flatten(), minlength=256).double()
    expected = values.numel() / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(float(chi_square) - 255) < 5 * (2 * 255) ** 0.5
    for bit in range(16):
        ones = ((values >> bit) & 1).double().mean()
        assert abs(float(ones) - 0.5) * 2 * values.numel() ** 0.5 < 5


def test_neighbours_are_independent() -> None:
    a = _uniform(5, 7)
    for shift in (1, 2, 16, 32, 64):
        assert abs(_correlation(a[:, shift:], a[:, :-shift])) < 5
        assert abs(_correlation(a[shift:], a[:-shift])) < 5
    assert abs(_correlation(a, _uniform(5, 8))) < 5
    assert abs(_correlation(a, _uniform(6, 7))) < 5
    assert abs(_correlation(a, _uniform(5, 7, first=1 << 40))) < 5


def test_a_threshold_depends_on_the_key_alone_and_not_on_the_place() -> None:
    keys = torch.tensor([5, -3, 1 << 62, 5])
    stream = stream_word(3, 4)
    together = thresholds(stream, keys, 70)
    assert torch.equal(together[0], together[3])
    assert torch.equal(together[1:2, :33], thresholds(stream, keys[1:2], 33))


def test_any_integers_are_seeds_and_steps() -> None:
    assert stream_word(-1, 0) != stream_word(1, 0)
    assert 0 <= stream_word(-(1 << 80), 1 << 70) < 1 << 64
