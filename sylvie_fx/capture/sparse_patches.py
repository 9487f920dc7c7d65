"""While a model is captured: sparse matrices that its forward builds are stand-ins too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sylvie_fx.capture.sparse_layout import Entries, Order, final_order
from sylvie_fx.capture.sparse_origin import Identity, IndexPair, expanded, follow, origin_of, remember
from sylvie_fx.capture.sparse_tensor import StandInAdjacency, refuse

_TO_SPARSE = {
    "to_sparse": torch.sparse_coo,
    "to_sparse_csr": torch.sparse_csr,
    "to_sparse_csc": torch.sparse_csc,
}
_LEGACY = ("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor")


@contextmanager
def patched_sparse() -> Iterator[None]:
    """Make torch's sparse constructors return stand-ins, and follow the index tensors taken out of stand-ins.

    Enter it around the model's forward while exporting (not needed to run the exported program). Outside of it the
    constructors are torch's own again, also after an error.
    """
    with ExitStack() as stack:
        for module in (torch.sparse, torch.cuda.sparse):
            for name in _LEGACY:
                if hasattr(module, name):
                    stack.enter_context(_swapped(module, name, _legacy(name, getattr(module, name))))
        geometric: ModuleType | None = sys.modules.get("torch_geometric.utils.sparse")
        if geometric is not None:
            stack.enter_context(_swapped(geometric, "coalesce", _coalesce_edges))
        stack.enter_context(_SparseMode())
        yield


@contextmanager
def _swapped(module: ModuleType, name: str, value: object) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


class _SparseMode(TorchFunctionMode):
    """Sees every torch call of the forward; changes the few that build or take apart a sparse matrix."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        constructor = _CONSTRUCTORS.get(name)
        if constructor is not None:
            return constructor(*args, **kwargs)
        if name == "to_dense" and not kwargs and args[0].layout is torch.strided:
            return args[0]  # the dense sum of a stand-in, where torch has a sparse vector
        origin = origin_of(args[0]) if args else None
        if isinstance(origin, Identity) and name in _TO_SPARSE:
            return _identity(args[0], origin.size, kwargs.get("layout") or _TO_SPARSE[name])
        result = follow(func, args, kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def _coo(
    indices: Tensor,
    values: Tensor | None = None,
    size: tuple[int, ...] | None = None,
    *,
    dtype: torch.dtype | None = None,
    is_coalesced: bool | None = None,
    **kwargs: object,
) -> Tensor:
    """``torch.sparse_coo_tensor``: indices ``[2, E]``, values ``[E, ...]``."""
    n_rows, n_cols = _matrix_size(size, "torch.sparse_coo_tensor")
    origin = origin_of(indices)
    if isinstance(origin, IndexPair):
        row, col, order = origin.row, origin.col, origin.order
    else:
        row, col = indices.unbind(0)
        order = Order.ANY
    if is_coalesced:
        order = Order.BY_ROW
    return StandInAdjacency(
        Entries(row, col, _typed(values, dtype), n_rows, n_cols, order), torch.sparse_coo, bool(is_coalesced)
    )


def _csr(
    crow_indices: Tensor,
    col_indices: Tensor,
    values: Tensor | None = None,
    size: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> Tensor:
    """``torch.sparse_csr_tensor``: pointers ``[N + 1]``, columns ``[E]``, values ``[E, ...]``."""
    n_rows, n_cols = _matrix_size(size, "torch.sparse_csr_tensor")
    row = expanded(crow_indices, n_rows, col_indices.shape[0])
    value = _typed(values, kwargs.get("dtype"))
    return StandInAdjacency(Entries(row, col_indices, value, n_rows, n_cols, Order.BY_ROW), torch.sparse_csr)


def _csc(
    ccol_indices: Tensor,
    row_indices: Tensor,
    values: Tensor | None = None,
    size: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> Tensor:
    """``torch.sparse_csc_tensor``: pointers ``[N + 1]``, rows ``[E]``, values ``[E, ...]``."""
    n_rows, n_cols = _matrix_size(size, "torch.sparse_csc_tensor")
    col = expanded(ccol_indices, n_cols, row_indices.shape[0])
    value = _typed(values, kwargs.get("dtype"))
    return StandInAdjacency(Entries(row_indices, col, value, n_rows, n_cols, Order.BY_COLUMN), torch.sparse_csc)


_CONSTRUCTORS: Mapping[str, Callable[..., Tensor]] = {
    "sparse_coo_tensor": _coo,
    "sparse_csr_tensor": _csr,
    "sparse_csc_tensor": _csc,
}


def _matrix_size(size: tuple[int, ...] | None, constructor: str) -> tuple[int, int]:
    if size is None:
        refuse(
            f"{constructor} without a size",
            "the size is then read from the largest index, and nodes without edges would be lost",
            f"Give the size: {constructor}(…, size=(x.size(0), x.size(0)))",
        )
    if len(size) < 2:
        refuse(f"{constructor} of {len(size)} dimension", "only sparse matrices are known", "Use a dense vector")
    return size[0], size[1]


def _typed(values: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return values if values is None or dtype is None else values.to(dtype)


def _identity(dense: Tensor, size: int, layout: torch.layout) -> Tensor:
    diagonal = torch.arange(size, device=dense.device)
    ones = torch.ones_like(diagonal, dtype=dense.dtype)
    return StandInAdjacency(Entries(diagonal, diagonal, ones, size, size, final_order(layout)), layout)


def _coalesce_edges(
    edge_index: Tensor,
    edge_attr: Tensor | None = None,
    num_nodes: int | None = None,
    reduce: str = "sum",
    is_sorted: bool = False,
    sort_by_row: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """PyG's ``coalesce`` without its branch on whether an edge repeats: int64 ``[2, E]`` to ``[2, E']``, sorted."""
    if num_nodes is None or reduce != "sum":
        refuse("coalesce without the number of nodes, or with another reduction than the sum", "the size is not known")
    entries = Entries(edge_index[0], edge_index[1], edge_attr, num_nodes, num_nodes, Order.ANY)
    merged = entries.ordered(Order.BY_ROW if sort_by_row else Order.BY_COLUMN)
    pair = remember(torch.stack([merged.row, merged.col]), IndexPair(merged.row, merged.col, merged.order))
    return pair, None if edge_attr is None else merged.value


class _LegacyType(type):
    """The type of a constructor such as ``torch.sparse.FloatTensor``, which is asked with isinstance as well."""

    original: type
    dtype: torch.dtype

    def __call__(cls, indices: Tensor, values: Tensor, size: tuple[int, ...] | None = None) -> Tensor:
        return _coo(indices, values, size, dtype=cls.dtype)

    def __instancecheck__(cls, instance: object) -> bool:
        if isinstance(instance, StandInAdjacency):
            return instance.kind is torch.sparse_coo and instance.dtype is cls.dtype
        return isinstance(instance, cls.original)


def _legacy(name: str, original: type) -> type:
    return _LegacyType(name, (), {"original": original, "dtype": getattr(torch, name).dtype})
