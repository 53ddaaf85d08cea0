"""A target that has ε on all labels alike: by hand, its mean over draws of every sampler, and what it converges to
[METHODS §2.6]."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from keras import ops

from longtail.trainer import backend
from longtail.trainer.losses import LOSSES, Objective, SampledLogits
from longtail.trainer.losses.hits import stands_for
from longtail.trainer.losses.objective import log_terms
from longtail.trainer.losses.row_methods import LabelSmoothing
from longtail.trainer.sampling import SAMPLERS, DrawContext, LabelTable, SamplerSetup
from tests.trainer import tiny, toy
from tests.trainer.test_top_k import tree

L, DIM, ROWS = 32, 4, 10_000
PI = np.arange(L, 0, -1) ** -0.8 / (np.arange(L, 0, -1) ** -0.8).sum()
RNG = np.random.default_rng(0)
EMBEDDINGS = RNG.normal(0, 1, (L, DIM)).astype(np.float32)
QUERY = RNG.normal(0, 1, DIM).astype(np.float32)
SCORES = (EMBEDDINGS @ QUERY).astype(np.float64)
Y = int(SCORES.argmax())
SAMPLED: dict[str, tuple[str, dict[str, Any]]] = {
    "uniform": ("uniform", {"negatives": 3, "shared": False}),
    "uniform, distinct": ("uniform", {"negatives": 3, "shared": False, "replace": False}),
    "uniform, never the positive": ("uniform", {"negatives": 3, "exclude_positive": True}),
    "popularity": ("popularity", {"negatives": 3, "shared": False, "alpha": 0.75}),
    "popularity, never the positive": ("popularity", {"negatives": 3, "exclude_positive": True}),
    "model": ("model", {"negatives": 3}),
    "adversarial": ("adversarial", {"negatives": 3}),
    "minimum_variance": ("minimum_variance", {"negatives": 3, "uniform_share": 0.5}),
}
"""Samplers that draw for every row by itself."""


def added(candidates: Any, log_q: Any, own_BM: Any, *, m: int, log_miss: Any = None) -> np.ndarray:
    """What a target of ε = ¼ adds to the losses of rows of label Y, over ε; own places are no draws."""
    rows = len(candidates)
    plain = SampledLogits(
        ops.zeros(rows) + float(SCORES[Y]), ops.take(SCORES.astype(np.float32), candidates),
        ops.equal(candidates, Y), *[np.zeros(rows, np.float32), np.zeros(candidates.shape[1], np.float32)] * 2,
    )  # fmt: skip
    rows = {"stands": stands_for(log_q, own_BM, m=m, log_miss_B=log_miss)}
    more_B = Objective(methods=(LabelSmoothing(0.25, L),))(plain._replace(rows=rows)) - Objective()(plain)
    return ops.convert_to_numpy(more_B).astype(np.float64) / 0.25


@pytest.mark.parametrize(("name", "arguments"), SAMPLED.values(), ids=SAMPLED)
def test_draws_add_what_all_labels_would_on_average(name: str, arguments: dict[str, Any]) -> None:
    """f_y less the mean of all scores, of the catalogue's 32 by 3 draws, 10,000 times."""
    terms = partial(log_terms, Objective("softmax", "importance"), ops.convert_to_tensor(np.log(PI).astype(np.float32)))
    sampler = SAMPLERS[name](SamplerSetup(np.log(PI), ROWS, DIM, tree(), log_terms=terms), **arguments)
    if sampler.refresh is not None:
        sampler.refresh(LabelTable(EMBEDDINGS, None, 1.0))
    queries_BD = ops.convert_to_tensor(np.tile(QUERY, (ROWS, 1)))
    context = DrawContext(ops.full((ROWS,), Y, "int32"), {"age": np.ones(ROWS, np.float32)}, queries_BD)
    drawn = sampler.draw(keras.random.SeedGenerator(1), context)

    def log_q(labels: Any) -> Any:
        return ops.take(sampler.log_q_L, labels) if sampler.log_q is None else sampler.log_q(context, labels)

    log_miss = None if sampler.log_miss is None else sampler.log_miss(log_q(context.positive_B))
    hits_BM = ops.equal(drawn, Y)
    own_BM = ops.zeros_like(hits_BM) if log_miss is None else hits_BM
    toy.assert_mean(added(drawn, log_q(drawn), own_BM, m=3, log_miss=log_miss), SCORES[Y] - SCORES.mean())


@pytest.mark.parametrize("uniform", [0, 2], ids=["in_batch", "mixed"])
def test_other_rows_of_a_batch_are_draws_and_the_row_s_own_place_is_none(uniform: int) -> None:
    sampler = SAMPLERS["mixed" if uniform else "in_batch"](
        SamplerSetup(np.log(PI), 4), **({"negatives": uniform} if uniform else {})
    )
    batch_BM = [np.full((ROWS, 1), Y), RNG.choice(L, (ROWS, 3), p=PI), RNG.integers(0, L, (ROWS, uniform))]
    candidates_BM = np.concatenate(batch_BM, axis=1).astype(np.int32)
    own_BM = np.arange(4 + uniform) == np.zeros((ROWS, 1))

    added_B = added(candidates_BM, ops.take(sampler.log_q_L, candidates_BM), own_BM, m=3 + uniform)
    toy.assert_mean(added_B, SCORES[Y] - SCORES.mean())


P = np.array([0.5, 0.25, 0.15, 0.1, 0.0])
"""p(y|x) of five labels."""


@pytest.mark.parametrize(
    ("family", "weight"),
    [
        ("softmax", "importance"), ("softmax", "tail"), ("bilateral_softmax", "importance"),
        ("bilateral_softmax", "tail"), ("augment_and_reduce", "importance"),
    ],
)  # fmt: skip
def test_the_optimum_is_the_smoothed_target_over_the_noise(family: str, weight: str) -> None:
    """softmax(f + log ν) = (1 − ε)·p + ε/L: there, and not at p itself, the expected loss is stationary."""
    epsilon, log_pi_L = 0.2, np.log(np.float32([0.4, 0.3, 0.15, 0.1, 0.05]))
    every_BM, q_L = np.tile(np.arange(5), (5, 1)), np.full(5, -np.log(5), np.float32)
    kept = LOSSES[family].hits == "keep"
    target_L = (1 - epsilon) * P + epsilon / 5
    log_nu_L = log_pi_L if weight == "tail" else 0.0

    def slope(f_L: np.ndarray) -> np.ndarray:
        def expected(rows: list[Any]) -> tuple[Any, Any]:
            (logits_L,) = rows
            made = SampledLogits(
                logits_L, ops.take(logits_L, every_BM), np.eye(5, dtype=bool) & (not kept), log_pi_L, log_pi_L, q_L,
                q_L, rows={"stands": np.ones((5, 5), np.float32)},
            )  # fmt: skip
            objective = Objective(family, weight, methods=(LabelSmoothing(epsilon, 5),))
            if LOSSES[family].stateful:
                log_eta_B = ops.stop_gradient(ops.logsumexp(logits_L) - logits_L)
                losses_B, _ = objective.with_eta(made, log_eta_B=log_eta_B, rate=np.float32(1e-6))
            else:
                losses_B = objective(made)
            return ops.sum(losses_B * P.astype(np.float32)), losses_B

        _, (gradient_L,), _ = backend.value_and_gradients(expected, [ops.convert_to_tensor(np.float32(f_L))], [])
        return ops.convert_to_numpy(gradient_L)

    np.testing.assert_allclose(slope(np.log(target_L) - log_nu_L), 0, atol=1e-6)
    assert np.abs(slope(np.log(P + 1e-9) - log_nu_L)).max() > 0.01


TRAIN = tiny.pairs((0, 0), (0, 1), (1, 2), (1, 1), (2, 1), (2, 3))
FEATURES = {
    "features": [tiny.ITEM | {"unknown_rate": 0.0}, {"name": "genres", "kind": "bag", "separator": "|", "dim": 4}]
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("sampler", ["full", "in_batch"])
def test_a_step_by_hand(sampler: str) -> None:
    """Six labels, two of them in no pair: which `full` spreads over and a batch, which never holds them, does not."""
    data = tiny.dataset(TRAIN, queries=3, labels=6)
    losses = []
    for epsilon in (0.0, 0.25):
        job = tiny.recipe(
            loss={"sampler": sampler, "label_smoothing": epsilon}, model={"dim": 4, "temperature": 0.5}
        )  # fmt: skip
        model = tiny.model(job, data, batch_size=6)
        logits_BL = model.embed_queries({"user_id": TRAIN.queries + 1}) @ model.embed_labels().T / 0.5
        losses.append(float(model.train_step(tiny.batch(TRAIN))))

    counts_L = np.array([1, 3, 1, 1, 0, 0])
    more = []
    for row, label in enumerate(TRAIN.labels):
        gaps_L = logits_BL[row, label] - logits_BL[row]
        others_L = counts_L - (np.arange(6) == label)
        share_L = np.full(6, 1 / 6) if sampler == "full" else others_L / 5 / np.maximum(counts_L / 6, 1e-9) / 4
        more.append(share_L @ gaps_L)
    assert losses[1] - losses[0] == pytest.approx(0.25 * np.mean(more), rel=1e-4)


@pytest.mark.usefixtures("eager")
def test_labels_that_are_no_negatives_get_none_of_it() -> None:
    """Of a catalogue whose labels have features beside their id, those in no pair."""
    table = pa.table({"item_id": [f"i{row}" for row in range(6)], "genres": ["a", "b", "a|b", "b", "a", "b"]})
    data = tiny.dataset(TRAIN, queries=3, labels=6, label_table=table)
    steps = [
        tiny.model(tiny.recipe(loss={"sampler": name, "label_smoothing": 0.1}, label=label), data, batch_size=6)
        for name, label in (("full", FEATURES), ("in_batch", FEATURES), ("full", {"features": [tiny.ITEM]}))
    ]

    assert [model.train_step.methods[0].labels for model in steps] == [4, 4, 6]
    losses = []
    for epsilon in (0.0, 0.25):
        model = tiny.model(
            tiny.recipe(loss={"sampler": "full", "label_smoothing": epsilon}, label=FEATURES), data, batch_size=6
        )  # fmt: skip
        logits_BL = model.embed_queries({"user_id": TRAIN.queries + 1}) @ model.embed_labels().T / model.temperature
        losses.append(float(model.train_step(tiny.batch(TRAIN))))
    more_B = [logits_BL[row, label] - logits_BL[row, :4].mean() for row, label in enumerate(TRAIN.labels)]
    assert losses[1] - losses[0] == pytest.approx(0.25 * np.mean(more_B), rel=1e-3)
