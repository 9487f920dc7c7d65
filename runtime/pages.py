"""Memory that one training step frees stays with the process for the next one."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys

_log = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3)
_SET_BY_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


@functools.cache
def keep_pages() -> bool:
    """Have glibc keep freed memory, once for the process, instead of giving it back to the system.

    Every step of full-graph training frees what the last one allocated. By default glibc gives it back, blocks from 32 MiB
    on at once, and the next step faults each page in again: a fifth of an epoch, or half of one with large blocks
    (docs/design.md).

    Returns:
        Whether it was done: not where the system has another C library, nor where the environment sets what it sets
        (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_MMAP_MAX_``, ``GLIBC_TUNABLES``).
    """
    if found := [name for name in _SET_BY_THE_USER if name in os.environ]:
        _log.info("freed memory is treated as %s in the environment says", " and ".join(found))
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    # No block is a mapping of its own, which would go with it, and the heap's end is not given back.
    done = mallopt is not None and bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))
    _log.info("freed memory %s", "is kept for the next step" if done else "goes back to the system")
    return done


def give_back() -> None:
    """Give back what is free now, where freed memory is kept: no step needs what was there once, as while sharding."""
    if keep_pages():
        ctypes.CDLL(None).malloc_trim(0)
