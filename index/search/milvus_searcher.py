"""Answer queries from a collection of a Milvus server, which filters by the scalar fields of the labels.

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
from contextlib import AbstractContextManager
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
from longtail.index.search.faiss_index import nprobe_for
from longtail.index.search.filters import Filter, Selection
from longtail.index.search.milvus_server import Answer, MilvusServer
from longtail.index.search.searcher import Found, Searcher

if TYPE_CHECKING:
    from pymilvus import MilvusClient

ROW, BUCKET = "row", "bucket"
"""Fields of a label's row and bucket."""
_NOTHING, _EVERYTHING = f"{ROW} < 0", f"{ROW} >= 0"
_LONG = np.iinfo(np.int64)
_ORDER = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}


def both(*expressions: str) -> str:
    """Create the conjunction of expressions; an empty expression admits every row."""
    given = [expression for expression in expressions if expression]
    return given[0] if len(given) == 1 else " and ".join(f"({expression})" for expression in given)


def in_buckets(buckets: Iterable[int]) -> str:
    """Create the expression of labels in some buckets."""
    return f"{BUCKET} in {sorted(buckets)}" if buckets else _NOTHING


def among(rows_R: Int64) -> str:
    """Create the expression of some rows."""
    return f"{ROW} in {rows_R.tolist()}" if rows_R.size else _NOTHING


def but(rows_R: Int64) -> str:
    """Create the expression of all rows but some."""
    return f"{ROW} not in {rows_R.tolist()}" if rows_R.size else ""


def meeting(conditions: Sequence[Condition], columns: Mapping[str, CollectionColumn]) -> str | None:
    """Create the expression of conditions; None if the collection lacks one of their columns."""
    if any(condition.column not in columns for condition in conditions):
        return None
    return both(*(_of(condition, columns[condition.column]) for condition in conditions))


def _of(condition: Condition, column: CollectionColumn) -> str:
    match condition.operator:
        case "exists":
            return f"{column.known} == {str(condition.values[0]).lower()}"
        case "eq" | "in":
            return _having(column, condition.values)
        case "ne" | "not_in":
            return f"not ({_having(column, condition.values)})"
    compare = _compared_integer if column.type == "int64" else _compared_float
    return f"{column.known} == true and {compare(column, condition.operator, condition.values[0])}"


def _having(column: CollectionColumn, values: Sequence[Any]) -> str:
    """Create the expression of labels that have one of some values; a list matches if it contains one."""
    match column.type:
        case "bool":
            held = [f"{column.field} == {value}" for value in values]
            return f"{column.known} == true and ({' or '.join(held)})"
        case "varchar" | "array":
            texts = [json.dumps(value, ensure_ascii=False) for value in values if _is_text(value)]
            if not texts:
                return _NOTHING
            if column.type == "array":
                return f"array_contains_any({column.field}, [{', '.join(texts)}])"
            return f"{column.known} == true and {column.field} in [{', '.join(texts)}]"
    if column.type == "int64":
        whole = sorted({int(value) for value in values if value == value // 1 and _LONG.min < value <= _LONG.max})
        equal = [f"{column.field} in {whole}"] if whole else []
        if _LONG.min in values:  # Milvus cannot parse the literal −2^63
            equal.append(f"{column.field} < {_LONG.min + 1}")
    else:
        equal = [_compared_float(column, "eq", value) for value in dict.fromkeys(values)]
    if not equal:
        return _NOTHING
    return f"{column.known} == true and ({' or '.join(equal)})"


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


def _is_text(value: str) -> bool:
    """Compute whether UTF-8 can encode a string; no label holds a string that UTF-8 cannot encode."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


VECTOR = "vector"
HEAD, TAIL = "head", "tail"
"""Names of the two partitions."""
HELD_BY = "longtail_release_"
"""Prefix of the aliases by which releases keep their collections."""
MOST_RESULTS = 16_384
"""Largest number of results that Milvus returns per query."""
AT_ONCE = 256
"""Queries in one request."""
_AT_A_TIME = 16
"""Concurrent requests of one release for a batch with several filters."""
WHOLE = 1 << 16
"""`nprobe` that visits every list: the largest that Milvus accepts, and more than a segment's lists."""


class Collection:
    """The immutable rows of a release in a Milvus collection, with a thread pool for searches. Thread-safe."""

    def __init__(self, server: MilvusServer, record: CollectionRecord) -> None:
        self.server, self.record = server, record
        self.columns = {column.name: column for column in record.columns}
        self._about = f"collection {record.name}"
        self.pool = ThreadPoolExecutor(_AT_A_TIME, "milvus")

    def open(self, labels: int, dim: int) -> None:
        """Load the collection, and check that its size and dimension match the release."""
        name = self.record.name
        described = self._ask(lambda client, seconds: client.describe_collection(name, timeout=seconds))
        self.server.wait_until(self._is_loaded, self.server.loading_seconds, self._about)
        found = next(field for field in described["fields"] if field["name"] == VECTOR)["params"]["dim"]
        if (count := self._count()) != labels or int(found) != dim:
            raise LongtailIndexError(
                f"{self.server}, collection {name}: expected {labels} rows of {dim} coordinates, found {count} of "
                f"{found}; drop it and build the release again"
            )

    def search(self, queries_bE: Float32, k: int, nprobe: int, expression: str) -> tuple[Float32, Int64]:
        """Find the k best rows that meet an expression.

        Returns scores float32 [b, k], descending, and rows int64 [b, k]; −inf and −1 where fewer are found. Raises
        EngineUnavailableError.
        """
        found = [
            self._ask(lambda client, seconds: self._asked(client, seconds, part_bE, k, nprobe, expression))  # noqa: B023
            for part_bE in np.split(queries_bE, range(AT_ONCE, len(queries_bE), AT_ONCE))
        ]
        scores, rows = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return scores, rows

    @property
    def problem(self) -> str | None:
        """Why the server cannot answer from the collection now; None: the server answers."""
        return self.server.problem(self._about)

    def probe(self) -> None:
        """Check that the collection is loaded; a server that released the collection loads it again."""

        def look(client: MilvusClient, seconds: float) -> None:
            if not self._is_loaded(client, seconds):
                raise EngineUnavailableError(
                    f"{self.server}, {self._about}: the server is still loading the collection"
                )

        self._ask(look)

    def point(self, alias: str) -> None:
        """Point an alias at this collection."""

        def flip(client: MilvusClient, seconds: float) -> None:
            from pymilvus.exceptions import MilvusException

            try:
                client.alter_alias(self.record.name, alias, timeout=seconds)
            except MilvusException as error:
                if "alias" not in str(error.message):
                    raise
                client.create_alias(self.record.name, alias, timeout=seconds)

        self._ask(flip)

    def _is_loaded(self, client: MilvusClient, seconds: float) -> bool:
        """Compute whether the collection is in memory; if not, start loading it."""
        from pymilvus.client.types import LoadState

        state = client.get_load_state(self.record.name, timeout=seconds)["state"]
        if state in (LoadState.NotLoad, LoadState.NotExist):
            client.load_collection(self.record.name, timeout=seconds, _async=True)
        return bool(state == LoadState.Loaded)

    def _asked(
        self, client: MilvusClient, seconds: float, queries_bE: Float32, k: int, nprobe: int, expression: str
    ) -> tuple[Float32, Int64]:
        """Search both partitions at once, the head exactly and the tail with `nprobe`."""
        lists = self.record.lists
        asked: list[tuple[list[str] | None, int]] = [(None, min(nprobe, WHOLE))]
        if self.record.head and nprobe < lists:
            asked = [([HEAD], WHOLE), ([TAIL], nprobe)]
        futures = [
            client.search(
                self.record.name,
                queries_bE,
                filter=expression,
                limit=k,
                output_fields=[],
                search_params={"metric_type": "IP", "params": {"nprobe": nprobe} if lists else {}},
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
        return self.server.ask(work, about=self._about)

    def _count(self) -> int:
        answer = self._ask(
            lambda client, seconds: client.query(
                self.record.name, filter="", output_fields=["count(*)"], timeout=seconds
            )
        )
        return int(answer[0]["count(*)"])


def drop(server: MilvusServer, names: Sequence[str]) -> None:
    """Drop the collections that no release holds any more."""

    def forget(client: MilvusClient, seconds: float) -> None:
        for name in names:
            if client.has_collection(name, timeout=seconds):
                # A copy of the release in another place may hold the collection by its own alias.
                aliases = client.list_aliases(name, timeout=seconds)["aliases"]
                if not any(alias.startswith(HELD_BY) for alias in aliases):
                    for alias in aliases:
                        client.drop_alias(alias, timeout=seconds)
                    client.drop_collection(name, timeout=seconds)

    if names:
        server.ask(forget)


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
        self.collection = collection
        self.params = params

    @property
    def problem(self) -> str | None:
        """Why the server cannot answer now; None: the server answers."""
        return self.collection.problem

    def probe(self) -> None:
        """Check that the collection is loaded; raises EngineUnavailableError."""
        self.collection.probe()

    def patience(self) -> AbstractContextManager[None]:
        """Enter a context for searches that no client waits for: their limit is a minute in all."""
        return self.collection.server.within(_PATIENT_SECONDS)

    def search(self, queries_BE: Float32, k: int, filters: Sequence[Filter | None] | None = None) -> Found:
        """Find the k best eligible labels of every query, like `Searcher.search`.

        The whole batch may take the server's seconds once per 256 queries.
        """
        seconds = self.collection.server.seconds * max(1, math.ceil(len(queries_BE) / AT_ONCE))
        with self.collection.server.within(seconds):
            return super().search(queries_BE, k, filters)

    def with_params(self, params: SearchParams) -> Self:
        """Create a searcher over the same collection with other parameters."""
        searcher = copy.copy(self)
        searcher.params = params
        return searcher

    def _run(self, searches: Sequence[Callable[[], Found]]) -> Iterable[Found]:
        if len(searches) == 1:
            return [searches[0]()]
        # A copied context per search: the threads share the time limit that `within` set.
        begun = [self.collection.pool.submit(copy_context().run, search) for search in searches]
        return [search.result() for search in begun]

    def _narrowed(self, eligible: Eligible, filter_: Filter) -> Eligible:
        """Get the labels of a set that pass a filter, and Milvus's expression for them."""
        parts = [eligible.expression]
        if filter_.allow is not None:
            parts.append(among(filter_.allowed(self._buckets_L)))
        else:
            if filter_.buckets is not None:
                parts.append(in_buckets(filter_.buckets))
            if filter_.selection is not None:
                parts.append(self._expression_of(filter_.selection))
        return eligible.where(filter_.mask(self._buckets_L), both(*parts))

    def _best(self, queries_bE: Float32, k: int, eligible: Eligible) -> Found:
        if not eligible.count:
            return no_results(len(queries_bE), k)
        share = eligible.share if self.collection.record.lists else 1.0
        # Rows that the expression cannot rule out are fetched and dropped, so k results take more.
        visible = max(eligible.count / (eligible.count + len(eligible.rows_to_drop)), _LEAST_VISIBLE)
        fetch = math.ceil(k / visible) + min(len(eligible.rows_to_drop), _MARGIN)
        if fetch > MOST_RESULTS:
            return self._exact.top(queries_bE, eligible.rows, k)
        return self._but(queries_bE, k, fetch, nprobe_for(self.params, k, share), eligible)

    def _fill(self, query_1E: Float32, k: int, eligible: Eligible) -> Found:
        enough, fetch = min(k, eligible.count), k
        if len(eligible.rows_to_drop) <= _MOST_IN_EXPRESSION:
            expression = both(eligible.expression, but(eligible.rows_to_drop))
            found = self.collection.search(query_1E, min(k, MOST_RESULTS), WHOLE, expression)
            if np.count_nonzero(found[1] >= 0) == enough:
                return top_k([found[0]], [found[1]], k)
        else:
            while (fetch := _MORE * fetch) <= MOST_RESULTS:
                found = self._but(query_1E, k, fetch, WHOLE, eligible)
                if np.count_nonzero(found[1] >= 0) == enough:
                    return found
        return self._exact.top(query_1E, eligible.rows, k)

    def _but(self, queries_bE: Float32, k: int, fetch: int, nprobe: int, eligible: Eligible) -> Found:
        """Fetch results that meet the expression, and return the best k without the rows `rows_to_drop`."""
        scores_bC, rows_bC = self.collection.search(queries_bE, fetch, nprobe, eligible.expression)
        if not eligible.rows_to_drop.size:
            return scores_bC, rows_bC
        scores_bC[is_in(rows_bC, eligible.rows_to_drop)] = -np.inf
        return top_k([scores_bC], [rows_bC], k)

    def _expression_of(self, selection: Selection) -> str:
        """Create the expression of a selection: by its conditions, otherwise by listing rows.

        Rows are listed if the selection has no conditions, or the collection lacks one of their columns; the list names
        the selected rows or the others, whichever are fewer.
        """
        if selection.conditions is not None:
            expression = meeting(selection.conditions, self.collection.columns)
            if expression is not None:
                return expression
        mask_L = selection.mask
        if np.count_nonzero(mask_L) <= len(mask_L) // 2:
            return among(np.flatnonzero(mask_L))
        return but(np.flatnonzero(~mask_L))
