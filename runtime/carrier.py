"""How the rows of one direction of one exchange travel: as they are, or through the codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sylvie_fx.runtime.exchange import Link
from sylvie_fx.runtime.transport import Pending


class Carrier(Protocol):
    """Sends and receives the rows of one direction; flights are finished in the order in which they started.

    ``start`` and ``finish`` may be called by different threads, each of them always by the same.
    """

    def start(self, values: Tensor, link: Link, label: str, step: int, seed: int) -> Any:
        """Send rows of ``values`` ``[rows, columns]`` and expect the peers'; returns at once, with a ``pending``.

        Args:
            values: Not written to until the flight is finished.
            link: The exchange.
            label: Names the exchange in errors.
            step: The number of the transfer, part of the rounding's key.
            seed: Of the rounding.
        """

    def finish(self, flight: Any, out: Tensor | None, *, add: bool, smooth: float | None = None) -> Tensor:
        """Wait for what ``start`` expects.

        Args:
            flight: What ``start`` returned.
            out: Rows that the arrivals are added to, at their places; None for new rows ``[arriving, columns]``.
            add: Whether ``out`` is given.
            smooth: Weight of the past in the running average that is handed over instead of the rows; None for the rows.

        Returns:
            The rows, or ``out``.

        Raises:
            CommError: A peer failed.
        """


@dataclass(frozen=True)
class ExactFlight:
    """Buffers of a flight, which live until it is finished."""

    pending: Pending
    sends: list[Tensor | None]
    arriving: Tensor


class ExactCarrier:
    """Rows travel as they are.

    Args:
        rows: int64: rows of the sent tensor, peer after peer.
        send_counts: Rows for each peer.
        receive_counts: Rows from each peer.
        places: int64: rows that arrivals are added to, peer after peer.
    """

    def __init__(
        self, rows: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...], places: Tensor
    ) -> None:
        self.rows, self.places = rows, places
        self.send_counts, self.receive_counts = send_counts, receive_counts
        self._average: Tensor | None = None

    def start(self, values: Tensor, link: Link, label: str, step: int, seed: int) -> ExactFlight:
        """See Carrier.start."""
        chosen = values.index_select(0, self.rows)
        sends = [part if len(part) else None for part in chosen.split(list(self.send_counts))]
        arriving = values.new_empty((len(self.places), values.shape[1]))
        receives = [part if len(part) else None for part in arriving.split(list(self.receive_counts))]
        return ExactFlight(link.transport.exchange(sends, receives, label), sends, arriving)

    def finish(self, flight: ExactFlight, out: Tensor | None, *, add: bool, smooth: float | None = None) -> Tensor:
        """See Carrier.finish."""
        flight.pending.wait()
        rows = flight.arriving
        if smooth is not None:
            rows = self._average = rows if self._average is None else torch.lerp(rows, self._average, smooth)
        if out is None:
            return rows
        return out.index_add_(0, self.places, rows)
