"""The codec in plain torch, on any device: the specification that the C++ and CUDA kernels match byte for byte.

Every floating point operation below is one rounded float32 operation except where a comment says so, and the order
is part of the specification. With ``q = 2**e``, all row-wise quantities are counted in quanta ``q``; ``F`` is 16, at
8 bits 15:

    d = x * 2**-e - k                          the distance from lo; the product is exact
    T = rint(d * (2**F (L-1) / m))             the same in steps, times 2**F: an integer in [0, 2**F (L-1)]
    code = min((T + h) >> F, L - 1)            h in [0, 2**F): random, or 2**(F-1) for the nearest level
    value = (k + code * (m / (L-1))) * 2**e

``T`` is rounded once, from the exact product: on machines with a fused multiply-add, which adds 2**23, it costs one
instruction. With h uniform, E[code] = T / 2**F, so E[value] = x within 2**-15 of a step (2**-14 at 8 bits) and one
float32 rounding of the value: unbiased against the header as sent. At 1, 2 and 4 bits both ends of the row's levels
are always kept exactly. The variance of a value is (hi - x)(x - lo) for the levels around it: at most a quarter of
the step squared.

Dithered rounding has the same codes; the receiver draws the same h and takes the middle of the values that give the code:

    value = (k + (2 ((code << F) - h) + 2**F - 1) * (m / (L-1) * 2**-(F+1))) * 2**e

The factor of the step is an integer below 2**24, so it is exact. The error is uniform over one step, whatever x is.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from sylvie_fx.kernels.calls import Decoding, Encoding
from sylvie_fx.kernels.hashing import thresholds
from sylvie_fx.kernels.rotation import decode_rotated, encode_rotated
from sylvie_fx.kernels.wire import (
    HEADER_BYTES,
    NON_FINITE,
    ROW_HEADER_BYTES,
    CodecSpec,
    Rounding,
    Variant,
)

FLOAT_MAX = torch.finfo(torch.float32).max
_EXPONENT_MASK = 0x7F800000


def fraction_bits(bits: int) -> int:
    """Bits of ``T`` below one step: as many as keep ``T`` below 2**23, where float32 holds every integer."""
    return 15 if bits == 8 else 16


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """``2.0 ** exponent`` as exact float32, for int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def _exponent(values: torch.Tensor) -> torch.Tensor:
    """Exponent field of float32 values, unbiased: ``floor(log2 |x|)``, and -127 for zero and subnormals."""
    return ((values.view(torch.int32) & _EXPONENT_MASK) >> 23) - 127


def _grid(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The row headers ``(k, m, e)``, int32, that cover finite ``[low, high]``, float32 ``[rows]``."""
    largest = torch.maximum(low.abs(), high.abs())
    # Halves, since the range of a huge row overflows.
    half_range = high * 0.5 - low * 0.5
    exponent = torch.maximum(_exponent(largest) - 14, _exponent(half_range) + 1 - 7).clamp(min=-126)
    for _ in range(2):
        scale = _power_of_two(-exponent)
        k = torch.floor(low * scale).to(torch.int32)
        m = torch.ceil(high * scale).to(torch.int32) - k
        # Rounding outwards may cost two quanta more than fit; one exponent up there are always enough.
        exponent = torch.where(m > 255, exponent + 1, exponent)
    return k, m, exponent


def _fixed_point(x: torch.Tensor, k: torch.Tensor, m: torch.Tensor, exponent: torch.Tensor, bits: int) -> torch.Tensor:
    """``T`` of the module's formula, int64 ``[rows, cols]``."""
    steps = ((1 << bits) - 1) << fraction_bits(bits)
    # Two tensors: torch takes a Python number over a tensor as its product with the reciprocal, which rounds twice.
    inverse = torch.where(m > 0, _float32(steps, x.device) / m.clamp(min=1).to(torch.float32), 0.0)
    distance = x * _power_of_two(-exponent)[:, None] - k.to(torch.float32)[:, None]
    # The product of two float32 is exact in float64: T is rounded once.
    return (distance.to(torch.float64) * inverse.to(torch.float64)[:, None]).round().to(torch.int64)


def _levels(k: torch.Tensor, m: torch.Tensor, exponent: torch.Tensor, codes: torch.Tensor, steps: int) -> torch.Tensor:
    """The values of codes ``[rows, n]``; saturates where the level above the largest float32 would be infinite."""
    step = m.to(torch.float32) / float(steps)
    quanta = k.to(torch.float32)[:, None] + codes.to(torch.float32) * step[:, None]
    return (quanta * _power_of_two(exponent)[:, None]).clamp(-FLOAT_MAX, FLOAT_MAX)


def _middles(
    k: torch.Tensor, m: torch.Tensor, exponent: torch.Tensor, codes: torch.Tensor, bits: int, random: torch.Tensor
) -> torch.Tensor:
    """The values of dithered codes ``[rows, n]``; ``random``: the 16-bit thresholds that coding used."""
    fraction = fraction_bits(bits)
    step = m.to(torch.float32) / float((1 << bits) - 1) * 2.0 ** -(fraction + 1)
    halves = 2 * ((codes << fraction) - (random >> (16 - fraction))) + (1 << fraction) - 1
    quanta = k.to(torch.float32)[:, None] + halves.to(torch.float32) * step[:, None]
    return (quanta * _power_of_two(exponent)[:, None]).clamp(-FLOAT_MAX, FLOAT_MAX)


def _two_means(
    x: torch.Tensor, k: torch.Tensor, m: torch.Tensor, exponent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Header and codes of nearest rounding at one bit: levels at the means above and below the row's mean.

    Sums are taken over the integers ``T``, so they are exact in any order. A row whose ``T`` are all equal keeps the
    levels of its range and takes the nearer one.
    """
    fixed = _fixed_point(x, k, m, exponent, 1)
    cols = x.shape[1]
    total = fixed.sum(1)
    upper = fixed * cols > total[:, None]
    count = upper.sum(1)
    upper_sum = torch.where(upper, fixed, 0).sum(1)
    spread = count > 0
    quantum = m.to(torch.float32) * 2.0**-16
    ends = []
    for part, number in ((total - upper_sum, cols - count), (upper_sum, count)):
        mean = part.to(torch.float32) / number.clamp(min=1).to(torch.float32)
        end = (k.to(torch.float32) + mean * quantum) * _power_of_two(exponent)
        ends.append(end.clamp(-FLOAT_MAX, FLOAT_MAX))
    means = _grid(*ends)
    k, m, exponent = (torch.where(spread, new, old) for new, old in zip(means, (k, m, exponent), strict=True))
    codes = torch.where(spread[:, None], upper.to(torch.int64), (fixed + 32768) >> 16)
    return k, m, exponent, codes


def _positions(cols: int, bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Byte within the row and bit within the byte of each column's code: int64 ``[cols]`` each; see wire.py."""
    column = torch.arange(cols, device=device)
    if bits == 1:
        return column // 8, column % 8
    within, block = column % 64, column // 64
    block_bytes = ((cols - block * 64).clamp(max=64) * bits + 7) // 8
    return block * 8 * bits + within % block_bytes, within // block_bytes * bits


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes int64 ``[rows, cols]`` below ``2**bits`` to uint8 ``[rows, ceil(cols * bits / 8)]``."""
    rows, cols = codes.shape
    byte, shift = _positions(cols, bits, codes.device)
    packed = torch.zeros(rows, (cols * bits + 7) // 8, dtype=torch.int64, device=codes.device)
    return packed.index_add_(1, byte, codes << shift).to(torch.uint8)


def unpack(packed: torch.Tensor, bits: int, cols: int) -> torch.Tensor:
    """The inverse of :func:`pack`: int64 ``[rows, cols]``."""
    byte, shift = _positions(cols, bits, packed.device)
    return (packed.to(torch.int64)[:, byte] >> shift) & ((1 << bits) - 1)


def _bfloat16(x: torch.Tensor, threshold: torch.Tensor | None) -> torch.Tensor:
    """float32 to bfloat16 as uint8 ``[rows, 2 * cols]``; stochastic with thresholds, else nearest, ties to even."""
    word = x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    sign = (word >> 16) & 0x8000
    add = 0x7FFF + ((word >> 16) & 1) if threshold is None else threshold
    rounded = (word + add) >> 16
    # A finite value stays finite: it saturates at the largest bfloat16.
    rounded = torch.where(rounded & 0x7FFF >= 0x7F80, sign | 0x7F7F, rounded)
    rounded = torch.where(x.isinf(), sign | 0x7F80, torch.where(x.isnan(), 0x7FC0, rounded))
    parts = torch.stack((rounded & 0xFF, rounded >> 8), dim=2)
    return parts.to(torch.uint8).reshape(x.shape[0], 2 * x.shape[1])


def _special(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a row arrives as that is not finite, int32 ``[rows]``: 0 NaN, 1 Inf, 2 -Inf; and which rows are finite."""
    plus, minus = (x == torch.inf).any(1), (x == -torch.inf).any(1)
    nan = x.isnan().any(1) | (plus & minus)
    return torch.where(nan, 0, torch.where(plus, 1, 2)).to(torch.int32), x.isfinite().all(1)


def encode_rows(x: torch.Tensor, spec: CodecSpec, stream: int, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row headers and codes of finite or non-finite rows, at 16 bits and below.

    Args:
        x: float32 ``[rows, cols]``.
        spec: The codec; its variant plays no part here.
        stream: From :func:`~sylvie_fx.kernels.hashing.stream_word`.
        keys: int64 ``[rows]``, the rows' global numbers.

    Returns:
        uint8 ``[rows, 4]`` (at 16 bits ``[rows, 0]``) and uint8 ``[rows, spec.code_bytes(cols)]``.
    """
    rows, cols = x.shape
    if spec.rounding is Rounding.ROTATED:
        safe = torch.where(x.isfinite().all(1)[:, None], x, 0.0)
        scale, codes = encode_rotated(safe, stream, keys)
        kind, finite = _special(x)
        marks = torch.tensor([torch.nan, torch.inf, -torch.inf], device=x.device)
        header = torch.where(finite, scale, marks[kind]).view(torch.uint8).view(rows, 4)
        return header, pack(torch.where(finite[:, None], codes, 0), 1)
    random = None if spec.rounding is Rounding.NEAREST else thresholds(stream, keys, cols)
    if spec.bits == 16:
        return x.new_empty((rows, 0), dtype=torch.uint8), _bfloat16(x, random)
    finite = x.isfinite().all(1)
    safe = torch.where(finite[:, None], x, 0.0)
    low, high = (safe.amin(1), safe.amax(1)) if cols else (x.new_zeros(rows), x.new_zeros(rows))
    k, m, exponent = _grid(low, high)
    steps = (1 << spec.bits) - 1
    if random is None and spec.bits == 1:
        k, m, exponent, codes = _two_means(safe, k, m, exponent)
    else:
        fraction = fraction_bits(spec.bits)
        threshold = 1 << (fraction - 1) if random is None else random >> (16 - fraction)
        codes = ((_fixed_point(safe, k, m, exponent, spec.bits) + threshold) >> fraction).clamp(max=steps)
    kind, _ = _special(x)
    k, m, biased = torch.where(finite, k, kind), torch.where(finite, m, 0), torch.where(finite, exponent + 127, 255)
    codes = torch.where(finite[:, None], codes, 0)
    header = torch.stack((k & 0xFF, (k >> 8) & 0xFF, m, biased), dim=1).to(torch.uint8)
    return header, pack(codes, spec.bits)


def decode_rows(
    header: torch.Tensor, codes: torch.Tensor, spec: CodecSpec, cols: int, stream: int, keys: torch.Tensor
) -> torch.Tensor:
    """The inverse of :func:`encode_rows`: float32 ``[rows, cols]``; stream and keys serve dithered and rotated rounding."""
    if spec.bits == 16:
        low, high = codes.to(torch.int32).view(codes.shape[0], cols, 2).unbind(2)
        return (low << 16 | high << 24).view(torch.float32)
    if spec.rounding is Rounding.ROTATED:
        return decode_rotated(
            header.contiguous().view(torch.float32)[:, 0], unpack(codes, 1, 8 * codes.shape[1]), cols, stream, keys
        )
    fields = header.to(torch.int32)
    k = ((fields[:, 0] | fields[:, 1] << 8) ^ 0x8000) - 0x8000
    m, biased = fields[:, 2], fields[:, 3]
    steps = (1 << spec.bits) - 1
    exponent, code = biased.clamp(1, 254) - 127, unpack(codes, spec.bits, cols)
    if spec.rounding is Rounding.DITHERED:
        values = _middles(k, m, exponent, code, spec.bits, thresholds(stream, keys, cols))
    else:
        values = _levels(k, m, exponent, code, steps)
    special = torch.where(k == 0, torch.nan, torch.where(k == 1, torch.inf, -torch.inf)).to(torch.float32)
    return torch.where((biased == NON_FINITE)[:, None], special[:, None], values)


def _float32(number: float, device: torch.device) -> torch.Tensor:
    """The float32 nearest to a number, as the C++ and CUDA kernels receive it."""
    return torch.tensor(number, dtype=torch.float32, device=device)


def advance_state(state: torch.Tensor, values: torch.Tensor, part: float) -> torch.Tensor:
    """The reconstruction after a difference has arrived, which both ends compute alike: ``state += part * values``.

    ``state`` float32 ``[rows, cols]`` is updated in place. Where it would not be finite it restarts at 0, so that the
    next finite message recovers it; what arrived is handed on as it is.

    Returns:
        float32 ``[rows, cols]``: the old state plus values.
    """
    arrived = state + values
    new = state + _float32(part, values.device) * values
    state.copy_(torch.where(new.isfinite(), new, 0.0))
    return arrived


def smooth(average: torch.Tensor, values: torch.Tensor, weight: float) -> torch.Tensor:
    """The exponential average ``average += weight * (values - average)``, in place.

    A result that is not finite is handed on, and leaves the average as it was.

    Returns:
        float32 ``[rows, cols]``: the new average.
    """
    if weight == 1.0:
        new = values
    else:
        new = average + _float32(weight, values.device) * (values - average)
    average.copy_(torch.where(new.isfinite(), new, average))
    return new


def encode_messages(call: Encoding) -> None:
    """Write the messages of one exchange, at 16 bits and below."""
    x, rows, keys, layout, state = call.x, call.rows, call.keys, call.layout, call.state
    spec, stream, buffer = layout.spec, call.stream, call.buffer
    source = x if rows is None else x.index_select(0, rows)
    if keys is None:
        keys = torch.zeros(layout.rows, dtype=torch.int64, device=x.device)
    if state is not None:
        source = source - state if spec.variant is Variant.DIFFERENCE else source + state
    header, codes = encode_rows(source, spec, stream, keys)
    if state is not None:
        values = decode_rows(header, codes, spec, layout.cols, stream, keys)
        if spec.variant is Variant.DIFFERENCE:
            advance_state(state, values, spec.part)
        else:
            lost = source - values
            state.copy_(torch.where(lost.isfinite(), lost, 0.0))
    starts = layout.row_starts
    for message, head, (start, stop) in zip(
        layout.views(buffer), layout.headers(call.step), pairwise(starts), strict=True
    ):
        body = torch.cat((header[start:stop].flatten(), codes[start:stop].flatten()))
        message[:HEADER_BYTES] = torch.tensor(list(head), dtype=torch.uint8, device=buffer.device)
        message[HEADER_BYTES:] = body


def decode_messages(call: Decoding) -> None:
    """Read the messages of one exchange, at 16 bits and below."""
    layout, out, index, keys = call.layout, call.out, call.index, call.keys
    if keys is None:
        keys = torch.zeros(layout.rows, dtype=torch.int64, device=call.buffer.device)
    spec, starts = layout.spec, layout.row_starts
    for message, (start, stop) in zip(layout.views(call.buffer), pairwise(starts), strict=True):
        count = stop - start
        width = ROW_HEADER_BYTES if spec.has_row_headers else 0
        split = HEADER_BYTES + width * count
        header = message[HEADER_BYTES:split].view(count, width)
        codes = message[split:].view(count, spec.code_bytes(layout.cols))
        values = decode_rows(header, codes, spec, layout.cols, call.stream, keys[start:stop])
        if call.state is not None:
            values = advance_state(call.state[start:stop], values, spec.part)
        if call.average is not None:
            values = smooth(call.average[start:stop], values, call.weight)
        where = torch.arange(start, stop, device=out.device) if index is None else index[start:stop]
        if call.accumulate:
            out.index_add_(0, where, values)
        else:
            out.index_copy_(0, where, values)
