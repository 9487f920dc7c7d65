"""What an implementation of the codec is called with: arguments that codec.py has checked, all messages of an exchange."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sylvie_fx.kernels.wire import MessageLayout


@dataclass(frozen=True, eq=False)
class Encoding:
    """Rows to messages.

    Attributes:
        x: float32 ``[n, cols]`` (at 32 bits any dtype of the codec).
        rows: int64 ``[layout.rows]``, the rows of ``x`` to send, peer after peer; None for all in order.
        keys: int64 ``[layout.rows]``, what keys their randomness; may be None for nearest rounding.
        layout: Where each message lies.
        stream: From :func:`~sylvie_fx.kernels.hashing.stream_word`.
        step: Goes into the headers.
        buffer: uint8 ``[layout.buffer_bytes]``, written.
        state: float32 ``[layout.rows, cols]``, updated in place: the last reconstruction (difference) or the residual
            (feedback).
        threads: Of the C++ kernel.
    """

    x: torch.Tensor
    rows: torch.Tensor | None
    keys: torch.Tensor | None
    layout: MessageLayout
    stream: int
    step: int
    buffer: torch.Tensor
    state: torch.Tensor | None
    threads: int = 1


@dataclass(frozen=True, eq=False)
class Decoding:
    """Messages to rows.

    Attributes:
        buffer: uint8 ``[layout.buffer_bytes]``.
        layout: Where each message lies.
        out: float32 ``[n, cols]`` (at 32 bits the layout's dtype), written.
        index: int64 ``[layout.rows]``, the row of ``out`` for each row of the messages, no row twice within one message;
            None for the rows in order.
        accumulate: Whether to add to ``out`` (message after message, in order) instead of writing.
        state: float32 ``[layout.rows, cols]``, the last reconstruction, of difference coding; updated in place.
        average: float32 ``[layout.rows, cols]``, the exponential average of what arrives; updated in place.
        weight: Of the new values in the average, in (0, 1].
        keys: int64 ``[layout.rows]``, what keyed the randomness of the rows; needed for dithered and rotated rounding alone.
        stream: As in coding; likewise.
        step: The step that the messages must be of, where the kernel has to see to it (CUDA); None for any.
        threads: Of the C++ kernel.
    """

    buffer: torch.Tensor
    layout: MessageLayout
    out: torch.Tensor
    index: torch.Tensor | None
    accumulate: bool
    state: torch.Tensor | None
    average: torch.Tensor | None
    weight: float
    keys: torch.Tensor | None = None
    stream: int = 0
    step: int | None = None
    threads: int = 1
