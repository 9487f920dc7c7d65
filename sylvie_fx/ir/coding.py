"""How the rows of one exchange travel: bits, rounding, and what is coded, forward and backward apart."""

from __future__ import annotations

from dataclasses import dataclass

ROW_HEADER_BYTES = 4
ROTATED_MOST = 1024
"""Numbers a row at most where it is rotated."""


def rotated_width(columns: int) -> int:
    """Numbers that a row is filled up to with zeros where it is rotated: 32, 64, ... 1024. So many codes cross.

    >>> [rotated_width(columns) for columns in (1, 32, 45, 256, 1000)]
    [32, 32, 64, 256, 1024]
    """
    return max(32, 1 << (columns - 1).bit_length())


@dataclass(frozen=True)
class Coding:
    """One direction of one exchange.

    Attributes:
        bits: Bits a number; 32 sends the numbers as they are.
        rounding: ``stochastic`` (unbiased), ``dithered`` (unbiased too, and the receiver takes off the noise that was added:
            half the variance), ``rotated`` (nearly unbiased, but for rows that are nearly empty: signs of the randomly rotated row,
            at one bit alone; a third of that variance) or ``nearest``.
        variant: ``plain``, ``difference`` to the last reconstruction, ``feedback`` of the last error, or difference to a
            ``shift`` that follows slowly and keeps random rounding unbiased.
        warm_up: Transfers at the beginning that take ``WARM`` instead: parameters move fast then, and a shift is far behind.
    """

    bits: int = 32
    rounding: str = "stochastic"
    variant: str = "plain"
    warm_up: int = 0

    def row_bytes(self, columns: int, itemsize: int = 4) -> float:
        """Bytes that a row of ``columns`` numbers takes on the wire."""
        if self.bits == 32:
            return float(columns * itemsize)
        codes = rotated_width(columns) if self.rounding == "rotated" else columns * self.bits
        return (codes + 7) // 8 + (ROW_HEADER_BYTES if self.bits <= 8 else 0)

    def __str__(self) -> str:
        if self.bits == 32:
            return "exact"
        return f"{self.bits}-bit {self.rounding} {self.variant}"


EXACT = Coding()
WARM = Coding(4, "dithered", "shift")


@dataclass(frozen=True)
class ExchangeCoding:
    """Both directions of one exchange.

    Attributes:
        forward: Towards the ranks that need the rows.
        backward: Gradients on the way back.
        once: The value depends on inputs alone: it crosses again only when an input has changed.
        auto: The widths are chosen again and again from what is measured (runtime/adaptive.py); these are the first.
    """

    forward: Coding = EXACT
    backward: Coding = EXACT
    once: bool = False
    auto: bool = False

    def __str__(self) -> str:
        if self.once:
            return "exact, once"
        if self.auto:
            return "adaptive"
        return f"{self.forward}" if self.forward == self.backward else f"{self.forward} / {self.backward}"
