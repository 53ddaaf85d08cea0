"""Resolve queries against one release: rows in place of ids, checked settings, histories, numbers of unknown ids.

Legend: `H` labels of a history, `R` label rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from pydantic import JsonValue

from longtail.bundle import BUCKET_NAMES, Bundle, Features, Inputs, Tower
from longtail.bundle.arrays import Int64
from longtail.bundle.conditions import unfilterable_message
from longtail.bundle.errors import describe
from longtail.bundle.features import says_nothing
from longtail.bundle.ids import id_text
from longtail.bundle.sets import distinct, with_members
from longtail.bundle.vocabulary import OUT_OF_VOCABULARY
from longtail.index import Condition, Filter
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.dials import Weights
from longtail.serving.core.overlay import Overlay
from longtail.serving.core.queries import MOST_POOL, BucketName, Decay, RetrieveQuery, SearchOptions, first_pool
from longtail.serving.core.ranking import NO_ROWS
from longtail.serving.errors import InvalidRequestError
from longtail.serving.monitoring import IdCounts, IdKind, Restriction

_MOST_COMPARED = 1 << 21
"""Most pairs of labels that `mmr` compares: k times the pool."""
_LONGEST_NAME = 100


class History(NamedTuple):
    """The labels that a query chose.

    Attributes:
        last_H: int64, rows of the labels that count for `cooccurrence`, oldest first.
        left_out: int64, rows that its answer leaves out; they may repeat.
        ids: number of ids in the query that were looked up.
        unknown: of these, ids that the release does not know.
    """

    last_H: Int64 = NO_ROWS
    left_out: Int64 = NO_ROWS
    ids: int = 0
    unknown: int = 0


NO_HISTORY = History()
_NO_SLOTS: Mapping[int, int] = MappingProxyType({})


class ResolvedQuery(NamedTuple):
    """One query's options, checked, with rows in place of ids.

    Attributes:
        filter: filter of the eligible label rows; None if all are eligible.
        history_H: int64, rows of the history that count for `cooccurrence`, oldest first.
        chosen_with: whether only labels with c > 0 may be answered, by ω·c alone.
        explore: numbers of slots to draw at random, by bucket; all above 0.
        diversity: settings of diversity; None: labels are answered by score alone.
        floors: least numbers of labels of some kinds.
        represents: whether the answer represents the release: the client neither restricts nor arranges it.
    """

    k: int
    weights: Weights
    decay: Decay | None
    filter: Filter | None
    unknown_exclude: int
    unknown_allow: int
    history_H: Int64
    chosen_with: bool = False
    explore: Mapping[int, int] = _NO_SLOTS
    display: frozenset[str] | None = None
    diversity: Diversity | None = None
    floors: Sequence[Floor] = ()
    restrictions: tuple[Restriction, ...] = ()
    represents: bool = True

    @classmethod
    def from_options(
        cls,
        options: SearchOptions,
        weights: Weights,
        catalogue: Catalogue,
        *,
        prefix: str = "",
        history: History = NO_HISTORY,
    ) -> ResolvedQuery:
        """Check options against a release, and look ids up.

        Args:
            weights: the weights of its score, from `Dials.read`.
            prefix: prefix of the fields in errors, such as `queries.0.`.
            history: labels that the query chose.

        Raises:
            InvalidRequestError: the release does not support an option; the error names it.
        """
        # No error: clients do not know how many labels a release has.
        k = min(options.k, catalogue.labels)
        filter_, unknown_exclude, unknown_allow = None, 0, 0
        restricts = options.filter or options.allow is not None or options.buckets is not None
        if options.exclude or restricts:
            exclude, unknown_exclude = catalogue.rows(options.exclude)
            allow, unknown_allow = catalogue.rows(options.allow or ())
            selection, beyond = (
                catalogue.attributes.select(options.filter, f"{prefix}filter") if options.filter else (None, None)
            )
            filter_ = Filter(
                exclude=exclude if len(exclude) else None,
                # An empty list allows no label, which is not the same as no list.
                allow=None if options.allow is None else allow,
                buckets=None if options.buckets is None else frozenset(map(BUCKET_NAMES.index, options.buckets)),
                selection=selection,
                beyond=beyond,
            )
        if history.left_out.size:
            # A search takes rows in any order; sorting them would cost more than the rest of this function.
            left_out = history.left_out
            filter_ = Filter(exclude=left_out) if filter_ is None else _exclude(filter_, distinct(left_out))
        arranged = options.max_per or options.mmr is not None or options.pool is not None
        return cls(
            k,
            weights,
            options.decay,
            filter_,
            unknown_exclude,
            unknown_allow,
            history.last_H,
            explore=_read_slots(options, f"{prefix}explore") if options.explore else _NO_SLOTS,
            display=None if options.display is True else _read_display(options.display, catalogue, f"{prefix}display"),
            diversity=_read_diversity(options, k, catalogue, prefix) if arranged else None,
            floors=_read_floors(options, catalogue, f"{prefix}at_least") if options.at_least else (),
            restrictions=options.restrictions if restricts else (),
            represents=not (restricts or options.max_per or options.mmr or options.at_least),
        )

    def like(self, row: int, *, alone: bool) -> ResolvedQuery:
        """Return the query for labels near one label, which is excluded.

        Args:
            alone: only labels chosen together with it count.
        """
        query = self.leaving_out(np.array([row]))._replace(history_H=np.array([row]))
        if not alone:
            return query
        weights = self.weights._replace(bias_removal=0.0, popularity=0.0, cooccurrence=1.0)
        return query._replace(weights=weights, chosen_with=True)

    def leaving_out(self, rows_R: Int64) -> ResolvedQuery:
        """Exclude further rows, int64 [R], ascending and distinct."""
        if not rows_R.size:
            return self
        return self._replace(filter=_exclude(self.filter or Filter(), rows_R))


def _exclude(filter_: Filter, rows_R: Int64) -> Filter:
    """Exclude further rows, int64 [R], ascending and distinct."""
    exclude = rows_R if filter_.exclude is None else with_members(filter_.exclude, rows_R)
    return replace(filter_, exclude=exclude)


def _read_display(names: Literal[False] | list[str], catalogue: Catalogue, field: str) -> frozenset[str]:
    """Check the columns to show; raises InvalidRequestError for one that the release lacks."""
    columns = catalogue.display_columns
    for i, name in enumerate(names or ()):
        if name not in columns:
            raise InvalidRequestError(
                f"expected display columns of this release, {list(columns)}, received {describe(name)}",
                field=f"{field}.{i}",
            )
    return frozenset(names or ())


@dataclass(frozen=True, slots=True)
class Diversity:
    """Settings for diverse answers.

    Attributes:
        max_per: most labels per value of a column, by column.
        weight: w of MMR, from 0, where only the score counts, to 1.
        pool: initial size of the pool, at least k.
        most: largest size of the pool.
    """

    max_per: Mapping[str, int]
    weight: float
    pool: int
    most: int


@dataclass(frozen=True, slots=True)
class Floor:
    """A least number of labels of some kind.

    Attributes:
        n: the least number.
        bucket: 0 head, 1 torso, 2 tail, 3 new; None: of all buckets.
        json: the floor as the request has it.
    """

    n: int
    bucket: int | None
    conditions: tuple[Condition, ...]
    json: Mapping[str, JsonValue]


def _largest_pool(k: int, mmr: float | None) -> int:
    """Return the largest pool for an answer of k labels."""
    return max(k, min(MOST_POOL, _MOST_COMPARED // k) if mmr else MOST_POOL)


def _read_diversity(options: SearchOptions, k: int, catalogue: Catalogue, prefix: str) -> Diversity | None:
    """Read the settings of diversity, None without any; raises InvalidRequestError."""
    columns = catalogue.attributes.kinds
    for name in options.max_per:
        if name not in columns:
            field = f"{prefix}max_per.{name[:_LONGEST_NAME]}"
            raise InvalidRequestError(unfilterable_message(name, list(columns)), field=field)
    names = [name for name, is_set in (("max_per", bool(options.max_per)), ("mmr", options.mmr is not None)) if is_set]
    if options.pool is not None and not names:
        raise InvalidRequestError("expected max_per or mmr with pool, received neither", field=f"{prefix}pool")
    most = _largest_pool(options.k, options.mmr)
    if options.pool is not None and not options.k <= options.pool <= most:
        raise InvalidRequestError(
            f"expected {options.k} <= pool <= {most}, from k on, received {describe(options.pool)}",
            field=f"{prefix}pool",
        )
    if names and any(options.explore.values()):
        raise InvalidRequestError(
            f"expected explore or {' and '.join(names)}, received both: what is drawn at random is not kept apart",
            field=f"{prefix}explore",
        )
    weight = options.mmr or 0.0
    if not options.max_per and weight == 0:
        return None
    pool = min(first_pool(options.pool, k, catalogue.labels), most)
    return Diversity(dict(options.max_per), weight, pool, most)


def _check_bucket(options: SearchOptions, bucket: BucketName, what: str, field: str) -> None:
    """Raise InvalidRequestError if no label of a bucket may be answered."""
    if options.buckets is not None and bucket not in options.buckets:
        raise InvalidRequestError(
            f"expected {what} that may be answered, {options.buckets}, received {bucket!r}", field=field
        )


def _read_slots(options: SearchOptions, field: str) -> dict[int, int]:
    """Read the slots of each bucket, 0 head, 1 torso, …; raises InvalidRequestError."""
    drawn = sum(options.explore.values())
    if drawn > options.k:
        raise InvalidRequestError(
            f"expected at most k = {options.k} slots to explore together, received {describe(drawn)}", field=field
        )
    for bucket in options.explore:
        _check_bucket(options, bucket, "buckets to explore", f"{field}.{bucket}")
    return {BUCKET_NAMES.index(bucket): slots for bucket, slots in options.explore.items() if slots}


def _read_floors(options: SearchOptions, catalogue: Catalogue, field: str) -> list[Floor]:
    """Read the floors of a request; raises InvalidRequestError."""
    drawn = sum(options.explore.values())
    slots = sum(floor.n for floor in options.at_least)
    if slots + drawn > options.k:
        of_chance = f" less the {drawn} slots to explore" if drawn else ""
        raise InvalidRequestError(
            f"expected floors of together at most k = {options.k} labels{of_chance}, received {describe(slots)}",
            field=field,
        )
    floors = []
    for position, floor in enumerate(options.at_least):
        bucket = None if floor.bucket is None else BUCKET_NAMES.index(floor.bucket)
        if floor.bucket is not None:
            _check_bucket(options, floor.bucket, "floors of buckets", f"{field}.{position}.bucket")
        conditions = catalogue.attributes.read(floor.filter, f"{field}.{position}.filter")
        floors.append(Floor(floor.n, bucket, conditions, floor.model_dump(exclude_unset=True)))
    return floors


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
        extra_id: the same, if the query tower does not read it; otherwise None.
    """

    def __init__(self, bundle: Bundle, encoder: Tower) -> None:
        settings, self._manifest, self._encoder = bundle.manifest.cooccurrence, bundle.manifest, encoder
        self._remembers = bundle.remembered
        self._names = [feature.name for feature in bundle.manifest.query_features if feature.kind == "history"]
        self._last = 1 if settings is None else settings.last
        self._negative = settings is not None and bool(settings.log.negative)
        self.query_id = None if settings is None or bundle.remembered is None else settings.log.query_id
        self.extra_id = None if self.query_id in [feature.name for feature in encoder.features] else self.query_id

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
        for feature in self._encoder.features if inputs else ():
            if feature.kind not in ("id", "bag", "history"):
                continue
            name = feature.name
            # Row by row: for the few rows of a batch NumPy's sums along an axis cost several times as much.
            for row, rows in enumerate(inputs[name].tolist() if feature.kind == "id" else inputs[name]):
                if feature.kind == "id":
                    ids = int(features_B[row].get(name) is not None)
                    unknown = int(ids and rows == OUT_OF_VOCABULARY)
                else:
                    weights_P = inputs[f"{name}__weight"][row]
                    ids = int(np.count_nonzero(weights_P))
                    unknown = ids - int(np.count_nonzero(np.logical_and(rows, weights_P)))
                of_tower[row] = of_tower[row][0] + ids, of_tower[row][1] + unknown
                if feature.kind == "history":
                    if histories[row].ids:
                        continue  # they are counted below
                    if unknown:  # labels that were added since are no ids of the tower's
                        entries = _texts(cast("list[Any]", features_B[row][name]))[-(feature.max_length or 0) :]
                        unknown = min(unknown, int(np.count_nonzero(catalogue.rows_in_order(entries) < 0)))
                    of_history[row] = of_history[row][0] + ids, of_history[row][1] + unknown
                    continue
                if unknown and remembered is not None and name == self.query_id:
                    unknown = int(not remembered.queries.find_all([str(id_text(features_B[row][name]))])[0])
                of_query[row] = of_query[row][0] + ids, of_query[row][1] + unknown
        if remembered is not None and self.extra_id is not None:
            for row, features in enumerate(features_B):
                if (id_ := id_text(features.get(self.extra_id))) is not None:
                    unknown = int(not remembered.queries.find_all([id_])[0])
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
