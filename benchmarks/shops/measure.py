"""Lists of a trained bundle and of baselines for the same test queries, with times.

Legend: `N` test queries, `K` list length, `L` labels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.baselines import Row, Trial
from longtail.bundle import Bundle, Interval
from longtail.bundle.arrays import Float32, Float64, Int32
from longtail.bundle.tower import onnx_session
from longtail.trainer import Recipe
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.evaluation.baselines import top_labels
from longtail.trainer.evaluation.cooccurrence import HistoryEntries, HistoryTerm
from longtail.trainer.evaluation.dial import Dial
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.ranking import RankedModel, tower_lists


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
            log_prior_L = bundle.forecast.log_popularity(include_future=True).astype(np.float32)
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
            RankedModel(lambda rows_B: session.run(None, features.query_inputs(rows_B))[0], self.label_side),
            [dial.of_towers],
        )
        entries = HistoryEntries(self.task.past, self.recipe.history_events)
        (top_NK,) = lists.at([dial], None if matrix is None else HistoryTerm(matrix, entries))
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
