"""Exchanges whose rows travel through the codec (Sylvie's Low-bit Module), forward and backward apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.ir.coding import Coding
from sylvie_fx.runtime.channel import Channel, keys_arriving, keys_sent
from sylvie_fx.runtime.exchange import Link


@dataclass(eq=False)
class CodedLink:
    """An exchange site with its channels: towards the halo, and back."""

    link: Link
    out: Channel
    back: Channel
    seed: int

    @staticmethod
    def make(link: Link, own_ids: Tensor, outward: Coding, backward: Coding, seed: int) -> CodedLink:
        """Channels for a link.

        Args:
            link: The exchange.
            own_ids: int64: global numbers of this rank's rows.
            outward: Coding of rows that go to the halo.
            backward: Coding of what comes back for them.
            seed: Of the site.
        """
        plan, device = link.plan, own_ids.device
        rows = torch.cat(link.send_rows) if link.send_rows else own_ids.new_empty(0)
        halo_rows = torch.arange(plan.own, plan.own + plan.halo, device=device)
        halo_ids = plan.halo_ids.to(device)
        sent = tuple(len(s) for s in link.send_rows)
        transport, here = link.transport, own_ids[rows]
        towards = Channel(
            outward, rows, keys_sent(here, transport), sent, plan.receive_counts,
            keys_arriving(halo_ids, plan.receive_counts), halo_rows,
        )  # fmt: skip
        returning = Channel(
            backward, halo_rows, keys_sent(halo_ids, transport), plan.receive_counts, sent,
            keys_arriving(here, sent), rows,
        )  # fmt: skip
        return CodedLink(link, towards, returning, seed)

    def bring(self, rows: Tensor, label: str, step: int) -> Tensor:
        """``[own, ...]`` to ``[own + halo, ...]``."""
        plan = self.link.plan
        flat = rows.reshape(plan.own, _columns(rows))
        out = flat.new_empty((plan.own + plan.halo, flat.shape[1]))
        out[: plan.own] = flat
        self.out.transfer(flat, out, self.link, label, step, self.seed, add=False)
        return out.view(plan.own + plan.halo, *rows.shape[1:])

    def give_back(self, rows: Tensor, label: str, step: int) -> Tensor:
        """``[own + halo, ...]`` to ``[own, ...]``: halo rows are added at their owners."""
        plan = self.link.plan
        flat = rows.reshape(plan.own + plan.halo, _columns(rows))
        out = flat[: plan.own].clone()
        self.back.transfer(flat, out, self.link, label, step, self.seed + 1, add=True)
        return out.view(plan.own, *rows.shape[1:])


def _columns(rows: Tensor) -> int:
    columns = 1
    for size in rows.shape[1:]:
        columns *= size
    return columns


class CodedHaloExchange(torch.autograd.Function):
    """As HaloExchange, with rows and gradients coded."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, site: CodedLink, step: int) -> Tensor:
        """Bring the halo rows."""
        ctx.site, ctx.step = site, step
        return site.bring(rows, f"{site.link.label} forward", step)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the halo rows' gradients."""
        return (
            ctx.site.give_back(gradient.contiguous(), f"{ctx.site.link.label} backward", ctx.step),
            None,
            None,
        )


class CodedHaloReduce(torch.autograd.Function):
    """As HaloReduce, with partial sums and gradients coded."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, site: CodedLink, step: int) -> Tensor:
        """Add partial sums at their owners."""
        ctx.site, ctx.step = site, step
        return site.give_back(rows, f"{site.link.label} forward", step)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Bring the gradients of halo rows."""
        return (
            ctx.site.bring(gradient.contiguous(), f"{ctx.site.link.label} backward", ctx.step),
            None,
            None,
        )
