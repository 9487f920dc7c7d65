"""Memory that one training step frees stays with the process for the next one."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys

_log = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_KEPT, _OWN_MAPPING = 1 << 30, 1 << 25
_SET_BY_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_pages() -> bool:
    """Have glibc keep up to 1 GiB of freed memory, once for the process, instead of giving it back to the system.

    Every step of full-graph training frees what the last one allocated. By default glibc gives it back, and the next step
    faults each page in again: a fifth of an epoch (docs/design.md). Blocks from 32 MiB on, the most that glibc allows, are
    mapped on their own as before.

    Returns:
        Whether it was done: not where the system has another C library, nor where the environment sets what it sets
        (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``).
    """
    if found := [name for name in _SET_BY_THE_USER if name in os.environ]:
        _log.info("freed memory is treated as %s in the environment says", " and ".join(found))
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    done = (
        mallopt is not None and bool(mallopt(_TRIM_THRESHOLD, _KEPT)) and bool(mallopt(_MMAP_THRESHOLD, _OWN_MAPPING))
    )
    _log.info("freed memory up to 1 GiB %s", "is kept for the next step" if done else "goes back to the system")
    return done
