"""Which crossings a forward pass runs over: old rows are those of the same pass of the steps before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from sylvie_fx.runtime.crossing import Crossing

MOST = 8
"""Passes of one training step whose rows may be old; what they keep takes memory."""


class Turns:
    """The crossings of each forward pass of a training step.

    A script may run a program several times before the parameters change: on two views, or to accumulate gradients. The
    n-th pass (turn) of a step has crossings of its own, whose old rows are those of the n-th pass of the steps before. A
    pass without gradients, and one beyond the eighth, runs over crossings on which no row is ever old.

    Args:
        first: The crossings of the first turn, by site.
        make: Makes those of another, by its number.

    Attributes:
        now: The crossings of the present pass.
        steps: Training steps in which the program has run, before the present one.
        new_step: Whether the present pass is the first one of a step.
    """

    def __init__(self, first: Mapping[int, Crossing], make: Callable[[int], Mapping[int, Crossing]]) -> None:
        self._turns, self._make = {0: first}, make
        self._stale = any(crossing.out.bound or crossing.back.bound for crossing in first.values())
        self._update: int | None = None
        self._turn = 0
        self.now, self.steps, self.new_step = first, -1, False

    def begin(self, update: int) -> bool:
        """A pass begins; every rank calls it with the same numbers.

        Args:
            update: How often the parameters have changed.

        Returns:
            Whether its rows may be old.
        """
        learning, turn = torch.is_grad_enabled(), MOST
        self.new_step = learning and update != self._update
        if learning:
            self._turn = 0 if self.new_step else self._turn + 1
            self.steps += self.new_step
            self._update, turn = update, min(self._turn, MOST)
        if not self._stale:
            return False
        if turn not in self._turns:
            self._turns[turn] = self._make(turn)
        self.now = self._turns[turn]
        return turn < MOST

    def every(self) -> Iterator[Mapping[int, Crossing]]:
        """The crossings of all turns, those of the first one first."""
        return iter(self._turns.values())

    def notes(self) -> list[str]:
        """What explain() says of them."""
        if self._turn < MOST or not self._stale:
            return []
        return [f"{self._turn + 1} passes with the same parameters: from number {MOST + 1} on, no row of them is old"]
