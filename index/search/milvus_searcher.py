"""Answer queries from a Milvus collection, which filters by the labels' scalar fields.

Filters become Milvus's boolean expressions over scalar fields. A display column takes two fields, its values and
whether a label has one, because no field may be null up to Milvus 2.4. Values are compared as `serving` compares them:
integers as integers, even with a fractional number; float32 as float32.

Legend: `L` labels, `B` queries, `b` some of them, `C` candidates, `K` results, `R` label rows, `E` coordinates of an
augmented row.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32, Int64
from longtail.bundle.conditions import Condition
from longtail.bundle.sets import is_in
from longtail.index.errors import EngineUnavailableError, LongtailIndexError
from longtail.index.manifests import CollectionColumn, CollectionRecord, SearchParams
from longtail.index.search.candidates import no_results, top_k
from longtail.index.search.eligible import Eligible
from longtail.index.search.faiss_index import scale_nprobe
from longtail.index.search.filters import NO_FILTER, Filter
from longtail.index.search.milvus_server import Answer, MilvusServer
from longtail.index.search.searcher import (
    ALL_BUCKETS,
    NO_MASK,
    Hits,
    Searcher,
    exclude_rows,
    group_queries,
    overfetch,
)

if TYPE_CHECKING:
    from pymilvus import MilvusClient

ROW, BUCKET = "row", "bucket"
"""Fields of a label's row and bucket."""
_NOTHING, _EVERYTHING = f"{ROW} < 0", f"{ROW} >= 0"
_LONG = np.iinfo(np.int64)
_ORDER = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}


def conjunction(*expressions: str) -> str:
    """Create the conjunction of expressions; an empty expression admits every row."""
    parts = [expression for expression in expressions if expression]
    return parts[0] if len(parts) == 1 else " and ".join(f"({part})" for part in parts)


def match_buckets(buckets: Iterable[int]) -> str:
    """Create the expression of labels in some buckets."""
    return f"{BUCKET} in {sorted(buckets)}" if buckets else _NOTHING


def match_rows(rows_R: Int64) -> str:
    """Create the expression of some rows."""
    return f"{ROW} in {rows_R.tolist()}" if rows_R.size else _NOTHING


def match_other_rows(rows_R: Int64) -> str:
    """Create the expression of all rows but some."""
    return f"{ROW} not in {rows_R.tolist()}" if rows_R.size else ""


def match_conditions(conditions: Sequence[Condition], columns: Mapping[str, CollectionColumn]) -> str | None:
    """Create the expression of conditions; None if the collection lacks one of their columns."""
    if any(condition.column not in columns for condition in conditions):
        return None
    return conjunction(*(_condition(condition, columns[condition.column]) for condition in conditions))


def _condition(condition: Condition, column: CollectionColumn) -> str:
    match condition.operator:
        case "exists":
            return f"{column.presence_field} == {str(condition.values[0]).lower()}"
        case "eq" | "in":
            return _equal_to_any(column, condition.values)
        case "ne" | "not_in":
            return f"not ({_equal_to_any(column, condition.values)})"
    compare = _compared_integer if column.type == "int64" else _compared_float
    return f"{column.presence_field} == true and {compare(column, condition.operator, condition.values[0])}"


def _equal_to_any(column: CollectionColumn, values: Sequence[Any]) -> str:
    """Create the expression of labels that have one of some values; a list matches if it contains one."""
    match column.type:
        case "bool":
            return (
                f"{column.presence_field} == true and ({' or '.join(f'{column.field} == {value}' for value in values)})"
            )
        case "varchar" | "array":
            texts = [json.dumps(value, ensure_ascii=False) for value in values if _is_utf8(value)]
            if not texts:
                return _NOTHING
            if column.type == "array":
                return f"array_contains_any({column.field}, [{', '.join(texts)}])"
            return f"{column.presence_field} == true and {column.field} in [{', '.join(texts)}]"
    if column.type == "int64":
        integers = sorted({int(value) for value in values if value == value // 1 and _LONG.min < value <= _LONG.max})
        equal = [f"{column.field} in {integers}"] if integers else []
        if _LONG.min in values:  # Milvus cannot parse the literal −2^63
            equal.append(f"{column.field} < {_LONG.min + 1}")
    else:
        equal = [_compared_float(column, "eq", value) for value in dict.fromkeys(values)]
    if not equal:
        return _NOTHING
    return f"{column.presence_field} == true and ({' or '.join(equal)})"


def _compared_integer(column: CollectionColumn, operator: str, value: float) -> str:
    # For integers x <= 6.5 means x < 7, and x > 6.5 means x >= 7.
    bound = math.ceil(value) if operator in ("lt", "ge") else math.floor(value) + 1
    below = operator in ("lt", "le")
    if bound <= _LONG.min or bound > _LONG.max:
        return _EVERYTHING if below == (bound > _LONG.max) else _NOTHING
    return f"{column.field} {'<' if below else '>='} {bound}"


def _compared_float(column: CollectionColumn, operator: str, value: float) -> str:
    number = _float(column, value)
    if math.isfinite(number):
        return f"{column.field} {_ORDER[operator]} {number!r}"
    # A column may hold infinities, which Milvus has no literal for: they lie beyond the largest finite number.
    most = repr(float(np.finfo(np.float64).max))
    if number > 0:
        infinite, finite = f"{column.field} > {most}", f"{column.field} <= {most}"
        return {"lt": finite, "le": _EVERYTHING, "gt": _NOTHING, "ge": infinite, "eq": infinite}[operator]
    infinite, finite = f"{column.field} < -{most}", f"{column.field} >= -{most}"
    return {"lt": _NOTHING, "le": infinite, "gt": finite, "ge": _EVERYTHING, "eq": infinite}[operator]


def _float(column: CollectionColumn, value: float) -> float:
    """Round a number to the precision of the column; infinite where that overflows."""
    kind: Any = {"half": np.float16, "float": np.float32, "double": np.float64}[column.type]
    try:
        with np.errstate(over="ignore"):
            return float(kind(value))
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _is_utf8(value: str) -> bool:
    """Compute whether UTF-8 can encode a string; no label holds a string that UTF-8 cannot encode."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


VECTOR = "vector"
HEAD, TAIL = "head", "tail"
"""Names of the two partitions."""
ALIAS_PREFIX = "longtail_release_"
"""Prefix of the aliases by which releases keep their collections."""
MOST_RESULTS = 16_384
"""Largest number of results that Milvus returns per query."""
MOST_QUERIES = 256
"""Queries in one request."""
_MOST_REQUESTS = 16
"""Concurrent requests of one release for a batch with several filters."""
ALL_LISTS = 1 << 16
"""`nprobe` that visits every list: the largest that Milvus accepts, and more than a segment's lists."""


class Collection:
    """The immutable rows of a release in a Milvus collection. Thread-safe."""

    def __init__(self, server: MilvusServer, record: CollectionRecord) -> None:
        self.server, self.record = server, record
        self.columns = {column.name: column for column in record.columns}
        self._about = f"collection {record.name}"
        self.patient = True
        """Whether a search may take a minute, as no client waits for it."""

    @property
    def seconds(self) -> float:
        """Return the time limit of a search."""
        return max(self.server.seconds, _PATIENT_SECONDS) if self.patient else self.server.seconds

    def open(self, labels: int, dim: int) -> None:
        """Load the collection, and check that its size and dimension match the release."""
        name = self.record.name
        described = self._ask(lambda client, seconds: client.describe_collection(name, timeout=seconds))
        self.server.wait_until(self._is_loaded, self.server.loading_seconds, self._about)
        width = int(next(field for field in described["fields"] if field["name"] == VECTOR)["params"]["dim"])
        if (rows := self._count()) != labels or width != dim:
            raise LongtailIndexError(
                f"{self.server}, collection {name}: expected {labels} rows of {dim} coordinates, found {rows} of "
                f"{width}; drop it and build the release again"
            )

    def search(self, queries_bE: Float32, k: int, nprobe: int, expression: str) -> tuple[Float32, Int64]:
        """Find the k best rows that meet an expression.

        Returns scores float32 [b, k], descending, and rows int64 [b, k]; −inf and −1 where there are fewer. Raises
        EngineUnavailableError.
        """
        hits = [
            self._ask(lambda client, seconds: self._request(client, seconds, part_bE, k, nprobe, expression))  # noqa: B023
            for part_bE in np.split(queries_bE, range(MOST_QUERIES, len(queries_bE), MOST_QUERIES))
        ]
        scores, rows = (np.concatenate(arrays) for arrays in zip(*hits, strict=True))
        return scores, rows

    @property
    def problem(self) -> str | None:
        """Explain why the server cannot answer from the collection now; None: the server answers."""
        return self.server.problem(self._about)

    def probe(self) -> None:
        """Check that the collection is loaded; a server that released the collection loads it again."""

        def check(client: MilvusClient, seconds: float) -> None:
            if not self._is_loaded(client, seconds):
                raise EngineUnavailableError(
                    f"{self.server}, {self._about}: the server is still loading the collection"
                )

        self._ask(check)

    def set_alias(self, alias: str) -> None:
        """Point an alias at this collection."""

        def alter(client: MilvusClient, seconds: float) -> None:
            from pymilvus.exceptions import MilvusException

            try:
                client.alter_alias(self.record.name, alias, timeout=seconds)
            except MilvusException as error:
                if "alias" not in str(error.message):
                    raise
                client.create_alias(self.record.name, alias, timeout=seconds)

        self._ask(alter)

    def _is_loaded(self, client: MilvusClient, seconds: float) -> bool:
        """Compute whether the collection is in memory; if not, start loading it."""
        from pymilvus.client.types import LoadState

        state = client.get_load_state(self.record.name, timeout=seconds)["state"]
        if state in (LoadState.NotLoad, LoadState.NotExist):
            client.load_collection(self.record.name, timeout=seconds, _async=True)
        return bool(state == LoadState.Loaded)

    def _request(
        self, client: MilvusClient, seconds: float, queries_bE: Float32, k: int, nprobe: int, expression: str
    ) -> tuple[Float32, Int64]:
        """Search both partitions at once, the head exactly and the tail with `nprobe`."""
        lists = self.record.lists
        partitions: list[tuple[list[str] | None, int]] = [(None, min(nprobe, ALL_LISTS))]
        if self.record.head and nprobe < lists:
            partitions = [([HEAD], ALL_LISTS), ([TAIL], nprobe)]
        # At once, so that the client waits for the slower partition alone.
        futures = [
            client.search(
                self.record.name,
                queries_bE,
                filter=expression,
                limit=k,
                output_fields=[],
                search_params={"metric_type": "IP", "params": {"nprobe": nprobe} if lists else {}},
                timeout=seconds,
                partition_names=names,
                anns_field=VECTOR,
                _async=True,
            )
            for names, nprobe in partitions
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
        return self.server.ask(work, about=self._about)

    def _count(self) -> int:
        answer = self._ask(
            lambda client, seconds: client.query(
                self.record.name, filter="", output_fields=["count(*)"], timeout=seconds
            )
        )
        return int(answer[0]["count(*)"])


def drop_collections(server: MilvusServer, names: Sequence[str]) -> None:
    """Drop the collections that no release holds any more."""

    def drop(client: MilvusClient, seconds: float) -> None:
        for name in names:
            if client.has_collection(name, timeout=seconds):
                # A copy of the release in another directory may hold the collection by its own alias.
                aliases = client.list_aliases(name, timeout=seconds)["aliases"]
                if not any(alias.startswith(ALIAS_PREFIX) for alias in aliases):
                    for alias in aliases:
                        client.drop_alias(alias, timeout=seconds)
                    client.drop_collection(name, timeout=seconds)

    if names:
        server.ask(drop)


_NO_ROWS = np.empty(0, np.int64)
_MARGIN = 100
"""Extra results fetched where hidden labels are dropped afterwards."""
_LEAST_VISIBLE, _MORE = 0.1, 4
"""Smallest visible share that the first search compensates for by extra results, and the factor on the number of
results of every further search."""
_PATIENT_SECONDS = 60.0
"""Limit for the measurements of a service before a release starts to answer."""
_MOST_IN_EXPRESSION = 10_000
"""Most label rows that an expression lists to exclude: each costs some five microseconds."""


class MilvusSearcher(Searcher):
    """Find the top k labels for augmented queries [METHODS §6] through a Milvus server.

    Short lists of allowed labels, and queries for more results than Milvus's 16,384, are scored here exactly from the
    bundle's own rows. For all other queries the server searches, by its index and by expressions over its fields.
    """

    def __init__(self, bundle: Bundle, collection: Collection, params: SearchParams) -> None:
        self._prepare(bundle)
        self.collection, self.params = collection, params
        # pymilvus blocks, and a batch with several filters takes a request for each.
        self._pool = ThreadPoolExecutor(_MOST_REQUESTS, "milvus")

    @property
    def problem(self) -> str | None:
        """Explain why the server cannot answer now; None: the server answers."""
        return self.collection.problem

    def probe(self) -> None:
        """Check that the collection is loaded; raises EngineUnavailableError."""
        self.collection.probe()

    def limit_time(self) -> None:
        """Limit searches to the server's seconds from now on, as clients wait; before, each may take a minute."""
        self.collection.patient = False

    def with_params(self, params: SearchParams) -> Self:
        """Create a searcher over the same collection with other parameters."""
        searcher = copy.copy(self)
        searcher.params = params
        return searcher

    def search(self, queries_BE: Float32, k: int, filters: Sequence[Filter | None] | None = None) -> Hits:
        """Find the k best eligible labels of every query, like `Searcher.search`.

        The whole batch may take the server's seconds once per 256 queries. Raises EngineUnavailableError.
        """
        self._check(queries_BE, k, filters)
        scores_BK, rows_BK = no_results(len(queries_BE), k)
        groups = group_queries(filters or [None] * len(queries_BE))
        seconds = self.collection.seconds * max(1, math.ceil(len(queries_BE) / MOST_QUERIES))
        with self.collection.server.time_limit(seconds):
            if len(groups) == 1:
                return self._search_group(queries_BE, k, groups[0][1])
            # A copied context per search: the threads share the time limit.
            searches = [
                self._pool.submit(copy_context().run, self._search_group, queries_BE[queries], k, filters_b)
                for queries, filters_b in groups
            ]
            for (queries, _), search in zip(groups, searches, strict=True):
                scores_BK[queries], rows_BK[queries] = search.result()
        return scores_BK, rows_BK

    def search_index(self, queries_BE: Float32, k: int) -> Hits:
        """Search the collection without filling up queries left short, to measure the collection alone."""
        return self._search_server(queries_BE, k, self._visible, "", self._visible.excluded_rows)

    def _search_group(self, queries_bE: Float32, k: int, filters_b: Sequence[Filter] | None) -> Hits:
        """Answer queries of one group; the server filters by an expression, and hidden labels are dropped here."""
        first = filters_b[0] if filters_b else NO_FILTER
        excludes: list[Int64] = []
        if first.allow is not None:
            rows_R = first.allowed(self._buckets_L)
            if self._is_short(first):
                return self._exact.top(queries_bE, rows_R[self._visible.contains(rows_R)], k)
            admitted, expression = Eligible.from_mask(first.mask(self._buckets_L)), match_rows(rows_R)
            eligible = admitted.intersect(self._visible)
        else:
            buckets = ALL_BUCKETS if first.buckets is None else first.buckets
            admitted = self._with_hidden(buckets, first.selection or NO_MASK)
            expression = self._expression(first)
            eligible, excludes = exclude_rows(self._eligible(first.buckets, first.selection), filters_b or [NO_FILTER])
        dropped_R = _NO_ROWS if admitted.count == eligible.count else admitted.minus(eligible)
        fetch = k + overfetch(excludes) if excludes else k
        hits = self._search_server(queries_bE, fetch, eligible, expression, dropped_R)

        def fill(query_1E: Float32, k: int, rest: Eligible) -> Hits:
            return self._fill_from_server(query_1E, k, rest, expression, admitted.minus(rest))

        return self._complete(queries_bE, k, hits, eligible, excludes, fill)

    def _search_server(
        self, queries_bE: Float32, k: int, eligible: Eligible, expression: str, dropped_R: Int64
    ) -> Hits:
        """Find the best k rows that an expression admits, without the rows to drop."""
        if not eligible.count:
            return no_results(len(queries_bE), k)
        share = eligible.share if self.collection.record.lists else 1.0
        # Rows that the expression cannot rule out are fetched and dropped, so k results take more.
        visible = max(eligible.count / (eligible.count + len(dropped_R)), _LEAST_VISIBLE)
        fetch = math.ceil(k / visible) + min(len(dropped_R), _MARGIN)
        if fetch > MOST_RESULTS:
            return self._exact.top(queries_bE, eligible.rows, k)
        hits = self.collection.search(queries_bE, fetch, scale_nprobe(self.params, k, share), expression)
        return _drop(hits, dropped_R, k)

    def _fill_from_server(
        self, query_1E: Float32, k: int, eligible: Eligible, expression: str, dropped_R: Int64
    ) -> Hits:
        """Search all lists for a query left short, finally score every label."""
        enough = min(k, eligible.count)
        if len(dropped_R) <= _MOST_IN_EXPRESSION:
            requests = [(min(k, MOST_RESULTS), conjunction(expression, match_other_rows(dropped_R)))]
        else:
            depths = (k * _MORE**power for power in range(1, 9))
            requests = [(depth, expression) for depth in depths if depth <= MOST_RESULTS]
        for depth, admitting in requests:
            hits = _drop(self.collection.search(query_1E, depth, ALL_LISTS, admitting), dropped_R, k)
            if np.count_nonzero(hits[1] >= 0) == enough:
                return hits
        return self._exact.top(query_1E, eligible.rows, k)

    def _expression(self, filter_: Filter) -> str:
        """Create the expression of a filter's buckets and selection.

        Rows are listed if the selection has no conditions, or the collection lacks one of their columns; the list names
        the selected rows or the others, whichever are fewer.
        """
        parts = [] if filter_.buckets is None else [match_buckets(filter_.buckets)]
        if (selection := filter_.selection) is not None:
            condition = None
            if selection.conditions is not None:
                condition = match_conditions(selection.conditions, self.collection.columns)
            if condition is None:
                mask_L = selection.mask
                is_rare = np.count_nonzero(mask_L) <= len(mask_L) // 2
                condition = match_rows(np.flatnonzero(mask_L)) if is_rare else match_other_rows(np.flatnonzero(~mask_L))
            parts.append(condition)
        return conjunction(*parts)


def _drop(hits: Hits, dropped_R: Int64, k: int) -> Hits:
    """Get the best k results without some rows, int64 [R], ascending."""
    scores_bC, rows_bC = hits
    if dropped_R.size:
        scores_bC[is_in(rows_bC, dropped_R)] = -np.inf
    return hits if not dropped_R.size and rows_bC.shape[1] == k else top_k([scores_bC], [rows_bC], k)
