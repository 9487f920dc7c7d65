"""The CUDA kernels: compiled for real architectures without a GPU, and run on the host with emulated warps."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable

import pytest
import torch

from sylvie_fx.kernels import cuda, reference
from sylvie_fx.kernels.hashing import stream_word
from sylvie_fx.kernels.wire import CodecSpec, MessageLayout, Rounding, Variant, header_words

STREAM, STEP = stream_word(3, 7), 7
WIDTHS = [0, 1, 31, 33, 64, 65, 100, 256, 300, 1030, 1100]
i32, i64, u64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64

CASES = [(bits, rounding) for bits in (1, 2, 4, 8, 16) for rounding in Rounding]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_compiles_to_a_cubin(arch: str, bits: int) -> None:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        pytest.skip("cuda-core is not installed: pip install sylvie-fx[cuda]")
    code = cuda.compile_codec(bits, arch).code
    assert code[:4] == b"\x7fELF"
    assert b"encode_rows" in code
    assert b"decode_rows" in code


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


class Emulated:
    """The kernels of one width of codes with the arguments of :mod:`sylvie_fx.kernels.cuda`."""

    def __init__(self, library: ctypes.CDLL, layout: MessageLayout) -> None:
        self.library, self.layout = library, layout
        self.starts, self.offsets = torch.tensor(layout.row_starts), torch.tensor(layout.offsets)
        self.word, _, _, self.step = header_words(0, layout.cols, layout.spec, torch.float32, STEP)

    def encode(
        self,
        x: torch.Tensor,
        rows: torch.Tensor | None,
        keys: torch.Tensor,
        buffer: torch.Tensor,
        state: torch.Tensor | None,
    ) -> None:
        spec = self.layout.spec
        self.library.emulate_encode(
            i32(max(1, -(-self.layout.rows // 2))), i32(64), _pointer(x), i64(x.shape[0]), i64(x.stride(0)),
            _pointer(rows), _pointer(keys), _pointer(state), _pointer(self.starts), _pointer(self.offsets),
            _pointer(buffer), i64(len(self.layout.counts)), i64(self.layout.cols), u64(STREAM), u64(self.word),
            u64(self.step), i32(spec.rounding is Rounding.NEAREST), i32(list(Variant).index(spec.variant)),
        )  # fmt: skip

    def decode(
        self,
        buffer: torch.Tensor,
        out: torch.Tensor,
        index: torch.Tensor | None,
        accumulate: bool,
        state: torch.Tensor | None,
        average: torch.Tensor | None,
        weight: float,
    ) -> None:
        peers = len(self.layout.counts)
        for first, number in [(p, 1) for p in range(peers)] if accumulate else [(0, peers)]:
            rows = self.layout.row_starts[first + number] - self.layout.row_starts[first]
            self.library.emulate_decode(
                i32(max(1, -(-rows // 2))), i32(64), _pointer(buffer), _pointer(self.starts[first:]),
                _pointer(self.offsets[first:]), i64(number), i64(self.layout.cols), u64(self.word), u64(self.step),
                i32(0), _pointer(out), i64(out.shape[0]), i64(out.stride(0)), _pointer(index), _pointer(state),
                _pointer(average), ctypes.c_float(weight), i32(accumulate),
            )  # fmt: skip


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize(("bits", "rounding"), CASES)
def test_emulated_warps_write_the_references_bytes(
    bits: int,
    rounding: Rounding,
    emulated: Callable[[int], ctypes.CDLL],
    corner_rows: Callable[[int], torch.Tensor],
) -> None:
    generator = torch.Generator().manual_seed(bits)
    for cols in WIDTHS:
        x = corner_rows(cols)
        # Every corner row, once; and a peer without rows.
        rows, counts = torch.randperm(64, generator=generator), (15, 0, 0, 49)
        keys = torch.randint(-(1 << 62), 1 << 62, (64,), generator=generator)
        layout = MessageLayout(counts, cols, CodecSpec(bits, rounding))
        kernel = Emulated(emulated(bits), layout)
        expected, found = (torch.zeros(layout.buffer_bytes, dtype=torch.uint8) for _ in range(2))
        reference.encode_messages(x, rows, keys, layout, STREAM, STEP, expected, None)
        kernel.encode(x, rows, keys, found, None)
        assert torch.equal(expected, found), f"{cols} columns"
        values, out = torch.zeros(64, cols), torch.full((64, cols), torch.nan)
        reference.decode_messages(expected, layout, values, None, False, None, None, 1.0)
        kernel.decode(expected, out, None, False, None, None, 1.0)
        assert _same(values, out), f"{cols} columns"


@pytest.mark.parametrize("variant", [Variant.DIFFERENCE, Variant.FEEDBACK])
@pytest.mark.parametrize("bits", [1, 2, 8, 16])
def test_emulated_states_are_the_references(
    variant: Variant,
    bits: int,
    emulated: Callable[[int], ctypes.CDLL],
    corner_rows: Callable[[int], torch.Tensor],
) -> None:
    for cols in (33, 300):
        generator = torch.Generator().manual_seed(cols)
        x, rows = corner_rows(cols), torch.randperm(64, generator=generator)
        keys, index = torch.arange(64), torch.cat([torch.randperm(64, generator=generator)[:32] for _ in range(2)])
        layout = MessageLayout((32, 32), cols, CodecSpec(bits, Rounding.NEAREST, variant))
        kernel = Emulated(emulated(bits), layout)
        start = torch.randn(64, cols, generator=generator)
        messages, states = [torch.zeros(layout.buffer_bytes, dtype=torch.uint8) for _ in range(2)], []
        for buffer, ours in zip(messages, (True, False), strict=True):
            states.append(start.clone())
            if ours:
                reference.encode_messages(x, rows, keys, layout, STREAM, STEP, buffer, states[-1])
            else:
                kernel.encode(x, rows, keys, buffer, states[-1])
        assert torch.equal(*messages)
        assert _same(*states)
        results = []
        for ours in (True, False):
            out, average = x.clone(), start.clone()
            state = start.clone() if variant is Variant.DIFFERENCE else None
            if ours:
                reference.decode_messages(messages[0], layout, out, index, True, state, average, 0.3)
            else:
                kernel.decode(messages[0], out, index, True, state, average, 0.3)
            results.append([out, average, *([] if state is None else [state])])
        assert all(_same(a, b) for a, b in zip(*results, strict=True))


def test_what_can_not_be_raised_reads_as_nan(emulated: Callable[[int], ctypes.CDLL]) -> None:
    layout = MessageLayout((3,), 40, CodecSpec(1))
    kernel = Emulated(emulated(1), layout)
    buffer = torch.zeros(layout.buffer_bytes, dtype=torch.uint8)
    kernel.encode(torch.randn(4, 40), torch.tensor([0, 4, 1]), torch.arange(3), buffer, None)
    out = torch.zeros(3, 40)
    kernel.decode(buffer, out, None, False, None, None, 1.0)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    kernel.step += 1  # the receiver is a step ahead
    kernel.decode(buffer, out, None, False, None, None, 1.0)
    assert out.isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("bits", "rounding"), CASES)
def test_the_device_writes_the_references_bytes(
    bits: int, rounding: Rounding, corner_rows: Callable[[int], torch.Tensor]
) -> None:
    for cols in WIDTHS:
        x, rows, keys = corner_rows(cols), torch.randperm(64), torch.arange(64)
        layout = MessageLayout((15, 0, 49), cols, CodecSpec(bits, rounding))
        expected, found = torch.zeros(layout.buffer_bytes, dtype=torch.uint8), None
        reference.encode_messages(x, rows, keys, layout, STREAM, STEP, expected, None)
        found = torch.zeros_like(expected).cuda()
        cuda.encode_messages(x.cuda(), rows.cuda(), keys.cuda(), layout, STREAM, STEP, found, None)
        assert torch.equal(expected, found.cpu())
