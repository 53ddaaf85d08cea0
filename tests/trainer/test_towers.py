from pathlib import Path
from typing import Any

import keras
import numpy as np
import onnxruntime
import pytest

from longtail.trainer.export.onnx import write_onnx
from longtail.trainer.model.embedding import Dropout, dropout_masks, list_layers
from longtail.trainer.model.features import OrMissing
from longtail.trainer.model.pooling import Recency
from longtail.trainer.model.towers import Towers, build_towers, in_float32
from tests.trainer import tiny

BAG = {"name": "words", "kind": "bag", "dim": 3, "combiner": "sum"}
TABLE = np.array([[0, 0, 0], [1, -2, 0.5], [-4, 1, 0.25]], np.float32)
INPUTS = {"words": np.int32([[1, 2], [2, 0]]), "words__weight": np.float32([[2, 1], [1, 0]])}
"""Two rows of x: 2·e1 + e2 = (−2, −3, 1.25) and e2 = (−4, 1, 0.25)."""


def built(dim: int = 3, similarity: str = "dot", **tower: Any) -> Towers:
    recipe = tiny.recipe(
        query={"features": [BAG], **tower}, label={"features": [tiny.ITEM]},
        model={"dim": dim, "similarity": similarity},
    )  # fmt: skip
    towers = build_towers(recipe, {"words": 3, "item_id": 2}, {})
    towers.tables["words"].table.assign(TABLE)
    return towers


def dense(tower: keras.Model) -> list[keras.layers.Dense]:
    return [layer for layer in tower.layers if isinstance(layer, keras.layers.Dense)]


def test_relu_of_the_bag_is_followed_by_a_projection() -> None:
    """[Re19 §5]'s x → 512 → ReLU → 512 → unit norm, of widths 3 and 3."""
    tower = built(similarity="cosine", input_activation="relu").query
    (projection,) = dense(tower)
    projection.set_weights([np.array([[1, 0, 2], [0, 3, 4], [4, 4, 0]], np.float32), np.float32([0, 1, -1])])

    rows = [np.array([5, 6, -1]), np.array([1, 5, 3])]
    expected = [row / np.linalg.norm(row) for row in rows]
    np.testing.assert_allclose(np.asarray(tower(INPUTS)), expected, rtol=1e-6)


def list_dropouts(tower: keras.Model) -> list[Dropout]:
    return [layer for layer in list_layers(tower) if isinstance(layer, Dropout)]


def test_dropout_multiplies_by_its_mask_only_in_the_block() -> None:
    towers = built(dropout=0.5)
    (layer,) = list_dropouts(towers.query)
    mask = np.float32([[2, 0, 2], [0, 2, 0]])
    with dropout_masks({layer: mask}):
        np.testing.assert_allclose(np.asarray(towers.query(INPUTS)), [[-4, 0, 2.5], [0, 2, 0]])

    np.testing.assert_allclose(np.asarray(towers.query(INPUTS)), [[-2, -3, 1.25], [-4, 1, 0.25]])
    assert list_dropouts(built().query) == []
    assert list_dropouts(towers.label) == []


def test_exported_towers_have_no_dropout(tmp_path: Path) -> None:
    towers = built(dropout=0.5, input_activation="relu")
    write_onnx(towers, ["query"], tmp_path)

    session = onnxruntime.InferenceSession(tmp_path / "query.onnx", providers=["CPUExecutionProvider"])
    output = session.run(None, INPUTS)[0]
    np.testing.assert_allclose(output, np.asarray(towers.query(INPUTS)), rtol=1e-5)


@pytest.mark.usefixtures("eager")
def test_every_step_draws_fresh_masks_for_both_towers() -> None:
    """At a tiny learning rate, two steps on one batch differ only by their masks."""
    data = tiny.dataset(tiny.pairs((0, 0), (1, 1), (2, 2)), queries=3, labels=3)

    def losses(**rates: float) -> list[float]:
        job = tiny.recipe(
            query={"features": [tiny.USER], "dropout": rates.get("query", 0)},
            label={"features": [tiny.ITEM], "dropout": rates.get("label", 0)},
            optimizer={"embedding_learning_rate": 1e-30},
        )
        model = tiny.model(job, data, batch_size=3)
        before = model.embed_queries({"user_id": np.int32([1, 2, 3])})
        values = [float(model.train_step(tiny.batch(data.train))) for _ in range(2)]
        np.testing.assert_array_equal(model.embed_queries({"user_id": np.int32([1, 2, 3])}), before)
        return values

    plain = losses()
    assert plain[0] == plain[1]
    for rates in ({"query": 0.5}, {"label": 0.5}):
        first, second = losses(**rates)
        assert len({first, second, plain[0]}) == 3
        assert losses(**rates) == [first, second]


def numpy_dense(x: np.ndarray, layer: keras.layers.Dense) -> np.ndarray:
    kernel, *bias = (np.asarray(weight, np.float64) for weight in layer.get_weights())
    return x @ kernel + (bias[0] if bias else 0)


def randomised(tower: keras.Model) -> list[keras.layers.Dense]:
    """Its dense layers, biases no longer 0."""
    rng = np.random.default_rng(3)
    for layer in dense(tower):
        layer.set_weights([rng.normal(size=weight.shape) for weight in layer.get_weights()])
    return dense(tower)


def test_a_vector_is_normalised_projected_and_replaced_where_it_is_missing() -> None:
    feature = {"name": "image", "kind": "vector", "dims": 2, "projection": 3, "normalise": True}
    recipe = tiny.recipe(query={"features": [feature]}, model={"dim": 3, "similarity": "dot"})
    tower = build_towers(recipe, {"item_id": 2}, {}).query
    (projection,) = randomised(tower)
    (absent,) = [layer for layer in tower.layers if isinstance(layer, OrMissing)]
    np.testing.assert_array_equal(absent.vector, [0, 0, 0])
    absent.vector.assign([7, 8, 9])

    output = tower({"image": np.float32([[3, 4], [0, 0], [5, 0]]), "image__missing": np.float32([0, 0, 1])})
    unit = np.array([[0.6, 0.8], [0, 0]])
    np.testing.assert_allclose(np.asarray(output), [*numpy_dense(unit, projection), [7, 8, 9]], rtol=1e-5)


def test_numbers_are_standardised_and_have_a_flag() -> None:
    """log(1 + 7) is 3 log 2; minus a mean of log 2, over log 2: 2, and −4 of −7. A missing one is 0 at first."""
    feature = {"name": "age", "kind": "number", "transform": "log", "missing": "flag"}
    recipe = tiny.recipe(query={"features": [feature]}, model={"dim": 2, "similarity": "dot"})
    tower = build_towers(recipe, {"item_id": 2}, {"age": (np.log(2), np.log(2))}).query

    output = tower({"age": np.float32([7, -7, 0]), "age__missing": np.float32([0, 0, 1])})
    np.testing.assert_allclose(np.asarray(output), [[2, 0], [-4, 0], [0, 1]], atol=1e-5)


def test_a_date_is_the_mean_of_its_parts_embeddings() -> None:
    recipe = tiny.recipe(
        query={"features": [{"name": "born", "kind": "date", "dim": 2}]},
        model={"dim": 2, "similarity": "dot"},
    )
    towers = build_towers(recipe, {"item_id": 2}, {})
    table = np.arange(122).reshape(61, 2)
    towers.tables["born"].table.assign(table)

    np.testing.assert_allclose(np.asarray(towers.query({"born": np.int32([[1, 3, 5, 11]])})), [[10, 11]])


def test_later_entries_of_a_history_weigh_more() -> None:
    """With a half-life of 1 entry, three entries weigh ¼, ½ and 1; padding does not count."""
    weights = Recency(1, name="recency")(np.float32([[1, 0, 1, 1, 0], [1, 0, 0, 0, 0]]))
    np.testing.assert_allclose(np.asarray(weights), [[0.25, 0, 0.5, 1, 0], [1, 0, 0, 0, 0]])


def test_towers_trained_in_bfloat16_serve_in_float32() -> None:
    features = [BAG, {"name": "image", "kind": "vector", "dims": 2, "projection": 4}]
    inputs = INPUTS | {"image": np.float32([[3, 4], [0, 0]]), "image__missing": np.float32([0, 1])}

    def tower(precision: str) -> keras.Model:
        query = {"features": features, "hidden": [5]}
        recipe = tiny.recipe(query=query, training={"precision": precision})
        return build_towers(recipe, {"words": 3, "item_id": 2}, {}).query

    with in_float32(tower("mixed_bfloat16")) as half:
        np.testing.assert_allclose(np.asarray(half(inputs)), np.asarray(tower("float32")(inputs)), rtol=1e-5)
