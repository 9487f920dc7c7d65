from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from sylvie_fx.runtime.memory import keep_freed_memory
told = keep_freed_memory() if sys.argv[1] == "kept" else False
import torch
def epoch():
    tensors = [torch.ones(1 << 20) for _ in range(16)]
for _ in range(3):
    epoch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    epoch()
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_what_is_freed_is_found_again_without_page_faults() -> None:
    def faults(how: str, **variables: str) -> tuple[str, int]:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=120, check=True,
            env={**clean, **variables},
        )  # fmt: skip
        told, count = done.stdout.split()
        return told, int(count)

    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "THP_"))}
    told, kept = faults("kept")
    _, given_back = faults("given back")
    assert told == "True"
    assert kept < given_back / 10
    assert faults("kept", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
