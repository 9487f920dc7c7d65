"""The wire format: one message a peer, made of a header, one header a row, and packed codes.

Everything is little-endian. A message of ``rows`` x ``cols`` values at ``bits`` bits is, in this order:

1. the header, 32 bytes, four 64-bit words: ``magic | version | bits | dtype | flags``, ``rows``, ``cols``, ``step``
   (the flags: the number of the variant, and 16 for dithered, 32 for rotated rounding);
2. at 1, 2, 4 and 8 bits one row header of 4 bytes a row: ``k`` (signed 16 bit), ``m`` (8 bit), ``e + 127`` (8 bit);
3. the codes, each row padded to whole bytes with zero bits. At 1 bit column ``c`` is bit ``c % 8`` of byte ``c // 8``.
   At 2, 4 and 8 bits each block of 64 columns (the last may have fewer) takes ``s = ceil(columns * bits / 8)`` bytes,
   and column ``c`` of the block lies in byte ``c % s``, at bit ``c // s * bits``: neighbours lie in neighbouring
   bytes, so neither a vector unit nor a warp has to move values between its lanes to pack them.

**Row header.** A row's values are rounded to levels ``(k + c * m / (L - 1)) * 2**e``, ``c = 0 .. L - 1``,
``L = 2**bits``: lo and scale are 16 bit each and share the exponent ``e``. The encoder takes the smallest ``e`` for
which ``k = floor(min / 2**e)`` fits 16 bits and ``m = ceil(max / 2**e) - k`` fits 8. So the levels always *cover* the
row, whatever its offset, and since ``k`` and ``k + m`` are below 2**17 both ends are exact in float32: rounding is
done against the header as sent. Measured in ``2**e`` no quantity of the encoder exceeds 2**17, so nothing overflows
or loses precision anywhere between the smallest and the largest float32. The price is a span wider than the row's
by at most 2 quanta: under 2/126 of the range as long as the offset is below 64 times the range, and
``offset / 2**14`` (bfloat16: ``offset / 2**8``) for a row that is nearly constant.

**Non-finite rows.** ``e + 127 == 255`` marks a row that holds a NaN or an infinity; the whole row arrives as ``NaN``
(``k = 0``; also where both infinities meet), ``+Inf`` (``k = 1``) or ``-Inf`` (``k = 2``), and no other row is touched.

**Rotated rounding** has a float32 in place of the row header: the scale (rotation.py). Its rows are filled up with zeros to
a power of two numbers from 32 on, and have as many codes.

At 16 bits the codes are bfloat16 values and there are no row headers; at 32 bits they are the values in their own
dtype, whatever it is, bit for bit.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sylvie_fx.ir.coding import ROTATED_MOST, rotated_width
from sylvie_fx.ir.errors import KernelError

MAGIC = 0x564C5953  # "SYLV"
VERSION = 1
HEADER_BYTES = 32
ROW_HEADER_BYTES = 4
ALLOWED_BITS = (1, 2, 4, 8, 16, 32)
MESSAGE_ALIGNMENT = 64
"""Messages of one buffer start at multiples of this many bytes, so that kernels may store whole words."""

NON_FINITE = 255
"""Value of ``e + 127`` that marks a row with a NaN or an infinity."""

_DTYPE_CODE = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class Rounding(enum.Enum):
    """How a value becomes one of the levels beside it.

    ``STOCHASTIC`` is unbiased: up with the probability of the distance to the level below (QSGD, Alistarh et al.,
    2017). ``DITHERED`` writes the same codes, and the receiver, who can draw the same random number, takes off what it
    added (subtractive dither, Roberts, 1962): as unbiased, with an error that is uniform over one step whatever the
    value, of a variance of step^2 / 12 where stochastic rounding of evenly spread values has step^2 / 6. ``NEAREST``
    is deterministic and has the smaller error. At one bit its two levels are the means of the values above and below
    the row's mean (1-bit SGD, Seide et al., 2014): rounding to the row's extremes would return more error than signal.
    ``ROTATED`` sends the signs of the randomly rotated row, at one bit alone and for rows of at most 1024 numbers: nearly
    unbiased for rows that are not nearly empty, with a third of dithered rounding's variance (rotation.py).
    """

    STOCHASTIC = "stochastic"
    NEAREST = "nearest"
    DITHERED = "dithered"
    ROTATED = "rotated"


class Variant(enum.Enum):
    """What a message codes.

    ``PLAIN``: the rows. ``DIFFERENCE``: rows minus a reconstruction of them that both ends keep, and that moves by a
    part of what was decoded: all the way (difference to what arrived last), or less, which keeps stochastic rounding
    unbiased and stable (the shift of DIANA, Mishchenko et al., 2019). ``FEEDBACK``: rows plus what the last message
    lost of them, which the sender keeps (Seide et al., 2014; Karimireddy et al., 2019). At 32 bits the latter two
    carry the rows exactly and reset the state: a refresh.
    """

    PLAIN = "plain"
    DIFFERENCE = "difference"
    FEEDBACK = "feedback"


@dataclass(frozen=True)
class CodecSpec:
    """What both ends of an exchange agree on.

    Args:
        bits: Bits a value: 1, 2, 4, 8, 16 (bfloat16) or 32 (the values themselves).
        rounding: How values become codes; without effect at 32 bits.
        variant: What is coded.
        part: Of difference coding: how much of a decoded difference the reconstruction moves by, in (0, 1].

    Raises:
        KernelError: For other bits or parts, for dithered rounding at 16 bits, for rotated rounding at other widths than one
            bit or with error feedback, or for a variant with state and one-bit random rounding that moves the state by more
            than half: it diverges.

    >>> CodecSpec(bits=1).row_bytes(256)
    36
    """

    bits: int = 1
    rounding: Rounding = Rounding.STOCHASTIC
    variant: Variant = Variant.PLAIN
    part: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no codec."""
        if self.bits not in ALLOWED_BITS:
            raise KernelError(f"bits={self.bits!r} is no width of the codec", remedy=f"use one of {ALLOWED_BITS}")
        if not 0.0 < self.part <= (1.0 if self.variant is Variant.DIFFERENCE else self.part == 1.0):
            raise KernelError(
                f"part={self.part!r} of {self.variant.value} coding",
                remedy="pass a number in (0, 1], below 1 for difference coding alone",
            )
        if self.rounding is Rounding.DITHERED and self.bits == 16:
            raise KernelError("dithered rounding to bfloat16", remedy="use stochastic rounding at 16 bits")
        if self.rounding is Rounding.ROTATED and (self.bits not in (1, 32) or self.variant is Variant.FEEDBACK):
            raise KernelError(
                f"rotated rounding at {self.bits} bits with {self.variant.value} coding",
                remedy="use it at one bit, plain or with difference coding",
            )
        stateful = self.variant is not Variant.PLAIN and self.part > 0.5
        if stateful and self.bits == 1 and self.rounding in (Rounding.STOCHASTIC, Rounding.DITHERED):
            raise KernelError(
                f"{self.variant.value} coding with {self.rounding.value} rounding at one bit",
                why="its error is several times the signal, and the state feeds the error back: it diverges",
                remedy="use Rounding.NEAREST, two bits, or difference coding with a part of 0.5 or less",
            )

    @property
    def needs_keys(self) -> bool:
        """Whether the receiver draws the sender's random numbers again."""
        return self.rounding in (Rounding.DITHERED, Rounding.ROTATED) and self.bits < 32

    @property
    def has_row_headers(self) -> bool:
        """Whether rows carry their own lo and scale: at 8 bits and below."""
        return self.bits <= 8

    def code_bytes(self, cols: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of one row's codes."""
        if self.bits == 32:
            return cols * dtype.itemsize
        codes = rotated_width(cols) if self.rounding is Rounding.ROTATED else cols
        return (codes * self.bits + 7) // 8

    def row_bytes(self, cols: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes that one row of ``cols`` values adds to a message: what a cost model counts."""
        return self.code_bytes(cols, dtype) + (ROW_HEADER_BYTES if self.has_row_headers else 0)


def message_bytes(rows: int, cols: int, spec: CodecSpec, dtype: torch.dtype = torch.float32) -> int:
    """Size of the message for ``rows`` x ``cols`` values; ``dtype`` matters at 32 bits only.

    >>> message_bytes(1000, 256, CodecSpec(bits=1))
    36032
    """
    if rows < 0 or cols < 0:
        raise KernelError(f"a message of {rows} rows and {cols} columns")
    return HEADER_BYTES + rows * spec.row_bytes(cols, dtype)


def dtype_code(dtype: torch.dtype) -> int:
    """The number of a dtype in the header.

    Raises:
        KernelError: For a dtype that the codec does not take.
    """
    if dtype not in _DTYPE_CODE:
        raise KernelError(f"values of {dtype}", remedy="exchange float32, float64, bfloat16 or float16")
    return _DTYPE_CODE[dtype]


def header_words(rows: int, cols: int, spec: CodecSpec, dtype: torch.dtype, step: int) -> tuple[int, int, int, int]:
    """The header's four unsigned 64-bit words. The dtype is part of the format at 32 bits only."""
    dtype_field = dtype_code(dtype) if spec.bits == 32 else 0
    flags = list(Variant).index(spec.variant) | {Rounding.DITHERED: 16, Rounding.ROTATED: 32}.get(spec.rounding, 0)
    return MAGIC | VERSION << 32 | spec.bits << 40 | dtype_field << 48 | flags << 56, rows, cols, step & (2**64 - 1)


def header_bytes(rows: int, cols: int, spec: CodecSpec, dtype: torch.dtype, step: int) -> bytes:
    """The header as it stands on the wire."""
    return b"".join(word.to_bytes(8, "little") for word in header_words(rows, cols, spec, dtype, step))


def check_header(message: torch.Tensor, expected: bytes, *, ignore_step: bool) -> None:
    """Compare a message's header with the one that the receiver expects.

    Args:
        message: uint8 ``[bytes]`` in host memory.
        expected: From :func:`header_bytes`.
        ignore_step: Whether a message of any step will do.

    Raises:
        KernelError: Where they differ, naming the first field that does.
    """
    found = bytes(message[:HEADER_BYTES].tolist())
    fields = {"magic": (0, 4), "version": (4, 5), "bits": (5, 6), "dtype": (6, 7), "variant": (7, 8)}
    fields |= {"rows": (8, 16), "cols": (16, 24)}
    if not ignore_step:
        fields["step"] = (24, 32)
    for name, (start, stop) in fields.items():
        if found[start:stop] != expected[start:stop]:
            got, want = (int.from_bytes(part[start:stop], "little") for part in (found, expected))
            raise KernelError(
                f"the message's {name} is {got}, expected {want}",
                why="sender and receiver do not agree on the exchange",
                remedy="check that every rank runs the same program and options",
            )


@dataclass(frozen=True)
class MessageLayout:
    """Where the messages of one exchange lie in one buffer, a message a peer.

    Args:
        counts: Rows for each peer, in the order of the peers.
        cols: Columns of every row.
        spec: The codec.
        dtype: Of the values; matters at 32 bits only.

    Raises:
        KernelError: For a number of columns that rotated rounding does not take.
    """

    counts: tuple[int, ...]
    cols: int
    spec: CodecSpec
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        """Refuse what can not be rotated."""
        if self.spec.rounding is Rounding.ROTATED and not 0 < self.cols <= ROTATED_MOST:
            raise KernelError(
                f"rotated rounding of rows of {self.cols} numbers", remedy=f"use it for 1 to {ROTATED_MOST} numbers"
            )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each message."""
        return tuple(message_bytes(count, self.cols, self.spec, self.dtype) for count in self.counts)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte at which each message starts, and after them the bytes of the whole buffer."""
        offsets = [0]
        for size in self.sizes:
            offsets.append(-(-(offsets[-1] + size) // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT)
        # A lone message needs no padding behind it: its buffer is exactly the message.
        return (0, self.sizes[0]) if len(self.sizes) == 1 else tuple(offsets)

    @cached_property
    def row_starts(self) -> tuple[int, ...]:
        """Number of the first row of each message among all rows, and after them their sum."""
        starts = [0]
        for count in self.counts:
            starts.append(starts[-1] + count)
        return tuple(starts)

    @property
    def rows(self) -> int:
        """Rows of all messages together."""
        return self.row_starts[-1]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a buffer that holds all messages."""
        return self.offsets[-1]

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Each message in a buffer, without a copy: what a transport sends or receives into."""
        return [buffer.narrow(0, start, size) for start, size in zip(self.offsets[:-1], self.sizes, strict=True)]

    def headers(self, step: int) -> Sequence[bytes]:
        """Each message's header."""
        return [header_bytes(count, self.cols, self.spec, self.dtype, step) for count in self.counts]
