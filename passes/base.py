"""What a pass is: a named rewrite of a program, with its requirements and promises in its docstring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, fx

from sylvie_fx.ir.errors import PassError
from sylvie_fx.ir.options import Options
from sylvie_fx.ir.program import Program, meta


@dataclass(frozen=True)
class PassContext:
    """What a pass may look at besides the program.

    Attributes:
        options: The options of distribute().
        captured: The program as it was captured; None where nothing is to be compared with it.
        samples: The tensors that it was captured with.
        link: Gbit/s between ranks, for each core that a rank computes with: what bytes are weighed against work by.
    """

    options: Options = field(default_factory=Options)
    captured: Program | None = None
    samples: tuple[Tensor, ...] = ()
    link: float = 1.0


class Pass(ABC):
    """One rewrite. Subclasses are frozen dataclasses; their fields are their options.

    A docstring of a pass has one sentence, then ``Requires:`` and ``Ensures:``. A pass edits the program it is given
    and returns it; run a second time it changes nothing.
    """

    name: ClassVar[str]

    @abstractmethod
    def run(self, program: Program, context: PassContext) -> Program:
        """Rewrite the program.

        Raises:
            PassError: The program can not be rewritten exactly; names the user's line.
        """


def refuse(node: fx.Node, what: str, why: str, remedy: str) -> PassError:
    """The error for an operator of the user's model, at its source line and module."""
    known = meta(node)
    place = f" in module {known.module!r}" if known.module else ""
    return PassError(what + place, where=known.where or None, why=why, remedy=remedy)
