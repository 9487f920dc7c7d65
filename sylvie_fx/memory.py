"""The memory behind a NodeTensor: what is known of its rows, and whether a write went past that knowledge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.ir.written import stamp
from sylvie_fx.leaves import Sharding


@dataclass(eq=False)
class Family:
    """Tensors that would be views of one memory on one device, and have memories of their own here.

    Attributes:
        writes: Writes into any of them.
        last: What wrote last, and where.
    """

    writes: int = 0
    last: str = ""


class Memory:
    """This rank's rows in memory and what they are rows of; ``detach()`` and ``.data`` share it, as they share the rows.

    A tensor that is part of the graph's structure has its rows twice: on this rank, and in the whole that prologues
    read. A write through the tensor reaches both. One through ``.local()`` or a view reaches the rows alone: torch's
    version counter, which views share, tells so at the next use.

    Args:
        rows: This rank's rows.
        sharding: What they are rows of.
    """

    def __init__(self, rows: Tensor, sharding: Sharding) -> None:
        self._family: Family | None = None
        self._writes, self._key = 0, None
        self._note(rows, sharding)

    def _note(self, rows: Tensor, sharding: Sharding) -> None:
        self.sharding = sharding
        self._versions = self._now(rows)

    def _now(self, rows: Tensor) -> tuple[int | str, int | str]:
        whole = self.sharding.whole
        return (0, 0) if whole is None else (stamp(rows), stamp(whole))

    def join(self, base: Memory, key: Any = None) -> None:
        """These rows are a copy of what would be a view of ``base``: a write into one is to be missed in the other.

        Args:
            base: What would be viewed.
            key: What it was indexed with, where that is how the view was made.
        """
        self._key = key
        base._family = self._family = base._family or Family()
        self._writes = base._writes = self._family.writes

    def write(self, rows: Tensor, sharding: Sharding, by: str) -> None:
        """Note a write through the tensor itself.

        Args:
            rows: The rows after it.
            sharding: What is known of them after it.
            by: What wrote, and where.
        """
        self._note(rows, sharding)
        if self._family is not None:
            self._family.writes += 1
            self._family.last = by
            self._writes = self._family.writes

    def write_back(self, view: Memory, key: Any) -> None:
        """``y[key] = view``, as the second half of ``y[key] += 1``: what the view was written is missed no more."""
        family = self._family
        one_view = family is not None and view._family is family and view._key is not None and view._key == key
        if one_view and view._writes == family.writes == self._writes + 1:  # type: ignore[union-attr]
            self._writes = view._writes

    def missed(self, rows: Tensor) -> str:
        """What wrote past these rows, for an error; empty where nothing did."""
        if self._family is not None and self._writes != self._family.writes:
            return f"through a view of the same memory ({self._family.last})"
        learns = rows.requires_grad and rows.dtype.is_floating_point  # its whole is not read then
        before, now = self._versions, self._now(rows)
        if learns or before == now:
            return ""
        return (
            "through .local() or a view of it" if before[0] != now[0] else "in the tensor that model.shard() was given"
        )


def is_copy(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], layout: Tensor) -> bool:
    """Whether what may copy (``reshape``, ``contiguous``) does so for the strides of its first argument.

    Args:
        function: A function of one tensor, whose result may lie in the tensor's memory.
        args: Its arguments; the first is the tensor.
        kwargs: Its named arguments.
        layout: A tensor of the argument's shape and strides.
    """
    with torch.no_grad():
        source = torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device="meta")
        try:
            result = function(source, *args[1:], **kwargs)
        except (RuntimeError, IndexError, TypeError):  # it reads other tensors, or the size of all rows
            return False
        return isinstance(result, Tensor) and result is not source and result._base is not source


def place_of(value: Any) -> int:
    """Where a tensor lies; zero for one without entries, and for anything else."""
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0
