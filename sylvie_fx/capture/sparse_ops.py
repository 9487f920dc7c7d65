"""What a stand-in adjacency answers: one handler a torch call, registered by the call's name.

Importing this module registers them. Shapes: ``E`` entries, ``N`` nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from sylvie_fx.capture.sparse_layout import Entries, Order
from sylvie_fx.capture.sparse_origin import IndexPair, compressed, remember
from sylvie_fx.capture.sparse_tensor import Handler, StandInAdjacency, handles, refuse

_TRANSPOSED = {torch.sparse_csr: torch.sparse_csc, torch.sparse_csc: torch.sparse_csr}
_DENSE = "its result has N x N numbers, for N nodes"

# --- what kind of tensor it is -------------------------------------------------------------------------------------


def _asked_of_the_object(func: Handler) -> Handler:
    """Answer from the tensor object itself, which knows its shape, dtype and device."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    return answer


for _name in ("shape", "ndim", "dtype", "device", "is_cuda", "is_cpu", "is_meta", "requires_grad", "is_quantized"):
    handles(f"get:{_name}")(_asked_of_the_object(getattr(Tensor, _name).__get__))
for _name in ("size", "dim", "ndimension", "numel", "nelement", "__len__", "get_device"):
    handles(_name)(_asked_of_the_object(getattr(Tensor, _name)))
for _name in ("is_floating_point", "is_complex"):
    handles(_name)(_asked_of_the_object(getattr(torch, _name)))


@handles("get:layout")
def _layout(adj: StandInAdjacency) -> torch.layout:
    return adj.kind


@handles("get:is_sparse")
def _is_sparse(adj: StandInAdjacency) -> bool:
    return adj.kind is torch.sparse_coo


@handles("get:is_sparse_csr")
def _is_sparse_csr(adj: StandInAdjacency) -> bool:
    return adj.kind is torch.sparse_csr


@handles("sparse_dim")
def _sparse_dim(adj: StandInAdjacency) -> int:
    return 2


@handles("dense_dim")
def _dense_dim(adj: StandInAdjacency) -> int:
    return adj.dim() - 2


@handles("_nnz")
def _nnz(adj: StandInAdjacency) -> int:
    return adj.stored().row.shape[0]


# --- taking it apart -----------------------------------------------------------------------------------------------


@handles("_indices", "indices")
def _indices(adj: StandInAdjacency) -> Tensor:
    _expect(adj, torch.sparse_coo, "indices()")
    stored = adj.stored()
    return remember(torch.stack([stored.row, stored.col]), IndexPair(stored.row, stored.col, stored.order))


@handles("values")
def _values(adj: StandInAdjacency) -> Tensor:
    return adj.stored().weights()


@handles("_values")
def _raw_values(adj: StandInAdjacency) -> Tensor:
    _expect(adj, torch.sparse_coo, "_values()")
    return adj.stored().weights().detach()


@handles("crow_indices")
def _crow_indices(adj: StandInAdjacency) -> Tensor:
    _expect(adj, torch.sparse_csr, "crow_indices()")
    return compressed(adj.stored().row, adj.entries.n_rows)


@handles("col_indices")
def _col_indices(adj: StandInAdjacency) -> Tensor:
    _expect(adj, torch.sparse_csr, "col_indices()")
    return adj.stored().col


@handles("ccol_indices")
def _ccol_indices(adj: StandInAdjacency) -> Tensor:
    _expect(adj, torch.sparse_csc, "ccol_indices()")
    return compressed(adj.stored().col, adj.entries.n_cols)


@handles("row_indices")
def _row_indices(adj: StandInAdjacency) -> Tensor:
    _expect(adj, torch.sparse_csc, "row_indices()")
    return adj.stored().row


# --- the same matrix in another form -------------------------------------------------------------------------------


@handles("t", "get:T", "get:mT", "adjoint")
def _t(adj: StandInAdjacency) -> Tensor:
    return adj.remade(adj.stored().transposed(), _TRANSPOSED.get(adj.kind), coalesced=False)


@handles("transpose", "swapaxes", "swapdims")
def _transpose(adj: StandInAdjacency, dim0: int, dim1: int) -> Tensor:
    first, second = _axis(dim0), _axis(dim1)
    return adj if first == second else _t(adj)


@handles("coalesce")
def _coalesce(adj: StandInAdjacency) -> Tensor:
    _expect(adj, torch.sparse_coo, "coalesce()")
    return adj if adj.coalesced else adj.remade(adj.merged(), coalesced=True)


@handles("is_coalesced")
def _is_coalesced(adj: StandInAdjacency) -> bool:
    _expect(adj, torch.sparse_coo, "is_coalesced()")
    return adj.coalesced


@handles("_coalesced_")
def _set_coalesced(adj: StandInAdjacency, coalesced: bool) -> Tensor:
    """As torch: a claim about the entries as they lie, which are neither sorted nor merged for it."""
    stored = adj.stored()
    order = Order.BY_ROW if coalesced else Order.ANY
    adj.entries = Entries(stored.row, stored.col, stored.value, stored.n_rows, stored.n_cols, order)
    adj.coalesced = coalesced
    return adj


@handles("to_sparse", "_to_sparse", "to_sparse_coo")
def _to_sparse(adj: StandInAdjacency, sparse_dim: int | None = None, *, layout: torch.layout | None = None) -> Tensor:
    if sparse_dim not in (None, 2):
        refuse(f"to_sparse({sparse_dim}) on a sparse adjacency", "an adjacency has two sparse dimensions")
    return _in_layout(adj, layout or torch.sparse_coo)


@handles("to_sparse_csr", "_to_sparse_csr")
def _to_sparse_csr(adj: StandInAdjacency) -> Tensor:
    return _in_layout(adj, torch.sparse_csr)


@handles("to_sparse_csc", "_to_sparse_csc")
def _to_sparse_csc(adj: StandInAdjacency) -> Tensor:
    return _in_layout(adj, torch.sparse_csc)


def _in_layout(adj: StandInAdjacency, layout: torch.layout) -> Tensor:
    if layout is adj.kind:
        return adj
    return adj.remade(adj.merged(), layout, coalesced=True)


@handles("detach", "get:data")
def _detach(adj: StandInAdjacency) -> Tensor:
    return adj if adj.entries.value is None else adj.remade(adj.entries.with_value(adj.entries.value.detach()))


@handles("clone", "contiguous")
def _clone(adj: StandInAdjacency, **kwargs: object) -> Tensor:
    return adj.remade(adj.entries)


# --- arithmetic on the values --------------------------------------------------------------------------------------


def _cast(name: str) -> Handler:
    """A conversion of dtype or device, done on the values as they are stored."""

    def convert(adj: StandInAdjacency, *args: Any, **kwargs: Any) -> Tensor:
        stored = adj.stored()
        weights = stored.weights()
        converted = getattr(weights, name)(*args, **kwargs)
        implicit = stored.value is None and converted.dtype is weights.dtype
        return adj.remade(stored if implicit else stored.with_value(converted))

    return convert


def _zero_preserving(name: str) -> Handler:
    """A function of one number that maps 0 to 0, done on the merged values."""

    def apply(adj: StandInAdjacency, *args: Any, **kwargs: Any) -> Tensor:
        merged = adj.merged()
        return adj.remade(merged.with_value(getattr(torch, name)(merged.weights(), *args)), coalesced=True)

    return apply


_CASTS = "to float double half bfloat16 long int bool type type_as cpu cuda"
_ZERO_PRESERVING = "abs sqrt square sign sin tanh relu log1p expm1 floor ceil round pow"
for _name in _CASTS.split():
    handles(_name)(_cast(_name))
for _name in _ZERO_PRESERVING.split():
    handles(_name)(_zero_preserving(_name))
handles("__pow__")(_zero_preserving("pow"))


@handles("neg", "negative")
def _neg(adj: StandInAdjacency) -> Tensor:
    return adj.remade(adj.stored().with_value(-adj.stored().weights()))


@handles("mul", "multiply", "__mul__", "__rmul__")
def _mul(left: Any, right: Any) -> Tensor:
    if isinstance(left, StandInAdjacency) and isinstance(right, StandInAdjacency):
        mine, theirs = left.merged(), right.merged()
        if not mine.same_places(theirs):
            refuse("the elementwise product of two sparse matrices", "it needs the places that both have in common")
        return left.remade(mine.with_value(mine.weights() * theirs.weights()), coalesced=True)
    adj, factor = (left, right) if isinstance(left, StandInAdjacency) else (right, left)
    stored = adj.stored()
    made: Tensor = adj.remade(stored.with_value(stored.weights() * _factor(stored, factor)))
    return made


def _factor(stored: Entries, factor: Any) -> Any:
    """The entries' factor: a scalar, or ``[E]`` from a column ``[N, 1]`` or a row ``[N]``, ``[1, N]``."""
    if not isinstance(factor, Tensor) or factor.dim() == 0:
        return factor
    if factor.dim() == 1:
        return factor.index_select(0, stored.col)
    if factor.dim() == 2 and factor.shape[1] == 1:
        return factor.squeeze(1).index_select(0, stored.row)
    if factor.dim() == 2 and factor.shape[0] == 1:
        return factor.squeeze(0).index_select(0, stored.col)
    return refuse("the elementwise product of a sparse adjacency and a dense matrix", "the dense one is N x N")


@handles("div", "divide", "true_divide", "__truediv__")
def _div(adj: Any, divisor: Any) -> Tensor:
    if not isinstance(adj, StandInAdjacency) or (isinstance(divisor, Tensor) and divisor.dim() > 0):
        refuse("a division with a sparse adjacency by more than a scalar", "torch does not define it either")
    return adj.remade(adj.stored().with_value(adj.stored().weights() / divisor))


@handles("add", "__add__", "__radd__")
def _add(left: Any, right: Any, *, alpha: float = 1) -> Tensor:
    if not isinstance(left, StandInAdjacency) or not isinstance(right, StandInAdjacency):
        refuse("the sum of a sparse adjacency and something dense", _DENSE)
    mine, theirs = left.stored(), right.stored()
    scaled = theirs.weights() if alpha == 1 else theirs.weights() * alpha
    both = left.coalesced and right.coalesced
    if mine.same_places(theirs):
        return left.remade(mine.with_value(mine.weights() + scaled), coalesced=both)
    row, col = torch.cat([mine.row, theirs.row]), torch.cat([mine.col, theirs.col])
    entries = Entries(row, col, torch.cat([mine.weights(), scaled]), mine.n_rows, mine.n_cols, Order.ANY)
    return left.remade(entries, coalesced=both)


@handles("sub", "subtract", "__sub__")
def _sub(left: Any, right: Any, *, alpha: float = 1) -> Tensor:
    return cast(Tensor, _add(left, right, alpha=-alpha))


# --- what has no sparse form ---------------------------------------------------------------------------------------


@handles("to_dense", "todense")
def _to_dense(adj: StandInAdjacency, *args: object, **kwargs: object) -> Tensor:
    return refuse("to_dense() on a sparse adjacency", _DENSE)


@handles("__getitem__", "select", "index_select", "narrow")
def _rows(adj: StandInAdjacency, *args: object, **kwargs: object) -> Tensor:
    return refuse(
        "rows or columns picked out of a sparse adjacency",
        "a part of the adjacency belongs to other nodes than its rows say",
        "Multiply with the whole adjacency and pick the rows of the product",
    )


@handles("cat", "stack", "concat", "hstack", "vstack", "block_diag")
def _joined(matrices: Sequence[Tensor], *args: object, **kwargs: object) -> Tensor:
    return refuse("sparse adjacencies joined into a larger matrix", "its rows are not the nodes of the graph any more")


@handles("_is_view", "stride", "storage", "untyped_storage")
def _memory(adj: StandInAdjacency, *args: object, **kwargs: object) -> object:
    return refuse(
        "a sparse adjacency where only plain tensors can go, such as a result of forward",
        "what forward returns are rows of nodes or of edges",
        "Return the product with it, or its values()",
    )


# --- helpers -------------------------------------------------------------------------------------------------------


def _expect(adj: StandInAdjacency, layout: torch.layout, call: str) -> None:
    if adj.kind is not layout:
        refuse(f"{call} on a sparse matrix of layout {adj.kind}", f"torch defines it for {layout} only")


def _axis(dim: int) -> int:
    if dim not in (-2, -1, 0, 1):
        refuse(f"dimension {dim} of a sparse adjacency", "an adjacency has two dimensions")
    return dim % 2
