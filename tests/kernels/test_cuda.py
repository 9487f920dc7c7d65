"""The CUDA kernels: compiled for real architectures without a GPU, and run on the host with emulated warps."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_cases import CASES, ROTATED_WIDTHS, STATE_CASES

from sylvie_fx.kernels import cuda, reference
from sylvie_fx.kernels.calls import Decoding, Encoding
from sylvie_fx.kernels.hashing import stream_word
from sylvie_fx.kernels.wire import CodecSpec, MessageLayout, Rounding, Variant

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_check

STREAM, STEP = stream_word(3, 7), 7
WIDTHS = [0, 1, 31, 33, 64, 65, 100, 256, 300, 1030, 1100]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_compiles_to_a_cubin(arch: str, bits: int) -> None:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        pytest.skip("cuda-core is not installed: pip install sylvie-fx[cuda]")
    code = cuda.compile_codec(bits, arch).code
    assert code[:4] == b"\x7fELF"
    assert b"encode_rows" in code
    assert b"decode_rows" in code


def test_cuda_core_takes_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """It marshals them as for a launch, which needs no device."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        pytest.skip("cuda-core is not installed: pip install sylvie-fx[cuda]")
    from cuda.core._kernel_arg_handler import ParamHolder

    launched = []

    def launch(name: str, bits: int, device: torch.device, rows: int, arguments: list[Any]) -> None:
        ParamHolder(tuple(arguments))
        launched.append(name)

    monkeypatch.setattr(cuda, "_launch", launch)
    layout, keys = MessageLayout((3,), 40, CodecSpec(1)), torch.arange(3)
    buffer = torch.zeros(layout.buffer_bytes, dtype=torch.uint8)
    cuda.encode_messages(Encoding(torch.randn(3, 40), None, keys, layout, STREAM, STEP, buffer, None))
    cuda.decode_messages(Decoding(buffer, layout, torch.zeros(3, 40), None, False, None, None, 1.0))
    assert launched == ["encode_rows", "decode_rows"]


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch, emulated: Callable[[int], ctypes.CDLL]) -> None:
    """Launches of :mod:`sylvie_fx.kernels.cuda` run emulated, on tensors in host memory, two warps a block."""

    def launch(name: str, bits: int, device: torch.device, rows: int, arguments: list[Any]) -> None:
        function = getattr(emulated(bits), f"emulate_{name.removesuffix('_rows')}")
        converted = [ctypes.c_void_p(value) if isinstance(value, int) else value for value in arguments]
        function(ctypes.c_uint32(max(1, -(-rows // 2))), ctypes.c_uint32(64), *converted)

    monkeypatch.setattr(cuda, "_launch", launch)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize(("bits", "rounding"), CASES)
def test_emulated_warps_write_the_references_bytes(
    bits: int,
    rounding: Rounding,
    on_host: None,
    corner_rows: Callable[[int], torch.Tensor],
) -> None:
    generator = torch.Generator().manual_seed(bits)
    for cols in ROTATED_WIDTHS if rounding is Rounding.ROTATED else WIDTHS:
        x = corner_rows(cols)
        # Every corner row, once; and a peer without rows.
        rows, counts = torch.randperm(64, generator=generator), (15, 0, 0, 49)
        keys = torch.randint(-(1 << 62), 1 << 62, (64,), generator=generator)
        layout = MessageLayout(counts, cols, CodecSpec(bits, rounding))
        expected, found = (torch.zeros(layout.buffer_bytes, dtype=torch.uint8) for _ in range(2))
        reference.encode_messages(Encoding(x, rows, keys, layout, STREAM, STEP, expected, None))
        cuda.encode_messages(Encoding(x, rows, keys, layout, STREAM, STEP, found, None))
        assert torch.equal(expected, found), f"{cols} columns"
        values, out = torch.zeros(64, cols), torch.full((64, cols), torch.nan)
        random = {"keys": keys, "stream": STREAM}
        reference.decode_messages(Decoding(expected, layout, values, None, False, None, None, 1.0, **random))
        cuda.decode_messages(Decoding(expected, layout, out, None, False, None, None, 1.0, step=STEP, **random))
        assert _same(values, out), f"{cols} columns"


@pytest.mark.parametrize(("bits", "coding"), STATE_CASES)
def test_emulated_states_are_the_references(
    bits: int,
    coding: tuple[Rounding, Variant, float],
    on_host: None,
    corner_rows: Callable[[int], torch.Tensor],
) -> None:
    rounding, variant, part = coding
    for cols in (64, 300) if rounding is Rounding.ROTATED else (33, 300):
        generator = torch.Generator().manual_seed(cols)
        x, rows = corner_rows(cols), torch.randperm(64, generator=generator)
        keys, index = torch.arange(64), torch.cat([torch.randperm(64, generator=generator)[:32] for _ in range(2)])
        layout = MessageLayout((32, 32), cols, CodecSpec(bits, rounding, variant, part))
        start = torch.randn(64, cols, generator=generator)
        messages, states, results = [], [], []
        for backend in (reference, cuda):
            messages.append(torch.zeros(layout.buffer_bytes, dtype=torch.uint8))
            states.append(start.clone())
            backend.encode_messages(Encoding(x, rows, keys, layout, STREAM, STEP, messages[-1], states[-1]))
            out, average = x.clone(), start.clone()
            state = start.clone() if variant is Variant.DIFFERENCE else None
            backend.decode_messages(
                Decoding(messages[-1], layout, out, index, True, state, average, 0.3, keys=keys, stream=STREAM)
            )
            results.append([out, average, *([] if state is None else [state])])
        assert torch.equal(*messages)
        assert _same(*states)
        assert all(_same(a, b) for a, b in zip(*results, strict=True))


def test_the_check_on_a_gpu_finds_no_fault_in_emulated_warps(on_host: None) -> None:
    specs = list(gpu_check.specs())
    assert {(spec.bits, spec.rounding) for spec in specs} == set(CASES)
    for spec in specs:
        assert gpu_check.check(spec, gpu_check.widths(spec)[2], "cpu") == [], spec


def test_what_can_not_be_raised_reads_as_nan(on_host: None) -> None:
    layout = MessageLayout((3,), 40, CodecSpec(1))
    buffer = torch.zeros(layout.buffer_bytes, dtype=torch.uint8)
    cuda.encode_messages(
        Encoding(torch.randn(4, 40), torch.tensor([0, 4, 1]), torch.arange(3), layout, STREAM, 7, buffer, None)
    )
    out = torch.zeros(3, 40)
    cuda.decode_messages(Decoding(buffer, layout, out, None, False, None, None, 1.0))
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    cuda.decode_messages(Decoding(buffer, layout, out, None, False, None, None, 1.0, step=8))
    assert out.isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("spec", list(gpu_check.specs()), ids=str)
def test_the_device_writes_the_references_bytes(spec: CodecSpec) -> None:
    for cols in gpu_check.widths(spec):
        assert gpu_check.check(spec, cols) == []
