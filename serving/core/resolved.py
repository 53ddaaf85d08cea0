"""Resolve the options of a query against one release: rows in place of ids, checked settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
from pydantic import JsonValue

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Int64
from longtail.bundle.conditions import unfilterable_message
from longtail.bundle.errors import describe
from longtail.bundle.sets import distinct, with_members
from longtail.index import Condition, Filter
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.dials import Weights
from longtail.serving.core.queries import MOST_POOL, BucketName, Decay, SearchOptions, first_pool
from longtail.serving.core.ranking import NO_ROWS
from longtail.serving.errors import InvalidRequestError
from longtail.serving.monitoring.records import Restriction

_MOST_COMPARED = 1 << 21
"""Most pairs of labels that `mmr` compares: k times the pool."""
_LONGEST_NAME = 100


class History(NamedTuple):
    """The labels that a query chose.

    Attributes:
        last_H: int64, rows of those that count for `cooccurrence`, oldest first.
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
        raise InvalidRequestError("expected max_per or mmr beside pool, received neither", field=f"{prefix}pool")
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
