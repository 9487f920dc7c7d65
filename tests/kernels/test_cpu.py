"""The C++ kernels write the reference's bytes, whatever the instruction set and the number of threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from codec_cases import CASES, ROTATED_WIDTHS, STATE_CASES
from hypothesis import given, settings
from hypothesis import strategies as st

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels import cpu, reference
from sylvie_fx.kernels.calls import Decoding, Encoding
from sylvie_fx.kernels.hashing import stream_word
from sylvie_fx.kernels.wire import CodecSpec, MessageLayout, Rounding, Variant

pytestmark = pytest.mark.usefixtures("compiled_kernels")

STREAM = stream_word(3, 7)
WIDTHS = [0, 1, 2, 31, 32, 33, 63, 64, 65, 100, 127, 128, 256, 1030]


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)


def _assert_same(
    x: torch.Tensor, rows: torch.Tensor, layout: MessageLayout, isa: int, threads: int, with_average: bool = False
) -> None:
    """One step of both implementations, from the same states; everything they write is compared bit by bit."""
    generator = torch.Generator().manual_seed(layout.cols)
    keys = torch.randint(-(1 << 62), 1 << 62, (layout.rows,), generator=generator)
    spec = layout.spec
    stateful = spec.variant is not Variant.PLAIN
    start = torch.randn(layout.rows, layout.cols, generator=generator)
    messages, states = [], []
    for backend, options in ((reference, {}), (cpu, {"isa": isa})):
        buffer = torch.zeros(layout.buffer_bytes, dtype=torch.uint8)
        state = start.clone() if stateful else None
        backend.encode_messages(Encoding(x, rows, keys, layout, STREAM, 7, buffer, state, threads), **options)
        messages.append(buffer)
        states.append(state)
    assert torch.equal(*messages)
    if stateful:
        assert torch.equal(_bits(states[0]), _bits(states[1]))
    index = torch.cat([torch.randperm(x.shape[0], generator=generator)[:count] for count in layout.counts])
    for accumulate in (False, True):
        if not accumulate and len(layout.counts) > 1:
            continue  # two messages may not write one row
        results = []
        for backend, options in ((reference, {}), (cpu, {"isa": isa})):
            out = x.clone()
            state = start.clone() if spec.variant is Variant.DIFFERENCE else None
            average = start.clone() if with_average else None
            arguments = (messages[0], layout, out, index, accumulate, state, average, 0.3)
            backend.decode_messages(Decoding(*arguments, keys=keys, stream=STREAM, threads=threads), **options)
            results.append([out, *(t for t in (state, average) if t is not None)])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(_bits(ours), _bits(theirs))


@pytest.mark.parametrize("isa", sorted(cpu.ISA_NAMES))
@pytest.mark.parametrize(("bits", "rounding"), CASES)
def test_bytes_are_the_references(
    isa: int, bits: int, rounding: Rounding, corner_rows: Callable[[int], torch.Tensor]
) -> None:
    widths = ROTATED_WIDTHS if rounding is Rounding.ROTATED else WIDTHS
    for cols, threads in zip(widths, itertools.cycle((1, 2, 3)), strict=False):
        x = corner_rows(cols)
        rows = torch.randint(0, 64, (77,), generator=torch.Generator().manual_seed(cols))
        _assert_same(x, rows, MessageLayout((30, 0, 47), cols, CodecSpec(bits, rounding)), isa, threads)


@pytest.mark.parametrize(("bits", "state"), STATE_CASES)
def test_states_are_the_references(
    bits: int, state: tuple[Rounding, Variant, float], corner_rows: Callable[[int], torch.Tensor]
) -> None:
    spec = CodecSpec(bits, *state)
    for cols, isa in itertools.product(
        (64, 300) if spec.rounding is Rounding.ROTATED else (33, 128), sorted(cpu.ISA_NAMES)
    ):
        rows = torch.randperm(64, generator=torch.Generator().manual_seed(cols))[:50]
        for counts in ((50,), (20, 0, 30)):
            _assert_same(corner_rows(cols), rows, MessageLayout(counts, cols, spec), isa, 2, with_average=True)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_width_of_a_grid_divides_alike(bits: int) -> None:
    """torch takes ``number / tensor`` by a reciprocal, an ulp off for a fifth of the widths, and few codes show it."""
    x = torch.rand(255, 16384, generator=torch.Generator().manual_seed(bits)) * torch.arange(1, 256)[:, None]
    x[:, 0], x[:, 1] = 0, torch.arange(1, 256)
    layout = MessageLayout((255,), x.shape[1], CodecSpec(bits, Rounding.NEAREST))
    _assert_same(x, torch.arange(255), layout, max(cpu.ISA_NAMES), 2)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_rows_give_the_references_bytes(data: st.DataObject) -> None:
    spec = CodecSpec(*data.draw(st.sampled_from(CASES)))
    cols = data.draw(st.integers(1, 70))
    number = data.draw(st.integers(1, 4))
    value = st.floats(width=32)
    x = torch.tensor(
        data.draw(st.lists(st.lists(value, min_size=cols, max_size=cols), min_size=number, max_size=number))
    )
    rows = torch.tensor(data.draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=9)))
    keys = torch.arange(rows.numel())
    layout = MessageLayout((rows.numel(),), cols, spec)
    buffers = [torch.zeros(layout.buffer_bytes, dtype=torch.uint8) for _ in range(2)]
    reference.encode_messages(Encoding(x.float(), rows, keys, layout, STREAM, 1, buffers[0], None))
    cpu.encode_messages(Encoding(x.float(), rows, keys, layout, STREAM, 1, buffers[1], None))
    assert torch.equal(*buffers)
    outs = [torch.zeros(rows.numel(), cols) for _ in range(2)]
    random = {"keys": keys, "stream": STREAM}
    reference.decode_messages(Decoding(buffers[0], layout, outs[0], None, False, None, None, 1.0, **random))
    cpu.decode_messages(Decoding(buffers[0], layout, outs[1], None, False, None, None, 1.0, **random))
    assert torch.equal(_bits(outs[0]), _bits(outs[1]))


def test_strided_rows_and_no_index() -> None:
    x = torch.randn(20, 100)
    layout = MessageLayout((20,), 64, CodecSpec(2))
    buffers = [torch.zeros(layout.buffer_bytes, dtype=torch.uint8) for _ in range(2)]
    keys = torch.arange(20)
    cpu.encode_messages(Encoding(x[:, 30:94], None, keys, layout, STREAM, 0, buffers[0], None))
    cpu.encode_messages(Encoding(x[:, 30:94].contiguous(), None, keys, layout, STREAM, 0, buffers[1], None))
    assert torch.equal(*buffers)
    out = torch.zeros(20, 100)
    cpu.decode_messages(Decoding(buffers[0], layout, out[:, 30:94], None, False, None, None, 1.0))
    assert (out[:, :30] == 0).all()
    assert (out[:, 94:] == 0).all()
    assert (out[:, 30:94] - x[:, 30:94]).abs().max() < 3


def test_rows_out_of_bounds_are_named() -> None:
    layout = MessageLayout((3,), 8, CodecSpec(1))
    buffer = torch.zeros(layout.buffer_bytes, dtype=torch.uint8)
    keys = torch.arange(3)
    with pytest.raises(KernelError, match=r"row 1 of the messages is a row that x \(4 rows\)"):
        cpu.encode_messages(Encoding(torch.randn(4, 8), torch.tensor([0, 4, 1]), keys, layout, STREAM, 0, buffer, None))
    index = torch.tensor([0, 1, -1])
    with pytest.raises(KernelError, match=r"row 2 of the messages belongs to a row that out \(4 rows\)"):
        cpu.decode_messages(Decoding(buffer, layout, torch.zeros(4, 8), index, False, None, None, 1.0))


def test_zero_rows_are_legal() -> None:
    layout = MessageLayout((0, 0), 8, CodecSpec(1))
    buffer = torch.zeros(layout.buffer_bytes, dtype=torch.uint8)
    empty = torch.zeros(0, dtype=torch.int64)
    cpu.encode_messages(Encoding(torch.zeros(0, 8), empty, empty, layout, STREAM, 0, buffer, None, threads=4))
    cpu.decode_messages(Decoding(buffer, layout, torch.zeros(0, 8), empty, True, None, None, 1.0, threads=4))
    cpu.encode_messages(
        Encoding(torch.zeros(0, 8), empty, empty, MessageLayout((), 8, CodecSpec(1)), STREAM, 0, buffer[:0], None)
    )


def test_other_threads_run_during_a_call() -> None:
    """The interpreter's lock is released: a Python thread makes progress while a long call runs."""
    x = torch.randn(20000, 256)
    layout = MessageLayout((20000,), 256, CodecSpec(1))
    buffer = torch.zeros(layout.buffer_bytes, dtype=torch.uint8)
    keys = torch.arange(20000)
    stop = threading.Event()
    ticks = 0

    def count() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1

    cpu.encode_messages(Encoding(x, None, keys, layout, STREAM, 0, buffer, None), isa=0)
    counter = threading.Thread(target=count)
    counter.start()
    before = ticks
    for _ in range(5):
        cpu.encode_messages(Encoding(x, None, keys, layout, STREAM, 0, buffer, None), isa=0)
    after = ticks
    stop.set()
    counter.join()
    assert after - before > 100
