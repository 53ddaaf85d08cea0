"""Lists of a trained bundle, of baselines and of a peer for the same test queries, with times.

Legend: `N` test queries, `K` list length, `L` labels.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.baselines import Row, Trial
from longtail.bundle import Bundle, Interval
from longtail.bundle.arrays import Float32, Float64, Int32
from longtail.bundle.tower import onnx_session
from longtail.trainer import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.evaluation.baselines import top_labels
from longtail.trainer.evaluation.cooccurrence import HistoryEntries, TermOf
from longtail.trainer.evaluation.dial import Dial
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.ranking import tower_lists

_SASREC = Path(__file__).with_name("sasrec.py")


class Measurement:
    """Measure lists for the test queries of a recipe; buckets are those of the bundle."""

    def __init__(self, recipe: Recipe, bundle: Bundle) -> None:
        self.recipe, self.bundle, self.dataset = recipe, bundle, read_dataset(recipe)
        if not self.dataset.label_ids.equals(bundle.labels.ids):
            raise ValueError("bundle: expected the labels of the recipe's data, in their order, received others")
        self._trial = Trial(recipe, self.dataset)
        self.task, self._facts = self._trial.task, self._trial.facts
        queries, labels = int(bundle.manifest.training_data["training_queries"]), bundle.labels
        if bundle.forecast is not None:  # labels that appear within the test period are there, as in `evaluate`
            log_prior_L = bundle.forecast.log_popularity(whole=True).astype(np.float32)
            labels = replace(labels, log_popularity=log_prior_L)
        self.label_side = LabelSide.of_bundle(labels, bundle.embeddings, bundle.augmentation, training_queries=queries)

    def ours(self, seconds: float) -> Row:
        """Answer by the bundle at its default λ, μ and ω."""
        manifest, matrix = self.bundle.manifest, self.bundle.cooccurrence
        encoding = Encoding.fit(self.recipe, self.dataset, dict(self.bundle.vocabularies), manifest.query_features)
        features = encoding.query.with_history(self.task.past)
        session = onnx_session(self.bundle.query_model, "query_tower.onnx")
        dial = Dial.of_manifest(manifest).default
        lists, _ = tower_lists(
            self.task,
            lambda rows_B: session.run(None, features.of_queries(rows_B))[0],
            self.label_side,
            [dial.of_towers],
        )
        entries = HistoryEntries(self.task.past, self.recipe.history_events)
        (top_NK,) = lists.at([dial], None if matrix is None else TermOf(matrix, entries))
        return Row(f"Longtail ({dial})", top_NK, seconds, None)

    def baseline(self, name: str) -> Row | None:
        """Answer by a row of `BASELINES`, tuned on validation; None if it is not run on such data."""
        row = self._trial.answers(name)
        return None if isinstance(row, str) else row

    def law(self, log_odds_UP: Float64) -> Row:
        """Answer by the law of a shop, an upper bound for every method up to chance.

        Args:
            log_odds_UP: float64 [U, P] of users `u0`, `u1`, … and products `p0`, `p1`, …
        """
        users_Q, products_L = (
            np.array([int(id_[1:]) for id_ in ids.to_pylist()])
            for ids in (self.dataset.query_ids, self.dataset.label_ids)
        )
        data = self._trial.learnt_from(self._trial.known, self.task)
        lowest = np.float32(np.finfo(np.float32).min)

        def scores(rows_B: Int32) -> Float32:
            users_B = users_Q[self.task.past.queries(rows_B)]
            return np.maximum(log_odds_UP[users_B][:, products_L].astype(np.float32), lowest)

        return Row("the law itself", top_labels(self.task, data, scores), None, None)

    def sasrec(self, python: Path, folder: Path) -> Row | None:
        """Answer by the peer, in an environment of its own; None if pairs have no times and so no order."""
        dataset = self.dataset
        if dataset.train.times is None:
            return None
        if not (folder / "sasrec.json").exists():
            folder.mkdir(exist_ok=True)
            for name, pairs in (("train", dataset.train), ("valid", dataset.valid)):
                pq.write_table(_as_peers_read(pairs), folder / f"{name}.parquet")
            if features := _categories(dataset, self.recipe):
                pq.write_table(features, folder / "features.parquet")
            np.save(folder / "asked.npy", self.task.past.queries(self.task.rows_N))
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
        """Compute every metric of a method's lists."""
        return self.task.metrics(row.top_NK, self._facts)

    def ahead(self, ours: Row, other: Row) -> Interval:
        """Compute the lead of Longtail in the recipe's metric, paired by query."""
        metric = self.recipe.evaluation.metric
        (ours_N, denominator_N), (theirs_N, _) = (
            self.task.ratio(metric, row.top_NK, self._facts) for row in (ours, other)
        )
        return self.task.bootstrap.interval(ours_N - theirs_N, denominator_N)


def _as_peers_read(pairs: Pairs) -> pa.Table:
    """Convert pairs to a table with the column names of RecTools and times as datetimes."""
    assert pairs.times is not None
    times = pairs.times.astype(np.int64).astype("datetime64[us]")  # only the order of times is read
    weights = np.ones(len(pairs), np.float32)
    return pa.table({"user_id": pairs.queries, "item_id": pairs.labels, "weight": weights, "datetime": times})


def _categories(dataset: Dataset, recipe: Recipe) -> pa.Table | None:
    """List id features of the label table, except the label id, as (id, feature, value); None without any."""
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
