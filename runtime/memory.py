"""Memory that an epoch's tensors have left stays with the process, so that the next epoch finds it without page faults."""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's malloc.h."""

_LARGEST = 32 << 20
"""Bytes from which on a block has pages of its own, which are given back: glibc takes no larger number."""


@functools.cache
def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed at the end of its heap, for the whole process; False where it can not be told.

    A backward pass ends with most of an epoch's tensors freed. glibc then gives their pages back, and the next epoch faults
    them in one by one, which takes up to a quarter of its time. What is kept is used again: the largest use of memory
    stays what it was. Whoever has set glibc's own variables (``MALLOC_TRIM_THRESHOLD_`` …) has decided for himself.
    """
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    # Setting one ends glibc's own choice of the other, which would have come to this number.
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))
