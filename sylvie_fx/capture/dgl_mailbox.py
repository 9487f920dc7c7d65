"""The mailbox that a user-defined reduce function sees while it is captured.

DGL calls such a function once for each in-degree ``D``, with messages of shape ``[n, D, ...]``. Here it is called
once, for all nodes, with an object that stands for the ragged ``[N, D, ...]`` and holds the messages as they lie on the
edges, ``[E, ...]``. Elementwise work stays on the edges, a reduction over dimension 1 becomes a scatter, and whatever
would need the messages side by side (an LSTM, a sort, an index into them) is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from sylvie_fx.capture.dgl_degree import NodeNumber
from sylvie_fx.capture.dgl_index import Size, StandInIndex, refusal, user_frame
from sylvie_fx.capture.dgl_ops import reduce_edges, softmax_rows
from sylvie_fx.ir.errors import CaptureError

_POINTWISE = frozenset({
    "add", "sub", "rsub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "rpow", "radd",
    "rmul", "rtruediv", "truediv", "neg", "negative", "maximum", "minimum", "exp", "expm1", "log", "log1p",
    "log2", "log10", "sqrt", "rsqrt", "square", "abs", "absolute", "sign", "relu", "relu6", "leaky_relu",
    "prelu", "elu", "selu", "gelu", "silu", "mish", "sigmoid", "logsigmoid", "tanh", "softplus", "hardtanh",
    "sin", "cos", "tan", "clamp", "clip", "clamp_min", "clamp_max", "reciprocal", "where", "masked_fill", "eq",
    "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan", "isinf", "nan_to_num",
    "dropout", "to", "float", "double", "half", "bfloat16", "long", "int", "bool", "type", "type_as",
    "contiguous", "clone", "detach", "addcmul", "lerp",
})  # fmt: skip
_REDUCED = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min", "max": "max", "min": "min"}
_BY_FEATURE = frozenset({"layer_norm", "linear"})
_SAME_DIM = frozenset({
    "softmax", "log_softmax", "normalize", "norm", "cumsum", "prod", "std", "var", "argmax", "argmin", "sort",
    "flip",
})  # fmt: skip


class Extremum(NamedTuple):
    """What ``max(dim=1)`` returns: the values, and nothing usable in the place of the positions."""

    values: Any
    indices: object


class Mailbox:
    """Messages of all nodes as a ragged ``[N, D, ...]``.

    Args:
        values: The messages on the edges, ``[E, ...]``.
        index: The graph.
        degrees: In-degree of each node, at least 1, ``[N]``.
    """

    def __init__(self, values: Tensor, index: StandInIndex, degrees: Tensor) -> None:
        self.values, self._index, self._degrees = values, index, degrees

    @property
    def shape(self) -> tuple[Any, ...]:
        """``(N, D, ...)``, where ``D`` is a number that differs from node to node."""
        degree = NodeNumber(self._degrees, self._index)
        return (self._index.size, degree, *self.values.shape[1:])

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions, that of the nodes and of the messages included."""
        return self.values.dim() + 1

    @property
    def ndim(self) -> int:
        """As of a tensor."""
        return self.dim()

    @property
    def dtype(self) -> torch.dtype:
        """As of a tensor."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """As of a tensor."""
        return self.values.device

    def new_zeros(self, *size: Any, **kwargs: Any) -> Tensor:
        """As of a tensor."""
        return self.values.new_zeros(*size, **kwargs)

    def __len__(self) -> Any:
        """``N``."""
        return self._index.size

    def __getitem__(self, key: Any) -> Mailbox:
        """As of a tensor, after the first two dimensions."""
        keys = key if isinstance(key, tuple) else (key,)
        full = slice(None)
        if keys[0] is Ellipsis and Ellipsis not in keys[1:] and len(keys) - 1 <= self.values.dim() - 1:
            return self._like(self.values[keys])
        if len(keys) >= 2 and keys[0] == full and keys[1] == full:
            return self._like(self.values[(full, *keys[2:])])
        raise unreduced("an index into the messages of a node", "their order and number differ from node to node")

    def view(self, *size: Any) -> Mailbox:
        """As of a tensor, where the first two dimensions stay."""
        sizes = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        if len(sizes) >= 2 and isinstance(sizes[1], NodeNumber) and sizes[1].is_degree_of(self._degrees):
            return self._like(self.values.reshape(self.values.shape[0], *sizes[2:]))
        raise unreduced("a new shape of the mailbox", "its first two dimensions have to stay as they are")

    reshape = view

    def unsqueeze(self, dim: int) -> Mailbox:
        """As of a tensor, after the first two dimensions."""
        return self._like(self.values.unsqueeze(self._feature_dim(dim, self.dim() + 1)))

    def squeeze(self, dim: int) -> Mailbox:
        """As of a tensor, after the first two dimensions."""
        return self._like(self.values.squeeze(self._feature_dim(dim)))

    def transpose(self, dim0: int, dim1: int) -> Mailbox:
        """As of a tensor, after the first two dimensions."""
        return self._like(self.values.transpose(self._feature_dim(dim0), self._feature_dim(dim1)))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The methods of a tensor."""
        method = getattr(torch.Tensor, name, None)
        if name.startswith("__") or method is None:
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(method, (self, *args), kwargs)

        return call

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Torch functions of the mailbox, alone or among other arguments."""
        named = dict(kwargs or {})
        everything = [*args, *named.values()]
        nested = [x for item in everything if isinstance(item, (list, tuple)) for x in item]
        box = next(x for x in [*everything, *nested] if isinstance(x, Mailbox))
        return box._call(func, tuple(args), named)

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.__name__.strip("_")
        if func.__name__.endswith("_") and not func.__name__.endswith("__"):
            raise unreduced(f"{func.__name__} on its mailbox", "messages are not changed in place")
        if name in _POINTWISE:
            named = {key: self._at_edges(x) for key, x in kwargs.items()}
            return self._like(func(*(self._at_edges(x) for x in args), **named))
        if name in _BY_FEATURE or (name == "matmul" and args[0] is self and isinstance(args[1], Tensor)):
            plain = [x.values if isinstance(x, Mailbox) else x for x in args]
            if name == "matmul" and args[1].dim() > 2:
                raise unreduced("a batched product on its mailbox", "the second operand is not one matrix")
            return self._like(func(*plain, **kwargs))
        if name in ("cat", "concat", "stack"):
            return self._joined(func, name, args, kwargs)
        if name in _REDUCED and _is_reduction(name, args, kwargs):
            return self._reduced(func, name, args[1:], kwargs)
        if name in _SAME_DIM:
            return self._along(func, name, args, kwargs)
        raise unreduced(f"{name} on its mailbox", "it needs the messages of a node side by side")

    def _like(self, values: Tensor) -> Mailbox:
        return Mailbox(values, self._index, self._degrees)

    def _feature_dim(self, dim: int, rank: int | None = None) -> int:
        rank = self.dim() if rank is None else rank
        positive = dim + rank if dim < 0 else dim
        if positive < 2:
            raise unreduced(f"dimension {dim} of its mailbox", "the first two are the nodes and their messages")
        return positive - 1

    def _at_edges(self, operand: Any) -> Any:
        """An operand that is broadcast against ``[N, D, ...]``, as one against ``[E, ...]``."""
        if isinstance(operand, Mailbox):
            return operand.values
        if isinstance(operand, NodeNumber):
            return operand.at_edges(self.values)
        if not isinstance(operand, Tensor) or operand.dim() < self.dim() - 1:
            return operand
        if operand.dim() > self.dim() or not _is_one(operand.shape[operand.dim() - self.dim() + 1]):
            raise unreduced("a tensor that does not match its mailbox", "its second dimension has to be 1")
        rows = operand.squeeze(operand.dim() - self.dim() + 1)
        if operand.dim() < self.dim() or _is_one(operand.shape[0]):
            return rows
        return rows.index_select(0, self._index.dst)

    def _joined(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mailbox:
        dim = kwargs.pop("dim", args[1] if len(args) > 1 else 0)
        rank = self.dim() + (name == "stack")
        return self._like(func([self._at_edges(x) for x in args[0]], dim=self._feature_dim(dim, rank), **kwargs))

    def _reduced(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dim = kwargs.get("dim", kwargs.get("axis", args[0] if args else None))
        keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
        if dim is None:
            raise unreduced(f"{name} over its whole mailbox", "it mixes the messages of different nodes")
        dims = sorted(d + self.dim() if d < 0 else d for d in (dim if isinstance(dim, Sequence) else (dim,)))
        if dims == [1]:
            found = reduced(reduce_edges(self._index, self.values, _REDUCED[name]))
            found = found.unsqueeze(1) if keepdim else found
            return Extremum(found, _NoPositions()) if name in ("max", "min") else found
        if 1 in dims and name in ("sum", "mean", "amax", "amin") and not keepdim:
            features = [self._feature_dim(d) for d in dims if d != 1]
            return reduced(reduce_edges(self._index, func(self.values, dim=features), _REDUCED[name]))
        plain = [self._feature_dim(d) for d in dims]
        found = func(self.values, dim=plain if isinstance(dim, Sequence) else plain[0], keepdim=keepdim)
        return Extremum(self._like(found.values), found.indices) if name in ("max", "min") else self._like(found)

    def _along(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        takes_dim = name not in ("normalize", "norm")  # as its second argument
        default = 1 if name == "normalize" else None
        dim = kwargs.pop("dim", args[1] if len(args) > 1 and takes_dim else default)
        if dim is None:
            raise unreduced(f"{name} over its whole mailbox", "it mixes the messages of different nodes")
        if name == "softmax" and dim in (1, 1 - self.dim()):
            return self._like(softmax_rows(self.values, self._index.dst, self._index.size))
        if dim in (1, 1 - self.dim()):
            raise unreduced(f"{name} over the messages of a node", "only sum, mean, max, min and softmax are known")
        rest = args[2:] if takes_dim else args[1:]
        return self._like(func(self.values, *rest, dim=self._feature_dim(dim), **kwargs))


def _operator(name: str) -> Callable[..., Any]:
    function = getattr(torch.Tensor, name)

    def apply(self: Mailbox, *args: Any) -> Any:
        return self._call(function, (self, *args), {})

    return apply


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "abs", "matmul",
    "lt", "le", "gt", "ge",
):  # fmt: skip
    setattr(Mailbox, f"__{_name}__", _operator(f"__{_name}__"))


class _NoPositions:
    """In the place of the positions of a maximum: which message it was has no meaning without the mailbox."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unreduced("the position of a maximum among messages", "it has no counterpart in a scatter")


def reduced(value: Tensor) -> Tensor:
    """Mark a value that is zero already for nodes without messages."""
    value._sylvie_reduced = True  # type: ignore[attr-defined]
    return value


def is_reduced(value: Tensor) -> bool:
    """Whether the value comes straight from a reduction over the mailbox."""
    return getattr(value, "_sylvie_reduced", False)


def unreduced(what: str, why: str) -> CaptureError:
    """The error to raise for what a reduce function does, naming its line."""
    return refusal(
        f"a reduce function with {what}",
        why,
        where=user_frame(inside_dgl=True),
        remedy="use sum, mean, max or min over dimension 1 of the mailbox, or a builtin reduce function of DGL",
    )


def _is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def _is_reduction(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    other = args[1] if len(args) > 1 else kwargs.get("other")
    return not (name in ("max", "min") and isinstance(other, (Tensor, Mailbox)))
