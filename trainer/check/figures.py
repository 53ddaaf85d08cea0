"""Everything that can be said of a recipe and its data without training: counts, splits, buckets, features, costs.

Legend: `L` labels, `Q` queries, `N` pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from longtail.bundle import BUCKET_NAMES, Inputs
from longtail.bundle.sets import distinct
from longtail.trainer.check.cost import Cost, cost_of
from longtail.trainer.check.limits import check_sizes
from longtail.trainer.config import FeatureConfig, Recipe, load_recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.data.times import in_words
from longtail.trainer.errors import TrainerError
from longtail.trainer.evaluation.ranking import buckets_for
from longtail.trainer.evaluation.task import HeldOut, seen_pairs, to_find

_QUERIES_LOOKED_AT = 20_000
_MANY_REPEATS, _MOSTLY_UNKNOWN, _MOSTLY_SEEN, _SOME_NEW = 0.2, 0.5, 0.3, 0.01
"""Shares from which on something is said."""


@dataclass(frozen=True)
class SplitFigures:
    """One split: pairs, distinct ones, queries, labels, what of them training has not, and the times it spans."""

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
    """One feature: its table and how many rows it has, and the share of values that read the out-of-vocabulary row or
    are missing.
    """

    tower: str
    name: str
    kind: str
    table: str | None
    rows: int | None
    unknown: float | None
    empty: float | None


@dataclass(frozen=True)
class Check:
    """What there is to say.

    Attributes:
        name: of the recipe, or the path of one that cannot be read.
        problems: what `fit` would refuse, one each.
        warnings: what it would not, and somebody should look at.
        rows: what was left out of the files' rows, and doubtful ones.
        queries, labels: Q and L.
        splits: by name.
        buckets: labels and training pairs by bucket.
        features: of both towers.
        cost: steps and memory; None where the data cannot be read.
    """

    name: str
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    queries: int = 0
    labels: int = 0
    splits: dict[str, SplitFigures] = field(default_factory=dict)
    buckets: dict[str, dict[str, int]] = field(default_factory=dict)
    features: list[FeatureFigures] = field(default_factory=list)
    cost: Cost | None = None

    @property
    def ok(self) -> bool:
        """Whether `fit` would begin to train."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """All of it, for machines."""
        return {"ok": self.ok} | asdict(self)


def check(recipe: Recipe | Path | str, *, overrides: Sequence[str] = ()) -> Check:
    """Read all that a recipe names, as `fit` would, and say what is there.

    Args:
        recipe: a recipe, or the path of its TOML file.
        overrides: of a recipe that is a path, `KEY=VALUE`.
    """
    try:
        made = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    except TrainerError as error:
        return Check(str(recipe), [str(error)])
    try:
        dataset = read_dataset(made)
    except TrainerError as error:
        return Check(made.name, str(error).split("\n"))
    problems = []
    encoding: Encoding | None = None
    try:
        check_sizes(made, dataset)
        encoding = Encoding.fit(made, dataset)
    except TrainerError as error:
        problems.append(str(error))
    splits = _splits(made, dataset)
    features = [] if encoding is None else _features(made, dataset, encoding)
    return Check(
        name=made.name,
        problems=problems,
        warnings=_warnings(made, splits, features),
        rows=dataset.report.lines(),
        queries=len(dataset.query_ids),
        labels=len(dataset.label_ids),
        splits=splits,
        buckets=_buckets(made, dataset),
        features=features,
        cost=None if encoding is None else cost_of(made, dataset, encoding),
    )


def _splits(recipe: Recipe, dataset: Dataset) -> dict[str, SplitFigures]:
    labels, excluded = len(dataset.label_ids), recipe.evaluation.exclude_seen
    made = {}
    known = dataset.train.take(slice(0))
    for name in ("train", "valid", "test"):
        pairs: Pairs = getattr(dataset, name)
        if not len(pairs):
            continue
        label_new_L, query_new_Q = np.ones(labels, bool), np.ones(len(dataset.query_ids), bool)
        label_new_L[dataset.train.labels] = query_new_Q[dataset.train.queries] = False
        queries, of_labels = distinct(pairs.queries), distinct(pairs.labels)
        once = len(to_find(pairs, seen_pairs(known, labels=labels, exclude_seen=False), labels=labels))
        times = pairs.times
        made[name] = SplitFigures(
            pairs=len(pairs),
            distinct=once,
            queries=len(queries),
            labels=len(of_labels),
            new_queries=int(query_new_Q[queries].sum()),
            new_labels=int(label_new_L[of_labels].sum()),
            on_new_labels=int(label_new_L[pairs.labels].sum()),
            first=None if times is None else in_words(float(times.min()), dataset.report.unit),
            last=None if times is None else in_words(float(times.max()), dataset.report.unit),
            to_find=None
            if name == "train"
            else HeldOut.of(
                pairs, known, labels=labels, exclude_seen=excluded, request_queries=dataset.request_queries
            ),
        )
        known = known.followed_by(pairs)
    return made


def _buckets(recipe: Recipe, dataset: Dataset) -> dict[str, dict[str, int]]:
    counts_L = dataset.label_counts()
    bucket_L = buckets_for(recipe.evaluation, counts_L).assign(counts_L)
    return {
        name: {
            "labels": int((bucket_L == at).sum()),
            "pairs": int(counts_L[bucket_L == at].sum()),
            "without a pair": int((counts_L[bucket_L == at] == 0).sum()),
        }
        for at, name in enumerate(BUCKET_NAMES)
    }


def _features(recipe: Recipe, dataset: Dataset, encoding: Encoding) -> list[FeatureFigures]:
    """Both towers' features; queries with training pairs are looked at, evenly, at most some thousands."""
    rows = distinct(dataset.train.request_rows)
    looked = rows[:: max(len(rows) // _QUERIES_LOOKED_AT, 1)].astype(np.int32)
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
            has_table = feature.table_name in encoding.vocabulary_rows or feature.kind == "text"
            size = encoding.vocabulary_rows.get(feature.table_name, feature.hash_rows) if has_table else None
            of_table = feature.table_name if has_table else None
            made.append(FeatureFigures(tower, feature.name, feature.kind, of_table, size, unknown, empty))
    return made


def _shares(feature: FeatureConfig, inputs: Inputs) -> tuple[float | None, float | None]:
    """Shares of ids that read the out-of-vocabulary row, and of bags without an entry."""
    ids, weights = inputs.get(feature.name), inputs.get(f"{feature.name}__weight")
    if ids is None or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
        return None, None
    if weights is None:
        return float((ids == 0).mean()), None
    filled = weights != 0
    empty = float((~filled.any(axis=1)).mean())
    if feature.kind == "text" or not filled.any():
        return None, empty
    return float((ids[filled] == 0).mean()), empty


def _warnings(recipe: Recipe, splits: dict[str, SplitFigures], features: list[FeatureFigures]) -> list[str]:
    """What somebody should look at before hours of training."""
    made = []
    train = splits["train"]
    if train.pairs - train.distinct > _MANY_REPEATS * train.pairs:
        made.append(
            f"train: {train.pairs - train.distinct:,} of {train.pairs:,} pairs are repeats of another "
            '(data.repeats = "drop" keeps each once)'
        )
    for name, split in splits.items():
        if (found := split.to_find) is not None:
            if found.seen > _MOSTLY_SEEN * found.distinct:
                made.append(
                    f"{name}: evaluation.exclude_seen leaves out {found.seen:,} of {found.distinct:,} distinct pairs"
                )
            if not found.measured:
                made.append(f"{name}: no pair is left to find")
            if split.on_new_labels > _SOME_NEW * split.pairs:
                share = split.on_new_labels / split.pairs
                made.append(
                    f"{name}: {split.on_new_labels:,} pairs ({share:.1%}) are of labels without a training pair"
                )
    for each in features:
        if each.unknown is not None and each.unknown > _MOSTLY_UNKNOWN:
            made.append(f"{each.tower} feature {each.name!r}: {each.unknown:.0%} of its values are unknown ids")
        if each.empty is not None and each.empty > _MOSTLY_UNKNOWN and each.kind != "history":
            made.append(f"{each.tower} feature {each.name!r}: {each.empty:.0%} of its values are missing")
    if recipe.data.timestamp is None and any(feature.kind == "history" for feature in recipe.query.features):
        made.append("query: histories without data.timestamp hold what came after a pair as well as what came before")
    return made
