from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from longtail.trainer.losses import LOSSES
from longtail.trainer.model.two_tower import TwoTower
from longtail.trainer.sampling import SAMPLERS, DrawContext, SamplerSetup
from tests.trainer import tiny

TRAIN = tiny.pairs((0, 0), (0, 1), (1, 2), (1, 1), (2, 1), (2, 3), (3, 4), (3, 5), (4, 0), (4, 1), (5, 6))
COUNTS = np.array([2, 4, 1, 1, 1, 1, 1])
L = 7
PI_L = (COUNTS + 0.5) / (11 + 0.5 * L)
BATCH = tiny.pairs((0, 0), (1, 1), (2, 1), (3, 4), (4, 0), (5, 6), weights=[1, 2, 0.5, 0, 1, 1])
B, M = 6, 5

SAMPLES: dict[str, dict[str, Any]] = {
    "in_batch": {"name": "in_batch"},
    "uniform": {"name": "uniform", "negatives": M},
    "uniform per row": {"name": "uniform", "negatives": M, "shared": False},
    "popularity": {"name": "popularity", "negatives": M, "alpha": 0.5},
    "mixed": {"name": "mixed", "negatives": M},
    "full": {"name": "full"},
}
Q_L = {
    "in_batch": COUNTS / 11,
    "uniform": np.full(L, 1 / L),
    "uniform per row": np.full(L, 1 / L),
    "popularity": np.sqrt(PI_L) / np.sqrt(PI_L).sum(),
    "mixed": ((B - 1) * COUNTS / 11 + M / L) / (B - 1 + M),
    "full": np.full(L, 1 / L),
}
WEIGHTS = ["unit", "constant", "importance", "relative", "tail"]


def compute_weight(weight: str, *, pi: float, pi_negative: float, q: float, q_negative: float, m: int) -> float:
    """METHODS §2.2."""
    return {
        "unit": 1,
        "constant": 1 / m,
        "importance": 1 / (m * q_negative),
        "relative": q / q_negative,
        "tail": pi_negative / (m * q_negative * pi),
    }[weight]


def job(sampler: str = "in_batch", weight: str = "unit", **sections: Any) -> Any:
    loss = {"sampler": SAMPLES[sampler], "weight": weight}
    return tiny.recipe(loss=loss, **sections)


def build_model(recipe: Any) -> TwoTower:
    """A model with an embedding scale and biases at which every term of the loss matters."""
    model = tiny.model(recipe, tiny.dataset(TRAIN, queries=6, labels=L), batch_size=B)
    rng = np.random.default_rng(2)
    for table in model.tables.values():
        table.table.assign(rng.standard_normal(table.table.shape))
    return model


def negatives(sampler: str) -> np.ndarray:
    """The labels that step 1 of a model with seed 0 takes as negatives, [B, m]."""
    arguments = {key: value for key, value in SAMPLES[sampler].items() if key != "name"}
    draw = SAMPLERS[SAMPLES[sampler]["name"]](SamplerSetup(np.log(PI_L), B), **arguments).draw
    context = DrawContext(ops.convert_to_tensor(BATCH.labels), {}, None)
    parts = [] if draw is None else [np.asarray(draw(keras.random.SeedGenerator(0), context))]
    if sampler in ("in_batch", "mixed"):
        parts.insert(0, BATCH.labels)
    return np.concatenate([np.broadcast_to(part, (B, part.shape[-1])) for part in parts], axis=1)


def reference(
    users: np.ndarray, items: np.ndarray, bias: np.ndarray, temperature: float, sampler: str, weight: str
) -> float:
    """Compute the loss [R21 eq. 7] in float64: cosine logits, masked hits, m draws."""
    users = users / np.linalg.norm(users, axis=1, keepdims=True)
    items = items / np.linalg.norm(items, axis=1, keepdims=True)
    q_L, losses = Q_L[sampler], []
    m = negatives(sampler).shape[1] - (sampler in ("in_batch", "mixed"))
    for row, others in enumerate(negatives(sampler)):
        user, positive = users[BATCH.queries[row]], BATCH.labels[row]
        logit = items @ user / temperature + bias
        rivals = [other for other in others if other != positive]
        weights = [
            compute_weight(
                weight, pi=PI_L[positive], pi_negative=PI_L[other], q=q_L[positive], q_negative=q_L[other], m=m
            )
            for other in rivals
        ]
        losses.append(np.log1p(np.dot(weights, np.exp(logit[rivals] - logit[positive]))))
    return float(np.mean(BATCH.weights * losses))


def parameters(model: TwoTower) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users, items and biases without their out-of-vocabulary rows, float64 copies."""
    biases = model.label_biases()
    tables = [ops.convert_to_numpy(model.tables[name].table)[1:].astype(np.float64) for name in ("user_id", "item_id")]
    return tables[0], tables[1], np.zeros(L) if biases is None else biases.astype(np.float64)


def test_the_batch_has_duplicates_and_the_draws_hit_positives() -> None:
    assert len(np.unique(BATCH.labels)) < B
    for sampler in SAMPLES:
        assert (negatives(sampler) == BATCH.labels[:, None]).any(), sampler


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("sampler", SAMPLES)
def test_the_loss_of_a_step_equals_the_formula(sampler: str, weight: str) -> None:
    model = build_model(job(sampler, weight, model={"dim": 4, "label_bias": True, "learn_temperature": True}))
    model.log_temperature.assign(np.log(0.4))
    expected = reference(*parameters(model), 0.4, sampler, weight)

    assert float(model.train_step(tiny.batch(BATCH))) == pytest.approx(expected, rel=2e-5)


@pytest.mark.usefixtures("eager")
def test_importance_with_every_label_is_the_exact_softmax_cross_entropy() -> None:
    model = build_model(job("full", "importance", model={"dim": 4, "label_bias": True, "temperature": 0.5}))
    users, items, bias = parameters(model)
    logits = model.embed_queries({"user_id": BATCH.queries + 1}) @ model.embed_labels().T / 0.5 + bias
    log_softmax = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    expected = -(BATCH.weights * log_softmax[np.arange(B), BATCH.labels]).mean()

    assert float(model.train_step(tiny.batch(BATCH))) == pytest.approx(expected, rel=1e-5)
    assert (users.shape, items.shape) == ((6, 4), (L, 4))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("sampler", "weight"), [("in_batch", "tail"), ("mixed", "importance"), ("full", "relative")])
def test_a_step_descends_the_gradient_of_the_formula(sampler: str, weight: str) -> None:
    """Against central differences of the plain formula, in users, items and biases."""
    recipe = job(
        sampler, weight, model={"dim": 4, "label_bias": True, "temperature": 0.5},
        optimizer={"embeddings": "sgd", "embedding_learning_rate": 1.0},
    )  # fmt: skip
    model = build_model(recipe)
    before = parameters(model)
    model.train_step(tiny.batch(BATCH))
    gradients = [old - new for old, new in zip(before, parameters(model), strict=True)]

    for part, entry in [(0, (1, 2)), (0, (2, 0)), (1, (0, 3)), (1, (1, 1)), (1, (6, 2)), (2, (1,)), (2, (4,))]:
        losses = []
        for shift in (1e-5, -1e-5):
            moved = [values.copy() for values in before]
            moved[part][entry] += shift
            losses.append(reference(*moved, 0.5, sampler, weight))
        assert gradients[part][entry] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-3, abs=1e-5)


@pytest.mark.usefixtures("eager")
def test_the_gradient_of_a_learned_temperature_is_the_formula_s() -> None:
    model = build_model(job(model={"dim": 4, "temperature": 0.5, "learn_temperature": True}))
    users, items, bias = parameters(model)
    slope = reference(users, items, bias, 0.501, "in_batch", "unit") - reference(
        users, items, bias, 0.499, "in_batch", "unit"
    )

    model.train_step(tiny.batch(BATCH))

    assert np.sign(0.5 - model.temperature) == np.sign(slope)
    assert abs(np.log(model.temperature / 0.5)) == pytest.approx(0.001, rel=1e-3), "Adam's first step is its rate"


@pytest.mark.usefixtures("eager")
def test_pairs_of_weight_zero_have_no_gradient() -> None:
    model = build_model(job("full"))
    before = parameters(model)
    nothing = tiny.pairs((0, 0), (1, 1), (2, 1), (3, 4), (4, 0), (5, 6), weights=[0] * B)

    assert float(model.train_step(tiny.batch(nothing))) == 0
    for old, new in zip(before, parameters(model), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.usefixtures("eager")
def test_reweighting_by_frequency_scales_whole_pairs() -> None:
    """Pairs weigh π_y^−½, scaled to mean 1 over the eleven training pairs."""
    reweighted, plain = (
        build_model(tiny.recipe(loss={"family": "logistic", "reweight": reweight, "sampler": SAMPLES["uniform"]}))
        for reweight in (0.5, 0.0)
    )
    factor_L = PI_L**-0.5 / (COUNTS / 11 @ PI_L**-0.5)
    by_hand = tiny.pairs(*zip(BATCH.queries, BATCH.labels, strict=True), weights=BATCH.weights * factor_L[BATCH.labels])

    assert float(reweighted.train_step(tiny.batch(BATCH))) == pytest.approx(
        float(plain.train_step(tiny.batch(by_hand))), rel=1e-6
    )


@pytest.mark.usefixtures("eager")
def test_a_batch_of_one_label_has_no_negatives_and_no_loss() -> None:
    model = build_model(job("in_batch", "importance"))
    same = tiny.pairs(*[(user, 3) for user in range(B)])

    assert float(model.train_step(tiny.batch(same))) == 0
    assert np.isfinite(model.embed_labels()).all()


@pytest.mark.usefixtures("eager")
def test_l2_adds_the_gradient_of_its_penalty_to_touched_rows_and_to_dense_weights() -> None:
    """2·l2·θ a step: what plain descent does with l2 and without differs by −rate · 2 · 0.05 · θ."""
    moved = []
    for l2 in (0.05, 0.0):
        descent = {"embeddings": "sgd", "dense": "sgd", "embedding_learning_rate": 2.0, "dense_learning_rate": 0.5}
        model = build_model(job(
            query={"features": [tiny.USER], "hidden": [3]}, optimizer=descent | {"l2": l2},
            model={"dim": 4, "label_bias": True, "learn_temperature": True},
        ))  # fmt: skip
        for weights in model.dense_variables:
            weights.assign(np.random.default_rng(3).uniform(0.5, 1, weights.shape))
        variables = [*(table.table for table in model.tables.values()), *model.dense_variables]
        before = [ops.convert_to_numpy(variable.value) for variable in variables]
        model.train_step(tiny.batch(BATCH))
        moved.append(
            [ops.convert_to_numpy(variable.value) - old for variable, old in zip(variables, before, strict=True)]
        )

    rows, (*dense, temperature) = [2.0 * 0.1 * old for old in before[:3]], [0.5 * 0.1 * old for old in before[3:]]
    touched = {"user_id": [1, 2, 3, 4, 5, 6], "item_id": [1, 2, 5, 7], "label bias": [1, 2, 5, 7]}
    for values, name in zip(rows, model.tables, strict=True):
        values[np.setdiff1d(np.arange(len(values)), touched[name])] = 0
    for penalised, plain, expected in zip(*moved, [*rows, *dense, 0 * temperature], strict=True):
        np.testing.assert_allclose(plain - penalised, expected, atol=2e-6)
    assert len(dense) > 2
    assert all(values.any() for values in (*rows[:2], *dense))


FAMILIES: dict[str, dict[str, Any]] = {
    name: {"family": name, "weight": (family.weights or ("importance",))[0]} for name, family in LOSSES.items()
} | {
    "pairwise hinge": {"family": {"name": "hinge", "pairwise": True}, "mining": {"keep": 3}},
    "mined softmax": {"mining": {"keep": 2, "power": 0.5}},
    "mined contrastive": {"family": {"name": "contrastive", "margin": 0.2}, "mining": {"power": 1}},
    "regularized": {"family": "logistic", "regularizer": 0.001},
}  # fmt: skip


@pytest.mark.usefixtures("eager")
def test_augment_and_reduce_keeps_a_number_for_every_pair() -> None:
    """η of the visited pairs goes from L to the bracket, at once on the first visit; others stay."""
    model = build_model(job("full", "importance", model={"dim": 4, "temperature": 0.5}))
    recipe = tiny.recipe(
        loss={"family": "augment_and_reduce", "weight": "importance", "sampler": {"name": "full"}},
        model={"dim": 4, "temperature": 0.5},
    )  # fmt: skip
    augmented = build_model(recipe)
    pairs = np.int32([10, 1, 4, 6, 8, 3])
    softmax = float(model.train_step(tiny.batch(BATCH)))
    logits_BL = augmented.embed_queries({"user_id": BATCH.queries + 1}) @ augmented.embed_labels().T / 0.5
    loss = float(augmented.train_step(tiny.batch(BATCH, _pair=pairs)))

    log_eta_N = ops.convert_to_numpy(augmented.train_step.terms[-1].variables[0])
    bracket_B = np.logaddexp.reduce(logits_BL, axis=1) - logits_BL[np.arange(B), BATCH.labels]
    np.testing.assert_allclose(log_eta_N[pairs], bracket_B, rtol=1e-4)
    np.testing.assert_allclose(np.delete(log_eta_N, pairs), np.log(L), rtol=1e-6)
    assert loss == pytest.approx(softmax, rel=1e-5), "the bound is tight at its own η"
    assert any(variable is augmented.train_step.terms[-1].variables[0] for variable in augmented.variables), (
        "kept in checkpoints"
    )


def hidden(precision: str) -> Any:
    tower = {"hidden": [8]}
    return job(
        "uniform per row", query={"features": [tiny.USER]} | tower, label={"features": [tiny.ITEM]} | tower,
        model={"dim": 4, "label_bias": True}, training={"precision": precision, "batch_size": B},
    )  # fmt: skip


@pytest.mark.usefixtures("eager")
def test_mixed_precision_trains_like_full_precision_and_keeps_float32() -> None:
    half, full = build_model(hidden("mixed_bfloat16")), build_model(hidden("float32"))

    np.testing.assert_array_equal(half.embed_labels(), full.embed_labels())
    losses = [float(model.train_step(tiny.batch(BATCH))) for model in (half, full)]

    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]
    assert {variable.dtype for variable in half.variables if variable.dtype.startswith(("float", "bf"))} == {"float32"}
    assert half.embed_queries({"user_id": np.int32([1])}).dtype == np.float32


def test_embeddings_of_the_catalogue_are_in_its_order_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(job(model={"dim": 4, "similarity": "dot"}))
    expected = parameters(model)[1]
    monkeypatch.setattr("longtail.trainer.model.two_tower._BLOCK", 3)

    np.testing.assert_allclose(model.embed_labels(), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "learns"), [(None, False), (0, False), (0.5, True)])
def test_the_row_of_unknown_labels_learns_only_where_some_labels_are_made_unknown(
    rate: float | None, learns: bool
) -> None:
    label = {"features": [tiny.ITEM | {"unknown_rate": rate}]}
    job = tiny.recipe(label=label, training={"batch_size": 40})
    rows = tiny.pairs(*[(query, query % 4) for query in range(40)])
    model = tiny.model(job, tiny.dataset(rows, queries=40, labels=4), batch_size=40)
    table = model.tables["item_id"].table
    before = ops.convert_to_numpy(table).copy()
    for _ in range(3):
        model.train_step(tiny.batch(rows, _pair=np.arange(40, dtype=np.int32)))
    changed = (ops.convert_to_numpy(table) != before).any(axis=1)
    assert changed.tolist() == [learns, True, True, True, True]
    assert len(np.unique(model.embed_labels().round(4), axis=0)) == 4
