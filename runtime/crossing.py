"""Exchanges of a program in two halves, with gradients that travel back in two halves as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.ir.coding import EXACT, Coding
from sylvie_fx.ir.pace import Tier
from sylvie_fx.runtime.carrier import Carrier, ExactCarrier
from sylvie_fx.runtime.channel import Channel, keys_arriving, keys_sent
from sylvie_fx.runtime.direction import Direction
from sylvie_fx.runtime.exchange import Link
from sylvie_fx.runtime.lanes import Courier
from sylvie_fx.runtime.tiers import Tiers, of_peers


@dataclass(eq=False)
class Passage:
    """One forward pass through a crossing, and its backward pass.

    Attributes:
        forward: Number of the transfer to the halo.
        shape: Of a row.
        update: How often the parameters had changed.
        age: How old its halo rows and their gradients are.
        smooth: Weight of the past in the running average of the gradients; None for none.
        backward: The way back and the number of the transfer on it; None until backward has sent the gradients of halo rows.
        again: Whether a backward pass has run.
    """

    forward: int
    shape: torch.Size
    update: int
    age: tuple[int, int]
    smooth: float | None
    backward: tuple[Direction | Tiers, int] | None = None
    again: bool = False


@dataclass(eq=False)
class Crossing:
    """An exchange site on one rank: towards the halo, and back.

    Attributes:
        link: The exchange.
        out: Rows that go to the halo.
        back: Gradients of halo rows.
        places: int64: own rows that gradients are added to, peer after peer.
        passage: The pass that is under way, between its start and its wait.
        update: How often the parameters have changed.
        age: How old halo rows and their gradients are in the present step.
        smooth: Weight of the past in the running averages of both; None for none.
        alone: Whether the gradient of own rows comes from the inner edges alone: it is then new, and may be written to.
        make_again: Makes another crossing of this kind.
    """

    link: Link
    out: Direction | Tiers
    back: Direction | Tiers
    places: Tensor
    passage: Passage | None = None
    update: int = 0
    age: tuple[int, int] = (0, 0)
    smooth: tuple[float | None, float | None] = (None, None)
    alone: bool = False
    make_again: Callable[[], Crossing] | None = None
    _again: Crossing | None = None

    def again(self) -> Direction | Tiers:
        """The way back for a pass whose backward runs another time: for another loss, so no gradient of it is old."""
        if self._again is None:
            assert self.make_again is not None
            self._again = self.make_again()
        return self._again.back

    @staticmethod
    def make(
        link: Link, own_ids: Tensor, tiers: Sequence[tuple[Tier, Sequence[bool]]], label: str, courier: Courier, seed: int,
        line: bool = False,
    ) -> Crossing:  # fmt: skip
        """The crossing of a link.

        Args:
            link: The exchange.
            own_ids: int64: global numbers of this rank's rows.
            tiers: How rows travel, and for each rank whether they travel so to it; every rank is in one tier.
            label: Names the exchange in errors.
            courier: Where the work runs.
            seed: Of the site.
            line: Whether old rows are extrapolated.
        """
        plan, device = link.plan, own_ids.device
        rows = torch.cat(link.send_rows)
        sent = tuple(len(s) for s in link.send_rows)
        outs, backs = [], []
        for number, (tier, peers) in enumerate(tiers):
            leaving, send_counts = of_peers(sent, peers, device)
            arriving, receive_counts = of_peers(plan.receive_counts, peers, device)
            own = _carrier(tier.coding.forward, link, rows[leaving], own_ids[rows[leaving]], send_counts,
                           plan.halo_ids.to(device)[arriving], receive_counts, torch.arange(len(arriving), device=device))  # fmt: skip
            # All halo rows in their order need no index.
            leaves = None if len(tiers) == 1 and tier.coding.backward != EXACT else arriving
            halo = _carrier(tier.coding.backward, link, leaves, plan.halo_ids.to(device)[arriving], receive_counts,
                            own_ids[rows[leaving]], send_counts, rows[leaving])  # fmt: skip
            named = label if len(tiers) == 1 else f"{label} tier {number}"
            outs.append((Direction(own, link, f"{named} forward", courier, seed, tier.pace.forward, line), arriving))
            back = Direction(halo, link, f"{named} backward", courier, seed + 1, tier.pace.backward, line)
            backs.append((back, leaving))
        if len(tiers) == 1:
            return Crossing(link, outs[0][0], backs[0][0], rows)
        return Crossing(link, Tiers(outs, plan.halo), Tiers(backs, len(rows)), rows)

    def channels(self) -> tuple[Channel, Channel]:
        """The channels of both directions.

        Raises:
            AssertionError: A direction is not coded.
        """
        assert isinstance(self.out, Direction)
        assert isinstance(self.back, Direction)
        out, back = self.out.carrier, self.back.carrier
        assert isinstance(out, Channel)
        assert isinstance(back, Channel)
        return out, back


def _carrier(
    coding: Coding, link: Link, rows: Tensor | None, ids: Tensor, send_counts: tuple[int, ...],
    arriving_ids: Tensor, receive_counts: tuple[int, ...], places: Tensor,
) -> Carrier:  # fmt: skip
    """How rows with some global numbers leave, and how others arrive and are added at their places."""
    if coding == EXACT:
        assert rows is not None
        return ExactCarrier(rows, send_counts, receive_counts, places)
    keys, arriving = keys_sent(ids, link.transport), keys_arriving(arriving_ids, receive_counts)
    return Channel(coding, rows, keys, send_counts, receive_counts, arriving, places)


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))


class HaloStart(torch.autograd.Function):
    """Own rows ``[own, ...]`` to themselves and a ticket for the wait; backward adds the gradients that come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, crossing: Crossing) -> tuple[Tensor, Tensor]:
        """Send the rows that others need."""
        ctx.set_materialize_grads(False)
        ctx.crossing, ctx.shape, ctx.like = crossing, rows.shape, rows.new_empty(0)
        number = crossing.out.start(_flat(rows.detach()), crossing.smooth[0], crossing.update)
        passage = Passage(number, rows.shape[1:], crossing.update, crossing.age, crossing.smooth[1])
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
        way, number = passage.backward
        way.collect_into(number, 0 if way is not crossing.back else passage.age[1], _flat(total), crossing.places)
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
        rows = crossing.out.collect(passage.forward, passage.age[0])
        return rows.view(rows.shape[0], *passage.shape).to(ticket.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Send the gradients."""
        crossing, passage = ctx.crossing, ctx.passage
        way, smooth = (crossing.again(), None) if passage.again else (crossing.back, passage.smooth)
        passage.backward = way, way.start(_flat(gradient.contiguous()), smooth, passage.update)
        passage.again = True
        return gradient.new_zeros(0), None
