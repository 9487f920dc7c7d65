from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from sylvie_fx.runtime.pages import keep_pages

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(1 << 20) for _ in range(16)] + [torch.ones(1 << 24)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

done = keep_pages()
for _ in range(4):
    step()
print(done, sum(step() for _ in range(8)))
"""


def _run(script: str = SCRIPT, **environment: str) -> tuple[bool, int]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    found = subprocess.run(
        [sys.executable, "-c", script], env=clean | environment, capture_output=True, text=True, timeout=120, check=True
    )
    done, faults = found.stdout.split()
    return done == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc, which alone has the setting")
def test_a_step_finds_the_pages_of_the_one_before() -> None:
    done, faults = _run()
    pages = 8 * (16 * (4 << 20) + (64 << 20)) // os.sysconf("SC_PAGESIZE")
    assert done
    assert faults < pages / 4, "the blocks of a step were new to the process (one of them may be: the heap has holes)"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc, which alone has the setting")
def test_what_sharding_freed_can_be_given_back() -> None:
    script = """
import torch
from sylvie_fx.runtime.pages import give_back, keep_pages

def resident():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmRSS")) // 1024

keep_pages()
blocks = [torch.ones(1 << 20) for _ in range(64)]
stays = torch.ones(1 << 20)
del blocks
before = resident()
give_back()
print(before - resident() > 200, 0)
"""
    assert _run(script)[0]


def test_what_the_environment_says_counts() -> None:
    assert _run(MALLOC_TRIM_THRESHOLD_="100000")[0] is False
