"""The tutorial "Recommending movies: retrieval" of TensorFlow Recommenders, served by Longtail.

    pip install '.[tfrs,index,serve]'
    longtail-train data movielens-100k --out data/movielens-100k
    python examples/tfrs_movielens.py data/movielens-100k --out runs/tfrs
    longtail-index build runs/tfrs --releases releases --publish
    longtail-serve run releases

Model and training are those of https://www.tensorflow.org/recommenders/examples/basic_retrieval, except for the line
marked ONE LINE. The code from `export_tfrs` on is new.
"""

from __future__ import annotations

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # TFRS runs on legacy Keras

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf
import tensorflow_recommenders as tfrs

from longtail.bundle import Bundle
from longtail.trainer.tfrs import SampledRetrieval, export_tfrs

EMBEDDING_DIMENSION = 32


class MovielensModel(tfrs.Model):
    """Combine two towers and a task, as in the tutorial."""

    def __init__(self, user_model: tf.keras.Model, movie_model: tf.keras.Model, task: tfrs.tasks.Retrieval) -> None:
        super().__init__()
        self.movie_model = movie_model
        self.user_model = user_model
        self.task = task

    def compute_loss(self, features: dict[str, tf.Tensor], training: bool = False) -> tf.Tensor:
        """Compute the task's loss; metrics over the whole catalogue are for the evaluation."""
        user_embeddings = self.user_model(features["user_id"])
        positive_movie_embeddings = self.movie_model(features["movie_title"])
        return self.task(user_embeddings, positive_movie_embeddings, compute_metrics=not training)


def read_ratings(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read user ids and movie titles of every rating, as strings."""
    # The tutorial's tfds.load("movielens/100k-ratings"), from the files of `longtail-train data`.
    items = pq.read_table(folder / "items.parquet", columns=["item_id", "title"])
    ratings = pq.read_table(folder / "interactions.parquet").join(items, "item_id")
    return ratings["user_id"].cast(pa.string()).to_numpy().astype(str), ratings["title"].to_numpy().astype(str)


def main(folder: Path, out: Path) -> MovielensModel:
    """Train, evaluate, write the bundle; returns the model."""
    users, titles = read_ratings(folder)
    ratings = tf.data.Dataset.from_tensor_slices({"movie_title": titles, "user_id": users})
    unique_movie_titles, unique_user_ids = np.unique(titles), np.unique(users)
    movies = tf.data.Dataset.from_tensor_slices(unique_movie_titles)

    tf.keras.utils.set_random_seed(42)
    shuffled = ratings.shuffle(100_000, seed=42, reshuffle_each_iteration=False)
    train_size = len(users) * 4 // 5
    train, test = shuffled.take(train_size), shuffled.skip(train_size)
    train_titles = Counter(title.decode() for title in train.map(lambda x: x["movie_title"]).as_numpy_iterator())

    user_model = tf.keras.Sequential(
        [
            tf.keras.layers.StringLookup(vocabulary=unique_user_ids, mask_token=None),
            tf.keras.layers.Embedding(len(unique_user_ids) + 1, EMBEDDING_DIMENSION),
        ]
    )
    movie_model = tf.keras.Sequential(
        [
            tf.keras.layers.StringLookup(vocabulary=unique_movie_titles, mask_token=None),
            tf.keras.layers.Embedding(len(unique_movie_titles) + 1, EMBEDDING_DIMENSION),
        ]
    )
    metrics = tfrs.metrics.FactorizedTopK(candidates=movies.batch(128).map(movie_model))

    # ONE LINE, in the tutorial: task = tfrs.tasks.Retrieval(metrics=metrics)
    task = SampledRetrieval(weight="constant", metrics=metrics)

    model = MovielensModel(user_model, movie_model, task)
    model.compile(optimizer=tf.keras.optimizers.Adagrad(learning_rate=0.1))
    model.fit(train.shuffle(100_000).batch(8192).cache(), epochs=3, verbose=0)
    measured = model.evaluate(test.batch(4096).cache(), verbose=0, return_dict=True)
    print(f"top-100 accuracy of the test ratings: {measured['factorized_top_k/top_100_categorical_accuracy']:.4f}")

    bundle = export_tfrs(
        model.user_model, model.movie_model, task=task, candidates=unique_movie_titles, counts=train_titles,
        queries=unique_user_ids[:1000], out=out,
    )  # fmt: skip
    for bias_removal in (0, 0.5, 1):
        accuracy = top_100_accuracy(model, bundle, next(iter(test.batch(train_size))), bias_removal)
        print(f"the same as served at bias_removal {bias_removal}: {accuracy:.4f}")
    print(f"{out}: a bundle of {bundle.manifest.labels:,} movies; next: longtail-index build {out} --releases releases")
    return model


def top_100_accuracy(
    model: MovielensModel, bundle: Bundle, ratings: dict[str, tf.Tensor], bias_removal: float
) -> float:
    """Compute the share of ratings whose movie an index has in its 100 best."""
    row_of = {title: row for row, title in enumerate(bundle.labels.ids.to_pylist())}
    movies = np.array([row_of[title.decode()] for title in ratings["movie_title"].numpy()])
    queries = bundle.augmentation.queries(model.user_model(ratings["user_id"]).numpy(), bias_removal)
    scores = queries @ bundle.rows().T
    better = (scores > scores[np.arange(len(movies)), movies][:, None]).sum(axis=1)
    return float((better < 100).mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `longtail-train data movielens-100k --out FOLDER` wrote")
    parser.add_argument("--out", type=Path, required=True, help="the bundle")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.out)
