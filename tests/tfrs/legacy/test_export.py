"""A bundle from TFRS models of several shapes: the same embeddings, the same ids, or a clear refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs

from longtail.bundle import Bundle, BundleInvariantError
from longtail.trainer.errors import ExportError
from longtail.trainer.tfrs import SampledRetrieval, TfrsOptions, export_tfrs

layers = tf.keras.layers
USERS = ["ann", "bob", "zoë", "dan"]
FILMS = np.array(["Alien", "Brazil", "Cube", "Dune", "Élite"])
DIM = 4


def lookup(words: Any, **options: Any) -> tf.keras.Sequential:
    """A lookup and its table, as the tutorials write them."""
    kind = layers.IntegerLookup if isinstance(words[0], int) else layers.StringLookup
    return tf.keras.Sequential([kind(vocabulary=words, **options), layers.Embedding(len(words) + 2, DIM)])


def export(out: Path, query_model: Any = None, candidate_model: Any = None, **changes: Any) -> Bundle:
    arguments = {
        "task": tfrs.tasks.Retrieval(), "candidates": FILMS, "counts": {"Alien": 3, "Dune": 1}, "queries": USERS,
    }  # fmt: skip
    arguments |= {name: changes.pop(name) for name in arguments if name in changes}
    return export_tfrs(
        query_model or lookup(USERS), candidate_model or lookup(FILMS), out=out / "films",
        options=TfrsOptions(**changes), **arguments,
    )  # fmt: skip


def run(bundle: Bundle, **inputs: Any) -> np.ndarray:
    return ort.InferenceSession(bundle.query_tower).run(None, inputs)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"mask_token": ""},
        *(pytest.param(item, marks=pytest.mark.nightly) for item in ({}, {"mask_token": None}, {"oov_token": "dunno"})),
    ],
)
def test_a_lookup_becomes_a_vocabulary(tmp_path: Path, options: dict[str, Any]) -> None:
    model = tf.keras.Sequential([lookup(USERS, **options), layers.Dense(3, activation="relu"), layers.Dense(DIM)])
    bundle = export(tmp_path, model, queries=[*USERS, "a stranger", ""])
    vocabulary = Bundle.load(tmp_path / "films").vocabularies["user_id"]
    requested = ["dan", "ann", "zoë", "bob", "a stranger", ""]
    rows = np.array(vocabulary.find_all(requested), np.int32)
    assert rows[4] == 0
    assert len({*rows[:4].tolist()}) == 4
    np.testing.assert_allclose(run(bundle, user_id=rows), model(tf.constant(requested)), atol=1e-6)


@pytest.mark.parametrize("mask_token", [pytest.param(None, marks=pytest.mark.nightly), 0])
def test_integers_are_looked_up_as_decimals(tmp_path: Path, mask_token: int | None) -> None:
    model = lookup([7, 42, -5], mask_token=mask_token)
    bundle = export(tmp_path, model, queries=[42, 7, -5, 99], feature="shop")
    rows = np.array(bundle.vocabularies["shop"].find_all(["42", "7", "-5", "99"]), np.int32)
    np.testing.assert_allclose(run(bundle, shop=rows), model(tf.constant([42, 7, -5, 99])), atol=1e-6)


class UserModel(tf.keras.Model):
    """A model of a dict of features."""

    def call(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        return inputs["age"][:, None] * tf.ones([1, DIM])


def test_bundle_describes_the_export(tmp_path: Path) -> None:
    task = SampledRetrieval(weight={"name": "logit_adjusted", "tau": 0.5}, counts=np.ones(5, np.int64), temperature=0.2)
    films = lookup(FILMS)
    bundle = export(
        tmp_path, candidate_model=films, task=task, display=pa.table({"year": [1, 2, 3, 4, 5]}), bias_removal=0.5
    )
    assert Bundle.load(tmp_path / "films").manifest == bundle.manifest
    manifest, labels = bundle.manifest, bundle.labels
    assert (manifest.name, manifest.temperature, manifest.similarity) == ("films", 0.2, "dot")
    assert (manifest.loss.family, manifest.loss.weight) == ("softmax", "logit_adjusted(tau = 0.5)")
    assert (manifest.display, manifest.bias_removal.default) == (["year"], 0.5)
    assert labels.ids.to_pylist() == FILMS.tolist()
    assert labels.counts.tolist() == [3, 0, 0, 1, 0]
    # (count + ½) / (4 + 5·½), of which training divided the scores by the root
    pi = np.array([3.5, 0.5, 0.5, 1.5, 0.5]) / 6.5
    np.testing.assert_allclose(np.exp(labels.log_popularity), pi, rtol=1e-6)
    np.testing.assert_allclose(np.exp(labels.log_pn), np.sqrt(pi) / np.sqrt(pi).sum(), rtol=1e-6)
    assert manifest.bias_removal.noise == "π^0.5"
    np.testing.assert_allclose(bundle.embeddings, films(tf.constant(FILMS)), atol=0)


def test_sampling_probabilities_leave_uniform_noise(tmp_path: Path) -> None:
    """logQ on both sides, weight `relative`: the optimum is log p(y|x). Without them it is log p(y|x)/π."""
    plain, corrected = export(tmp_path / "1"), export(tmp_path / "2", sampling_probability=True)

    assert (plain.manifest.loss.weight, plain.manifest.bias_removal.noise) == ("unit", "π")
    assert plain.labels.log_popularity is None
    assert (corrected.manifest.loss.weight, corrected.manifest.bias_removal.noise) == ("relative", "uniform")
    np.testing.assert_allclose(np.exp(corrected.labels.log_pn), 1 / 5, rtol=1e-6)
    np.testing.assert_allclose(corrected.labels.log_popularity, plain.labels.log_pn)
    with pytest.raises(ExportError, match="sampling_probability: expected False with a SampledRetrieval"):
        export(tmp_path / "3", task=SampledRetrieval(), sampling_probability=True)


def test_candidates_with_features(tmp_path: Path) -> None:
    years = tf.constant([[1979.0], [1985.0], [1997.0], [2021.0], [2021.0]])
    tower = tf.keras.Sequential([layers.Normalization(mean=2000.0, variance=100.0), layers.Dense(DIM)])
    pairs = tf.data.Dataset.from_tensor_slices((FILMS, years))
    one_by_one = export(tmp_path / "1", None, tower, candidates=pairs, counts=np.array([1, 2, 3, 4, 5]))
    in_batches = export(tmp_path / "2", None, tower, candidates=pairs.batch(2), counts={b"Dune": 4})
    np.testing.assert_allclose(one_by_one.embeddings, tower(years), atol=1e-6)
    np.testing.assert_allclose(in_batches.embeddings, tower(years), atol=1e-6)
    assert one_by_one.labels.counts.tolist() == [1, 2, 3, 4, 5]
    assert in_batches.labels.counts.tolist() == [0, 0, 0, 4, 0]


def test_cosine_requires_unit_vectors(tmp_path: Path) -> None:
    def unit(model: tf.keras.Sequential) -> tf.keras.Sequential:
        return tf.keras.Sequential([model, layers.UnitNormalization()])

    bundle = export(tmp_path, unit(lookup(USERS)), unit(lookup(FILMS)), similarity="cosine")
    np.testing.assert_allclose(np.linalg.norm(bundle.embeddings, axis=1), 1, atol=1e-6)
    with pytest.raises(BundleInvariantError, match="unit rows when similarity is cosine"):
        export(tmp_path / "raw", similarity="cosine")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda: {"query_model": lookup(USERS, num_oov_indices=2)}, "expected num_oov_indices of 1, found 2"),
        (
            lambda: {"query_model": UserModel()},
            "query tower: expected a model that takes one tensor; found: .*UserModel",
        ),
        (
            lambda: {"query_model": tf.keras.Sequential([layers.Dense(4)])},
            "query tower: expected a model that takes one tensor; found: .*Sequential",
        ),
        (lambda: {"queries": {"user_id": np.zeros(1, np.int32)}}, "expected a model that takes tensors by name"),
        (lambda: {"counts": {"alien": 3}}, "such as 'Alien', received none of them but 'alien'"),
        (lambda: {"counts": np.ones(3, np.int64)}, r"expected one for each of 5 candidates, received shape \(3,\)"),
        (lambda: {"candidates": FILMS[:0]}, "expected at least one, received none"),
        (
            lambda: {"candidate_model": tf.keras.Sequential([lookup(FILMS), layers.Dense(3)])},
            r"expected embeddings of shape \(4,\), the query model's, found \(3,\)",
        ),
    ],
)
def test_invalid_models_are_refused(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export(tmp_path, **changes())
    assert not (tmp_path / "films").exists()


class Counting(tf.keras.Model):
    """A model that gives something else whenever it is called."""

    calls = 0

    def call(self, ages: tf.Tensor) -> tf.Tensor:
        self.calls += 1
        return ages[:, None] * tf.ones([1, DIM]) * self.calls


class Bessel(tf.keras.Model):
    """A model with an operation that ONNX does not have."""

    def call(self, ages: tf.Tensor) -> tf.Tensor:
        return tf.math.bessel_i0(ages)[:, None] * tf.ones([1, DIM])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Bessel, "expected operations that ONNX has"),
        (Counting, r"expected the trained outputs within 0\.0001, found"),
    ],
)
def test_tower_with_other_onnx_outputs_is_refused(tmp_path: Path, model: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export(tmp_path, model(), queries=np.ones(2, np.float32), feature="age")
