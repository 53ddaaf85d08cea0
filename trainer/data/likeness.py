"""Ids that a person takes for one and a program for two: `007` and `7`, `39.0` and `39`."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

_REWRITES = ((r"[\s\p{Z}\x{feff}\x{200b}]+", ""), (r"(.)\.0+$", r"\1"), (r"^0+(.)", r"\1"))
"""Blanks, a trailing `.0` and leading zeros, which likeness does without."""


def lookalikes(ids: pa.Array, listed: pa.Array) -> tuple[int, tuple[str, str] | None]:
    """Count the listed ids; pair the first unlisted one with a listed one that looks like it.

    Args:
        ids, listed: distinct strings without nulls.

    Example:
        >>> lookalikes(pa.array(["a", "39.0"]), pa.array(["a", "39"]))
        (1, ('39.0', '39'))
    """
    ids, listed = ids.cast(pa.large_string()), listed.cast(pa.large_string())
    others = ids.filter(pc.invert(pc.is_in(ids, value_set=listed)))
    matching = len(ids) - len(others)
    if not len(others):
        return matching, None
    rows = pc.index_in(_bare(others), value_set=_bare(listed))
    found = pc.index(pc.is_valid(rows), True).as_py()
    return matching, None if found < 0 else (others[found].as_py(), listed[rows[found].as_py()].as_py())


def example_of(ids: pa.Array, listed: pa.Array, *, nothing: bool) -> str:
    """Describe an id without a row, and a row that looks like its own, or any where `nothing` matches."""
    _, pair = lookalikes(ids, pc.unique(listed))
    if pair is None and not (nothing and len(listed)):
        return ""
    one, other = pair or (ids[0].as_py(), listed[0].as_py())
    return f", such as {one!r}, where it has {other!r}"


def _bare(ids: pa.Array) -> pa.Array:
    for pattern, instead in _REWRITES:
        ids = pc.replace_substring_regex(ids, pattern, instead)
    return ids
