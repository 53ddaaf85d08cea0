"""Runs where tensorflow-recommenders is installed: trains towers of several features, exports them, asks TFRS.

python -m tests.tfrs.train_two_features BUNDLE ANSWER.json
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import pyarrow as pa
import tensorflow as tf
import tensorflow_recommenders as tfrs

from longtail.trainer.tfrs import Validation, export_tfrs

layers = tf.keras.layers
USERS = np.array([f"user {row}" for row in range(30)])
FILMS = np.array([f"film {row}" for row in range(40)])
CATEGORIES = np.array(["drama", "comedy", "Ärzte"])[np.arange(40) % 3]
TITLES = np.array([f"The {category}, part-{row}" for row, category in enumerate(CATEGORIES)])
ASKED = {"user_id": np.array(["user 3", "a stranger"]), "age": np.array([23, 61])}
ADDED = {"film_id": "film new", "category": "comedy", "title": "The comedy: PART-3"}


class QueryModel(tf.keras.Model):
    """As in TFRS' tutorials: a subclassed model of a dict of features, a dense stack on top."""

    def __init__(self, ages: np.ndarray) -> None:
        super().__init__()
        self.user = tf.keras.Sequential(
            [layers.StringLookup(vocabulary=USERS, mask_token=None), layers.Embedding(31, 8)]
        )
        self.age = layers.Normalization(axis=None)
        self.age.adapt(ages)
        self.buckets = tf.keras.Sequential([layers.Discretization([25.0, 50.0]), layers.Embedding(3, 4)])
        self.top = tf.keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(8)])

    def call(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        age = tf.reshape(self.age(inputs["age"]), (-1, 1))
        return self.top(tf.concat([self.user(inputs["user_id"]), age, self.buckets(inputs["age"])], axis=1))


class FilmModel(tf.keras.Model):
    """A label's id, category and title."""

    def __init__(self) -> None:
        super().__init__()
        self.film = tf.keras.Sequential(
            [layers.StringLookup(vocabulary=FILMS, mask_token=None), layers.Embedding(41, 8)]
        )
        self.category = layers.StringLookup(vocabulary=np.unique(CATEGORIES), output_mode="one_hot")
        words = layers.TextVectorization(max_tokens=50)
        words.adapt(TITLES)
        self.title = tf.keras.Sequential(
            [words, layers.Embedding(50, 8, mask_zero=True), layers.GlobalAveragePooling1D()]
        )
        self.top = layers.Dense(8)

    def call(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        parts = [self.film(inputs["film_id"]), self.category(inputs["category"]), self.title(inputs["title"])]
        return self.top(tf.concat(parts, axis=1))


class Recommender(tfrs.Model):
    """Both towers and TFRS' own task."""

    def __init__(self, ages: np.ndarray) -> None:
        super().__init__()
        self.query_model, self.film_model, self.task = QueryModel(ages), FilmModel(), tfrs.tasks.Retrieval()

    def compute_loss(self, inputs: dict[str, tf.Tensor], training: bool = False) -> tf.Tensor:
        films = {name: inputs[name] for name in ("film_id", "category", "title")}
        return self.task(self.query_model({"user_id": inputs["user_id"], "age": inputs["age"]}), self.film_model(films),
                         compute_metrics=not training)  # fmt: skip


def main(bundle: Path, answer: Path) -> None:
    tf.keras.utils.set_random_seed(7)
    rng = np.random.default_rng(0)
    users = rng.integers(0, 30, 1200)
    films = (users + rng.geometric(0.12, 1200)) % 38  # film 38 and 39 are new
    columns = {"user_id": USERS[users], "age": 15 + 2 * users}
    labels = {"film_id": FILMS, "category": CATEGORIES, "title": TITLES}
    train, valid = np.arange(1000), np.arange(1000, 1200)
    model = Recommender(columns["age"])
    model.compile(optimizer=tf.keras.optimizers.Adagrad(0.2))
    pairs: dict[str, Any] = columns | {name: column[films] for name, column in labels.items()}
    rows = tf.data.Dataset.from_tensor_slices({name: column[train] for name, column in pairs.items()})
    model.fit(rows.batch(100), epochs=4, verbose=0)

    export_tfrs(
        model.query_model, model.film_model, task=model.task, candidates=(FILMS, labels),
        counts=np.bincount(films[train], minlength=40),
        queries={name: column[valid] for name, column in columns.items()}, out=bundle, label_tower=True,
        display=pa.table({"title": TITLES}),
        validation=Validation(
            {name: column[valid] for name, column in columns.items()}, FILMS[films[valid]],
            seen=[FILMS[np.unique(films[train][users[train] == user])].tolist() for user in users[valid]],
        ),
        evaluation={"ks": [5, 10], "metric": "recall@10"},
    )  # fmt: skip

    asked = model.query_model({name: tf.constant(column) for name, column in ASKED.items()})
    everything = {name: tf.constant([*column, ADDED[name]]) for name, column in labels.items()}
    scores = tf.matmul(asked, model.film_model(everything), transpose_b=True).numpy()
    answer.write_text(
        json.dumps([dict(zip([*FILMS, ADDED["film_id"]], map(float, row), strict=True)) for row in scores])
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
