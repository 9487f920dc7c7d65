"""The arguments of a call as a flat list of tensors, and back: containers, graphs and data objects are taken apart."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree


class Frontend(Protocol):
    """Takes apart the objects of one framework; one for each of DGL, PyG and sparse adjacency."""

    @staticmethod
    def context() -> AbstractContextManager[None]:
        """What must be in force while the model is captured."""

    def check(self, stand_in: Any, value: Any) -> None:
        """Check on the real object what the capture took for granted."""

    def matches(self, value: Any) -> bool:
        """Whether the object is this frontend's."""

    def expand(self, value: Any) -> Expanded:
        """The object's tensors, and how the capture's stand-in is made of others."""


@dataclass(frozen=True)
class Expanded:
    """An object taken apart.

    Attributes:
        tensors: ``(suffix, tensor)`` in a fixed order.
        build: Makes the stand-in from replacements of the tensors.
        key: Everything else that the capture depends on.
    """

    tensors: list[tuple[str, Tensor]]
    build: Callable[[Sequence[Tensor]], Any]
    key: Hashable


@dataclass(frozen=True)
class FlatCall:
    """A call taken apart.

    Attributes:
        leaves: ``(path, tensor)``; the path is how a person would name it.
        rebuild: Makes ``(args, kwargs)`` from replacements of the tensors.
        key: Structure and constants: calls with equal keys rebuild alike.
        objects: The frontends' objects in the call, in order.
        stand_ins: Their stand-ins, as the last rebuild made them.
    """

    leaves: list[tuple[str, Tensor]]
    rebuild: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    key: Hashable
    objects: list[tuple[Frontend, Any]] = field(default_factory=list)
    stand_ins: list[Any] = field(default_factory=list)

    @contextmanager
    def active(self) -> Iterator[None]:
        """What the frontends of this call need while the model is captured."""
        with ExitStack() as stack:
            for context in dict.fromkeys(type(frontend).context for frontend, _ in self.objects):
                stack.enter_context(context())
            yield

    def check(self, stand_ins: Sequence[Any]) -> None:
        """Check on this call's real graphs what the capture with ``stand_ins`` took for granted."""
        for (frontend, value), stand_in in zip(self.objects, stand_ins, strict=True):
            frontend.check(stand_in, value)


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any], frontends: Sequence[Frontend]) -> FlatCall:
    """Take a call apart.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        frontends: Who takes apart what is not a tensor or container.
    """

    def is_leaf(value: Any) -> bool:
        return isinstance(value, Tensor) or any(f.matches(value) for f in frontends)

    named, spec = pytree.tree_flatten_with_path((args, kwargs), is_leaf=is_leaf)
    leaves: list[tuple[str, Tensor]] = []
    builders: list[Callable[[Sequence[Tensor]], Any]] = []
    keys: list[Hashable] = []
    objects: list[tuple[Frontend, Any]] = []
    stand_ins: list[Any] = []
    for path, value in named:
        name = _path_name(path)
        start = len(leaves)
        frontend = next((f for f in frontends if f.matches(value)), None)
        if frontend is not None:
            parts = frontend.expand(value)
            leaves += [(name + suffix, t) for suffix, t in parts.tensors]
            objects.append((frontend, value))

            def make(
                ts: Sequence[Tensor], build: Any = parts.build, s: int = start, n: int = len(parts.tensors)
            ) -> Any:
                stand_ins.append(build(ts[s : s + n]))
                return stand_ins[-1]

            builders.append(make)
            keys.append((type(frontend).__name__, parts.key, tuple(suffix for suffix, _ in parts.tensors)))
        elif isinstance(value, Tensor):
            leaves.append((name, value))
            builders.append(lambda ts, s=start: ts[s])  # type: ignore[misc]
            keys.append("tensor")
        else:
            builders.append(lambda ts, v=value: v)  # type: ignore[misc]
            keys.append(_constant_key(value))

    def rebuild(tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        stand_ins.clear()
        built = pytree.tree_unflatten([b(tensors) for b in builders], spec)
        return built[0], built[1]

    return FlatCall(leaves, rebuild, (tuple(keys), spec), objects, stand_ins)


class _Identity:
    """An object that can not be hashed, as a key: equal to itself alone, and alive so that none takes its place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value


def _constant_key(value: Any) -> Hashable:
    if isinstance(value, slice):  # hashable from Python 3.12 on
        return ("slice", value.start, value.stop, value.step)
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return (type(value).__name__, value)


def _path_name(path: tuple[Any, ...]) -> str:
    kind, *rest = path
    if getattr(kind, "idx", 0) == 1 and rest:
        first, *rest = rest
        return str(getattr(first, "key", first)) + pytree.keystr(tuple(rest))
    return ("args" + pytree.keystr(tuple(rest))) if rest else "args"
