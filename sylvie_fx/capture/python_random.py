"""Random numbers of Python and numpy: a captured forward pass would have the same ones for ever."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from sylvie_fx.capture.failures import Place, in_module
from sylvie_fx.ir.errors import CaptureError


def states() -> tuple[Any, Any]:
    """The states of the two global generators, which can be compared."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)


def refuse_draws(before: tuple[Any, Any], place: Place) -> None:
    """Refuse a pass that has drawn.

    Args:
        before: The states before it began.
        place: Where it is now.

    Raises:
        CaptureError: A generator has another state than before.
    """
    for name, old, new in zip(("random", "numpy.random"), before, states(), strict=True):
        if old != new:
            raise CaptureError(
                in_module(f"forward draws random numbers from {name}", place), where=place[0] or None,
                why="a captured program would use the same numbers in every call, and every rank others",
                remedy="draw them outside, the same on every rank, and pass them as an argument; or use nn.Dropout",
            )  # fmt: skip
