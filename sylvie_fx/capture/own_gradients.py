"""Gradients that a model defines itself: torch.export captures forward passes alone, and would lose them silently."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch.nn.modules._functions
import torch.utils.checkpoint
from torch.autograd import Function

from sylvie_fx.ir.errors import CaptureError

_HOOKS = torch.nn.modules._functions.BackwardHookFunction
HOOKING = frozenset({"register_hook", "retain_grad"})
"""Methods of tensors that act in the backward pass."""
DIFFERENTIATING = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""Functions that run a backward pass."""


@contextlib.contextmanager
def refused_own_gradients() -> Iterator[None]:
    """Refuse autograd functions while a forward pass is captured; checkpoints run as what they wrap."""
    before, thread = Function.__dict__["apply"], threading.get_ident()

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:  # another rank of this process, which runs its program
            return before.__get__(None, cls)(*args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            run, _, *rest = args
            return run(*rest)
        if cls is _HOOKS:
            raise CaptureError(
                "a module has a backward hook", why=_WHY, remedy="remove it, and look at gradients after backward()"
            )
        if cls.__module__.startswith("torch."):
            return before.__get__(None, cls)(*args, **kwargs)
        raise CaptureError(
            f"the forward pass uses {cls.__name__}, an autograd function with a backward pass of its own", why=_WHY,
            remedy="write it with torch operators and detach(): y.detach() + (x - x.detach()) has the value of y and the gradient of x",
        )  # fmt: skip

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Function.apply = before  # type: ignore[method-assign]


def refuse_hook(name: str) -> CaptureError:
    """The error for a tensor's hook."""
    return CaptureError(f"the forward pass calls {name} on a tensor", why=_WHY,
                        remedy="look at gradients of inputs and parameters after backward()")  # fmt: skip


def refuse_backward(name: str) -> CaptureError:
    """The error for a backward pass inside of what is captured."""
    return CaptureError(f"{name}() runs a backward pass inside of what is captured", why="a program is a forward pass",
                        remedy=f"return the loss, and call {name}() outside")  # fmt: skip


_WHY = "torch.export captures the forward pass alone, so the gradient would be another one"
