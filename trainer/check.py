"""`longtail-train check`: all that can be said of a recipe and its data without training; loads no training framework.

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
from rich.table import Table

from longtail.bundle import BUCKET_NAMES, Inputs
from longtail.bundle.sets import distinct
from longtail.trainer.config import FeatureConfig, Recipe, load_recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.data.times import in_words
from longtail.trainer.errors import DataError, TrainerError
from longtail.trainer.evaluation.ranking import buckets_for
from longtail.trainer.evaluation.task import HeldOut, pair_keys
from longtail.trainer.limits import check_choice, check_display, check_sizes, warn_of_future

_COPIES = 4
"""Of the logits of a batch: themselves, their weights, their gradient, and what the loss keeps for it."""
_QUERIES = 20_000
"""Queries, evenly drawn, whose features are looked at."""
_MANY_REPEATS, _MOSTLY_UNKNOWN, _MOSTLY_SEEN, _SOME_NEW = 0.2, 0.5, 0.3, 0.01
"""Shares from which on there is a warning."""


@dataclass(frozen=True)
class SplitFigures:
    """One split: counts of pairs, queries and labels, those that training has not, and the times it spans."""

    pairs: int
    distinct: int
    queries: int
    labels: int
    new_queries: int
    new_labels: int
    on_new_labels: int
    first: str | None
    last: str | None
    to_find: HeldOut | None = None


@dataclass(frozen=True)
class FeatureFigures:
    """One feature: its table and the rows of it, and shares of values that are unknown ids or missing."""

    tower: str
    name: str
    kind: str
    table: str | None
    rows: int | None
    unknown: float | None
    empty: float | None


@dataclass(frozen=True)
class Check:
    """Findings about a recipe: `problems` that `fit` would refuse, `warnings`, `rows` left out, and figures."""

    name: str
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    queries: int = 0
    labels: int = 0
    splits: dict[str, SplitFigures] = field(default_factory=dict)
    buckets: dict[str, dict[str, int]] = field(default_factory=dict)
    features: list[FeatureFigures] = field(default_factory=list)
    cost: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Return whether `fit` would begin to train."""
        return not self.problems


def check(recipe: Recipe | Path | str, *, overrides: Sequence[str] = ()) -> Check:
    """Read all files that a recipe, or its TOML file with overrides `KEY=VALUE`, names, and report what is there."""
    name = str(recipe)
    try:
        made = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
        name = made.name
        dataset = read_dataset(made)
    except (TrainerError, DataError) as error:
        return Check(name, str(error).split("\n"))
    problems, features, cost = [], [], {}
    try:
        check_display(made, dataset)
        check_sizes(made, dataset)
        check_choice(made, dataset)
        encoding = Encoding.fit(made, dataset)
        features, cost = _features(made, dataset, encoding), cost_of(made, dataset, encoding)
    except (TrainerError, DataError) as error:
        problems.append(str(error))
    splits, counts_L = _splits(made, dataset), dataset.label_counts()
    buckets_L, buckets = buckets_for(made.evaluation, counts_L).assign(counts_L), {}
    for at, bucket in enumerate(BUCKET_NAMES):
        of = counts_L[buckets_L == at]
        buckets[bucket] = {"labels": len(of), "pairs": int(of.sum()), "without a pair": int((of == 0).sum())}
    return Check(
        name=name,
        problems=problems,
        warnings=[*_warnings(made, splits, features), *filter(None, [warn_of_future(dataset)])],
        rows=dataset.report.lines(),
        queries=len(dataset.query_ids),
        labels=len(dataset.label_ids),
        splits=splits,
        buckets=buckets,
        features=features,
        cost=cost,
    )


def _splits(recipe: Recipe, dataset: Dataset) -> dict[str, SplitFigures]:
    labels, exclude_seen = len(dataset.label_ids), recipe.evaluation.exclude_seen
    made: dict[str, SplitFigures] = {}
    known = dataset.train.take(slice(0))
    label_new_L, query_new_Q = np.ones(labels, bool), np.ones(len(dataset.query_ids), bool)
    label_new_L[dataset.train.labels] = query_new_Q[dataset.train.queries] = False
    for name in ("train", "valid", "test"):
        pairs: Pairs = getattr(dataset, name)
        if not len(pairs):
            continue
        found = None
        if name != "train":
            found = HeldOut.of(
                pairs, known, labels=labels, exclude_seen=exclude_seen, request_queries=dataset.request_queries
            )
        queries, of_labels = distinct(pairs.queries), distinct(pairs.labels)
        ends = [] if pairs.times is None else [float(pairs.times.min()), float(pairs.times.max())]
        first, last = [in_words(at, dataset.report.unit) for at in ends] or (None, None)
        made[name] = SplitFigures(
            pairs=len(pairs),
            distinct=len(distinct(pair_keys(pairs, labels))),
            queries=len(queries),
            labels=len(of_labels),
            new_queries=int(query_new_Q[queries].sum()),
            new_labels=int(label_new_L[of_labels].sum()),
            on_new_labels=int(label_new_L[pairs.labels].sum()),
            first=first,
            last=last,
            to_find=found,
        )
        known = known.followed_by(pairs)
    return made


def _features(recipe: Recipe, dataset: Dataset, encoding: Encoding) -> list[FeatureFigures]:
    """Compute figures of both towers' features, over some thousands of the queries with training pairs."""
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
                    unknown = max(unknown - empty, 0.0) / (1 - empty)  # a missing id reads that row, too
            name, hashed = feature.table_name, feature.hash_rows if feature.kind == "text" else None
            size = encoding.vocabulary_rows.get(name, hashed)
            made.append(
                FeatureFigures(tower, feature.name, feature.kind, None if size is None else name, size, unknown, empty)
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


def _warnings(recipe: Recipe, splits: dict[str, SplitFigures], features: list[FeatureFigures]) -> Iterator[str]:
    """Yield what to look at before hours of training."""
    train = splits["train"]
    if (repeats := train.pairs - train.distinct) > _MANY_REPEATS * train.pairs:
        yield f'train: {repeats:,} of {train.pairs:,} pairs are repeats (data.repeats = "drop" keeps each once)'
    for name, split in splits.items():
        if (held := split.to_find) is None:
            continue
        if held.seen > _MOSTLY_SEEN * held.distinct:
            yield f"{name}: evaluation.exclude_seen leaves out {held.seen:,} of {held.distinct:,} distinct pairs"
        if not held.measured:
            yield f"{name}: no pair is left to find"
        if (share := split.on_new_labels / split.pairs) > _SOME_NEW:
            yield f"{name}: {split.on_new_labels:,} pairs ({share:.1%}) are of labels without a training pair"
    for each in features:
        empty = None if each.kind == "history" else each.empty
        for found, words in ((each.unknown or 0, "unknown ids"), (empty or 0, "missing")):
            if found > _MOSTLY_UNKNOWN:
                yield f"{each.tower} feature {each.name!r}: {found:.0%} of its values are {words}"
    if recipe.data.timestamp is None and any(feature.kind == "history" for feature in recipe.query.features):
        yield "query: histories without data.timestamp hold what came after a pair as well as what came before"


def cost_of(recipe: Recipe, dataset: Dataset, encoding: Encoding) -> dict[str, int]:
    """Compute steps, bytes of memory without the training framework's, and multiplications of a step's logits.

    `data` is of pairs, feature tables, the labels' inputs, and lists of retrieved negatives and of neighbours; `batch`
    of the logits of a step's part, and of the cosines that neighbours are contrasted in.
    """
    visits = dataset.training_queries() if recipe.data.reduction == "sample" else len(dataset.train)
    part = min(recipe.training.batch_size, visits) // recipe.training.accumulate
    batch = part * recipe.training.accumulate
    sampler, labels = recipe.loss.sampler, len(dataset.label_ids)
    retrieved, near = recipe.loss.retrieved_negatives, recipe.loss.neighbours
    negatives = labels if sampler.name == "full" else sampler.negatives or 0
    negatives += (0 if retrieved is None else retrieved.negatives) + (part if sampler.of_the_batch else 0)
    sides = () if near is None else near.sides
    contrasted = negatives + part * len(sides)
    tables = {}  # rows and width, by name
    for feature in (*recipe.query.features, *recipe.label.features):
        name = feature.entry_table if feature.reads_label_tower else feature.table_name
        if name in encoding.vocabulary_rows:
            tables[name] = encoding.vocabulary_rows[name], feature.dim
        elif feature.kind == "text":
            tables[feature.table_name] = feature.hash_rows, feature.dim
    if recipe.model.label_bias:
        tables["label bias"] = labels + 1, 1
    numbers = sum(rows * width for rows, width in tables.values())
    kept = {
        "adam": 2 * numbers,
        "adagrad": sum(rows for rows, _ in tables.values()),
        "adagrad_elementwise": numbers,
        "sgd": numbers if any(recipe.optimizer.row_arguments.values()) else 0,
    }
    label_rows = {feature.table_name for feature in recipe.query.features if feature.reads_label_tower}
    pairs = (dataset.train, dataset.valid, dataset.test)
    arrays: list[Any] = [array for each in pairs for array in (each.queries, each.labels, each.weights, each.times)]
    arrays += [dataset.query_table, dataset.label_table, *encoding.label_inputs.values(), encoding.audience]
    data = sum(array.nbytes for array in arrays if array is not None)
    data += 0 if retrieved is None else 4 * retrieved.depth * len(distinct(dataset.train.request_rows))
    data += sum(4 * near.k * {"query": len(dataset.query_ids), "label": labels}[side] for side in sides) if near else 0
    return {
        "batch_size": batch,
        "negatives": negatives,
        "steps_per_epoch": visits // batch,
        "steps": visits // batch * recipe.training.epochs,
        "tables": 4 * (numbers + len(label_rows) * (labels + 1) * recipe.model.dim),
        "optimizer": 4 * kept.get(recipe.optimizer.embeddings, 0),
        "data": data,
        "batch": 4 * _COPIES * part * contrasted,
        "products": 3 * 2 * batch * contrasted * recipe.model.dim,
    }


def show(check: Check, console: Console) -> None:
    """Print a check: counts, splits, buckets, features, cost; problems at the end, where they are read."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    def table(columns: str, rows: Sequence[Sequence[Any]]) -> None:
        made = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
        for at, column in enumerate(columns.split("|")):
            made.add_column(column, justify="left" if at == 0 else "right", no_wrap=True)
        for row in rows:
            made.add_row(*(f"{it:,}" if isinstance(it, int) else f"{it:.1%}" if isinstance(it, float) else it or ""
                           for it in row))  # fmt: skip
        if rows:
            console.print("", made)

    if check.labels:
        say(f"[bold]{check.name}[/]: {check.queries:,} queries × {check.labels:,} labels")
    for line in check.rows:
        say(escape(line))
    splits = check.splits.items()
    counts = [(name, it.pairs, it.distinct, it.queries, it.labels,
               *((it.new_queries, it.new_labels, it.to_find.measured) if it.to_find else ()))
              for name, it in splits]  # fmt: skip
    table("split|pairs|distinct|queries|labels|new\nqueries|new\nlabels|to find", counts)
    table("split|from|to", [(name, it.first, it.last) for name, it in splits if it.first])
    pairs = sum(bucket["pairs"] for bucket in check.buckets.values()) or 1
    buckets = [(name, it["labels"], it["pairs"], it["pairs"] / pairs) for name, it in check.buckets.items()]
    table("bucket|labels|training pairs|share", buckets)
    features = [(f"{e.tower}: {e.name}", e.kind, e.table, e.rows, e.unknown, e.empty) for e in check.features]
    table("feature|kind|table|rows|unknown|missing", features)
    if cost := check.cost:
        bytes_of = {name: cost[name] for name in ("tables", "optimizer", "data", "batch")}
        say(
            f"\n{cost['steps_per_epoch']:,} steps an epoch, {cost['steps']:,} in all, of {cost['batch_size']:,} pairs "
            f"× {cost['negatives']:,} negatives: {cost['products'] / 1e9:.2g} GFLOP of logits a step\n"
            f"About {_bytes(sum(bytes_of.values()))} without the framework's own: "
            f"{', '.join(f'{name} {_bytes(size)}' for name, size in bytes_of.items())}"
        )
    for line in check.warnings:
        say(f"[yellow]Look at[/] {escape(line)}")
    for line in check.problems:
        say(f"[red]Wrong[/] {escape(line)}")
    say("[green]fit would train[/]" if check.ok else "[red]fit would refuse this[/]")


def _bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
