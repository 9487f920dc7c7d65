from __future__ import annotations

import pytest
import torch

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels.wire import (
    HEADER_BYTES,
    MESSAGE_ALIGNMENT,
    CodecSpec,
    MessageLayout,
    Rounding,
    Variant,
    check_header,
    header_bytes,
    message_bytes,
)


def test_256_features_at_one_bit_take_36_bytes_a_row() -> None:
    assert CodecSpec(bits=1).row_bytes(256) == 36
    assert 256 * 4 / CodecSpec(bits=1).row_bytes(256) > 28.4


@pytest.mark.parametrize(
    ("bits", "cols", "expected"),
    [(1, 1, 5), (1, 9, 6), (2, 5, 6), (4, 3, 6), (8, 3, 7), (16, 3, 6), (32, 3, 12), (1, 0, 4)],
)
def test_row_bytes(bits: int, cols: int, expected: int) -> None:
    assert CodecSpec(bits=bits).row_bytes(cols) == expected
    assert message_bytes(10, cols, CodecSpec(bits=bits)) == HEADER_BYTES + 10 * expected


def test_exact_messages_have_the_size_of_the_dtype() -> None:
    assert CodecSpec(bits=32).row_bytes(5, torch.float64) == 40
    assert CodecSpec(bits=8).row_bytes(5, torch.float64) == 9


def test_more_than_two_billion_values() -> None:
    assert message_bytes(1 << 24, 1024, CodecSpec(bits=8)) == HEADER_BYTES + (1 << 24) * 1028


def test_layout_places_messages_apart_and_aligned() -> None:
    layout = MessageLayout((3, 0, 7), 33, CodecSpec(bits=4))
    assert layout.rows == 10
    assert layout.row_starts == (0, 3, 3, 10)
    assert all(offset % MESSAGE_ALIGNMENT == 0 for offset in layout.offsets)
    ends = [offset + size for offset, size in zip(layout.offsets, layout.sizes, strict=False)]
    assert all(end <= start for end, start in zip(ends, layout.offsets[1:], strict=True))
    views = layout.views(torch.zeros(layout.buffer_bytes, dtype=torch.uint8))
    assert [view.numel() for view in views] == list(layout.sizes)


def test_a_lone_message_fills_its_buffer() -> None:
    layout = MessageLayout((3,), 33, CodecSpec(bits=1))
    assert layout.buffer_bytes == message_bytes(3, 33, CodecSpec(bits=1))


@pytest.mark.parametrize("bits", [0, 3, 64])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(KernelError, match="is no width"):
        CodecSpec(bits=bits)


@pytest.mark.parametrize("variant", [Variant.DIFFERENCE, Variant.FEEDBACK])
def test_stochastic_state_at_one_bit_is_refused(variant: Variant) -> None:
    with pytest.raises(KernelError, match="diverges"):
        CodecSpec(bits=1, variant=variant)
    CodecSpec(bits=1, variant=variant, rounding=Rounding.NEAREST)
    CodecSpec(bits=2, variant=variant)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (header_bytes(4, 5, CodecSpec(bits=2), torch.float32, 9), "bits"),
        (header_bytes(3, 5, CodecSpec(), torch.float32, 9), "rows"),
        (header_bytes(4, 6, CodecSpec(), torch.float32, 9), "cols"),
        (header_bytes(4, 5, CodecSpec(), torch.float32, 8), "step"),
    ],
)
def test_a_header_that_differs_is_named(other: bytes, field: str) -> None:
    message = torch.tensor(list(header_bytes(4, 5, CodecSpec(), torch.float32, 9)), dtype=torch.uint8)
    with pytest.raises(KernelError, match=f"message's {field} is"):
        check_header(message, other, ignore_step=False)


def test_any_step_will_do_where_it_is_ignored() -> None:
    message = torch.tensor(list(header_bytes(4, 5, CodecSpec(), torch.float32, 9)), dtype=torch.uint8)
    check_header(message, header_bytes(4, 5, CodecSpec(), torch.float32, 8), ignore_step=True)


def test_a_part_belongs_to_difference_coding_and_lies_in_0_to_1() -> None:
    assert CodecSpec(1, variant=Variant.DIFFERENCE, part=0.5).part == 0.5
    for wrong in (
        {"part": 0.5},
        {"part": 0.0, "variant": Variant.DIFFERENCE},
        {"bits": 2, "part": 1.5, "variant": Variant.DIFFERENCE},
    ):
        with pytest.raises(KernelError, match="pass a number in"):
            CodecSpec(**wrong)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="diverges"):
        CodecSpec(1, variant=Variant.DIFFERENCE, part=0.6)
