"""The number of messages of a node, as a user-defined reduce function reads it: one number for each node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from sylvie_fx.capture.dgl_index import StandInIndex, refusal, user_frame
from sylvie_fx.ir.errors import CaptureError

_UFUNCS: dict[str, Callable[..., Any]] = {
    "log": torch.log, "log1p": torch.log1p, "log2": torch.log2, "log10": torch.log10, "exp": torch.exp,
    "sqrt": torch.sqrt, "square": torch.square, "reciprocal": torch.reciprocal, "add": operator.add,
    "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv, "true_divide": operator.truediv,
    "power": operator.pow,
}  # fmt: skip


class NodeNumber:
    """A number that a reduce function takes for one number, and that has one value for each node.

    Args:
        values: ``[N]``; in-degrees are at least 1, since the function is never called for a node without messages.
        index: The graph.
    """

    __array_priority__ = 1000

    def __init__(self, values: Tensor, index: StandInIndex) -> None:
        self._values, self._index = values, index

    def is_degree_of(self, degrees: Tensor) -> bool:
        """Whether this is the untouched in-degree."""
        return self._values is degrees

    def at_edges(self, like: Tensor) -> Tensor:
        """The number of each edge's destination, shaped to be broadcast against ``like`` ``[E, ...]``."""
        rows = self._values.index_select(0, self._index.dst)
        return _shaped(rows, like)

    def _combine(self, function: Callable[[Any, Any], Any], other: Any, turned: bool) -> Any:
        if isinstance(other, Tensor) and other.dim() > 0:
            if not _same(other.shape[0], self._index.size):
                raise _refusal("with a tensor that has no row for each node")
            mine = _shaped(self._values, other)
            return function(other, mine) if turned else function(mine, other)
        if not isinstance(other, (int, float, NodeNumber, Tensor)):
            return NotImplemented
        left, right = self._exact(), other._exact() if isinstance(other, NodeNumber) else other
        return NodeNumber(function(right, left) if turned else function(left, right), self._index)

    def _exact(self) -> Tensor:
        """The values as eager Python has them: a Python float is float64."""
        return self._values.double()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """NumPy functions of the number, as models take a logarithm of the degree."""
        function = _UFUNCS.get(ufunc.__name__)
        if method != "__call__" or function is None or kwargs:
            raise _refusal(f"in numpy.{ufunc.__name__}")
        if len(inputs) == 1:
            return NodeNumber(function(self._exact()), self._index)
        other = inputs[1] if inputs[0] is self else inputs[0]
        other = other if isinstance(other, (Tensor, NodeNumber)) else float(other)
        return self._combine(function, other, turned=inputs[0] is not self)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Arithmetic with tensors that have a row for each node."""
        name = func.__name__.strip("_")
        name = {"div": "truediv", "multiply": "mul", "true_divide": "truediv", "divide": "truediv"}.get(name, name)
        function = getattr(operator, name, None) if name in ("add", "sub", "mul", "truediv", "pow") else None
        if function is None or kwargs or len(args) != 2:
            raise _refusal(f"in torch's {name}")
        if isinstance(args[0], NodeNumber):
            return args[0]._combine(function, args[1], turned=False)
        return args[1]._combine(function, args[0], turned=True)

    def _plain(self, *args: object) -> NoReturn:
        raise _refusal("as one plain number, or in a comparison")

    __bool__ = __int__ = __float__ = __index__ = _plain
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _plain
    __hash__ = None  # type: ignore[assignment]


def _arithmetic(name: str, turned: bool) -> Callable[..., Any]:
    function = getattr(operator, name)

    def apply(self: NodeNumber, other: Any) -> Any:
        return self._combine(function, other, turned)

    return apply


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(NodeNumber, f"__{_name}__", _arithmetic(_name, turned=False))
    setattr(NodeNumber, f"__r{_name}__", _arithmetic(_name, turned=True))


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    shaped = rows.reshape(-1, *(1,) * (like.dim() - 1))
    return shaped.to(like.dtype) if like.dtype.is_floating_point else shaped


def _same(left: Any, right: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(left == right)


def _refusal(how: str) -> CaptureError:
    return refusal(
        f"a reduce function that uses the number of messages {how}",
        "that number differs from node to node, and the function is captured once for all of them",
        where=user_frame(inside_dgl=True),
        remedy="use it in arithmetic only, or read graph.in_degrees() outside of the function",
    )
