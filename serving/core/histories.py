"""Look up the labels that queries chose; count ids.

Legend: `H` labels of a history, `R` labels that a query said no to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from longtail.bundle import Bundle, Features, Inputs, Tower
from longtail.bundle.arrays import Int64
from longtail.bundle.errors import describe
from longtail.bundle.features import says_nothing
from longtail.bundle.ids import id_text
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.overlay import Overlay
from longtail.serving.core.queries import RetrieveQuery
from longtail.serving.core.ranking import NO_ROWS
from longtail.serving.core.resolved import NO_HISTORY, History
from longtail.serving.errors import InvalidRequestError
from longtail.serving.monitoring import IdCounts
from longtail.serving.monitoring.records import IdKind


class CountedIds(NamedTuple):
    """The ids of queries.

    Attributes:
        unknown_B: numbers of unknown ids in the features and in the history of each query.
        of_nothing: positions of the queries whose features are all missing or unknown to the tower [METHODS §6].
        sums: the queries' counts, added up.
    """

    unknown_B: list[tuple[int, int]]
    of_nothing: list[int]
    sums: dict[IdKind, IdCounts]


class Histories:
    """Reads histories from features or from the release.

    Attributes:
        query_id: feature with the id of a query, by which the bundle remembers queries; None: it remembers none.
    """

    def __init__(self, bundle: Bundle, encoder: Tower) -> None:
        settings, self._manifest, self._encoder = bundle.manifest.cooccurrence, bundle.manifest, encoder
        self._remembers = bundle.remembered
        self._features = {feature.name: feature.kind for feature in bundle.manifest.query_features}
        self._lengths = {feature.name: feature.max_length for feature in bundle.manifest.query_features}
        self._names = [name for name, kind in self._features.items() if kind == "history"]
        self._last = 1 if settings is None else settings.last
        self._negative = settings is not None and bool(settings.log.negative)
        self.query_id = None if settings is None or bundle.remembered is None else settings.log.query_id

    def read(
        self, query: RetrieveQuery, prefix: str, catalogue: Catalogue, overlay: Overlay, *, counted: bool
    ) -> History:
        """Look up the labels that a query chose.

        Args:
            counted: whether ω is not 0.

        Raises InvalidRequestError if the query gives them twice, or its id is no id.
        """
        excluded = self._manifest.exclude_history if query.exclude_history is None else query.exclude_history
        features, ids = query.features or {}, query.history
        lists: list[Sequence[Any]] = [
            entries for name in self._names if isinstance(entries := features.get(name), list)
        ]
        if lists and ids is not None:
            raise InvalidRequestError(
                f"expected history or a feature of kind history, one of {self._names}, received both",
                field=f"{prefix}history",
            )
        refused_R = self._remembered(features, prefix, overlay, refused=True) if self._negative else NO_ROWS
        if not (excluded or counted):
            return History(left_out=refused_R) if refused_R.size else NO_HISTORY
        if ids is not None:
            lists = [ids]
        if not lists:
            rows_H = self._remembered(features, prefix, overlay)
            return History(rows_H[-self._last :], np.concatenate([rows_H, refused_R]) if excluded else refused_R)
        if not excluded:
            # Only the last entries count for co-occurrence, so the others are not looked up.
            lists = [lists[0][-self._last :]]
        # Every list is left out, but only the first counts: others may hold what the query only saw.
        rows = [catalogue.rows_in_order(_texts(entries)) for entries in lists]
        rows_N, last_H = rows[0] if len(rows) == 1 else np.concatenate(rows), rows[0][-self._last :]
        unknown = int(np.count_nonzero(rows_N < 0))
        if unknown:
            rows_N, last_H = rows_N[rows_N >= 0], last_H[last_H >= 0]
        left_out = rows_N if excluded else NO_ROWS
        if refused_R.size:
            last_H, left_out = last_H[~np.isin(last_H, refused_R)], np.concatenate([left_out, refused_R])
        return History(last_H, left_out, sum(map(len, rows)), unknown)

    def _remembered(self, features: Features, prefix: str, overlay: Overlay, *, refused: bool = False) -> Int64:
        """Get the labels that the release remembers of a query, int64 [H]."""
        value = None if self.query_id is None else features.get(self.query_id)
        if value is None or self._remembers is None:
            return NO_ROWS
        if (id_ := id_text(value)) is None:
            raise InvalidRequestError(
                f"expected an id, received {describe(value)}", field=f"{prefix}features.{self.query_id}"
            )
        remembered = self._remembers
        return overlay.find_served_rows(remembered.refused(id_) if refused else remembered.history(id_))

    def count_ids(
        self, queries: Sequence[RetrieveQuery], inputs: Inputs, histories: Sequence[History], catalogue: Catalogue
    ) -> CountedIds:
        """Count ids in the features and histories of queries: all ids, and ids unknown to the release."""
        features_B = [query.features or {} for query in queries]
        of_query, of_history, of_tower = ([(0, 0)] * len(queries) for _ in range(3))
        remembered = None if self.query_id is None else self._remembers
        for name, counts in self._encoder.count_ids(features_B, inputs).items():
            is_history = self._features.get(name) == "history"
            for row, (ids, unknown) in enumerate(counts):
                of_tower[row] = of_tower[row][0] + ids, of_tower[row][1] + unknown
                if is_history:
                    if histories[row].ids:
                        continue  # they are counted below
                    if unknown:  # labels that were added since are no ids of the tower's
                        entries = _texts(cast("list[Any]", features_B[row][name]))[-(self._lengths[name] or 0) :]
                        unknown = min(unknown, int(np.count_nonzero(catalogue.rows_in_order(entries) < 0)))
                    of_history[row] = of_history[row][0] + ids, of_history[row][1] + unknown
                    continue
                if unknown and remembered is not None and name == self.query_id:
                    unknown = int(not remembered.queries.lookup_all([str(id_text(features_B[row][name]))])[0])
                of_query[row] = of_query[row][0] + ids, of_query[row][1] + unknown
        if remembered is not None and self.query_id not in self._features:
            for row, features in enumerate(features_B):
                if (id_ := id_text(features.get(str(self.query_id)))) is not None:
                    unknown = int(not remembered.queries.lookup_all([id_])[0])
                    of_query[row] = of_query[row][0] + 1, of_query[row][1] + unknown
        for row, history in enumerate(histories):
            if history.ids:
                of_history[row] = history.ids, history.unknown
        of_nothing = [row for row, (ids, unknown) in enumerate(of_tower) if ids == unknown] if inputs else []
        if of_nothing:
            nothing_B = says_nothing(self._encoder.features, inputs)
            of_nothing = [row for row in of_nothing if nothing_B[row]]
        sums: dict[IdKind, IdCounts] = {
            "query": IdCounts(sum([ids > 0 for ids, _ in of_query]), *map(sum, zip(*of_query, strict=True))),
            "history": IdCounts(sum([ids > 0 for ids, _ in of_history]), *map(sum, zip(*of_history, strict=True))),
        }
        unknown_B = [(query[1], history[1]) for query, history in zip(of_query, of_history, strict=True)]
        return CountedIds(unknown_B, of_nothing, sums)


def _texts(ids: Sequence[Any]) -> Sequence[str]:
    """Convert a list to ids; leave out other values."""
    if set(map(type, ids)) == {str}:
        return ids
    return [id_ for id_ in map(id_text, ids) if id_ is not None]
