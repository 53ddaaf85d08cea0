"""Recall of answers to queries of which little is known: nothing, attributes alone, or one choice.

    python -m benchmarks.unknown_queries RECIPE [--bundle RUN] [--set KEY=VALUE] [--k 20]

Test queries lose their id and their history. `answered` is what the service ranks by: the forecast of a recipe with
`[prior]`, else counts of all pairs. Recent popularity counts the newest share of them. With a bundle, the towers rank
the same queries at their default λ and μ, as before there was a rule; then queries with their attributes alone, and
queries with their last choice before the test pair alone.

Legend: `N` test queries, `B` a block of them, `L` labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from longtail.bundle import Bundle, Feature, Inputs
from longtail.bundle.arrays import Float32, Float64, Int32
from longtail.bundle.tower import onnx_session
from longtail.trainer import load_recipe
from longtail.trainer.config import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.evaluation.cooccurrence import HistoryEntries, TermOf
from longtail.trainer.evaluation.dial import Dial
from longtail.trainer.evaluation.task import Task
from longtail.trainer.prior import fit_forecast

SHARES = 0.5, 0.25, 0.1, 0.05, 0.02, 0.01
_BLOCK, _MOST = 256, 6_000
Scores = Callable[[Inputs, Float32], Float32]
"""Scores of every label from the towers' inputs and c, float32 [B, L] or [1, L]."""


def main(
    recipe: Path, bundle: Path | None = None, k: int = 20,
    override: Annotated[list[str] | None, typer.Option("--set")] = None,
) -> None:  # fmt: skip
    """Print recall of each way to answer."""
    job = load_recipe(recipe, override or [])
    dataset = read_dataset(job)
    known = dataset.before("test")
    popularity_L = log_popularity(job, dataset, known)
    counts = {"answered": popularity_L, "popularity": counts_of(known.labels, popularity_L)}
    if known.times is not None:
        newest = known.labels[np.argsort(known.times, kind="stable")]
        for share in SHARES:
            counts[f"recent {share:g}"] = counts_of(newest[-round(share * len(newest)) :], popularity_L)
    trained = None if bundle is None else Towers(Bundle.load(bundle), job, dataset)
    nothing = {name: constant(scores_L) for name, scores_L in counts.items()}
    report("nothing", job, dataset, known, nothing, trained, k, lambda _: False)
    if trained is None:
        return
    popular = {"popularity": constant(popularity_L)}
    own = job.data.query_id
    if any(feature.kind != "history" and feature.name != own for feature in trained.features):
        report(
            "attributes", job, dataset, known, popular, trained, k, lambda of: of.kind != "history" and of.name != own
        )
    if dataset.ordered and trained.term is not None:
        last = known.take(np.append(np.diff(known.queries) != 0, True))
        for weight in (0.5, 1, 2, 3, 6):
            popular[f"log π + {weight:g}c"] = with_term(popularity_L, weight)
        popular["towers + ωc"] = trained.with_term
        report("one choice", job, dataset, last, popular, trained, k, lambda of: of.kind == "history")


def log_popularity(recipe: Recipe, dataset: Dataset, known: Pairs) -> Float64:
    """Return what a query of which nothing is known is answered by, float64 [L]."""
    if recipe.prior.kind == "count":
        return np.log(counts_of(known.labels, dataset.label_ids) + 0.5)
    return fit_forecast(recipe, dataset, known).log_shares(whole=True)


def counts_of(labels: Int32, every: object) -> Float64:
    """Count pairs of every label, float64 [L]."""
    return np.bincount(labels, minlength=len(every)).astype(np.float64)  # type: ignore[arg-type]


def constant(scores_L: Float64) -> Scores:
    """Return the same scores for every query."""
    return lambda inputs, c: scores_L[None].astype(np.float32)  # noqa: ARG005


def with_term(popularity_L: Float64, weight: float) -> Scores:
    """Return log π + ω·c."""
    return lambda inputs, c_BL: (popularity_L + weight * c_BL).astype(np.float32)  # noqa: ARG005


class Towers:
    """The towers of a bundle at the default λ, μ and ω, for labels in the data's order."""

    def __init__(self, bundle: Bundle, recipe: Recipe, dataset: Dataset) -> None:
        if not dataset.label_ids.equals(bundle.labels.ids):
            raise ValueError("bundle: expected the labels of the recipe's data, in their order, received others")
        manifest = bundle.manifest
        self.features, self.term = manifest.query_features, bundle.cooccurrence
        self.read = Encoding.fit(recipe, dataset, dict(bundle.vocabularies), manifest.query_features).query
        self._bundle, self._session = bundle, onnx_session(bundle.query_model, "query_tower.onnx")
        dial = Dial.of_manifest(manifest).default
        self._weight, labels = dial.cooccurrence, bundle.labels
        self._prior_L = dial.bias_removal * labels.log_pn + dial.popularity * labels.log_pi
        self._prior_L = self._prior_L + (0 if labels.bias is None else labels.bias)

    def scores(self, inputs: Inputs, c: Float32) -> Float32:  # noqa: ARG002
        """Score without co-occurrence."""
        centre = np.array(self._bundle.manifest.centre or 0, np.float32)
        embedded = self._session.run(None, inputs)[0] - centre
        return np.asarray(embedded @ self._bundle.embeddings.T / self._bundle.manifest.temperature + self._prior_L)

    def with_term(self, inputs: Inputs, c_BL: Float32) -> Float32:
        """Score with co-occurrence."""
        return self.scores(inputs, c_BL) + np.float32(self._weight) * c_BL


def emptied(features: list[Feature], inputs: Inputs, keep: Callable[[Feature], bool]) -> Inputs:
    """Replace features by missing ones."""
    inputs = dict(inputs)
    for feature in features:
        for name in () if keep(feature) else feature.inputs:
            number = feature.kind == "number" and feature.boundaries is None and name == feature.name
            missing = (feature.missing or 0.0) if number else float(name.endswith("__missing"))
            inputs[name] = np.full_like(inputs[name], missing)
    return inputs


def report(
    what: str, recipe: Recipe, dataset: Dataset, known: Pairs, ways: dict[str, Scores], towers: Towers | None, k: int,
    keep: Callable[[Feature], bool],
) -> None:  # fmt: skip
    """Print recall@k of every way to rank test queries, of which only some features are kept."""
    growing = what == "one choice"
    held_out, past = dataset.with_past(dataset.test, known, "growing" if growing else "fixed")
    if growing:
        held_out = held_out.take(past.lengths(held_out.request_rows) == 1)
    config = recipe.evaluation.model_copy(
        update={"exclude_seen": growing and recipe.evaluation.exclude_seen, "least_history": 0, "ks": [k],
                "metric": f"recall@{k}", "metrics": [], "history": "growing" if growing else "fixed"}
    )  # fmt: skip
    task = Task.of(held_out, past, config, labels=len(dataset.label_ids), seed=recipe.seed, max_queries=_MOST)
    if towers is not None:
        ways = ways | {"towers": towers.scores}
    term = None
    if growing and towers is not None and towers.term is not None:
        term = TermOf(towers.term, HistoryEntries(past, recipe.history_events))
    lists: dict[str, list[Int32]] = {name: [] for name in ways}
    read = None if towers is None else towers.read.with_history(past)
    for rows_B in blocks(task.rows_N):
        inputs = {} if read is None or towers is None else emptied(towers.features, read.of_queries(rows_B), keep)
        c_BL = np.zeros((len(rows_B), 1), np.float32) if term is None else term(rows_B).toarray()
        for name, scores in ways.items():
            scores_BL = np.array(np.broadcast_to(scores(inputs, c_BL), (len(rows_B), len(dataset.label_ids))))
            if task.seen is not None:
                scores_BL[tuple(task.seen.seen(rows_B).T)] = -np.inf
            lists[name].append(np.argsort(-scores_BL, axis=1, kind="stable")[:, :k].astype(np.int32))
    positives = task.positives
    wanted_N = np.bincount(positives.query_rows, minlength=positives.queries)
    found = {name: (positives.hits(np.concatenate(top)).sum(axis=1) / wanted_N).mean() for name, top in lists.items()}
    row = " · ".join(f"{name} {recall:.4f}" for name, recall in found.items())
    print(f"{recipe.name}, {what}, {len(wanted_N):,} queries, recall@{k}: {row}", flush=True)


def blocks(rows_N: Int32) -> Iterator[Int32]:
    """Split rows into blocks."""
    yield from (rows_N[start : start + _BLOCK] for start in range(0, len(rows_N), _BLOCK))


if __name__ == "__main__":
    typer.run(main)
