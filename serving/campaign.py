"""Write the best queries for each label of a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.csv import write_csv

from longtail.bundle.manifest import LogColumns
from longtail.index import open_releases
from longtail.serving.batch import DEFAULT_K, MEMORY, BatchError, checked, find_release_name
from longtail.serving.core.known_queries import find_known_queries
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import QueriesFor
from longtail.serving.core.retriever import Retriever
from longtail.serving.settings import MOST_QUERIES
from longtail.state import StateLocation, read_label_changes
from longtail.tables import DataError, find_files
from longtail.tables.database import open_database
from longtail.tables.table import id_expression, read_table


def _write_json_lines(table: pa.Table, path: Path) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist()), encoding="utf-8")


_FIGURES = ("score", "log_p", "choices")
_WRITERS: Mapping[str, Callable[[pa.Table, Path], None]] = {
    ".parquet": pq.write_table, ".csv": write_csv, ".jsonl": _write_json_lines
}  # fmt: skip


def invert(
    releases: str | Path,
    labels: Path | str,
    out: Path,
    options: Mapping[str, Any],
    *,
    max_per_query: int | None = None,
    release: str | None = None,
    state: StateLocation | None = None,
) -> int:
    """Write labels' queries into `.parquet`, `.csv` or `.jsonl`; returns rows.

    Args:
        labels: table with a column of label ids, named as in training or `label_id`.
        options: options of `POST /v1/queries`, such as `{"k": 100, "by": "choices"}`.
        max_per_query: most labels of one query: see `campaign`.
        release, state: see `batch.answer`.

    Raises:
        BatchError: labels, options or OUT are wrong; nothing is written.
        ServingError, LongtailIndexError, BundleError, StoreError: release or state cannot be used.
    """
    if out.suffix not in _WRITERS or out.exists():
        raise BatchError(f"{out}: expected the name of a new file that ends in {', '.join(_WRITERS)}")
    source = open_releases(releases)
    retriever = load_release(source, find_release_name(source, release))
    with suppress(FileNotFoundError):
        retriever = retriever.with_changes(read_label_changes(state or source.root / ".state").records())
    cooccurrence = retriever.manifest.cooccurrence
    log = LogColumns() if cooccurrence is None else cooccurrence.log
    column = retriever.manifest.own_id or log.label_id
    rows = campaign(retriever, _label_ids(labels, column), options, max_per_query)
    answers = pa.table({
        column: pa.array([id_ for id_, _, _ in rows], pa.string()),
        log.query_id: pa.array([query["id"] for _, _, query in rows], pa.string()),
        **{name: pa.array([query[name] for _, _, query in rows], pa.float32()) for name in _FIGURES},
        "rank": pa.array([rank for _, rank, _ in rows], pa.int32()),
    })  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    working = out.with_name(f".{out.name}.{uuid4().hex}")
    try:
        _WRITERS[out.suffix](answers, working)
        working.replace(out)
    finally:
        working.unlink(missing_ok=True)
    return len(rows)


def campaign(
    retriever: Retriever, ids: Sequence[str], options: Mapping[str, Any], max_per_query: int | None = None
) -> list[tuple[str, int, dict[str, Any]]]:
    """Choose queries for labels: label id, rank from 1, query.

    Pairs of a label and a query are taken by falling `log_p`, or `choices` if `by` says so, over all labels together;
    equal ones in the order of labels. A pair counts unless its label has k queries or its query `max_per_query` labels.
    """
    request = checked(QueriesFor, {"k": DEFAULT_K, "display": False, **options, "ids": [*ids[:1]]})
    depth, lists, short_ids = request.k, dict[str, list[dict[str, Any]]](), [*ids]
    while short_ids:
        for start in range(0, len(short_ids), MOST_QUERIES):
            part = request.model_copy(update={"ids": short_ids[start : start + MOST_QUERIES], "k": depth})
            lists |= {answer["id"]: answer["queries"] for answer in find_known_queries(retriever, [part])}
        pairs = [(-query[request.by], i, query) for i, id_ in enumerate(ids) for query in lists[id_]]
        chosen, counts = {id_: list[dict[str, Any]]() for id_ in ids}, Counter[str]()
        for _, i, query in sorted(pairs, key=lambda pair: pair[:2]):
            label_queries = chosen[ids[i]]
            if len(label_queries) < request.k and (max_per_query is None or counts[query["id"]] < max_per_query):
                label_queries.append(query)
                counts[query["id"]] += 1
        # A label that lacks queries, and whose list was cut, needs a longer one; full labels need no more of theirs.
        short_ids = [id_ for id_ in ids if len(chosen[id_]) < request.k and len(lists[id_]) == depth]
        # Growing fast, because every further round searches again from the beginning.
        depth *= 4
    return [(id_, rank, query) for id_ in ids for rank, query in enumerate(chosen[id_], start=1)]


def _label_ids(labels: Path | str, column: str) -> list[str]:
    try:
        with open_database(memory=MEMORY) as duck:
            table = read_table(duck, find_files(labels), lambda opened, _: {
                column: id_expression(opened, column, *opened.column(column))
            }, str(labels))  # fmt: skip
            table.refuse_rejected()
            ids = table.ids(column).to_pylist()
    except DataError as error:
        raise BatchError(str(error)) from error
    if not ids or None in ids:
        raise BatchError(f"{labels}, column {column!r}: expected an id in every row, found {len(ids):,} rows")
    return [*dict.fromkeys(ids)]
