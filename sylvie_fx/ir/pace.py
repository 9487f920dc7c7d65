"""How old the rows of one exchange may be, forward and backward apart."""

from __future__ import annotations

from dataclasses import dataclass

from sylvie_fx.ir.coding import ExchangeCoding


@dataclass(frozen=True)
class Pace:
    """The bounds of one exchange, in training steps.

    Attributes:
        forward: A rank never computes with halo rows that are older.
        backward: Likewise for the gradients that come back for its own rows.
        auto: The age moves within the bounds, chosen from what is measured (runtime/adaptor.py).
    """

    forward: int = 0
    backward: int = 0
    auto: bool = False

    @property
    def synchronous(self) -> bool:
        """Whether nothing is ever old."""
        return self.forward == 0 and self.backward == 0

    def __str__(self) -> str:
        if self.synchronous:
            return "0"
        text = f"{self.forward}" if self.forward == self.backward else f"{self.forward} / {self.backward}"
        return f"up to {text}, adaptive" if self.auto else text


SYNCHRONOUS = Pace()


@dataclass(frozen=True)
class Tier:
    """How rows travel to the peers of one kind, where a policy tells kinds of links apart.

    Attributes:
        coding: How rows are coded.
        pace: How old they may be.
    """

    coding: ExchangeCoding
    pace: Pace

    def __str__(self) -> str:
        return f"{self.coding}, staleness {self.pace}"
