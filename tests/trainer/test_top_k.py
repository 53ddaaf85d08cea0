"""Check SL@K: weights and gradients by hand, β against the true K-th highest score, and the state of a step [METHODS
§2.5]."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from longtail.bundle import Proposal
from longtail.trainer import backend
from longtail.trainer.config import LossConfig
from longtail.trainer.config.loss import TopKConfig
from longtail.trainer.data.batches import epoch_batches
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.errors import DataError
from longtail.trainer.limits import check_sizes
from longtail.trainer.loss_terms import build_loss_terms
from longtail.trainer.loss_terms.top_k import QueryStates, TopK, WeighByTopK
from longtail.trainer.losses import LOSSES, Objective, SampledLogits
from longtail.trainer.losses.hits import mask_hits, multiplicity
from longtail.trainer.losses.objective import log_terms
from longtail.trainer.sampling import SAMPLERS, DrawContext, LabelTable, SamplerSetup
from tests.trainer import tiny

L, DIM, ROWS = 32, 4, 32
PI = np.arange(L, 0, -1) ** -0.8 / (np.arange(L, 0, -1) ** -0.8).sum()
RNG = np.random.default_rng(0)
EMBEDDINGS = RNG.normal(0, 1, (L, DIM)).astype(np.float32)
QUERY = RNG.normal(0, 1, DIM).astype(np.float32)
SCORES = EMBEDDINGS @ QUERY
BUCKET = np.int32(np.arange(L) // 12)
"""Twelve labels in group 0, twelve in 1; the eight others in none, 2."""
COUNT: dict[str, Any] = {"labels": L, "temperature": 1.0, "memory": 10**6}
WHOLE_CATALOGUE = COUNT | {"k_G": (4,), "labels_G": (L,)}, np.zeros(L, np.int32)
BY_BUCKET = COUNT | {"k_G": (2, 2), "labels_G": (12, 12)}, BUCKET
VISITS = 300


def tree() -> Proposal:
    """A tree over the labels that looks at one number of the query."""
    rng = np.random.default_rng(1)
    weights, biases = rng.normal(0, 0.15, (L, 1)).astype(np.float32), rng.normal(0, 0.15, L).astype(np.float32)
    return Proposal({"age": np.float32([[1.0]])}, np.float32([0.0]), weights, biases, np.arange(L, dtype=np.int32))


SAMPLED: dict[str, tuple[str, dict[str, Any]]] = {
    "in_batch": ("in_batch", {}),
    "uniform": ("uniform", {"negatives": 12}),
    "uniform, distinct": ("uniform", {"negatives": 12, "shared": False, "replace": False}),
    "uniform, never the positive": ("uniform", {"negatives": 12, "exclude_positive": True}),
    "popularity": ("popularity", {"negatives": 12, "alpha": 0.75}),
    "popularity, never the positive": ("popularity", {"negatives": 12, "exclude_positive": True}),
    "mixed": ("mixed", {"negatives": 6}),
    "full": ("full", {}),
    "model": ("model", {"negatives": 12}),
    "adversarial": ("adversarial", {"negatives": 12}),
    "minimum_variance": ("minimum_variance", {"negatives": 12, "uniform_share": 0.5}),
}


@pytest.mark.parametrize(("name", "arguments"), SAMPLED.values(), ids=SAMPLED)
def test_beta_goes_to_the_kth_highest_score(name: str, arguments: dict[str, Any]) -> None:
    """Of a fixed model, by what the sampler draws: 32 queries of equal scores, each with positives of its own, among
    all labels and by bucket. Tolerance: a twelfth of the scores' spread, less than half of any gap to the next score.
    """
    loss = Objective("softmax", "importance")
    terms = partial(log_terms, loss, ops.convert_to_tensor(np.log(PI).astype(np.float32)))
    sampler = SAMPLERS[name](SamplerSetup(np.log(PI), ROWS, DIM, tree(), log_terms=terms), **arguments)
    if sampler.refresh is not None:
        sampler.refresh(LabelTable(EMBEDDINGS, None, 1.0))
    never = name == "minimum_variance" or "exclude_positive" in arguments
    thresholds = [
        (TopK(**counts, never_the_positive=never), group_L) for counts, group_L in (WHOLE_CATALOGUE, BY_BUCKET)
    ]
    seed, queries_BD = keras.random.SeedGenerator(1), ops.convert_to_tensor(np.tile(QUERY, (ROWS, 1)))

    def visit(batch: dict[str, Any]) -> Any:
        positive_B = ops.convert_to_tensor(batch["positive"])
        context = DrawContext(positive_B, {"age": np.ones(ROWS, np.float32)}, queries_BD)
        drawn = None if sampler.draw is None else sampler.draw(seed, context)
        parts = [*([positive_B] if sampler.in_batch else []), *([] if drawn is None else [drawn])]
        candidates = parts[0] if len(parts) == 1 else ops.concatenate(parts)

        def log_q(labels: Any) -> Any:
            return ops.take(sampler.log_q_L, labels) if sampler.log_q is None else sampler.log_q(context, labels)

        negative_BM = ops.take(SCORES, candidates) + ops.zeros((ROWS, candidates.shape[-1]))
        log_miss_B = None if sampler.log_miss is None else sampler.log_miss(log_q(positive_B))
        hits = "keep" if log_miss_B is None else "mask"
        own_BM = mask_hits(hits, candidates, positive_B, in_batch=sampler.in_batch)
        m = candidates.shape[-1] - sampler.in_batch
        multiplicity_BM = multiplicity(log_q(candidates), own_BM, m=m, log_miss_B=log_miss_B)
        after = []
        for (top_k, group_L), state_BS in zip(thresholds, batch["states"], strict=True):
            queries = QueryStates(state_BS, ops.take(group_L, positive_B), ops.take(group_L, candidates))
            after.append(top_k.row_state(queries, ops.take(SCORES, positive_B), negative_BM, multiplicity_BM, m=m)[1])
        return after

    compiled = backend.compile_step(visit, [seed.state, *sampler.variables])
    states = [ops.zeros((ROWS, len(top_k.k_G) + 2)) for top_k, _ in thresholds]
    # A sampler that never draws the positive is asked about the highest label: one that is not counted is missed then.
    positives = np.full((VISITS, ROWS), SCORES.argmax()) if never else RNG.choice(L, (VISITS, ROWS), p=PI)
    for positive_B in positives.astype(np.int32):
        states = compiled({"states": states, "positive": positive_B})

    for (top_k, group_L), state_BS in zip(thresholds, states, strict=True):
        for group, k in enumerate(top_k.k_G):
            found_B = ops.convert_to_numpy(state_BS)[:, group]
            true = np.sort(SCORES[group_L == group])[-k]
            assert float(found_B.mean()) == pytest.approx(float(true), abs=float(SCORES.std()) / 12)


@pytest.mark.parametrize("family", [name for name, family in LOSSES.items() if family.ranks])
def test_losses_are_weighted_by_the_margin_over_beta(family: str) -> None:
    """The gradient does not go through the weight, by central differences; the regularizer stays as it is."""
    positive_B, beta_B = np.float32([1.0, -0.5]), np.float32([0.4, 0.25])
    logits = SampledLogits(
        positive_B, np.float32([[0.5, -1.0], [0.0, 0.75]]), np.zeros((2, 2), bool),
        *[np.float32([-1.0, -2.0])] * 4,
    )  # fmt: skip
    plain = Objective(family, "importance", regularizer=0.1)
    config = TopKConfig(k=1, temperature=0.5)
    weighted = replace(plain, terms=(WeighByTopK(tiny.recipe(), config, DATA),))

    def losses(objective: Objective, of: SampledLogits) -> np.ndarray:
        if LOSSES[family].stateful:
            state = {"log_eta_B": ops.convert_to_tensor(np.float32([1.0, 2.0])), "rate": np.float32(0.5)}
            return ops.convert_to_numpy(objective.compute_losses(of, **state)[0]).astype(np.float64)
        return ops.convert_to_numpy(objective(of)).astype(np.float64)

    def by_hand(positive_B: np.ndarray) -> np.ndarray:
        of = logits._replace(positive_B=positive_B)
        penalty_B = losses(plain, of) - losses(replace(plain, regularizer=0.0), of)
        weight_B = 1 / (1 + np.exp(-(logits.positive_B - beta_B) / 0.5))
        return weight_B * losses(replace(plain, regularizer=0.0), of) + penalty_B

    np.testing.assert_allclose(losses(weighted, logits._replace(rows={"beta": beta_B})), by_hand(positive_B), rtol=1e-5)
    if LOSSES[family].stateful:
        return  # η moves with the positive, and has no gradient

    def total(rows: list[Any]) -> tuple[Any, Any]:
        losses_B = weighted(logits._replace(positive_B=rows[0], rows={"beta": ops.convert_to_tensor(beta_B)}))
        return ops.sum(losses_B), losses_B

    _, (gradient_B,), _ = backend.value_and_gradients(total, [ops.convert_to_tensor(positive_B)], [])
    step = np.float32(1 / 64)
    slope_B = (by_hand(positive_B + step) - by_hand(positive_B - step)) / (2 * step)
    np.testing.assert_allclose(ops.convert_to_numpy(gradient_B), slope_B, rtol=5e-3, atol=1e-4)


TRAIN = tiny.pairs((0, 0), (0, 1), (0, 3), (1, 1), (1, 0), (2, 0))
"""Label 0 in three pairs, 1 in two, 3 in one, 2, 4 and 5 in none: of head, torso, tail and new."""
DATA = tiny.dataset(TRAIN, queries=4, labels=6)
FULL = {"sampler": "full", "weight": "importance"}
REQUESTS = np.int32([0, 0, 0, 1, 1, 2])


def build_step(top_k: dict[str, Any], *, parts: int = 1) -> tuple[Any, np.ndarray]:
    """A model, and the logits of its queries before any step, [3, 6]."""
    job = tiny.recipe(
        loss=FULL | {"top_k": top_k}, model={"dim": 4, "temperature": 0.5},
        training={"batch_size": 6, "accumulate": parts},
    )  # fmt: skip
    model = tiny.model(job, DATA, batch_size=6)
    return model, model.embed_queries({"user_id": np.int32([1, 2, 3])}) @ model.embed_labels().T / 0.5


def states(model: Any) -> np.ndarray:
    (state,) = (variable for variable in model.train_step.variables if variable.name == "top_k")
    return np.asarray(ops.convert_to_numpy(state))


def softmax(logits_L: np.ndarray, label: int) -> float:
    return float(np.log(np.exp(logits_L).sum()) - logits_L[label])


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_by_hand(parts: int) -> None:
    """At the first visit β is the upper quantile of a normal distribution. Query 0 is in both of two parts."""
    model, logits_QL = build_step({"k": 2, "temperature": 0.7}, parts=parts)
    order = np.array([0, 3, 5, 1, 4, 2])
    rows, requests = TRAIN.take(order), REQUESTS[order]
    loss = float(model.train_step(tiny.batch(rows, _request=requests)))

    quantile = 0.6744897501960817  # Φ⁻¹(1 − 1½/6)
    beta_Q = logits_QL.mean(axis=1) + quantile * logits_QL.std(axis=1)
    moved_Q = np.array([beta + spread * np.clip(
        (np.sum(row > beta) / 1.5 - 1) / (1 + 1 / 1.5), -1, 1
    ) for beta, spread, row in zip(beta_Q, logits_QL.std(axis=1), logits_QL, strict=True)])  # fmt: skip
    visits_Q = [2, 2, 1] if parts == 2 else [1, 1, 1]
    by_hand = []
    for at, (query, label) in enumerate(zip(rows.queries, rows.labels, strict=True)):
        again = parts == 2 and at >= 3
        above = logits_QL[query, label] - beta_Q[query]
        by_hand.append(softmax(logits_QL[query], label) / (1 + np.exp(-above / 0.7)))
        assert not again or query != 2
    assert loss == pytest.approx(np.mean(by_hand), rel=1e-4)
    expected_QS = np.stack(
        [np.where(np.array(visits_Q) == 2, moved_Q, beta_Q), logits_QL.std(axis=1), visits_Q], axis=1
    )
    np.testing.assert_allclose(states(model), expected_QS, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("eager")
def test_a_row_s_own_position_is_no_draw() -> None:
    """Scores have the bias of training removed: in-batch draws of weight `unit` leave f + log q."""
    job = tiny.recipe(loss={"top_k": {"k": 2}}, model={"dim": 4, "temperature": 0.5})
    model = tiny.model(job, DATA, batch_size=6)
    logits_BL = model.embed_queries({"user_id": TRAIN.queries + 1}) @ model.embed_labels().T / 0.5
    model.train_step(tiny.batch(TRAIN, _request=np.arange(6, dtype=np.int32) // 2))

    count_L, quantile = np.array([3, 2, 0, 1, 0, 0]), 0.6744897501960817  # Φ⁻¹(1 − 1½/6)
    logits_BL += np.log(np.maximum(count_L, 1e-9) / 6)
    expected_BS = []
    for row, label in enumerate(TRAIN.labels):
        others_L = count_L - (np.arange(6) == label)
        stands_L = others_L / (5 * np.maximum(count_L / 6, 1e-9))
        mean = stands_L @ logits_BL[row] / stands_L.sum()
        spread = np.sqrt(stands_L @ (logits_BL[row] - mean) ** 2 / stands_L.sum())
        expected_BS.append([mean + quantile * spread, spread, 1])
    np.testing.assert_allclose(states(model), np.reshape(expected_BS, (3, 2, 3)).mean(axis=1), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("eager")
def test_buckets_have_a_beta_each_and_others_weight_1() -> None:
    model, logits_QL = build_step({"k": {"tail": 1, "head": 1}, "temperature": 0.7})
    loss = float(model.train_step(tiny.batch(TRAIN, _request=REQUESTS)))

    spread_Q = logits_QL.std(axis=1)
    beta_Q = logits_QL.mean(axis=1)  # Φ⁻¹(1 − ½/1) = 0: one label in either
    by_hand = []
    for query, label in zip(TRAIN.queries, TRAIN.labels, strict=True):
        above = logits_QL[query, label] - beta_Q[query]
        weight = {0: 1 / (1 + np.exp(-above / 0.7)), 1: 1.0, 3: 1 / (1 + np.exp(-above / 0.7))}[int(label)]
        by_hand.append(weight * softmax(logits_QL[query], label))
    assert loss == pytest.approx(np.mean(by_hand), rel=1e-4)
    for _ in range(11):
        model.train_step(tiny.batch(TRAIN, _request=REQUESTS))
    head_Q, tail_Q = states(model)[:, 0], states(model)[:, 1]
    assert (head_Q != tail_Q).any(), "each goes to the score of its own label"
    assert states(model)[:, 3].tolist() == [12, 12, 12]
    assert np.abs(states(model)[:, 2] - spread_Q).max() < 0.5


def build_term(data: Dataset) -> WeighByTopK:
    return WeighByTopK(tiny.recipe(), TopKConfig(k=2), data)


def test_batches_hold_the_request_of_every_row() -> None:
    """A number for every query, for every objective of its own."""
    features = Encoding.fit(tiny.recipe(), DATA).query
    settings: dict[str, Any] = {"batch_size": 6, "seed": 0, "epoch": 0, "first": 0}
    ((_, batch),) = epoch_batches(DATA.train, features, [build_term(DATA)], **settings)
    several = replace(DATA.train, objectives=np.int32([0, 1, 0, 0, 1, 1]))
    term = build_term(replace(DATA, train=several))
    ((_, mixed),) = epoch_batches(several, features, [term], **settings)

    np.testing.assert_array_equal(batch["_request"], DATA.train.queries[batch["_pair"]])
    np.testing.assert_array_equal(
        mixed["_request"], 2 * several.queries[mixed["_pair"]] + several.objectives[mixed["_pair"]]
    )
    assert (batch["_request"].dtype, mixed["_request"].dtype) == (np.int32, np.int32)
    assert term.variables[0].shape == (6, 3)
    ((_, plain),) = epoch_batches(DATA.train, features, **settings)
    assert "_request" not in plain


@pytest.mark.parametrize("family", ["logistic", "contrastive", "hinge", "squared_hinge", "exponential", "ramp", "nce"])
def test_top_k_needs_a_family_that_ranks(family: str) -> None:
    """A pairwise form does know one."""
    with pytest.raises(ValueError, match=f"top_k: not allowed with family '{family}'"):
        LossConfig.model_validate({"family": family, "top_k": {"k": 20}})
    if family not in ("contrastive", "nce"):
        LossConfig.model_validate({"family": {"name": family, "pairwise": True}, "top_k": {"k": 20}})


@pytest.mark.parametrize("k", [{"new": 3}, {}, {"Head": 3}])
def test_k_by_bucket_names_buckets_that_have_training_pairs(k: dict[str, int]) -> None:
    message = rf"k: expected a number, or one for each of head, torso and tail, received {re.escape(str(list(k)))}"
    with pytest.raises(ValueError, match=message):
        LossConfig.model_validate({"top_k": {"k": k}})


@pytest.mark.parametrize(
    ("k", "message"),
    [
        (7, r"loss.top_k.k: expected at most 6, the labels there are, received 7"),
        ({"head": 1, "tail": 2}, r"loss.top_k.k.tail: expected at most 1, the labels there are, received 2"),
    ],
)
def test_a_k_beyond_the_catalogue_is_refused(k: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_sizes(tiny.recipe(loss={"top_k": {"k": k}}), DATA)


CHOSEN = np.random.default_rng(3)
PREFER = (np.arange(300) + 3) ** -1.0 * np.exp(CHOSEN.normal(0, 0.7, (40, 6)) @ CHOSEN.normal(0, 1, (6, 300)))
PREFER /= PREFER.sum(axis=1, keepdims=True)
PICKED = np.concatenate([CHOSEN.choice(300, 100, p=p_L) for p_L in PREFER])
"""p(y|x) of 40 queries and 300 labels, and 100 pairs of each query."""


def ranked(loss: dict[str, Any], bias_removal: float) -> np.ndarray:
    """Train a model on these pairs; return its scores at λ, [40, 300]."""
    data = tiny.dataset(tiny.pairs(*zip(np.repeat(np.arange(40), 100), PICKED, strict=True)), queries=40, labels=300)
    job = tiny.recipe(
        loss=loss, model={"dim": 16, "similarity": "dot", "temperature": 1, "label_bias": True},
        query={"features": [tiny.USER | {"dim": 16}]}, label={"features": [tiny.ITEM | {"dim": 16}]},
        optimizer={"embedding_learning_rate": 0.1},
    )  # fmt: skip
    encoding = Encoding.fit(job, data)
    model, terms = tiny.model(job, data, batch_size=250), build_loss_terms(job, data, encoding)
    for epoch in range(25):
        for _, batch in epoch_batches(data.train, encoding.query, terms, batch_size=250, seed=0, epoch=epoch, first=0):
            model.train_step(batch)
    users = np.arange(40, dtype=np.int32) + 1
    log_pi_L = np.log((np.bincount(PICKED, minlength=300) + 0.5) / 4150)
    f_QL = model.embed_queries({"user_id": users}) @ model.embed_labels().T + model.label_biases()
    return np.asarray(f_QL + bias_removal * log_pi_L)


@pytest.mark.parametrize(
    ("loss", "bias_removal"),
    [pytest.param(FULL, 0, id="full", marks=pytest.mark.nightly), pytest.param({}, 1, id="in_batch")],
)
def test_top_k_ranks_no_worse_than_the_plain_loss(loss: dict[str, Any], bias_removal: float) -> None:
    """At the defaults: among all labels, and among a bucket's own."""
    counts_L = np.bincount(PICKED, minlength=300)
    tail_L = counts_L <= np.quantile(counts_L[counts_L > 0], 0.33)

    everywhere, plain = np.ones(300, bool), ranked(loss, bias_removal)
    for top_k, k, among_L in (({"k": 20}, 20, everywhere), ({"k": {"tail": 50}}, 50, tail_L)):
        p_QL = PREFER[:, among_L]
        weighted = ranked(loss | {"top_k": top_k}, bias_removal)
        best = [np.argsort(-scores[:, among_L], axis=1)[:, :k] for scores in (weighted, plain)]
        held_Q, plain_Q = (np.take_along_axis(p_QL, best_Qk, axis=1).sum(axis=1) for best_Qk in best)
        more_Q = (held_Q - plain_Q) / p_QL.sum(axis=1)
        assert more_Q.mean() > -2 * more_Q.std() / np.sqrt(40)
