from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import Tensor, nn

from sylvie_fx.ir.written import stamp

MADE = {
    "dense": lambda: torch.arange(2.0, 14.0),
    "columns": lambda: torch.arange(2.0, 14.0).view(3, 4)[:, 1:3],
    "flags": lambda: torch.zeros(5, dtype=torch.bool),
    "half": lambda: torch.zeros(5, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("inference", [False, True])
def test_a_write_changes_the_stamp_and_nothing_else_does(kind: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        tensor = MADE[kind]()
        before = stamp(tensor)
        assert stamp(tensor) == before
        tensor.detach()[-1] = 1
        assert stamp(tensor) != before


def test_an_empty_tensor_has_a_stamp() -> None:
    with torch.inference_mode():
        assert stamp(torch.zeros(0, 3)) == stamp(torch.zeros(3, 0))


def test_a_stamp_leaves_a_capture_in_another_thread_alone() -> None:
    """Torch keeps the modes that trace before dispatch for the whole process."""
    with torch.inference_mode():
        tensor = torch.zeros(1000)
    inside, done = threading.Event(), threading.Event()
    counts = []

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            counts.append(0)
            while not done.is_set():
                x = x + 1
                counts[-1] += 1
            return x

    def other() -> None:
        assert inside.wait(60)
        for _ in range(300):
            stamp(tensor)
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=other)
    thread.start()
    try:
        program = torch.export.export(Slow(), (torch.ones(3),), strict=False)
    finally:
        done.set()
        thread.join(60)
        sys.setswitchinterval(interval)
    assert sum(n.op == "call_function" for n in program.graph.nodes) == counts[0] > 0
