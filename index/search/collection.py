"""Answer queries from a collection of a Milvus server, under any filter: what it knows of labels it filters by itself.

Legend: `L` labels, `B` queries, `b` some of them, `C` candidates, `K` results, `R` label rows, `E` coordinates of an
augmented row.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from longtail.bundle import Bundle
from longtail.bundle.arrays import Bools, Float32, Int64
from longtail.index.errors import ReleaseMismatchError
from longtail.index.manifests import CollectionRecord, Effort
from longtail.index.search.band import probes_for
from longtail.index.search.candidates import NO_ROW, no_results, top_k
from longtail.index.search.expressions import among, both, but, in_buckets, meeting
from longtail.index.search.filtering import EVERYTHING, FilteringSearcher
from longtail.index.search.filters import Filter, Selection
from longtail.index.search.milvus import Answer, MilvusServer

if TYPE_CHECKING:
    from pymilvus import MilvusClient

VECTOR = "vector"
HEAD, TAIL = "head", "tail"
"""Partitions."""
ALIAS = "longtail"
"""Of the collection that the published release has."""
_MOST_RESULTS = 16_384
"""That Milvus gives a query."""
_AT_ONCE = 256
"""Queries of one request."""
_WHOLE = 1 << 16
"""Cells to visit for every cell: the most that Milvus takes, and more than a segment has."""
_MARGIN = 100
"""Results fetched beyond those asked for, where hidden labels are dropped."""
_LEAST_VISIBLE, _MORE = 0.1, 4
"""Share of the labels that are not hidden, at the least, that is made up for at once; then times as many results."""
_MOST_IN_EXPRESSION = 10_000
"""Label rows that an expression rules out one by one: some five microseconds each."""
_LOAD_SECONDS = 3_600.0
"""The longest that a collection may take to be loaded."""
_COUNTED = 4_096
"""Sets of labels whose number is kept."""


class Collection:
    """The rows of a release in a collection, which never change. Thread-safe.

    Args:
        server: that has it.
        record: of the release.

    Attributes:
        server, record: as given.
        columns: that labels are filtered by, by name.
    """

    def __init__(self, server: MilvusServer, record: CollectionRecord) -> None:
        self.server, self.record = server, record
        self.columns = {column.name: column for column in record.columns}
        self.count = lru_cache(_COUNTED)(self._count)

    def open(self, labels: int, dim: int) -> None:
        """Have it loaded, and see that it is what the release says.

        Args:
            labels: L.
            dim: E.

        Raises:
            EngineUnavailableError: the server does not answer, or has no such collection.
            ReleaseMismatchError: it holds other rows.
        """
        name = self.record.name
        described = self._ask(lambda client, seconds: client.describe_collection(name, timeout=seconds))
        load(self.server, name)
        found = next(field for field in described["fields"] if field["name"] == VECTOR)["params"]["dim"]
        if (count := self._count("")) != labels or int(found) != dim:
            raise ReleaseMismatchError(
                f"{self.server}, collection {name}: expected {labels} rows of {dim} coordinates, found {count} of "
                f"{found}; drop it and build the release again"
            )

    def search(self, queries_bE: Float32, k: int, probes: int, expression: str) -> tuple[Float32, Int64]:
        """The k best rows that meet an expression: scores float32 [b, k], descending, and rows int64 [b, k].

        Args:
            queries_bE: float32, augmented queries.
            k: results of each, up to 16,384.
            probes: cells to visit of every segment of the tail.
            expression: of Milvus; empty: all rows.

        Returns:
            −inf and −1 where fewer are found.

        Raises:
            EngineUnavailableError: as `MilvusServer.ask`.
        """
        found = [
            self._ask(lambda client, seconds: self._asked(client, seconds, part_bE, k, probes, expression))  # noqa: B023
            for part_bE in np.split(queries_bE, range(_AT_ONCE, len(queries_bE), _AT_ONCE))
        ]
        scores, rows = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return scores, rows

    def begin_to_load(self) -> None:
        """Have the server load it, unless it has; raises as `MilvusServer.ask`."""
        self._ask(lambda client, seconds: _begin_to_load(client, self.record.name, seconds))

    def publish(self) -> None:
        """Have the alias name this collection, for whoever looks at the server; raises as `MilvusServer.ask`."""

        def flip(client: MilvusClient, seconds: float) -> None:
            from pymilvus.exceptions import MilvusException

            try:
                client.alter_alias(self.record.name, ALIAS, timeout=seconds)
            except MilvusException as error:
                if "alias" not in str(error.message):
                    raise
                client.create_alias(self.record.name, ALIAS, timeout=seconds)

        self._ask(flip)

    def _asked(
        self, client: MilvusClient, seconds: float, queries_bE: Float32, k: int, probes: int, expression: str
    ) -> tuple[Float32, Int64]:
        """Both partitions at once, each as hard as it takes."""
        cells = self.record.cells
        asked: list[tuple[list[str] | None, int]] = [(None, min(probes, _WHOLE))]
        if self.record.head and probes < cells:
            asked = [([HEAD], _WHOLE), ([TAIL], probes)]
        futures = [
            client.search(
                self.record.name,
                queries_bE,
                filter=expression,
                limit=k,
                output_fields=[],
                search_params={"metric_type": "IP", "params": {"nprobe": nprobe} if cells else {}},
                timeout=seconds,
                partition_names=partitions,
                anns_field=VECTOR,
                _async=True,
            )
            for partitions, nprobe in asked
        ]
        scores, rows = [], []
        for future in futures:
            scores_bK, rows_bK = no_results(len(queries_bE), k)
            for query, hits in enumerate(future.result()):
                scores_bK[query, : len(hits.ids)], rows_bK[query, : len(hits.ids)] = hits.distances, hits.ids
            scores.append(scores_bK)
            rows.append(rows_bK)
        return (scores[0], rows[0]) if len(scores) == 1 else top_k(scores, rows, k)

    def _ask(self, work: Callable[[MilvusClient, float], Answer]) -> Answer:
        return self.server.ask(work, about=f"collection {self.record.name}")

    def _count(self, expression: str) -> int:
        """How many rows meet an expression."""
        answer = self._ask(
            lambda client, seconds: client.query(
                self.record.name, filter=expression, output_fields=["count(*)"], timeout=seconds
            )
        )
        return int(answer[0]["count(*)"])


@dataclass(frozen=True)
class EligibleRows:
    """Labels of a collection that may be answered: those that meet an expression, but for some. Immutable.

    Attributes:
        collection: has them.
        expression: of Milvus; empty: all.
        mask: the same, bool [L], made where it is asked for.
        but_R: int64, ascending, label rows that are not among them.
    """

    collection: Collection
    expression: str
    mask: Callable[[], Bools]
    but_R: Int64

    def without(self, rows_R: Int64) -> EligibleRows:
        """The same but for some label rows, int64 [R]."""
        return replace(self, but_R=np.union1d(self.but_R, rows_R.astype(np.int64)))

    def narrowed(self, expression: str, mask: Callable[[], Bools]) -> EligibleRows:
        """Those of them that meet another expression; its mask likewise."""
        before = self.mask
        return replace(self, expression=both(self.expression, expression), mask=lambda: before() & mask())

    @property
    def share_of_all(self) -> float:
        """About how many of all labels they are: hidden ones count."""
        return self.collection.count(self.expression) / self.collection.count("") if self.expression else 1.0

    @cached_property
    def whole_expression(self) -> str:
        """Of exactly these labels."""
        return both(self.expression, but(self.but_R))

    @cached_property
    def count(self) -> int:
        """How many they are."""
        if len(self.but_R) > _MOST_IN_EXPRESSION:
            return len(self.rows)
        return self.collection.count(self.whole_expression)

    @property
    def rows(self) -> Int64:
        """Their label rows, int64, ascending."""
        mask_L = self.mask()
        mask_L[self.but_R] = False
        return np.flatnonzero(mask_L)


class CollectionSearcher(FilteringSearcher[EligibleRows]):
    """Top k labels for augmented queries [METHODS §6], found by a Milvus server.

    Lists of labels are scored here, exactly, from the bundle's own rows, and so is what is asked for beyond Milvus's
    16,384 results. Everything else the server finds, by its index and by expressions over its fields.

    Args:
        bundle: the labels' rows, popularity and buckets.
        collection: has the same rows.
        effort: how many cells of the tail a search visits, wherever the dials stand.

    Attributes:
        labels: L.
        collection, effort: as given.
    """

    def __init__(self, bundle: Bundle, collection: Collection, effort: Effort) -> None:
        super().__init__(bundle)
        self.collection = collection
        self.effort = effort

    @property
    def problem(self) -> str | None:
        """Why the server does not answer now, as it said last; None: it does."""
        return self.collection.server.problem

    def probe(self) -> None:
        """Ask the server whether it answers now, and to load the collection where it has let go of it; raises as
        `MilvusServer.ask`."""
        self.collection.begin_to_load()

    def at(self, effort: Effort) -> CollectionSearcher:
        """A searcher over the same collection that searches as hard."""
        searcher = copy.copy(self)
        searcher.effort = effort
        searcher._visible_of_buckets = dict(self._visible_of_buckets)
        return searcher

    def found(self, queries_BE: Float32, k: int) -> tuple[Float32, Int64]:
        """As `FilteringSearcher.found`."""
        return self._best(queries_BE, k, self._bucket_labels(EVERYTHING))

    def _every_of(self, buckets: frozenset[int]) -> EligibleRows:
        expression = "" if buckets == EVERYTHING else in_buckets(buckets)
        nothing = np.empty(0, np.int64)
        return EligibleRows(self.collection, expression, lambda: Filter(buckets=buckets).mask(self._buckets_L), nothing)

    def _selected(self, eligible: EligibleRows, selection: Selection) -> EligibleRows:
        return eligible.narrowed(self._expression_of(selection), lambda: selection.mask)

    def _allowed(self, eligible: EligibleRows, filter_: Filter) -> EligibleRows:
        rows_R = filter_.allowed(self._buckets_L)
        return eligible.narrowed(among(rows_R), lambda: filter_.mask(self._buckets_L))

    def _best(self, queries_bE: Float32, k: int, eligible: EligibleRows) -> tuple[Float32, Int64]:
        share = eligible.share_of_all if self.collection.record.cells else 1.0
        if not share:
            return no_results(len(queries_bE), k)
        visible = max(1 - len(eligible.but_R) / self.labels, _LEAST_VISIBLE)
        fetch = math.ceil(k / visible) + min(len(eligible.but_R), _MARGIN)
        if fetch > _MOST_RESULTS:
            return self._exact.top(queries_bE, eligible.rows, k)
        return self._but(queries_bE, k, fetch, probes_for(self.effort, k, share), eligible)

    def _filled(self, query_1E: Float32, k: int, eligible: EligibleRows) -> tuple[Float32, Int64]:
        enough, fetch = min(k, eligible.count), k
        if len(eligible.but_R) <= _MOST_IN_EXPRESSION:
            found = self.collection.search(query_1E, min(k, _MOST_RESULTS), _WHOLE, eligible.whole_expression)
            if np.count_nonzero(found[1] >= 0) == enough:
                return top_k([found[0]], [found[1]], k)
        else:
            while (fetch := _MORE * fetch) <= _MOST_RESULTS:
                found = self._but(query_1E, k, fetch, _WHOLE, eligible)
                if np.count_nonzero(found[1] >= 0) == enough:
                    return found
        return self._exact.top(query_1E, eligible.rows, k)

    def _but(
        self, queries_bE: Float32, k: int, fetch: int, probes: int, eligible: EligibleRows
    ) -> tuple[Float32, Int64]:
        """The best k among so many of those that meet the expression."""
        scores_bC, rows_bC = self.collection.search(queries_bE, fetch, probes, eligible.expression)
        if not eligible.but_R.size:
            return scores_bC, rows_bC
        scores_bC[_is_among(rows_bC, eligible.but_R)] = -np.inf
        return top_k([scores_bC], [rows_bC], k)

    def _expression_of(self, selection: Selection) -> str:
        """By its conditions; of a mask alone, or of columns that the collection has not, by the fewer rows."""
        if selection.conditions is not None:
            expression = meeting(selection.conditions, self.collection.columns)
            if expression is not None:
                return expression
        mask_L = selection.mask
        if np.count_nonzero(mask_L) <= len(mask_L) // 2:
            return among(np.flatnonzero(mask_L))
        return but(np.flatnonzero(~mask_L))


def load(server: MilvusServer, name: str) -> None:
    """Have a collection in the memory of its server; raises as `MilvusServer.wait_until`."""
    server.wait_until(
        lambda client, seconds: _begin_to_load(client, name, seconds), _LOAD_SECONDS, f"collection {name}"
    )


def _begin_to_load(client: MilvusClient, name: str, seconds: float) -> bool:
    """Whether a collection is loaded; it will be, where it is not."""
    from pymilvus.client.types import LoadState

    state = client.get_load_state(name, timeout=seconds)["state"]
    if state in (LoadState.NotLoad, LoadState.NotExist):
        client.load_collection(name, timeout=seconds, _async=True)
    return bool(state == LoadState.Loaded)


def drop(server: MilvusServer, names: Sequence[str]) -> None:
    """Drop collections, those that are there; raises as `MilvusServer.ask`."""

    def forget(client: MilvusClient, seconds: float) -> None:
        for name in names:
            if client.has_collection(name, timeout=seconds):
                aliases = client.list_aliases(name, timeout=seconds)["aliases"]
                for alias in aliases:
                    client.drop_alias(alias, timeout=seconds)
                client.drop_collection(name, timeout=seconds)

    if names:
        server.ask(forget)


def _is_among(rows_bC: Int64, rows_R: Int64) -> Bools:
    """Which rows stand among others, int64, ascending, at least one; −1 does not."""
    found_bC = np.minimum(np.searchsorted(rows_R, rows_bC), len(rows_R) - 1)
    among_bC: Bools = (rows_R[found_bC] == rows_bC) & (rows_bC != NO_ROW)
    return among_bC
