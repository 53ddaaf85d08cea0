"""Samplers that look at the query, on the device: the adversarial tree [BM20 §3], the model itself, and q* [R21].

Legend: `B` rows, `M` draws a row, `L` labels.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from keras import ops

from longtail.bundle import Proposal
from longtail.trainer.losses import Objective, SampledLogits
from longtail.trainer.losses.objective import log_terms
from longtail.trainer.sampling import SAMPLERS, DrawContext, LabelTable, Sampler, SamplerSetup
from longtail.trainer.sampling.walk import assign_leaves
from tests.trainer import tiny

L, DIM = 6, 3
UNIFORM = np.full(L, -np.log(L))
RNG = np.random.default_rng(21)


def hand_made_tree() -> Proposal:
    """Three levels, six labels and two paddings: the parents of leaves 5 and 7 always turn left."""
    weights = RNG.normal(0, 1, (8, 2)).astype(np.float32)
    biases = RNG.normal(0, 0.5, 8).astype(np.float32)
    weights[[6, 7]], biases[[6, 7]] = 0, -1e4
    projection = {
        "user": RNG.normal(0, 1, (4, 2)).astype(np.float32),
        "tags": RNG.normal(0, 1, (5, 2)).astype(np.float32),
        "age": np.float32([[0.3, -0.2]]),
    }
    tree = Proposal(projection, np.float32([0.1, -0.4]), weights, biases, np.int32([3, 0, 5, 1, 4, -1, 2, -1]))
    tree.validate(L)
    return tree


TREE = hand_made_tree()
INPUTS = {
    "user": np.int32([1, 3]),
    "tags": np.int32([[1, 4, 0], [2, 0, 0]]),
    "tags__weight": np.float32([[0.5, 0.5, 0], [2, 0, 0]]),
    "age": np.float32([1.5, -1]),
    "colour": np.int32([7, 8]),
}
LOG_P = TREE.all_log_probabilities(TREE.project(INPUTS))


def context(positive: list[int], *, inputs: dict[str, Any] | None = None, queries: Any = None) -> DrawContext:
    return DrawContext(
        ops.convert_to_tensor(np.int32(positive)),
        {name: ops.convert_to_tensor(column) for name, column in (inputs or {}).items()},
        None if queries is None else ops.convert_to_tensor(queries),
    )


def tree(*, negatives: int) -> Sampler:
    return SAMPLERS["adversarial"](SamplerSetup(UNIFORM, 2, DIM, TREE), negatives=negatives)


def unit(shape: tuple[int, int]) -> np.ndarray:
    rows = RNG.normal(0, 1, shape)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


LABELS, QUERIES = unit((L, DIM)), unit((2, DIM))


BIAS = np.float32([0.5, -1, 0, 2, 0.25, -0.5])
TABLE = LabelTable(LABELS, BIAS, 0.25)
LOGITS = QUERIES @ LABELS.T / 0.25 + BIAS


def build_model_sampler(*, negatives: int = 4, **arguments: Any) -> Sampler:
    sampler = SAMPLERS["model"](SamplerSetup(UNIFORM, 2, DIM), negatives=negatives, **arguments)
    sampler.refresh(TABLE)
    return sampler


def best(family: str, weight: str, *, negatives: int, rows: int = 2, **arguments: Any) -> Sampler:
    """`minimum_variance` for a loss, labels of frequency PI."""
    terms = functools.partial(log_terms, Objective(family, weight, **arguments), np.log(PI).astype(np.float32))
    setup = SamplerSetup(np.log(PI), rows, DIM, log_terms=terms)
    sampler = SAMPLERS["minimum_variance"](setup, negatives=negatives, uniform_share=0)
    sampler.refresh(TABLE)
    return sampler


PI = np.array([0.3, 0.25, 0.2, 0.12, 0.08, 0.05])


def softmax(logits_BL: np.ndarray) -> np.ndarray:
    return np.exp(logits_BL - np.logaddexp.reduce(logits_BL, axis=1, keepdims=True))


def compute_log_q(sampler: Sampler, of: DrawContext) -> np.ndarray:
    """log q of every label for both rows, [2, L]."""
    return np.asarray(sampler.log_q(of, ops.convert_to_tensor(np.tile(np.arange(L, dtype=np.int32), (2, 1)))))


def assert_drawn_by(drawn_BM: np.ndarray, q_BL: np.ndarray) -> None:
    for drawn_M, q_L in zip(drawn_BM, q_BL, strict=True):
        counts, expected = np.bincount(drawn_M, minlength=L), len(drawn_M) * q_L
        assert len(counts) == L
        assert ((counts - expected) ** 2 / expected).sum() < 20.52, (
            "the 99.9 % quantile of χ² with 5 degrees of freedom"
        )


def test_the_tree_s_draws_follow_the_proposal() -> None:
    drawn_BM = np.asarray(tree(negatives=50_000).draw(keras.random.SeedGenerator(1), context([0, 1], inputs=INPUTS)))

    assert drawn_BM.dtype == np.int32
    assert drawn_BM.shape == (2, 50_000)
    assert not np.allclose(LOG_P[0], LOG_P[1], atol=0.5), "two queries, two distributions"
    assert_drawn_by(drawn_BM, np.exp(LOG_P))


def test_log_q_of_the_tree_equals_the_proposal() -> None:
    """Of an id, a weighted bag and a number, for labels of each row and for one label a row."""
    sampler, of = tree(negatives=2), context([5, 2], inputs=INPUTS)

    np.testing.assert_allclose(compute_log_q(sampler, of), LOG_P, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.exp(LOG_P).sum(axis=1), 1, rtol=1e-6)
    row_log_q = np.asarray(sampler.log_q(of, of.positive_B))
    np.testing.assert_allclose(row_log_q, [LOG_P[0, 5], LOG_P[1, 2]], rtol=1e-5)


@pytest.mark.parametrize("sampler", ["adversarial", "model"])
@pytest.mark.parametrize("least", [True, False], ids=["0", "just below 1"])
def test_padding_is_never_drawn(sampler: str, least: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A uniform number may be exactly 0: below any odds that are not 0 themselves."""
    extreme = 0.0 if least else np.nextafter(np.float32(1), np.float32(0))
    monkeypatch.setattr(keras.random, "uniform", lambda shape, **_: ops.full(shape, extreme, "float32"))
    negative_sampler = tree(negatives=3) if sampler == "adversarial" else build_model_sampler(negatives=3)
    of = context([0, 1], inputs=INPUTS, queries=QUERIES)
    drawn_BM = np.asarray(negative_sampler.draw(keras.random.SeedGenerator(1), of))

    rightmost, leftmost = 2, 3
    if sampler == "adversarial":
        assert (drawn_BM == (rightmost if least else leftmost)).all()
    assert drawn_BM.min() >= 0, "padding is −1"
    assert drawn_BM.max() < L


@pytest.mark.parametrize(
    "arguments",
    [{}, {"bandwidth": 3.0}, {"exact": True}, {"features": 64}, {"features": 8, "bandwidth": 9.0}],
    ids=["usual", "bandwidth", "exact", "features", "few features"],
)
def test_the_model_s_draws_follow_its_own_log_q(arguments: dict[str, Any]) -> None:
    """Exactly, however rough the masses of subtrees: with few features sums come out negative and are lifted."""
    sampler, of = build_model_sampler(negatives=50_000, **arguments), context([0, 1], queries=QUERIES)
    q_BL = np.exp(compute_log_q(sampler, of))

    np.testing.assert_allclose(q_BL.sum(axis=1), 1, rtol=1e-5)
    assert q_BL.min() > 0
    assert_drawn_by(np.asarray(sampler.draw(keras.random.SeedGenerator(2), of)), q_BL)


def test_with_many_features_q_is_the_softmax_of_the_scaled_cosines() -> None:
    exact = softmax(2.0 * QUERIES @ LABELS.T)
    of = context([0, 1], queries=QUERIES)
    errors = [
        np.abs(np.exp(compute_log_q(build_model_sampler(features=features, bandwidth=2.0), of)) - exact).max()
        for features in (32, 200_000)
    ]

    assert errors[1] < 0.01 < errors[0]


@pytest.mark.parametrize(("bandwidth", "expected"), [(None, LOGITS), (3.0, 3 * QUERIES @ LABELS.T)])
def test_the_exact_model_draws_by_the_softmax_of_its_logits(bandwidth: float | None, expected: np.ndarray) -> None:
    """Temperature and bias are in f = u·v/T + b; a bandwidth is in their place."""
    log_q_BL = compute_log_q(build_model_sampler(exact=True, bandwidth=bandwidth), context([0, 1], queries=QUERIES))

    np.testing.assert_allclose(np.exp(log_q_BL), softmax(expected), rtol=1e-4)


@pytest.mark.parametrize("labels", [2, 3, 64, 1000])
def test_leaves_of_similar_labels_are_neighbours(labels: int) -> None:
    """Of two far groups, no subtree of half the labels holds both; halves differ by at most one label."""
    rng = np.random.default_rng(3)
    group_L = rng.permutation(labels) < labels // 2
    rows_LD = (rng.normal(0, 0.1, (labels, 4)) + 10 * group_L[:, None]).astype(np.float32)
    leaves_L, size = assign_leaves(rows_LD), 1 << (labels - 1).bit_length()

    assert len(set(leaves_L.tolist())) == labels
    left_L = leaves_L < size // 2
    assert abs(2 * left_L.sum() - labels) <= 1
    assert max((group_L == left_L).sum(), (group_L != left_L).sum()) >= labels - 1


@pytest.mark.parametrize("weight", ["importance", "tail"])
@pytest.mark.parametrize(
    ("family", "arguments"),
    [("logistic", {}), ("exponential", {}), ("logistic", {"family_arguments": {"pairwise": True}}), ("softmax", {})],
    ids=["logistic", "exponential", "pairwise", "softmax"],
)
def test_the_minimum_variance_sampler_leaves_no_variance(family: str, weight: str, arguments: dict[str, Any]) -> None:
    """q* ∝ ρ φ on labels other than y [R21 Prop. 5]: the loss is the full one whatever is drawn; others vary."""
    rows, positive = 500, 1
    queries = np.repeat(QUERIES[:1], rows, axis=0)
    of, objective = context([positive] * rows, queries=queries), Objective(family, weight, **arguments)
    log_pi_L, others = np.log(PI).astype(np.float32), np.arange(L) != positive

    def losses(drawn: np.ndarray, log_q_B: np.ndarray, log_q_BM: np.ndarray) -> np.ndarray:
        f = LOGITS[0].astype(np.float32)
        losses_B = objective(
            SampledLogits(
                ops.full((len(drawn),), f[positive]), ops.convert_to_tensor(f[drawn]),
                ops.convert_to_tensor(drawn == positive), ops.full((len(drawn),), log_pi_L[positive]),
                ops.convert_to_tensor(log_pi_L[drawn]), ops.convert_to_tensor(log_q_B), ops.convert_to_tensor(log_q_BM),
            )
        )  # fmt: skip
        return np.asarray(losses_B)

    sampler = best(family, weight, negatives=3, rows=rows, **arguments)
    drawn = sampler.draw(keras.random.SeedGenerator(5), of)
    estimates = losses(
        np.asarray(drawn), np.asarray(sampler.log_q(of, of.positive_B)), np.asarray(sampler.log_q(of, drawn))
    )
    every = np.tile(np.arange(L, dtype=np.int32), (2, 1))
    full = losses(every, np.float32([-np.log(L)] * 2), np.full(every.shape, -np.log(L), np.float32))[0]

    assert (np.asarray(drawn) != positive).all()
    assert estimates.std() < 1e-5 * full
    np.testing.assert_allclose(estimates, full, rtol=1e-4)
    uniform = np.random.default_rng(1).choice(np.flatnonzero(others), (rows, 3)).astype(np.int32)
    assert (
        losses(uniform, np.full(rows, -np.log(L), np.float32), np.full((rows, 3), -np.log(L), np.float32)).std() > 0.01
    )


def test_the_minimum_variance_q_by_hand() -> None:
    """Logistic with weight tail: π_y' log(1 + e^f_y') over labels other than y; with a share of uniform draws."""
    of = context([1, 4], queries=QUERIES)
    terms = PI * np.log1p(np.exp(LOGITS))
    terms[[0, 1], [1, 4]] = 0
    expected = terms / terms.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(compute_log_q(best("logistic", "tail", negatives=2), of)), expected, rtol=1e-4)

    log_pi = np.log(PI).astype(np.float32)
    setup = SamplerSetup(
        np.log(PI), 2, DIM, log_terms=functools.partial(log_terms, Objective("logistic", "tail"), log_pi)
    )
    sampler = SAMPLERS["minimum_variance"](setup, negatives=2, uniform_share=0.25)
    sampler.refresh(TABLE)
    mixed = np.where(terms > 0, 0.75 * expected + 0.25 / 5, 0)
    np.testing.assert_allclose(np.exp(compute_log_q(sampler, of)), mixed, rtol=1e-4)


def test_minimum_variance_draws_by_the_recipe_s_loss() -> None:
    """The logistic loss is of f − log L [`balance`], and so is q*; labels that are no negatives are not drawn by it."""
    rows, labels = tiny.pairs((0, 0), (1, 1), (2, 2), (3, 3)), 50
    kinds = pa.table({"kind": [f"kind{row % 7}" for row in range(labels)]})
    data = tiny.dataset(rows, queries=4, labels=labels, label_table=kinds)

    def step(**sections: Any) -> tuple[np.ndarray, np.ndarray]:
        recipe = tiny.recipe(
            loss={
                "family": "logistic", "weight": "importance",
                "sampler": {"name": "minimum_variance", "negatives": 3, "uniform_share": 0},
            },
            model={"temperature": 0.1, "similarity": "cosine"}, **sections,
        )  # fmt: skip
        model = tiny.model(recipe, data, batch_size=4)
        model.begin_epoch()
        queries_BD = model.embed_queries({"user_id": rows.queries + 1})
        of = DrawContext(ops.convert_to_tensor(rows.labels), {}, ops.convert_to_tensor(queries_BD))
        every = ops.convert_to_tensor(np.tile(np.arange(labels, dtype=np.int32), (4, 1)))
        q_BL = np.exp(np.asarray(model.sampler.log_q(of, every)))
        return q_BL, queries_BD @ model.embed_labels().T / 0.1

    q_BL, logits_BL = step()
    terms_BL = np.log1p(np.exp(logits_BL - np.log(labels)))
    terms_BL[np.arange(4), np.arange(4)] = 0
    np.testing.assert_allclose(q_BL, terms_BL / terms_BL.sum(axis=1, keepdims=True), rtol=1e-3, atol=1e-7)

    q_BL, _ = step(label={"features": [tiny.ITEM, {"name": "kind", "kind": "id", "dim": 4}], "combine": "sum"})
    assert q_BL[:, 4:].max() < 1e-6, "labels without pairs are no negatives where features describe them"


@pytest.mark.parametrize("sampler", ["adversarial", "model"])
def test_importance_weights_bound_the_full_softmax(sampler: str) -> None:
    """The bracket is exact in expectation, its logarithm below [R21 Lemma 2], whatever the query's q."""
    rows, m, positive = 20_000, 4, 2
    catalogue = SamplerSetup(UNIFORM, rows, DIM, TREE)
    negative_sampler = SAMPLERS[sampler](catalogue, negatives=m)
    if negative_sampler.refresh is not None:
        negative_sampler.refresh(TABLE)
    inputs = {name: np.repeat(column[:1], rows, axis=0) for name, column in INPUTS.items()}
    of = context([positive] * rows, inputs=inputs, queries=np.repeat(QUERIES[:1], rows, axis=0))
    drawn = negative_sampler.draw(keras.random.SeedGenerator(3), of)
    logits = (3 * LABELS @ QUERIES[0]).astype(np.float32)
    log_q = negative_sampler.log_q(of, of.positive_B), negative_sampler.log_q(of, drawn)
    losses_B = np.asarray(
        Objective("softmax", "importance")(
            SampledLogits(
                ops.full((rows,), logits[positive]), ops.take(logits, drawn), drawn == positive, *log_q, *log_q
            )
        )
    ).astype(np.float64)[(np.asarray(drawn) != positive).any(axis=1)]

    exact = np.log(np.exp(logits - logits[positive]).sum())
    bracket_B = np.exp(losses_B)
    assert abs(bracket_B.mean() - np.exp(exact)) < 4 * bracket_B.std() / np.sqrt(len(losses_B))
    assert losses_B.mean() < exact
