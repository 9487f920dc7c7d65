"""The codec's C++ kernels (codec.cpp), called through ctypes with raw pointers; the interpreter's lock is released.

Same arguments, same bytes as :mod:`sylvie_fx.kernels.reference`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels.calls import Decoding, Encoding
from sylvie_fx.kernels.wire import MessageLayout, Rounding, Variant, header_words

_log = logging.getLogger(__name__)

ISA_NAMES = {0: "baseline", 2: "avx2", 3: "avx512"}
BEST_ISA = 3


class _Messages(ctypes.Structure):
    _fields_ = (
        ("row_starts", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("buffer", ctypes.c_void_p),
        ("peers", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("isa", ctypes.c_int32),
        ("part", ctypes.c_float),
    )


class _EncodeCall(ctypes.Structure):
    _fields_ = (
        ("messages", _Messages),
        ("x", ctypes.c_void_p),
        ("x_rows", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("stream", ctypes.c_uint64),
        ("header_word", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("rounding", ctypes.c_int32),
        ("variant", ctypes.c_int32),
    )


class _DecodeCall(ctypes.Structure):
    _fields_ = (
        ("messages", _Messages),
        ("out", ctypes.c_void_p),
        ("out_rows", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("index", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("stream", ctypes.c_uint64),
        ("state", ctypes.c_void_p),
        ("average", ctypes.c_void_p),
        ("weight", ctypes.c_float),
        ("accumulate", ctypes.c_int32),
        ("rounding", ctypes.c_int32),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled codec, or None where it was not built; that is logged once."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_codec{suffix}"
        if path.exists():
            loaded = ctypes.CDLL(str(path))
            for function, call in ((loaded.sylvie_encode, _EncodeCall), (loaded.sylvie_decode, _DecodeCall)):
                function.argtypes = [ctypes.POINTER(call)]
                function.restype = ctypes.c_int64
            loaded.sylvie_isa.restype = ctypes.c_int32
            return loaded
    _log.warning(
        "the compiled CPU codec is missing (no C++ compiler at install?): the torch reference serves, "
        "with the same bytes but an order of magnitude slower; `python setup.py build_ext --inplace` builds it"
    )
    return None


def available() -> bool:
    """Whether the compiled codec can be called."""
    return library() is not None


def instruction_set() -> str:
    """The instruction set that the kernels use on this machine.

    Raises:
        KernelError: Where the codec is not compiled.
    """
    return ISA_NAMES[_loaded().sylvie_isa()]


def _loaded() -> ctypes.CDLL:
    loaded = library()
    if loaded is None:
        raise KernelError("the CPU codec is not compiled", remedy="run `python setup.py build_ext --inplace`")
    return loaded


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _messages(layout: MessageLayout, buffer: torch.Tensor, threads: int, isa: int) -> tuple[_Messages, object]:
    """The structure, and what must outlive the call that uses it."""
    peers = len(layout.counts)
    starts = (ctypes.c_int64 * (peers + 1))(*layout.row_starts)
    offsets = (ctypes.c_int64 * (peers + 1))(*layout.offsets)
    messages = _Messages(
        ctypes.addressof(starts), ctypes.addressof(offsets), buffer.data_ptr(), peers, layout.cols,
        layout.spec.bits, max(1, threads), isa, layout.spec.part,
    )  # fmt: skip
    return messages, (starts, offsets)


def encode_messages(call: Encoding, isa: int = BEST_ISA) -> None:
    """As :func:`sylvie_fx.kernels.reference.encode_messages`, of tensors in host memory.

    Args:
        call: Its rows are split over ``call.threads`` threads.
        isa: The best instruction set to use, a key of ``ISA_NAMES``; the machine's own is the other bound.

    Raises:
        KernelError: For a row that ``call.x`` does not have.
    """
    layout, x = call.layout, call.x
    messages, keep = _messages(layout, call.buffer, call.threads, isa)
    spec = layout.spec
    word, _, _, last = header_words(0, layout.cols, spec, torch.float32, call.step)
    arguments = _EncodeCall(
        messages, x.data_ptr(), x.shape[0], x.stride(0), _pointer(call.rows), _pointer(call.keys), _pointer(call.state),
        call.stream, word, last, list(Rounding).index(spec.rounding), list(Variant).index(spec.variant),
    )  # fmt: skip
    bad = _loaded().sylvie_encode(ctypes.byref(arguments))
    del keep
    if bad >= 0:
        raise KernelError(f"row {bad} of the messages is a row that x ({x.shape[0]} rows) does not have")


def decode_messages(call: Decoding, isa: int = BEST_ISA) -> None:
    """As :func:`sylvie_fx.kernels.reference.decode_messages`, of tensors in host memory.

    Args:
        call: Its rows are split over ``call.threads`` threads.
        isa: The best instruction set to use, a key of ``ISA_NAMES``.

    Raises:
        KernelError: For a row that ``call.out`` does not have.
    """
    layout, out = call.layout, call.out
    # Two messages may add to one row: one after the other, so that the sum does not depend on the threads.
    alone = call.accumulate and len(layout.counts) > 1
    for part in range(len(layout.counts) if alone else 1):
        messages, keep = _messages(layout, call.buffer, call.threads, isa)
        if alone:
            messages.row_starts += 8 * part
            messages.offsets += 8 * part
            messages.peers = 1
        arguments = _DecodeCall(
            messages, out.data_ptr(), out.shape[0], out.stride(0), _pointer(call.index), _pointer(call.keys),
            call.stream, _pointer(call.state), _pointer(call.average), call.weight, call.accumulate,
            list(Rounding).index(layout.spec.rounding),
        )  # fmt: skip
        bad = _loaded().sylvie_decode(ctypes.byref(arguments))
        del keep
        if bad >= 0:
            raise KernelError(
                f"row {bad} of the messages belongs to a row that out ({out.shape[0]} rows) does not have"
            )
