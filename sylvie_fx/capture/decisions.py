"""Python branches on values of tensors: decided by running the model once on real data, and kept as checks.

torch.export follows one way through the Python code of a forward pass. Where the code asks a tensor for its value
(``if (deg == 0).any():``, ``range(int(edge_type.max()) + 1)``) the model is first run eagerly on the sample and every
answer is recorded; the capture then gives the same answers and leaves an assertion behind each. Assertions on the graph
alone are evaluated on the real graph when data is bound (passes/split_prologue.py); others are refused.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.compiler
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sylvie_fx.ir.decided import decided
from sylvie_fx.ir.errors import CaptureError

_READS = frozenset({
    "item", "__bool__", "__int__", "__float__", "__index__", "is_nonzero", "equal", "__contains__",
})  # fmt: skip
"""Functions that turn the value of a tensor into a Python object. By name: torch.export replaces some of them."""

_SIZED = frozenset({
    "nonzero", "__getitem__", "masked_select", "unique", "_unique2", "unique_consecutive", "repeat_interleave", "bincount",
    "where", "argwhere",
})  # fmt: skip
"""Functions whose result has as many rows as the values say."""


@dataclass(frozen=True)
class Decision:
    """One answer that the eager run gave: what a function read, or the shapes that it returned."""

    function: str
    answer: Any


class _Recording(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.decisions: list[Decision] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _name(func)
        if name == "tolist":
            return _tolist(args[0], self)
        result = func(*args, **(kwargs or {}))
        if name in _READS:
            self.decisions.append(Decision(name, copy.copy(result)))
        elif name == "unbind":
            self.decisions.append(Decision(name, len(result)))
        elif name in _SIZED:
            self.decisions.append(Decision(name, _shapes(result)))
        return result


class Replaying(TorchFunctionMode):
    """Gives the recorded answers during the capture, and asserts each in the captured program.

    Args:
        decisions: What the eager run recorded.
    """

    def __init__(self, decisions: list[Decision]) -> None:
        super().__init__()
        self._rest = iter(decisions)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer reads, tell sizes; everything else runs as it is."""
        kwargs, name = kwargs or {}, _name(func)
        if name in _READS:
            answer = self._next(name)
            decided(_condition(name, args, answer), f"{name.strip('_')} is {answer}")
            return copy.copy(answer)
        if name == "tolist":
            return _tolist(args[0], self)
        if name == "unbind":
            return self._unbind(*args, rows=self._next(name), **kwargs)
        result = func(*args, **kwargs)
        if name in _SIZED:
            for shape, value in zip(self._next(name), _tensors(result), strict=True):
                _tell_sizes(value, shape)
        return result

    @staticmethod
    def _unbind(value: Tensor, dim: int = 0, *, rows: int) -> tuple[Tensor, ...]:
        if isinstance(value.shape[dim], int):
            return value.unbind(dim)
        torch._check(value.shape[dim] == rows)
        return tuple(value.select(dim, i) for i in range(rows))

    def _next(self, name: str) -> Any:
        found = next(self._rest, None)
        if found is None or found.function != name:
            raise CaptureError(
                "the forward pass takes another way when it is captured than when it runs",
                why=f"it asked for {name} where it asked for {found.function if found else 'nothing'} before",
                remedy="do not branch on whether the model is being compiled, nor on random numbers",
            )
        return found.answer


def _tolist(value: Tensor, mode: TorchFunctionMode) -> Any:
    """``tolist`` as torch.export runs it: rows apart, then single values."""
    if value.dim() == 0:
        return mode.__torch_function__(Tensor.item, (), (value,))
    return [_tolist(row, mode) for row in mode.__torch_function__(Tensor.unbind, (), (value,))]


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _tensors(result: Any) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(result) if isinstance(v, Tensor)]


def _shapes(result: Any) -> list[tuple[int, ...]]:
    return [tuple(v.shape) for v in _tensors(result)]


def _condition(name: str, args: Any, answer: Any) -> Tensor:
    """A bool tensor that says whether a read would give this answer again."""
    value: Tensor = args[0]
    if name in ("equal", "__contains__"):
        same = value == args[1]
        held = same.all() if name == "equal" else same.any()
        return cast(Tensor, held if answer else ~held)
    value = value.reshape(())
    if name in ("__bool__", "is_nonzero"):
        return torch.ne(value, 0) if answer else torch.eq(value, 0)
    if name in ("__int__", "__index__") and value.dtype.is_floating_point:
        return torch.eq(value.trunc(), answer)
    return value.isnan() if answer != answer else torch.eq(value, answer)


def _tell_sizes(value: Tensor, shape: tuple[int, ...]) -> None:
    """Let comparisons with a size that the values decide be answered as the eager run answers them."""
    for size, known in zip(value.shape, shape, strict=True):
        if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and not size.node.has_hint():
            size.node.shape_env.set_real_tensor_prop_unbacked_vals(size.node.expr, known)


def record(model: nn.Module, run: Callable[[], Any]) -> list[Decision]:
    """Run a model eagerly and record what its Python code asks tensors for; the model is left as it was.

    Args:
        model: The module whose attributes and buffers may change while it runs.
        run: Calls it.
    """
    mode = _Recording()
    with mode, torch.no_grad(), torch.random.fork_rng(devices=[]), _as_while_exporting(), _undone(model):
        run()
    return mode.decisions


@contextlib.contextmanager
def _as_while_exporting() -> Iterator[None]:
    """Code that asks whether it is being compiled gets the answer that it gets in the capture."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = {flag: getattr(torch.compiler, flag) for flag in flags if hasattr(torch.compiler, flag)}
    for flag in before:
        setattr(torch.compiler, flag, True)
    try:
        yield
    finally:
        for flag, value in before.items():
            setattr(torch.compiler, flag, value)


@contextlib.contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Attributes and buffers of the module and its children are as before afterwards."""
    before = [(m, dict(m.__dict__), dict(m._buffers)) for m in model.modules()]
    for module, _, buffers in before:
        for name, buffer in buffers.items():
            module._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
