"""Tune indexes against the recall floor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from longtail.bundle import BiasRemoval, Bundle
from longtail.index import IndexSpec, LongtailIndexError, RecallFloorError, Searcher, SpecError, build, open_releases
from longtail.index.building import tuning
from longtail.index.building.training import train_index
from longtail.index.building.tuning import TunedIndex, tune_index
from longtail.index.manifests import SearchParams
from longtail.index.recall import Calibration
from longtail.index.search.faiss_index import FaissIndex
from tests.bundles import make_bundle


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return make_bundle(labels=6000, dim=16, queries=20)


@pytest.fixture(scope="module")
def tuned(bundle: Bundle) -> TunedIndex:
    return tune_index(bundle, IndexSpec("ivf_flat"), lambda _: None)


def test_every_trial_is_recorded_cheapest_first_and_the_first_good_one_is_chosen(tuned: TunedIndex) -> None:
    assert tuned.index is not None
    of_head = tuned.index.head_lists * 100 * tuned.index.list_count / tuned.index.labels
    costs = [trial.params.nprobe + of_head * trial.params.head for trial in tuned.trials]
    assert costs == sorted(costs)
    assert costs[0] == 2
    assert tuned.chosen == tuned.trials[-1]
    assert tuned.chosen.lowest.recall >= 0.99
    assert all(trial.lowest.recall < 0.99 for trial in tuned.trials[:-1])
    assert all(trial.queries_per_second > 0 for trial in tuned.trials)
    assert [at.bias_removal for at in tuned.chosen.recall] == [-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("spec", ["flat", "ivf_flat", "ivf_fastscan"])
def test_reused_lists_hold_added_removed_and_changed_labels(spec: str, tmp_path: Path) -> None:
    build(make_bundle(labels=700).write(tmp_path / "bundle"), tmp_path / "r", spec=spec, name="first")
    other = make_bundle(labels=800, seed=1).write(tmp_path / "other")
    manifest = build(other, tmp_path / "r", name="second", spec=IndexSpec(lists_of="first"))

    first, second = (open_releases(tmp_path / "r").verify(name).searcher.index for name in ("first", "second"))
    assert (manifest.kind, manifest.labels, manifest.spec) == (first.kind, 800, "auto")
    assert min(at.recall for at in manifest.recall) >= 0.95
    assert manifest.bytes_per_label == round((tmp_path / "r/second/index/index.faiss").stat().st_size / 800, 2)
    if first.has_lists:
        np.testing.assert_array_equal(first.centroids, second.centroids)
        narrow = make_bundle(labels=700, dim=4).write(tmp_path / "narrow")
        with pytest.raises(LongtailIndexError, match=r"lists of first: expected rows of 12 coordinates .*, received 8"):
            build(narrow, tmp_path / "r", spec=IndexSpec(lists_of="first"))
    with pytest.raises(SpecError, match=rf"lists of first: expected the spec auto or {spec}, .* received milvus"):
        build(other, tmp_path / "r", spec=IndexSpec("milvus", lists_of="first"))
    if spec == "ivf_flat":
        rows = open_releases(tmp_path / "r").open("second").bundle.rows()
        distances_LC = ((rows[:, None] - first.centroids) ** 2).sum(axis=2)
        assert second.lists.tolist() == distances_LC.argmin(axis=1).tolist()


def test_recall_is_measured_against_exact_answers(bundle: Bundle) -> None:
    """A searcher over every second label returns half of what it should."""
    calibration = Calibration(bundle, bundle.rows())
    rows = bundle.rows()
    index = FaissIndex("flat", "Flat", train_index("Flat", rows.shape[1], rows, "cpu"))
    recall, _ = calibration.measure(Searcher(bundle, index, SearchParams()).without(np.arange(1, 6000, 2)))
    exact = [bundle.rows() @ query for query in calibration.queries_QE]
    expected = np.mean([(np.argsort(-scores)[:100] % 2 == 0).mean() for scores in exact])
    assert np.mean([at.recall for at in recall]) == pytest.approx(expected, abs=1e-3)
    assert 0.4 < expected < 0.6


def list_dial_pairs(bundle: Bundle) -> list[tuple[float, float]]:
    points = Calibration(bundle, bundle.rows()).dial_points
    return [(bias_removal, popularity) for bias_removal, popularity, _ in points]


def test_a_bundle_with_a_tree_is_measured_at_zero_outside_the_limits() -> None:
    bundle = make_bundle(labels=40, proposal=True)
    dial = BiasRemoval(default=1, minimum=0.5)
    bundle = replace(bundle, manifest=bundle.manifest.model_copy(update={"bias_removal": dial}))
    at_zero, prior_alone = [(0.0, 0), (0.5, 0), (0.75, 0), (1.0, 0), (1.5, 0), (2.0, 0)], [(0.0, -1), (0.0, 2)]
    assert list_dial_pairs(bundle) == at_zero + prior_alone
    without = replace(bundle, proposal=None)
    assert list_dial_pairs(without) == at_zero[1:]


@pytest.mark.parametrize("spec", ["ivf_flat", "ivf_sq"])
def test_the_chosen_index_recalls_on_both_dials(spec: str, tmp_path: Path) -> None:
    bundle = make_bundle(labels=6000, dim=16, popularity=True, queries=20).write(tmp_path / "bundle")
    manifest = build(bundle, tmp_path / "releases", spec=spec, name="both")
    assert len([at for at in manifest.recall if not any(at.priors.values())]) == 15
    assert min(at.recall for at in manifest.recall) >= 0.95
    release = open_releases(tmp_path / "releases").open("both")
    searcher, bundle = release.searcher, release.bundle
    rng = np.random.default_rng(1)
    bias_removal, popularity = rng.uniform(-1, 2, (2, 20)).astype(np.float32)
    queries = bundle.augmentation.queries(bundle.calibration_queries, bias_removal, popularity)
    _, rows = searcher.search(queries, 20)
    exact = np.argsort(-(queries @ bundle.rows().T), axis=1)[:, :20]
    assert (
        np.mean([len(set(result_rows) & set(best)) for result_rows, best in zip(rows, exact, strict=True)]) / 20 >= 0.97
    )


@pytest.mark.slow
def test_a_build_below_the_floor_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_FINER_NPROBE", [1])
    make_bundle(labels=6000, dim=16, queries=20).write(tmp_path / "bundle")
    with pytest.raises(RecallFloorError) as failed:
        build(tmp_path / "bundle", tmp_path / "releases", spec=IndexSpec("ivf_flat", recall_floor=0.999))
    message = str(failed.value)
    assert "expected recall@100 >= 0.999" in message
    assert not (tmp_path / "releases").exists()


@pytest.mark.parametrize("spec", ["auto", "ivf_flat"])
@pytest.mark.parametrize("labels", [1, 2, 45])
def test_the_smallest_catalogues(labels: int, spec: str) -> None:
    bundle = make_bundle(labels=labels, bias=True)
    built = tune_index(bundle, IndexSpec(spec), lambda _: None)
    assert built.recall_k == labels
    assert built.chosen.lowest.recall == 1.0
