"""The codec on a GPU, what `make gpu-check` runs: correctness against the torch reference, speed against a device copy.

    python benchmarks/gpu_check.py [--rows 1000000] [--json FILE]

Under a minute on a current GPU. Without one it says so and ends well: compilation for real architectures and the
kernels' bytes are then tested on the host (tests/kernels/test_cuda.py).

Rates count the float32 bytes of the rows; the yardstick is a device-to-device copy of the same rows, whose rate counts
them once as well (it reads and writes them). Target on an H200: 0.7 of it, encoding and decoding.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from sylvie_fx.ir.coding import ROTATED_MOST
from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels import CodecSpec, MessageLayout, Mode, Rounding, Variant, cuda, decode, encode, reference
from sylvie_fx.kernels.calls import Decoding, Encoding
from sylvie_fx.kernels.hashing import stream_word

TARGET = 0.7
WIDTHS = (1, 31, 33, 64, 100, 256, 300, 1030)


def corner_rows(cols: int, generator: torch.Generator) -> torch.Tensor:
    """float32 ``[256, cols]`` of all magnitudes and offsets, with NaN, infinities, constants and subnormal values."""
    x = torch.randn(256, cols, generator=generator) * torch.logspace(-38, 37.5, 256)[:, None]
    x[::2] += torch.logspace(-30, 37, 128)[torch.randperm(128, generator=generator)][:, None]
    x[3], x[4], x[5, -1], x[6, 0], x[7, 0], x[8] = 0.0, 0.1, torch.nan, torch.inf, -torch.inf, x[8] * 1e-42
    return x


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


def check(spec: CodecSpec, cols: int, device: str = "cuda") -> list[str]:
    """What differs between the device and the reference in one step of both ends.

    The tests call it with ``"cpu"`` and launches that are emulated.
    """
    generator = torch.Generator().manual_seed(cols)
    x, rows = corner_rows(cols, generator), torch.randperm(256, generator=generator)
    keys = torch.randint(-(1 << 62), 1 << 62, (256,), generator=generator)
    layout, stream = MessageLayout((100, 0, 156), cols, spec), stream_word(4, 3)
    start = torch.randn(256, cols, generator=generator)
    message = torch.zeros(layout.buffer_bytes, dtype=torch.uint8)
    state = None if spec.variant is Variant.PLAIN else start.clone()
    reference.encode_messages(Encoding(x, rows, keys, layout, stream, 3, message, state))
    device_message = torch.zeros_like(message).to(device)
    device_state = None if state is None else start.clone().to(device)
    cuda.encode_messages(
        Encoding(x.to(device), rows.to(device), keys.to(device), layout, stream, 3, device_message, device_state)
    )
    faults = [] if same(message, device_message) else ["codes"]
    if state is not None and device_state is not None and not same(state, device_state):
        faults.append("sender's state")
    index = torch.cat([torch.randperm(256, generator=generator)[:count] for count in layout.counts])
    out, device_out = start.clone(), start.clone().to(device)
    average, device_average = start.clone(), start.clone().to(device)
    receiver = start.clone() if spec.variant is Variant.DIFFERENCE else None
    device_receiver = None if receiver is None else start.clone().to(device)
    random = {"keys": keys, "stream": stream}
    reference.decode_messages(Decoding(message, layout, out, index, True, receiver, average, 0.3, **random))
    cuda.decode_messages(
        Decoding(
            message.to(device),
            layout,
            device_out,
            index.to(device),
            True,
            device_receiver,
            device_average,
            0.3,
            step=3,
            keys=keys.to(device),
            stream=stream,
        )
    )
    faults += [] if same(out, device_out) else ["values"]
    faults += [] if same(average, device_average) else ["average"]
    if receiver is not None and device_receiver is not None and not same(receiver, device_receiver):
        faults.append("receiver's state")
    return faults


def specs() -> Iterator[CodecSpec]:
    """Every width, rounding and variant that is a codec; difference coding with random rounding moves its state by a part."""
    for variant, bits, rounding in itertools.product(Variant, (1, 2, 4, 8, 16), Rounding):
        by_parts = variant is Variant.DIFFERENCE and rounding is not Rounding.NEAREST
        with contextlib.suppress(KernelError):
            yield CodecSpec(bits, rounding, variant, 0.4 if by_parts else 1.0)


def widths(spec: CodecSpec) -> tuple[int, ...]:
    """Columns that a codec is checked with."""
    return tuple(c for c in WIDTHS if spec.rounding is not Rounding.ROTATED or 0 < c <= ROTATED_MOST)


def median_seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Median device time of one call."""
    for _ in range(3):
        work()
    times: list[float] = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def speeds(n: int, cols: int) -> list[dict[str, object]]:
    """Rates of one row count and width, each with its ratio to the copy."""
    x = torch.randn(n, cols, device="cuda")
    out, rows = torch.empty_like(x), torch.randperm(n, device="cuda")
    size = n * cols * 4 / 1e9
    copy = size / median_seconds(lambda: out.copy_(x))
    records: list[dict[str, object]] = [{"way": "copy", "cols": cols, "rate": copy, "ratio": 1.0}]

    def add(way: str, work: Callable[[], object]) -> None:
        rate = size / median_seconds(work)
        records.append({"way": way, "cols": cols, "rate": rate, "ratio": rate / copy})

    add("gather", lambda: torch.index_select(x, 0, rows, out=out))
    for bits, rounding in ((1, Rounding.STOCHASTIC), (1, Rounding.NEAREST), (1, Rounding.DITHERED), (1, Rounding.ROTATED),
                           (2, Rounding.STOCHASTIC), (4, Rounding.STOCHASTIC), (8, Rounding.STOCHASTIC),
                           (16, Rounding.STOCHASTIC)):  # fmt: skip
        if rounding is Rounding.ROTATED and cols > ROTATED_MOST:
            continue
        spec = CodecSpec(bits, rounding)
        known: dict[str, Any] = {"step": 0, "row_keys": rows} if spec.needs_keys else {}
        message = encode(x, rows, spec, 0, 0, rows)
        name = f"{bits} {rounding.value}"
        add(f"encode {name}", lambda spec=spec, message=message: encode(x, rows, spec, 0, 0, rows, message))  # type: ignore[misc]
        add(
            f"decode {name}",
            lambda spec=spec, message=message, known=known: decode(  # type: ignore[misc]
                message, spec, n, cols, out=out, **known
            ),
        )
        if bits == 1:
            add(
                f"decode {name} and add",
                lambda spec=spec, message=message, known=known: decode(  # type: ignore[misc]
                    message, spec, n, cols, out=out, mode=Mode.ADD, index=rows, **known
                ),
            )
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-check: NO GPU on this machine: nothing was run on a device. The CUDA kernels are covered by")
        print("compilation to cubin and by emulated warps only: pytest tests/kernels/test_cuda.py")
        return 0
    if not cuda.available():
        print("gpu-check: cuda-core is not installed: pip install sylvie-fx[cuda]")
        return 1
    print(f"gpu-check on {torch.cuda.get_device_name()}")
    faults = 0
    for spec in specs():
        for cols in widths(spec):
            wrong = check(spec, cols)
            faults += len(wrong)
            if wrong:
                print(f"WRONG: {spec}, {cols} columns: {', '.join(wrong)}")
    print("bytes, values and states are the reference's" if not faults else f"{faults} differences from the reference")
    records = [record for cols in (64, 256, 602) for record in speeds(options.rows * 256 // cols // 4 * 4, cols)]
    print(f"{'':28}{'columns':>8}{'GB/s':>8}{'/copy':>7}")
    for r in records:
        met = "" if str(r["way"]) in ("copy", "gather") else "  met" if float(str(r["ratio"])) >= TARGET else "  MISSED"
        print(f"{r['way']:28}{r['cols']:8}{r['rate']:8.0f}{r['ratio']:7.2f}{met}")
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
