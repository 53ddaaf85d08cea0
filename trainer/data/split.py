"""Which pairs train, and which are held out: splits of interactions, and the reduction to one label a query.

Legend: `L` labels, `N` pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Int64
from longtail.trainer.config import SplitConfig
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.errors import DataError


def cut(pairs: Pairs, split: SplitConfig, *, given: set[str], seed: int) -> dict[str, Pairs]:
    """Cut pairs into `train`, `valid` and `test`.

    Args:
        pairs: all of them.
        split: the strategy, and the shares that are held out.
        given: splits that have a file of their own, for which nothing is cut off.
        seed: what a random split is drawn by.

    Raises:
        DataError: a temporal split of pairs without times.
    """
    return _STRATEGIES[split.strategy](pairs, split, given, seed)


def _random(pairs: Pairs, split: SplitConfig, given: set[str], seed: int) -> dict[str, Pairs]:
    order = np.random.default_rng(seed).permutation(len(pairs))
    return _in_order(pairs, order, split, given)


def _temporal(pairs: Pairs, split: SplitConfig, given: set[str], seed: int) -> dict[str, Pairs]:  # noqa: ARG001
    if pairs.times is None:
        raise DataError("data.split: expected data.timestamp for strategy 'temporal', received none")
    return _in_order(pairs, np.argsort(-pairs.times, kind="stable"), split, given)


def _in_order(pairs: Pairs, order: Int64, split: SplitConfig, given: set[str]) -> dict[str, Pairs]:
    """The first pairs of `order` are test, the next valid, the rest train."""
    tests = 0 if "test" in given else int(len(order) * split.test)
    valids = 0 if "valid" in given else int(len(order) * split.valid)
    return {
        "test": pairs.take(order[:tests]),
        "valid": pairs.take(order[tests : tests + valids]),
        "train": pairs.take(order[tests + valids :]),
    }


def _random_per_query(pairs: Pairs, split: SplitConfig, given: set[str], seed: int) -> dict[str, Pairs]:
    shuffled = pairs.take(np.random.default_rng(seed).permutation(len(pairs)))
    return _last_of_each(shuffled.take(np.argsort(shuffled.queries, kind="stable")), split, given)


def _temporal_per_query(pairs: Pairs, split: SplitConfig, given: set[str], seed: int) -> dict[str, Pairs]:  # noqa: ARG001
    return _last_of_each(pairs.sorted(), split, given)


def _last_of_each(by_query: Pairs, split: SplitConfig, given: set[str]) -> dict[str, Pairs]:
    """The last pairs of every query are test, those before them valid, the rest train."""
    counts = np.bincount(by_query.queries)
    from_end = np.cumsum(counts)[by_query.queries] - np.arange(len(by_query))
    tests, valids = (
        np.zeros_like(from_end) if name in given else np.rint(counts * share)[by_query.queries]
        for name, share in (("test", split.test), ("valid", split.valid))
    )
    test = from_end <= tests
    valid = ~test & (from_end <= tests + valids)
    return {"test": by_query.take(test), "valid": by_query.take(valid), "train": by_query.take(~test & ~valid)}


def _leave_last_out(pairs: Pairs, split: SplitConfig, given: set[str], seed: int) -> dict[str, Pairs]:  # noqa: ARG001
    """Queries with fewer than three pairs stay in train whole."""
    ordered = pairs.sorted()
    counts = np.bincount(ordered.queries)
    ends = np.cumsum(counts)[ordered.queries]
    from_end = ends - np.arange(len(ordered))
    long = counts[ordered.queries] >= 3
    held = 0 if "test" in given else 1
    test = long & (from_end == 1) & (held == 1)
    valid = long & (from_end == 1 + held) & ("valid" not in given)
    return {"test": ordered.take(test), "valid": ordered.take(valid), "train": ordered.take(~test & ~valid)}


_STRATEGIES: dict[str, Callable[[Pairs, SplitConfig, set[str], int], dict[str, Pairs]]] = {
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
        pairs: by split.
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


def without_repeats(pairs: Pairs) -> Pairs:
    """Every pair, of every objective if there are any, once: the latest, in its place, with the largest weight of all.

    Args:
        pairs: sorted, as a data set holds them.
    """
    keys = pairs.owners * (int(pairs.labels.max(initial=0)) + 1) + pairs.labels
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
