"""What to log while programs are made; SYLVIE_FX_* variables fill the defaults."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sylvie_fx.ir.errors import OptionError
from sylvie_fx.passes.manager import Snapshot

log = logging.getLogger(__name__)

_AFTER = "after:"


@dataclass(frozen=True)
class DebugOptions:
    """What to log, at level INFO of the logger ``sylvie_fx.debug``.

    Attributes:
        print: ``after-all`` logs what each pass changed in the program, as a diff; ``after:<pass>`` logs the program
            after that pass (``after:capture``: as it was captured). Variable: ``SYLVIE_FX_PRINT``.

    Raises:
        OptionError: Another value.
    """

    print: str | None = None

    def __post_init__(self) -> None:
        if self.print is not None and self.print != "after-all" and not self.print.startswith(_AFTER):
            raise OptionError(f"print={self.print!r}", remedy="use after-all, or after:<pass>")

    @classmethod
    def from_environment(cls) -> DebugOptions:
        """What ``SYLVIE_FX_*`` variables ask for; it is logged to stderr where no logging is set up."""
        found = cls(os.environ.get("SYLVIE_FX_PRINT") or None)
        if found.print is not None and not log.hasHandlers():
            log.addHandler(logging.StreamHandler(sys.stderr))
            log.setLevel(logging.INFO)
        return found

    def check(self, passes: Collection[str]) -> None:
        """Raise an OptionError where a pass is named that the pipeline does not have."""
        if self.print is not None and self.print.startswith(_AFTER):
            name = self.print.removeprefix(_AFTER)
            if name not in (*passes, "capture"):
                raise OptionError(f"there is no pass {name!r}", remedy=f"choose one of capture, {', '.join(passes)}")

    def show(self, snapshots: Sequence[Snapshot]) -> None:
        """Log what was asked for of a new program."""
        if self.print is None:
            return
        before = ""
        for snapshot in snapshots:
            if self.print == f"{_AFTER}{snapshot.name}":
                log.info("program after %s\n%s", snapshot.name, snapshot.text)
            elif self.print == "after-all" and snapshot.changed:
                lines = difflib.unified_diff(before.splitlines(), snapshot.text.splitlines(), lineterm="", n=1)
                log.info("%s, %.3f s\n%s", snapshot.name, snapshot.seconds, "\n".join(list(lines)[2:]))
            before = snapshot.text
