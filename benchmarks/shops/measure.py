"""Lists of a trained bundle, of baselines and of a peer for the same test queries, and what each of them took.

Legend: `N` test queries, `K` list length, `L` labels.
"""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from longtail.bundle import Bundle, Interval, onnx_session
from longtail.bundle.arrays import Float32, Float64, Int32
from longtail.trainer import Recipe
from longtail.trainer.baseline_report import before_test
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.evaluation.baselines import BASELINES, Interactions, skipped, top_labels
from longtail.trainer.evaluation.comparison import tuned
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.ranking import LabelSide, rank
from longtail.trainer.evaluation.task import VALID_QUERIES, Task

_SASREC = Path(__file__).with_name("sasrec.py")


@dataclass(frozen=True)
class Row:
    """One method's answers to the test queries.

    Attributes:
        method: its name, with what was chosen on validation.
        top_NK: labels, best first, int32 [N, K]; −1 where a list ends early.
        seconds: of training and answering with what was chosen, and for ours of all that `fit` does; None of a law.
        choosing: seconds of the search on validation before that; None where `seconds` holds it.
    """

    method: str
    top_NK: Int32
    seconds: float | None
    choosing: float | None


class Measurement:
    """A data set of one recipe, and the figures of any lists for its test queries.

    Attributes:
        recipe: says how to split, and which metric chooses.
        dataset: as the recipe reads it.
        task: test queries, with the training and validation pairs known.
        label_side: of our bundle: buckets are its.
    """

    def __init__(self, recipe: Recipe, bundle: Bundle) -> None:
        self.recipe, self.bundle, self.dataset = recipe, bundle, read_dataset(recipe)
        if not self.dataset.label_ids.equals(bundle.labels.ids):
            raise ValueError("bundle: expected the labels of the recipe's data, in their order, received others")
        self._known = before_test(self.dataset)
        self.task = self._task(self.dataset.test, self._known)
        queries = int(bundle.manifest.training_data["training_queries"])
        self.label_side = LabelSide.of_bundle(
            bundle.labels, bundle.embeddings, bundle.augmentation, training_queries=queries
        )
        self._side: dict[str, Any] = {
            "buckets_L": self.label_side.buckets, "counts_L": self.label_side.counts, "inverse_propensity_L": None,
        }  # fmt: skip

    def ours(self, seconds: float) -> Row:
        """The bundle at its default λ and μ."""
        manifest = self.bundle.manifest
        encoding = Encoding.fit(self.recipe, self.dataset, dict(self.bundle.vocabularies), manifest.query_features)
        features = encoding.query.with_history(self._known, self.dataset.test)
        session = onnx_session(self.bundle.query_model, "query_tower.onnx")
        dial = Setting(manifest.bias_removal.default, manifest.popularity.default)
        (top_NK,), _ = rank(
            self.task.rows_N,
            lambda rows_B: session.run(None, features.of_queries(rows_B))[0],
            self.label_side,
            self.task.seen_keys,
            [dial],
            k=self.task.k,
            queries=len(self.dataset.query_ids),
            request_queries=self.dataset.request_queries,
        )
        return Row(f"Longtail ({dial})", top_NK, seconds, None)

    def baseline(self, name: str) -> Row | None:
        """A row of `BASELINES`, tuned on validation; None where it is not run on such data."""
        valid = self._task(self.dataset.valid, self.dataset.train, VALID_QUERIES)
        chosen_from = self._learnt_from(self.dataset.train, self.dataset.train)
        final = self.dataset.refit() if self.recipe.training.refit else self.dataset
        data = self._learnt_from(final.train, self._known)
        if skipped(name, data):
            return None
        baseline, began = BASELINES[name], time.perf_counter()
        settings = baseline.settings
        if baseline.grid:
            settings = tuned(baseline, valid, chosen_from, self.recipe.evaluation.metric, self._side)
        chosen = time.perf_counter()
        top_NK = top_labels(self.task, data, baseline.fit(data, settings))
        said = ", ".join(f"{key} {value:g}" for key, value in settings.items())
        return Row(f"{name} ({said})" if said else name, top_NK, time.perf_counter() - chosen, chosen - began)

    def law(self, log_odds_UP: Float64) -> Row:
        """The law that a shop was generated by: as good as any method can be, but for chance.

        Args:
            log_odds_UP: float64 [U, P] of users `u0`, `u1`, … and products `p0`, `p1`, …
        """
        users_Q, products_L = (
            np.array([int(id_[1:]) for id_ in ids.to_pylist()])
            for ids in (self.dataset.query_ids, self.dataset.label_ids)
        )
        data = self._learnt_from(self._known, self._known)
        lowest = np.float32(np.finfo(np.float32).min)

        def scores(rows_B: Int32) -> Float32:
            return np.maximum(log_odds_UP[users_Q[rows_B]][:, products_L].astype(np.float32), lowest)

        return Row("the law itself", top_labels(self.task, data, scores), None, None)

    def sasrec(self, python: Path, folder: Path) -> Row | None:
        """The peer's, in its own environment; None where pairs have no times and so no order."""
        dataset = self.dataset
        if dataset.train.times is None:
            return None
        if not (folder / "sasrec.json").exists():
            folder.mkdir(exist_ok=True)
            for name, pairs in (("train", dataset.train), ("valid", dataset.valid)):
                pq.write_table(_as_peers_read(pairs), folder / f"{name}.parquet")
            if features := _categories(dataset, self.recipe):
                pq.write_table(features, folder / "features.parquet")
            np.save(folder / "asked.npy", self.task.queries_N)
            subprocess.run(
                [str(python), str(_SASREC), str(folder), "--k", str(self.task.k), "--seed", str(self.recipe.seed)],
                check=True,
            )
        figures = json.loads((folder / "sasrec.json").read_text(encoding="utf-8"))
        top_NK = np.load(folder / "sasrec.npy")
        popular = self.baseline("popularity")
        assert popular is not None
        top_NK = np.where((top_NK < 0).all(axis=1)[:, None], popular.top_NK, top_NK)
        return Row(f"SASRec ({figures['epochs']} epochs)", top_NK, figures["seconds"], figures["choosing"])

    def metrics(self, row: Row) -> dict[str, Interval]:
        """Every metric of a method's lists."""
        return self.task.metrics(row.top_NK, **self._side)

    def ahead(self, ours: Row, other: Row) -> Interval:
        """The recipe's metric of ours less the other's, paired by query."""
        metric = self.recipe.evaluation.metric
        (ours_N, denominator_N), (theirs_N, _) = (
            self.task.ratio(metric, row.top_NK, **self._side) for row in (ours, other)
        )
        return self.task.bootstrap.interval(ours_N - theirs_N, denominator_N)

    def _task(self, held_out: Pairs, known: Pairs, max_queries: int | None = None) -> Task:
        return Task.of(
            held_out, known, self.recipe.evaluation, labels=len(self.dataset.label_ids), seed=self.recipe.seed,
            max_queries=max_queries, request_queries=self.dataset.request_queries,
        )  # fmt: skip

    def _learnt_from(self, train: Pairs, known: Pairs) -> Interactions:
        queries, labels = len(self.dataset.query_ids), len(self.dataset.label_ids)
        return Interactions(train, known, queries=queries, labels=labels, seed=self.recipe.seed)


def _as_peers_read(pairs: Pairs) -> pa.Table:
    """A table by the column names that RecTools has, times as datetimes."""
    assert pairs.times is not None
    times = pairs.times.astype(np.int64).astype("datetime64[us]")  # their order is all that is read
    weights = np.ones(len(pairs), np.float32)
    return pa.table({"user_id": pairs.queries, "item_id": pairs.labels, "weight": weights, "datetime": times})


def _categories(dataset: Dataset, recipe: Recipe) -> pa.Table | None:
    """The ids of the label table but for the own one, as (id, feature, value); None without."""
    own = recipe.data.label_id
    names = [feature.source for feature in recipe.label.features if feature.kind == "id" and feature.name != own]
    if dataset.label_table is None or not names:
        return None
    parts = [
        pa.table({
            "id": np.arange(len(dataset.label_ids)), "feature": pa.array([name] * len(dataset.label_ids)),
            "value": dataset.label_table[name].combine_chunks().cast(pa.string()).fill_null(""),
        })
        for name in names
    ]  # fmt: skip
    return pa.concat_tables(parts)
