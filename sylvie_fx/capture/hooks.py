"""Hooks of modules: a program has none, so those that are not part of a layer of torch are refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from sylvie_fx.capture.failures import in_module
from sylvie_fx.ir.errors import CaptureError

_LIBRARIES = frozenset({"torch", "torch_geometric", "dgl"})
_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
_GLOBAL = tuple(
    (getattr(torch_module, f"_global{name}"), "backward" if name in _BACKWARD else "forward")
    for name in (*_FORWARD, *_BACKWARD)
)


def refuse_hooks(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Refuse hooks of the user's on modules; it is asked before every call, since hooks come and go.

    Hooks that torch and graph libraries register themselves (spectral_norm, weight_norm, pruning) compute a layer's
    weights: they are captured as part of the forward pass.

    Args:
        model: The model, for the paths of its modules.
        modules: All of its modules.

    Raises:
        CaptureError: A module has a hook.
    """
    for hooks, kind in _GLOBAL:
        if hooks:
            _check(hooks.values(), kind, "")
    for module in modules:
        own = vars(module)
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            _check((h for name in _FORWARD for h in own[name].values()), "forward", _path(model, module))
        if own["_backward_hooks"] or own["_backward_pre_hooks"]:
            _check((h for name in _BACKWARD for h in own[name].values()), "backward", _path(model, module))


def _check(hooks: Iterable[Any], kind: str, path: str) -> None:
    for hook in hooks:
        if _of_a_library(hook):
            continue
        backward = kind == "backward"
        raise CaptureError(
            in_module(f"a module has a {kind} hook", ("", path)),
            where=_line(hook),
            why="torch.export captures the forward pass alone, so the gradient would be another one" if backward else
            "a captured program does not call modules: the hook would see stand-ins for tensors, once, or nothing",
            remedy="remove it, and look at gradients after backward()" if backward else
            "remove it, and return what it looks at from forward; a hook on the distributed model itself works",
        )  # fmt: skip


def _of_a_library(hook: Any) -> bool:
    """Whether a library wrote it; classes of the user's own count where they derive from torch's for hooks (pruning)."""
    written = hook if hasattr(hook, "__qualname__") else type(hook)
    derived = any(c.__module__.startswith("torch.nn.utils.") for c in type(hook).__mro__)
    return derived or str(written.__module__).split(".")[0] in _LIBRARIES


def _line(hook: Any) -> str | None:
    """Where a hook is written."""
    code = getattr(inspect.unwrap(hook), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None


def _path(model: nn.Module, module: nn.Module) -> str:
    paths: dict[nn.Module, str] = {found: path for path, found in model.named_modules()}
    return paths[module]
