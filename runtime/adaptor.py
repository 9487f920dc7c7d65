"""Sylvie's Bounded Staleness Adaptor: how old the rows of each exchange are in the coming step.

With a fixed bound every exchange is as old as its bound once the warm-up is over. The adaptive one looks at two figures
that the warm-up's synchronous steps and every later period give:

* *waiting*: the part of a step for which this rank stood still for an exchange. Where the wire is no bottleneck, nothing
  is gained by old rows, and exchanges stay synchronous. It is judged once, behind the warm-up, since a stale exchange
  does not show what a synchronous one would wait.
* *drift*: how far the rows that are sent move from one step to the next, relative to their norm. Old rows differ from
  new ones by the drift times the delay, of which the running average is the larger part. What differs because a dropout
  draws its mask anew is taken off (Direction.drift): the average damps it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import torch

from sylvie_fx.ir.options import Options
from sylvie_fx.ir.pace import Pace
from sylvie_fx.ir.timeline import DECISION
from sylvie_fx.runtime.crossing import Crossing
from sylvie_fx.runtime.timeline import Recorder
from sylvie_fx.runtime.transport import Transport

log = logging.getLogger(__name__)

PERIOD = 50
"""Steps between two looks at the drift."""

WORTH = 0.05
"""Part of a step that must be spent waiting for exchanges before any of them gets stale."""


class Adaptor:
    """Sets the ages of a machine's crossings when a step begins; every rank sets the same.

    Args:
        crossings: By site.
        paces: By site, which of them adapt.
        options: The options of distribute().
        transport: For what ranks have measured; the largest counts.
        recorder: Takes decisions as events.

    Attributes:
        decisions: What was decided when: step, site, direction, age, waiting (part of a step), drift (relative to the
            rows' norm).
    """

    def __init__(
        self,
        crossings: Mapping[int, Crossing],
        paces: Mapping[int, Pace],
        options: Options,
        transport: Transport,
        recorder: Recorder | None = None,
    ) -> None:
        self.options, self._transport, self._recorder = options, transport, recorder or Recorder()
        # A crossing's bound is that of the links of either kind which allow the oldest rows.
        self._stale = {s: (c, paces[s].auto) for s, c in sorted(crossings.items()) if c.out.bound or c.back.bound}
        self._smooth = options.smoothing if options.stale == "average" else None
        self._auto = {site: entry for site, entry in self._stale.items() if entry[1]}
        self._chosen = dict.fromkeys(self._auto, (0, 0))
        self._worth: dict[tuple[int, int], bool] = {}
        self._began: float | None = None
        self._steps, self._step_s = -1, 0.0
        self._update: int | None = None
        self.decisions: list[tuple[int, int, str, int, float, float]] = []

    def begin(self, crossings: Mapping[int, Crossing], update: int) -> None:
        """Called when a forward pass begins whose rows may be old; steps are counted from the first one of this machine.

        Args:
            crossings: By site, those of this pass.
            update: Number of the training step; passes of one step have the same.
        """
        if update != self._update:
            self._update, self._steps = update, self._steps + 1
            if self._auto:
                self._look(self._steps)
        fresh = self._is_fresh(self._steps)
        for site, (_, auto) in self._stale.items():
            crossing = crossings[site]
            age = self._chosen[site] if auto else (crossing.out.bound, crossing.back.bound)
            crossing.update, crossing.age = update, (0, 0) if fresh else age
            # A weight of nothing lets an average begin anew at the rows as they are.
            crossing.smooth = (self._weight(crossing.age[0]), self._weight(crossing.age[1]))

    def _weight(self, age: int) -> float | None:
        return self._smooth if self._smooth is None or age else 0.0

    def _is_fresh(self, step: int) -> bool:
        every = self.options.refresh_every
        return step < self.options.warm_up or (every > 0 and (step - self.options.warm_up) % every == every - 1)

    def _look(self, step: int) -> None:
        """Measure in the three steps before a period ends, decide when it has ended."""
        now = time.perf_counter()
        since = step - self.options.warm_up
        if self._began is not None:
            self._step_s = now - self._began
        self._began = now
        if since >= 0 and since % PERIOD == 0:
            self._decide(step)
        for crossing, _ in self._auto.values():
            for direction in (crossing.out, crossing.back):
                direction.waited_s = 0.0
                # The last three steps of the warm-up, and of each period.
                direction.measuring = since in (-3, -2, -1) or (since >= 0 and since % PERIOD >= PERIOD - 3)

    def _decide(self, step: int) -> None:
        entries = [(site, way, d) for site, (c, _) in self._auto.items() for way, d in enumerate((c.out, c.back))]
        own = torch.tensor([[d.waited_s / max(self._step_s, 1e-9), d.drift] for *_, d in entries], dtype=torch.float64)
        waiting, drift = self._transport.all_reduce(own, "staleness", "max").T.tolist()
        if not self._worth:
            slow = sum(waiting) > WORTH
            self._worth = {e[:2]: slow and w > WORTH / len(entries) for e, w in zip(entries, waiting, strict=True)}
        for (site, way, direction), waits, moves in zip(entries, waiting, drift, strict=True):
            pair = list(self._chosen[site])
            # Twice the target sends a stale exchange back, so that it does not go to and fro.
            limit = self.options.drift * (2.0 if pair[way] else 1.0)
            pair[way] = direction.bound if self._worth[site, way] and moves <= limit else 0
            self._chosen[site] = (pair[0], pair[1])
            name = ("forward", "backward")[way]
            self.decisions.append((step, site, name, pair[way], waits, moves))
            now = time.perf_counter()
            text = f"age {pair[way]}: waited for {waits:.1%} of a step, rows move by {moves:.3f}"
            self._recorder.add(DECISION, text, now, now, exchange=site, direction=name, staleness=pair[way], step=step)
            log.info("step %d, site %d %s: age %d; waited for %.3f of a step, drift %.3f", *self.decisions[-1])

    def notes(self) -> list[str]:
        """The last decision of every exchange and direction, a line each."""
        last = {(site, way): (step, age, waits, moves) for step, site, way, age, waits, moves in self.decisions}
        return [
            f"site {site} {way}: age {age} since step {step}, when {100 * waits:.1f}% of a step was spent waiting for it "
            f"and its rows moved by {moves:.3f} a step"
            for (site, way), (step, age, waits, moves) in last.items()
        ]
