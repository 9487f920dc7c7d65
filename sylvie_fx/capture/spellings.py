"""Functions whose C++ definition reads sizes as plain numbers, written with functions that keep them symbols."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Spellings(TorchFunctionMode):
    """While it is active, such functions run as an equal composition of others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, or its composition."""
        return _COMPOSED.get(func, func)(*args, **(kwargs or {}))


def _take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    dim = dim % input.dim()
    shape = [max(a, b, key=_not_one) if d != dim else None for d, (a, b) in enumerate(zip(input.shape, indices.shape, strict=True))]
    wide = [[have if want is None else want for want, have in zip(shape, t.shape, strict=True)] for t in (input, indices)]
    return input.expand(wide[0]).gather(dim, indices.expand(wide[1]))


def _not_one(size: Any) -> bool:
    return not (isinstance(size, int) and size == 1)


_COMPOSED: dict[Any, Any] = {torch.take_along_dim: _take_along_dim, Tensor.take_along_dim: _take_along_dim}
