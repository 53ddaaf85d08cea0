"""Hold a data set: ids, feature tables, and pairs in train, valid and test.

Legend: `Q` queries, `L` labels, `N` pairs.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cached_property

import numpy as np
import pyarrow as pa

from longtail.bundle.arrays import Array, Float64, Int64
from longtail.bundle.forecast import Forecast
from longtail.bundle.one_line import one_line
from longtail.bundle.sets import distinct
from longtail.trainer.data.columns import Bags, FeatureTable
from longtail.trainer.data.pairs import Pairs, Requests, keep_latest, occurrences
from longtail.trainer.data.past import Past
from longtail.trainer.data.problems import RowReport

_IDS_AT_ONCE, _ROWS_AT_ONCE = 1 << 20, 1 << 16


@dataclass(frozen=True)
class Dataset:
    """Hold the data of a training job.

    Attributes:
        query_ids: string [Q], queries of all splits and of the feature table.
        label_ids: string [L], the catalogue: labels of all splits and of the feature table.
        query_table, label_table: feature tables, one row per id in the order of the ids; None without a file. A query
            table with `data.valid_from` has one row per version, then a row without values.
        ordered: whether a query's pairs are in time order, so that histories hold only earlier pairs.
        requests: the distinct requests; None if every query has exactly one.
        contexts: distinct contexts, by the names of their columns; None without contexts.
        impressions: label rows that were shown with an interaction; None without impressions.
        repeats: `drop` if every split, and every union of splits, holds a pair only once.
        report: skipped rows, and problems of rows.
        forecasts: cache of fitted priors, by the known pairs and the settings of the prior.
    """

    query_ids: pa.Array
    label_ids: pa.Array
    train: Pairs
    valid: Pairs
    test: Pairs
    query_table: pa.Table | None
    label_table: pa.Table | None
    ordered: bool
    requests: Requests | None = None
    contexts: pa.Table | None = None
    impressions: Bags | None = None
    read_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    repeats: str = "keep"
    report: RowReport = field(default_factory=RowReport)
    forecasts: dict[str, Forecast] = field(default_factory=dict, repr=False, compare=False)

    __repr__ = one_line

    def label_counts(self) -> Int64:
        """Count the training pairs of every label, without weights, int64 [L]."""
        return occurrences(self.train.labels, len(self.label_ids))

    def label_visits(self, *, one_label_per_query: bool, weighted: bool = False) -> Float64:
        """Compute the expected visits to every label in an epoch, float64 [L].

        Args:
            one_label_per_query: an epoch visits every query with one of its t labels, so a pair counts 1/t.
            weighted: a visit counts by the weight of its pair, as in π. Without weights, visits give the frequencies of
                labels in batches, and so of in-batch negatives.
        """
        pairs_N: Float64 | None = None
        if one_label_per_query:
            pairs_N = 1.0 / np.bincount(self.train.queries)[self.train.queries]
        if weighted and self.train.weights is not None:
            pairs_N = self.train.weights.astype(np.float64) * (1.0 if pairs_N is None else pairs_N)
        if pairs_N is None:
            return self.label_counts().astype(np.float64)
        return np.bincount(self.train.labels, pairs_N, minlength=len(self.label_ids)).astype(np.float64)

    def pairs_before(self, split: str) -> Pairs:
        """Return the pairs that are known before `valid` or `test`."""
        return self.train.merge_later(self.valid) if split == "test" and len(self.valid) else self.train

    def with_past(self, held_out: Pairs, known_pairs: Pairs, history: str = "fixed") -> tuple[Pairs, Past]:
        """Return held-out pairs whose `request_rows` are the rows of the returned past.

        Args:
            history: `evaluation.history`.
        """
        if history == "fixed":
            return held_out, self.fixed_past(known_pairs)
        numbered = replace(held_out, requests=np.arange(len(held_out), dtype=np.int32))
        return numbered, Past.growing(known_pairs, held_out, queries=len(self.query_ids))

    def fixed_past(self, known_pairs: Pairs) -> Past:
        """Create the past whose histories hold all known pairs of a query."""
        requests = None if self.requests is None else self.requests.queries
        return Past.fixed(known_pairs, queries=len(self.query_ids), requests=requests)

    def label_features(self, label_id: str) -> FeatureTable:
        """Return the labels' feature table."""
        return FeatureTable(self.label_ids, self.label_table, label_id, None, np.empty(0, np.int64))

    def count_visits(self, *, one_label_per_query: bool) -> int:
        """Count the pairs that an epoch visits: all, or one of each query."""
        return self.training_queries() if one_label_per_query else len(self.train)

    def training_queries(self) -> int:
        """Count the queries with training pairs."""
        return len(distinct(self.train.queries))

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Yield the arrays of pairs, requests and impressions by name: `train.queries`."""
        parts = {"train": self.train, "valid": self.valid, "test": self.test}
        for part, values in (parts | {"requests": self.requests, "impressions": self.impressions}).items():
            for column in fields(values) if values is not None else ():
                if (array := getattr(values, column.name)) is not None:
                    yield f"{part}.{column.name}", array

    @cached_property
    def fingerprint(self) -> str:
        """Compute the hex sha256 of all data that training may depend on: ids, pairs and feature tables."""
        # Order decides which pairs a history holds, so it belongs to the data.
        digest = hashlib.sha256(f"ordered {self.ordered}\n".encode())
        for ids in (self.query_ids, self.label_ids):
            for start in range(0, len(ids), _IDS_AT_ONCE):
                lines = "\n".join(ids.slice(start, _IDS_AT_ONCE).to_pylist())
                # Blocks join to one text, so that their size does not change the digest.
                digest.update(f"\n{lines}".encode() if start else lines.encode())
        for name, array in self.arrays():
            digest.update(f"\n{name} {len(array)}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
        for table in (self.query_table, self.label_table, self.contexts):
            if table is not None:
                content = io.BytesIO()
                with pa.ipc.new_stream(content, table.schema) as stream:
                    # One small buffer, so that a large table is never copied as a whole.
                    for batch in table.to_batches(_ROWS_AT_ONCE):
                        stream.write_batch(batch)
                        digest.update(content.getbuffer())
                        content.seek(0)
                        content.truncate()
        return digest.hexdigest()

    def refit(self) -> Dataset:
        """Return this data set with valid moved into train."""
        train = self.train.merge_later(self.valid)
        # A pair of valid may repeat one of train.
        train = keep_latest(train) if self.repeats == "drop" else train
        return replace(self, train=train, valid=self.valid.take(slice(0)))
