"""Check negatives counted once per query: by hand, as binary cross-entropy, and by convergence [METHODS §2.7]."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from longtail.trainer import backend
from longtail.trainer.data.batches import epoch_batches
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.loss_terms import KnownPositives
from longtail.trainer.loss_terms.queries import NegativesPerQuery
from longtail.trainer.losses import Objective, SampledLogits
from longtail.trainer.losses.objective import balance
from longtail.trainer.run import prepare_run
from tests.trainer import tiny

TRAIN = tiny.pairs((0, 0), (0, 2), (1, 1), (2, 3), (2, 1), (2, 4)).sorted()
SETS = [{0, 2}, {1}, {1, 3, 4}]
PAIRS_PER_QUERY, L = 2.0, 6
ONE_PAIR = tiny.pairs((0, 0))
MULTI_LABEL: dict[str, Any] = {"family": "logistic", "hits": "mask_known", "negatives_per": "query"}


def whole_epoch(pairs: Pairs) -> dict[str, np.ndarray]:
    known_K, rows_K = KnownPositives.collect(pairs).list_positives(pairs.owner_keys)
    return tiny.batch(pairs, _known=known_K, _known_rows=rows_K, _pairs=pairs.weight_of_owner())


def stepped(pairs: Pairs, loss: dict[str, Any]) -> tuple[float, np.ndarray]:
    """Sum of the losses of an epoch in one batch, and the logits [Q, L] that it is of."""
    recipe = tiny.recipe(loss=loss, training={"batch_size": len(pairs)})
    model = prepare_run(recipe, tiny.dataset(pairs, queries=3, labels=L), epochs=1, work=Path("none")).trained
    logits_QL = model.model.embed_queries({"user_id": np.arange(1, 4)}) @ model.model.embed_labels().T / 0.1
    return float(model.step(whole_epoch(pairs))) * len(pairs), logits_QL


def cross_entropy(logits_QL: np.ndarray) -> float:
    """Binary, of every query and label, summed."""
    target_QL = np.array([[label in positives for label in range(L)] for positives in SETS])
    return float(np.logaddexp(0, np.where(target_QL, -logits_QL, logits_QL)).sum())


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("pairs", [TRAIN, TRAIN.take(np.repeat(np.arange(6), 2))], ids=["once", "the_pair_twice"])
def test_an_epoch_is_the_binary_cross_entropy_of_its_queries(pairs: Pairs) -> None:
    """Logits start where two positives balance six labels. Pairs that come twice are positives twice, not negatives."""
    loss, logits_QL = stepped(pairs, MULTI_LABEL | {"sampler": "full"})

    repeats = len(pairs) // len(TRAIN)
    logits_QL = logits_QL + np.log(PAIRS_PER_QUERY * repeats / L)
    positives = sum(np.logaddexp(0, -logits_QL[q, label]) for q, labels in enumerate(SETS) for label in labels)
    assert loss == pytest.approx(cross_entropy(logits_QL) + (repeats - 1) * positives, rel=1e-5)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("hits", ["mask", "keep", "mask_known"])
def test_sampled_negatives_are_divided_too(hits: str) -> None:
    """`φ(f_y) + 1/n Σ 1/(m·q) φ(−f_y')`, whatever is masked."""
    loss, logits_QL = stepped(
        TRAIN,
        {
            "family": "hinge", "hits": hits, "negatives_per": "query", "weight": "importance",
            "sampler": {"name": "uniform", "negatives": 5},
        },
    )  # fmt: skip
    drawn = np.asarray(keras.random.randint((5,), 0, L, dtype="int32", seed=keras.random.SeedGenerator(0)))
    expected = 0.0
    for query, positive in zip(TRAIN.queries, TRAIN.labels, strict=True):
        out = {"mask": {positive}, "keep": set(), "mask_known": SETS[query]}[hits]
        total = sum(max(1 + logits_QL[query, label], 0) * L / 5 for label in drawn if label not in out)
        expected += max(1 - logits_QL[query, positive], 0) + total / len(SETS[query])
    assert loss == pytest.approx(expected, rel=1e-5)


def test_logits_begin_where_positives_balance_negatives() -> None:
    log_pi_L = np.log(np.float64([0.5, 0.25, 0.25]))
    offset = balance(Objective("logistic", "importance"), log_pi_L, None, m=8, pairs_per_query=1.5)

    assert np.exp(offset) == pytest.approx(1.5 / 3)


BASKETS = {(0, 1): 0.5, (0,): 0.25, (1, 2): 0.125, (0, 1, 2): 0.125}
"""What a query has chosen, and how often."""


@pytest.mark.parametrize(("hits", "of_share"), [("mask_known", True), ("keep", False)])
def test_the_optimum_is_the_share_of_queries_with_the_label(hits: str, of_share: bool) -> None:
    """Known positives masked, the log-odds of r = P(label is one of the query's), not of p(y|x), which sums to 1; kept,
    log r: there the expected loss is stationary."""
    r_L = np.array([sum(p for labels, p in BASKETS.items() if label in labels) for label in range(3)])
    nothing = np.zeros(3, np.float32)

    def slope(f_L: np.ndarray) -> np.ndarray:
        def expected(rows: list[Any]) -> tuple[Any, Any]:
            total = ops.zeros(())
            for labels, p in BASKETS.items():
                size, at = len(labels), np.array(labels)
                hits_BM = np.tile(np.isin(np.arange(3), at), (size, 1)) & (hits == "mask_known")
                logits = SampledLogits(
                    ops.take(rows[0], at), ops.broadcast_to(rows[0], (size, 3)), hits_BM, nothing[:size], nothing,
                    nothing[:size], nothing, rows={"log_pairs": np.log(np.full(size, size, np.float32))},
                )  # fmt: skip
                total = total + p * ops.sum(Objective("logistic", terms=(NegativesPerQuery(ONE_PAIR),))(logits))
            return total, total

        _, (gradient_L,), _ = backend.value_and_gradients(expected, [ops.convert_to_tensor(np.float32(f_L))], [])
        return ops.convert_to_numpy(gradient_L)

    np.testing.assert_allclose(slope(np.log(r_L / (1 - r_L) if of_share else r_L)), 0, atol=1e-6)
    assert np.abs(slope(np.log(r_L / r_L.sum()))).max() > 0.05


def test_batches_have_the_weight_of_a_query_s_pairs() -> None:
    data = tiny.dataset(TRAIN, queries=3, labels=L)
    features = Encoding.fit(tiny.recipe(), data).query

    def first(*, sized: bool) -> dict[str, Any]:
        steps = epoch_batches(
            data.train, features, [NegativesPerQuery(data.train)] * sized, batch_size=5, seed=0, epoch=0
        )
        return next(steps)[1]

    batch = first(sized=True)
    queries_B = data.train.queries[batch["_pair"]]
    assert batch["_pairs"].dtype == np.float32
    assert batch["_pairs"].tolist() == [len(SETS[query]) for query in queries_B]
    assert "_pairs" not in first(sized=False)


@pytest.mark.usefixtures("eager")
def test_a_weight_of_2_is_the_pair_twice() -> None:
    twice = tiny.pairs((0, 0), (0, 0), (0, 2), (1, 1), (2, 3))
    weighted = tiny.pairs((0, 0), (0, 2), (1, 1), (2, 3), weights=[2, 1, 1, 1])
    (of_twice, _), (of_weighted, _) = (stepped(pairs, MULTI_LABEL | {"sampler": "full"}) for pairs in (twice, weighted))

    assert twice.weight_of_owner().tolist() == [3, 3, 3, 1, 1]
    assert weighted.weight_of_owner().tolist() == [3, 3, 1, 1]
    assert of_weighted == pytest.approx(of_twice, rel=1e-5)
