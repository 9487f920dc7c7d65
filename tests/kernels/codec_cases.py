"""The codecs that the C++ and the CUDA kernels are compared with the reference on."""

from __future__ import annotations

from sylvie_fx.kernels.wire import Rounding, Variant

BITS = (1, 2, 4, 8, 16)
ROTATED_WIDTHS = (1, 5, 32, 45, 64, 100, 128, 256, 300, 512, 1000, 1024)
"""Rows that are filled up to a power of two numbers, and such that need not be."""
CASES = [
    (bits, r)
    for bits in BITS
    for r in Rounding
    if (bits, r) != (16, Rounding.DITHERED) and (bits == 1 or r is not Rounding.ROTATED)
]
STATES = (
    (Rounding.NEAREST, Variant.DIFFERENCE, 1.0),
    (Rounding.NEAREST, Variant.FEEDBACK, 1.0),
    (Rounding.STOCHASTIC, Variant.DIFFERENCE, 0.2),
    (Rounding.DITHERED, Variant.DIFFERENCE, 0.35),
    (Rounding.ROTATED, Variant.DIFFERENCE, 0.6),
)
STATE_CASES = [(bits, state) for bits in BITS for state in STATES if (bits, state[0]) in CASES]
