"""Compute figures by group of queries: by the length of the history, and by columns such as country.

Legend: `N` rows of a task, `K` list length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle import Interval
from longtail.bundle.arrays import Int32
from longtail.bundle.ids import to_ids
from longtail.bundle.sets import distinct
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.metrics import LabelFacts
from longtail.trainer.evaluation.task import Task

HISTORY = "history"
"""Name of the grouping by the length of the history."""
_MOST = 20
"""Most groups of a column: its most frequent values; all other values are in `other`."""
_UNKNOWN, _OTHER = "unknown", "other"


@dataclass(frozen=True)
class Group:
    """Hold figures of the queries with one value of a column.

    Attributes:
        column: the column, or `history`.
        about: explanation of the value, unless the value is self-explanatory.
        queries, pairs: numbers of rows of the task and of pairs to find.
    """

    column: str
    value: str
    about: str
    queries: int
    pairs: int
    metrics: dict[str, Interval]

    @property
    def name(self) -> str:
        """Return column and value: `country = DE`."""
        return f"{self.column} = {self.value}"


def figures_by_group(
    columns: Sequence[str], dataset: Dataset, task: Task, top_NK: Int32, facts: LabelFacts
) -> list[Group]:
    """Compute every metric by group of queries: by `history` and by some columns.

    Args:
        columns: columns of the query table, or of the interactions if a query feature reads them there.
        top_NK: lists of label rows, int32 [N, K].

    Raises:
        DataError: a column is missing, or holds neither texts, numbers nor booleans.
    """
    lengths_N = task.past.lengths(task.rows_N)
    middle = int(np.median(lengths_N[lengths_N > 0])) if lengths_N.any() else 0
    about = {"new": "no known pair", "few": f"up to {middle:,} known pairs, the median", "many": f"over {middle:,}"}
    history_N = np.where(lengths_N == 0, 0, np.where(lengths_N <= middle, 1, 2))
    groupings = [(HISTORY, about, history_N)]
    groupings += [(name, *_values(name, dataset, task)) for name in columns]
    groups = []
    for name, values, code_N in groupings:
        for code, (value, words) in enumerate(values.items()):
            mask_N = code_N == code
            if mask_N.any():
                part = task.select_rows(mask_N)
                metrics, queries = part.metrics(top_NK[mask_N], facts), len(distinct(part.past.queries(part.rows_N)))
                groups.append(Group(name, value, words, queries, len(part.positives.keys), metrics))
    return groups


def list_records(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the groups' entries in `metrics.json`, by column and value."""
    record: dict[str, Any] = {}
    for group in groups:
        metrics = {name: interval.model_dump() for name, interval in group.metrics.items()}
        about = {"about": group.about} if group.about else {}
        figures = about | {"queries": group.queries, "pairs": group.pairs, "metrics": metrics}
        record.setdefault(group.column, {})[group.value] = figures
    return record


def check_group(name: str, dataset: Dataset) -> None:
    """Refuse a missing column or a column of other types; raises DataError."""
    _texts(name, _source(name, dataset)[name].combine_chunks())


def _texts(name: str, column: pa.Array) -> pa.Array:
    try:
        return to_ids(column)
    except TypeError:
        raise DataError(f"group {name!r}: expected texts, numbers or booleans, found {column.type}") from None


def _values(name: str, dataset: Dataset, task: Task) -> tuple[dict[str, str], Int32]:
    """Number a column's values by frequency.

    A value that is `other` itself joins the group of all remaining values, if there is one.

    Returns:
        The explanation of each value, by value, and int32 [N].
    """
    texts = pc.fill_null(_texts(name, _column(name, dataset, task)), _UNKNOWN).dictionary_encode()
    values, code_N = texts.dictionary.to_pylist(), texts.indices.to_numpy()
    counts = np.bincount(code_N, minlength=len(values))
    if len(values) > _MOST and _OTHER in values:
        counts[values.index(_OTHER)] = 0
    # Stable, so that of equally frequent values the first in the data comes first.
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(len(values), np.int32)
    rank[order] = np.arange(len(values))
    listed = {values[code]: "" for code in order[:_MOST]}
    if len(values) > _MOST:
        listed[_OTHER] = f"{len(values) - _MOST:,} values of {name}"
    return listed, np.minimum(rank, _MOST)[code_N]


def _column(name: str, dataset: Dataset, task: Task) -> pa.Array:
    """Return a column of a task's queries, [N]; raises DataError."""
    requests, source = dataset.requests, _source(name, dataset)
    if source is dataset.query_table:
        of_request = None if requests is None else requests.attributes
        rows = task.past.queries(task.rows_N) if of_request is None else of_request[task.past.requests(task.rows_N)]
    else:
        assert requests is not None
        assert requests.contexts is not None
        rows = requests.contexts[task.past.requests(task.rows_N)]
    return source[name].combine_chunks().take(pa.array(rows))


def _source(name: str, dataset: Dataset) -> pa.Table:
    """Return the table with a column of queries; raises DataError."""
    table, contexts = dataset.query_table, dataset.contexts
    if name == HISTORY:
        raise DataError(f"group {name!r} is not allowed because it names the known pairs; rename the column")
    for source in (table, contexts):
        if source is not None and name in source.column_names:
            return source
    names = [*(table.column_names if table is not None else []), *(contexts.column_names if contexts else [])]
    raise DataError(f"group {name!r}: expected a column of queries, found {', '.join(names) or 'none'}")
