"""What a forward pass reads and assigns of its modules' attributes: torch.export undoes the assignments, and says nothing.

Tensors that are assigned, buffers among them, become results of the program, and are assigned after each call; numbers
and flags too. What the pass reads from one call and assigns for the next is refused, but for buffers, for numbers and
flags, which are part of a program's key, and for what it computes once and keeps (a cache).
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sylvie_fx.capture.failures import in_module
from sylvie_fx.capture.held import graph_kind
from sylvie_fx.capture.written import refuse_no_result, unwritten
from sylvie_fx.ir.errors import CaptureError
from sylvie_fx.ir.source import is_ours
from sylvie_fx.ir.written import stamp

Attribute: TypeAlias = tuple[str, str]
"""A module's path and the name of one of its attributes."""

SIMPLE = (int, float, bool, str, type(None))
_LIBRARIES = ("torch", "torch_geometric", "dgl")
_OF_THE_FRAMEWORK = frozenset(vars(nn.Module()))
_DEEPEST = 4
_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """An attribute that is not as it was before the pass.

    Attributes:
        attribute: Which.
        line: The user's line that assigned it last.
        value: What it is now.
        buffer: Whether it is a buffer.
    """

    attribute: Attribute
    line: str
    value: Any
    buffer: bool = False

    def refused(self) -> CaptureError:
        """The error where it can not be kept."""
        path, name = self.attribute
        return CaptureError(
            in_module(f"forward keeps self.{name} from one call for the next", (self.line, path)), where=self.line,
            why="a captured program has no Python state: it would see the value of the first call for ever",
            remedy=f"return it and pass it in, or register it as a buffer and write it in place: self.{name}.copy_(...)",
        )  # fmt: skip


class Watch:
    """Runs a forward pass and finds what it does to attributes.

    Attributes:
        reads: Attributes whose value before the call was read.
        assigned: Those that were assigned anew, whatever they were, and numbers and flags that were changed.
        carried: Those that were read first and are others now.
        learned: Lines that assign a value with a gradient to a buffer.
    """

    def __init__(self) -> None:
        self.reads: set[Attribute] = set()
        self.assigned: list[Change] = []
        self.carried: list[Change] = []
        self.learned: list[str] = []
        self._lines: dict[Attribute, tuple[str, bool]] = {}

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "") -> Any:
        """``model(*args, **kwargs)``, or a method of it.

        What a library's model (PyG's VGAE) assigns to itself in a method, its other methods read: there it counts as a user's.

        Raises:
            CaptureError: It replaces a parameter, or a buffer by one of another shape or type.
        """
        self.__init__()  # type: ignore[misc]  # a capture may run it several times
        modules = [(path, m, attributes(m), dict(m._buffers), dict(m._parameters)) for path, m in model.named_modules()]
        with _recorded({id(m): path for path, m, *_ in modules}, self.reads, self._lines):
            if method:
                with unwritten(model, method, (args, kwargs)):
                    result = getattr(model, method)(*args, **kwargs)
            else:
                result = model(*args, **kwargs)
        given = {id(v) for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)}
        for path, module, _, buffers, _ in modules:
            self._buffers(path, module, buffers)
        for path, module, found, _, parameters in modules:
            for name in dict.fromkeys((*parameters, *module._parameters)):
                if module._parameters.get(name) is not parameters.get(name):
                    line = self._lines.get((path, name), (_forward_of(module), False))[0]
                    raise CaptureError(
                        in_module(f"forward replaces the parameter {name}", (line, path)), where=line,
                        why="the optimizer would go on with the old one", remedy="compute with a local variable",
                    )  # fmt: skip
            self._compare(path, module, found, given, own=bool(method) and not path)
        if method and not self.assigned:
            refuse_no_result(model, method, result)
        return result

    def _buffers(self, path: str, module: nn.Module, before: dict[str, Any]) -> None:
        """Take the new values of buffers that were assigned, and put the old ones back."""
        held = {id(b) for b in before.values() if b is not None}
        for name in dict.fromkeys((*before, *module._buffers)):
            old, new = before.get(name), module._buffers.get(name)
            line, library = self._lines.get((path, name), (_forward_of(module), False))
            if new is old or (library and (old is None or new is None)):
                continue
            sized = isinstance(new, Tensor) and not any(isinstance(s, torch.SymInt) for s in new.shape)
            if old is None or new is None or not sized or (old.shape, old.dtype) != (new.shape, new.dtype):
                raise CaptureError(
                    in_module(f"forward replaces the buffer {name} by one of another shape or type", (line, path)), where=line,
                    why="a buffer is the same on every rank, and has one shape",
                    remedy=f"register it with its final shape and type, and write self.{name}.copy_(...)",
                )  # fmt: skip
            if new.requires_grad:
                self.learned.append(line)
            module._buffers[name] = old
            value = new.detach().clone() if id(new) in held else new.detach()
            self.assigned.append(Change((path, name), line, value, True))

    def _compare(self, path: str, module: nn.Module, before: dict[str, Any], given: set[int], own: bool) -> None:
        after = attributes(module)
        for name in dict.fromkeys((*before, *after)):
            old, new = before.get(name, _ABSENT), after.get(name, _ABSENT)
            if same(old, new):
                continue
            inside = of_a_library(type(module).__module__)
            line, library = self._lines.get((path, name), (_forward_of(module), inside))
            if library and not own:  # what a layer keeps for itself
                continue
            change = Change((path, name), line, vars(module).get(name, _ABSENT))
            if (path, name) in self.reads:
                simple = type(change.value) in SIMPLE and (old is _ABSENT or type(old) in SIMPLE)
                (self.assigned if simple else self.carried).append(change)
            elif all(_kept(v, given) for v in pytree.tree_leaves(change.value)):
                self.assigned.append(change)
            # Else it is an argument, a graph or a size, kept for the methods of this call.


def of_a_library(name: str | None) -> bool:
    """Whether a module of Python is part of torch or of a graph library."""
    return str(name).split(".")[0] in _LIBRARIES


def refuse_hidden_parameters(model: nn.Module, reads: Iterable[Attribute]) -> None:
    """Refuse parameters that forward finds in a list or dict, where torch does not register them.

    Args:
        model: The model.
        reads: Attributes that forward reads.

    Raises:
        CaptureError: A program would have them as constants, and they would never learn.
    """
    registered = {id(p) for p in model.parameters()}
    for path, name in reads:
        module = model.get_submodule(path)
        for value in _inside(vars(module).get(name)):
            own = list(value.parameters()) if isinstance(value, nn.Module) else [value]
            if any(isinstance(p, nn.Parameter) and p.requires_grad and id(p) not in registered for p in own):
                line = _forward_of(module)
                raise CaptureError(
                    in_module(f"self.{name} holds parameters that are not registered", (line, path)), where=line,
                    why="model.parameters() does not find them, and a program would have them as constants",
                    remedy="keep them in nn.ParameterList, nn.ModuleList or their dicts; or call requires_grad_(False) on them",
                )  # fmt: skip


def _inside(value: Any, depth: int = 0) -> Iterator[Any]:
    if depth < _DEEPEST and type(value) in (list, tuple, dict, deque):
        for item in value.values() if type(value) is dict else value:
            yield from _inside(item, depth + 1)
    else:
        yield value


def _kept(value: Any, given: set[int]) -> bool:
    if isinstance(value, Tensor):
        return id(value) not in given and graph_kind(value) is None
    return type(value) in SIMPLE


@contextlib.contextmanager
def _recorded(paths: dict[int, str], reads: set[Attribute], lines: dict[Attribute, tuple[str, bool]]) -> Iterator[None]:
    """Note which attributes of modules this thread reads before it assigns them, and where it assigns."""
    getter, setter = nn.Module.__dict__.get("__getattribute__"), nn.Module.__setattr__
    get: Callable[[Any, str], Any] = getter or object.__getattribute__
    thread = threading.get_ident()

    def getattribute(self: nn.Module, name: str) -> Any:
        if name not in _OF_THE_FRAMEWORK and threading.get_ident() == thread:
            path = paths.get(id(self))
            if path is not None and (path, name) not in lines:
                reads.add((path, name))
        return get(self, name)

    def setattribute(self: nn.Module, name: str, value: Any) -> None:
        path = paths.get(id(self))
        if path is not None and threading.get_ident() == thread:
            lines[path, name] = _assigning()
        setter(self, name, value)

    nn.Module.__getattribute__ = getattribute  # type: ignore[method-assign, assignment]
    nn.Module.__setattr__ = setattribute  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__setattr__ = setter  # type: ignore[method-assign]
        if getter is None:
            del nn.Module.__getattribute__
        else:
            nn.Module.__getattribute__ = getter  # type: ignore[method-assign]


def _assigning() -> tuple[str, bool]:
    """The line that assigns an attribute, and whether it is a library's."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__setattr__" and frame.f_back is not None:
        frame = frame.f_back
    library = str(frame.f_globals.get("__name__", "")).startswith(_LIBRARIES) or is_ours(frame.f_code.co_filename)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}", library


def _forward_of(module: nn.Module) -> str:
    code = getattr(type(module).forward, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Attributes of every module, and what the containers and tensors among them hold, are as before afterwards."""
    before = [(m, {k: v for k, v in vars(m).items() if k not in _OF_THE_FRAMEWORK}) for m in model.modules()]
    tables = [(table, dict(table)) for m, _ in before for table in (m._parameters, m._buffers)]
    held_values = [v for _, found in before for v in found.values()]
    containers = [(c, c.copy()) for v in held_values for c in _containers(v)]
    tensors = [(v, stamp(v), v.detach().clone()) for v in held_values if type(v) is Tensor and v.is_leaf]
    try:
        yield
    finally:
        for module, found in before:
            for name in vars(module).keys() - _OF_THE_FRAMEWORK - found.keys():
                del vars(module)[name]
            vars(module).update(found)
        for table, registered in tables:
            table.clear()
            table.update(registered)  # type: ignore[arg-type]
        for container, held in containers:
            container.clear()
            container.extend(held) if isinstance(container, (list, deque)) else container.update(held)
        for tensor, before_it, kept in tensors:
            if stamp(tensor) != before_it:
                with torch.no_grad():
                    tensor.copy_(kept)


def _containers(value: Any, depth: int = 0) -> Iterator[Any]:
    """The value where it can be changed in place, and those in it."""
    if type(value) in (list, dict, set, deque):
        yield value
    if depth < _DEEPEST and type(value) in (list, tuple, dict, deque):
        for item in value.values() if type(value) is dict else value:
            yield from _containers(item, depth + 1)


def attributes(module: nn.Module) -> dict[str, Any]:
    """The contents of a module's attributes that are not nn.Module's own."""
    return {name: contents(value) for name, value in vars(module).items() if name not in _OF_THE_FRAMEWORK}


def contents(value: Any, depth: int = 0) -> Any:
    """A value as it is now: containers as tuples of what they hold, tensors and generators with their state."""
    kind = type(value)
    if depth < _DEEPEST:
        if kind in (list, tuple, deque):
            return (kind, *[contents(v, depth + 1) for v in value])
        if kind is dict:
            return (kind, *[(k, contents(v, depth + 1)) for k, v in value.items()])
        if kind in (set, frozenset):
            return (kind, frozenset(value))
    if isinstance(value, random.Random):
        return (kind, value, str(value.getstate()))
    if isinstance(value, np.random.Generator):
        return (kind, value, str(value.bit_generator.state))
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():  # some stand for graphs
            return (kind, value, stamp(value))
    opaque = depth or callable(value) or not hasattr(value, "__dict__") or of_a_library(kind.__module__)
    if not opaque:  # settings: a dataclass, a namespace
        return (kind, value, contents(vars(value), _DEEPEST - 2))
    return value


def same(old: Any, new: Any) -> bool:
    """Whether two results of :func:`contents` are of the same objects in the same state."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if type(old) is tuple:
        return len(old) == len(new) and all(map(same, old, new))
    return type(old) in (*SIMPLE, frozenset) and bool(old == new or (old != old and new != new))
