"""The codec's face: rows to messages and back, on whatever device they lie.

``encode`` and ``decode`` serve one message, ``encode_peers`` and ``decode_peers`` all messages of an exchange in one
call. They check their arguments and hand on to the C++ kernels (host memory), the CUDA kernels (a GPU) or the torch
reference (anything else, or where a kernel is not there); the bytes are the same.
"""

from __future__ import annotations

import enum
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import torch

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels import cpu, cuda, exact, reference
from sylvie_fx.kernels.calls import Decoding, Encoding
from sylvie_fx.kernels.hashing import stream_word
from sylvie_fx.kernels.wire import CodecSpec, MessageLayout, Rounding, Variant, check_header, dtype_code

VALUES_A_THREAD = 1 << 18
"""Values for which starting one more thread pays."""


class Mode(enum.Enum):
    """What decoding does with the rows of ``out``: ``WRITE`` replaces them, ``ADD`` adds to them (backward)."""

    WRITE = "write"
    ADD = "add"


def encode(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    spec: CodecSpec,
    step: int,
    seed: int,
    row_keys: torch.Tensor | None,
    out: torch.Tensor | None = None,
    *,
    state: torch.Tensor | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """Gather, quantise and pack rows into one message.

    Args:
        x: ``[n, cols]``, float32 (fastest), float64, bfloat16 or float16. Below 32 bits values go through float32.
        rows: int64 ``[rows]``, the rows of ``x`` to send; None for all in order.
        spec: What both ends agreed on.
        step: The training step: part of the randomness and of the header.
        seed: Of the randomness; give each exchange and direction its own.
        row_keys: int64 ``[rows]``, the rows' global numbers; they key the randomness, so a row's bits depend neither
            on the rank nor on its place in the message. None is allowed without stochastic rounding.
        out: uint8 ``[message_bytes(rows, cols, spec, x.dtype)]`` to write into; allocated where None.
        state: float32 ``[rows, cols]``, updated in place, exactly where ``spec.variant`` has state: the last
            reconstruction (start with zeros; both ends then stay equal) or the residual (start with zeros).
        threads: Of the CPU kernel; by default torch's number where there is work for them.

    Returns:
        The message, uint8.

    Raises:
        KernelError: For arguments that do not fit together, or a row that ``x`` does not have (on a GPU such a row
            arrives as NaN instead).
    """
    count = x.shape[0] if rows is None else rows.numel()
    layout = MessageLayout((count,), x.shape[1] if x.dim() == 2 else 0, spec, x.dtype)
    return encode_peers(x, rows, layout, step, seed, row_keys, out, state=state, threads=threads)


def encode_peers(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    layout: MessageLayout,
    step: int,
    seed: int,
    row_keys: torch.Tensor | None,
    out: torch.Tensor | None = None,
    *,
    state: torch.Tensor | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """As :func:`encode`, for all messages of an exchange: ``rows``, keys and state stand peer after peer.

    Returns:
        The buffer, uint8 ``[layout.buffer_bytes]``; ``layout.views`` gives the messages in it.

    Raises:
        KernelError: As :func:`encode`.
    """
    spec = layout.spec
    _check_matrix("x", x, layout.cols)
    if spec.bits == 32 and layout.dtype != x.dtype:
        raise KernelError(f"x is {x.dtype}, the layout is of {layout.dtype}")
    if rows is None and layout.rows != x.shape[0]:
        raise KernelError(f"x has {x.shape[0]} rows, the messages {layout.rows}", remedy="pass rows")
    _check_index("rows", rows, layout.rows, x.device)
    _check_index("row_keys", row_keys, layout.rows, x.device)
    if row_keys is None and spec.rounding is not Rounding.NEAREST and spec.bits < 32:
        raise KernelError(f"{spec.rounding.value} rounding without row_keys", remedy="pass the rows' global numbers")
    if (state is None) == (spec.variant is not Variant.PLAIN):
        raise KernelError(f"{spec.variant.value} coding {'needs a' if state is None else 'takes no'} state")
    _check_state("state", state, layout, x.device)
    if out is None:
        out = torch.empty(layout.buffer_bytes, dtype=torch.uint8, device=x.device)
    _check_buffer(out, layout, x.device)
    if x.device.type == "meta":
        return out
    x = x.detach()
    if spec.bits < 32 and x.dtype != torch.float32:
        x, rows = (x if rows is None else x.index_select(0, rows)).to(torch.float32), None
    if x.shape[1] > 1 and x.stride(1) != 1:
        x = x.contiguous()
    call = Encoding(x, rows, row_keys, layout, stream_word(seed, step), step, out, state, _threads(threads, layout))
    if spec.bits == 32:
        exact.encode_messages(call)
    elif x.device.type == "cpu" and cpu.available():
        cpu.encode_messages(call)
    elif x.device.type == "cuda" and cuda.available():
        cuda.encode_messages(call)
    else:
        reference.encode_messages(call)
    return out


def decode(
    message: torch.Tensor,
    spec: CodecSpec,
    rows: int,
    cols: int,
    dtype: torch.dtype = torch.float32,
    *,
    out: torch.Tensor | None = None,
    mode: Mode | Literal["write", "add"] = Mode.WRITE,
    index: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    average: torch.Tensor | None = None,
    weight: float = 1.0,
    step: int | None = None,
    seed: int = 0,
    row_keys: torch.Tensor | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """Unpack one message, and write its rows or add them to others.

    Args:
        message: uint8 ``[message_bytes(rows, cols, spec, dtype)]``.
        spec: What both ends agreed on.
        rows: Rows of the message.
        cols: Columns.
        dtype: Of the sender's values and of ``out``.
        out: ``[n, cols]`` of ``dtype``; ``[rows, cols]`` is allocated where None.
        mode: Whether to write or to add.
        index: int64 ``[rows]``, the row of ``out`` for each row of the message, none twice within the message; None
            for the rows in order.
        state: float32 ``[rows, cols]``, updated in place, exactly for difference coding: the last reconstruction.
        average: float32 ``[rows, cols]``, updated in place: what is handed on is the exponential average
            ``average += weight * (value - average)`` of the values that arrive (after the difference).
        weight: Of the new values in the average, in (0, 1].
        step: The step that the message must be of; None for any. Dithered and rotated rounding need it.
        seed: As in coding; dithered and rotated rounding need it.
        row_keys: int64 ``[rows]``, as in coding; dithered and rotated rounding need them.
        threads: Of the CPU kernel; by default torch's number where there is work for them.

    Returns:
        ``out``.

    Raises:
        KernelError: For arguments that do not fit together, a message that is not the expected one, or a row that
            ``out`` does not have. (A GPU is not waited for: there rows of a wrong message read as NaN, and rows that
            ``out`` does not have are left out.)
    """
    layout = MessageLayout((rows,), cols, spec, dtype)
    return decode_peers(
        message, layout, out=out, mode=mode, index=index, state=state, average=average, weight=weight, step=step,
        seed=seed, row_keys=row_keys, threads=threads,
    )  # fmt: skip


def decode_peers(
    buffer: torch.Tensor,
    layout: MessageLayout,
    *,
    out: torch.Tensor | None = None,
    mode: Mode | Literal["write", "add"] = Mode.WRITE,
    index: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    average: torch.Tensor | None = None,
    weight: float = 1.0,
    step: int | None = None,
    seed: int = 0,
    row_keys: torch.Tensor | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """As :func:`decode`, for all messages of an exchange in one buffer; different messages may add to one row.

    Sums are formed message after message, in order: the result does not depend on threads or on timing.

    Raises:
        KernelError: As :func:`decode`.
    """
    device, mode = buffer.device, Mode(mode)
    _check_buffer(buffer, layout, device)
    dtype_code(layout.dtype)
    _check_index("index", index, layout.rows, device)
    if mode is Mode.ADD and out is None:
        raise KernelError("adding to nothing", remedy="pass out")
    if out is None:
        if index is not None:
            raise KernelError("index without out", remedy="pass out")
        out = torch.empty(layout.rows, layout.cols, dtype=layout.dtype, device=device)
    _check_matrix("out", out, layout.cols)
    if out.dtype != layout.dtype or out.device != device or out.requires_grad:
        raise KernelError(
            f"out is {out.dtype} on {out.device}{' and requires grad' if out.requires_grad else ''}",
            remedy=f"pass {layout.dtype} on {device}, outside autograd",
        )
    if index is None and out.shape[0] < layout.rows:
        raise KernelError(f"out has {out.shape[0]} rows, the messages {layout.rows}")
    if (state is None) == (layout.spec.variant is Variant.DIFFERENCE):
        raise KernelError(f"{layout.spec.variant.value} coding {'needs a' if state is None else 'takes no'} state")
    _check_state("state", state, layout, device)
    _check_state("average", average, layout, device)
    _check_index("row_keys", row_keys, layout.rows, device)
    rounding, keyed = layout.spec.rounding, layout.spec.needs_keys
    if keyed and (step is None or row_keys is None):
        raise KernelError(
            f"decoding {rounding.value} rows without step and row_keys", remedy="pass what they were coded with"
        )
    if not 0.0 < weight <= 1.0:
        raise KernelError(f"weight={weight} of an average", remedy="pass a number in (0, 1]")
    if device.type == "meta":
        return out
    if device.type != "cuda":
        for message, header in zip(layout.views(buffer), layout.headers(step or 0), strict=True):
            check_header(message, header, ignore_step=step is None)
    stream = stream_word(seed, step or 0) if keyed else 0
    accumulate, threads = mode is Mode.ADD, _threads(threads, layout)
    _unpack(Decoding(buffer, layout, out, index, accumulate, state, average, weight, row_keys, stream, step, threads))
    return out


def _unpack(call: Decoding) -> None:
    """Hand checked arguments to the kernel of the device."""
    layout, out, index = call.layout, call.out, call.index
    if layout.spec.bits == 32:
        exact.decode_messages(call)
    elif out.dtype != torch.float32 or (out.shape[1] > 1 and out.stride(1) != 1):
        # Other dtypes take the values as float32 first: their row states are float32 as well.
        values = torch.empty(layout.rows, layout.cols, dtype=torch.float32, device=out.device)
        _unpack(replace(call, out=values, index=None, accumulate=False))
        for start, stop in pairwise(layout.row_starts):
            where = torch.arange(start, stop, device=out.device) if index is None else index[start:stop]
            exact.put(out, where, values[start:stop], call.accumulate)
    elif out.device.type == "cpu" and cpu.available():
        cpu.decode_messages(call)
    elif out.device.type == "cuda" and cuda.available():
        cuda.decode_messages(call)
    else:
        reference.decode_messages(call)


def _threads(threads: int | None, layout: MessageLayout) -> int:
    if threads is not None:
        if threads < 1:
            raise KernelError(f"threads={threads}")
        return threads
    return min(torch.get_num_threads(), 1 + layout.rows * layout.cols // VALUES_A_THREAD)


def _check_matrix(name: str, values: torch.Tensor, cols: int) -> None:
    dtype_code(values.dtype)
    if values.dim() != 2 or values.shape[1] != cols:
        raise KernelError(f"{name} has shape {tuple(values.shape)}, expected [rows, {cols}]")


def _check_index(name: str, index: torch.Tensor | None, rows: int, device: torch.device) -> None:
    if index is None:
        return
    if index.dtype != torch.int64 or index.shape != (rows,) or not index.is_contiguous() or index.device != device:
        raise KernelError(
            f"{name} is {index.dtype} {tuple(index.shape)} on {index.device}",
            remedy=f"pass contiguous int64 [{rows}] on {device}",
        )


def _check_state(name: str, state: torch.Tensor | None, layout: MessageLayout, device: torch.device) -> None:
    if state is None:
        return
    wanted = (layout.rows, layout.cols)
    if state.dtype != torch.float32 or state.shape != wanted or not state.is_contiguous() or state.device != device:
        raise KernelError(
            f"{name} is {state.dtype} {tuple(state.shape)} on {state.device}",
            remedy=f"pass contiguous float32 {list(wanted)} on {device}",
        )


def _check_buffer(buffer: torch.Tensor, layout: MessageLayout, device: torch.device) -> None:
    size = layout.buffer_bytes
    if buffer.dtype != torch.uint8 or buffer.shape != (size,) or not buffer.is_contiguous() or buffer.device != device:
        raise KernelError(
            f"the messages' buffer is {buffer.dtype} {tuple(buffer.shape)} on {buffer.device}",
            remedy=f"pass contiguous uint8 [{size}] on {device}",
        )
