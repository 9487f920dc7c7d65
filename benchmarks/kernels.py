"""Speed of the CPU codec on one core, beside a plain copy of the same float32 rows and beside numpy and torch.

    python benchmarks/kernels.py [--rows 50000] [--cols 256] [--threads 1] [--repeats 15] [--json FILE]

All rates count the float32 bytes of the rows, whatever is written. Two copies are the yardsticks: ``memcpy`` (rows one
after another) and ``gather`` (``torch.index_select`` of the rows that the codec sends, in the same random order). Every
way is measured once a round, in rounds, so a disturbance of the machine strikes all of them; a ratio is the median of
the rounds' ratios. Targets: quantise and pack at 1 bit at least 0.6 of a copy, at 2, 4, 8 bits 0.4; unpack 1.2.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from sylvie_fx.ir.coding import ROTATED_MOST
from sylvie_fx.kernels import CodecSpec, MessageLayout, Mode, Rounding, Variant, cpu, decode, encode
from sylvie_fx.runtime.channel import shift_part

Way = Callable[[], object]
TARGETS = {"encode 1": 0.6, "encode 2": 0.4, "encode 4": 0.4, "encode 8": 0.4, "decode 1": 1.2}


def numpy_encode(x: np.ndarray, rows: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
    """One-bit stochastic quantisation as one writes it in numpy."""
    gathered = x[rows]
    low, high = gathered.min(1, keepdims=True), gathered.max(1, keepdims=True)
    up = generator.random(gathered.shape, dtype=np.float32) < (gathered - low) / (high - low)
    return np.packbits(up, axis=1), low, high


def torch_encode(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same in torch."""
    gathered = x[rows]
    low, high = gathered.aminmax(dim=1, keepdim=True)
    up = torch.rand_like(gathered) < (gathered - low) / (high - low)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
    return (up.view(len(rows), -1, 8) * weights).sum(2, dtype=torch.uint8), low, high


def torch_decode(packed: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`torch_encode`."""
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return torch.where(bits.view(len(packed), -1).bool(), high, low)


def make_ways(n: int, cols: int, threads: int) -> dict[str, Way]:
    """Everything that is measured, by name, on ``n`` random rows out of ``2 n``."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * n, cols, generator=generator)
    rows = torch.randperm(2 * n, generator=generator)[:n]
    first, out = x[:n], torch.zeros(n, cols)
    ways: dict[str, Way] = {
        "memcpy": lambda: out.copy_(first),
        "gather": lambda: torch.index_select(x, 0, rows, out=out),
    }

    def add_codec(name: str, spec: CodecSpec, state: bool = False) -> None:
        message = torch.empty(MessageLayout((n,), cols, spec).buffer_bytes, dtype=torch.uint8)
        states = [torch.zeros(n, cols) if state else None for _ in range(2)]
        encode(x, rows, spec, 0, 0, rows, message, state=states[0])
        known = {"step": 0, "row_keys": rows} if spec.needs_keys else {}
        ways[f"encode {name}"] = lambda: encode(x, rows, spec, 0, 0, rows, message, state=states[0], threads=threads)
        ways[f"decode {name}"] = lambda: decode(
            message, spec, n, cols, out=out, state=states[1], threads=threads, **known
        )

    for bits in (1, 2, 4, 8, 16):
        add_codec(str(bits), CodecSpec(bits))
    add_codec("1 nearest", CodecSpec(1, Rounding.NEAREST))
    add_codec("1 nearest difference", CodecSpec(1, Rounding.NEAREST, Variant.DIFFERENCE), state=True)
    for bits in (1, 2, 8):
        add_codec(f"{bits} dithered", CodecSpec(bits, Rounding.DITHERED))
        part = shift_part(Rounding.DITHERED, bits, cols)
        add_codec(f"{bits} shift", CodecSpec(bits, Rounding.DITHERED, Variant.DIFFERENCE, part), state=True)
    if cols <= ROTATED_MOST:
        part = shift_part(Rounding.ROTATED, 1, cols)
        add_codec("1 rotated shift", CodecSpec(1, Rounding.ROTATED, Variant.DIFFERENCE, part), state=True)
    average = torch.zeros(n, cols)
    smoothed = encode(x, rows, CodecSpec(1), 0, 0, rows)
    ways["decode 1 and smooth"] = lambda: decode(
        smoothed, CodecSpec(1), n, cols, out=out, average=average, weight=0.1, threads=threads
    )
    sums = torch.zeros(2 * n, cols)
    message = encode(x, rows, CodecSpec(1), 0, 0, rows)
    ways["decode 1 and add"] = lambda: decode(
        message, CodecSpec(1), n, cols, out=sums, mode=Mode.ADD, index=rows, threads=threads
    )
    # The bounds of the codec's arithmetic, where the memory is out of the way: rows in order.
    contiguous = torch.empty_like(message)
    ways["encode 1 in order"] = lambda: encode(first, None, CodecSpec(1), 0, 0, rows, contiguous, threads=threads)
    numpy_generator = np.random.default_rng(0)
    ways["numpy encode 1"] = lambda: numpy_encode(x.numpy(), rows.numpy(), numpy_generator)
    if cols % 8 == 0:
        ways["torch encode 1"] = lambda: torch_encode(x, rows)
        packed = torch_encode(x, rows)
        ways["torch decode 1"] = lambda: torch_decode(*packed)
    return ways


def measure(ways: dict[str, Way], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way in each round. Slow ways sit out all rounds but three."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 1):  # the first warms up
        for name, way in ways.items():
            if number > 3 and name.startswith(("numpy", "torch")):
                continue
            start = time.perf_counter()
            way()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def report(seconds: dict[str, list[float]], size: float) -> list[dict[str, object]]:
    """A record for each way: rates in GB/s of float32 and ratios to the two copies."""
    records: list[dict[str, object]] = []
    for name, times in seconds.items():
        rates = sorted(size / t / 1e9 for t in times)
        record: dict[str, object] = {
            "way": name,
            "median": statistics.median(rates),
            "low": rates[0],
            "high": rates[-1],
        }
        for yardstick in ("memcpy", "gather"):
            pairs = zip(seconds[yardstick], times, strict=False)
            record[yardstick] = statistics.median(copy / own for copy, own in pairs)
        records.append(record)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50000)
    parser.add_argument("--cols", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    compiled = cpu.instruction_set() if cpu.available() else "not compiled: the torch reference"
    print(
        f"{platform.machine()}, codec {compiled}, {options.threads} thread(s), {options.rows} x {options.cols} float32"
    )
    seconds = measure(make_ways(options.rows, options.cols, options.threads), options.repeats)
    records = report(seconds, options.rows * options.cols * 4)
    print(f"{'':24}{'GB/s':>7}{'lowest':>8}{'highest':>8}{'/memcpy':>9}{'/gather':>9}  target (of memcpy)")
    for r in records:
        target = TARGETS.get(str(r["way"]))
        verdict = "" if target is None else f"  {target} {'met' if float(str(r['memcpy'])) >= target else 'MISSED'}"
        print(
            f"{r['way']:24}{r['median']:7.1f}{r['low']:8.1f}{r['high']:8.1f}{r['memcpy']:9.2f}{r['gather']:9.2f}{verdict}"
        )
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
