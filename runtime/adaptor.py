"""Sylvie's Bounded Staleness Adaptor: how old the rows of each exchange are in the coming step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sylvie_fx.ir.options import Options
from sylvie_fx.ir.pace import Pace
from sylvie_fx.runtime.crossing import Crossing


class Adaptor:
    """Sets the ages of a machine's crossings when a step begins; every rank sets the same.

    Args:
        crossings: By site.
        paces: The bounds, by site.
        options: The options of distribute().
    """

    def __init__(self, crossings: Mapping[int, Crossing], paces: Mapping[int, Pace], options: Options) -> None:
        self.options = options
        self._stale = [(c, paces[site]) for site, c in sorted(crossings.items()) if not paces[site].synchronous]
        self._smooth = options.smoothing if options.stale == "average" else None

    def begin(self, step: int) -> None:
        """Called when a forward pass begins.

        Args:
            step: Number of the training step.
        """
        if not self._stale:
            return
        fresh = self._is_fresh(step) or not torch.is_grad_enabled()
        for crossing, pace in self._stale:
            crossing.age = (0, 0) if fresh else (pace.forward, pace.backward)
            # A weight of nothing lets the average begin anew at the rows as they are.
            crossing.smooth = self._smooth if self._smooth is None or not fresh else 0.0

    def _is_fresh(self, step: int) -> bool:
        every = self.options.refresh_every
        return step < self.options.warm_up or (every > 0 and (step - self.options.warm_up) % every == every - 1)
