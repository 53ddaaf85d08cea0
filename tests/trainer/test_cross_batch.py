"""Check negatives of earlier batches against NumPy: memory, losses and gradients.

Legend: `B` batch, `M` remembered labels, `L` labels, `D` dimensions.
"""

from typing import Any

import numpy as np
import pytest
from keras import ops

from longtail.trainer.model.two_tower import TwoTower
from longtail.trainer.sampling import SAMPLERS, LabelTable, SamplerSetup
from tests.trainer import tiny

L, B, M, T = 7, 3, 5, 0.1
TRAIN = tiny.pairs(*[(query, label) for query, label in enumerate([0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5])])
COUNTS = np.bincount(TRAIN.labels, minlength=L)
pytestmark = pytest.mark.usefixtures("eager")


def build_model(
    *, gradients: bool, size: int = B, negatives: int = M, rate: float = 0.5, embeddings: str = "adam", **loss: Any
) -> TwoTower:
    sampler = {"name": "cross_batch", "negatives": negatives} | ({"gradients": True} if gradients else {})
    recipe = tiny.recipe(
        label={"features": [{**tiny.ITEM, "unknown_rate": 0}]},
        model={"dim": 4, "label_bias": True, "temperature": T},
        optimizer={"embedding_learning_rate": rate, "embeddings": embeddings},
        loss={"sampler": sampler, **loss},
    )
    model = tiny.model(recipe, tiny.dataset(TRAIN, queries=12, labels=L), batch_size=size)
    rng = np.random.default_rng(2)
    for table in model.tables.values():
        table.table.assign(rng.standard_normal(table.table.shape))
    model.begin_epoch()
    return model


def remembered(model: TwoTower) -> np.ndarray:
    return ops.convert_to_numpy(model.sampler.variables[0])


@pytest.mark.parametrize("gradients", [False, True], ids=["as they were", "as they are"])
def test_losses_with_a_memory_by_hand(gradients: bool) -> None:
    """Against the batch and the five labels before it: embedded in their own step, or in this one."""
    model = build_model(gradients=gradients)
    memory_M = remembered(model)
    rows_MD, bias_M = model.embed_labels()[memory_M], model.label_biases()[memory_M]
    for rows in ([0, 4, 6], [1, 10, 8], [5, 2, 3], [7, 11, 9]):
        batch = TRAIN.take(np.array(rows))
        rows_LD, bias_L = model.embed_labels(), model.label_biases()
        users_BD = model.embed_queries({"user_id": batch.queries + 1})
        if gradients:
            rows_MD, bias_M = rows_LD[memory_M], bias_L[memory_M]
        labels = np.concatenate([batch.labels, memory_M])
        logits = users_BD @ np.concatenate([rows_LD[batch.labels], rows_MD]).T / T
        logits += np.concatenate([bias_L[batch.labels], bias_M])
        expected = [
            np.log1p(
                sum(np.exp(logits[row, at] - logits[row, row]) for at in range(B + M) if labels[at] != labels[row])
            )
            for row in range(B)
        ]
        assert float(model.train_step(tiny.batch(batch))) == pytest.approx(np.mean(expected), rel=1e-5)
        memory_M = labels_after = np.concatenate([memory_M, batch.labels])[-M:]
        rows_MD = np.concatenate([rows_MD, rows_LD[batch.labels]])[-M:]
        bias_M = np.concatenate([bias_M, bias_L[batch.labels]])[-M:]
        assert remembered(model).tolist() == labels_after.tolist()


@pytest.mark.parametrize("gradients", [False, True], ids=["as they were", "as they are"])
def test_earlier_labels_move_only_with_gradients(gradients: bool) -> None:
    model = build_model(gradients=gradients)
    before = ops.convert_to_numpy(model.tables["item_id"].table)[1:].copy()
    batch = TRAIN.take(np.array([0, 4, 6]))
    memory, batch_labels = set(remembered(model)), set(batch.labels)
    assert memory - batch_labels

    model.train_step(tiny.batch(batch))

    moved = np.flatnonzero((ops.convert_to_numpy(model.tables["item_id"].table)[1:] != before).any(axis=1))
    assert set(moved) == (batch_labels | memory if gradients else batch_labels)


def test_labels_of_the_batch_get_the_gradient_of_the_memory() -> None:
    """Without gradients through the memory, the batch's on its labels as negatives count for (B − 1 + M)/(B − 1) of it.

    Biases move by SGD of rate 1, which is the gradient.
    """
    model = build_model(gradients=False, embeddings="sgd", rate=1.0)
    memory_M, rows_LD, before_L = remembered(model), model.embed_labels(), model.label_biases()
    batch = TRAIN.take(np.array([0, 4, 6]))
    users_BD = model.embed_queries({"user_id": batch.queries + 1})
    labels = np.concatenate([batch.labels, memory_M])
    logits_BC = users_BD @ rows_LD[labels].T / T + before_L[labels]
    own_B = np.arange(B)
    weight_BC = np.exp(logits_BC - logits_BC[own_B, own_B][:, None]) * (labels != batch.labels[:, None])
    share_BC = weight_BC / (1 + weight_BC.sum(axis=1, keepdims=True))
    expected_B = share_BC.sum(axis=1) - (B - 1 + M) / (B - 1) * share_BC[:, :B].sum(axis=0)

    model.train_step(tiny.batch(batch))

    moved_B = (model.label_biases() - before_L)[batch.labels]
    np.testing.assert_allclose(moved_B, expected_B / B, rtol=1e-4)


def test_the_memory_begins_with_draws_and_is_embedded_every_epoch() -> None:
    share = np.array([0.5, 0.3, 0.2, 0.0])
    with np.errstate(divide="ignore"):
        setup = SamplerSetup(np.log([0.4, 0.3, 0.2, 0.1]), 4, 2, log_share_L=np.log(share))
    sampler = SAMPLERS["cross_batch"](setup, negatives=20_000)
    labels = ops.convert_to_numpy(sampler.draw(None, None))

    np.testing.assert_allclose(np.bincount(labels, minlength=4) / 20_000, share, atol=0.02)
    np.testing.assert_allclose(np.exp(sampler.log_q_L), [0.5, 0.3, 0.2, 0.1], rtol=1e-6)
    rows_LD, bias_L = np.arange(8, dtype=np.float32).reshape(4, 2), np.float32([4, 5, 6, 7])
    for bias, expected in ((bias_L, bias_L[labels]), (None, np.zeros(20_000))):
        sampler.refresh(LabelTable(rows_LD, bias, T))
        recalled, biases = map(ops.convert_to_numpy, sampler.recall())
        np.testing.assert_array_equal(recalled, rows_LD[labels])
        np.testing.assert_array_equal(biases, expected)


def test_importance_weights_with_memory_estimate_the_full_loss() -> None:
    """Where labels stand still: q is right for the batch and for the memory [R21 eq. 10]."""
    model = build_model(
        gradients=False, size=64, negatives=64, rate=1e-9, family={"name": "logistic", "pairwise": True},
        weight="importance",
    )  # fmt: skip
    rng, losses, expected = np.random.default_rng(5), [], []
    logits_QL = model.embed_queries({"user_id": np.arange(12, dtype=np.int32) + 1}) @ model.embed_labels().T / T
    logits_QL += model.label_biases()
    for _ in range(30):
        batch = TRAIN.take(rng.integers(0, len(TRAIN), 64))
        logits_BL = logits_QL[batch.queries]
        gaps_BL = logits_BL - np.take_along_axis(logits_BL, batch.labels[:, None], axis=1)
        others_BL = (np.arange(L) != batch.labels[:, None]) & (COUNTS > 0)
        expected.append(np.mean(np.sum(np.logaddexp(0, gaps_BL), axis=1, where=others_BL)))
        losses.append(float(model.train_step(tiny.batch(batch))))
    np.testing.assert_allclose(np.mean(losses), np.mean(expected), rtol=0.03)
