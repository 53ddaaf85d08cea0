"""The files in tests/fixtures/0.1.0, one of each format, are read unchanged; `tests.fixtures.make` wrote them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from longtail.bundle import Bundle, Tower
from longtail.index import merge_labels, open_releases
from longtail.serving.events.reader import open_events
from longtail.state import AnswerKeys, read_label_changes
from tests.index.conftest import brute_force

FIXTURES = Path(__file__).parent.parent / "fixtures" / "0.1.0"


def test_fixture_answers_are_unchanged_at_any_weights() -> None:
    releases = open_releases(FIXTURES / "releases")
    assert (releases.names(), releases.current()) == (["ivf"], "ivf")
    release = releases.verify("ivf")
    assert (release.manifest.schema_version, release.manifest.kind, release.manifest.labels) == (1, "ivf_flat", 200)
    assert release.manifest.factory == "IVF5,Flat"
    assert release.manifest.filterable == ["title"]
    bundle = release.bundle
    assert bundle.priors is not None
    limits = [(prior.name, prior.minimum, prior.default, prior.maximum) for prior in bundle.priors.settings]
    bonuses = [(f"bonus.{bucket}", -5, 0, 5) for bucket in ("torso", "tail", "new")]
    assert limits == [("recent", -1, 0.5, 2), ("margin", 0, 0, 3), *bonuses]
    # Rows 0 and 7 had none in the table; the least stands for it, as it does of labels that are added.
    values = [[-2.3895533, 0.93537432], [-1.3243589, 0.365134], [-0.24836162, 0.17583767]]
    np.testing.assert_allclose(bundle.priors.values_LP[:3, :2], values, rtol=1e-6)
    for λ, μ, weights, rows, scores in (
        (0.0, 0.0, [0.5, 0.0], [43, 167, 181, 68, 106], [1.1028553, 0.9833209, 0.9275545]),
        (1.0, 0.0, [2.0, 3.0], [181, 58, 143, 106, 167], [0.9070972, 0.793025, 0.7371048]),
        (0.5, 1.0, [-1.0, 1.5], [86, 167, 56, 91, 80], [0.5535121, 0.4994908, 0.4191739]),
    ):
        queries = bundle.augmentation.queries(bundle.calibration_queries, λ, μ, [*weights, 0, 0, 0])
        hits = release.searcher.search(queries, 10)
        assert hits[1][0, :5].tolist() == rows
        np.testing.assert_allclose(hits[0][0, :3], scores, rtol=1e-5)
        exact = np.array([brute_force(bundle, query_D, λ, μ) for query_D in bundle.calibration_queries])
        exact += 0.1 * bundle.priors.values_LP[:, :2].astype(np.float64) @ np.array(weights)
        np.testing.assert_allclose(hits[0], np.take_along_axis(exact, hits[1], axis=1), atol=1e-5)
        assert np.array_equal(hits[1], np.argsort(-exact, axis=1)[:, :10])


def test_the_bundle_runs() -> None:
    bundle = Bundle.load(FIXTURES / "releases" / "ivf" / "bundle")
    manifest, labels = bundle.manifest, bundle.labels
    assert (manifest.schema_version, manifest.labels, manifest.dim, manifest.own_id) == (1, 200, 4, "item_id")
    assert sorted(bundle.tables) == ["genres", "items", "own", "users"]
    assert (manifest.bias_removal.noise, manifest.popularity.default) == ("(π + 1/L) / 2", 0)
    pi = (labels.counts + 0.5) / (labels.counts.sum() + 100)
    np.testing.assert_allclose(labels.log_popularity, np.log(pi), rtol=1e-6)
    np.testing.assert_allclose(labels.log_pn, np.log((pi + 1 / 200) / 2), rtol=1e-6)
    assert bundle.label_model is not None
    label = Tower(bundle.label_model, manifest.label_features, bundle.vocabularies, 4, file="label_tower.onnx")
    embedding = label.embed(label.read([{"item_id": "item-4", "genres": ["g4"], "year": 0}]))
    np.testing.assert_allclose(embedding, bundle.embeddings[4:5], rtol=1e-5)


def test_the_label_changes_are_merged(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "state", tmp_path / "state")
    changes = read_label_changes(tmp_path / "state")
    assert ({*changes.upserts}, {*changes.hidden}) == ({"new-1", "item-5"}, {"item-7", "new-2"})
    assert changes.upserts["new-1"].at.isoformat() == "2026-06-01T12:00:00+00:00"
    report = merge_labels(FIXTURES / "releases" / "ivf" / "bundle", tmp_path / "state", tmp_path / "merged")
    assert (report.labels, report.added, report.removed, report.skipped) == (200, 1, 1, {})
    merged = Bundle.load(tmp_path / "merged")
    assert merged.labels.ids.to_pylist()[-2:] == ["item-199", "new-1"]
    assert merged.labels.display["title"].to_pylist()[5] == "Renamed"
    own_rows, genres = (np.load(FIXTURES / f"releases/ivf/bundle/tables/{name}.npy") for name in ("own", "genres"))
    added = own_rows[0] + genres[2] + genres[4] + genres[0] / 2
    np.testing.assert_allclose(merged.embeddings[-1], added / np.linalg.norm(added), rtol=1e-5)


def test_the_events_are_read() -> None:
    """The events are in a finished Parquet file and in a file that a service was writing."""
    names = (
        "kind, epoch(time), answer, release, bias_removal, priors, arm, unit, labels, positions, propensities, buckets"
    )
    with open_events(FIXTURES / "state" / "events") as connection:
        event_rows = connection.sql(f"SELECT {names} FROM events ORDER BY time").fetchall()
        (choice,) = connection.sql(
            "SELECT idempotency_key, event, weight, json_extract_string(features, 'user_id') FROM events "
            "WHERE kind = 'choice'"
        ).fetchall()
        ((options,),) = connection.sql("SELECT options FROM events WHERE kind = 'answer'").fetchall()
    at = 1_780_315_200.0  # 2026-06-01 12:00 UTC
    assert event_rows == [
        ("answer", at, "4f2a", "ivf", 0.5, [0.5, 0.0], "tail", 7, ["item-4", "item-9"], [0, 1], [1.0, 0.25], [0, 2]),
        ("choice", at + 60, "4f2a", "ivf", None, None, None, None, ["item-9"], [1], [0.25], [2]),
    ]
    assert choice == ("é-1", "purchase", 2.0, "u1")
    assert json.loads(options) == {"k": 2, "explore": {"tail": 1}, "candidates": 100}


def test_stored_keys_of_answer_ids_are_used(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "state" / "answer_keys.json", tmp_path)
    keys = AnswerKeys(tmp_path, 172_800, lambda: 1_780_315_200.0 + 3_600)
    keys.load()
    assert [len(secret) for secret in keys.secrets.values()] == [32]
    assert keys.signing is not None
    assert keys.secrets[keys.signing[0]] == keys.signing[1]
    assert (tmp_path / "answer_keys.json").read_bytes() == (FIXTURES / "state" / "answer_keys.json").read_bytes()
