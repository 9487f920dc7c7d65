"""What a method of a model changes besides attributes: a program would change it once, at its capture, and never again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sylvie_fx.ir.errors import CaptureError


@contextmanager
def unwritten(model: nn.Module, name: str, given: Any) -> Iterator[None]:
    """Refuse a method that sets modes, or changes the lists and dicts that it is given: a program would not do it again.

    Args:
        model: Whose modes are looked at; they are put back.
        name: Of the method.
        given: Its arguments.

    Raises:
        CaptureError: It does.
    """
    modes = [(module, module.training) for module in model.modules()]
    leaves, structure = pytree.tree_flatten(given)
    try:
        yield
        changed = [type(module).__name__ for module, mode in modes if module.training != mode]
    finally:
        for module, mode in modes:
            module.training = mode
    if changed:
        raise CaptureError(
            f"{name} sets the mode of {changed[0]}",
            where=_line(model, name),
            why="a program that was captured would not set it",
            remedy="call train() and eval() outside the method",
        )
    now, shape = pytree.tree_flatten(given)
    if shape != structure or any(a is not b for a, b in zip(now, leaves, strict=True)):
        raise CaptureError(
            f"{name} changes a list or dict that it is given",
            where=_line(model, name),
            why="a program that was captured would not change it",
            remedy="return the values instead",
        )


def refuse_no_result(model: nn.Module, name: str, result: Any) -> None:
    """Refuse a method that is called for something else than a tensor, such as one that saves or prints.

    Args:
        model: Whose method it is.
        name: Of the method.
        result: What it returns.

    Raises:
        CaptureError: There is no tensor in it.
    """
    if not any(isinstance(value, Tensor) for value in pytree.tree_leaves(result)):
        raise CaptureError(
            f"{name} returns no tensor and assigns none",
            where=_line(model, name),
            why="what it does besides, a program that was captured would not do",
            remedy="return what it computes as a tensor",
        )


def _line(model: nn.Module, name: str) -> str:
    code = getattr(inspect.unwrap(getattr(type(model), name)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
