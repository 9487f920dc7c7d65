"""What of sylvie_fx works on this machine, and what is missing for the rest."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist

from sylvie_fx.graphs.datasets import available, data_folder
from sylvie_fx.graphs.partition import partition_nodes
from sylvie_fx.ir.errors import SylvieError
from sylvie_fx.kernels import cpu


class State(Enum):
    """How serious a finding is."""

    OK = "ok"
    ABSENT = "absent"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        state: Absent is only a restriction; broken has to be repaired.
        detail: Version, device, or what is missing and how to get it.
    """

    name: str
    state: State
    detail: str


def examine() -> list[Finding]:
    """Look at everything, in the order of the report; nothing is installed, downloaded or left behind."""
    checks: Iterable[tuple[str, Callable[[], Finding]]] = (
        ("python", _python),
        ("torch", _torch),
        ("gloo", _gloo),
        ("CUDA", _cuda),
        ("C++ kernels", _kernels),
        ("METIS", _metis),
        ("DGL", lambda: _framework("DGL", "dgl", "sylvie_fx.dgl", "pip install dgl==2.1.0 --no-deps")),
        ("PyG", lambda: _framework("PyG", "torch_geometric", "torch_geometric", "pip install torch_geometric")),
        ("graphs", _graphs),
    )
    return [_guarded(name, check) for name, check in checks]


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """A check that fails is a finding too: broken native libraries raise in many ways while they load."""
    try:
        return check()
    except (ImportError, OSError, RuntimeError, AttributeError, SylvieError) as error:
        return Finding(name, State.BROKEN, f"{type(error).__name__}: {error}")


def _python() -> Finding:
    return Finding("python", State.OK, f"{platform.python_version()} ({sys.executable})")


def _torch() -> Finding:
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    state = State.OK if "gloo" in backends else State.BROKEN
    return Finding(
        "torch",
        state,
        f"{torch.__version__}, {torch.get_num_threads()} threads, backends: {', '.join(backends) or 'none'}",
    )


def _gloo() -> Finding:
    # Opening its device finds out whether gloo can listen at the address that it would take.
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if interfaces:
        for name in interfaces.split(","):
            dist.ProcessGroupGloo.create_device(interface=name)
        return Finding("gloo", State.OK, f"listens on {interfaces} (GLOO_SOCKET_IFNAME)")
    dist.ProcessGroupGloo.create_default_device()
    return Finding("gloo", State.OK, f"listens at the address of {platform.node()} (GLOO_SOCKET_IFNAME is not set)")


def _cuda() -> Finding:
    if not torch.cuda.is_available():
        return Finding("CUDA", State.ABSENT, "no device that this torch can use; everything runs on the CPU")
    devices = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    text = f"{torch.cuda.device_count()} x {', '.join(sorted(devices))}, CUDA {torch.version.cuda}"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return Finding("CUDA", State.ABSENT, f"{text}; its kernels need `pip install sylvie-fx[cuda]`")
    return Finding("CUDA", State.OK, text)


def _kernels() -> Finding:
    if cpu.available():
        return Finding("C++ kernels", State.OK, "built")
    return Finding("C++ kernels", State.ABSENT, "not built, so the torch reference serves; install with a compiler")


def _metis() -> Finding:
    import pymetis

    ring = torch.arange(64)
    partition_nodes(64, ring, (ring + 1) % 64, 4)
    return Finding("METIS", State.OK, f"pymetis {pymetis.version}")


def _framework(name: str, package: str, module: str, remedy: str) -> Finding:
    if importlib.util.find_spec(package) is None:
        return Finding(name, State.ABSENT, remedy)
    importlib.import_module(module)
    return Finding(name, State.OK, str(getattr(sys.modules[package], "__version__", "of unknown version")))


def _graphs() -> Finding:
    names = available()
    if not names:
        return Finding("graphs", State.ABSENT, "SYLVIE_FX_DATA names no folder of .npz graphs; the demo has one")
    return Finding("graphs", State.OK, f"{', '.join(names)} ({data_folder()})")
