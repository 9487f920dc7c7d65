"""Gradients of parameters, summed over ranks in buckets while backward goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.runtime.exchange import start_bucket
from sylvie_fx.runtime.lanes import Courier, Handle
from sylvie_fx.runtime.transport import Transport


@dataclass(eq=False)
class Reduction:
    """The buckets of one forward pass.

    Attributes:
        transport: How ranks talk.
        courier: Where the sums are formed.
        label: Names them in errors.
        pending: Buckets that are under way: positions among the parameters, and the sums.
    """

    transport: Transport
    courier: Courier
    label: str
    pending: list[tuple[list[int], Handle[list[Tensor | None]]]] = field(default_factory=list)


class SyncStart(torch.autograd.Function):
    """Identity on the parameters of a bucket; backward starts to sum their gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, reduction: Reduction, positions: list[int], *parameters: Tensor) -> tuple[Tensor, ...]:
        """The parameters themselves."""
        ctx.reduction, ctx.positions = reduction, positions
        ctx.set_materialize_grads(False)
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Hand the bucket over; what is returned stands for the sums, which SyncFinish fills in."""
        reduction = ctx.reduction
        what = f"{reduction.label} bucket of parameters {ctx.positions}"
        handle = reduction.courier.sum(lambda: start_bucket(gradients, reduction.transport, what), what)
        reduction.pending.append((ctx.positions, handle))
        return (None, None, *gradients)


class SyncFinish(torch.autograd.Function):
    """Identity on all parameters; backward waits for the sums of their gradients."""

    @staticmethod
    def forward(ctx: Any, reduction: Reduction, *parameters: Tensor) -> tuple[Tensor, ...]:
        """The parameters themselves."""
        ctx.reduction = reduction
        ctx.set_materialize_grads(False)
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """The sums; a parameter that took no part keeps no gradient."""
        results: list[Tensor | None] = [None] * len(gradients)
        pending, ctx.reduction.pending = ctx.reduction.pending, []
        for positions, handle in pending:
            for position, total in zip(positions, handle.result(), strict=True):
                results[position] = total
        return (None, *results)
