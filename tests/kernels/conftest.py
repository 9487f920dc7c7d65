"""Rows that try every corner of the codec, and the CUDA source compiled for the host."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sylvie_fx.kernels import aggregate_library, cpu, dropout

ROOT = Path(__file__).parents[2]


@pytest.fixture
def corner_rows() -> Callable[[int], torch.Tensor]:
    """A function from a number of columns to float32 ``[64, cols]``: every magnitude, offset and special value."""

    def make(cols: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(cols)
        x = torch.randn(64, cols, generator=generator) * torch.logspace(-38, 37.5, 64)[:, None]
        offset = torch.logspace(-30, 37, 64)[torch.randperm(64, generator=generator)]
        x += torch.where(torch.rand(64, generator=generator) < 0.5, offset, 0.0)[:, None]
        if cols:
            x[3], x[4], x[5, -1], x[6, 0], x[7, 0] = 0.0, 0.1, torch.nan, torch.inf, -torch.inf
            x[8] = 1e-42 * torch.randn(cols, generator=generator)
            x[9], x[9, 0] = 3.4e38, -3.4e38
            x[10, 0], x[10, -1] = torch.inf, -torch.inf
            x[11], x[11, 0] = -1e30, torch.finfo(torch.float32).max
            x[12], x[13] = -0.0, 1.0
        return x

    return make


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """The C++ kernels: without a compiler the test is skipped; with one, kernels that are missing are a failure."""
    libraries = {"codec": cpu, "aggregate": aggregate_library, "dropout": dropout}
    missing = [name for name, module in libraries.items() if module.library() is None]
    if missing and _compiler() is None:
        pytest.skip(f"no C++ compiler, and so no compiled kernels: {', '.join(missing)}")
    assert not missing, (
        f"{_compiler()} is here, and yet {', '.join(missing)} is not built: see what pip install printed"
    )


def _compiler() -> str | None:
    return next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], ctypes.CDLL]:
    """A function from bits to kernels/cuda/codec.cu with its warps emulated on the host."""
    compiler = _compiler()
    if compiler is None:
        pytest.skip("no C++ compiler to emulate a warp with")
    folder = tmp_path_factory.mktemp("emulation")

    @functools.cache
    def build(bits: int) -> ctypes.CDLL:
        target = folder / f"codec{bits}.so"
        source = ROOT / "tests" / "kernels" / "emulation" / "codec_host.cpp"
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", f"-DSYLVIE_BITS={bits}"]
        subprocess.run([compiler, *flags, "-w", str(source), "-o", str(target)], check=True, timeout=120)
        return ctypes.CDLL(str(target))

    return build
