"""`longtail-train check`: report on a recipe and its data without training or a training framework.

Legend: `L` labels, `Q` queries, `B` batch, `M` negatives of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from longtail.trainer.errors import DataError, RecipeError, TrainerError
from longtail.trainer.evaluation.task import HeldOut, pair_keys
from longtail.trainer.limits import assign_buckets, count_held_out, find_refusals, warn_of_future

_QUERIES = 20_000
"""Number of evenly spaced queries whose features are examined."""
_MANY_REPEATS, _MOSTLY_UNKNOWN, _MOSTLY_SEEN, _SOME_NEW = 0.2, 0.5, 0.3, 0.01
"""Shares from which a warning is given."""
Row = dict[str, Any]


@dataclass(frozen=True)
class CheckReport:
    """Hold findings about a recipe and its data, for `check`, `prepare` and `fit`.

    Attributes:
        problems: what `fit` would refuse.
        rows: lines about rows: skipped, doubtful, and without an effect.
        splits: by name, numbers of pairs, queries and labels, of new queries and labels, and the first and last time.
        held_out: by name, numbers of pairs that can be found, and of others.
        buckets: by name, numbers of labels and training pairs.
        features: by feature, its table and number of rows, and shares of values that are unknown ids or missing.
    """

    name: str
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    queries: int = 0
    labels: int = 0
    loss: str = ""
    splits: dict[str, Row] = field(default_factory=dict)
    held_out: dict[str, HeldOut] = field(default_factory=dict)
    buckets: dict[str, Row] = field(default_factory=dict)
    features: list[Row] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Return whether `fit` would begin to train."""
        return not self.problems

    def lines(self) -> list[str]:
        """Return the head and findings about rows, in Rich markup."""
        words = {"train": "training", "valid": "validation", "test": "test"}
        pairs = ", ".join(f"{self.splits.get(name, {'pairs': 0})['pairs']:,} {word}" for name, word in words.items())
        head = f"[bold]{escape(self.name)}[/]: {self.queries:,} queries × {self.labels:,} labels; {pairs} pairs"
        held_out = [
            f"{name.capitalize()}: {pairs}" for name, pairs in self.held_out.items() if pairs.measured < pairs.pairs
        ]
        return [f"{head}; {escape(self.loss)}", *map(escape, [*self.rows, *held_out])]


def check(recipe: Recipe | Path | str, *, overrides: Sequence[str] = ()) -> CheckReport:
    """Read all files of a recipe and report on them.

    Custom layers are built, for which Keras is loaded.

    Args:
        recipe: a recipe, or the path of its TOML file.
        overrides: `KEY=VALUE`, for a path.
    """
    name = str(recipe)
    try:
        checked = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
        name = checked.name
        dataset = read_dataset(checked)
    except (TrainerError, DataError) as error:
        return CheckReport(name, str(error).split("\n"))
    report = examine(checked, dataset)
    report.problems.extend(map(str, find_refusals(checked, dataset, report.held_out)))
    try:
        report.features.extend(_features(checked, dataset, Encoding.fit(checked, dataset)))
        report.steps.update(_steps(checked, dataset))
    except (TrainerError, DataError) as error:
        report.problems.append(str(error))
    report.warnings.extend(_warn_of_features(report.features))
    if report.ok and checked.own_layers:
        from longtail.trainer.export.trial import try_own_layers  # loads Keras

        try:
            try_own_layers(checked)
        except RecipeError as error:
            report.problems.append(str(error))
    return report


def examine(recipe: Recipe, dataset: Dataset) -> CheckReport:
    """Count a data set's rows, splits and buckets."""
    held_out = count_held_out(recipe, dataset)
    splits, counts_L = _splits(dataset, held_out), dataset.label_counts()
    buckets_L, buckets = assign_buckets(recipe, dataset), dict[str, Row]()
    for bucket, name in enumerate(BUCKET_NAMES):
        counts = counts_L[buckets_L == bucket]
        share = float(counts.sum() / max(counts_L.sum(), 1))
        buckets[name] = {"labels": len(counts), "training pairs": int(counts.sum()), "share": share}
    return CheckReport(
        recipe.name, [], [*_warnings(recipe, splits), *filter(None, [warn_of_future(dataset)])], _rows(recipe, dataset),
        len(dataset.query_ids), len(dataset.label_ids), str(recipe.loss), splits, held_out, buckets,
    )  # fmt: skip


def _rows(recipe: Recipe, dataset: Dataset) -> list[str]:
    rows = []
    if dataset.requests is not None:
        requests = len(dataset.requests.queries)
        rows.append(f"{requests:,} distinct requests, by context and attributes; each is ranked separately")
    if (objectives := dataset.train.objectives) is not None:
        counts = np.bincount(objectives, minlength=len(recipe.objectives))
        pairs = ", ".join(f"{name} {count:,}" for name, count in zip(recipe.objectives, counts, strict=True))
        rows.append(f"Objectives, by training pairs: {pairs}")
    if dataset.impressions is not None:
        impressions = len(dataset.impressions.ids)
        rows.append(f"{impressions:,} impressions, of weight {recipe.loss.impressions:g} if not chosen")
    paired = [pairs.queries for pairs in (dataset.train, dataset.valid, dataset.test)]
    if unpaired := len(dataset.query_ids) - len(distinct(np.concatenate(paired))):
        rows.append(f"{unpaired:,} of the queries have no label: nothing is learned from them or measured on them")
    return [*rows, *dataset.report.lines()]


def _splits(dataset: Dataset, held_out: dict[str, HeldOut]) -> dict[str, Row]:
    labels, splits = len(dataset.label_ids), dict[str, Row]()
    label_new_L, query_new_Q = np.ones(labels, bool), np.ones(len(dataset.query_ids), bool)
    label_new_L[dataset.train.labels] = query_new_Q[dataset.train.queries] = False
    for name in ("train", "valid", "test"):
        pairs: Pairs = getattr(dataset, name)
        if not len(pairs):
            continue
        query_rows, label_rows = distinct(pairs.queries), distinct(pairs.labels)
        row = splits[name] = {
            "pairs": len(pairs),
            "distinct": len(distinct(pair_keys(pairs, labels))),
            "queries": len(query_rows),
            "labels": len(label_rows),
        }
        if pairs.times is not None:
            for key, time in (("first", pairs.times.min()), ("last", pairs.times.max())):
                row[key] = format_time(float(time), dataset.report.unit)
        if name in held_out:
            row |= {
                "new queries": int(query_new_Q[query_rows].sum()),
                "new labels": int(label_new_L[label_rows].sum()),
                "on new labels": int(label_new_L[pairs.labels].sum()),
                "short": held_out[name].short,
                "seen": held_out[name].repeated,
                "to find": held_out[name].measured,
            }
    return splits


def _features(recipe: Recipe, dataset: Dataset, encoding: Encoding) -> list[Row]:
    """Compute figures of features, over a sample of queries."""
    requests = distinct(dataset.train.request_rows)
    # Every n-th query, so that the sample is the same in every run.
    sample = requests[:: max(len(requests) // _QUERIES, 1)].astype(np.int32)
    sides = (
        ("query", recipe.query.features, encoding.query.query_inputs(sample), dataset.query_table),
        ("label", recipe.label.features, encoding.label_inputs, dataset.label_table),
    )
    rows = []
    for tower, features, inputs, of_side in sides:
        for feature in features:
            table = dataset.contexts if feature.origin == "row" else of_side
            unknown, empty = _shares(feature, inputs)
            if table is not None and feature.source in table.column_names and feature.kind not in ("bag", "text"):
                empty = float(pc.mean(pc.is_null(table[feature.source], nan_is_null=True)).as_py())
                if unknown is not None and tower == "label" and empty < 1:
                    unknown = max(unknown - empty, 0.0) / (1 - empty)  # missing ids read the out-of-vocabulary row too
            size = encoding.vocabulary_rows.get(feature.table_name, feature.table_rows)
            rows.append(
                {
                    "feature": f"{tower} {feature.name}",
                    "kind": feature.kind,
                    "table": None if size is None else feature.table_name,
                    "rows": size,
                    "unknown": unknown,
                    "missing": empty,
                }
            )
    return rows


def _shares(feature: FeatureConfig, inputs: Inputs) -> tuple[float | None, float | None]:
    """Compute shares of unknown ids and of empty bags."""
    ids, weights = inputs.get(feature.name), inputs.get(f"{feature.name}__weight")
    if ids is None or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
        return None, None
    if weights is None:
        return float((ids == 0).mean()), None
    filled = weights != 0
    empty = float((~filled.any(axis=1)).mean())
    unknown = None if feature.kind == "text" or not filled.any() else float((ids[filled] == 0).mean())
    return unknown, empty


def _warnings(recipe: Recipe, splits: dict[str, Row]) -> Iterator[str]:
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
    if recipe.data.timestamp is None and any(feature.kind == "history" for feature in recipe.query.features):
        yield "query: histories without data.timestamp hold what came after a pair as well as what came before"


def _warn_of_features(features: Sequence[Row]) -> Iterator[str]:
    for row in features:
        missing = 0 if row["kind"] == "history" else row["missing"]
        for share, words in ((row["unknown"] or 0, "unknown ids"), (missing or 0, "missing")):
            if share > _MOSTLY_UNKNOWN:
                tower, name = row["feature"].split(" ", 1)
                yield f"{tower} feature {name!r}: {share:.0%} of its values are {words}"


def _steps(recipe: Recipe, dataset: Dataset) -> dict[str, int]:
    """Count steps, pairs per step, and negatives per pair."""
    visits = dataset.count_visits(one_label_per_query=recipe.data.reduction == "sample")
    part = min(recipe.training.batch_size, visits) // recipe.training.accumulate
    batch = part * recipe.training.accumulate
    sampler, retrieved = recipe.loss.sampler, recipe.loss.retrieved_negatives
    negatives = len(dataset.label_ids) if sampler.name == "full" else sampler.argument("negatives") or 0
    negatives += (0 if retrieved is None else retrieved.negatives) + (part if sampler.of_the_batch else 0)
    steps = visits // batch if batch else 0
    return {
        "batch_size": batch, "negatives": negatives, "steps_per_epoch": steps, "steps": steps * recipe.training.epochs
    }  # fmt: skip


def print_summary(report: CheckReport, say: Callable[[str], object]) -> None:
    """Print the lines and warnings of a report."""
    for line in [*report.lines(), *(f"[yellow]Look at[/] {escape(warning)}" for warning in report.warnings)]:
        say(line)


def show(report: CheckReport, console: Console) -> None:
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

    for line in report.lines() if report.labels else ():
        say(line)
    hidden = ("first", "last", "on new labels", "short", "seen")
    splits = [{"split": name, **split} for name, split in report.splits.items()]
    table([{key: value for key, value in split.items() if key not in hidden} for split in splits])
    table([{key: split[key] for key in ("split", "first", "last")} for split in splits if "first" in split])
    table([{"bucket": name, **bucket} for name, bucket in report.buckets.items()])
    table(report.features)
    if steps := report.steps:
        say(
            f"\n{steps['steps_per_epoch']:,} steps an epoch, {steps['steps']:,} in all, "
            f"of {steps['batch_size']:,} pairs × {steps['negatives']:,} negatives"
        )
    for line in report.warnings:
        say(f"[yellow]Look at[/] {escape(line)}")
    for line in report.problems:
        say(f"[red]Wrong[/] {escape(line)}")
    say("[green]fit would train[/]" if report.ok else "[red]fit would refuse this[/]")
