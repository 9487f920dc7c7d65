"""Products of the rows of heads with a few vectors, as additive attention scores nodes: one sweep, and one for all gradients.

:func:`sylvie_fx.ir.ops.row_dots` specifies it, and serves where the compiled kernel does not.
"""

# torch leaves Function.apply and once_differentiable untyped.
# mypy: disable-error-code="no-untyped-call,no-any-return,untyped-decorator"

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sylvie_fx.ir import ops


class _Call(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p), ("vectors", ctypes.c_void_p), ("gradient", ctypes.c_void_p), ("out", ctypes.c_void_p),
        ("of_vectors", ctypes.c_void_p), ("rows", ctypes.c_int64), ("heads", ctypes.c_int64), ("dim", ctypes.c_int64),
        ("count", ctypes.c_int64), ("is_double", ctypes.c_int32), ("threads", ctypes.c_int32),
    )  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where it was not built."""
    paths = (Path(__file__).parent / f"_row_dots{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((ctypes.CDLL(str(path)) for path in paths if path.exists()), None)


def row_dots(x: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """``(x * vector).sum(-1)`` for each of the vectors.

    Args:
        x: ``[rows, H, D]``.
        vectors: Each ``[H, D]`` or ``[1, H, D]``, of the dtype of x.

    Returns:
        ``[len(vectors), rows, H]``; can be differentiated once.
    """
    native = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    if not native or library() is None:
        return ops.row_dots(x, list(vectors))
    return _RowDots.apply(x, torch.stack([v.reshape(x.shape[1:]) for v in vectors]))


def _launch(x: Tensor, vectors: Tensor, gradient: Tensor | None, out: Tensor | None, of_vectors: Tensor | None) -> None:
    addresses = (None if t is None else t.data_ptr() for t in (x, vectors, gradient, out, of_vectors))
    call = _Call(*addresses, *x.shape, len(vectors), x.dtype == torch.float64, torch.get_num_threads())
    loaded = library()
    assert loaded is not None
    loaded.sylvie_row_dots(ctypes.byref(call))


class _RowDots(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vectors: Tensor) -> Tensor:
        x, vectors = x.contiguous(), vectors.contiguous()
        ctx.save_for_backward(x, vectors)
        out = x.new_empty(len(vectors), *x.shape[:2])
        _launch(x, vectors, None, out, None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, vectors = ctx.saved_tensors
        make = torch.empty_like if gradient.numel() else torch.zeros_like
        of_x, of_vectors = (
            make(t) if needed else None for t, needed in zip((x, vectors), ctx.needs_input_grad, strict=True)
        )
        if gradient.numel():
            _launch(x, vectors, gradient.contiguous(), of_x, of_vectors)
        return of_x, of_vectors
