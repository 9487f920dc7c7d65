"""The options of distribute(), validated at once."""

from __future__ import annotations

from dataclasses import dataclass

from sylvie_fx.ir.errors import OptionError

BITS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Options:
    """How a model is distributed.

    Attributes:
        bits: Bits a value of an exchanged row takes on the wire; 32 sends float32 (or the tensor's own type) unchanged.
        staleness: How many steps old a halo row may be; 0 is synchronous.
        seed: Seed of dropout masks; the same on every rank.
        timeout: Seconds that a rank waits for a peer before it raises CommError.

    Raises:
        OptionError: A value is not allowed.
    """

    bits: int = 32
    staleness: int = 0
    seed: int = 0
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise OptionError(f"bits={self.bits!r}", remedy=f"choose one of {', '.join(map(str, BITS))}")
        if isinstance(self.staleness, bool) or not isinstance(self.staleness, int) or self.staleness < 0:
            raise OptionError(f"staleness={self.staleness!r}", remedy="give a number of steps, 0 or more")
        if not self.timeout > 0:
            raise OptionError(f"timeout={self.timeout!r}", remedy="give a number of seconds above 0")
