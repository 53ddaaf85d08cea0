"""Columns of ids: integers or text, as dictionary-encoded strings, and what in them is no id.

Legend: `N` rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Bools, Int32
from longtail.trainer.data.files import DataFile
from longtail.trainer.data.problems import RowChecks
from longtail.trainer.data.scratch import Scratch

_NOBODY = ("", "undefined", "null", "none", "nan", "nil", "n/a", "unknown")
"""What looks like a placeholder, in lower case, without blanks around it."""
_EXACT = 2**53
"""Up to here a float64 tells one integer from the next."""
_LOOKED_UP = 128
"""Bytes beside its text that looking up an id takes, about."""
_BYTES = 12
"""Of an id's beginning, and of its end, that tell its share."""
_TEXT = 1 << 30
"""Bytes of ids that are put together to be looked up, at most; Arrow's strings end at twice that."""


def encode_ids(column: pa.ChunkedArray, name: str, file: DataFile) -> pa.DictionaryArray:
    """Return a column [N] of ids as dictionary-encoded strings, nulls among them; integers in decimal.

    Floats count as integers: pandas makes them of integers as soon as one is missing.
    """
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    numbers, texts = (pa.types.is_integer, pa.types.is_floating), (pa.types.is_string, pa.types.is_large_string)
    if not any(is_kind(kind) for is_kind in (*numbers, *texts)):
        raise file.wrong(name, "ids as strings or integers", column.type)
    encoded = column.combine_chunks()
    if pa.types.is_dictionary(encoded.type) and (encoded.dictionary.null_count or pa.types.is_floating(kind)):
        encoded = encoded.dictionary_decode()
    if pa.types.is_floating(encoded.type):
        encoded = _integers(encoded, name, file)
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    return pa.DictionaryArray.from_arrays(encoded.indices.cast(pa.int32()), encoded.dictionary.cast(pa.string()))


def _integers(column: pa.Array, name: str, file: DataFile) -> pa.Array:
    """Integers that are stored as floats, [N]; null where a value is NaN."""
    values_N = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    wrong_N = ~np.isnan(values_N) & ~((values_N == np.floor(values_N)) & (np.abs(values_N) <= _EXACT))
    if wrong_N.any():
        raise file.wrong(name, "ids as strings or integers", f"{column.type}, such as {values_N[wrong_N][0]:g}")
    return pa.array(np.nan_to_num(values_N).astype(np.int64), mask=np.isnan(values_N))


def like_placeholders(values: pa.Array) -> Bools:
    """Return which strings, [n], look like ids that name nobody, bool [n]; the empty one among them."""
    folded = pc.utf8_lower(pc.utf8_trim_whitespace(values))
    alike: Bools = np.asarray(pc.is_in(folded, value_set=pa.array(_NOBODY)))
    return alike


def check_ids(checks: RowChecks, name: str, ids: pa.DictionaryArray, placeholders: Sequence[str]) -> None:
    """Note rows without an id, and those whose id names nobody.

    Args:
        ids: encoded, [N].
        placeholders: ids that are none; others that look it are reported, and stay.
    """
    values = ids.dictionary
    expected = "an id in every row"
    if ids.indices.null_count:
        checks.add(name, np.asarray(ids.indices.is_null()), expected=expected, found="null")
    listed = np.asarray(pc.is_in(values, value_set=pa.array(placeholders, pa.string())))
    alike = like_placeholders(values)
    empty = np.asarray(pc.equal(values, ""))
    if not (listed | alike).any():
        return
    at_N = np.asarray(pc.fill_null(ids.indices, len(values)))
    for at in np.flatnonzero(listed | alike):
        wrong_N = at_N == at
        if empty[at]:
            checks.add(name, wrong_N, expected=expected, found="an empty one")
        else:
            value = values[int(at)].as_py()
            found = f"{value!r}" + ("" if listed[at] else ", which looks like a placeholder (data.placeholders)")
            checks.add(name, wrong_N, expected=expected, found=found, fatal=bool(listed[at]))


def in_use(ids: pa.DictionaryArray) -> pa.DictionaryArray:
    """Return the same ids [N] with a dictionary of only what occurs, in order of first occurrence."""
    values, first, inverse = np.unique(ids.indices.to_numpy(), return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    dictionary = ids.dictionary.take(pa.array(values[order]))
    return pa.DictionaryArray.from_arrays(pa.array(rank[inverse], pa.int32()), dictionary)


def distinct_ids(parts: Sequence[pa.StringArray], scratch: Scratch) -> tuple[pa.StringArray, list[Int32]]:
    """Return every id of some parts once, in the order of its first occurrence, and the row of each part's ids, int32
    [n].

    Where they are more than fit in memory, they are looked up share by share.

    Args:
        parts: of `M` ids together, without nulls.
    """
    text = sum(part.nbytes for part in parts)
    size = text + _LOOKED_UP * sum(map(len, parts))
    shares = min(max(-(-size // scratch.memory), -(-text // _TEXT)), 1 << 16)
    ends = np.cumsum([len(part) for part in parts])
    places = [slice(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
    if shares <= 1:
        encoded = pa.concat_arrays(parts).dictionary_encode()
        row_M = encoded.indices.to_numpy()
        return encoded.dictionary, [row_M[place] for place in places]
    share_M = scratch.column(np.uint16, (_shares_of(part, shares) for part in parts))
    first_M = scratch.empty(ends[-1], np.int64)  # where the id of every place occurs first
    for share in range(shares):
        at = [np.flatnonzero(share_M[place] == share) for place in places]
        place_m = np.concatenate([at_n + place.start for at_n, place in zip(at, places, strict=True)])
        of_share = [part.take(pa.array(at_n)) for part, at_n in zip(parts, at, strict=True)]
        number_m = pa.concat_arrays(of_share).dictionary_encode().indices.to_numpy()
        first_d = np.empty(number_m.max(initial=-1) + 1, np.int64)
        first_d[number_m[::-1]] = place_m[::-1]
        first_M[place_m] = first_d[number_m]
        del at, of_share
        pa.default_memory_pool().release_unused()
    row_M, rows = scratch.empty(ends[-1], np.int32), 0
    for place in places:
        new_n = first_M[place] == np.arange(place.start, place.stop)
        row_M[place] = np.cumsum(new_n) + (rows - 1)
        row_M[place] = row_M[first_M[place]]
        rows += int(new_n.sum())
    new = (
        part.filter(pa.array(first_M[place] == np.arange(place.start, place.stop)))
        for part, place in zip(parts, places, strict=True)
    )
    return scratch.texts(new), [row_M[place] for place in places]


def _shares_of(ids: pa.StringArray, shares: int) -> npt.NDArray[np.uint16]:
    """Return which of some shares every id [n] is in, by its length, first and last bytes: the same for the same id."""
    _, offsets, text = ids.buffers()
    bounds = np.frombuffer(offsets, np.int32)[ids.offset : ids.offset + len(ids) + 1].astype(np.int64)
    bytes_ = np.frombuffer(text or b"\0", np.uint8)
    starts_n, ends_n = bounds[:-1], bounds[1:]
    hash_n = (ends_n - starts_n).astype(np.uint64)
    for at_n in [*(starts_n + place for place in range(_BYTES)), *(ends_n - 1 - place for place in range(_BYTES))]:
        inside_n = (at_n >= starts_n) & (at_n < ends_n)
        byte_n = np.where(inside_n, bytes_[np.where(inside_n, at_n, 0)], 0).astype(np.uint64)
        hash_n = hash_n * np.uint64(0x100000001B3) + byte_n
    return ((hash_n >> np.uint64(16)) % np.uint64(shares)).astype(np.uint16)
