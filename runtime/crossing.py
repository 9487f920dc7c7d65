"""Exchanges of a program in two halves, with gradients that travel back in two halves as well."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.ir.coding import EXACT, ExchangeCoding
from sylvie_fx.ir.pace import Pace
from sylvie_fx.runtime.carrier import Carrier, ExactCarrier
from sylvie_fx.runtime.channel import Channel, keys_arriving, keys_sent
from sylvie_fx.runtime.direction import Direction
from sylvie_fx.runtime.exchange import Link
from sylvie_fx.runtime.lanes import Courier


@dataclass(eq=False)
class Passage:
    """One forward pass through a crossing, and its backward pass.

    Attributes:
        forward: Number of the transfer to the halo.
        shape: Of a row.
        backward: Number of the transfer back; None until backward has sent the gradients of halo rows.
    """

    forward: int
    shape: torch.Size
    backward: int | None = None


@dataclass(eq=False)
class Crossing:
    """An exchange site on one rank: towards the halo, and back.

    Attributes:
        link: The exchange.
        out: Rows that go to the halo.
        back: Gradients of halo rows.
        places: int64: own rows that gradients are added to, peer after peer.
        passage: The pass that is under way, between its start and its wait.
        age: How old halo rows and their gradients are in the present step.
        smooth: Weight of the past in the running averages of both; None for none.
        alone: Whether the gradient of own rows comes from the inner edges alone: it is then new, and may be written to.
    """

    link: Link
    out: Direction
    back: Direction
    places: Tensor
    passage: Passage | None = None
    age: tuple[int, int] = (0, 0)
    smooth: tuple[float | None, float | None] = (None, None)
    alone: bool = False

    @staticmethod
    def make(
        link: Link,
        own_ids: Tensor,
        coding: ExchangeCoding,
        label: str,
        courier: Courier,
        seed: int,
        pace: Pace,
        line: bool = False,
    ) -> Crossing:
        """The crossing of a link.

        Args:
            link: The exchange.
            own_ids: int64: global numbers of this rank's rows.
            coding: How rows travel.
            label: Names the exchange in errors.
            courier: Where the work runs.
            seed: Of the site.
            pace: The ages that are never exceeded.
            line: Whether old rows are extrapolated.
        """
        plan, device = link.plan, own_ids.device
        rows = torch.cat(link.send_rows)
        sent = tuple(len(s) for s in link.send_rows)
        everything, halo_ids = torch.arange(plan.halo, device=device), plan.halo_ids.to(device)
        out: Carrier = ExactCarrier(rows, sent, plan.receive_counts, everything)
        back: Carrier = ExactCarrier(everything, plan.receive_counts, sent, rows)
        if coding.forward != EXACT:
            keys, arriving = keys_sent(own_ids[rows], link.transport), keys_arriving(halo_ids, plan.receive_counts)
            out = Channel(coding.forward, rows, keys, sent, plan.receive_counts, arriving, everything)
        if coding.backward != EXACT:
            keys, arriving = keys_sent(halo_ids, link.transport), keys_arriving(own_ids[rows], sent)
            back = Channel(coding.backward, None, keys, plan.receive_counts, sent, arriving, rows)
        return Crossing(
            link,
            Direction(out, link, f"{label} forward", courier, seed, pace.forward, line),
            Direction(back, link, f"{label} backward", courier, seed + 1, pace.backward, line),
            rows,
        )

    def channels(self) -> tuple[Channel, Channel]:
        """The channels of both directions.

        Raises:
            AssertionError: A direction is not coded.
        """
        out, back = self.out.carrier, self.back.carrier
        assert isinstance(out, Channel)
        assert isinstance(back, Channel)
        return out, back


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))


class HaloStart(torch.autograd.Function):
    """Own rows ``[own, ...]`` to themselves and a ticket for the wait; backward adds the gradients that come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, crossing: Crossing) -> tuple[Tensor, Tensor]:
        """Send the rows that others need."""
        ctx.set_materialize_grads(False)
        ctx.crossing, ctx.shape, ctx.like = crossing, rows.shape, rows.new_empty(0)
        passage = Passage(crossing.out.start(_flat(rows.detach()), crossing.smooth[0]), rows.shape[1:])
        ctx.passage = crossing.passage = passage
        return rows.view_as(rows), rows.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, ticket: Tensor | None) -> tuple[Tensor | None, None]:
        """Add what has come back to the gradient of own rows."""
        passage, crossing = ctx.passage, ctx.crossing
        if passage.backward is None:
            return gradient, None
        if gradient is None:
            gradient = ctx.like.new_zeros(ctx.shape)
        total = gradient if crossing.alone and gradient.is_contiguous() else gradient.clone()
        crossing.back.collect_into(passage.backward, crossing.age[1], _flat(total), crossing.places)
        passage.backward = None
        return total, None


class HaloWait(torch.autograd.Function):
    """The halo rows ``[halo, ...]`` of a ticket; backward sends their gradients to the owners."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, crossing: Crossing) -> Tensor:
        """Wait for the rows."""
        passage = crossing.passage
        assert passage is not None, "a wait comes behind its start"
        ctx.crossing, ctx.passage = crossing, passage
        rows = crossing.out.collect(passage.forward, crossing.age[0])
        return rows.view(rows.shape[0], *passage.shape).to(ticket.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Send the gradients."""
        crossing = ctx.crossing
        ctx.passage.backward = crossing.back.start(_flat(gradient.contiguous()), crossing.smooth[1])
        return gradient.new_zeros(0), None
