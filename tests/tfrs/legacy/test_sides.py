"""Both towers in one bundle: the label tower, what is measured on held-out pairs, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs

from longtail.bundle import Bundle, Tower
from longtail.trainer.errors import DataError, ExportError
from longtail.trainer.tfrs import TfrsOptions, Validation, export_tfrs

layers = tf.keras.layers
USERS = ["ann", "bob", "zoë"]
FILMS = np.array(["Alien", "Brazil (1985)", "Cube", "Dune", "Élite"])
KINDS = np.array(["space", "city", "box", "space", "city"])
DIM = 3
RECALL = {"ks": [1, 2], "metric": "recall@1", "bias_removal": [0.0, 0.5, 1.0], "bootstrap": 10}


def table(lookup: Any) -> tf.keras.Sequential:
    return tf.keras.Sequential([lookup, layers.Embedding(20, DIM)])


class Sum(tf.keras.Model):
    """The sum of what parts make of features."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        self.parts = parts

    def call(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        return tf.add_n([part(inputs[name]) for name, part in self.parts.items()])


class Title(tf.keras.Model):
    """As TFRS' MovieModel: the one tensor of titles, looked up and split into words."""

    def __init__(self) -> None:
        super().__init__()
        words = layers.TextVectorization(vocabulary=["alien", "1985", "cube"])
        self.title = table(layers.StringLookup(vocabulary=FILMS, mask_token=None))
        self.words = tf.keras.Sequential(
            [words, layers.Embedding(9, DIM, mask_zero=True), layers.GlobalAveragePooling1D()]
        )

    def call(self, titles: tf.Tensor) -> tf.Tensor:
        return self.title(titles) + self.words(titles)


def films() -> Sum:
    return Sum(film=table(layers.StringLookup(vocabulary=FILMS)), kind=table(layers.StringLookup(vocabulary=KINDS[:3])))


def export(out: Path, candidate_model: Any = None, query_model: Any = None, **changes: Any) -> Bundle:
    arguments = {
        "task": tfrs.tasks.Retrieval(), "candidates": (FILMS, {"film": FILMS, "kind": KINDS}),
        "counts": np.array([9, 3, 2, 1, 0]), "queries": USERS, "out": out / "films",
    }  # fmt: skip
    user = tf.keras.Sequential([layers.StringLookup(vocabulary=USERS), layers.Embedding(5, DIM)])
    arguments |= {name: changes.pop(name) for name in arguments if name in changes}
    return export_tfrs(query_model or user, candidate_model or films(), options=TfrsOptions(**changes), **arguments)


def label_tower(bundle: Bundle) -> Tower:
    assert bundle.label_tower is not None
    return Tower(bundle.label_tower, bundle.manifest.label_features, bundle.vocabularies, DIM, file="label_tower.onnx")


def test_a_model_of_named_features_embeds_new_labels(tmp_path: Path) -> None:
    model = films()
    bundle = export(tmp_path, model)
    tower = label_tower(Bundle.load(tmp_path / "films"))
    result = tower.embed(tower.read([{"film": "Dune", "kind": "space"}, {"film": "new", "kind": "box"}]))
    new = model({"film": tf.constant(["new"]), "kind": tf.constant(["box"])})
    np.testing.assert_allclose(result, [bundle.embeddings[3], new[0]], atol=1e-6)
    assert bundle.manifest.own_id == "film"
    batches = tf.data.Dataset.from_tensor_slices((FILMS, {"film": FILMS, "kind": KINDS}))
    again = export(tmp_path / "2", model, candidates=batches.batch(2))
    np.testing.assert_array_equal(again.embeddings, bundle.embeddings)
    assert again.label_tower is not None


def test_model_of_titles_embeds_new_titles_by_words(tmp_path: Path) -> None:
    model = Title()
    bundle = export(tmp_path, model, candidates=FILMS, label_feature="title")
    tower = label_tower(bundle)
    assert [(f.name, f.kind) for f in tower.features] == [("title", "id"), ("title_words", "text")]
    assert bundle.manifest.own_id == "title"
    result = tower.embed(tower.read([{"title": "Alien (1985)", "title_words": "Alien (1985)"}]))
    np.testing.assert_allclose(result, model(tf.constant(["Alien (1985)"])), atol=1e-6)


def test_differing_vocabulary_gets_another_name(tmp_path: Path) -> None:
    query = Sum(kind=table(layers.StringLookup(vocabulary=["box", "tree"])))
    bundle = export(tmp_path, films(), query, queries={"kind": ["tree", "?"]})
    vocabularies = {f.name: f.vocabulary for f in (*bundle.manifest.query_features, *bundle.manifest.label_features)}
    assert vocabularies == {"kind": "label_kind", "film": "film"}
    assert bundle.manifest.query_features[0].vocabulary == "kind"
    assert bundle.vocabularies["kind"].ids.to_pylist() == ["box", "tree"]
    tower = label_tower(bundle)
    np.testing.assert_allclose(tower.embed(tower.read([{"film": "Cube", "kind": "box"}])), bundle.embeddings[2:3])


def test_without_a_label_tower(tmp_path: Path) -> None:
    ids = table(layers.StringLookup(vocabulary=FILMS))
    years = np.array([[1979.0], [1985.0], [1997.0], [2021.0], [2021.0]], np.float32)
    dense = tf.keras.Sequential([layers.Dense(DIM)])
    unnamed = tf.data.Dataset.from_tensor_slices((FILMS, years))
    lower = Sum(film=lambda film: ids(tf.strings.lower(film)))
    lower.ids = ids
    assert export(tmp_path / "id", ids, candidates=FILMS).label_tower is None
    assert export(tmp_path / "unnamed", dense, candidates=unnamed).label_tower is None
    assert export(tmp_path / "function", lambda inputs: ids(inputs["film"])).label_tower is None
    assert export(tmp_path / "not wanted", lower, label_tower=False).label_tower is None
    with pytest.warns(
        UserWarning, match="no label tower, so labels cannot be added while serving: .* found StringLower"
    ):
        assert export(tmp_path / "not possible", lower).label_tower is None
    for name, model, candidates, message in (
        ("1", lower, (FILMS, {"film": FILMS}), "found StringLower between feature 'film' and it"),
        ("2", ids, FILMS, "label tower: expected features beside the id, 'label_id', found none"),
        ("3", dense, unnamed, "label tower: expected a Keras model of tensors by name"),
    ):
        with pytest.raises(ExportError, match=message):
            export(tmp_path / name, model, candidates=candidates, label_tower=True)


class Scores(tf.keras.Model):
    """Queries and labels whose product is a table of scores."""

    def __init__(self, words: Any, rows: Any) -> None:
        super().__init__()
        self.lookup = layers.StringLookup(vocabulary=words, mask_token=None)
        self.rows = tf.constant(np.array([np.zeros(DIM), *rows]), tf.float32)

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.rows, self.lookup(ids))


def measured(out: Path, **changes: Any) -> Bundle:
    """Ann's scores are 0 for all; bob's are 9 for Cube. π is .50, .20, .14, .08, .03 and some more."""
    query = Scores(USERS, [np.zeros(DIM), [9.0, 0, 0], np.zeros(DIM)])
    label = Scores(FILMS, [np.zeros(DIM), np.zeros(DIM), [1.0, 0, 0], np.zeros(DIM), np.zeros(DIM)])
    validation = Validation(["ann", "ann", "bob", "bob"], ["Alien", "Brazil (1985)", "Cube", "nowhere"])
    return export(out, label, query, candidates=FILMS, **{"validation": validation, "evaluation": RECALL} | changes)


def test_curve_and_default_come_from_held_out_pairs(tmp_path: Path) -> None:
    # At λ = 0 ann's list begins with row 0, Alien, by order; at λ > 0 by π. Bob's is Cube's at any λ of these.
    bundle = measured(tmp_path)
    dial = bundle.manifest.bias_removal
    recall = {point.bias_removal: point.metrics["recall@2"].value for point in dial.curve}
    assert recall == {0.0: 1.0, 0.5: 1.0, 1.0: 1.0}
    assert [point.metrics["recall@1"].value for point in dial.curve] == [0.75, 0.75, 0.75]  # ½ of ann's, all of bob's
    assert (dial.default, dial.chosen_by, dial.curve_split) == (1.0, "valid recall@1", "valid")  # of equals the largest
    figures = json.loads((tmp_path / "films" / "metrics.json").read_text())
    assert figures["held_out"]["valid"] == {
        "pairs": 3, "distinct": 3, "short": 0, "repeated": 0, "measured": 3, "queries": 2, "requests": 2
    }  # fmt: skip

    observed = [["Alien", "nowhere"], ["Alien"], [], []]
    without = measured(tmp_path / "seen", validation=Validation(
        ["ann", "ann", "bob", "bob"], ["Alien", "Brazil (1985)", "Cube", "nowhere"], seen_labels=observed))  # fmt: skip
    result = {point.bias_removal: point.metrics["recall@1"].value for point in without.manifest.bias_removal.curve}
    assert result == {0.0: 1.0, 0.5: 1.0, 1.0: 1.0}

    fixed = measured(tmp_path / "fixed", bias_removal=0.0).manifest.bias_removal
    assert (fixed.default, fixed.chosen_by, len(fixed.curve)) == (0.0, "the caller of export_tfrs", 3)
    floor = measured(tmp_path / "floor", evaluation=RECALL | {"floor": {"torso": 0.1}}).manifest.bias_removal
    assert floor.chosen_by == "the floor torso >= 0.1 and valid recall@1"
    uniform = measured(tmp_path / "uniform", sampling_probability=True).manifest
    assert [(point.bias_removal, point.popularity) for point in uniform.bias_removal.curve] == [
        (0, 0),
        (0, 0.5),
        (0, 1),
    ]
    assert (uniform.bias_removal.default, uniform.popularity.default) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"validation": Validation(["ann"], ["Cube"] * 2)}, ExportError, "a label for each of 1 queries, received 2"),
        ({"validation": Validation(["ann"], ["nowhere"])}, ExportError, "such as 'Alien', received none"),
        ({"validation": Validation(["ann"], ["Cube"], seen_labels=[])}, ExportError, "expected 1 lists, received 0"),
        ({"validation": Validation({"user": ["ann"]}, ["Cube"])}, ExportError, r"the columns \['user_id'\], received"),
        ({"validation": Validation(["ann"], ["Cube"], seen_labels=[["Cube"]])}, DataError, "none of 1: 1 seen before"),
        ({"evaluation": {"ks": [9], "metric": "recall@9"}}, DataError, "a k of at most 5, all labels, received"),
        ({"evaluation": {"k": 9}}, ValueError, "Extra inputs"),
        ({"evaluation": {"history": "growing"}}, ExportError, "expected none with export_tfrs, .* received 'growing'"),
    ],
)  # fmt: skip
def test_invalid_validation_is_refused(tmp_path: Path, changes: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        measured(tmp_path, **changes)
    assert not (tmp_path / "films").exists()
