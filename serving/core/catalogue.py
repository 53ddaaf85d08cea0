"""Look up labels for answers: ids to rows in requests, rows to ids and display columns in answers.

Legend: `L` labels, `N` answered labels of a whole batch.

Ids and display columns stay in Arrow until they are shown, so that a label costs bytes, not Python objects. Recently
shown labels are cached as Python objects, because the head is shown again and again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import JsonValue

from longtail.bundle import BUCKET_NAMES, Labels, Priors
from longtail.bundle.added_labels import AddedLabels
from longtail.bundle.arrays import Bools, Float32, Int8, Int64
from longtail.bundle.display import json_ready
from longtail.bundle.errors import describe
from longtail.bundle.ids import respelled
from longtail.bundle.sets import distinct
from longtail.index import Filter
from longtail.index.search.candidates import NO_ROW
from longtail.serving.core.attributes import LabelAttributes
from longtail.serving.core.overlay import Overlay
from longtail.serving.core.ranking import NO_ROWS
from longtail.serving.errors import UnknownLabelError

_LABEL_BYTES, _PUNCTUATION = 80, 6
"""Bytes of a label's JSON without columns, and bytes of a column in addition to its name and value."""
_MOST_CACHED = 1 << 14
"""Most labels in the cache of shown labels, about 1 kB each; a full cache is emptied."""


class AnsweredLabels(NamedTuple):
    """Columns of answered labels.

    Attributes:
        json_N: `RankedLabel` of the HTTP API without the score; shared, and never changed.
        rows_N: int64, rows for counting: a label that was embedded again counts by its row in the release.
        buckets_N: int8, 0 head, 1 torso, 2 tail, 3 new.
        counts_N: int64, training pairs.
    """

    json_N: list[dict[str, Any]]
    rows_N: Int64
    buckets_N: Int8
    counts_N: Int64


class Catalogue:
    """Labels of one release and of an overlay on it.

    Raises:
        BundleInvariantError: JSON cannot represent a display column.
    """

    def __init__(
        self,
        labels: Labels,
        embeddings_LD: Float32,
        filterable: Sequence[str] | None = None,
    ) -> None:
        self.attributes = LabelAttributes(labels.display, filterable)
        self._labels = labels
        self._embeddings_LD = embeddings_LD
        self._display = {name: json_ready(name, labels.display[name]) for name in labels.display.column_names}
        self.display_columns = labels.display.column_names
        self._column_bytes: dict[str, float] = {
            name: len(name) + _PUNCTUATION + column.nbytes / max(1, len(column))
            for name, column in self._display.items()
        }
        self.label_bytes = _LABEL_BYTES + sum(self._column_bytes.values())
        self._json_of_row: dict[int, dict[str, Any]] = {}
        self._overlay: Overlay | None = None
        self._ids = labels.ids
        self.labels = len(labels.ids)
        self.row_of = labels.rows_by_id

    def with_overlay(self, overlay: Overlay) -> Catalogue:
        """Create a catalogue with an overlay that shares this one's memory."""
        # The cache of shown labels is shared: a changed label gets a new row.
        catalogue = copy.copy(self)
        catalogue._overlay, catalogue.labels = overlay, overlay.labels
        catalogue.attributes = self.attributes.with_overlay(overlay.rows)
        return catalogue

    def forget(self) -> None:
        """Empty the caches of shown labels, ids and filters; they fill again when needed."""
        self._json_of_row = {}
        self.row_of.forget()
        self.attributes.forget()

    def mean_bytes(self, display: bool | Sequence[str]) -> float:
        """Estimate the mean JSON size of a label, in bytes."""
        if isinstance(display, bool):
            return self.label_bytes if display else _LABEL_BYTES
        return _LABEL_BYTES + sum(self._column_bytes.get(name, 0) for name in set(display))

    def get_id(self, row: int) -> str:
        """Get the id of a row's label."""
        first = len(self._ids)
        if row < first:
            return str(self._ids[row].as_py())
        return self._overlay.added.ids[row - first]  # type: ignore[union-attr]

    def get_ids(self, rows_N: Int64) -> pa.Array:
        """Get the ids of rows' labels, strings [N]."""
        above_N = rows_N >= len(self._ids)
        if not above_N.any():
            return self._ids.take(pa.array(rows_N))
        return pa.array([self.get_id(row) for row in rows_N.tolist()], pa.string())

    def row(self, id_: str | int, *, field: str | None = None) -> int:
        """Get the row of a label that is not hidden; raises UnknownLabelError."""
        row = self._row(str(id_))
        if row is None:
            raise UnknownLabelError(
                f"expected the id of a label of this release, received {describe(id_)}", field=field
            )
        if self._overlay is not None and self._overlay.hides(row):
            raise UnknownLabelError(
                f"expected a label that is not hidden, received {describe(id_)}, which is hidden; POST "
                "/v1/labels/restore brings it back",
                field=field,
            )
        return row

    def rows(self, ids: Sequence[str | int]) -> tuple[Int64, int]:
        """Look up ids: the distinct rows, int64, ascending, and the number of unknown ids."""
        if not ids:
            return NO_ROWS, 0
        rows_N = self.rows_in_order(ids)
        known_rows = rows_N[rows_N >= 0]
        return distinct(known_rows), len(rows_N) - len(known_rows)

    def rows_in_order(self, ids: Sequence[str | int]) -> Int64:
        """Look up ids, int64 [N]; −1 for an unknown id."""
        texts = cast("Sequence[str]", ids) if set(map(type, ids)) == {str} else [str(id_) for id_ in ids]
        if self._overlay is None or not self._overlay.rows.count:
            return np.array(self.row_of.find_all(texts), np.int64)
        rows = [self._row(id_) for id_ in texts]
        for i, id_ in enumerate(texts):
            if rows[i] is None and (other := respelled(id_)) != id_:
                rows[i] = self._row(other)
        return np.array([NO_ROW if row is None else row for row in rows], np.int64)

    def embeddings(self, rows: Sequence[int]) -> Float32:
        """Get the label embeddings of some rows, float32 [N, D]."""
        return self._gather(self._embeddings_LD, lambda added, rows: added.embeddings[rows], np.array(rows, np.int64))

    def values(self, column: str, rows_N: Int64) -> list[list[Hashable]]:
        """Get the values of every row in a display column, [N]: all entries of a list, none for null."""
        first, values_N = len(self._ids), list[Any]([None] * len(rows_N))
        below = np.flatnonzero(rows_N < first)
        values = self._display[column].take(pa.array(rows_N[below])).to_pylist()
        for i, value in zip(below.tolist(), values, strict=True):
            values_N[i] = value
        for i in np.flatnonzero(rows_N >= first).tolist():
            values_N[i] = self._overlay.added.display[rows_N[i] - first][column]  # type: ignore[union-attr]
        return [_distinct_entries(value) for value in values_N]

    def buckets(self, rows_N: Int64) -> Int8:
        """Get the bucket of every row, int8 [N]: 0 head, 1 torso, 2 tail, 3 new."""
        return self._gather(self._labels.buckets, lambda added, rows: added.buckets[rows], rows_N)

    def passes(self, filter_: Filter, rows_N: Int64) -> Bools:
        """Check rows against a filter's buckets and sets, bool [N]."""
        passes_N = np.ones(len(rows_N), np.bool_)
        if filter_.buckets is not None:
            passes_N &= np.isin(self.buckets(rows_N), list(filter_.buckets))
        above_N = rows_N >= len(self._ids)
        for selection, first, of_N in ((filter_.selection, 0, ~above_N), (filter_.beyond, len(self._ids), above_N)):
            if selection is not None:
                passes_N[of_N] &= selection.contains(rows_N[of_N] - first)
        return passes_N

    def priors(self, rows_N: Int64, priors: Priors) -> Float32:
        """Get the priors of every row, float32 [N, P]."""
        return self._gather(priors.values_LP, lambda added, rows: added.priors[rows], rows_N)

    def find_buckets(self, ids: Sequence[str]) -> list[int]:
        """Get the bucket of every label, −1 if unknown."""
        return [row if row < 0 else self._bucket(row) for row in self.rows_in_order(ids).tolist()]

    def spelled(self, ids: Sequence[str]) -> list[str]:
        """Spell ids as this release does, such as `39` for `39.0`; others stay."""
        spelled = dict[str, None]()
        for id_, row in zip(ids, self.rows_in_order(ids).tolist(), strict=True):
            spelled[id_ if row < 0 or self._row(id_) is not None else respelled(id_)] = None
        return list(spelled)

    def _bucket(self, row: int) -> int:
        # One row at a time, as an array of one row takes thirty times as long.
        if row < len(self._ids):
            return int(self._labels.buckets[row])
        return int(self.buckets(np.array([row]))[0])

    def answered(self, rows_N: Int64) -> AnsweredLabels:
        """Get the columns of answered labels."""
        first, cached, rows = len(self._ids), self._json_of_row, rows_N.tolist()
        missing = [row for row in rows if row not in cached and row < first]
        if missing:
            if len(cached) + len(missing) > _MOST_CACHED:
                # A new dictionary, because other threads may still read the old one.
                cached = self._json_of_row = {}
                missing = [row for row in rows if row < first]
            missing_R = np.array(missing, np.int64)
            ids, buckets = self._ids.take(pa.array(missing_R)).to_pylist(), self._labels.buckets[missing_R]
            for row, id_, bucket, display in zip(missing, ids, buckets, self._read_display(missing_R), strict=True):
                cached[row] = {"id": id_, "bucket": BUCKET_NAMES[bucket], "display": display}
        if self._overlay is None or not rows or rows_N.max() < first:
            json_N = [cached[row] for row in rows]
            return AnsweredLabels(json_N, rows_N, self._labels.buckets[rows_N], self._labels.counts[rows_N])
        added = self._overlay.added
        json_N = [
            cached[row]
            if row < first
            else {
                "id": added.ids[row - first],
                "bucket": BUCKET_NAMES[added.buckets[row - first]],
                "display": added.display[row - first],
            }
            for row in rows
        ]
        # A label that was embedded again counts as the row that it replaces, so its exposure goes on.
        counted_N, above_N = rows_N.copy(), rows_N >= first
        catalogue_rows = added.catalogue_rows[rows_N[above_N] - first]
        counted_N[above_N] = np.where(catalogue_rows < 0, rows_N[above_N], catalogue_rows)
        counts_N = self._gather(self._labels.counts, lambda added, rows: added.counts[rows], rows_N)
        return AnsweredLabels(json_N, counted_N, self.buckets(rows_N), counts_N)

    def _row(self, id_: str) -> int | None:
        if self._overlay is not None and (row := self._overlay.find_row(id_)) is not None:
            return row
        return self.row_of.get(id_)

    def _gather(
        self, of_catalogue: npt.NDArray[Any], of_added: Callable[[AddedLabels, Int64], npt.NDArray[Any]], rows_N: Int64
    ) -> npt.NDArray[Any]:
        """Gather a column from the catalogue and the overlay."""
        first = len(self._ids)
        if self._overlay is None or not rows_N.size or rows_N.max() < first:
            return of_catalogue[rows_N]
        above_N = rows_N >= first
        values_N = of_catalogue[np.where(above_N, 0, rows_N)]
        values_N[above_N] = of_added(self._overlay.added, rows_N[above_N] - first)
        return values_N

    def labels_json(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Create `LabelAnswer` of the HTTP API for rows."""
        first = len(self._ids)
        of_catalogue = np.array([row for row in rows if row < first], np.int64)
        display_of_row = dict(zip(of_catalogue.tolist(), self._read_display(of_catalogue), strict=True))
        answers = []
        for row in rows:
            labels: Labels | AddedLabels = self._labels
            i, log_pi = row, self._labels.log_pi
            if row >= first:
                labels = self._overlay.added  # type: ignore[union-attr]  # only an overlay has rows of its own
                i, log_pi = row - first, labels.log_pn if labels.log_popularity is None else labels.log_popularity
            answer = {
                "id": self.get_id(row),
                "count": int(labels.counts[i]),
                "log_pn": labels.log_pn[i],
                "log_popularity": log_pi[i],
                "bucket": BUCKET_NAMES[labels.buckets[i]],
                "bias": None if labels.bias is None else labels.bias[i],
                "display": display_of_row[row] if row < first else labels.display[i],
            }
            answers.append(answer)
        return answers

    def _read_display(self, rows_N: Int64) -> list[dict[str, JsonValue]]:
        arrow_rows = pa.array(rows_N)
        names = list(self._display)
        columns = [column.take(arrow_rows).to_pylist() for column in self._display.values()]
        if not columns:
            return [{} for _ in rows_N]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _distinct_entries(value: Any) -> list[Any]:
    """List the distinct entries of a value, without null and NaN."""
    # NaN != NaN, so the comparison drops NaN.
    if isinstance(value, list):
        return list(dict.fromkeys([entry for entry in value if entry is not None and entry == entry]))
    return [value] if value is not None and value == value else []
