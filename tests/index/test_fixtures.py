"""Old releases open for ever, FAISS's own files too; tests/fixtures/README.md says how they were made."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle
from longtail.index import BucketFloors, FloorsNotMetError, Releases, merge_labels, refresh_priors
from longtail.index.manifests import Effort
from tests.index.conftest import brute_force

FIXTURES = Path(__file__).parent.parent / "fixtures"
RELEASES, OF_VERSION_3 = FIXTURES / "releases_v1", FIXTURES / "releases_v3"
MADE = {
    "flat": ("flat", [("all", "Flat", 200)], Effort()),
    "ivf": ("ivf_flat", [("head", "Flat", 20), ("tail", "IVF4,Flat", 180)], Effort(probes=4)),
    "hnsw": ("hnsw", [("head", "Flat", 20), ("tail", "HNSW32,Flat", 180)], Effort(probes=64)),
    "pq": ("factory", [("all", "IVF4,PQ3x4np", 200)], Effort(probes=4, refine=4)),
}


@pytest.mark.parametrize("name", MADE)
def test_a_release_of_version_1_opens_forever_and_answers_what_it_answered(name: str) -> None:
    release = Releases(RELEASES).open(name)
    kind, bands, effort = MADE[name]
    assert (release.manifest.schema_version, release.manifest.kind, release.manifest.labels) == (1, kind, 200)
    assert [(band.name, band.factory, len(band.rows_N)) for band in release.searcher.bands] == bands
    assert release.searcher.effort == effort
    bundle = release.bundle
    for bias_removal, rows, scores in (
        (0.0, [65, 79, 69, 194, 154], [1.1630353, 0.967244, 0.9198323]),
        (1.0, [124, 65, 174, 30, 194], [0.57187533, 0.46547693, 0.44719762]),
    ):
        found = release.searcher.search(bundle.augmentation.queries(bundle.calibration_queries, bias_removal), 10)
        assert found[1][0, :5].tolist() == rows
        np.testing.assert_allclose(found[0][0, :3], scores, rtol=1e-6)
        exact = np.array([brute_force(bundle, query_D, bias_removal) for query_D in bundle.calibration_queries])
        np.testing.assert_allclose(found[0], np.take_along_axis(exact, found[1], axis=1), atol=1e-6)
        best = np.argsort(-exact, axis=1)[:, :10]
        if name == "pq":
            assert (found[1] == best).mean() > 0.98
        else:
            assert np.array_equal(found[1], best)


@pytest.mark.parametrize("name", MADE)
def test_every_byte_of_an_old_release_is_verified(name: str) -> None:
    assert Releases(RELEASES).verify(name).manifest.name == name


def test_old_floors_and_the_pointer_hold(tmp_path: Path) -> None:
    root = tmp_path / "releases"
    shutil.copytree(RELEASES, root)
    releases = Releases(root)
    assert (releases.names(), releases.current()) == (["flat", "hnsw", "ivf", "pq"], "flat")
    assert BucketFloors.read(root) == BucketFloors(
        metric="recall@20", max_drop=0.1, floors={"head": 0.15, "tail": 0.018}
    )
    with pytest.raises(FloorsNotMetError) as refused:
        releases.publish("hnsw")
    assert refused.value.unmet == ["tail expected at least 0.018 (10 % below flat's 0.02), found 0.017"]
    assert releases.rollback() == "ivf"
    releases.publish("pq")
    assert (root / "HISTORY").read_text() == "ivf\npq\n"


@pytest.mark.parametrize("name", ["flat", "ivf"])
def test_a_release_of_version_3_answers_what_it_answered_at_any_weights_of_its_priors(name: str) -> None:
    release = Releases(OF_VERSION_3).verify(name)
    kind, bands, effort = MADE[name]
    assert (release.manifest.schema_version, release.manifest.kind, release.manifest.labels) == (3, kind, 200)
    assert [(band.name, band.factory, len(band.rows_N)) for band in release.searcher.bands] == bands
    assert (release.searcher.effort, release.index.filterable) == (effort, ["title"])
    bundle = release.bundle
    assert bundle.priors is not None
    limits = [(prior.name, prior.minimum, prior.default, prior.maximum) for prior in bundle.priors.settings]
    assert limits == [("recent", -1, 0.5, 2), ("margin", 0, 0, 3)]
    # Rows 0 and 7 had none in the table; the least stands for it, as it does of labels that are added.
    values = [[-2.3895533, 0.93537432], [-1.3243589, 0.365134], [-0.24836162, 0.17583767]]
    np.testing.assert_allclose(bundle.priors.values_LP[:3], values, rtol=1e-6)
    np.testing.assert_allclose(bundle.priors.of_added(np.array([-1]), [{}]), [[-2.3895533, 1.3601258e-6]], rtol=1e-6)
    for λ, μ, weights, rows, scores in (
        (0.0, 0.0, [0.5, 0.0], [43, 167, 181, 68, 106], [1.1028553, 0.9833209, 0.9275545]),
        (1.0, 0.0, [2.0, 3.0], [181, 58, 143, 106, 167], [0.9070972, 0.793025, 0.7371048]),
        (0.5, 1.0, [-1.0, 1.5], [86, 167, 56, 91, 80], [0.5535121, 0.4994908, 0.4191739]),
    ):
        found = release.searcher.search(bundle.augmentation.queries(bundle.calibration_queries, λ, μ, weights), 10)
        assert found[1][0, :5].tolist() == rows
        np.testing.assert_allclose(found[0][0, :3], scores, rtol=1e-5)
        exact = np.array([brute_force(bundle, query_D, λ, μ) for query_D in bundle.calibration_queries])
        exact += 0.1 * bundle.priors.values_LP.astype(np.float64) @ np.array(weights)
        np.testing.assert_allclose(found[0], np.take_along_axis(exact, found[1], axis=1), atol=1e-5)
        assert np.array_equal(found[1], np.argsort(-exact, axis=1)[:, :10])


def test_priors_of_an_old_release_are_refreshed(tmp_path: Path) -> None:
    shutil.copytree(OF_VERSION_3, tmp_path / "releases")
    ids = Releases(OF_VERSION_3).open("ivf").bundle.labels.ids
    pq.write_table(pa.table({"label_id": ids, "recent": [0.5] * 200, "margin": [1.0] * 200}), tmp_path / "t.parquet")
    assert Releases(tmp_path / "releases").current() == "ivf"
    name = refresh_priors(tmp_path / "releases", tmp_path / "t.parquet", name="newer").name
    priors = Releases(tmp_path / "releases").verify(name).bundle.priors
    assert priors is not None
    assert np.array_equal(priors.values_LP, np.tile(np.float32([0.5, 1]), (200, 1)))


def test_an_old_log_is_taken_into_an_old_bundle(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "labels_v1.log", tmp_path / "labels.log")
    report = merge_labels(RELEASES / "flat" / "bundle", tmp_path / "labels.log", tmp_path / "merged")
    assert (report.labels, report.added, report.removed, report.skipped) == (200, 1, 1, {})
    merged = Bundle.load(tmp_path / "merged")
    assert merged.labels.ids.to_pylist()[-2:] == ["item-199", "new-1"]
    assert merged.labels.display["title"].to_pylist()[5] == "Renamed"
    np.testing.assert_allclose(merged.embeddings[-1], [0.3744238, -0.104704484, -0.755435, 0.52741045], rtol=1e-5)
    np.testing.assert_allclose(merged.embeddings[5], [-0.41156048, -0.2670707, -0.58854026, 0.64258194], rtol=1e-5)
