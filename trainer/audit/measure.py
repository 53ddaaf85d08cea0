"""Measure lists of labels, compare baselines, and count leaks.

Legend: `E` entries of all lists, `N` queries of a task, `K` list length, `L` labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from longtail.bundle import BUCKET_NAMES, Interval
from longtail.bundle.arrays import Bools, Int32, Int64
from longtail.bundle.one_line import one_line
from longtail.bundle.sets import distinct, is_in
from longtail.tables.times import format_time
from longtail.trainer.audit.lists import ListColumns, ListEntries, match_ids, read_lists
from longtail.trainer.config import DataConfig, EvaluationConfig
from longtail.trainer.config.reading import format_errors
from longtail.trainer.config.rows import name_sources
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.loading import load_dataset
from longtail.trainer.data.past import Past
from longtail.trainer.errors import DataError, RecipeError
from longtail.trainer.evaluation.baselines import Interactions
from longtail.trainer.evaluation.comparison import Comparison, compare
from longtail.trainer.evaluation.groups import Group, figures_by_group
from longtail.trainer.evaluation.metrics import LabelFacts
from longtail.trainer.evaluation.ranking import define_buckets
from longtail.trainer.evaluation.task import VALID_QUERIES, HeldOut, Task

_SEED = 0
BEFORE_TRAIN_ENDS, BEFORE_OWN_TRAIN = "before_train_ends", "before_own_train"
"""Findings that need times."""


@dataclass(frozen=True)
class AuditInputs:
    """Name the tables and options of an audit.

    Args:
        lists: source of a table of lists.
        rank, score: column that orders the rows of a query; by default `rank`, `score` or the order of the rows.
        train: sources of interactions, like in a recipe; buckets and baselines come from these.
        valid: sources of more interactions of the queries' histories.
        test: sources of interactions to find.
        ks: list lengths; the first is that of the tables.
        queries, labels: tables of queries, with the columns of `groups`, and of the catalogue.
        exclude_seen: labels of a query's history may neither be listed nor found.
    """

    lists: Path | str
    train: list[str]
    test: list[str]
    query_id: str = "user_id"
    label_id: str = "item_id"
    timestamp: str | None = None
    rank: str | None = None
    score: str | None = None
    ks: tuple[int, ...] = (20,)
    queries: list[str] | None = None
    labels: list[str] | None = None
    groups: tuple[str, ...] = ()
    baselines: tuple[str, ...] = ("popularity", "item-kNN")
    buckets: str = "quantile"
    exclude_seen: bool = True
    valid: list[str] | None = None

    __repr__ = one_line

    def configs(self) -> tuple[DataConfig, EvaluationConfig]:
        """Return sections of a recipe; raises RecipeError."""
        try:
            data = DataConfig.model_validate({
                "train": self.train, "valid": self.valid, "test": self.test, "query_id": self.query_id,
                "label_id": self.label_id, "timestamp": self.timestamp, "queries": self.queries, "labels": self.labels,
            })  # fmt: skip
            evaluation = EvaluationConfig.model_validate({
                "ks": list(dict.fromkeys(self.ks)), "metric": f"recall@{self.ks[0]}", "groups": self.groups,
                "baselines": self.baselines, "buckets": self.buckets, "exclude_seen": self.exclude_seen,
            })  # fmt: skip
        except ValidationError as error:
            section = DataConfig if error.title == DataConfig.__name__ else EvaluationConfig
            message = format_errors(error.errors(), section)
            # The command has no option of that name: `--set` takes the recipe's key.
            raise RecipeError(f"--set evaluation.{message}" if message.startswith("buckets:") else message) from error
        if self.rank is not None and self.score is not None:
            raise RecipeError("rank and score are not allowed together because one orders a list; use one")
        if self.groups and self.queries is None:
            raise RecipeError(
                f"--group {self.groups[0]} is not allowed without --queries because groups are columns of that table; "
                "use --queries"
            )
        return data, evaluation


@dataclass(frozen=True)
class AuditFinding:
    """Count forbidden entries, pairs or queries."""

    name: str
    count: int
    total: int
    explanation: str

    def __str__(self) -> str:
        return f"{self.name}: {self.description}"

    @property
    def description(self) -> str:
        """Return the count with its explanation."""
        share = f" ({self.count / self.total:.1%})" if self.total else ""
        return f"{self.count:,} of {self.total:,}{share} {self.explanation}"


@dataclass(frozen=True)
class Bucket:
    """Count what a bucket holds: labels, training pairs, and pairs to find."""

    name: str
    labels: int
    train: int
    pairs: int


@dataclass(frozen=True)
class Audit:
    """Hold figures of lists.

    Attributes:
        metric: recall at the first k.
        listed: number of labels in the first k of every query's list, by bucket, int64 [N].
        notes: lines about what was left out, the order of lists, and baselines if none ran.
    """

    name: str
    metric: str
    queries: int
    pairs: int
    labels: int
    metrics: dict[str, Interval]
    buckets: list[Bucket]
    listed: dict[str, Int64]
    groups: list[Group]
    compared: Comparison | None
    findings: list[AuditFinding]
    notes: list[str]

    __repr__ = one_line


def audit(inputs: AuditInputs) -> Audit:
    """Measure lists against interactions.

    Raises:
        RecipeError: arguments do not go together.
        DataError: a table cannot be read, or its ids are not those of the others.
    """
    data, config = inputs.configs()
    k = max(config.ks)
    lists = read_lists(inputs.lists, ListColumns(inputs.query_id, inputs.label_id, inputs.rank, inputs.score), k)
    dataset = load_dataset(data, seed=_SEED, columns={"query": inputs.groups, "label": ()})
    source = name_sources(inputs.lists)
    query_rows = match_ids(lists.queries, dataset.query_ids, "queries", source)
    label_rows = match_ids(lists.labels, dataset.label_ids, "labels", source)
    named = len(dataset.label_ids)
    # Labels that only lists name are labels of the catalogue too, without pairs.
    label_rows[label_rows < 0] = np.arange(named, named + int((label_rows < 0).sum()))
    labels = max(named, int(label_rows.max()) + 1)
    if k > labels:
        raise DataError(f"--k {k} is not allowed because the catalogue has {labels:,} labels; use at most {labels:,}")
    queries = len(dataset.query_ids)
    past = Past.fixed(dataset.pairs_before("test"), queries=queries)
    # Counted as if seen labels were left out, so that the error can say how many there are.
    to_find = HeldOut.count(dataset.test, past, config.model_copy(update={"exclude_seen": True}), labels=labels)
    if to_find.repeated and not to_find.measured and inputs.exclude_seen:
        raise DataError(
            f"--test: expected pairs that are not in train or valid too, found {to_find.repeated:,} that all are; use "
            "--set evaluation.exclude_seen=false where a query may find a label again"
        )
    task = Task.create(dataset.test, past, config, labels=labels, seed=_SEED)
    aligned = _AlignedLists.of(lists, query_rows, label_rows, task)
    counts = np.bincount(dataset.train.labels, minlength=labels)
    bucket_L = define_buckets(config, counts).assign(counts)
    facts = LabelFacts(counts, bucket_L)
    learnt = Interactions(dataset.train, past, queries=queries, labels=labels, seed=_SEED, ordered=dataset.ordered)
    tuning = None
    if len(dataset.valid):
        valid_past = Past.fixed(dataset.train, queries=queries)
        valid = Task.create(dataset.valid, valid_past, config, labels=labels, seed=_SEED, max_queries=VALID_QUERIES)
        tuning = valid, replace(learnt, past=valid_past)
    compared, left_out = compare(task, aligned.top_NK, facts, learnt, config, tuning=tuning)
    compared = compared and replace(compared, subject="the recommender")
    pairs_L = np.bincount(task.positives.label_rows, minlength=labels)
    sums = [np.bincount(bucket_L, of_L, minlength=len(BUCKET_NAMES)).astype(int) for of_L in (None, counts, pairs_L)]
    top_NK = aligned.top_NK[:, : inputs.ks[0]]
    bucket_NK = np.where(top_NK < 0, -1, bucket_L[top_NK])
    return Audit(
        source, config.metric, len(task.rows_N), len(task.positives.keys), labels,
        task.metrics(aligned.top_NK, facts),
        [Bucket(name, *map(int, counts)) for name, *counts in zip(BUCKET_NAMES, *sums, strict=True)],
        {name: (bucket_NK == bucket).sum(axis=1) for bucket, name in enumerate(BUCKET_NAMES)},
        figures_by_group(config.groups, dataset, task, aligned.top_NK, facts),
        compared,
        _findings(aligned, dataset, task, to_find, inputs, named),
        [*left_out, f"Lists are ordered by {lists.order}", *_notes(aligned, lists, k), *dataset.report.lines("--")],
    )  # fmt: skip


@dataclass(frozen=True)
class _AlignedLists:
    """Lists by row of a task.

    Attributes:
        top_NK: label rows, int32; −1 where a list ends, and where it repeats a label.
        length_N: entries of each query's list, at most K.
        repeats: entries that repeat a label of their list.
        left_out: lists of queries with nothing to find.
    """

    top_NK: Int32
    length_N: Int64
    repeats: int
    left_out: int

    @classmethod
    def of(cls, lists: ListEntries, query_rows: Int32, label_rows: Int32, task: Task) -> _AlignedLists:
        query_row_E = query_rows[lists.query_E]
        in_task_E: Bools = is_in(query_row_E, task.rows_N)
        row_E = np.searchsorted(task.rows_N, query_row_E[in_task_E])
        label_E, rank_E = label_rows[lists.label_E[in_task_E]], lists.rank_E[in_task_E]
        length_N = np.bincount(row_E, minlength=len(task.rows_N))
        # Entries are in order of rank, so the first of a repeated label has its best rank.
        _, first = np.unique(row_E * np.int64(task.positives.labels) + label_E, return_index=True)
        top_NK = np.full((len(task.rows_N), task.k), -1, np.int32)
        top_NK[row_E[first], rank_E[first]] = label_E[first]
        left_out = int((~is_in(query_rows, task.rows_N)).sum())
        return cls(top_NK, length_N, len(row_E) - len(first), left_out)


def _findings(
    aligned: _AlignedLists, dataset: Dataset, task: Task, to_find: HeldOut, inputs: AuditInputs, named: int
) -> list[AuditFinding]:  # fmt: skip
    train, test, labels = dataset.pairs_before("test"), dataset.test, task.positives.labels
    entries, queries = int(aligned.length_N.sum()), len(task.rows_N)
    row_n, label_n = task.past.seen_labels(task.rows_N).T
    keys_NK = np.arange(queries)[:, None] * np.int64(labels) + aligned.top_NK
    seen_NK = is_in(keys_NK, distinct(row_n * labels + label_n)) & (aligned.top_NK >= 0)
    allowed = "" if inputs.exclude_seen else " (allowed by evaluation.exclude_seen=false)"
    findings = [
        AuditFinding(
            "seen_listed", int(seen_NK.sum()), entries,
            f"entries are labels of the query's history{allowed}",
        ),
        AuditFinding("seen_test", to_find.repeated, to_find.distinct, f"test pairs are in train or valid too{allowed}"),
        AuditFinding("repeated", aligned.repeats, entries, "entries repeat a label of their list, and find nothing"),
        AuditFinding(
            "unnamed", int((aligned.top_NK >= named).sum()), entries,
            f"entries are labels that no interaction{', nor --labels,' if inputs.labels else ''} names",
        ),
        AuditFinding(
            "without_list", int((aligned.length_N == 0).sum()), queries, "test queries have no list: they find nothing"
        ),
        AuditFinding(
            "short", int(((aligned.length_N > 0) & (aligned.length_N < task.k)).sum()), queries,
            f"test queries have a list of fewer than {task.k} labels",
        ),
    ]  # fmt: skip
    if train.times is not None and test.times is not None:
        newest, unit = float(train.times.max()), dataset.report.unit
        last_Q = np.full(len(dataset.query_ids), -np.inf)
        np.maximum.at(last_Q, train.queries, train.times)
        findings += [
            AuditFinding(
                BEFORE_TRAIN_ENDS, int((test.times < newest).sum()), len(test),
                f"test pairs are older than the newest pair of train and valid, {format_time(newest, unit)}: "
                "popularity and other queries tell of the future",
            ),
            AuditFinding(
                BEFORE_OWN_TRAIN, int((test.times < last_Q[test.queries]).sum()), len(test),
                "test pairs are older than a pair of train or valid of their own query",
            ),
        ]  # fmt: skip
    return findings


def _notes(aligned: _AlignedLists, lists: ListEntries, k: int) -> list[str]:
    notes = [] if lists.empty_files is None else [f"Lists: {lists.empty_files}"]
    if lists.longer:
        notes.append(
            f"{lists.longer:,} of {len(lists.queries):,} lists are longer than {k} labels: the rest is left out"
        )
    if aligned.left_out:
        notes.append(
            f"{aligned.left_out:,} of {len(lists.queries):,} lists are of queries without a test pair to find: they "
            "are left out of all figures"
        )
    return notes
