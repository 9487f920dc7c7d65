"""Exchanges of rows between ranks, with their adjoints as backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.graphs.layout import ExchangePlan
from sylvie_fx.runtime.timeline import Recorder
from sylvie_fx.runtime.transport import Transport


@dataclass(frozen=True)
class Link:
    """One exchange of one machine: the plan on its device, the transport, how errors call it, and what records it."""

    plan: ExchangePlan
    send_rows: tuple[Tensor, ...]
    transport: Transport
    label: str
    recorder: Recorder = field(default_factory=Recorder)

    @staticmethod
    def make(
        plan: ExchangePlan, transport: Transport, label: str, device: torch.device, recorder: Recorder | None = None
    ) -> Link:
        """A link whose index tensors live on the device of the rows."""
        return Link(plan, tuple(s.to(device) for s in plan.send_rows), transport, label, recorder or Recorder())


def send_halo(rows: Tensor, link: Link, label: str) -> Tensor:
    """Own rows to own plus halo rows.

    Args:
        rows: ``[own, ...]``, contiguous in the first dimension.
        link: The exchange.
        label: Names the exchange and step in errors.

    Returns:
        ``[own + halo, ...]``.
    """
    plan = link.plan
    sends = [rows.index_select(0, s) if len(s) else None for s in link.send_rows]
    out = rows.new_empty((plan.own + plan.halo, *rows.shape[1:]))
    out[: plan.own] = rows
    receives = list(out[plan.own :].split(list(plan.receive_counts)))
    link.transport.exchange(sends, receives, label).wait()
    return out


def return_halo(rows: Tensor, link: Link, label: str) -> Tensor:
    """Own plus halo rows to own rows: every halo row goes to its owner and is added there, in the order of ranks.

    Args:
        rows: ``[own + halo, ...]``.
        link: The exchange.
        label: Names the exchange and step in errors.

    Returns:
        ``[own, ...]``.
    """
    plan = link.plan
    sends: list[Tensor | None] = [
        part.contiguous() if len(part) else None for part in rows[plan.own :].split(list(plan.receive_counts))
    ]
    receives = [rows.new_empty((len(s), *rows.shape[1:])) if len(s) else None for s in link.send_rows]
    link.transport.exchange(sends, receives, label).wait()
    out = rows[: plan.own].clone()
    for index, part in zip(link.send_rows, receives, strict=True):
        if part is not None:
            out.index_add_(0, index, part)
    return out


def apply(function: Any, *arguments: Any) -> Any:
    """``function.apply``, which PyTorch leaves untyped."""
    return function.apply(*arguments)


class HaloExchange(torch.autograd.Function):
    """``[own, ...]`` to ``[own + halo, ...]``; backward returns the halo's gradients to their owners."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, link: Link) -> Tensor:
        """Bring the halo rows."""
        ctx.link = link
        return send_halo(rows, link, f"{link.label} forward")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the halo rows' gradients."""
        return return_halo(gradient, ctx.link, f"{ctx.link.label} backward"), None


class HaloReduce(torch.autograd.Function):
    """``[own + halo, ...]`` of partial sums to ``[own, ...]``; backward brings the halo rows' gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, link: Link) -> Tensor:
        """Add partial sums at their owners."""
        ctx.link = link
        return return_halo(rows, link, f"{link.label} forward")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Bring the gradients of halo rows."""
        return send_halo(gradient.contiguous(), ctx.link, f"{ctx.link.label} backward"), None


class AllReduce(torch.autograd.Function):
    """Sums over ranks, in one message for each dtype.

    Every rank's gradient is a term, so that backward is a sum over ranks as well; but where ``shared`` says so every rank
    has the whole gradient, and backward sends nothing.
    """

    @staticmethod
    def forward(ctx: Any, transport: Transport, label: str, shared: bool, *values: Tensor) -> tuple[Tensor, ...]:
        """Sum over ranks."""
        ctx.transport, ctx.label, ctx.shared = transport, label, shared
        ctx.set_materialize_grads(False)
        if len(values) == 1:
            return (transport.all_reduce(values[0], f"{label} forward"),)
        # Not views of one message: a result may be written to.
        return tuple(v.clone() for v in reduce_bucket(values, transport, f"{label} forward") if v is not None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Sum the terms of the gradients."""
        if ctx.shared:
            return (None, None, None, *gradients)
        return (None, None, None, *reduce_bucket(gradients, ctx.transport, f"{ctx.label} backward"))


class ReplicatedOutput(torch.autograd.Function):
    """Identity; backward lets rank 0 alone carry the gradient, since the terms of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, rank: int) -> Tensor:
        """The value itself."""
        ctx.rank = rank
        return value.view_as(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient on rank 0, zero elsewhere."""
        return (gradient if ctx.rank == 0 else torch.zeros_like(gradient)), None


class SyncGradients(torch.autograd.Function):
    """Identity on parameters; backward adds the terms of their gradients over ranks, in one bucket for each dtype."""

    @staticmethod
    def forward(ctx: Any, transport: Transport, label: str, *parameters: Tensor) -> tuple[Tensor, ...]:
        """The parameters themselves."""
        ctx.transport, ctx.label = transport, label
        ctx.set_materialize_grads(False)
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """One all_reduce for each dtype; a parameter that took no part keeps no gradient."""
        return (None, None, *reduce_bucket(gradients, ctx.transport, f"{ctx.label} gradients"))


def reduce_bucket(gradients: Sequence[Tensor | None], transport: Transport, label: str) -> list[Tensor | None]:
    """Sum tensors over ranks, flattened into one message for each dtype."""
    return start_bucket(gradients, transport, label)()


def start_bucket(
    gradients: Sequence[Tensor | None], transport: Transport, label: str
) -> Callable[[], list[Tensor | None]]:
    """Begin what :func:`reduce_bucket` does; the returned function ends it."""
    begun = []
    for dtype in dict.fromkeys(g.dtype for g in gradients if g is not None):
        at = [i for i, g in enumerate(gradients) if g is not None and g.dtype == dtype]
        shapes = [g.shape for g in gradients if g is not None and g.dtype == dtype]
        flat = torch.cat([g.reshape(-1) for g in gradients if g is not None and g.dtype == dtype])
        begun.append((at, shapes, transport.start_all_reduce(flat, label)))

    def finish() -> list[Tensor | None]:
        results = list(gradients)
        for at, shapes, total in begun:
            for i, shape, part in zip(at, shapes, total().split([shape.numel() for shape in shapes]), strict=True):
                results[i] = part.view(shape)
        return results

    return finish
