"""Check the treatment of accidental hits, and what each converges to [METHODS §2.1]."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from longtail.trainer import backend
from longtail.trainer.config import LossConfig
from longtail.trainer.data.batches import epoch_batches, one_per_query
from longtail.trainer.data.encode import Encoding
from longtail.trainer.loss_terms import KnownPositives, mask_known_positives
from longtail.trainer.losses import Objective, SampledLogits
from longtail.trainer.losses.hits import mask_hits
from longtail.trainer.sampling import SAMPLERS, SamplerSetup
from tests.trainer import tiny

TRAIN = tiny.pairs((0, 2), (0, 0), (0, 2), (1, 1), (3, 4), (3, 0), (3, 1), (3, 3))
"""Query 0 knows labels 0 and 2, one of them twice; query 2 nothing; query 3 all but 2."""


def test_hits_by_hand() -> None:
    """Two rows of positives 5 and 7 in a batch, and one draw, 5."""
    shared, positive_B = np.int32([5, 7, 5]), np.int32([5, 7])

    def masked(hits: Any, *, in_batch: bool) -> list[list[int]]:
        mask = mask_hits(hits, shared, positive_B, in_batch=in_batch)
        return ops.convert_to_numpy(mask).astype(int).tolist()

    assert masked("mask", in_batch=True) == [[1, 0, 1], [0, 1, 0]]
    assert masked("keep", in_batch=True) == [[1, 0, 0], [0, 1, 0]], "a row's own place is no draw"
    assert masked("keep", in_batch=False) == [[0, 0, 0], [0, 0, 0]]


def test_known_positives_are_distinct_training_labels_in_order() -> None:
    positives = KnownPositives.collect(TRAIN)

    assert positives.offsets.tolist() == [0, 2, 3, 3, 7]
    assert positives.labels.tolist() == [0, 2, 1, 0, 1, 3, 4]
    labels_K, rows_K = positives.list_positives(np.int32([3, 0, 3]))
    assert labels_K.tolist() == [0, 1, 3, 4, 0, 2, 0, 1, 3, 4, *[4] * 6], "16 places, the last repeated"
    assert rows_K.tolist() == [0, 0, 0, 0, 1, 1, *[2] * 10]


def test_long_lists_keep_their_most_frequent_known_positives() -> None:
    """Labels 0 and 1 stand in two pairs each, 2 in two of one query; 3 and 4 in one."""
    positives = KnownPositives.collect(TRAIN, limit=2)

    lists = [positives.labels[positives.offsets[q] : positives.offsets[q + 1]].tolist() for q in (0, 3)]
    assert lists == [[0, 2], [0, 1]]


@pytest.mark.parametrize("shape", [(300,), (40, 7)], ids=["shared", "per row"])
def test_known_positives_equal_plain_sets(shape: tuple[int, ...]) -> None:
    """Lists have 0 to 1024 labels; candidates repeat, and some are in no list."""
    rng = np.random.default_rng(0)
    labels, lengths_B = 3000, [1024, 0, 1, *rng.integers(0, 60, 36), 1000]
    lists = [np.sort(rng.choice(labels, length, replace=False)).astype(np.int32) for length in lengths_B]
    candidates = rng.choice(np.concatenate([*lists, np.arange(labels)]), shape).astype(np.int32)
    rows_K = np.repeat(np.arange(40), lengths_B).astype(np.int32)
    found_BM = mask_known_positives(candidates, np.concatenate(lists), rows_K, batch=40, labels=labels)

    candidate_rows = candidates if len(shape) == 2 else np.broadcast_to(candidates, (40, *shape))
    expected_BM = np.array([np.isin(row, positives) for row, positives in zip(candidate_rows, lists, strict=True)])
    assert 0 < expected_BM.mean() < 0.5
    np.testing.assert_array_equal(ops.convert_to_numpy(found_BM), expected_BM)


ROWS = tiny.pairs((0, 0), (0, 2), (1, 1), (2, 3), (2, 1), (2, 4))
SAMPLERS_BY_HAND: dict[str, dict[str, Any]] = {
    "in_batch": {"name": "in_batch"},
    "mixed": {"name": "mixed", "negatives": 4},
    "uniform": {"name": "uniform", "negatives": 6, "shared": False},
    "full": {"name": "full"},
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("mining", [None, pytest.param({"keep": 2}, marks=pytest.mark.nightly)], ids=["", "mined"])
@pytest.mark.parametrize("sampler", SAMPLERS_BY_HAND.values(), ids=SAMPLERS_BY_HAND)
@pytest.mark.parametrize("hits", ["mask", "keep", "mask_known"])
def test_the_loss_of_a_step_by_hand(hits: str, sampler: dict[str, Any], mining: dict[str, int] | None) -> None:
    """`φ(f_y) + Σ 1/(m·q) φ(−f_y')` of the negatives that are left; m and q are of what is drawn."""
    train, positives = ROWS, ROWS.labels
    recipe = tiny.recipe(
        loss={"family": "hinge", "weight": "importance", "sampler": sampler, "hits": hits, "mining": mining}
    )
    model = tiny.model(recipe, tiny.dataset(train, queries=3, labels=6), batch_size=6)
    logits_BL = model.embed_queries({"user_id": train.queries + 1}) @ model.embed_labels().T / 0.1
    share_L, name = np.array([1, 2, 1, 1, 1, 0]) / 6, sampler["name"]
    shape = {"mixed": (4,), "uniform": (6, 6)}.get(name, ())
    drawn = np.asarray(keras.random.randint(shape, 0, 6, dtype="int32", seed=keras.random.SeedGenerator(0)))
    candidates_BM = np.broadcast_to(
        {"in_batch": positives, "mixed": np.append(positives, drawn), "uniform": drawn, "full": np.arange(6)}[name],
        (6, {"in_batch": 6, "mixed": 10, "uniform": 6, "full": 6}[name]),
    )
    q_L, m = {
        "in_batch": (share_L, 5), "mixed": ((5 * share_L + 4 / 6) / 9, 9), "uniform": (np.full(6, 1 / 6), 6),
        "full": (np.full(6, 1 / 6), 6),
    }[name]  # fmt: skip
    known_labels = {0: {0, 2}, 1: {1}, 2: {1, 3, 4}}
    expected = []
    for row, (query, positive) in enumerate(zip(train.queries, positives, strict=True)):
        out = {"mask": {positive}, "keep": set(), "mask_known": known_labels[query]}[hits]
        own_column = row if name in ("in_batch", "mixed") else -1
        negatives = [label for at, label in enumerate(candidates_BM[row]) if at != own_column and label not in out]
        negatives.sort(key=lambda label: -logits_BL[row, label])
        share = 1.0 if mining is None else 1 / 2
        expected.append(
            max(1 - logits_BL[row, positive], 0)
            + sum(share / (m * q_L[label]) * max(1 + logits_BL[row, label], 0) for label in negatives[: mining and 2])
        )
    labels_K, rows_K = KnownPositives.collect(train).list_positives(train.queries)
    batch = tiny.batch(train) | ({"_known": labels_K, "_known_rows": rows_K} if hits == "mask_known" else {})

    assert float(model.train_step(batch)) == pytest.approx(np.mean(expected), rel=1e-5)


def test_batches_hold_the_known_positives_of_their_queries() -> None:
    """And of a query that is visited with one of its labels, the others too."""
    data = tiny.dataset(TRAIN, queries=4, labels=5)
    features = Encoding.fit(tiny.recipe(), data).query
    positives = KnownPositives.collect(data.train)
    steps = epoch_batches(
        data.train, features, [positives], batch_size=3, seed=0, epoch=0, visits=partial(one_per_query, data.train)
    )
    _, batch = next(steps)
    queries_B = data.train.queries[batch["_pair"]]

    for row, query in enumerate(queries_B):
        known_labels = set(batch["_known"][batch["_known_rows"] == row])
        assert known_labels == set(data.train.labels[data.train.queries == query])


def softmax_optimum(p: np.ndarray, *, copies: int, keep: bool) -> np.ndarray:
    """softmax(f + log q) that minimises the sampled softmax with weight `unit` of a query with p(y|x): uniform
    negatives, `copies` of every label, so that the sample is its own expectation. By gradient descent."""
    size = len(p)
    drawn = np.repeat(np.arange(size), copies)
    hits = np.zeros((size, len(drawn)), bool) if keep else np.arange(size)[:, None] == drawn
    nothing = np.zeros(size, np.float32), np.zeros(len(drawn), np.float32)

    def expected(rows: list[Any]) -> tuple[Any, Any]:
        logits_BM = ops.broadcast_to(ops.take(rows[0], drawn)[None], hits.shape)
        losses_B = Objective("softmax", "unit")(SampledLogits(rows[0], logits_BM, hits, *nothing, *nothing))
        return ops.sum(losses_B * p.astype(np.float32)), losses_B

    step = backend.compile_step(lambda batch: backend.value_and_gradients(expected, [batch["f"]], [])[1][0], [])
    f = np.log(p)
    for _ in range(1500):
        f = f - 2 * np.asarray(step({"f": ops.convert_to_tensor(f.astype(np.float32))})) / p / (1 if keep else 2)
        f = f - f.mean()
    return np.exp(f) / np.exp(f).sum()


@pytest.mark.parametrize("keep", [False, True], ids=["mask", "keep"])
def test_unit_weights_under_softmax_converge_as_documented(keep: bool) -> None:
    """With c_y = m·q_y and s = softmax(f + log q): masked `s(1 − s + s/c) ∝ p`, which takes p = .5 for .73 where
    c = 10 (.96 where c = 1000); kept `s(1 + s/c) ∝ p`, .49, and .5 where it is 1000."""
    p = np.array([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    s = softmax_optimum(p, copies=10, keep=keep)

    implied = s * (1 + s / 10) if keep else s * (1 - s + s / 10)
    np.testing.assert_allclose(implied / p / (implied / p).mean(), 1, atol=2e-3)
    assert s[0] == pytest.approx(0.492 if keep else 0.726, abs=2e-3)


def test_in_batch_importance_is_exact_for_labels_of_one_pair() -> None:
    """ρ = E Σ w of every label, over batches of 4 cut from 300 pairs: 1, where smoothing by ½ gives a label of one
    pair .68. Of 300 pairs without replacement it is 300/299."""
    counts = np.array([120, 60, 40, 30, 20, *[5] * 4, *[1] * 10])
    pairs, labels = np.repeat(np.arange(len(counts)), counts), len(counts)
    smoothed = (counts + 0.5) / (len(pairs) + labels / 2)
    setup = SamplerSetup(np.log(smoothed), 4, log_share_L=np.log(counts / len(pairs)))
    w_L = 1 / (3 * np.exp(SAMPLERS["in_batch"](setup).log_q_L.astype(np.float64)))
    rng = np.random.default_rng(0)
    batches = np.concatenate([pairs[rng.permutation(len(pairs))].reshape(-1, 4) for _ in range(4000)])
    weighted_shares = np.bincount(batches[:, 1:].ravel(), minlength=labels) / len(batches) * w_L

    assert weighted_shares[9:].mean() == pytest.approx(1, abs=0.02)
    np.testing.assert_allclose(weighted_shares, 1, atol=0.06)
    assert (w_L * np.exp(setup.log_share_L) / smoothed)[-1] / w_L[-1] == pytest.approx(0.688, abs=1e-3)


BEST = {"name": "minimum_variance", "negatives": 2}


TREE = {"name": "adversarial", "negatives": 1}
PAIRWISE = {"name": "logistic", "pairwise": True}


@pytest.mark.parametrize(
    ("loss", "calibrated_at"),
    [({"weight": "importance"}, 0), ({"family": "logistic"}, 1), ({"family": "logistic", "sampler": TREE}, 1)],
)
def test_likelihoods_need_the_setting_where_scores_are_calibrated(loss: dict[str, Any], calibrated_at: float) -> None:
    """`test_implied_noise` checks `calibrated_at` of every loss by its noise."""
    tiny.recipe(loss=loss, evaluation={"log_likelihood": True, "bias_removal": [0.5, float(calibrated_at)]})
    with pytest.raises(ValueError, match=rf"bias_removal: expected {calibrated_at}.0 in it, where scores are log-prob"):
        tiny.recipe(loss=loss, evaluation={"log_likelihood": True, "bias_removal": [0.5]})


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        ({"family": "hinge"}, "family 'hinge' does not converge to log p"),
        ({"family": "exponential", "hits": "keep"}, "family 'exponential' does not converge"),
        ({}, "with weight 'unit', 'softmax' converges to s"),
        ({"family": "bilateral_softmax", "weight": "importance"}, "'bilateral_softmax' pools a query's positives"),
        ({"weight": "importance", "hits": "keep"}, "with hits 'keep', 'softmax' counts the positive twice"),
        ({"family": "logistic", "hits": "mask"}, "with hits 'mask', 'logistic' does not converge"),
        ({"weight": "importance", "hits": "mask_known"}, "with hits 'mask_known', 'softmax' does not converge"),
        ({"weight": "importance", "mining": {"keep": 2}}, "mining weighs a negative by its rank"),
        ({"weight": "importance", "top_k": {"k": 2}}, "top_k weighs pairs by their own scores"),
        ({"family": "logistic", "weight": {"name": "equalised", "threshold": 0.1}}, "below the weight's threshold"),
        ({"family": "logistic", "sampler": {"name": "model", "negatives": 2}}, "what sampler 'model' draws by"),
        ({"family": "logistic", "weight": "importance", "sampler": BEST}, "with hits 'mask', 'logistic' does not"),
        ({"family": "logistic", "weight": "tail", "sampler": TREE}, "is not the tree alone"),
        ({"family": "logistic", "sampler": TREE, "reweight": 0.5}, "is not the tree alone"),
        ({"family": PAIRWISE, "weight": "relative", "sampler": TREE}, "is not the tree alone"),
    ],
)
def test_likelihoods_of_uncalibrated_scores_are_refused(loss: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"log_likelihood: expected false, .*: .*{reason}"):
        tiny.recipe(loss=loss, evaluation={"log_likelihood": True})


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            {"family": "nce", "hits": "mask"},
            "hits = 'mask': not allowed with family 'nce', whose noise must be",
        ),
        (
            {"family": "nce", "hits": "mask_known"},
            "hits = 'mask_known': not allowed with family 'nce', whose noise must be",
        ),
        (
            {"hits": "keep", "sampler": {"name": "uniform", "negatives": 2, "exclude_positive": True}},
            r"hits: expected 'mask' or 'mask_known' with uniform\(negatives = 2,",
        ),
        (
            {"hits": "keep", "weight": "tail", "sampler": BEST},
            r"hits: expected 'mask' or 'mask_known' with minimum_variance\(negatives =",
        ),
        ({"hits": "some"}, "'mask', 'keep' or 'mask_known'"),
    ],
)
def test_hits_that_contradict_family_or_sampler_are_refused(loss: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig.model_validate(loss)
