"""Tower inputs of queries, and the batches of an epoch.

Tower inputs have the names of `bundle.Feature`: `name` int32 [B] or [B, P], `name__weight` float32 [B, P] for
histories, bags and texts, `name` float32 [B] for numbers, [B, D] for vectors.

Legend: `B` batch, `P` positions of a padded bag, `L` labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from longtail.bundle import Inputs
from longtail.bundle.arrays import Int32, Int64
from longtail.trainer.config import FeatureConfig
from longtail.trainer.data.columns import Bags, Encoded
from longtail.trainer.data.histories import LAST_SLOTS, POSITIONS, SEGMENTS, HistoryBags, pack
from longtail.trainer.data.pairs import Pairs, Requests
from longtail.trainer.data.past import Past, Rows

if TYPE_CHECKING:
    from longtail.trainer.losses.loss_term import LossTerm

Visits: TypeAlias = Callable[[np.random.Generator], Int64]
"""Returns rows of the training pairs in the order of an epoch, int64."""

_UNKNOWN_RATE = 0.01
"""Default `unknown_rate` of query features."""
INT32_ROWS = 1 << 31
"""Largest number of rows that int32 can number."""


@dataclass(eq=False)
class QueryInputs:
    """Encode requests: attributes by query row or version, contexts by row, histories by pair.

    Attributes:
        encoded: one entry per feature other than `history`.
        history_ids: vocabulary rows of every label, int32 [L], by feature name.
        past: histories of the training pairs.
        ordered: a history holds the earlier pairs of the query; otherwise all other pairs.
        requests: the distinct requests; None if every query has exactly one.
        query_id: name of the feature that is the query's own id, which is read by query row for every version.
        events: codes of the event types in a history, by feature name; without codes, a history holds all pairs.
        packs: whether batches pack the sequences of an encoder.
    """

    features: list[FeatureConfig]
    encoded: dict[str, Encoded]
    history_ids: dict[str, Int32]
    past: Past
    ordered: bool
    requests: Requests | None
    query_id: str
    events: Mapping[str, Sequence[int]]
    packs: bool

    def __post_init__(self) -> None:
        rates = {it.name: _UNKNOWN_RATE if it.unknown_rate is None else it.unknown_rate for it in self.features}
        self._unknown = {
            it.name: (*it.unknown, rates[it.name]) for it in self.features if it.unknown and rates[it.name]
        }
        self._histories = {
            name: HistoryBags.build(self.past.pairs, self.past.offsets, self.events.get(name))
            for name in self.history_ids
        }

    def with_history(self, past: Past) -> QueryInputs:
        """Return a copy of these features with histories from other pairs."""
        return replace(self, past=past)

    def unpacked(self) -> QueryInputs:
        """Return a copy that packs no sequences, for batches that are cut into parts."""
        inputs = copy(self)  # shares the histories, which `replace` would build again
        inputs.packs = False
        return inputs

    def history_labels(self, feature: str) -> Int32:
        """Return the label rows of all entries of a history feature, int32 [n]."""
        return self._histories[feature].bags.ids

    def pair_inputs(self, pairs_B: Int64, rng: np.random.Generator, *, packed: bool = False) -> Inputs:
        """Return inputs of training pairs, [B] or [B, P] by name; histories exclude the row's positive.

        Some values become unknown, each feature at its `unknown_rate`.

        Args:
            pairs_B: rows of the pairs of the past, int64.
            rng: draws the unknown values, and the part of a history beyond `max_length` to read.
            packed: packs sequences, [S, P], as `model.sequences` reads them, with columns that locate each history.
        """
        inputs = self._static(self.past.pairs.request_rows[pairs_B])
        for feature in self.features:
            if feature.kind == "history":
                inputs |= self._history_of_pairs(feature, pairs_B, rng, packed=packed)
            if feature.name in self._unknown:
                name, value, rate = self._unknown[feature.name]
                unknown = rng.random(inputs[name].shape) < rate
                inputs[name] = np.where(unknown, inputs[name].dtype.type(value), inputs[name])
        return inputs

    def query_inputs(self, rows_B: Int32) -> Inputs:
        """Return inputs of queries as a service would receive them.

        Args:
            rows_B: rows of the past, int32; by default requests (`Pairs.request_rows`), after all known pairs.
        """
        inputs = self._static(self.past.requests(rows_B))
        slices = self.past.slices(rows_B)
        for feature in self.features:
            if feature.kind == "history":
                starts_B, ends_B = map(self._histories[feature.name].count_earlier, slices)
                inputs |= self._history(feature, np.maximum(starts_B, ends_B - feature.max_length), ends_B, None)
        return inputs

    def _static(self, requests_B: Rows) -> Inputs:
        """Return inputs of all features except histories."""
        requests = self.requests
        if requests is None:
            return take_rows(self.features, self.encoded, requests_B)
        inputs: Inputs = {}
        for feature in self.features:
            if feature.origin == "row" and requests.contexts is not None:
                rows_B = requests.contexts[requests_B]
            elif feature.name == self.query_id or requests.attributes is None:
                rows_B = requests.queries[requests_B]
            else:
                rows_B = requests.attributes[requests_B]
            inputs |= take_rows([feature], self.encoded, rows_B)
        return inputs

    def _history(self, feature: FeatureConfig, starts_B: Int64, ends_B: Int64, positives_B: Int32 | None) -> Inputs:
        """Return padded histories without the positives, label rows int32 [B].

        Positives are compared as label rows, since several labels may share a row of the vocabulary. A sequence keeps
        all earlier pairs, even of a label that is chosen again.
        """
        labels_BP, weights_BP = self._histories[feature.name].bags.pad(starts_B, ends_B, feature.max_length)
        if positives_B is not None and feature.encoder is None:
            weights_BP *= labels_BP != positives_B[:, None]
        # Weight 0 reads row 0, because a row that is read counts as touched by the step.
        ids_BP = self.history_ids[feature.name].take(labels_BP) * (weights_BP > 0)
        return {feature.name: ids_BP, f"{feature.name}__weight": weights_BP}

    def _history_of_pairs(
        self, feature: FeatureConfig, pairs_B: Int64, rng: np.random.Generator, *, packed: bool
    ) -> Inputs:
        history, queries_B = self._histories[feature.name], self.past.pairs.queries[pairs_B]
        starts_B, ends_B = history.bags.offsets[queries_B], history.bags.offsets[queries_B + 1]
        if feature.encoder is not None and packed:
            return self._packed_history(feature, starts_B, history.count_earlier(pairs_B))
        if self.ordered:
            ends_B = history.count_earlier(pairs_B)
            starts_B = np.maximum(starts_B, ends_B - feature.max_length)
        else:
            # Without an order in time no part of a long history is better than another, so read a random window.
            spare_B = np.maximum(ends_B - starts_B - feature.max_length, 0)
            starts_B = starts_B + rng.integers(0, spare_B + 1)
        if feature.sample is None:
            return self._history(feature, starts_B, ends_B, self.past.pairs.labels[pairs_B])
        ends_B = np.minimum(ends_B, starts_B + feature.max_length)
        return self._sample_history(feature, starts_B, ends_B, pairs_B, rng)

    def _packed_history(self, feature: FeatureConfig, firsts_B: Int64, ends_B: Int64) -> Inputs:
        packing = pack(firsts_B, ends_B, length=feature.max_length)
        labels = self._histories[feature.name].bags.ids
        ids_L, filled_SP = self.history_ids[feature.name], packing.segments_SP > 0
        ids_SP = packing.segments_SP
        if len(labels):
            ids_SP = np.where(filled_SP, ids_L[labels[packing.entries_SP]], np.int32(0))
        return {
            feature.name: ids_SP,
            f"{feature.name}__weight": filled_SP.astype(np.float32),
            f"_{feature.name}{SEGMENTS}": packing.segments_SP,
            f"_{feature.name}{POSITIONS}": packing.positions_SP,
            f"_{feature.name}{LAST_SLOTS}": packing.last_slots_B,
        }

    def _sample_history(
        self, feature: FeatureConfig, starts_B: Int64, ends_B: Int64, pairs_B: Int64, rng: np.random.Generator
    ) -> Inputs:
        """Sample each history `starts:ends` without the pair itself [METHODS §10.1].

        The history is cut into `sample` equal parts. Each part gives one entry, whose weight is the size of the part.
        """
        history, width = self._histories[feature.name], feature.sample or 1
        labels, positives_B = history.bags.ids, self.past.pairs.labels[pairs_B]
        # The pair itself is an entry if its event type is in the history and the entry is in the range.
        entry_B = history.count_earlier(pairs_B)
        is_entry_B = (entry_B >= starts_B) & (entry_B < np.minimum(ends_B, len(labels)))
        is_entry_B[is_entry_B] = labels[entry_B[is_entry_B]] == positives_B[is_entry_B]
        size_B1, remainder_B1 = (column[:, None] for column in np.divmod(ends_B - starts_B - is_entry_B, width))
        parts_P = np.arange(width)
        sizes_BP = size_B1 + (parts_P < remainder_B1)
        drawn_BP = starts_B[:, None] + parts_P * size_B1 + np.minimum(parts_P, remainder_B1)
        drawn_BP += (rng.random(sizes_BP.shape) * sizes_BP).astype(np.int64)
        drawn_BP += is_entry_B[:, None] & (drawn_BP >= entry_B[:, None])  # the parts do not count the pair itself
        labels_BP = labels[np.where(sizes_BP > 0, drawn_BP, 0)] if len(labels) else np.zeros(drawn_BP.shape, np.int32)
        weights_BP = np.where(labels_BP == positives_B[:, None], 0, sizes_BP).astype(np.float32)
        ids_BP = np.where(weights_BP > 0, self.history_ids[feature.name][labels_BP], np.int32(0))
        return {feature.name: ids_BP, f"{feature.name}__weight": weights_BP}


def take_rows(
    features: Sequence[FeatureConfig], encoded: Mapping[str, Encoded], rows_B: npt.NDArray[np.integer]
) -> Inputs:
    """Select rows of encoded columns as tower inputs, [B] or [B, P].

    Args:
        features: features of one tower; features without an entry in `encoded` are ignored.
    """
    inputs: Inputs = {}
    for feature in features:
        column = encoded.get(feature.name)
        if isinstance(column, Bags):
            ends_B = column.offsets[rows_B + 1]
            starts_B = np.maximum(column.offsets[rows_B], ends_B - feature.max_length)
            ids, weights = column.pad(starts_B, ends_B, feature.max_length)
            inputs[feature.name], inputs[f"{feature.name}__weight"] = ids, weights
        elif column is not None:
            inputs |= {f"{feature.name}{suffix}": array[rows_B] for suffix, array in column.arrays.items()}
    return inputs


def epoch_batches(
    pairs: Pairs,
    features: QueryInputs,
    terms: Sequence[LossTerm] = (),
    *,
    batch_size: int,
    seed: int,
    epoch: int,
    first: int = 0,
    visits: Visits | None = None,
) -> Iterator[tuple[int, Inputs]]:
    """Yield numbered, shuffled batches of one epoch, from step `first` on; a last incomplete batch is dropped.

    A batch holds the query tower's inputs by name, `_pair` int [B] (rows of `pairs`), `_positive` int32 [B] (label
    rows), `_weight` float32 [B], and the columns of the terms. With sequences, a batch holds all pairs of its
    queries, except for the first and the last query, and sequences are packed. The same arguments give the same
    batches.

    Args:
        seed: determines, together with `epoch`, the order and every draw.
        visits: returns the rows of the training pairs in the order of an epoch, int64; by default all pairs.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(pairs)) if visits is None else visits(rng)
    if features.packs:
        order = _group_by_query(order, pairs, seed=seed, epoch=epoch)
    for step in range(first, len(order) // batch_size):
        rows_B = order[step * batch_size : (step + 1) * batch_size]
        # A generator per step, and per term: a resumed run gets the same batches without the steps before.
        batch = features.pair_inputs(rows_B, np.random.default_rng([seed, epoch, step]), packed=features.packs)
        batch["_pair"] = rows_B.astype(np.int32) if len(pairs) <= INT32_ROWS else rows_B
        batch["_positive"] = pairs.labels[rows_B]
        batch["_weight"] = np.ones(batch_size, np.float32) if pairs.weights is None else pairs.weights[rows_B]
        for term in terms:
            batch |= term.columns(rows_B, batch, np.random.default_rng([seed, epoch, step, term.stream]))
        yield step, batch


def prefetch(batches: Iterator[tuple[int, Inputs]]) -> Iterator[tuple[int, Inputs]]:
    """Yield the same batches; a thread prepares the next batch while one is in use."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch


def one_per_query(pairs: Pairs, rng: np.random.Generator) -> Int64:
    """Draw one pair of every query, in random order; rows of the pairs, int64."""
    starts = np.flatnonzero(np.diff(pairs.queries, prepend=-1))  # pairs are sorted by query
    return rng.permutation(rng.integers(starts, np.append(starts[1:], len(pairs))))


def one_period_per_batch(pairs: Pairs, periods: int, batch_size: int, visits: Visits | None = None) -> Visits:
    """Group visits into batches of one period each, in random order.

    Periods have about equal numbers of whole batches. The pairs of an incomplete batch are the first or the latest.

    Args:
        periods: number of parts of the time of the pairs.
        visits: as in `epoch_batches`.
    """
    assert pairs.times is not None
    times = pairs.times

    def group_visits(rng: np.random.Generator) -> Int64:
        order = rng.permutation(len(pairs)) if visits is None else visits(rng)
        steps, remainder = divmod(len(order), batch_size)
        start = int(rng.integers(remainder + 1))
        # Stable, so that pairs of one time stay in random order.
        by_time = order[np.argsort(times[order], kind="stable")][start : start + steps * batch_size]
        parts = np.array_split(by_time.reshape(steps, batch_size), min(periods, steps))
        batches = np.concatenate([rng.permutation(part.reshape(-1)) for part in parts]).reshape(steps, batch_size)
        shuffled: Int64 = rng.permutation(batches).reshape(-1)
        return shuffled

    return group_visits


def _group_by_query(rows: Int64, pairs: Pairs, *, seed: int, epoch: int) -> Int64:
    """Group rows by query, queries in random order; int64."""
    queries = pairs.queries[rows]
    # A generator of its own, so that grouping shifts no other draw.
    rank = np.random.default_rng([seed, epoch, 1]).permutation(int(queries.max(initial=0)) + 1)
    return rows[np.lexsort((rows, rank[queries]))]
