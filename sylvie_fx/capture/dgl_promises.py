"""Python branches on values of the graph alone, such as DGL's checks for nodes without in-edges.

While capturing, a degree or an edge list is symbolic, and ``if (graph.in_degrees() == 0).any()`` has no answer. A value
that comes from the graph alone therefore remembers how to compute itself from the real graph. A branch on it is decided
by the real graph where that is at hand, else by the ordinary outcome (no such node), and is noted as a promise that has
to be checked on every real graph before the program may run on it.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from sylvie_fx.ir.errors import CaptureError

Replay = Callable[[Any], Any]

_TAG = "_sylvie_graph_value"
_DECISIONS = frozenset({"__bool__", "item", "__int__", "__float__", "__index__", "tolist", "__contains__"})
# Without a real graph, only these predicates have an outcome that one may expect: false.
_EXPECTED_FALSE = frozenset({"any", "eq", "__eq__", "__contains__"})
_RANDOM = frozenset({
    "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d",
    "dropout3d", "bernoulli", "multinomial", "normal", "rand_like", "randn_like", "randint_like", "rand",
    "randn", "randint", "randperm", "rrelu", "poisson",
})  # fmt: skip


@dataclass(frozen=True)
class Promise:
    """What a captured branch took for granted about the graph.

    Attributes:
        description: One sentence.
        expected: The value that the branch or number had.
        replay: The value on a real graph.
        where: ``file:line`` of the branch.
        error: Type and text of the error that the branch raises itself, if it does nothing else.
    """

    description: str
    expected: Any
    replay: Replay
    where: str | None = None
    error: tuple[type[Exception], str] | None = None

    def check(self, graph: Any) -> None:
        """Compare with a real graph.

        Raises:
            Exception: What the model itself raises there (DGL's ``DGLError`` for nodes without in-edges).
            CaptureError: The graph takes the other branch.
        """
        found = _plain(self.replay(graph))
        if found == self.expected:
            return
        if self.error is not None:
            kind, text = self.error
            raise kind(text)
        raise CaptureError(
            f"{self.description}, but on this graph it is {found}",
            where=self.where,
            why="the captured program took the other branch",
            remedy="capture again with this graph",
        )

    def __str__(self) -> str:
        """Line and sentence."""
        return f"{self.where}: {self.description}" if self.where else self.description


@dataclass
class Ledger:
    """Promises of one capture, shared by the graphs derived from one another.

    Attributes:
        real: The graph that decides branches; None to take the ordinary outcome.
        promises: In the order in which they were made.
    """

    real: Any = None
    promises: list[Promise] = field(default_factory=list)


@dataclass(frozen=True)
class _GraphValue:
    ledger: Ledger
    replay: Replay
    last: str


def tag(value: Tensor, ledger: Ledger, replay: Replay, last: str = "") -> Tensor:
    """Let a tensor remember that ``replay(graph)`` computes it; returns the same tensor."""
    setattr(value, _TAG, _GraphValue(ledger, replay, last))
    return value


def _tag_of(value: object) -> _GraphValue | None:
    return getattr(value, _TAG, None) if isinstance(value, Tensor) else None


class PromiseMode(TorchFunctionMode):
    """Follows values of the graph through torch functions, and answers when Python asks for one."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See every torch call of the forward."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _DECISIONS:
            decided, value = _decide(func, name, args)
            if decided:
                return value
        result = func(*args, **kwargs)
        if name == "__setitem__" or _in_place(name) or "out" in kwargs:
            for value in (*args[:1], kwargs.get("out")):
                if _tag_of(value) is not None:
                    delattr(value, _TAG)
        elif name not in _RANDOM and name not in ("__get__", "__set__"):
            _follow(func, name, args, kwargs, result)
        return result


def _in_place(name: str) -> bool:
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__int__", "__index__", "__iter__")
    return name.endswith("_")


def _leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _leaves(value)
    elif isinstance(values, slice):
        yield from (values.start, values.stop, values.step)
    else:
        yield values


def _follow(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    ledger: Ledger | None = None
    for leaf in _leaves([*args, *kwargs.values()]):
        found = _tag_of(leaf)
        if found is not None:
            ledger = found.ledger
        elif isinstance(leaf, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return
    if ledger is None:
        return

    def replay(graph: Any) -> Any:
        return func(*_replayed(args, graph), **{key: _replayed(value, graph) for key, value in kwargs.items()})

    if isinstance(result, Tensor):
        tag(result, ledger, replay, name)
    elif isinstance(result, tuple) and all(isinstance(part, Tensor) for part in result):
        for position, part in enumerate(result):
            tag(part, ledger, functools.partial(_part, replay, position), name)


def _part(replay: Replay, position: int, graph: Any) -> Any:
    return replay(graph)[position]


def _replayed(value: Any, graph: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_replayed(part, graph) for part in value)
    found = _tag_of(value)
    return value if found is None else found.replay(graph)


def _decide(func: Callable[..., Any], name: str, args: Sequence[Any]) -> tuple[bool, Any]:
    """Whether the value that Python asks for is known, and the value."""
    found = _tag_of(args[0])
    frame = _asking_frame()
    if found is None:
        return _keep_as_assertion(name, args, frame)
    others = args[1:]
    if any(isinstance(other, (Tensor, torch.SymInt)) for other in others):
        return False, None

    def replay(graph: Any) -> Any:
        return func(found.replay(graph), *others)

    if found.ledger.real is not None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            value = _plain(replay(found.ledger.real))
    elif (name if name == "__contains__" else found.last) in _EXPECTED_FALSE:
        value = False
    else:
        return False, None
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() if frame is not None else ""
    found.ledger.promises.append(
        Promise(
            f"{line or name!r} was taken to be {value}",
            value,
            replay,
            f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else None,
            _raised_by_branch(frame) if value is False else None,
        )
    )
    return True, value


def _keep_as_assertion(name: str, args: Sequence[Any], frame: FrameType | None) -> tuple[bool, Any]:
    """A branch on data that only raises becomes an assertion in the program, and is not taken."""
    value = args[0]
    if name not in ("__bool__", "item") or not is_fake(value) or value.dtype != torch.bool:
        return False, None
    error = _raised_by_branch(frame)
    if error is None or value.numel() != 1:
        return False, None
    torch._assert_async(value.logical_not().all(), error[1])
    return True, False


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _asking_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and not f"{module}.".startswith("torch."):
            return frame
        frame = frame.f_back
    return None


def _raised_by_branch(frame: FrameType | None) -> tuple[type[Exception], str] | None:
    """Type and text of ``raise Error("text")`` where that is all that the ``if`` at this frame's line does."""
    if frame is None:
        return None
    source = "".join(linecache.getlines(frame.f_code.co_filename))
    if not source:
        return None
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.If) or not node.test.lineno <= frame.f_lineno <= (node.test.end_lineno or 0):
            continue
        statement = node.body[0]
        if not isinstance(statement, ast.Raise) or not isinstance(statement.exc, ast.Call) or not statement.exc.args:
            continue
        text, kind = statement.exc.args[0], statement.exc.func
        name = kind.id if isinstance(kind, ast.Name) else None
        builtins = vars(sys.modules["builtins"])
        error = frame.f_globals.get(name, builtins.get(name)) if name is not None else None
        if isinstance(error, type) and issubclass(error, Exception) and isinstance(text, ast.Constant):
            return error, str(text.value)
    return None
