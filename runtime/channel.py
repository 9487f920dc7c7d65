"""One direction of one coded exchange: messages out, messages in, and what both ends remember of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sylvie_fx.ir.coding import WARM, Coding, rotated_width
from sylvie_fx.ir.errors import CommError
from sylvie_fx.kernels.codec import decode_peers, encode_peers
from sylvie_fx.kernels.wire import CodecSpec, MessageLayout, Rounding, Variant
from sylvie_fx.runtime.adaptive import Measure
from sylvie_fx.runtime.exchange import Link
from sylvie_fx.runtime.timeline import Recorder
from sylvie_fx.runtime.transport import Pending, Transport


def codec_spec(coding: Coding, columns: int) -> CodecSpec:
    """The codec of a coding; a shift is difference coding that moves by a part."""
    rounding = Rounding(coding.rounding)
    if coding.variant == "shift":
        return CodecSpec(coding.bits, rounding, Variant.DIFFERENCE, shift_part(rounding, coding.bits, columns))
    return CodecSpec(coding.bits, rounding, Variant(coding.variant))


def shift_part(rounding: Rounding, bits: int, columns: int) -> float:
    """How far a shift moves: 1 / (1 + w), the best for random rounding whose variance is w times the rows' own.

    Args:
        rounding: Stochastic, dithered or rotated.
        bits: 1 to 8.
        columns: Numbers a row; w is that of Gaussian ones.
    """
    if rounding is Rounding.ROTATED:
        return 1 / (1 + (math.pi / 2 - 1) * columns / rotated_width(columns))
    # The mean squared span of so many Gaussian numbers, within 10 % for 8 to 1024 of them.
    span, steps = max(4.8 * math.log2(max(columns, 1)) - 6.4, 3.0), (1 << bits) - 1
    if rounding is Rounding.DITHERED:
        variance = span / 12 / steps**2
    else:
        variance = span / 4 - 1 if bits == 1 else span / 6 / steps**2
    # Short rows of one bit would allow more, but not where they are far from Gaussian.
    return min(1 / (1 + max(variance, 0.0)), 0.5 if bits == 1 else 1.0)


def keys_sent(ids: Tensor, transport: Transport) -> Tensor:
    """What keys the rounding of rows that this rank sends: their global numbers and the sender.

    Without the sender, ranks that return gradients of one row would all err in the same direction.
    """
    return ids * transport.size + transport.rank


def keys_arriving(ids: Tensor, counts: tuple[int, ...]) -> Tensor:
    """The same of rows that arrive: ``counts`` from each peer, peer after peer."""
    senders = torch.arange(len(counts), device=ids.device)
    return ids * len(counts) + senders.repeat_interleave(torch.tensor(counts, device=ids.device))


@dataclass(eq=False)
class _Wire:
    """How messages of one width and codec lie in memory, and buffers for them that are free."""

    outgoing: MessageLayout
    incoming: MessageLayout
    free: deque[tuple[Tensor, Tensor]] = field(default_factory=deque)

    def take(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """A buffer to send and one to receive into; only as many are made as are in flight at once."""
        try:
            return self.free.popleft()
        except IndexError:
            sizes = self.outgoing.buffer_bytes, self.incoming.buffer_bytes
            sent, arrived = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
            return sent, arrived


@dataclass(eq=False)
class Flight:
    """A transfer between its start and its finish."""

    wire: _Wire
    sent: Tensor
    arrived: Tensor
    pending: Pending
    step: int
    seed: int
    number: int
    label: str
    recorder: Recorder


@dataclass(eq=False)
class Channel:
    """One direction of one exchange site on one rank: its codec, and what both ends remember.

    ``start`` may run in another thread than ``finish``, and several transfers may be in flight; they are finished in the
    order in which they were started.

    Attributes:
        coding: How rows travel.
        rows: int64: rows of the sent tensor, peer after peer; None: all of them, in order.
        keys: int64: what keys their rounding, from :func:`keys_sent`.
        send_counts: Rows for each peer.
        receive_counts: Rows from each peer.
        receive_keys: int64: what keys the rounding of the rows that arrive, from :func:`keys_arriving`.
        places: int64: rows of the result for what arrives, peer after peer; None: the first rows, in order.
        sent: float32 ``[rows, columns]``: reconstruction (or error) that the sender keeps; None until the first message,
            and for plain coding.
        received: float32 ``[places, columns]``: reconstruction that the receiver keeps.
        average: float32 ``[places, columns]``: running average of what arrived, where finishes smooth.
        measuring: Whether the next transfer measures what it sends.
        measure: The last measurement.
    """

    coding: Coding
    rows: Tensor | None
    keys: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    receive_keys: Tensor
    places: Tensor | None
    sent: Tensor | None = None
    received: Tensor | None = None
    average: Tensor | None = None
    measuring: bool = False
    measure: Measure | None = None
    _wires: dict[tuple[CodecSpec, int, torch.dtype], _Wire] = field(default_factory=dict, repr=False)
    _started: int = 0
    _finished: int = 0

    def transfer(self, values: Tensor, out: Tensor, link: Link, label: str, step: int, seed: int, *, add: bool) -> None:
        """``start`` and ``finish`` at once."""
        self.finish(self.start(values, link, label, step, seed), out, add=add)

    def start(self, values: Tensor, link: Link, label: str, step: int, seed: int) -> Flight:
        """Code the rows and hand them to the transport; returns without waiting for anything.

        Args:
            values: ``[rows, columns]``; free again on return.
            link: The exchange.
            label: Names the exchange and step in errors.
            step: Part of the rounding's key, and checked against the header that arrives.
            seed: Of this site and direction.
        """
        columns = values.shape[1]
        spec = codec_spec(self.coding, columns)
        if self.measuring:
            reference = self.sent if spec.variant is Variant.DIFFERENCE else None
            chosen = values.detach() if self.rows is None else values.detach().index_select(0, self.rows)
            self.measure = Measure.of(chosen, reference, self.coding.rounding)
        if self._started < self.coding.warm_up:
            spec = codec_spec(WARM, columns)
        stateful = spec.variant is not Variant.PLAIN
        if stateful and (self.sent is None or self.sent.shape[1] != columns):
            # The first message is exact: a reconstruction of zeros would take many steps to approach the rows.
            self.sent = values.new_zeros((len(self.keys), columns), dtype=torch.float32)
            spec = CodecSpec(32, spec.rounding, spec.variant)
        wire = self._wire(spec, columns, values.dtype)
        buffer, arrived = wire.take(values.device)
        with link.recorder.span("quantise", label):
            encode_peers(
                values, self.rows, wire.outgoing, step, seed, self.keys, buffer, state=self.sent if stateful else None
            )
        sends = _for_peers(wire.outgoing, buffer, self.send_counts)
        receives = _for_peers(wire.incoming, arrived, self.receive_counts)
        pending = link.transport.exchange(sends, receives, label)
        self._started += 1
        return Flight(wire, buffer, arrived, pending, step, seed, self._started, label, link.recorder)

    def finish(self, flight: Flight, out: Tensor | None, *, add: bool, smooth: float | None = None) -> Tensor:
        """Wait for a transfer, and put what arrived into ``out``.

        Args:
            flight: From ``start``; the oldest that is not finished.
            out: ``[rows, columns]``; rows at ``places`` are written, or added to peer after peer. None: new rows
                ``[arriving, columns]``, peer after peer.
            add: Add instead of write.
            smooth: Decay in [0, 1) of a running average ``m = smooth * m + (1 - smooth) * row`` for each row that arrives,
                which is then used in the row's place; the first message sets it. A row that is not finite is used as it
                is, and leaves its average as it was.

        Returns:
            ``out``, or the new rows.

        Raises:
            CommError: The transfer failed.
        """
        assert flight.number == self._finished + 1, "transfers are finished in the order in which they were started"
        flight.pending.wait()
        layout, device = flight.wire.incoming, flight.arrived.device
        places = self.places
        if out is None:
            out, places = torch.empty((layout.rows, layout.cols), dtype=layout.dtype, device=device), None
        difference = layout.spec.variant is Variant.DIFFERENCE
        if difference and (self.received is None or self.received.shape[1] != layout.cols):
            self.received = torch.zeros((layout.rows, layout.cols), device=device)
        weight = 1.0 if smooth is None else 1.0 - smooth
        if smooth is not None and (self.average is None or self.average.shape[1] != layout.cols):
            self.average = torch.zeros((layout.rows, layout.cols), device=device)
            weight = 1.0
        with flight.recorder.span("dequantise", flight.label):
            decode_peers(
                flight.arrived, layout, out=out, mode="add" if add else "write", index=places,
                state=self.received if difference else None, average=None if smooth is None else self.average,
                weight=weight, step=flight.step, seed=flight.seed, row_keys=self.receive_keys,
            )  # fmt: skip
        self._finished += 1
        flight.wire.free.append((flight.sent, flight.arrived))
        return out

    def state(self) -> dict[str, Tensor]:
        """What this end remembers, by name: copies, for a checkpoint; both ends must be saved after the same transfer.

        Raises:
            CommError: Transfers are in flight: the two ends do not agree.
        """
        self._check_idle("saved")
        kept = {"sent": self.sent, "received": self.received, "average": self.average}
        return {name: tensor.clone() for name, tensor in kept.items() if tensor is not None}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what ``state`` gave.

        Raises:
            CommError: Transfers are in flight, or the tensors have other rows than this channel.
        """
        self._check_idle("loaded")
        rows = {"sent": len(self.keys), "received": sum(self.receive_counts), "average": sum(self.receive_counts)}
        for name, tensor in state.items():
            if name not in rows or tensor.dim() != 2 or tensor.shape[0] != rows[name]:
                raise CommError(
                    f"the state {name!r} {tuple(tensor.shape)} does not belong to this exchange",
                    why=f"it keeps {rows}",
                    remedy="load the state of the same rank, partition and model",
                )
        device = self.keys.device
        kept = {name: tensor.to(device, torch.float32, copy=True).contiguous() for name, tensor in state.items()}
        self.sent, self.received, self.average = (kept.get(name) for name in rows)

    def _check_idle(self, what: str) -> None:
        if self._started != self._finished:
            raise CommError(
                f"the state of an exchange can not be {what} while {self._started - self._finished} transfers are in flight",
                remedy="finish them first",
            )

    def _wire(self, spec: CodecSpec, columns: int, dtype: torch.dtype) -> _Wire:
        key = spec, columns, dtype
        if key not in self._wires:
            # Peers without rows have no message: no header travels that would need checking.
            outgoing, incoming = (
                MessageLayout(tuple(c for c in counts if c), columns, spec, dtype)
                for counts in (self.send_counts, self.receive_counts)
            )
            self._wires[key] = _Wire(outgoing, incoming)
        return self._wires[key]


def _for_peers(layout: MessageLayout, buffer: Tensor, counts: tuple[int, ...]) -> list[Tensor | None]:
    """The message of each peer; None where it has no rows."""
    messages = iter(layout.views(buffer))
    return [next(messages) if count else None for count in counts]
