"""When a model is called, in numbers that are the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sylvie_fx.ir.written import version


@dataclass(frozen=True)
class Moment:
    """One call.

    Attributes:
        step: Training calls before it.
        draw: Calls before it that drew dropout masks; part of the key of its own masks.
        update: How often training calls have found the parameters changed. Calls of one update belong to one training step.
    """

    step: int = 0
    draw: int = 0
    update: int = 0


class Clock:
    """Counts the calls of one model.

    Args:
        model: Whose parameters an optimizer changes in place, or replaces.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._step, self._draw, self._update = 0, 0, 0
        self._seen: tuple[Any, ...] | None = None

    @property
    def step(self) -> int:
        """Training calls so far."""
        return self._step

    def begin(self) -> int:
        """A call begins.

        Returns:
            Training calls before it.
        """
        step = self._step
        if self._model.training and torch.is_grad_enabled():
            self._step += 1
            parameters = tuple((p.data_ptr(), version(p)) for p in self._model.parameters())
            self._update += self._seen is not None and parameters != self._seen
            self._seen = parameters
        return step

    def moment(self, step: int, draws: bool) -> Moment:
        """The moment of the call that has begun.

        Args:
            step: What ``begin`` returned.
            draws: Whether it draws masks.
        """
        now = Moment(step, self._draw, self._update)
        self._draw += draws
        return now

    def copy_from(self, other: Clock) -> None:
        """Go on from where another clock is."""
        self._step, self._draw, self._update = other._step, other._draw, other._update
