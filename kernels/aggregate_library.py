"""The library of aggregation kernels (aggregate.cpp): found, checked, and called with raw pointers; the lock is released."""

from __future__ import annotations

import ctypes
import functools
import logging
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels.aggregate_layout import Rows

_log = logging.getLogger(__name__)

ISA_NAMES = {0: "baseline", 2: "avx2", 3: "avx512"}
BEST_ISA = 3

_Pointer, _Size, _Int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Rows(ctypes.Structure):
    _fields_ = (("indptr", _Pointer), ("columns", _Pointer), ("edge_ids", _Pointer), ("rows", _Size))


class _Run(ctypes.Structure):
    _fields_ = (("is_double", _Int), ("threads", _Int), ("isa", _Int), ("reserved", _Int))


class SumCall(ctypes.Structure):
    """Sums of rows, weighted or not, a mean where divisors are given."""

    _fields_ = (
        ("x", _Pointer), ("weight", _Pointer), ("out", _Pointer), ("divisors", _Pointer), ("targets", _Pointer),
        ("heads", _Size), ("dim", _Size),
    )  # fmt: skip


class ExtremeCall(ctypes.Structure):
    """Largest or smallest neighbours, and how many of them tie."""

    _fields_ = (
        ("x", _Pointer), ("weight", _Pointer), ("out", _Pointer), ("ties", _Pointer), ("targets", _Pointer),
        ("before", _Pointer), ("heads", _Size), ("dim", _Size), ("smallest", _Int), ("reserved", _Int),
    )  # fmt: skip


class TiesCall(ctypes.Structure):
    """The gradient of extremes: what the winners get."""

    _fields_ = (
        ("x", _Pointer), ("weight", _Pointer), ("extreme", _Pointer), ("share", _Pointer), ("out", _Pointer),
        ("heads", _Size), ("dim", _Size),
    )  # fmt: skip


class EdgeCall(ctypes.Structure):
    """A combination of both ends of each edge."""

    _fields_ = (
        ("u", _Pointer), ("v", _Pointer), ("out", _Pointer), ("weight", _Pointer), ("extreme", _Pointer),
        ("heads", _Size), ("dim", _Size), ("op", _Int), ("reserved", _Int),
    )  # fmt: skip


class SoftmaxCall(ctypes.Structure):
    """A softmax over the edges of each row, or its gradient."""

    _fields_ = (("value", _Pointer), ("gradient", _Pointer), ("out", _Pointer), ("heads", _Size))


class AttentionCall(ctypes.Structure):
    """Softmax-weighted sums with scores of both ends, or their gradient by destination."""

    _fields_ = (
        ("x", _Pointer), ("source_score", _Pointer), ("target_score", _Pointer), ("keys", _Pointer), ("out", _Pointer),
        ("alpha", _Pointer), ("gradient", _Pointer), ("edge_values", _Pointer), ("target_gradient", _Pointer),
        ("heads", _Size), ("dim", _Size), ("negative_slope", ctypes.c_double), ("scale", ctypes.c_double),
        ("key", ctypes.c_uint64), ("threshold", ctypes.c_uint32), ("backward", _Int),
    )  # fmt: skip


class SourcesCall(ctypes.Structure):
    """The gradient of attention by source."""

    _fields_ = (
        ("gradient", _Pointer), ("edge_values", _Pointer), ("out", _Pointer), ("source_gradient", _Pointer),
        ("heads", _Size), ("dim", _Size),
    )  # fmt: skip


class ScoresCall(ctypes.Structure):
    """``vector . leaky_relu(u + v)`` of each edge, or its gradient."""

    _fields_ = (
        ("x", _Pointer), ("own", _Pointer), ("vector", _Pointer), ("gradient", _Pointer), ("out", _Pointer),
        ("of_vector", _Pointer), ("heads", _Size), ("dim", _Size), ("negative_slope", ctypes.c_double),
    )  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they were not built; that is logged once.

    Raises:
        KernelError: Where they were built from other sources.
    """
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_aggregate{suffix}"
        if path.exists():
            return _checked(ctypes.CDLL(str(path)), path)
    _log.warning(
        "the compiled aggregation kernels are missing (no C++ compiler at install?): torch's gathers and scatters "
        "serve, an order of magnitude slower; `python setup.py build_ext --inplace` builds them"
    )
    return None


def _checked(loaded: ctypes.CDLL, path: Path) -> ctypes.CDLL:
    """The library, if it was compiled for the structures above; others would be read as nonsense."""
    known = 0
    for structure in (
        _Rows,
        _Run,
        SumCall,
        ExtremeCall,
        TiesCall,
        EdgeCall,
        SoftmaxCall,
        AttentionCall,
        SourcesCall,
        ScoresCall,
    ):
        known = (known * 113 + ctypes.sizeof(structure)) % (1 << 31)
    if hasattr(loaded, "sylvie_aggregate_sizes"):
        loaded.sylvie_aggregate_sizes.restype = ctypes.c_int64
        if loaded.sylvie_aggregate_sizes() == known:
            return loaded
    raise KernelError(
        f"{path} was compiled from other sources than those beside it",
        remedy="run `python setup.py build_ext --inplace`",
    )


def available() -> bool:
    """Whether the compiled kernels can be called."""
    return library() is not None


def instruction_set() -> str:
    """The instruction set that the kernels use on this machine.

    Raises:
        KernelError: Where the kernels are not compiled.
    """
    return ISA_NAMES[int(_loaded().sylvie_aggregate_isa())]


def _loaded() -> ctypes.CDLL:
    loaded = library()
    if loaded is None:
        raise KernelError(
            "the aggregation kernels are not compiled", remedy="run `python setup.py build_ext --inplace`"
        )
    return loaded


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a dense tensor, or that nothing is there."""
    return None if tensor is None else tensor.data_ptr()


def launch(
    name: str, rows: Rows, call: ctypes.Structure, dtype: torch.dtype, isa: int, edge_ids: Tensor | None
) -> None:
    """Call one kernel on the edges of some rows; its structure says the rest."""
    edges = _Rows(rows.indptr.data_ptr(), rows.sorted_columns.data_ptr(), pointer(edge_ids), rows.rows)
    how = _Run(dtype == torch.float64, max(1, torch.get_num_threads()), isa, 0)
    getattr(_loaded(), f"sylvie_aggregate_{name}")(ctypes.byref(edges), ctypes.byref(how), ctypes.byref(call))
