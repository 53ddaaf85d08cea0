"""Recall under filters, measured against brute force; where recall is low, a build visits more lists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
import pytest

from longtail.bundle import Augmentation, Bundle
from longtail.index import Filter, FilterMask, IndexSpec, Searcher, build, open_releases
from longtail.index.building.tuning import TunedIndex, tune_index
from longtail.index.manifests import FilteredParams, SearchParams
from longtail.index.search.eligible import Eligible
from longtail.index.search.faiss_index import FaissIndex
from tests.bundles import make_bundle

LABELS, CENTRES = 6_000, 40


def clustered_bundle() -> Bundle:
    """Labels around centres, as trained models have them."""
    rng = np.random.default_rng(5)
    plain = make_bundle(labels=LABELS, dim=16)

    def unit(rows: np.ndarray) -> np.ndarray:
        return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)

    centres = unit(rng.standard_normal((CENTRES, 16)))
    embeddings = unit(centres[rng.integers(0, CENTRES, LABELS)] + 0.15 * rng.standard_normal((LABELS, 16)))
    queries = unit(centres[rng.integers(0, CENTRES, 60)] + 0.15 * rng.standard_normal((60, 16)))
    augmentation = Augmentation.fitted(plain.manifest.temperature, embeddings, plain.labels.log_pn, None)
    manifest = plain.manifest.model_copy(update={"kappa": augmentation.kappa})
    return replace(plain, embeddings=embeddings, calibration_queries=queries, manifest=manifest)


@pytest.fixture(scope="module")
def clustered() -> Bundle:
    return clustered_bundle()


@pytest.fixture(scope="module", params=["ivf_flat"])
def tuned(request: pytest.FixtureRequest, clustered: Bundle) -> TunedIndex:
    return tune_index(clustered, IndexSpec(request.param), lambda _: None)


def measure_labels(searcher: Searcher, bundle: Bundle, mask_L: np.ndarray, bias_removal: float, k: int) -> float:
    """Compute the lowest recall over all labels and each bucket by scores of all labels."""
    queries = bundle.augmentation.queries(bundle.calibration_queries, bias_removal)
    scores_BL = np.where(mask_L, queries @ bundle.rows().T, -np.inf)
    best_BK = np.argsort(-scores_BL, axis=1)[:, : min(k, int(mask_L.sum()))]
    filters = [Filter(selection=FilterMask(mask_L))] * len(queries)
    _, rows_BK = searcher.search(queries, k, filters)
    hits_BK = np.array([np.isin(best_K, rows_K) for best_K, rows_K in zip(best_BK, rows_BK, strict=True)])
    buckets_BK = bundle.labels.buckets[best_BK]
    return min(hits_BK.mean(), *(hits_BK[buckets_BK == bucket].mean() for bucket in np.unique(buckets_BK)))


def test_recall_holds_at_every_selectivity(tuned: TunedIndex, clustered: Bundle) -> None:
    """Selections that the build has not seen: other random ones, of clusters near and far, of the most popular."""
    assert tuned.filtered is not None
    searcher = Searcher(clustered, tuned.index, tuned.chosen.params, tuned.filtered.params)
    rng = np.random.default_rng(9)
    by_likeness = np.argsort(clustered.embeddings @ clustered.calibration_queries[7])
    by_popularity = np.argsort(-clustered.labels.log_pn, kind="stable")
    for share in (0.5, 0.1, 0.025):
        count = int(share * LABELS)
        for rows in (
            rng.choice(LABELS, count, replace=False), by_likeness[:count], by_likeness[-count:], by_popularity[:count]
        ):  # fmt: skip
            mask = np.isin(np.arange(LABELS), rows)
            for bias_removal, k in ((0.0, 100), (1.0, 10)):
                assert measure_labels(searcher, clustered, mask, bias_removal, k) >= 0.95, (share, rows[:3])


def test_the_manifest_has_the_measured_recall(clustered: Bundle, tmp_path: Path) -> None:
    clustered.write(tmp_path / "bundle")
    lines: list[str] = []
    build(tmp_path / "bundle", tmp_path / "releases", spec="ivf_flat", name="one", progress=lines.append)
    release = open_releases(tmp_path / "releases").open("one")
    filtered = release.manifest.filtered
    assert filtered is not None
    assert [params.selectivity for params in filtered.params] == [0.5, 0.1, 0.01, 0.001]
    assert [(at.selectivity, at.selection, at.k) for at in filtered.recall[:4]] == [
        (0.5, "random", 10), (0.5, "random", 100), (0.5, "near", 10), (0.5, "near", 100)
    ]  # fmt: skip
    assert min(at.lowest for at in filtered.recall) >= 0.95
    assert {"head", "torso", "tail"} <= filtered.recall[1].buckets.keys()
    assert [params.selectivity for params in release.searcher.filtered] == [0.001, 0.01, 0.1, 0.5]
    assert sum(line.startswith("50.0% of the labels, boost 1: lowest recall ") for line in lines) == 1


def test_a_build_below_the_floor_visits_more_lists() -> None:
    """Vectors have no structure, so the best of a tenth of the labels may be in any cell."""
    bundle = make_bundle(labels=4_000, dim=24)
    built = tune_index(bundle, IndexSpec("ivf_flat", recall_floor=0.0), lambda _: None)
    lazy = Searcher(bundle, built.index, SearchParams(nprobe=1))
    hard = tune_index(bundle, IndexSpec("ivf_flat", recall_floor=0.95), lambda _: None)
    assert built.filtered is not None
    assert hard.filtered is not None
    mask = np.arange(4_000) % 8 == 0
    assert measure_labels(lazy, bundle, mask, 0.5, 50) < 0.98
    exact = Searcher(
        bundle, built.index, SearchParams(nprobe=1), [FilteredParams(selectivity=0.1, boost=1, exact=True)]
    )
    assert measure_labels(exact, bundle, mask, 0.5, 50) == 1
    boosted = Searcher(bundle, built.index, SearchParams(nprobe=1), [FilteredParams(selectivity=0.5, boost=32)])
    assert measure_labels(boosted, bundle, mask, 0.5, 50) > 0.99
    assert min(at.lowest for at in hard.filtered.recall) >= 0.95


def test_lists_by_hand() -> None:
    """Four cells in the plane have two labels each; only labels of the two left cells are eligible."""

    def at(*degrees: float) -> np.ndarray:
        angles = np.deg2rad(degrees)
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    quantizer = faiss.IndexFlatIP(2)
    quantizer.add(at(0, 60, 120, 180))
    index = faiss.IndexIVFFlat(quantizer, 2, 4, faiss.METRIC_INNER_PRODUCT)
    index.is_trained = True
    index.add(at(-5, 4, 55, 64, 115, 124, 176, 185))
    lists, left_labels = FaissIndex("ivf_flat", "", index), Eligible.from_mask(np.arange(8) >= 4)
    # One probe is two labels. A query at 0° has seen two that may be found after three cells, six labels: a third, and
    # the 100 best of a third lie among the 300 best. That asks for 2 · 1/3 · 3^1.5 = 3.5 labels: both cells.
    # A query at 179° has them in its first cell: the share is 1, two labels are enough, and −1 stands for no cell.
    queries = at(0, 179)
    for k in (10, 100):
        near, products = lists.nearest_lists(queries, k, 1, left_labels, 1.0)
        assert near.tolist() == [[2, 3], [3, -1]]
        assert products[:, 0].tolist() == pytest.approx([-0.5, np.cos(np.deg2rad(1))], abs=1e-6)
    assert lists.nearest_lists(queries, 10, 1, left_labels, 0.5)[0].tolist() == [[2], [3]]
    both = lists.nearest_lists(queries, 10, 1, left_labels, 2.0)
    assert both[0].tolist() == [[2, 3], [3, 2]]
    scores, ids = lists._search_lists(queries, 5, *both, left_labels)
    assert ids.tolist() == [[4, 5, 7, 6, -1], [6, 7, 5, 4, -1]]
    assert scores[0, :2].tolist() == pytest.approx(np.cos(np.deg2rad([115, 124])).tolist(), abs=1e-6)


def test_a_selection_of_other_labels_is_refused(clustered: Bundle, tuned: TunedIndex) -> None:
    searcher = Searcher(clustered, tuned.index, tuned.chosen.params)
    queries = clustered.augmentation.queries(clustered.calibration_queries[:1], 0.5)
    with pytest.raises(ValueError, match="query 0, filter selection: expected one of 6000 labels, received one of 3"):
        searcher.search(queries, 3, [Filter(selection=FilterMask(np.ones(3, np.bool_)))])
