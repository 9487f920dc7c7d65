"""Dropout keyed by global rows, in one sweep over the entries: neither the mask nor a copy of it is kept.

:func:`sylvie_fx.ir.ops.keyed_dropout` specifies the mask and serves where the compiled kernel does not.
"""

# torch leaves Function.apply untyped.
# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sylvie_fx.ir import ops


@dataclass(frozen=True, eq=False)
class Drop:
    """A dropout that an operator draws itself.

    Attributes:
        keys: int64 ``[rows]``, global row indices.
        p: Probability of dropping an entry, below 1.
        key: As for :func:`keyed_dropout`.
    """

    keys: Tensor
    p: float
    key: int

    @property
    def scale(self) -> float:
        """The factor of what stays."""
        return 1.0 / (1.0 - self.p)

    @property
    def threshold(self) -> int:
        """Entries whose number is below go; see :func:`sylvie_fx.ir.ops.keep_mask`."""
        return min(round(self.p * 4294967296.0), 0xFFFFFFFF)

    def mask(self, columns: int) -> Tensor:
        """bool ``[rows, columns]``: which entries stay."""
        return ops.keep_mask(self.keys, columns, self.p, self.key)


class _Call(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p), ("gradient", ctypes.c_void_p), ("out", ctypes.c_void_p), ("keys", ctypes.c_void_p),
        ("rows", ctypes.c_int64), ("columns", ctypes.c_int64), ("key", ctypes.c_uint64), ("scale", ctypes.c_double),
        ("threshold", ctypes.c_uint32), ("is_double", ctypes.c_int32), ("threads", ctypes.c_int32),
        ("relu", ctypes.c_int32),
    )  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where it was not built."""
    paths = (Path(__file__).parent / f"_dropout{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((ctypes.CDLL(str(path)) for path in paths if path.exists()), None)


def keyed_dropout(x: Tensor, keys: Tensor, p: float, key: int, dim: int = 0, relu: bool = False) -> Tensor:
    """As :func:`sylvie_fx.ir.ops.keyed_dropout`, bit by bit.

    The backward pass draws the mask anew; behind a ReLU it reads from the result what stayed, and gives zero elsewhere,
    whatever the gradient is there.

    Args:
        x: ``[..., rows, ...]``, rows along ``dim``.
        keys: int64 ``[rows]``, global row indices.
        p: Probability of dropping an entry.
        key: Any int of 64 bits; derived from seed, step and call site.
        dim: The dimension that carries the rows.
        relu: Whether negative entries are zero first.
    """
    native = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and x.dim() > 0 and p < 1.0
    if not native or library() is None:
        return ops.keyed_dropout(x, keys, p, key, dim, relu)
    if relu:
        return _ReluDropout.apply(x.movedim(dim, 0), keys, p, key).movedim(0, dim)
    return _Dropout.apply(x.movedim(dim, 0), keys, p, key).movedim(0, dim)


def _run(x: Tensor, keys: Tensor, drop: Drop, relu: bool = False, gradient: Tensor | None = None) -> Tensor:
    """One sweep; with a gradient, x is what the forward pass gave."""
    x, keys = x.contiguous(), keys.contiguous()
    gradient = None if gradient is None else gradient.contiguous()
    out = torch.empty_like(x)
    call = _Call(
        x.data_ptr(), None if gradient is None else gradient.data_ptr(), out.data_ptr(), keys.data_ptr(), len(x),
        x.numel() // max(len(x), 1), drop.key & 0xFFFFFFFFFFFFFFFF, drop.scale, drop.threshold,
        x.dtype == torch.float64, torch.get_num_threads(), relu,
    )  # fmt: skip
    loaded = library()
    assert loaded is not None
    loaded.sylvie_dropout(ctypes.byref(call))
    return out


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, p: float, key: int) -> Tensor:
        ctx.keys, ctx.p, ctx.key = keys, p, key
        return _run(x, keys, Drop(keys, p, key))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Dropout.apply(gradient, ctx.keys, ctx.p, ctx.key), None, None, None


class _ReluDropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, p: float, key: int) -> Tensor:
        ctx.drop = Drop(keys, p, key)
        result = _run(x, keys, ctx.drop, relu=True)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (result,) = ctx.saved_tensors
        return _ReluDropoutGradient.apply(gradient, result.detach(), ctx.drop), None, None, None


class _ReluDropoutGradient(Function):
    """Linear in the gradient, and so its own derivative."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, result: Tensor, drop: Drop) -> Tensor:
        ctx.drop = drop
        ctx.save_for_backward(result)
        return _run(result, drop.keys, drop, gradient=gradient)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (result,) = ctx.saved_tensors
        return _ReluDropoutGradient.apply(gradient, result, ctx.drop), None, None
