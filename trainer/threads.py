"""Work in threads, one for each of at most eight cores; NumPy and SciPy compute without Python's lock."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Return the results of all items, in their order."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        return list(pool.map(function, items))
