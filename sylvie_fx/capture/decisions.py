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
from typing import Any

import torch
import torch.compiler
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sylvie_fx.ir.errors import CaptureError

_READS = frozenset({
    Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.tolist, torch.is_nonzero, torch.equal,
    Tensor.equal, Tensor.__contains__,
})  # fmt: skip
"""Functions that turn the value of a tensor into a Python object."""

_SIZED = frozenset({
    torch.nonzero, Tensor.nonzero, Tensor.__getitem__, torch.masked_select, Tensor.masked_select, torch.unique, Tensor.unique,
    torch.unique_consecutive, Tensor.unique_consecutive, torch.repeat_interleave, Tensor.repeat_interleave, torch.bincount,
    Tensor.bincount, torch.where, torch.argwhere, Tensor.argwhere, torch._unique2,
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
        result = func(*args, **(kwargs or {}))
        if func in _READS:
            self.decisions.append(Decision(func.__name__, copy.copy(result)))
        elif func in _SIZED:
            self.decisions.append(Decision(func.__name__, _shapes(result)))
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
        kwargs = kwargs or {}
        if func in _READS:
            answer = self._next(func)
            condition = _condition(func, args, kwargs, answer)
            torch._assert_async(condition, f"{func.__name__.strip('_')} is {answer}")
            return copy.copy(answer)
        result = func(*args, **kwargs)
        if func in _SIZED:
            for shape, value in zip(self._next(func), _tensors(result), strict=True):
                _tell_sizes(value, shape)
        return result

    def _next(self, func: Any) -> Any:
        found = next(self._rest, None)
        if found is None or found.function != func.__name__:
            raise CaptureError(
                "the forward pass takes another way when it is captured than when it runs",
                why=f"it asked for {func.__name__} where it asked for {found.function if found else 'nothing'} before",
                remedy="do not branch on whether the model is being compiled, nor on random numbers",
            )
        return found.answer


def _tensors(result: Any) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(result) if isinstance(v, Tensor)]


def _shapes(result: Any) -> list[tuple[int, ...]]:
    return [tuple(v.shape) for v in _tensors(result)]


def _condition(func: Any, args: Any, kwargs: Any, answer: Any) -> Tensor:
    """A bool tensor that says whether a read would give this answer again."""
    value = args[0]
    if func in (torch.equal, Tensor.equal):
        same = (value == args[1]).all()
        return same if answer else ~same
    if func is Tensor.__contains__:
        held = (value == args[1]).any()
        return held if answer else ~held
    if func is Tensor.tolist and value.dim():
        return (value == torch.tensor(answer, dtype=value.dtype, device=value.device)).all()
    value = value.reshape(())
    if func in (Tensor.__bool__, torch.is_nonzero):
        return value != 0 if answer else value == 0
    if func in (Tensor.__int__, Tensor.__index__) and value.dtype.is_floating_point:
        return value.trunc() == answer
    return value != value if answer != answer else value == answer


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
    with _Recording() as mode, torch.no_grad(), torch.random.fork_rng(devices=[]), _as_while_exporting(), _undone(model):
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
