"""Collectives built from exchanges: every message has one known peer, so every failure has a name."""

from __future__ import annotations

import itertools
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.ir.errors import OptionError
from sylvie_fx.runtime.transport import Pending, ReduceOp

#: Below this many bytes everybody sends everything to everybody: one round trip instead of two.
_ONE_ROUND_BYTES = 32 * 1024


class Collectives(ABC):
    """Mixin that gives a transport its collectives; they sum in rank order, so all transports give the same bits."""

    rank: int
    size: int
    #: Where the tensors of barriers and pickled objects live.
    control_device: torch.device = torch.device("cpu")

    @abstractmethod
    def exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], label: str) -> Pending:
        """See Transport.exchange."""

    def all_reduce(self, tensor: Tensor, label: str, op: ReduceOp = "sum") -> Tensor:
        """See Transport.all_reduce.

        Half-precision sums are accumulated in float32 and rounded once.

        Args:
            tensor: Same shape, dtype and device kind on all ranks; not changed.
            label: Names the reduction in errors.
            op: How values combine.

        Raises:
            OptionError: An unknown op, or a sum of booleans.
            CommError: A peer failed.
        """
        return self.start_all_reduce(tensor, label, op)()

    def start_all_reduce(self, tensor: Tensor, label: str, op: ReduceOp = "sum") -> Callable[[], Tensor]:
        """See Transport.start_all_reduce."""
        if op not in ("sum", "max", "min"):
            raise OptionError(f"all_reduce takes sum, max or min, not {op!r}")
        if tensor.dtype == torch.bool and op == "sum":
            raise OptionError("a sum over ranks of booleans is not defined", remedy="convert to an integer type first")
        flat = tensor.detach().contiguous().reshape(-1)
        if self.size == 1 or flat.numel() == 0:
            alone = tensor.detach().clone()
            return lambda: alone
        if flat.numel() * flat.element_size() > _ONE_ROUND_BYTES:
            total = self._two_rounds(flat, label, op)
            return lambda: total().reshape(tensor.shape)
        copies = [flat if peer == self.rank else torch.empty_like(flat) for peer in range(self.size)]
        pending = self.exchange([flat] * self.size, copies, label)

        def finish() -> Tensor:
            pending.wait()
            return _combine(copies, op).reshape(tensor.shape)

        return finish

    def _two_rounds(self, flat: Tensor, label: str, op: ReduceOp) -> Callable[[], Tensor]:
        """Each rank combines one chunk of everybody's, then hands it to everybody; the first round starts at once."""
        bounds = [flat.numel() * peer // self.size for peer in range(self.size + 1)]
        chunks = [flat[low:high] for low, high in itertools.pairwise(bounds)]
        own = chunks[self.rank]
        copies = [own if peer == self.rank else torch.empty_like(own) for peer in range(self.size)]
        pending = self.exchange(chunks, copies, f"{label} (combine)")

        def finish() -> Tensor:
            pending.wait()
            total = torch.empty_like(flat)
            parts = [total[low:high] for low, high in itertools.pairwise(bounds)]
            parts[self.rank].copy_(_combine(copies, op))
            self.exchange([parts[self.rank]] * self.size, parts, f"{label} (spread)").wait()
            return total

        return finish

    def all_gather_object(self, value: Any, label: str) -> list[Any]:
        """See Transport.all_gather_object."""
        raw = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.control_device)
        size = torch.tensor([raw.numel()], dtype=torch.int64, device=self.control_device)
        sizes = [torch.empty_like(size) for _ in range(self.size)]
        self.exchange([size] * self.size, sizes, f"{label} (sizes)").wait()
        sizes[self.rank] = size
        payloads = [torch.empty(int(count), dtype=torch.uint8, device=self.control_device) for count in sizes]
        self.exchange([raw] * self.size, payloads, label).wait()
        payloads[self.rank] = raw
        return [pickle.loads(payload.cpu().numpy().tobytes()) for payload in payloads]

    def barrier(self, label: str) -> None:
        """See Transport.barrier."""
        token = torch.zeros(1, dtype=torch.uint8, device=self.control_device)
        self.exchange([token] * self.size, [torch.empty_like(token) for _ in range(self.size)], label).wait()


def _combine(copies: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Fold equal-shaped tensors from left to right."""
    half = op == "sum" and copies[0].dtype in (torch.float16, torch.bfloat16)
    total = copies[0].to(torch.float32) if half else copies[0].clone()
    for copy in copies[1:]:
        if op == "sum":
            total += copy
        elif op == "max":
            total = torch.maximum(total, copy)
        else:
            total = torch.minimum(total, copy)
    return total.to(copies[0].dtype)
