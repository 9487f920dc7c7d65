"""One bit a number of randomly rotated rows, in plain torch: the specification that the C++ and CUDA kernels match byte for byte.

A row of n numbers, n a power of two, is rotated by random signs and a Hadamard transform, which makes its numbers as good as
normal, whatever they were; the signs of the result cross with one scale (DRIVE and EDEN, Vargaftik et al., 2021 and 2022). A
row of fewer numbers is filled up with zeros to n: the error spreads over all n, and what falls on the zeros is dropped.

    z = x * 2**-e, its signs flipped where ``signs`` says so     e the exponent of the largest, within +-126 (exact)
    y = H z                                                      butterflies, the largest distance first
    code = y >= 0
    c = sum(z * z) / sum(|y|) * 2**e                             sums by halves, the largest distance first
    value = (H code), the same signs flipped, * c                H of signs is an integer: exact in any order

H is not normalised, and with this c the decoded row's product with the row is the row's with itself. Its error is pi/2 - 1
times the row (dithered rounding: 1.9 times for 64 normal numbers), 45/64 of that for a row of 45 that is filled up; its mean
over the random signs is nearly the row: within 1 % for
256 normal numbers, 3 % for 64 (docs/design.md). Of a row of two numbers, what arrives is the larger: coded against a shift, the
other arrives the next time.

The row header is c, a float32. A row that is not finite has c = NaN or +-Inf, and arrives as such.
"""

from __future__ import annotations

import torch

from sylvie_fx.ir.coding import rotated_width
from sylvie_fx.kernels.hashing import column_hashes, row_words

FLOAT_MAX = torch.finfo(torch.float32).max


def _signs(stream: int, keys: torch.Tensor, cols: int) -> torch.Tensor:
    """Random signs, float32 ``[rows, cols]`` of 1 and -1: bit b of hash j, where set, is a minus of column 32 j + b."""
    hashes = column_hashes(*row_words(stream, keys), cols // 32)
    bits = (hashes[:, :, None] >> torch.arange(32, device=keys.device)) & 1
    return 1.0 - 2.0 * bits.reshape(keys.numel(), cols).to(torch.float32)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """The unnormalised Walsh-Hadamard transform of rows ``[rows, n]``; every stage adds and subtracts once.

    >>> hadamard(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]]))
    tensor([[ 1.,  1.,  1.,  1.],
            [10., -2., -4.,  0.]])
    """
    rows, n = x.shape
    distance = n // 2
    while distance:
        low, high = x.view(rows, n // (2 * distance), 2, distance).unbind(2)
        x = torch.stack((low + high, low - high), dim=2)
        distance //= 2
    return x.reshape(rows, n)


def _sum_by_halves(x: torch.Tensor) -> torch.Tensor:
    """Sum of each row ``[rows, n]``, the second half added to the first until one number is left."""
    while x.shape[1] > 1:
        low, high = x.chunk(2, dim=1)
        x = low + high
    return x[:, 0]


def encode_rotated(x: torch.Tensor, stream: int, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and codes of rows.

    Args:
        x: float32 ``[rows, cols]``, finite, of at most n numbers.
        stream: From :func:`~sylvie_fx.kernels.hashing.stream_word`.
        keys: int64 ``[rows]``, the rows' global numbers.

    Returns:
        float32 ``[rows]`` and codes int64 ``[rows, n]`` of 0 and 1.
    """
    largest = x.abs().amax(1)
    x = torch.nn.functional.pad(x, (0, rotated_width(x.shape[1]) - x.shape[1]))
    exponent = (((largest.view(torch.int32) >> 23) & 255) - 127).clamp(-126, 126)
    down = ((127 - exponent) << 23).view(torch.float32)
    up = ((127 + exponent) << 23).view(torch.float32)
    z = x * down[:, None] * _signs(stream, keys, x.shape[1])
    y = hadamard(z)
    size, spread = _sum_by_halves(z * z), _sum_by_halves(y.abs())
    scale = torch.where(spread > 0, size / spread, 0.0) * up
    return scale.clamp(max=FLOAT_MAX), (y >= 0).to(torch.int64)


def decode_rotated(
    scale: torch.Tensor, codes: torch.Tensor, cols: int, stream: int, keys: torch.Tensor
) -> torch.Tensor:
    """The inverse of :func:`encode_rotated`, float32 ``[rows, cols]``; saturates where a value would be infinite."""
    rotated = hadamard(2.0 * codes.to(torch.float32) - 1.0)
    values = (rotated * _signs(stream, keys, codes.shape[1]))[:, :cols] * scale[:, None]
    return torch.where(scale.isfinite()[:, None], values.clamp(-FLOAT_MAX, FLOAT_MAX), scale[:, None])
