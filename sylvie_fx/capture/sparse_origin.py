"""Where an index tensor comes from, remembered beside it while a model is captured.

``crow_indices()`` of a matrix, expanded again by the model, is the row index the matrix was made of: told so, the
program keeps one name for one index and one symbol for one edge count, instead of an unknown size that a
``repeat_interleave`` would bring in. The same holds for ``indices()[0]``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.capture.sparse_layout import Order, counts

_ATTRIBUTE = "_sylvie_origin"


@dataclass(frozen=True)
class IndexPair:
    """The tensor is ``stack([row, col])``, int64 ``[2, E]``."""

    row: Tensor
    col: Tensor
    order: Order


class Part(enum.Enum):
    """Which part of a compressed index a tensor is."""

    ALL = "pointers"
    STARTS = "pointers[:-1]"
    ENDS = "pointers[1:]"
    COUNTS = "pointers.diff()"


@dataclass(frozen=True)
class Pointers:
    """The tensor is (a part of) the compressed form of the sorted ``index`` over ``size`` rows."""

    index: Tensor
    size: int
    part: Part


@dataclass(frozen=True)
class Identity:
    """The tensor is the dense identity matrix of this size."""

    size: int


Origin = IndexPair | Pointers | Identity


def remember(tensor: Tensor, origin: Origin) -> Tensor:
    """Keep ``origin`` with ``tensor`` and return the tensor."""
    setattr(tensor, _ATTRIBUTE, origin)
    return tensor


def origin_of(value: object) -> Origin | None:
    """What is remembered about ``value``, if anything."""
    return getattr(value, _ATTRIBUTE, None) if isinstance(value, Tensor) else None


Call = Callable[..., Any]


def follow(func: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run ``func``, answering from the remembered origin where there is one, else handing the origin on.

    Returns:
        The result, or ``NotImplemented`` where the call has nothing to do with a remembered tensor.
    """
    name = getattr(func, "__name__", "")
    if name == "eye" and len(args) == 1:
        return remember(func(*args, **kwargs), Identity(args[0]))
    if name == "_convert_indices_from_coo_to_csr":
        from_index, size = args[0], args[1] if len(args) > 1 else kwargs["size"]
        return compressed(from_index, size)
    if name == "repeat_interleave" and len(args) > 1 and _part(args[1]) is Part.COUNTS:
        return args[0].index_select(kwargs.get("dim") or 0, origin_of(args[1]).index)  # type: ignore[union-attr]
    origin = origin_of(args[0]) if args else None
    if origin is None:
        return NotImplemented
    if name in ("detach", "long", "contiguous"):
        return remember(func(*args, **kwargs), origin)
    if isinstance(origin, IndexPair):
        return _follow_pair(name, origin, args)
    if isinstance(origin, Pointers):
        return _follow_pointers(name, func, origin, args, kwargs)
    return NotImplemented


def compressed(index: Tensor, size: int) -> Tensor:
    """The remembered pointers, int64 ``[size + 1]``, of a sorted ``index``, int64 ``[E]``."""
    start = index.new_zeros(1)
    return remember(torch.cat([start, counts(index, size).cumsum(0)]), Pointers(index, size, Part.ALL))


def expanded(pointers: Tensor, size: int, entries: int) -> Tensor:
    """The sorted index, int64 ``[entries]``, whose compressed form ``pointers``, ``[size + 1]``, is."""
    origin = origin_of(pointers)
    if isinstance(origin, Pointers) and origin.part is Part.ALL:
        return origin.index
    rows = torch.arange(size, device=pointers.device)
    return rows.repeat_interleave(pointers.diff(), output_size=entries)


def _follow_pair(name: str, origin: IndexPair, args: tuple[Any, ...]) -> Any:
    halves = (origin.row, origin.col)
    if name == "__getitem__" and isinstance(args[1], int) and not isinstance(args[1], bool):
        return halves[args[1]]
    if name == "unbind" and args[1:] in ((), (0,)):
        return halves
    if name == "__iter__":
        return iter(halves)
    return NotImplemented


def _follow_pointers(name: str, func: Call, origin: Pointers, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    def part(kind: Part) -> Pointers:
        return Pointers(origin.index, origin.size, kind)

    if name == "diff" and origin.part is Part.ALL and len(args) == 1:
        return remember(counts(origin.index, origin.size), part(Part.COUNTS))
    if name == "__getitem__" and origin.part is Part.ALL and isinstance(args[1], slice):
        if args[1] == slice(1, None):
            return remember(func(*args), part(Part.ENDS))
        if args[1] == slice(None, -1):
            return remember(func(*args), part(Part.STARTS))
    if name == "sub" and origin.part is Part.ENDS and len(args) == 2 and not kwargs:
        other = origin_of(args[1])
        if isinstance(other, Pointers) and other.part is Part.STARTS and other.index is origin.index:
            return remember(counts(origin.index, origin.size), part(Part.COUNTS))
    return NotImplemented


def _part(value: object) -> Part | None:
    origin = origin_of(value)
    return origin.part if isinstance(origin, Pointers) else None
