"""Answer a few held-out queries at two λ, as examples of the dial.

Legend: `S` settings, `N` queries, `K` list length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from longtail.bundle import BUCKET_NAMES
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.evaluation.cooccurrence import HistoryTerm, TowerLists
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.task import Task

_QUERIES, _ENTRIES, _ANSWERS = 5, 3, 5
_TITLES = ("title", "name")


@dataclass(frozen=True)
class Example:
    """Hold one query with its answers.

    Attributes:
        history: titles of the last labels, newest first.
        chosen: titles of the held-out labels.
        answers: title and bucket of the first labels at each λ.
    """

    query_id: str
    history: list[str]
    chosen: list[str]
    answers: dict[float, list[tuple[str, str]]]


def example_task(task: Task, seed: int) -> Task:
    """Draw the queries of the examples from a task by seed."""
    size = len(task.rows_N)
    drawn_N = np.zeros(size, np.bool_)
    drawn_N[np.random.default_rng(seed).choice(size, min(_QUERIES, size), replace=False)] = True
    return task.select_rows(drawn_N)


def example_settings(default: Setting) -> list[Setting]:
    """Return two settings that differ in λ: 0 and the default, or 0 and 1 if the default is 0."""
    return [default._replace(bias_removal=0.0), default if default.bias_removal else default._replace(bias_removal=1.0)]


def examples(
    task: Task, lists: TowerLists, term: HistoryTerm | None, settings: Sequence[Setting], dataset: Dataset,
    display: Sequence[str],
) -> list[Example]:  # fmt: skip
    """Describe queries with their lists at some settings."""
    top_SNK, title_of = lists.select_lists(settings, term), _titles(dataset, display)
    buckets_L, result = lists.label_side.buckets, []
    query_N, positives = task.past.queries(task.rows_N), task.positives
    for i, row in enumerate(task.rows_N):
        history_labels = task.past.seen_labels(np.array([row]))[:, 1]
        chosen = positives.label_rows[positives.keys // positives.labels == i]
        answers = {
            setting.bias_removal: [(title_of(label), BUCKET_NAMES[buckets_L[label]]) for label in top_K if label >= 0]
            for setting, top_K in zip(settings, top_SNK[:, i, :_ANSWERS], strict=True)
        }
        history = [title_of(label) for label in history_labels[::-1][:_ENTRIES]]
        query_id = str(dataset.query_ids[int(query_N[i])])
        result.append(Example(query_id, history, [title_of(label) for label in chosen[:_ENTRIES]], answers))
    return result


def _titles(dataset: Dataset, display: Sequence[str]) -> Callable[[int], str]:
    """Create a function from a label's row to its title: a column of that name, else a text, else the id."""
    table = dataset.label_table
    texts = [
        name for name in display if table is not None and pa.types.is_string(table.schema.field(name).type)
    ]  # fmt: skip
    title_columns = [name for name in texts if name.lower() in _TITLES] or texts
    ids = dataset.label_ids
    if table is None or not title_columns:
        return lambda label: str(ids[int(label)])
    titles = table[title_columns[0]]
    return lambda label: titles[int(label)].as_py() or str(ids[int(label)])
