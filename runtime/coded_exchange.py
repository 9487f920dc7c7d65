"""Exchanges whose rows travel through the codec (Sylvie's Low-bit Module), forward and backward apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.ir.coding import Coding
from sylvie_fx.kernels.codec import decode_peers, encode_peers
from sylvie_fx.kernels.wire import CodecSpec, MessageLayout, Rounding, Variant
from sylvie_fx.runtime.adaptive import Measure
from sylvie_fx.runtime.exchange import Link


def codec_spec(coding: Coding) -> CodecSpec:
    """The codec of a coding."""
    return CodecSpec(coding.bits, Rounding(coding.rounding), Variant(coding.variant))


@dataclass(eq=False)
class Channel:
    """One direction of one exchange site on one rank: its codec, and what both ends remember.

    Attributes:
        coding: How rows travel.
        rows: int64: rows of the sent tensor, peer after peer.
        keys: int64: their global numbers, which key the rounding.
        send_counts: Rows for each peer.
        receive_counts: Rows from each peer.
        places: int64: rows of the result for what arrives, peer after peer.
        sent: Reconstruction (or error) that the sender keeps; None until the first message, and for plain coding.
        received: Reconstruction that the receiver keeps.
        measuring: Whether the next transfer measures what it sends.
        measure: The last measurement.
    """

    coding: Coding
    rows: Tensor
    keys: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    places: Tensor
    sent: Tensor | None = None
    received: Tensor | None = None
    measuring: bool = False
    measure: Measure | None = None

    def transfer(self, values: Tensor, out: Tensor, link: Link, label: str, step: int, seed: int, *, add: bool) -> None:
        """Send rows of ``values`` and put what arrives into ``out``.

        Args:
            values: ``[rows, columns]``.
            out: ``[rows, columns]``; rows at ``places`` are written, or added to.
            link: The exchange.
            label: Names the exchange and step in errors.
            step: Part of the rounding's key, and checked against the header that arrives.
            seed: Of this site and direction.
            add: Add instead of write.
        """
        if self.measuring:
            reference = self.sent if self.coding.variant in ("difference", "shift") else None
            self.measure = Measure.of(values.detach().index_select(0, self.rows), reference)
        if self.coding.variant == "shift":
            self._transfer_shifted(values, out, link, label, step, seed, add=add)
            return
        spec = codec_spec(self.coding)
        columns = values.shape[1]
        stateful = spec.variant is not Variant.PLAIN
        if stateful and (self.sent is None or self.sent.shape[1] != columns):
            # The first message is exact: a reconstruction of zeros would take many steps to approach the rows.
            self.sent = values.new_zeros((len(self.rows), columns), dtype=torch.float32)
            self.received = values.new_zeros((len(self.places), columns), dtype=torch.float32)
            spec = CodecSpec(32, spec.rounding, spec.variant)
        outgoing = MessageLayout(self.send_counts, columns, spec, values.dtype)
        buffer = encode_peers(values, self.rows, outgoing, step, seed, self.keys, state=self.sent)
        filled = self._swap(buffer, outgoing, link, label)
        state = self.received if spec.variant is Variant.DIFFERENCE else None
        if filled is not None:
            layout, message = filled
            decode_peers(
                message, layout, out=out, mode="add" if add else "write", index=self.places, state=state, step=step
            )

    def _swap(
        self, buffer: Tensor, outgoing: MessageLayout, link: Link, label: str
    ) -> tuple[MessageLayout, Tensor] | None:
        """Send messages and receive the peers'; None where none comes."""
        incoming = MessageLayout(self.receive_counts, outgoing.cols, outgoing.spec, outgoing.dtype)
        arrived = torch.empty(incoming.buffer_bytes, dtype=torch.uint8, device=buffer.device)
        sends = [m if count else None for m, count in zip(outgoing.views(buffer), self.send_counts, strict=True)]
        receives = [m if count else None for m, count in zip(incoming.views(arrived), self.receive_counts, strict=True)]
        link.transport.exchange(sends, receives, label).wait()
        return _without_empty(incoming, arrived)

    def _transfer_shifted(
        self, values: Tensor, out: Tensor, link: Link, label: str, step: int, seed: int, *, add: bool
    ) -> None:
        """Code the difference to a shift that both ends move by a part of what was decoded.

        DIANA (Mishchenko et al., 2019): unbiased like plain rounding, and its noise vanishes as the shift approaches
        the rows. The shift moves by 1 / (1 + w), w being the variance of the rounding relative to the rows'.
        """
        columns = values.shape[1]
        chosen = values.index_select(0, self.rows).to(torch.float32)
        fresh = self.sent is None or self.sent.shape[1] != columns
        if self.sent is None or self.received is None or fresh:
            self.sent = torch.zeros_like(chosen)
            self.received = chosen.new_zeros((len(self.places), columns))
        # The first message is exact and moves the shift all the way.
        spec = CodecSpec(32 if fresh else self.coding.bits, Rounding.STOCHASTIC, Variant.PLAIN)
        part = 1.0 if fresh else SHIFT_PART[self.coding.bits]
        outgoing = MessageLayout(self.send_counts, columns, spec, torch.float32)
        chosen -= self.sent
        buffer = encode_peers(chosen, None, outgoing, step, seed, self.keys)
        filled = self._swap(buffer, outgoing, link, label)
        own = _without_empty(outgoing, buffer)
        if own is not None:
            self.sent.add_(decode_peers(own[1], own[0], step=step), alpha=part)
        if filled is None:
            return
        arrived = decode_peers(filled[1], filled[0], step=step)
        rows = (self.received + arrived).to(out.dtype)
        self.received.add_(arrived, alpha=part)
        if add:
            start = 0
            for count in self.receive_counts:  # peer after peer, since rows repeat between peers
                out.index_add_(0, self.places[start : start + count], rows[start : start + count])
                start += count
        else:
            out[self.places] = rows


SHIFT_PART = {1: 0.2, 2: 0.5, 4: 0.9, 8: 1.0, 16: 1.0}
"""How far a shift moves: about 1 / (1 + w), with w measured for Gaussian rows of 16 to 256 numbers."""


def _without_empty(layout: MessageLayout, buffer: Tensor) -> tuple[MessageLayout, Tensor] | None:
    """The messages that carry rows: an empty one is not sent, so that it has no header to check."""
    if all(layout.counts):
        return layout, buffer
    counts = tuple(c for c in layout.counts if c)
    if not counts:
        return None
    packed = MessageLayout(counts, layout.cols, layout.spec, layout.dtype)
    target = torch.empty(packed.buffer_bytes, dtype=torch.uint8, device=buffer.device)
    full = [m for m, c in zip(layout.views(buffer), layout.counts, strict=True) if c]
    for view, message in zip(packed.views(target), full, strict=True):
        view.copy_(message)
    return packed, target


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
        towards = Channel(outward, rows, own_ids[rows], sent, plan.receive_counts, halo_rows)
        returning = Channel(backward, halo_rows, halo_ids, plan.receive_counts, sent, rows)
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
        return site.bring(rows, f"{site.link.label} forward step {step}", step)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the halo rows' gradients."""
        return (
            ctx.site.give_back(gradient.contiguous(), f"{ctx.site.link.label} backward step {ctx.step}", ctx.step),
            None,
            None,
        )


class CodedHaloReduce(torch.autograd.Function):
    """As HaloReduce, with partial sums and gradients coded."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, site: CodedLink, step: int) -> Tensor:
        """Add partial sums at their owners."""
        ctx.site, ctx.step = site, step
        return site.give_back(rows, f"{site.link.label} forward step {step}", step)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Bring the gradients of halo rows."""
        return (
            ctx.site.bring(gradient.contiguous(), f"{ctx.site.link.label} backward step {ctx.step}", ctx.step),
            None,
            None,
        )
