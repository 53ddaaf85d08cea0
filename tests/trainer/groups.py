"""Labels in groups of four: a query chooses some of one group, and another of it is to be found."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from longtail.trainer.progress import Reporter
from longtail.trainer.train import train
from tests.trainer import tiny


def found_of_groups(work: Path, loss: dict[str, Any], *, groups: int, queries: int, chosen: int) -> float:
    """The mean reciprocal rank of a label that is held out, after eight epochs by a loss.

    Args:
        work: a folder of the run's own.
        loss: section of its recipe.
        groups: of four labels.
        queries: Q.
        chosen: labels that a query chooses of its group, at most 3.
    """
    rng = np.random.default_rng(0)
    labels_QP = rng.integers(0, groups, queries)[:, None] * 4 + np.array([rng.permutation(4) for _ in range(queries)])
    queries_Q = np.arange(queries, dtype=np.int32)
    pairs = tiny.pairs(*[(query, label) for query in queries_Q for label in labels_QP[query, :chosen]])
    wide = {"dim": 8}
    recipe = tiny.recipe(
        query={"features": [tiny.USER | wide]}, label={"features": [tiny.ITEM | wide]},
        model={"dim": 8, "temperature": 0.1}, loss=loss, training={"batch_size": 60},
        optimizer={"embedding_learning_rate": 0.05},
    )  # fmt: skip
    data = tiny.dataset(pairs, queries=queries, labels=4 * groups)
    reporter = Reporter(Console(file=io.StringIO()))
    trained = train(recipe, data, epochs=8, work=work, logs=work / "logs", reporter=reporter)
    scores = trained.embed_queries(queries_Q) @ trained.model.embed_labels().T
    np.put_along_axis(scores, labels_QP[:, :chosen], -np.inf, axis=1)
    own = np.take_along_axis(scores, labels_QP[:, chosen : chosen + 1], axis=1)
    return float(np.mean(1 / (1 + (scores > own).sum(axis=1))))
