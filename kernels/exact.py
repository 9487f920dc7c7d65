"""The codec at 32 bits: the values themselves in their own dtype, by torch alone, on any device.

A message at 32 bits is a refresh for the variants with state: the reconstruction of both ends becomes the values
sent, and a feedback residual becomes zero.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from sylvie_fx.kernels.calls import Decoding, Encoding
from sylvie_fx.kernels.reference import smooth
from sylvie_fx.kernels.wire import HEADER_BYTES, MessageLayout, Variant


def _values(message: torch.Tensor, layout: MessageLayout, count: int) -> torch.Tensor:
    """The body of a message as ``[count, cols]`` of the layout's dtype: a view where the alignment allows."""
    body = message[HEADER_BYTES:]
    if body.data_ptr() % layout.dtype.itemsize:
        body = body.clone()
    return body.view(layout.dtype).view(count, layout.cols)


def _reset(state: torch.Tensor, values: torch.Tensor) -> None:
    """Make finite values the reconstruction; others restart at 0."""
    state.copy_(torch.where(values.isfinite(), values, 0.0))


def encode_messages(call: Encoding) -> None:
    """Write the messages of one exchange, of any dtype."""
    layout, buffer, state = call.layout, call.buffer, call.state
    source = call.x if call.rows is None else call.x.index_select(0, call.rows)
    starts = layout.row_starts
    for message, head, (start, stop) in zip(
        layout.views(buffer), layout.headers(call.step), pairwise(starts), strict=True
    ):
        message[:HEADER_BYTES] = torch.tensor(list(head), dtype=torch.uint8).to(buffer.device, non_blocking=True)
        part = source[start:stop].contiguous()
        message[HEADER_BYTES:] = part.view(torch.uint8).flatten() if part.numel() else message.new_empty(0)
    if state is not None:
        if layout.spec.variant is Variant.DIFFERENCE:
            _reset(state, source.to(torch.float32))
        else:
            state.zero_()


def decode_messages(call: Decoding) -> None:
    """Read the messages of one exchange, of any dtype."""
    layout, out, index = call.layout, call.out, call.index
    starts = layout.row_starts
    for message, (start, stop) in zip(layout.views(call.buffer), pairwise(starts), strict=True):
        values = _values(message, layout, stop - start)
        if call.state is not None:
            _reset(call.state[start:stop], values.to(torch.float32))
        if call.average is not None:
            values = smooth(call.average[start:stop], values.to(torch.float32), call.weight)
        where = torch.arange(start, stop, device=out.device) if index is None else index[start:stop]
        put(out, where, values, call.accumulate)


def put(out: torch.Tensor, where: torch.Tensor, values: torch.Tensor, accumulate: bool) -> None:
    """Write ``values`` to, or add them to, the rows ``where`` of ``out`` of any floating dtype.

    A finite value stays finite: it saturates at the largest of the dtype of ``out``.
    """
    limit = torch.finfo(out.dtype).max
    if torch.finfo(values.dtype).max > limit:
        values = torch.where(values.isfinite(), values.clamp(-limit, limit), values)
    if accumulate:
        out.index_add_(0, where, values.to(out.dtype))
    else:
        out.index_copy_(0, where, values.to(out.dtype))
