"""Find the labels that a query chose, as far as its answer needs them, and count the ids of queries.

Legend: `H` labels of a history, `R` labels that a query said no to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from longtail.bundle import Bundle, Features, Inputs, Tower
from longtail.bundle.arrays import Int64
from longtail.bundle.errors import describe
from longtail.bundle.ids import id_text
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.overlay import Overlay
from longtail.serving.core.queries import Query
from longtail.serving.core.ranking import NO_ROWS
from longtail.serving.core.resolved import NO_HISTORY, History
from longtail.serving.errors import InvalidRequestError
from longtail.serving.monitoring import NamedIds
from longtail.serving.monitoring.records import IdKind


class CountedIds(NamedTuple):
    """For each query, all ids and unknown ids in its features, and in its histories."""

    query: list[tuple[int, int]]
    history: list[tuple[int, int]]

    def sums(self) -> dict[IdKind, NamedIds]:
        """Add up the queries."""
        return {"query": _sum_of_ids(self.query), "history": _sum_of_ids(self.history)}


def _sum_of_ids(counts: Sequence[tuple[int, int]]) -> NamedIds:
    ids, unknown = [ids for ids, _ in counts], [unknown for _, unknown in counts]
    return NamedIds(len(ids) - ids.count(0), sum(ids), sum(unknown))


class Histories:
    """Reads histories of queries, from their features or from what a bundle remembers.

    Attributes:
        query_id: feature with the id of a query, by which the bundle remembers queries; None: it remembers none.
    """

    def __init__(self, bundle: Bundle, encoder: Tower) -> None:
        settings, self._manifest, self._encoder = bundle.manifest.cooccurrence, bundle.manifest, encoder
        self._remembers = bundle.remembered
        self._features = {feature.name: feature.kind for feature in bundle.manifest.query_features}
        self._names = [name for name, kind in self._features.items() if kind == "history"]
        self._last = 1 if settings is None else settings.last
        self._negative = settings is not None and bool(settings.log.negative)
        self.query_id = None if settings is None or bundle.remembered is None else settings.log.query_id

    def read(self, query: Query, prefix: str, catalogue: Catalogue, overlay: Overlay, *, counted: bool) -> History:
        """Look up the labels that a query chose, as far as its answer needs them.

        Args:
            counted: whether ω is not 0.

        Raises InvalidRequestError if the query gives them twice, or its id is no id.
        """
        excluded = self._manifest.exclude_history if query.exclude_history is None else query.exclude_history
        features, ids = query.features or {}, query.history
        given = [entries for name in self._names if isinstance(entries := features.get(name), list)]
        if given and ids is not None:
            raise InvalidRequestError(
                f"expected history or a feature of kind history, one of {self._names}, received both",
                field=f"{prefix}history",
            )
        refused_R = self._remembered(features, prefix, overlay, refused=True) if self._negative else NO_ROWS
        if not (excluded or counted):
            return History(left_out=refused_R) if refused_R.size else NO_HISTORY
        lists: list[Sequence[Any]] = [*given] if ids is None else [ids]
        if not lists:
            rows_H = self._remembered(features, prefix, overlay)
            return History(rows_H[-self._last :], np.concatenate([rows_H, refused_R]) if excluded else refused_R)
        if not excluded:
            lists = [lists[0][-self._last :]]
        # Every list is left out, but only the first counts: others may hold what the query only saw.
        rows = [catalogue.rows_in_order(_texts(each)) for each in lists]
        rows_N, last_H = rows[0] if len(rows) == 1 else np.concatenate(rows), rows[0][-self._last :]
        unknown = int(np.count_nonzero(rows_N < 0))
        if unknown:
            rows_N, last_H = rows_N[rows_N >= 0], last_H[last_H >= 0]
        left_out = rows_N if excluded else NO_ROWS
        if refused_R.size:
            last_H, left_out = last_H[~np.isin(last_H, refused_R)], np.concatenate([left_out, refused_R])
        return History(last_H, left_out, sum(map(len, rows)), unknown)

    def _remembered(self, features: Features, prefix: str, overlay: Overlay, *, refused: bool = False) -> Int64:
        """Get the rows of the labels that the release remembers a query to have chosen, or refused, int64 [H]."""
        value = None if self.query_id is None else features.get(self.query_id)
        if value is None or self._remembers is None:
            return NO_ROWS
        if (id_ := id_text(value)) is None:
            raise InvalidRequestError(
                f"expected an id, received {describe(value)}", field=f"{prefix}features.{self.query_id}"
            )
        remembered = self._remembers
        return overlay.served(remembered.refused(id_) if refused else remembered.history(id_))

    def count_ids(
        self, queries: Sequence[Query], inputs: Inputs, histories: Sequence[History], catalogue: Catalogue
    ) -> CountedIds:
        """Count ids in the features and histories of queries: all ids, and ids unknown to the release."""
        features_B = [query.features or {} for query in queries]
        counts = CountedIds([(0, 0)] * len(queries), [(0, 0)] * len(queries))
        remembered = None if self.query_id is None else self._remembers
        for feature in self._encoder.features if inputs else ():
            if feature.kind not in ("id", "bag", "history"):
                continue
            of_kind = counts.history if feature.kind == "history" else counts.query
            for row, (ids, unknown) in enumerate(self._encoder.count_ids(feature, features_B, inputs)):
                if unknown and feature.kind == "history":  # labels that were added since are no ids of the tower's
                    entries = _texts(cast("list[Any]", features_B[row][feature.name]))[-(feature.max_length or 0) :]
                    unknown = min(unknown, int(np.count_nonzero(catalogue.rows_in_order(entries) < 0)))
                elif unknown and remembered is not None and feature.name == self.query_id:
                    unknown = int(not remembered.queries.lookup_all([str(id_text(features_B[row][feature.name]))])[0])
                of_kind[row] = of_kind[row][0] + ids, of_kind[row][1] + unknown
        if remembered is not None and self.query_id not in self._features:
            for row, features in enumerate(features_B):
                if (id_ := id_text(features.get(str(self.query_id)))) is not None:
                    unknown = int(not remembered.queries.lookup_all([id_])[0])
                    counts.query[row] = counts.query[row][0] + 1, counts.query[row][1] + unknown
        for row, history in enumerate(histories):
            if history.named:
                counts.history[row] = history.named, history.unknown
        return counts


def _texts(ids: Sequence[Any]) -> Sequence[str]:
    """Convert the entries of a list to ids, without entries that are none."""
    if set(map(type, ids)) == {str}:
        return ids
    return [id_ for id_ in map(id_text, ids) if id_ is not None]
