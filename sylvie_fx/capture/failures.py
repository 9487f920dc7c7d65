"""What stopped torch.export, as a sentence with the user's line and module."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from torch import nn

from sylvie_fx.ir.errors import CaptureError, SylvieError
from sylvie_fx.ir.source import is_ours, user_line

Place = tuple[str, str]
"""``file:line`` and the module's path; each empty where it is not known."""


def place_of(frames: Sequence[FrameType], model: nn.Module) -> Place:
    """The user's line and the module that frames of a stack, outermost first, stand in."""
    paths = {id(module): path for path, module in model.named_modules()}
    inside = [f.f_locals.get("self") for f in frames]
    modules = [paths[id(m)] for m in inside if isinstance(m, nn.Module) and id(m) in paths]
    lines = (f'File "{f.f_code.co_filename}", line {f.f_lineno}, in {f.f_code.co_name}\n' for f in frames)
    return user_line("".join(lines)), modules[-1] if modules else ""


def raised_at(error: BaseException, model: nn.Module) -> Place:
    """Where an exception came from."""
    line = user_line("".join(traceback.format_tb(error.__traceback__)))
    return line, place_of([frame for frame, _ in traceback.walk_tb(error.__traceback__)], model)[1]


def in_module(what: str, place: Place) -> str:
    """A sentence with the module's path behind it."""
    return f"{what} in module {place[1]!r}" if place[1] else what


def own_error(error: BaseException | None) -> SylvieError | None:
    """The error of ours that an exception was raised from."""
    while error is not None:
        if isinstance(error, SylvieError):
            return error
        error = error.__cause__ or error.__context__
    return None


def located(error: SylvieError, model: nn.Module) -> SylvieError:
    """An error with the place where it was raised in the model, if it names none itself."""
    place = raised_at(error, model)
    if error.where is not None or not place[0]:
        return error
    return type(error)(in_module(error.what, place), where=place[0], why=error.why, remedy=error.remedy)


def is_data_dependent(error: Exception) -> bool:
    """Whether torch.export stopped since Python asked for the value of a tensor, or could not use the symbol it got for one."""
    symbol = isinstance(error, TypeError) and "SymInt" in str(error)
    return symbol or "data-dependent" in str(error) or "DataDependent" in type(error).__name__


def depends_on_sizes(error: Exception) -> bool:
    """Whether torch.export stopped since the forward pass differs between sizes; not since a size must be one number."""
    text = str(error)
    return (
        ("Constraints violated" in text and "specialized it to be a constant" not in text)
        or "with inconsistent min" in text
        or "Expected op to be '=='" in text  # torch could not say what is violated: the bound is no whole number
    )


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0][:300]


def conditions(sizes: Any) -> list[tuple[Any, Any]]:
    """What a capture has relied on about sizes so far: each condition, and the frame of Python that asked where it is known.

    Args:
        sizes: A shape environment.
    """
    deferred = [item.expr for found in sizes.deferred_runtime_asserts.values() for item in found]
    return [(guard.expr, guard.sloc.framework_loc) for guard in sizes.guards] + [(e, None) for e in deferred]


def explain_failure(error: Exception, model: nn.Module, environments: Sequence[Any] = (),
                    guarded: dict[Any, Place] | None = None) -> CaptureError:  # fmt: skip
    """What stopped torch.export, as a sentence with the user's line.

    Args:
        error: What it raised.
        model: The model that was captured.
        environments: Shape environments of the capture, which know where a size became a number.
        guarded: A condition on sizes to the place in the model that asked for it.
    """
    place = raised_at(error, model)
    what = f"the forward pass can not be captured: {type(error).__name__}: {first_line(error)}"
    if is_data_dependent(error) and not isinstance(error, TypeError):
        return CaptureError(
            in_module(what, place), where=place[0] or None,
            why="a Python branch or number depends on values that are known only when the program runs",
            remedy="express the branch with tensor operations (torch.where), or move it out of forward",
        )  # fmt: skip
    name = re.search(r"(?:Constraints violated|Specializations unexpectedly required) \((\w+)", str(error))
    if name:
        place = _where_fixed(environments, guarded or {})
        return CaptureError(
            in_module(f"the forward pass is not the same for every number of {name[1]}", place),
            where=place[0] or None,
            why="it fits the number into a fixed shape, or mixes rows of the graph with a tensor of fixed length",
            remedy="compute with sizes as with any number, and use tensor operations over all rows",
        )  # fmt: skip
    if re.search(r"SymInt|\b[su]\d+\b", str(error)):
        return CaptureError(
            in_module(what, place), where=place[0] or None,
            why="sizes of the graph are symbols while the model is captured, so that the program fits any graph",
            remedy="compute with sizes as with any number, and let no shape fit one graph only",
        )  # fmt: skip
    return CaptureError(in_module(what, place), where=place[0] or None)


def _where_fixed(environments: Sequence[Any], guarded: dict[Any, Place]) -> Place:
    """Where a size of the graph was replaced by a number; else where one was first compared."""
    found = [*_guards(environments, guarded)]
    fixed = [place for place, condition in found if condition.is_Relational and condition.rel_op == "=="]
    return (fixed or [place for place, _ in found] or [("", "")])[0]


def _guards(environments: Sequence[Any], guarded: dict[Any, Place]) -> Iterator[tuple[Place, Any]]:
    """The conditions on sizes that the capture relied on, each with its place in the model where that is known."""
    for condition, frame in (found for sizes in environments[-1:] for found in conditions(sizes)):
        own = isinstance(frame, traceback.FrameSummary) and not is_ours(frame.filename)
        line, module = guarded.get(condition, ("", ""))
        line = f"{frame.filename}:{frame.lineno}" if own else line
        if line:
            yield (line, module), condition
