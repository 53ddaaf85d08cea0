"""Where the service takes memory from: the C library's heap alone, in one piece, so that what is freed goes back.

Arrow's own allocator keeps pages for each of its threads, and glibc gives threads heaps of their own: what a release
holds for hours then lies between what other threads took for a moment, and swap after swap fewer pages are free as a
whole. Measured in benchmarks/RESULTS.md ("What a worker has to itself").
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

# Arrow reads it when it is imported, and so this module comes first. Who sets it has another's memory.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

_ARENAS = "MALLOC_ARENA_MAX"
_M_ARENA_MAX = -8
"""Of glibc's malloc.h."""


def use_one_heap() -> None:
    """Have threads that begin from now on share the main thread's heap, unless MALLOC_ARENA_MAX says otherwise.

    Only glibc is told; other C libraries have one anyway, or no word for it.
    """
    if _ARENAS not in os.environ and (libc := _glibc()) is not None:
        libc.mallopt(_M_ARENA_MAX, 1)


def give_back_memory() -> None:
    """Give pages that nothing lives on back to the system. Takes milliseconds, during which other threads go on."""
    from pyarrow import default_memory_pool

    default_memory_pool().release_unused()
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


@cache
def _glibc() -> Any:
    """The C library, if it is glibc."""
    try:
        libc = ctypes.CDLL(None)
        return libc if libc.mallopt and libc.malloc_trim else None
    except (AttributeError, OSError, TypeError):
        return None
