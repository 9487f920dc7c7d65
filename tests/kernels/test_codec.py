"""The codec's face: dtypes, modes, states, errors; and that the variants do what they are for."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels import (
    CodecSpec,
    MessageLayout,
    Mode,
    Rounding,
    Variant,
    cpu,
    decode,
    decode_peers,
    encode,
    encode_peers,
    message_bytes,
)

ROWS, COLS = 30, 50


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(100, COLS, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randperm(100, generator=torch.Generator().manual_seed(1))[:ROWS]


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_and_width_round_trips(bits: int, dtype: torch.dtype, x: torch.Tensor, rows: torch.Tensor) -> None:
    spec, values = CodecSpec(bits), x.to(dtype)
    message = encode(values, rows, spec, 3, 4, rows)
    assert message.numel() == message_bytes(ROWS, COLS, spec, dtype)
    out = decode(message, spec, ROWS, COLS, dtype, step=3)
    assert out.dtype == dtype
    error = (out.double() - values[rows].double()).abs().amax()
    if bits == 32:
        assert error == 0
    else:
        step = 2.0**-5 if bits == 16 else 8.0 / ((1 << bits) - 1)  # of values below 4
        assert error <= 1.1 * step + (2.0**-6 if dtype == torch.bfloat16 else 2.0**-9)


def test_the_message_does_not_depend_on_the_dtype_below_32_bits(x: torch.Tensor, rows: torch.Tensor) -> None:
    messages = [encode(x.to(dtype), rows, CodecSpec(2), 0, 0, rows) for dtype in (torch.float32, torch.float64)]
    assert torch.equal(*messages)


def test_exact_float64_is_bit_for_bit(rows: torch.Tensor) -> None:
    values = torch.randn(100, COLS, dtype=torch.float64) * 1e200
    values[rows[0], 3], values[rows[1], 0] = torch.nan, -torch.inf
    message = encode(values, rows, CodecSpec(32), 0, 0, None)
    out = decode(message, CodecSpec(32), ROWS, COLS, torch.float64)
    assert torch.equal(out.view(torch.int64), values[rows].view(torch.int64))


def test_a_finite_value_stays_finite_in_a_narrow_dtype() -> None:
    values = torch.full((1, 4), 65504.0, dtype=torch.float16)
    values[0, 0] = -65504.0
    out = decode(encode(values, None, CodecSpec(2), 0, 0, torch.arange(1)), CodecSpec(2), 1, 4, torch.float16)
    assert out.isfinite().all()


def test_randomness_follows_key_step_and_seed(x: torch.Tensor, rows: torch.Tensor) -> None:
    spec = CodecSpec(1)
    message = encode(x, rows, spec, 3, 4, rows)
    assert torch.equal(message, encode(x, rows, spec, 3, 4, rows))
    body = message[32:]
    for step, seed, keys in ((5, 4, rows), (3, 5, rows), (3, 4, rows + 1)):
        assert not torch.equal(body, encode(x, rows, spec, step, seed, keys)[32:])
    # A row's bits are the same in any message and at any place.
    flipped = decode(encode(x, rows.flip(0), spec, 3, 4, rows.flip(0)), spec, ROWS, COLS)
    assert torch.equal(decode(message, spec, ROWS, COLS), flipped.flip(0))


@pytest.mark.parametrize("bits", [2, 16, 32])
def test_add_accumulates_messages_of_several_peers_on_one_row(bits: int, x: torch.Tensor) -> None:
    layout = MessageLayout((40, 40, 0, 20), COLS, CodecSpec(bits))
    keys = torch.arange(100)
    buffer = encode_peers(x, None, layout, 0, 0, keys)
    index = torch.cat([torch.arange(40), torch.arange(40), torch.arange(20)])
    out = torch.ones(41, COLS)
    values = decode_peers(buffer, layout)
    decode_peers(buffer, layout, out=out, mode=Mode.ADD, index=index, threads=3)
    expected = torch.ones(41, COLS)
    for start, stop in ((0, 40), (40, 80), (80, 100)):
        expected[index[start:stop]] += values[start:stop]
    assert torch.equal(out, expected)
    # A message alone says the same as within the buffer.
    part = decode(layout.views(buffer)[1], CodecSpec(bits), 40, COLS)
    assert torch.equal(part, values[40:80])


def test_write_touches_the_given_rows_only(x: torch.Tensor, rows: torch.Tensor) -> None:
    message = encode(x, rows, CodecSpec(4), 0, 0, rows)
    out = torch.full((200, COLS), 7.0)
    decode(message, CodecSpec(4), ROWS, COLS, out=out, index=rows + 50, mode="write")
    others = torch.ones(200, dtype=torch.bool).index_fill(0, rows + 50, False)
    assert (out[others] == 7).all()
    assert (out[rows + 50] - x[rows]).abs().max() < 1


def test_difference_coding_converges_and_both_ends_agree(x: torch.Tensor, rows: torch.Tensor) -> None:
    """On rows that stand still every further bit brings the reconstruction nearer; it is the same at both ends."""
    spec = CodecSpec(1, Rounding.NEAREST, Variant.DIFFERENCE)
    sender, receiver = torch.zeros(ROWS, COLS), torch.zeros(ROWS, COLS)
    errors = []
    for step in range(30):
        message = encode(x, rows, spec, step, 0, rows, state=sender)
        out = decode(message, spec, ROWS, COLS, state=receiver, step=step)
        assert torch.equal(sender, receiver)
        assert torch.equal(out, receiver)
        errors.append(float((out - x[rows]).norm() / x[rows].norm()))
    assert errors[0] < 0.7
    assert errors[-1] < 0.03
    assert all(later < earlier for earlier, later in pairwise(errors))


def test_error_feedback_sums_to_the_truth(x: torch.Tensor, rows: torch.Tensor) -> None:
    """What is lost is sent later: the mean of what arrives misses by the last residual over the number of steps."""
    spec = CodecSpec(1, Rounding.NEAREST, Variant.FEEDBACK)
    residual, total, steps = torch.zeros(ROWS, COLS), torch.zeros(ROWS, COLS, dtype=torch.float64), 200
    for step in range(steps):
        total += decode(encode(x, rows, spec, step, 0, rows, state=residual), spec, ROWS, COLS).double()
    missed = (x[rows].double() * steps - total - residual.double()).abs().max()
    assert missed < 1e-3
    assert residual.norm() < 6 * x[rows].norm()
    assert (total / steps - x[rows]).norm() < 0.03 * x[rows].norm()


def test_an_exact_message_refreshes_the_states(x: torch.Tensor, rows: torch.Tensor) -> None:
    spec = CodecSpec(32, variant=Variant.DIFFERENCE)
    sender, receiver = torch.randn(ROWS, COLS), torch.randn(ROWS, COLS)
    message = encode(x, rows, spec, 0, 0, None, state=sender)
    out = decode(message, spec, ROWS, COLS, state=receiver)
    assert torch.equal(out, x[rows])
    assert torch.equal(sender, out)
    assert torch.equal(receiver, out)
    residual = torch.randn(ROWS, COLS)
    encode(x, rows, CodecSpec(32, variant=Variant.FEEDBACK), 0, 0, None, state=residual)
    assert (residual == 0).all()


def test_a_shift_moves_by_a_part_and_the_result_stays_unbiased(x: torch.Tensor, rows: torch.Tensor) -> None:
    """On rows that stand still the noise of stochastic rounding vanishes, and both ends keep the same shift."""
    spec = CodecSpec(1, Rounding.STOCHASTIC, Variant.DIFFERENCE, 0.2)
    sender, receiver = torch.zeros(ROWS, COLS), torch.zeros(ROWS, COLS)
    errors = []
    for step in range(60):
        before = receiver.clone()
        message = encode(x, rows, spec, step, 0, rows, state=sender)
        out = decode(message, spec, ROWS, COLS, state=receiver, step=step)
        assert torch.equal(sender, receiver)
        torch.testing.assert_close(receiver, before + 0.2 * (out - before))
        errors.append(float((out - x[rows]).norm() / x[rows].norm()))
    assert errors[0] > 1
    assert errors[-1] < 0.05


@pytest.mark.parametrize(
    "spec",
    [
        CodecSpec(1, Rounding.NEAREST, Variant.DIFFERENCE),
        CodecSpec(16, Rounding.NEAREST, Variant.DIFFERENCE),
        CodecSpec(1, Rounding.STOCHASTIC, Variant.DIFFERENCE, 0.2),
        CodecSpec(4, Rounding.STOCHASTIC, Variant.DIFFERENCE, 0.9),
    ],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_was_not_finite_recovers(spec: CodecSpec, value: float, x: torch.Tensor) -> None:
    """It arrives as such, in that row alone; its reconstruction restarts at 0 and its average stays."""
    sender, receiver, keys = torch.zeros(100, COLS), torch.zeros(100, COLS), torch.arange(100)
    average = torch.zeros(100, COLS)
    broken, others, kind = x.clone(), torch.arange(100) != 5, torch.tensor(value)
    broken[5] = value
    for step, values in enumerate((x, broken, *[x] * 40)):
        known = average[5].clone()
        message = encode(values, None, spec, step, 0, keys, state=sender)
        out = decode(message, spec, 100, COLS, state=receiver, average=average, weight=0.5 if step else 1.0)
        assert torch.equal(sender, receiver)
        assert sender.isfinite().all()
        assert average.isfinite().all()
        assert out[others].isfinite().all()
        if step == 1:
            assert torch.equal(out[5], kind.expand(COLS)) or (kind.isnan() and out[5].isnan().all())
            assert (receiver[5] == 0).all()
            assert torch.equal(average[5], known)
        else:
            assert out[5].isfinite().all()
    assert (average[5] - x[5]).norm() < 0.3 * x[5].norm()


def test_a_row_larger_than_its_state_can_follow_is_no_poison() -> None:
    """The difference of two huge rows is infinite: the state restarts, and the row arrives in the next message."""
    spec = CodecSpec(1, Rounding.STOCHASTIC, Variant.DIFFERENCE, 0.2)
    huge = torch.full((1, COLS), 3e38)
    sender, receiver, keys = huge.clone(), huge.clone(), torch.arange(1)
    first, second = (
        decode(encode(-huge, None, spec, step, 0, keys, state=sender), spec, 1, COLS, state=receiver)
        for step in range(2)
    )
    assert (first == -torch.inf).all()
    torch.testing.assert_close(second, -huge, rtol=0.01, atol=0)
    assert torch.equal(sender, receiver)


def test_smoothing_is_an_exponential_average(x: torch.Tensor, rows: torch.Tensor) -> None:
    spec = CodecSpec(4)
    average, expected = torch.zeros(ROWS, COLS), torch.zeros(ROWS, COLS)
    for step in range(5):
        message = encode(x, rows, spec, step, 0, rows)
        plain = decode(message, spec, ROWS, COLS)
        out = decode(message, spec, ROWS, COLS, average=average, weight=0.25)
        expected = expected + 0.25 * (plain - expected)
        assert torch.equal(out, average)
        torch.testing.assert_close(average, expected)
    decode(message, spec, ROWS, COLS, average=average, weight=1.0)
    assert torch.equal(average, plain)


def test_no_rows_and_no_columns_are_legal() -> None:
    for shape in ((0, 8), (3, 0), (0, 0)):
        for bits in (1, 2, 16, 32):
            values = torch.zeros(shape)
            message = encode(values, None, CodecSpec(bits), 0, 0, torch.arange(shape[0]))
            assert decode(message, CodecSpec(bits), *shape).shape == shape


def test_gradients_do_not_flow_and_meta_tensors_have_the_shape() -> None:
    values = torch.randn(3, 4, requires_grad=True)
    assert not encode(values, None, CodecSpec(), 0, 0, torch.arange(3)).requires_grad
    meta = torch.empty(3, 4, device="meta")
    message = encode(meta, None, CodecSpec(), 0, 0, torch.arange(3, device="meta"))
    assert message.shape == (message_bytes(3, 4, CodecSpec()),)
    assert decode(message, CodecSpec(), 3, 4).shape == (3, 4)


KEYS = torch.arange(3)


@pytest.mark.parametrize(
    ("values", "spec", "keys", "state", "message"),
    [
        (torch.zeros(3, 4), CodecSpec(), None, None, "without row_keys"),
        (torch.zeros(3, 4, dtype=torch.int64), CodecSpec(), KEYS, None, "values of torch.int64"),
        (torch.zeros(3), CodecSpec(), KEYS, None, "has shape"),
        (torch.zeros(3, 4), CodecSpec(), KEYS.int(), None, "row_keys is torch.int32"),
        (torch.zeros(3, 4), CodecSpec(2, variant=Variant.DIFFERENCE), KEYS, None, "needs a state"),
        (torch.zeros(3, 4), CodecSpec(), KEYS, torch.zeros(3, 4), "takes no state"),
        (torch.zeros(3, 4), CodecSpec(2, variant=Variant.FEEDBACK), KEYS, torch.zeros(4, 3), r"state is torch.float32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    values: torch.Tensor, spec: CodecSpec, keys: torch.Tensor | None, state: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(KernelError, match=message):
        encode(values, None, spec, 0, 0, keys, state=state)


def test_dithered_rows_need_their_keys_and_step_and_come_back_within_half_a_step(x: torch.Tensor) -> None:
    spec, keys, rows = CodecSpec(1, Rounding.DITHERED), torch.arange(100) * 3, torch.arange(99, -1, -1)
    message = encode(x, rows, spec, 3, 7, keys)
    for missing in ({"row_keys": keys}, {"step": 3}):
        with pytest.raises(KernelError, match="without step and row_keys"):
            decode(message, spec, 100, COLS, **missing)  # type: ignore[arg-type]
    spread = x[rows].amax(1) - x[rows].amin(1)
    right = decode(message, spec, 100, COLS, step=3, seed=7, row_keys=keys)
    assert ((right - x[rows]).abs().amax(1) <= 0.51 * spread).all()
    wrong = decode(message, spec, 100, COLS, step=3, seed=8, row_keys=keys)
    assert ((wrong - x[rows]).abs().amax(1) > 0.6 * spread).any()
    twin = decode(message, spec, 100, COLS, torch.float64, step=3, seed=7, row_keys=keys)
    assert torch.equal(twin.float(), right)


def test_a_wrong_message_is_refused(x: torch.Tensor, rows: torch.Tensor) -> None:
    message = encode(x, rows, CodecSpec(), 3, 0, rows)
    with pytest.raises(KernelError, match="message's step is 3, expected 4"):
        decode(message, CodecSpec(), ROWS, COLS, step=4)
    with pytest.raises(KernelError, match="buffer is"):
        decode(message[:-1], CodecSpec(), ROWS, COLS)
    spec = CodecSpec(1, Rounding.NEAREST, Variant.DIFFERENCE)
    with pytest.raises(KernelError, match="message's variant"):
        decode(message, spec, ROWS, COLS, state=torch.zeros(ROWS, COLS))
    for bits in (2, 32):
        message = encode(x, rows, CodecSpec(bits), 0, 0, rows)
        with pytest.raises((KernelError, IndexError)):
            decode(message, CodecSpec(bits), ROWS, COLS, out=torch.zeros(5, COLS), index=rows)


def test_without_a_compiler_the_reference_serves_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, x: torch.Tensor, rows: torch.Tensor
) -> None:
    compiled = encode(x, rows, CodecSpec(), 0, 0, rows)
    cpu.library.cache_clear()
    try:
        monkeypatch.setattr(cpu, "EXTENSION_SUFFIXES", [])
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert torch.equal(compiled, encode(x, rows, CodecSpec(), 0, 0, rows))
        assert [record.message[:31] for record in caplog.records] == ["the compiled CPU codec is missi"]
    finally:
        cpu.library.cache_clear()
