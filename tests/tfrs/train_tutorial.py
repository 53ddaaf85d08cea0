"""Runs where tensorflow-recommenders is installed: trains the example, and asks TFRS' own brute force.

python -m tests.tfrs.train_tutorial DATA BUNDLE ANSWER.json USER…
"""

import json
import sys
from pathlib import Path

import numpy as np

from examples.tfrs_movielens import main, read_ratings, tf, tfrs

data, bundle, answer, *users = sys.argv[1:]
model = main(Path(data), Path(bundle))
titles = np.unique(read_ratings(Path(data))[1])
index = tfrs.layers.factorized_top_k.BruteForce(model.user_model, k=len(titles))
index.index(model.movie_model(tf.constant(titles)), tf.constant(titles))
scores, result = index(tf.constant(users))
Path(answer).write_text(
    json.dumps(
        {
            user: {title.decode(): float(score) for title, score in zip(row.numpy(), row_scores.numpy(), strict=True)}
            for user, row, row_scores in zip(users, result, scores, strict=True)
        }
    )
)
