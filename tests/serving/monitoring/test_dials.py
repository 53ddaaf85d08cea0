"""The dial is no incident: answers of a real release are held against its promise at their own λ.

Live queries and calibration queries are random vectors alike, so that nothing but the dials moves the answers. As in a
trained model, labels with many pairs are nearer to the mean query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtail.bundle import Bundle, CurvePoint
from longtail.bundle.manifest import Interval
from longtail.index import IndexSpec, build, open_releases
from longtail.serving.core.experiments import parse_experiments
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import RetrieveQuery
from longtail.serving.core.retriever import Retriever
from longtail.serving.monitoring import Monitoring, OfflineFigures
from tests.bundles import make_bundle
from tests.clock import Clock
from tests.serving.monitoring.shop import NOON, count_batch

DIM, QUERIES, K = 16, 2000, 10
SEEDS = [pytest.param(seed, marks=pytest.mark.nightly if seed else ()) for seed in range(20)]
MIXES: dict[str, Callable[[np.random.Generator], float]] = {
    "0": lambda _: 0.0,
    "0.25": lambda _: 0.25,
    "0.5, the default": lambda _: 0.5,
    "1": lambda _: 1.0,
    "four": lambda rng: float(rng.choice([0.0, 0.25, 0.5, 1.0])),
    "any": lambda rng: float(rng.uniform(-1, 2)),
}


def vectors(rng: np.random.Generator, count: int) -> np.ndarray:
    """Queries of norm 1 with a mean along the first axis."""
    queries_BD = rng.standard_normal((count, DIM), dtype=np.float32)
    queries_BD[:, 0] += 1.5
    return queries_BD / np.linalg.norm(queries_BD, axis=1, keepdims=True)


def make_shop_bundle(seed: int) -> Bundle:
    """A bundle with a thousand calibration queries and the curve of an evaluation that had the same queries."""
    bundle, rng = make_bundle(labels=300, dim=DIM, seed=seed), np.random.default_rng(1000 + seed)
    embeddings_LD = np.array(bundle.embeddings)
    embeddings_LD[:, 0] += 0.3 * (bundle.labels.log_pn - bundle.labels.log_pn.mean())
    embeddings_LD /= np.linalg.norm(embeddings_LD, axis=1, keepdims=True)
    bundle = replace(bundle, embeddings=embeddings_LD, calibration_queries=vectors(rng, 1000))
    points = [point(bundle, bias_removal) for bias_removal in (0.0, 0.5, 1.0)]
    dial = bundle.manifest.bias_removal.model_copy(update={"curve": points})
    return replace(bundle, manifest=bundle.manifest.model_copy(update={"bias_removal": dial}))


def point(bundle: Bundle, bias_removal: float) -> CurvePoint:
    scores_CL = bundle.augmentation.queries(bundle.calibration_queries, bias_removal) @ bundle.rows().T
    best_CK = np.argpartition(-scores_CL, K, axis=1)[:, :K]
    shares = np.bincount(bundle.labels.buckets[best_CK].ravel(), minlength=4) / best_CK.size
    names = ("head", "torso", "tail", "new")
    metrics = {f"exposure@{K}/{name}": Interval(value=float(of)) for name, of in zip(names, shares, strict=True)}
    return CurvePoint(bias_removal=bias_removal, metrics=metrics)


def loaded(bundle: Bundle, folder: Path) -> Retriever:
    bundle.write(folder / "bundle")
    build(folder / "bundle", folder / "releases", spec=IndexSpec("flat"), name="a")
    return load_release(open_releases(folder / "releases"), "a")


def judge_queries(retriever: Retriever, queries: Sequence[RetrieveQuery], state: Path) -> dict[str, Any]:
    clock = Clock(NOON)
    monitoring = Monitoring(state, clock=clock)
    monitoring.begin_release(
        retriever.name, retriever.buckets_L, retriever.promises, OfflineFigures.from_manifest(retriever.manifest)
    )
    for start in range(0, len(queries), 100):
        count_batch(monitoring, retriever.retrieve(queries[start : start + 100]))
    clock.pass_(1)
    report = monitoring.report()
    monitoring.close()
    assert report["windows"]["1h"]["judged"]["queries"] == len(queries)
    verdict: dict[str, Any] = report["verdict"]
    return verdict


def queries(rng: np.random.Generator, dials: Callable[[np.random.Generator], float]) -> list[RetrieveQuery]:
    return [RetrieveQuery(vector=vector, k=K, bias_removal=dials(rng)) for vector in vectors(rng, QUERIES).tolist()]


@pytest.mark.parametrize("seed", SEEDS)
def test_dial_mixes_raise_no_alarm(seed: int, tmp_path: Path) -> None:
    retriever, rng = loaded(make_shop_bundle(seed), tmp_path), np.random.default_rng(seed)
    for name, dials in MIXES.items():
        verdict = judge_queries(retriever, queries(rng, dials), tmp_path / f"state {name}")
        assert (verdict["severity"], verdict["findings"]) == ("steady", []), name


@pytest.mark.parametrize("seed", SEEDS)
def test_documented_experiment_raises_no_alarm(seed: int, tmp_path: Path) -> None:
    retriever, rng = loaded(make_shop_bundle(seed), tmp_path), np.random.default_rng(seed)
    page = (Path(__file__).parents[3] / "docs/experiments.md").read_text()
    experiment = parse_experiments(page.split("```toml\n")[1].split("```")[0].encode())
    assert experiment is not None
    plain = [RetrieveQuery(vector=vector, k=K) for vector in vectors(rng, QUERIES).tolist()]
    in_arms = [
        experiment.assign(query, "", unit=f"u{unit}", arm=None, pinned=False)[0] for unit, query in enumerate(plain)
    ]
    assert {query.bias_removal for query in in_arms} == {None, 0.3}
    verdict = judge_queries(retriever, in_arms, tmp_path / "state")
    assert (verdict["severity"], verdict["findings"]) == ("steady", [])


@pytest.mark.parametrize("seed", SEEDS)
def test_permuted_counts_call_for_action(seed: int, tmp_path: Path) -> None:
    """Counts that do not belong to their labels are consistent with themselves: with log p_n and buckets."""
    bundle, rng = make_shop_bundle(seed), np.random.default_rng(seed)
    order_L, labels = rng.permutation(300), bundle.labels
    permuted = replace(
        labels, counts=labels.counts[order_L], log_pn=labels.log_pn[order_L], buckets=labels.buckets[order_L]
    )
    retriever = loaded(replace(bundle, labels=permuted), tmp_path)
    for name, dials in MIXES.items():
        verdict = judge_queries(retriever, queries(rng, dials), tmp_path / f"state {name}")
        assert (verdict["severity"], verdict["findings"][0]["signal"]) == ("act", "evaluation"), name
