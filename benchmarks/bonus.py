"""Cost of bonus and decay in a request, and what a re-sort by decay of the best 100 misses.

    python -m benchmarks.bonus                      # 100,000 labels of ivf_flat, vectors of `index_recall`

The dates of labels are uniform over two years. Requests of one query, k = 20, take turns; times are of one core,
medians of the fastest of their rounds, as ratios to a release without coordinates for bonus and decay. The re-sort
takes the best 100 or 1,000 labels by score and sorts them by the score with decay, as a store does after its search.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from time import perf_counter, process_time, time
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import typer

from benchmarks.index_recall import synthetic_bundle
from longtail.bundle import Bundle, Priors, Tower
from longtail.index import IndexSpec
from longtail.index.building.priors import DerivedPriors
from longtail.index.building.tuning import tune_index
from longtail.serving import Retriever
from longtail.serving.core.queries import Query

_K, _DAYS = 20, 730
_HALF_LIVES = ("1d", "7d", "30d", "180d")
_REQUESTS: dict[str, dict[str, Any]] = {
    "no bonus": {},
    "bonus of the tail": {"bonus": {"tail": 1.5}},
    "bonus of torso and tail": {"bonus": {"tail": 1.5, "torso": 0.3}},
    "decay of 180 days": {"decay": {"column": "listed_at", "half_life": "180d"}},
    "decay of 30 days": {"decay": {"column": "listed_at", "half_life": "30d"}},
    "decay of 7 days": {"decay": {"column": "listed_at", "half_life": "7d"}},
}


def main(labels: int = 100_000, rounds: int = 15, spec: str = "ivf_flat") -> None:
    """Print both tables."""
    faiss.omp_set_num_threads(1)
    bundle, rng = synthetic_bundle(labels), np.random.default_rng(1)
    seconds = (time() - rng.uniform(0, _DAYS * 86_400, labels)).astype(np.int64)
    dated = pa.table({"listed_at": pa.array(seconds * 1_000_000, pa.timestamp("us"))})
    bundle = replace(
        bundle,
        labels=replace(bundle.labels, display=dated),
        manifest=bundle.manifest.model_copy(update={"display": ["listed_at"]}),
    )
    declarations = {
        "none": None,
        "buckets": DerivedPriors(),
        "buckets and dates": DerivedPriors(decay={"listed_at": "1d"}),
    }
    retrievers, seconds_of = {}, {}
    for name, declared in declarations.items():
        began = process_time()
        weighed_bundle = bundle if declared is None else replace(bundle, priors=declared.added_to(Priors(), bundle))
        retrievers[name] = _retriever(weighed_bundle, spec)
        seconds_of[name] = process_time() - began
    print(f"{labels:,} labels of {spec}, k = {_K}\n\n| coordinates | build, CPU time |\n|---|---:|")
    for name, of_build in seconds_of.items():
        print(f"| {name} | × {of_build / seconds_of['none']:.2f} |")
    print("\n| request | of a release with | × without coordinates |\n|---|---|---:|")
    vectors = bundle.calibration_queries.tolist()
    for (request, options), name in product(_REQUESTS.items(), ("buckets", "buckets and dates")):
        if "decay" in options and name == "buckets":
            continue
        pair = [(retrievers["none"], {}), (retrievers[name], options)]
        best_2Q = np.full((2, len(vectors)), np.inf)
        for _, (position, vector) in product(range(rounds), enumerate(vectors)):
            for at, (retriever, more) in enumerate(pair):
                query = Query.model_validate({"vector": vector, "k": _K, "display": False} | more)
                began = perf_counter()
                retriever.retrieve([query])
                best_2Q[at, position] = min(best_2Q[at, position], perf_counter() - began)
        print(f"| {request} | {name} | {np.median(best_2Q[1] / best_2Q[0]):.3f} |", flush=True)
    decaying = retrievers["buckets and dates"]
    print("\n| half-life | re-sort of 100 | re-sort of 1,000 | served |\n|---|---:|---:|---:|")
    ages_L = (time() - seconds) / 86_400
    dial = bundle.manifest.bias_removal.default
    scores_QL = bundle.augmentation.queries(bundle.calibration_queries, dial) @ bundle.rows().T
    scores_QL /= np.float32(bundle.manifest.temperature)
    for half_life in _HALF_LIVES:
        decayed_QL = scores_QL - ages_L * np.log(2) / float(half_life[:-1])
        best_QK = np.argsort(-decayed_QL, axis=1)[:, :_K]
        figures = [_overlap(best_QK, _resorted(scores_QL, decayed_QL, depth)) for depth in (100, 1_000)]
        options = {"k": _K, "decay": {"column": "listed_at", "half_life": half_life}, "display": False}
        queries = [Query.model_validate({"vector": vector} | options) for vector in vectors]
        results = decaying.retrieve(queries).results
        served_QK = np.array([[int(label["id"][5:]) for label in result["labels"]] for result in results])
        figures.append(_overlap(best_QK, served_QK))
        print(f"| {half_life} | {' | '.join(f'{figure:.3f}' for figure in figures)} |")


def _retriever(bundle: Bundle, spec: str) -> Retriever:
    manifest = bundle.manifest
    searcher = tune_index(bundle, IndexSpec(spec), "cpu", lambda _: None).searcher(bundle)
    encoder = Tower(bundle.query_tower, manifest.query_features, bundle.vocabularies, manifest.dim)
    return Retriever(name=spec, created_at=datetime.now(UTC), bundle=bundle, searcher=searcher, encoder=encoder)


def _resorted(scores_QL: np.ndarray, decayed_QL: np.ndarray, depth: int) -> np.ndarray:
    """Sort the best labels by score by their score with decay, [Q, K]."""
    first_QN = np.argsort(-scores_QL, axis=1)[:, :depth]
    order_QK = np.argsort(-np.take_along_axis(decayed_QL, first_QN, axis=1), axis=1)[:, :_K]
    return np.take_along_axis(first_QN, order_QK, axis=1)


def _overlap(expected_QK: np.ndarray, found_QK: np.ndarray) -> float:
    """Return the share of the expected labels that were found."""
    return float((expected_QK[:, :, None] == found_QK[:, None, :]).any(axis=2).mean())


if __name__ == "__main__":
    typer.run(main)
