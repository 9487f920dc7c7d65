"""The codec's CUDA kernels (cuda/codec.cu): compiled by NVRTC, cached, launched on torch's current stream.

Same arguments, same bytes as :mod:`sylvie_fx.kernels.reference`. One launch serves all messages of an exchange, and
nothing here waits for the device: what a kernel finds wrong (a row out of bounds, a message that is not the expected
one) it can not raise, so the rows concerned read as NaN.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels.calls import Decoding, Encoding
from sylvie_fx.kernels.wire import MessageLayout, Rounding, Variant, header_words

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "cuda" / "codec.cu"
WARPS = 8
"""Rows, each a warp's, in one block."""


@functools.cache
def available() -> bool:
    """Whether the kernels can be compiled: cuda.core is installed. Where it is not, that is logged once."""
    if importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.core") is not None:
        return True
    _log.warning("cuda-core is missing: tensors on a GPU go through the codec's torch reference, which is slow")
    return False


def compile_codec(bits: int, arch: str) -> Any:
    """Compile the kernels for one width of codes; needs no GPU.

    Args:
        bits: 1, 2, 4, 8 or 16.
        arch: As ``"sm_90"``.

    Returns:
        The ``cuda.core.ObjectCode``, a cubin with the kernels ``encode_rows`` and ``decode_rows``.
    """
    from cuda.core import Program, ProgramOptions

    # No contraction to fused multiply-adds: the same bytes as the reference. The one that is wanted is explicit.
    options = ProgramOptions(
        name="codec.cu", std="c++17", arch=arch, fma=False, ftz=False, prec_div=True,
        define_macro=("SYLVIE_BITS", str(bits)), include_path=str(SOURCE.parent),
    )  # fmt: skip
    return Program(SOURCE.read_text(), "c++", options).compile("cubin")


@functools.cache
def _kernel(bits: int, device: int, name: str) -> Any:
    major, minor = torch.cuda.get_device_capability(device)
    return compile_codec(bits, f"sm_{major}{minor}").get_kernel(name)


@functools.lru_cache(maxsize=256)
def _tables(layout: MessageLayout, device: torch.device) -> torch.Tensor:
    """int64 ``[2, peers + 1]`` on the device: first rows, and offsets, of the messages."""
    tables = torch.tensor([layout.row_starts, layout.offsets])
    return tables.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tables


class _TorchStream:
    """Torch's current stream of a device, for cuda.core."""

    def __init__(self, device: torch.device) -> None:
        self._handle: int = torch.cuda.current_stream(device).cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _launch(name: str, bits: int, device: torch.device, rows: int, arguments: list[Any]) -> None:
    from cuda.core import Device, LaunchConfig, launch

    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        Device(index).set_current()
        # At least one block: headers are written for messages without rows, too.
        config = LaunchConfig(grid=max(1, -(-rows // WARPS)), block=32 * WARPS)
        launch(_TorchStream(device), config, _kernel(bits, index, name), *arguments)


def _pointer(tensor: torch.Tensor | None) -> int:
    """An address, which cuda.core takes as a plain int (other numbers: as ctypes, of the kernel's types)."""
    return 0 if tensor is None else tensor.data_ptr()


def _check_alignment(buffer: torch.Tensor) -> None:
    if buffer.data_ptr() % 8:
        raise KernelError("a message on the GPU does not start at a multiple of 8 bytes")


def encode_messages(call: Encoding) -> None:
    """As :func:`sylvie_fx.kernels.reference.encode_messages`, of tensors on one GPU."""
    layout, x, buffer = call.layout, call.x, call.buffer
    _check_alignment(buffer)
    i32, i64, u64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
    spec, tables = layout.spec, _tables(layout, x.device)
    word, _, _, last = header_words(0, layout.cols, spec, torch.float32, call.step)
    arguments = [
        _pointer(x), i64(x.shape[0]), i64(x.stride(0)), _pointer(call.rows), _pointer(call.keys),
        _pointer(call.state),
        _pointer(tables[0]), _pointer(tables[1]), _pointer(buffer), i64(len(layout.counts)), i64(layout.cols),
        u64(call.stream), u64(word), u64(last), i32(list(Rounding).index(spec.rounding)),
        i32(list(Variant).index(spec.variant)), ctypes.c_float(spec.part),
    ]  # fmt: skip
    _launch("encode_rows", spec.bits, x.device, layout.rows, arguments)


def decode_messages(call: Decoding) -> None:
    """As :func:`sylvie_fx.kernels.reference.decode_messages`, of tensors on one GPU.

    Rows of a message that is not of ``call.step`` read as NaN.
    """
    layout, buffer, out = call.layout, call.buffer, call.out
    _check_alignment(buffer)
    i32, i64, u64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
    tables = _tables(layout, buffer.device)
    word, _, _, last = header_words(0, layout.cols, layout.spec, torch.float32, call.step or 0)
    # Two messages may add to one row: one launch after the other, so that the sum is the same every time.
    peers = len(layout.counts)
    parts = [(peer, 1) for peer in range(peers)] if call.accumulate else [(0, peers)]
    for first, number in parts:
        rows = layout.row_starts[first + number] - layout.row_starts[first]
        if not rows:
            continue
        arguments = [
            _pointer(buffer), _pointer(tables[0, first:]), _pointer(tables[1, first:]), i64(number), i64(layout.cols),
            u64(word), u64(last), i32(call.step is None), _pointer(out), i64(out.shape[0]), i64(out.stride(0)),
            _pointer(call.index), _pointer(call.state), ctypes.c_float(layout.spec.part), _pointer(call.average),
            ctypes.c_float(call.weight), i32(call.accumulate), _pointer(call.keys), u64(call.stream),
            i32(list(Rounding).index(layout.spec.rounding)),
        ]  # fmt: skip
        _launch("decode_rows", layout.spec.bits, buffer.device, rows, arguments)
