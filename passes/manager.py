"""The pipeline as a value: passes in order, verified after each, with the program kept as it was after every one."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sylvie_fx.ir.errors import OptionError, VerifyError
from sylvie_fx.ir.program import Program
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.verifier import verify_program


@dataclass(frozen=True)
class Snapshot:
    """The program after one pass.

    Attributes:
        name: Name of the pass; ``capture`` for the program as it was captured.
        text: The program's text.
        seconds: What the pass took.
        changed: Whether the text differs from the one before.
    """

    name: str
    text: str
    seconds: float
    changed: bool

    def __str__(self) -> str:
        return self.text


class PassManager:
    """An ordered, immutable pipeline.

    Example:
        >>> from sylvie_fx.passes.pipeline import default_passes
        >>> default_passes().names[:2]
        ('functionalize', 'decompose')

    Args:
        passes: The passes in order.
    """

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.passes = tuple(passes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the passes in order."""
        return tuple(p.name for p in self.passes)

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def insert_before(self, name: str, *new: Pass) -> PassManager:
        """A pipeline with passes in front of a named one."""
        at = self._at(name)
        return PassManager((*self.passes[:at], *new, *self.passes[at:]))

    def insert_after(self, name: str, *new: Pass) -> PassManager:
        """A pipeline with passes behind a named one."""
        at = self._at(name) + 1
        return PassManager((*self.passes[:at], *new, *self.passes[at:]))

    def without(self, *names: str) -> PassManager:
        """A pipeline without some passes."""
        for name in names:
            self._at(name)
        return PassManager([p for p in self.passes if p.name not in names])

    def replace(self, name: str, new: Pass) -> PassManager:
        """A pipeline with another pass in the place of a named one."""
        at = self._at(name)
        return PassManager((*self.passes[:at], new, *self.passes[at + 1 :]))

    def _at(self, name: str) -> int:
        if name not in self.names:
            raise OptionError(f"there is no pass {name!r}", remedy=f"choose one of {', '.join(self.names)}")
        return self.names.index(name)

    def run(self, program: Program, context: PassContext) -> tuple[Program, list[Snapshot]]:
        """Run all passes; the program is verified after each.

        Raises:
            PassError: A pass refuses the program.
            VerifyError: A pass broke the program; names the pass.
        """
        text = str(program)
        snapshots = [Snapshot("capture", text, 0.0, True)]
        for one in self.passes:
            start = time.perf_counter()
            try:
                program = one.run(program, context)
                verify_program(program)
            except VerifyError as error:
                error.add_note(f"after pass {one.name!r}, on the program\n{text}")
                raise
            seconds = time.perf_counter() - start
            before, text = text, str(program)
            snapshots.append(Snapshot(one.name, text, seconds, text != before))
        return program, snapshots


def differences(snapshots: Iterable[Snapshot]) -> str:
    """What each pass changed, as unified diffs."""
    parts: list[str] = []
    previous = ""
    for snapshot in snapshots:
        parts += difflib.unified_diff(
            previous.splitlines(), snapshot.text.splitlines(), "before", snapshot.name, lineterm="", n=1
        )
        previous = snapshot.text
    return "\n".join(parts)
