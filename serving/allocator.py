"""Allocate all memory from one heap, so that freed pages return.

Arrow's own allocator keeps pages for each of its threads, and glibc gives threads heaps of their own. Long-lived memory
of a release then lies between short-lived allocations of other threads, and with every swap of releases fewer whole
pages become free. Measured in benchmarks/RESULTS.md ("What a worker has to itself").
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

# Arrow reads this variable at its import, so this module must be imported first. Users can override the variable.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

_ARENAS = "MALLOC_ARENA_MAX"
_M_ARENA_MAX = -8
"""M_ARENA_MAX of glibc's malloc.h."""


def use_one_heap() -> None:
    """Share one heap among threads, unless MALLOC_ARENA_MAX is set.

    This changes glibc alone; other C libraries have a single heap anyway, or no such setting.
    """
    if _ARENAS not in os.environ and (libc := _glibc()) is not None:
        libc.mallopt(_M_ARENA_MAX, 1)


def give_back_memory() -> None:
    """Return empty pages to the system, within milliseconds."""
    from pyarrow import default_memory_pool

    default_memory_pool().release_unused()
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


@cache
def _glibc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        return libc if libc.mallopt and libc.malloc_trim else None
    except (AttributeError, OSError, TypeError):
        return None
