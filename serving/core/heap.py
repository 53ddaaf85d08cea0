"""Memory that was freed, given back to the system: else a process keeps what its largest moment took."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import pyarrow as pa


def give_back_memory() -> None:
    """Give pages that nothing lives on back to the system. Takes milliseconds, during which other threads go on."""
    pa.default_memory_pool().release_unused()
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], Any] | None:
    """glibc's, which looks through all arenas; None where the system has another C library."""
    try:
        trim: Callable[[int], Any] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return trim
