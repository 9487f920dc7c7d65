"""One direction of an exchange whose peers are reached over different links, each with its own coding and age."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sylvie_fx.runtime.direction import Direction


class Tiers:
    """Directions to disjoint sets of peers, as one; see Direction for the methods.

    Args:
        parts: Each direction, and int64: where its arrivals stand among all arrivals.
        arriving: Number of all arrivals.
    """

    def __init__(self, parts: Sequence[tuple[Direction, Tensor]], arriving: int) -> None:
        self.parts, self.arriving = tuple(parts), arriving
        self.bound = max(direction.bound for direction, _ in parts)

    def start(self, values: Tensor, smooth: float | None, update: int | None = None) -> int:
        """See Direction.start; rows that are never old are not averaged."""
        numbers = {d.start(values, smooth if d.bound else None, update) for d, _ in self.parts}
        assert len(numbers) == 1, "all tiers take part in every transfer"
        return numbers.pop()

    def collect(self, number: int, age: int) -> Tensor:
        """See Direction.collect; every tier's age is bounded by its own bound."""
        found = [(d.collect(number, age), where) for d, where in self.parts]
        out = found[0][0].new_empty((self.arriving, found[0][0].shape[1]))
        for rows, where in found:
            out[where] = rows.to(out.dtype)
        return out

    def collect_into(self, number: int, age: int, out: Tensor, places: Tensor) -> None:
        """See Direction.collect_into."""
        for direction, where in self.parts:
            direction.collect_into(number, age, out, places[where])

    def settle(self) -> None:
        """See Direction.settle."""
        for direction, _ in self.parts:
            direction.settle()

    def drain(self) -> None:
        """See Direction.drain."""
        for direction, _ in self.parts:
            direction.drain()

    @property
    def waited_s(self) -> float:
        """See Direction.waited_s."""
        return sum(direction.waited_s for direction, _ in self.parts)

    @waited_s.setter
    def waited_s(self, seconds: float) -> None:
        for direction, _ in self.parts:
            direction.waited_s = seconds

    @property
    def measuring(self) -> bool:
        """See Direction.measuring."""
        return self.parts[0][0].measuring

    @measuring.setter
    def measuring(self, on: bool) -> None:
        for direction, _ in self.parts:
            direction.measuring = on

    @property
    def drift(self) -> float:
        """See Direction.drift; the values are those of all tiers."""
        return self.parts[0][0].drift


def of_peers(counts: Sequence[int], peers: Sequence[bool], device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """Which of the rows that stand peer after peer belong to some peers, and how many each of them has.

    Args:
        counts: Rows of each peer.
        peers: Whether a peer is meant.
        device: Where the index is wanted.
    """
    flags = torch.repeat_interleave(torch.tensor(list(peers)), torch.tensor(list(counts)))
    return flags.nonzero().flatten().to(device), tuple(c if p else 0 for c, p in zip(counts, peers, strict=True))
