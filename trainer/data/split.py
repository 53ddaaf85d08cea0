"""Which pairs train, and which are held out: splits of interactions, and the reduction to one label a query.

Legend: `L` labels, `N` pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Float64, Int8, Int64
from longtail.trainer.config import SplitConfig
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.scratch import IN_MEMORY, Scratch
from longtail.trainer.errors import DataError

_AT_ONCE = 1 << 22
"""Times that are counted at a time."""
_SIGN = np.uint64(1 << 63)


def cut(
    pairs: Pairs, split: SplitConfig, *, given: set[str], seed: int, scratch: Scratch = IN_MEMORY
) -> dict[str, Pairs]:
    """Cut pairs into `train`, `valid` and `test`.

    Args:
        split: the strategy, and the shares that are held out.
        given: splits that have a file of their own, for which nothing is cut off.
    """
    return _STRATEGIES[split.strategy](pairs, split, given, seed, scratch)


def _random(pairs: Pairs, split: SplitConfig, given: set[str], seed: int, scratch: Scratch) -> dict[str, Pairs]:
    order_N = _shuffled(len(pairs), seed, scratch)
    tests, held = _held_out(len(pairs), split, given)
    parts = {"test": order_N[:tests], "valid": order_N[tests:held], "train": order_N[held:]}
    return {name: pairs.take(rows, scratch) for name, rows in parts.items()}


def _temporal(pairs: Pairs, split: SplitConfig, given: set[str], seed: int, scratch: Scratch) -> dict[str, Pairs]:  # noqa: ARG001
    """Make the latest pairs test, the next valid; equal times keep their order in the file."""
    times_N = pairs.times
    if times_N is None:
        raise DataError("data.split: expected data.timestamp for strategy 'temporal', received none")
    bounds = [_latest(times_N, count) for count in _held_out(len(pairs), split, given)]
    passed = [0, 0]

    def numbers(block: slice) -> Int8:
        number_n = np.zeros(block.stop - block.start, np.int8)
        for at, (time, of_time) in enumerate(bounds):
            same_n = times_N[block] == time
            number_n += (times_N[block] > time) | (same_n & (np.cumsum(same_n) <= of_time - passed[at]))
            passed[at] += int(same_n.sum())
        return number_n

    return _numbered(pairs, numbers, scratch)


def _random_per_query(
    pairs: Pairs, split: SplitConfig, given: set[str], seed: int, scratch: Scratch
) -> dict[str, Pairs]:
    shuffled = pairs.take(_shuffled(len(pairs), seed, scratch), scratch)
    return _shares_of_each(shuffled.sorted(scratch, by_time=False), split, given, scratch)


def _temporal_per_query(
    pairs: Pairs, split: SplitConfig, given: set[str], seed: int, scratch: Scratch  # noqa: ARG001
) -> dict[str, Pairs]:  # fmt: skip
    return _shares_of_each(pairs.sorted(scratch), split, given, scratch)


def _shares_of_each(by_query: Pairs, split: SplitConfig, given: set[str], scratch: Scratch) -> dict[str, Pairs]:
    counts_Q = by_query.per_query()
    tests_Q, valids_Q = (
        np.rint(counts_Q * (0 if name in given else share)).astype(np.int64)
        for name, share in (("test", split.test), ("valid", split.valid))
    )
    return _last_of_each(by_query, counts_Q, tests_Q, tests_Q + valids_Q, scratch)


def _leave_last_out(pairs: Pairs, split: SplitConfig, given: set[str], seed: int, scratch: Scratch) -> dict[str, Pairs]:  # noqa: ARG001
    """Return queries with fewer than three pairs stay in train whole."""
    ordered = pairs.sorted(scratch)
    counts_Q = ordered.per_query()
    tests_Q, valids_Q = ((counts_Q >= 3) & (name not in given) for name in ("test", "valid"))
    return _last_of_each(ordered, counts_Q, tests_Q.astype(np.int64), tests_Q.astype(np.int64) + valids_Q, scratch)


def _last_of_each(
    by_query: Pairs, counts_Q: Int64, tests_Q: Int64, held_Q: Int64, scratch: Scratch
) -> dict[str, Pairs]:
    """Cut the last pairs of every query into test, the pairs before them into valid, the rest into train."""
    ends_Q = np.cumsum(counts_Q)

    def numbers(block: slice) -> Int8:
        query_n = by_query.queries[block]
        from_end_n = ends_Q[query_n] - np.arange(block.start, block.stop)
        return (from_end_n <= tests_Q[query_n]).astype(np.int8) + (from_end_n <= held_Q[query_n])

    return _numbered(by_query, numbers, scratch)


def _held_out(count: int, split: SplitConfig, given: set[str]) -> tuple[int, int]:
    """Return how many of some pairs are test, and how many test or valid."""
    tests, valids = (
        0 if name in given else int(count * share) for name, share in (("test", split.test), ("valid", split.valid))
    )
    return tests, tests + valids


def _shuffled(count: int, seed: int, scratch: Scratch) -> Int64:
    """NumPy's permutation of this many rows, int64."""
    order_N = scratch.column(np.int64, (np.arange(block.start, block.stop) for block in scratch.blocks(count)))
    np.random.default_rng(seed).shuffle(order_N)
    return order_N


def _numbered(pairs: Pairs, numbers: Callable[[slice], Int8], scratch: Scratch) -> dict[str, Pairs]:
    """Return pairs by split: 0 is train, 1 valid, 2 test of the numbers of blocks of them, which are asked for in
    order."""
    number_N = scratch.column(np.int8, map(numbers, scratch.blocks(len(pairs))))
    blocks = list(scratch.blocks(len(pairs)))
    return {
        name: pairs.take(scratch.column(np.bool_, (number_N[block] == at for block in blocks)), scratch)
        for at, name in enumerate(("train", "valid", "test"))
    }


def _latest(times_N: Float64, count: int) -> tuple[float, int]:
    """Get the time of the `count`-th latest, and how many of that time are among the latest; ∞ and 0 where none is."""
    if not count:
        return np.inf, 0
    found, left = np.uint64(0), count
    for shift in (48, 32, 16, 0):
        counts = np.zeros(1 << 16, np.int64)
        for start in range(0, len(times_N), _AT_ONCE):
            bits_n = _ordered_bits(times_N[start : start + _AT_ONCE]) >> np.uint64(shift)
            alike_n = bits_n[bits_n >> np.uint64(16) == found]
            counts += np.bincount((alike_n & np.uint64(0xFFFF)).astype(np.int64), minlength=len(counts))
        not_above = np.cumsum(counts[::-1])
        at = int(np.searchsorted(not_above, left))
        left -= int(not_above[at] - counts[::-1][at])
        found = found << np.uint64(16) | np.uint64(len(counts) - 1 - at)
    bits = found ^ _SIGN if found & _SIGN else ~found
    return float(bits.view(np.float64)), left


def _ordered_bits(times_n: Float64) -> npt.NDArray[np.uint64]:
    """Return numbers whose order is that of times, uint64 [n]."""
    bits_n = (times_n + 0.0).view(np.uint64)  # −0 is 0
    return np.where(bits_n & _SIGN, ~bits_n, bits_n | _SIGN)


_STRATEGIES: dict[str, Callable[[Pairs, SplitConfig, set[str], int, Scratch], dict[str, Pairs]]] = {
    "random": _random,
    "random_per_query": _random_per_query,
    "temporal": _temporal,
    "temporal_per_query": _temporal_per_query,
    "leave_last_out": _leave_last_out,
}


def keep_smallest_label(
    pairs: dict[str, Pairs], label_ids: pa.Array, listed: pa.Array | None
) -> tuple[dict[str, Pairs], pa.Array]:
    """Of every query in every file its smallest label alone, and the catalogue that is left [BM20 A.2].

    Args:
        label_ids: the catalogue, strings; ids that are all integers are ordered as numbers.
        listed: ids that stay in the catalogue even if they are nobody's smallest.
    """
    ids = label_ids.to_pylist()
    numeric = all(re.fullmatch(r"-?[0-9]+", id_) for id_ in ids)
    order = sorted(range(len(ids)), key=(lambda row: int(ids[row])) if numeric else ids.__getitem__)
    rank_L = np.empty(len(ids), np.int64)
    rank_L[order] = np.arange(len(ids))

    def reduced(split: Pairs) -> Pairs:
        by_query = np.lexsort((rank_L[split.labels], split.queries))
        first = np.diff(split.queries[by_query], prepend=-1) > 0
        return split.take(np.sort(by_query[first]))

    pairs = {name: reduced(split) for name, split in pairs.items()}
    kept_L = np.zeros(len(ids), bool)
    for split in pairs.values():
        kept_L[split.labels] = True
    if listed is not None:
        kept_L |= np.asarray(pc.is_in(label_ids, value_set=listed))
    rows_L = np.cumsum(kept_L, dtype=np.int32) - np.int32(1)
    renamed = {name: replace(split, labels=rows_L[split.labels]) for name, split in pairs.items()}
    return renamed, label_ids.filter(pa.array(kept_L))


def without_repeats(pairs: Pairs, scratch: Scratch = IN_MEMORY) -> Pairs:
    """Return every pair, of every objective if there are any, once: the latest, in its place, with the largest weight
    of all.

    Args:
        pairs: sorted, as a data set holds them.
    """
    return pairs.joined((_once(pairs.take(run)).columns() for run in pairs.runs(scratch)), scratch)


def _once(pairs: Pairs) -> Pairs:
    keys = pairs.owner_keys * (int(pairs.labels.max(initial=0)) + 1) + pairs.labels
    distinct, last_from_end, inverse = np.unique(keys[::-1], return_index=True, return_inverse=True)
    if len(distinct) == len(keys):
        return pairs
    rows = len(keys) - 1 - last_from_end
    order = np.argsort(rows)
    kept = pairs.take(rows[order])
    if pairs.weights is None:
        return kept
    largest = np.zeros(len(distinct), np.float32)
    np.maximum.at(largest, inverse, pairs.weights[::-1])
    return replace(kept, weights=largest[order])
