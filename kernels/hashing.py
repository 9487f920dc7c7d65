"""Counter-based randomness: a value's threshold depends on (row key, column, step, seed) and on nothing else.

So every rank, device and number of threads draws the same numbers, in any order, without a generator's state, and
the three implementations of the codec write identical bytes. This file is their specification.

Stages, each a bijection of integers or a mix of them:

- ``stream_word``: (seed, step) to 64 bits, once a call, on the host;
- ``row_words``: (stream, row key) to two words of 32 bits, once a row;
- ``column_hashes``: (row words, j) to 32 bits. One hash serves two columns, 16 bits each: hash
  ``j = (column // 64) * 32 + column % 32`` gives its low half where ``column % 64 < 32`` and its high half elsewhere.
  (Blocks of 64 suit all machines: a warp computes one hash a lane for two columns, a vector unit fills whole
  registers with the hashes of one block.)

The mixers are splitmix64's (Steele, Lea and Flood, 2014) and lowbias32 (C. Wellons, 2018), with the row's second
word between its two multiplications, so that rows that agree in one word do not share thresholds.
"""

from __future__ import annotations

import torch

MASK32 = (1 << 32) - 1
MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15
GOLDEN32 = 0x9E3779B9


def mix64(word: int) -> int:
    """The finaliser of splitmix64 on an unsigned 64-bit word."""
    word &= MASK64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK64
    return word ^ word >> 31


def stream_word(seed: int, step: int) -> int:
    """The 64-bit word that a call's (seed, step) contribute; any integers, taken modulo 2**64."""
    return mix64(mix64(seed + GOLDEN64) + (step & MASK64) * GOLDEN64)


def _signed(word: int) -> int:
    """An unsigned 64-bit word as the int64 of the same bits, for torch."""
    return word - (1 << 64) if word >> 63 else word


def _shift_right(words: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift of int64 words (torch's own repeats the sign)."""
    return (words >> count) & (MASK64 >> count)


def row_words(stream: int, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two 32-bit words for each row.

    Args:
        stream: From :func:`stream_word`.
        keys: int64 ``[rows]``, the rows' global numbers.

    Returns:
        Two int64 ``[rows]`` tensors with values in ``[0, 2**32)``: the low and the high word.
    """
    # int64 products wrap like unsigned ones.
    words = keys * _signed(GOLDEN64) + _signed(stream)
    words = (words ^ _shift_right(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shift_right(words, 27)) * _signed(0x94D049BB133111EB)
    words = words ^ _shift_right(words, 31)
    return words & MASK32, _shift_right(words, 32)


def column_hashes(low: torch.Tensor, high: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` hashes of each row: int64 ``[rows, count]`` with values in ``[0, 2**32)``."""
    counter = torch.arange(count, device=low.device, dtype=torch.int64) * GOLDEN32
    word = (low[:, None] + counter) & MASK32
    word = (word ^ word >> 16) * 0x7FEB352D & MASK32
    word = word ^ high[:, None]
    word = (word ^ word >> 15) * 0x846CA68B & MASK32
    return word ^ word >> 16


def thresholds(stream: int, keys: torch.Tensor, cols: int) -> torch.Tensor:
    """The 16-bit threshold of every value.

    Args:
        stream: From :func:`stream_word`.
        keys: int64 ``[rows]``.
        cols: Number of columns.

    Returns:
        int64 ``[rows, cols]`` with values in ``[0, 65536)``.
    """
    low, high = row_words(stream, keys)
    blocks = -(-cols // 64)
    hashes = column_hashes(low, high, blocks * 32).view(keys.numel(), blocks, 1, 32)
    halves = torch.cat((hashes & 0xFFFF, hashes >> 16), dim=2)
    return halves.reshape(keys.numel(), blocks * 64)[:, :cols]
