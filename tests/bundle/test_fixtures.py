"""Files that earlier versions wrote load for ever; tests/fixtures/README.md says how they were made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from longtail.bundle import Bundle, Manifest, Tower, replay
from longtail.state.old_log import read_old_log
from tests.bundles import log_p_n

FIXTURES = Path(__file__).parent.parent / "fixtures"


def test_a_bundle_of_format_2_loads_forever() -> None:
    bundle = Bundle.load(FIXTURES / "bundle_v2")
    manifest, labels = bundle.manifest, bundle.labels
    assert (manifest.schema_version, manifest.labels, manifest.dim, manifest.similarity) == (2, 11, 4, "dot")
    assert (manifest.label_bias, manifest.kappa_bias, bundle.label_tower) == (False, None, None)
    assert labels.ids.to_pylist() == [f"item-{row}" for row in range(11)]
    assert labels.counts.tolist() == [333, 1000, 100, 125, 90, 166, 142, 250, 200, 111, 500]
    assert labels.buckets.tolist() == [0, 0, 2, 2, 2, 1, 1, 0, 1, 2, 0]
    np.testing.assert_allclose(labels.log_pn[:2], np.log([333.5 / 3022.5, 1000.5 / 3022.5]), rtol=1e-6)
    np.testing.assert_allclose(bundle.embeddings[0], [0.6942683, 0.059411094, 0.35338894, 0.18483567], rtol=1e-6)


def test_its_noise_is_the_tree_and_its_dial_begins_at_zero() -> None:
    """It was written with limits −1 to 2; for λ < 0 its service answered the wrong labels."""
    written = json.loads((FIXTURES / "bundle_v2" / "manifest.json").read_text())
    assert written["bias_removal"]["minimum"] == -1
    dial = Bundle.load(FIXTURES / "bundle_v2").manifest.bias_removal
    assert (dial.noise, dial.default, dial.minimum, dial.maximum) == ("p_n(y|x)", 0.5, 0.0, 2.0)


def test_a_default_below_zero_of_a_tree_is_read_as_zero() -> None:
    written = json.loads((FIXTURES / "bundle_v2" / "manifest.json").read_text())
    written["bias_removal"]["default"] = -0.25
    assert Manifest.model_validate(written).bias_removal.default == 0
    assert Manifest.model_validate(written | {"schema_version": 1}).bias_removal.default == -0.25


def test_a_bundle_of_format_3_loads_forever() -> None:
    bundle = Bundle.load(FIXTURES / "bundle_v3")
    manifest, labels = bundle.manifest, bundle.labels
    assert (manifest.schema_version, manifest.labels, manifest.dim, manifest.similarity) == (3, 9, 4, "cosine")
    assert manifest.kappa == pytest.approx(1.2922157068729925)
    assert manifest.kappa_popularity == pytest.approx(0.6587961412036856)
    assert (manifest.bias_removal.noise, manifest.popularity.default) == ("(π + 1/L) / 2", 0)
    assert (manifest.popularity.minimum, manifest.popularity.maximum) == (-1, 2)
    assert labels.counts.tolist() == [125, 1000, 333, 500, 200, 142, 166, 250, 111]
    pi = np.array([125.5, 1000.5, 333.5, 500.5, 200.5, 142.5, 166.5, 250.5, 111.5]) / 2831.5
    np.testing.assert_allclose(labels.log_popularity, np.log(pi), rtol=1e-6)
    np.testing.assert_allclose(labels.log_pn, np.log((pi + 1 / 9) / 2), rtol=1e-6)
    row = [-0.09480799, 0.28215665, -0.9279606, -0.22425069, 1.2922157 * -2.5546818]
    row += [manifest.kappa_bias * -0.13745461, 0.65879614 * -3.1162562]
    np.testing.assert_allclose(bundle.rows()[0], row, rtol=1e-5)


def test_a_bundle_of_format_4_loads_forever() -> None:
    bundle = Bundle.load(FIXTURES / "bundle_v4")
    manifest, labels = bundle.manifest, bundle.labels
    assert (manifest.schema_version, manifest.labels, manifest.own_id) == (4, 9, "item_id")
    assert labels.counts.tolist() == [1000, 500, 0, 111, 142, 125, 0, 200, 166]
    assert labels.buckets.tolist() == [0, 0, 3, 2, 1, 2, 3, 0, 1]
    pi = np.array([1000.5, 500.5, 0.5, 111.5, 142.5, 125.5, 0.5, 200.5, 166.5]) / 2248.5
    np.testing.assert_allclose(labels.log_pn, np.log(pi), rtol=1e-6)


def test_a_bundle_of_format_5_loads_and_runs_forever() -> None:
    bundle = Bundle.load(FIXTURES / "bundle_v5")
    manifest = bundle.manifest
    assert (manifest.schema_version, manifest.labels, sorted(bundle.tables)) == (
        5,
        9,
        ["genres", "items", "own", "users"],
    )
    query = Tower(bundle.query_model, manifest.query_features, bundle.vocabularies, 4, file="query_tower.onnx")
    found = query.embed(query.read([{"user_id": "u2", "history": ["item-3", "item-8"]}]))
    np.testing.assert_allclose(found, [[0.6008105, -0.7563448, -0.06851379, -0.24954946]], rtol=1e-5)
    assert bundle.label_model is not None
    label = Tower(bundle.label_model, manifest.label_features, bundle.vocabularies, 4, file="label_tower.onnx")
    found = label.embed(label.read([{"item_id": "item-4", "genres": ["g4"], "year": 0}]))
    np.testing.assert_allclose(found, bundle.embeddings[4:5], rtol=1e-5)


def test_labels_without_pairs_are_tail_in_older_bundles() -> None:
    """Their thresholds do not say what such labels are; the stored bucket is what was written."""
    written = json.loads((FIXTURES / "bundle_v3" / "manifest.json").read_text())
    assert sorted(written["buckets"]) == ["head_above", "scheme", "tail_upto"]
    assert Manifest.model_validate(written).buckets.assign(np.array([0])).tolist() == [2]


def test_its_tree_says_what_it_said() -> None:
    proposal = Bundle.load(FIXTURES / "bundle_v2").proposal
    assert proposal is not None
    assert (proposal.depth, proposal.labels, sorted(proposal.projection)) == (4, 11, ["history", "user_id"])
    assert proposal.leaf_labels.tolist() == [6, 1, 7, -1, 8, 9, 2, -1, 3, 4, 5, -1, 10, -1, 0, -1]
    inputs = {
        "user_id": np.array([2], np.int32),
        "history": np.array([[1, 4]], np.int32),
        "history__weight": np.ones((1, 2), np.float32),
    }
    z = proposal.project(inputs)
    items, users = proposal.projection["history"], proposal.projection["user_id"]
    np.testing.assert_allclose(z[0], items[1] + items[4] + users[2] + np.float32(0.1), rtol=1e-5)
    found = proposal.all_log_probabilities(z)[0]
    expected = [-3.6598377, -0.06101514, -5.0243587, -5.398121, -10.318079, -10.805069]
    expected += [-5.8278327, -7.298904, -8.386807, -4.0056, -8.342501]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(found, log_p_n(proposal, z[0].astype(np.float64)), rtol=1e-5)


def test_a_label_log_of_version_1_reads_forever(tmp_path: Path) -> None:
    log = tmp_path / "labels.log"
    shutil.copy(FIXTURES / "labels_v1.log", log)
    records = read_old_log(log)
    assert [(record.op, record.id, record.at.isoformat()) for record in records] == [
        ("upsert", "new-1", "2026-06-01T12:00:00+00:00"),
        ("upsert", "item-5", "2026-06-01T12:00:01+00:00"),
        ("hide", "item-7", "2026-06-01T12:00:02+00:00"),
        ("hide", "item-8", "2026-06-01T12:00:03+00:00"),
        ("restore", "item-8", "2026-06-01T12:00:04+00:00"),
        ("upsert", "new-2", "2026-06-01T12:00:05+00:00"),
        ("hide", "new-2", "2026-06-01T12:00:06+00:00"),
    ]
    changes = replay(records)
    assert list(changes.upserts) == ["new-1", "item-5"]
    assert list(changes.hidden) == ["item-7", "new-2"]
    assert changes.upserts["new-1"].features == {"genres": ["g1", "g3"], "year": 0.5}
    assert changes.upserts["new-1"].display == {"title": "Neu é"}
    assert changes.upserts["item-5"].features == {"genres": {"g2": 2.0}}
