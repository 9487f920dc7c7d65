"""What the capture does to every torch function: it notes the user's line, and keeps sizes symbols.

Some functions read sizes as plain numbers in their C++ definition; they run as an equal composition of others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.fx.traceback
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sylvie_fx.capture.own_gradients import DIFFERENTIATING, HOOKING, refuse_backward, refuse_hook
from sylvie_fx.ir.source import is_ours


class Spellings(TorchFunctionMode):
    """In force while a forward pass is captured.

    Args:
        after: Called after every function with the frames that called it, outermost first.
    """

    def __init__(self, after: Callable[[list[FrameType]], None] = lambda frames: None) -> None:
        super().__init__()
        self._after = after

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, or its composition."""
        if getattr(func, "__name__", "") in HOOKING:
            raise refuse_hook(func.__name__)
        if func in DIFFERENTIATING:  # before it writes gradients of stand-ins
            raise refuse_backward(func.__name__)
        frames = _frames()
        own = [f for f in frames if not is_ours(f.f_code.co_filename)]
        torch.fx.traceback.set_stack_trace([
            f'File "{f.f_code.co_filename}", line {f.f_lineno}, in {f.f_code.co_name}\n' for f in own
        ])  # fmt: skip
        try:
            result = _COMPOSED.get(func, func)(*args, **(kwargs or {}))
        finally:
            torch.fx.traceback.set_stack_trace([])
        self._after(frames)
        return result


def _frames() -> list[FrameType]:
    """The frames of the caller, outermost first."""
    frame: FrameType | None = sys._getframe(2)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    dim = dim % input.dim()
    sizes = zip(input.shape, indices.shape, strict=True)
    shape = [max(a, b, key=_not_one) if d != dim else None for d, (a, b) in enumerate(sizes)]
    wide = [
        [have if want is None else want for want, have in zip(shape, t.shape, strict=True)] for t in (input, indices)
    ]
    return input.expand(wide[0]).gather(dim, indices.expand(wide[1]))


def _not_one(size: Any) -> bool:
    return not (isinstance(size, int) and size == 1)


def _embedding_bag(input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
                   norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
                   per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
                   padding_idx: int | None = None) -> Tensor:  # fmt: skip
    if input.dim() != 2 or max_norm is not None or padding_idx is not None:
        return F.embedding_bag(input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse,
                               per_sample_weights, include_last_offset, padding_idx)  # fmt: skip
    rows = F.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    return rows.amax(1) if mode == "max" else getattr(rows, mode)(1)


def _dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(input - other, p)
    return length


def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    if input.dim() != 2 or fweights is not None or aweights is not None:
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    centred = input - input.mean(1, keepdim=True)
    return centred @ centred.t().conj() / (input.shape[1] - correction)


def _corrcoef(input: Tensor) -> Tensor:
    if input.dim() != 2:
        return torch.corrcoef(input)
    covariance = _cov(input)
    deviation = covariance.diagonal().sqrt()
    return (covariance / deviation[:, None] / deviation[None, :]).clamp(-1, 1)


_COMPOSED: dict[Any, Any] = {
    torch.take_along_dim: _take_along_dim,
    Tensor.take_along_dim: _take_along_dim,
    F.embedding_bag: _embedding_bag,
    torch.dist: _dist,
    Tensor.dist: _dist,
    torch.cov: _cov,
    Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    Tensor.corrcoef: _corrcoef,
    Tensor.data.__get__: Tensor.detach,  # type: ignore[attr-defined]
}
