"""`longtail-train check`: report on a recipe and its data without training or a training framework.

Legend: `L` labels, `Q` queries, `B` batch, `M` negatives of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from rich.console import Console
from rich.markup import escape

from longtail.bundle import BUCKET_NAMES, Inputs
from longtail.bundle.report_table import ReportTable
from longtail.bundle.sets import distinct
from longtail.tables.times import format_time
from longtail.trainer.config import FeatureConfig, Recipe, load_recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.errors import DataError, TrainerError
from longtail.trainer.evaluation.ranking import buckets_for
from longtail.trainer.evaluation.task import HeldOut, pair_keys
from longtail.trainer.limits import CHECKS, warn_of_future

_QUERIES = 20_000
"""Number of evenly spaced queries whose features are examined."""
_MANY_REPEATS, _MOSTLY_UNKNOWN, _MOSTLY_SEEN, _SOME_NEW = 0.2, 0.5, 0.3, 0.01
"""Shares from which a warning is given."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """Hold findings about a recipe: `problems` that `fit` would refuse, `warnings`, skipped `rows`, and figures.

    Attributes:
        splits: by name, numbers of pairs, queries and labels, of new queries and labels, and the first and last time.
        buckets: by name, numbers of labels and training pairs.
        features: by feature, its table and number of rows, and shares of values that are unknown ids or missing.
    """

    name: str
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    queries: int = 0
    labels: int = 0
    splits: dict[str, Row] = field(default_factory=dict)
    buckets: dict[str, Row] = field(default_factory=dict)
    features: list[Row] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Return whether `fit` would begin to train."""
        return not self.problems


def check(recipe: Recipe | Path | str, *, overrides: Sequence[str] = ()) -> Check:
    """Read all files of a recipe and report on them.

    Args:
        recipe: a recipe, or the path of its TOML file.
        overrides: `KEY=VALUE`, for a path.
    """
    name = str(recipe)
    try:
        made = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
        name = made.name
        dataset = read_dataset(made)
    except (TrainerError, DataError) as error:
        return Check(name, str(error).split("\n"))
    problems, features, steps = list[str](), list[Row](), dict[str, int]()
    for check in CHECKS:
        try:
            check(made, dataset)
        except (TrainerError, DataError) as error:
            problems.append(str(error))
    try:
        encoding = Encoding.fit(made, dataset)
        features = _features(made, dataset, encoding)
        steps = _steps(made, dataset)
    except (TrainerError, DataError) as error:
        problems.append(str(error))
    splits, counts_L = _splits(made, dataset), dataset.label_counts()
    buckets_L, buckets = buckets_for(made.evaluation, counts_L).assign(counts_L), dict[str, Row]()
    for at, bucket in enumerate(BUCKET_NAMES):
        of = counts_L[buckets_L == at]
        share = float(of.sum() / max(counts_L.sum(), 1))
        buckets[bucket] = {"labels": len(of), "training pairs": int(of.sum()), "share": share}
    warnings = [*_warnings(made, splits, features), *filter(None, [warn_of_future(dataset)])]
    return Check(
        name, problems, warnings, dataset.report.lines(), len(dataset.query_ids), len(dataset.label_ids), splits,
        buckets, features, steps,
    )  # fmt: skip


def _splits(recipe: Recipe, dataset: Dataset) -> dict[str, Row]:
    labels, made, known = len(dataset.label_ids), dict[str, Row](), dataset.train.take(slice(0))
    label_new_L, query_new_Q = np.ones(labels, bool), np.ones(len(dataset.query_ids), bool)
    label_new_L[dataset.train.labels] = query_new_Q[dataset.train.queries] = False
    for name in ("train", "valid", "test"):
        pairs: Pairs = getattr(dataset, name)
        if not len(pairs):
            continue
        queries, of_labels = distinct(pairs.queries), distinct(pairs.labels)
        made[name] = {
            "pairs": len(pairs),
            "distinct": len(distinct(pair_keys(pairs, labels))),
            "queries": len(queries),
            "labels": len(of_labels),
        }
        if pairs.times is not None:
            ends = (float(pairs.times.min()), float(pairs.times.max()))
            made[name] |= dict(
                zip(("first", "last"), (format_time(at, dataset.report.unit) for at in ends), strict=True)
            )
        if name != "train":
            config = recipe.evaluation
            found = HeldOut.of(*dataset.with_past(pairs, known, config.history), config, labels=labels)
            made[name] |= {
                "new queries": int(query_new_Q[queries].sum()),
                "new labels": int(label_new_L[of_labels].sum()),
                "on new labels": int(label_new_L[pairs.labels].sum()),
                "short": found.short,
                "seen": found.seen,
                "to find": found.measured,
            }
        known = known.followed_by(pairs)
    return made


def _features(recipe: Recipe, dataset: Dataset, encoding: Encoding) -> list[Row]:
    """Compute figures of both towers' features, over a few thousand queries with training pairs."""
    rows = distinct(dataset.train.request_rows)
    looked = rows[:: max(len(rows) // _QUERIES, 1)].astype(np.int32)
    sides = (
        ("query", recipe.query.features, encoding.query.of_queries(looked), dataset.query_table),
        ("label", recipe.label.features, encoding.label_inputs, dataset.label_table),
    )
    made = []
    for tower, features, inputs, of_side in sides:
        for feature in features:
            table = dataset.contexts if feature.origin == "row" else of_side
            unknown, empty = _shares(feature, inputs)
            if table is not None and feature.source in table.column_names and feature.kind not in ("bag", "text"):
                empty = float(pc.mean(pc.is_null(table[feature.source], nan_is_null=True)).as_py())
                if unknown is not None and tower == "label" and empty < 1:
                    unknown = max(unknown - empty, 0.0) / (1 - empty)  # missing ids read the out-of-vocabulary row too
            size = encoding.vocabulary_rows.get(feature.table_name, feature.table_rows)
            made.append(
                {
                    "feature": f"{tower} {feature.name}",
                    "kind": feature.kind,
                    "table": None if size is None else feature.table_name,
                    "rows": size,
                    "unknown": unknown,
                    "missing": empty,
                }
            )
    return made


def _shares(feature: FeatureConfig, inputs: Inputs) -> tuple[float | None, float | None]:
    """Compute shares of ids that read the out-of-vocabulary row, and of bags without an entry."""
    ids, weights = inputs.get(feature.name), inputs.get(f"{feature.name}__weight")
    if ids is None or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
        return None, None
    if weights is None:
        return float((ids == 0).mean()), None
    filled = weights != 0
    empty = float((~filled.any(axis=1)).mean())
    unknown = None if feature.kind == "text" or not filled.any() else float((ids[filled] == 0).mean())
    return unknown, empty


def _warnings(recipe: Recipe, splits: dict[str, Row], features: list[Row]) -> Iterator[str]:
    """Yield warnings that are worth a look before hours of training."""
    train = splits["train"]
    if (repeats := train["pairs"] - train["distinct"]) > _MANY_REPEATS * train["pairs"]:
        yield f'train: {repeats:,} of {train["pairs"]:,} pairs are repeats (data.repeats = "drop" keeps each once)'
    for name, split in splits.items():
        if name == "train":
            continue
        distinct_pairs = split["short"] + split["seen"] + split["to find"]
        for key, count in (("exclude_seen", split["seen"]), ("least_history", split["short"])):
            if count > _MOSTLY_SEEN * distinct_pairs:
                yield f"{name}: evaluation.{key} leaves out {count:,} of {distinct_pairs:,} distinct pairs"
        if (share := split["on new labels"] / split["pairs"]) > _SOME_NEW:
            yield f"{name}: {split['on new labels']:,} pairs ({share:.1%}) are of labels without a training pair"
    for each in features:
        missing = 0 if each["kind"] == "history" else each["missing"]
        for found, words in ((each["unknown"] or 0, "unknown ids"), (missing or 0, "missing")):
            if found > _MOSTLY_UNKNOWN:
                tower, name = each["feature"].split(" ", 1)
                yield f"{tower} feature {name!r}: {found:.0%} of its values are {words}"
    if recipe.data.timestamp is None and any(feature.kind == "history" for feature in recipe.query.features):
        yield "query: histories without data.timestamp hold what came after a pair as well as what came before"


def _steps(recipe: Recipe, dataset: Dataset) -> dict[str, int]:
    """Count steps, pairs per step, and negatives per pair."""
    visits = dataset.training_queries() if recipe.data.reduction == "sample" else len(dataset.train)
    part = min(recipe.training.batch_size, visits) // recipe.training.accumulate
    batch = part * recipe.training.accumulate
    sampler, retrieved = recipe.loss.sampler, recipe.loss.retrieved_negatives
    negatives = len(dataset.label_ids) if sampler.name == "full" else sampler.argument("negatives") or 0
    negatives += (0 if retrieved is None else retrieved.negatives) + (part if sampler.of_the_batch else 0)
    steps = visits // batch if batch else 0
    return {
        "batch_size": batch, "negatives": negatives, "steps_per_epoch": steps, "steps": steps * recipe.training.epochs
    }  # fmt: skip


def show(check: Check, console: Console) -> None:
    """Print a check: counts, splits, buckets, features and cost, with problems at the end."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    def text(value: object) -> str:
        if isinstance(value, int | float):
            return f"{value:,}" if isinstance(value, int) else f"{value:.1%}"
        return "" if value is None else str(value)

    def table(rows: Sequence[Row]) -> None:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        if rows:
            cells = [[text(row.get(column)) for column in columns] for row in rows]
            console.print("", ReportTable(columns, cells).rich())

    if check.labels:
        say(f"[bold]{check.name}[/]: {check.queries:,} queries × {check.labels:,} labels")
    for line in check.rows:
        say(escape(line))
    hidden = ("first", "last", "on new labels", "short", "seen")
    splits = [{"split": name, **split} for name, split in check.splits.items()]
    table([{key: value for key, value in split.items() if key not in hidden} for split in splits])
    table([{key: each[key] for key in ("split", "first", "last")} for each in splits if "first" in each])
    table([{"bucket": name, **bucket} for name, bucket in check.buckets.items()])
    table(check.features)
    if steps := check.steps:
        say(
            f"\n{steps['steps_per_epoch']:,} steps an epoch, {steps['steps']:,} in all, "
            f"of {steps['batch_size']:,} pairs × {steps['negatives']:,} negatives"
        )
    for line in check.warnings:
        say(f"[yellow]Look at[/] {escape(line)}")
    for line in check.problems:
        say(f"[red]Wrong[/] {escape(line)}")
    say("[green]fit would train[/]" if check.ok else "[red]fit would refuse this[/]")
