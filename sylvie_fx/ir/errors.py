"""The one tree of errors. Each message says what was found, where, why it matters and what to do."""

from __future__ import annotations


class SylvieError(Exception):
    """Base of every error that sylvie_fx raises on purpose.

    Args:
        what: What was found, one sentence.
        where: The user's ``file:line`` or module path, if known.
        why: Why it can not be accepted.
        remedy: What the user can do about it.
    """

    def __init__(
        self, what: str, *, where: str | None = None, why: str | None = None, remedy: str | None = None
    ) -> None:
        self.what, self.where, self.why, self.remedy = what, where, why, remedy
        parts = [what.rstrip(".")]
        if why:
            parts.append(why.rstrip("."))
        if remedy:
            parts.append(remedy.rstrip("."))
        text = ". ".join(parts) + "."
        super().__init__(f"{where}: {text}" if where else text)


class CaptureError(SylvieError):
    """The model or its inputs can not be turned into a program."""


class BranchError(CaptureError):
    """A Python branch was decided otherwise, when the model was captured, than this graph decides it."""


class PassError(SylvieError):
    """A pass met a program that it can not rewrite exactly."""


class VerifyError(SylvieError):
    """A program violates an invariant after a pass: a fault of that pass, not of the user's model."""


class PartitionError(SylvieError):
    """A graph, an assignment of nodes to parts, or a sharded object is malformed."""


class CommError(SylvieError):
    """A peer died, hung, raised, or runs something else than this rank."""


class KernelError(SylvieError):
    """A kernel was given tensors that it does not take, or could not be built."""


class OptionError(SylvieError, ValueError):
    """An option has a value that is not allowed."""
