"""Check that a pair of weight 2 equals the pair twice: in loss, gradient, frequencies and dial."""

from typing import Any

import numpy as np
import pytest

from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.losses.implied_noise import name_noise
from longtail.trainer.model.step import TrainStep
from longtail.trainer.model.two_tower import TwoTower
from tests.trainer import tiny

TWICE = tiny.pairs((0, 0), (0, 0), (1, 1), (1, 2))
WEIGHTED = tiny.pairs((0, 0), (1, 1), (1, 2), weights=[2, 1, 1])


def stepped(rows: Pairs, loss: dict[str, Any]) -> tuple[float, np.ndarray]:
    """Return the summed loss of an epoch in one batch, and the change of labels by a step down its gradient."""
    recipe = tiny.recipe(
        loss=loss,
        optimizer={"embeddings": "sgd", "dense": "sgd", "embedding_learning_rate": float(len(rows))},
        model={"dim": 4, "similarity": "dot", "temperature": 1.0},
    )
    data = tiny.dataset(rows, queries=2, labels=4)
    model = TwoTower(recipe, Encoding.fit(recipe, data), 4)
    rng = np.random.default_rng(0)
    for table in model.tables.values():
        table.table.assign(rng.standard_normal(table.table.shape).astype("float32"))
    before = model.embed_labels()
    step = TrainStep(
        model,
        data.label_visits(one_label_per_query=False),
        weighted_counts_L=data.label_visits(one_label_per_query=False, weighted=True),
        batch_size=len(rows),
        total_steps=1,
        pairs=len(rows),
        terms=(),
    )
    mean = float(step(tiny.batch(data.train)))
    return mean * len(rows), model.embed_labels() - before


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("weight", ["importance", "constant", "tail"])
def test_a_weight_of_2_is_the_pair_twice(weight: str) -> None:
    """Margins use π of the weighted pairs."""
    loss = {"sampler": {"name": "full"}, "weight": weight}

    (twice, moved_twice), (weighted, moved) = stepped(TWICE, loss), stepped(WEIGHTED, loss)

    assert twice > 0.1
    np.testing.assert_allclose(weighted, twice, rtol=1e-5)
    np.testing.assert_allclose(moved, moved_twice, atol=1e-5)
    assert np.abs(moved).max() > 0.01


def test_in_batch_noise_is_of_the_pairs_that_batches_hold() -> None:
    """A batch holds a pair once whatever it weighs: λ adds π of pairs, and π of weights is the other dial."""
    from longtail.trainer.history import TrainingHistory
    from longtail.trainer.trained import Trained

    recipe = tiny.recipe(loss={"sampler": {"name": "in_batch"}, "weight": "unit"})

    def trained(rows: Pairs) -> Trained:
        data = tiny.dataset(rows, queries=2, labels=4)
        encoding = Encoding.fit(recipe, data)
        model = TwoTower(recipe, encoding, 4)
        weighted_L = data.label_visits(one_label_per_query=False, weighted=True)
        step = TrainStep(
            model, data.label_visits(one_label_per_query=False), weighted_counts_L=weighted_L, batch_size=2,
            total_steps=1, pairs=len(rows), terms=(),
        )  # fmt: skip
        return Trained(recipe, data, encoding, model, step, TrainingHistory())

    pairs_as_such = np.log(np.array([1.5, 1.5, 1.5, 0.5]) / 5)
    np.testing.assert_allclose(trained(WEIGHTED).log_noise, pairs_as_such, atol=1e-6)
    assert trained(WEIGHTED).noise().separate_prior
    repeated = trained(TWICE)
    assert not repeated.noise().separate_prior
    assert name_noise(repeated.log_noise, repeated.log_noise) == "π"
