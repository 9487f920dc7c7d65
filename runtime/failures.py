"""Who failed first: what the ranks of a process group tell each other, through its store, when a wire breaks."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

_T = TypeVar("_T")

#: Seconds that a rank which lost its peer waits for the explanation of somebody who knows more.
_GRACE = 1.0
_POLL = 0.05


@dataclass(frozen=True)
class Observation:
    """What one rank saw.

    Attributes:
        observer: The rank that saw it.
        culprit: The rank that it blames; itself, where it failed on its own.
        reason: One sentence without its subject, such as "sent nothing for 5 s".
        doing: What the observer waited in; empty where it failed on its own.
        line: The user's line of it.
    """

    observer: int
    culprit: int
    reason: str
    doing: str = ""
    line: str = ""


def doing_at(name: str, line: str) -> str:
    """What a rank waits in, and where."""
    return f"{name} at {line}" if line else name


class KeyValueStore(Protocol):
    """What the board needs of a torch.distributed Store."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Wait for a value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether the keys exist."""


class FailureBoard:
    """One observation a rank, in the store of the process group.

    A store that is gone or does not answer only costs the explanation.

    Args:
        store: The store that all ranks of the group reach.
        rank: This rank.
    """

    def __init__(self, store: KeyValueStore, rank: int) -> None:
        self._store, self._rank = store, rank

    def report(self, culprit: int, reason: str, doing: str = "", line: str = "") -> None:
        """Publish what this rank saw."""
        text = json.dumps(asdict(Observation(self._rank, culprit, reason, doing, line)))
        _bounded(lambda: self._store.set(_key(self._rank), text))

    def withdraw(self) -> None:
        """Take back what was reported: this rank goes on."""
        _bounded(lambda: self._store.set(_key(self._rank), ""))

    def explain(self, suspect: int) -> list[Observation]:
        """Follow who blames whom, from a suspect to the last rank that is blamed.

        Args:
            suspect: The rank that this rank's own message missed.

        Returns:
            What the suspect saw, then what the rank that it blames saw, and so on; the last one blames the culprit, or a
            rank of this list, or this rank: they wait for each other. Empty where the suspect said nothing.
        """
        found: list[Observation] = []
        seen = {self._rank}
        deadline = time.monotonic() + _GRACE
        while suspect not in seen:
            seen.add(suspect)
            following = self._read(suspect, deadline)
            if following is None:
                break
            found.append(following)
            suspect = following.culprit
        return found

    def _read(self, rank: int, deadline: float) -> Observation | None:
        while True:
            text = _bounded(lambda: self._store.get(_key(rank)) if self._store.check([_key(rank)]) else None)
            if text:  # empty where it was withdrawn
                return Observation(**json.loads(text))
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL)


def _key(rank: int) -> str:
    return f"sylvie_fx/failure/{rank}"


def _bounded(call: Callable[[], _T]) -> _T | None:
    """The result of a call to the store, or None where it fails or its server does not answer."""
    results: list[_T] = []

    def attempt() -> None:
        with contextlib.suppress(RuntimeError):  # the store's server died: there is no explanation to be had
            results.append(call())

    # A call to a store whose server is stopped blocks for good, and can only be left behind.
    thread = threading.Thread(target=attempt, name="sylvie_fx store", daemon=True)
    thread.start()
    thread.join(_GRACE)
    return results[0] if results else None
