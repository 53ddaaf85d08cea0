"""Negatives beside the draws: impressions, with a weight of their own, and retrieved labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.trainer.config import LossConfig
from longtail.trainer.data.batches import epoch_batches
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.errors import DataError
from longtail.trainer.loss_terms import KnownPositives
from longtail.trainer.loss_terms.extra_negatives import Impressions
from tests.trainer import tiny

L, B, GAMMA = 7, 4, 0.25
TRAIN = tiny.pairs((0, 0), (0, 1), (1, 2), (1, 1), (2, 3), (2, 4), (3, 5), (3, 0))
BATCH = tiny.pairs((0, 0), (1, 2), (2, 3), (3, 0), weights=[1, 2, 0.5, 1])
SHOWN_LABELS = np.int32([[1, 6, 0, 0], [2, 2, 2, 2], [4, 4, 5, 3], [6, 5, 2, 1]])
"""Of row 0 also its positive; of row 1 nothing else; of row 2 label 4 twice."""
RETRIEVED = np.int32([[6, 5], [0, 2], [4, 6], [1, 1]])
"""Row 1 has but one, and its positive in place of the other."""


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("hits", ["mask", "mask_known"])
@pytest.mark.parametrize(
    ("family", "sampler", "weight", "more"),
    [
        ("softmax", "in_batch", "unit", {"impressions": GAMMA}),
        ("softmax", "full", "importance", {"impressions": GAMMA}),
        ("softmax", "full", "tail", {"impressions": GAMMA, "mining": {"keep": 1}}),
        ("logistic", "full", "unit", {"impressions": GAMMA}),
        ({"name": "logistic", "pairwise": True}, "full", "importance", {"impressions": GAMMA}),
        ("softmax", "in_batch", "unit", {"retrieved_negatives": {"negatives": 2, "depth": 2}}),
        ("logistic", "full", "unit", {"impressions": GAMMA, "retrieved_negatives": {"negatives": 2, "depth": 2}}),
    ],
)
def test_the_loss_of_a_step_equals_the_formula(
    family: Any, sampler: str, weight: str, more: dict[str, Any], hits: str
) -> None:
    """METHODS §2.3 and §3.1, label by label in NumPy: γ for each impression and 1 for each retrieved label but the
    positive, whatever weighs the draws."""
    job = tiny.recipe(
        data={"impressions": "shown"}, model={"label_bias": True, "temperature": 0.5},
        loss={"family": family, "sampler": sampler, "weight": weight, "hits": hits} | more,
    )  # fmt: skip
    model = tiny.model(job, tiny.dataset(TRAIN, queries=4, labels=L), batch_size=B)
    biases = np.linspace(-0.5, 0.5, L).astype(np.float32)
    model.tables["label bias"].table.assign(np.concatenate([[0], biases])[:, None])
    logits_BL = model.embed_queries({"user_id": BATCH.queries + 1}) @ model.embed_labels().T / 0.5 + biases
    counts = np.bincount(TRAIN.labels, minlength=L)
    pi = (counts + 0.5) / (counts.sum() + 0.5 * L)
    known_labels = [set(TRAIN.labels[TRAIN.queries == query].tolist()) for query in BATCH.queries]

    expected = 0.0
    for row, (label, weigh) in enumerate(zip(BATCH.labels, BATCH.weights, strict=True)):
        masked = {int(label)} | (known_labels[row] if hits == "mask_known" else set())
        drawn = [(int(other), 1.0) for other in BATCH.labels] if sampler == "in_batch" else [
            (other, {"unit": 1, "importance": 1, "tail": pi[other] / pi[label]}[weight]) for other in range(L)
        ]  # fmt: skip
        drawn = [(other, factor) for other, factor in drawn if other not in masked]
        if "mining" in more:
            drawn = sorted(drawn, key=lambda pair: -logits_BL[row, pair[0]])[:1]
        extra = [(int(other), GAMMA) for other in SHOWN_LABELS[row] if "impressions" in more]
        extra += [(int(other), 1.0) for other in RETRIEVED[row] if "retrieved_negatives" in more]
        terms = drawn + [(other, factor) for other, factor in extra if other not in masked]
        positive_logit = logits_BL[row, label]
        if family == "softmax":
            of_row = np.log1p(sum(factor * np.exp(logits_BL[row, other] - positive_logit) for other, factor in terms))
        elif family == "logistic":
            shift = -np.log(L)  # of `full` with unit weights: each of L labels once [METHODS §2]
            of_row = np.log1p(np.exp(-positive_logit - shift)) + sum(
                factor * np.log1p(np.exp(logits_BL[row, other] + shift)) for other, factor in terms
            )
        else:
            of_row = sum(factor * np.log1p(np.exp(logits_BL[row, other] - positive_logit)) for other, factor in terms)
        expected += weigh * of_row / B

    columns = {"_shown": SHOWN_LABELS} if "impressions" in more else {}
    columns |= {"_retrieved": RETRIEVED} if "retrieved_negatives" in more else {}
    batch = tiny.batch(BATCH, **columns, _pair=np.arange(B, dtype=np.int32))
    if hits == "mask_known":
        batch["_known"], batch["_known_rows"] = KnownPositives.collect(TRAIN).list_positives(BATCH.queries)
    assert float(model.train_step(batch)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("hits", ["mask", "mask_known"])
@pytest.mark.parametrize("described", [False, True])
def test_unseen_impressions_are_negatives_only_without_features(described: bool, hits: str) -> None:
    """Label 6 has no pair: with other features it is never a negative, and the loss equals that without it."""
    features = [tiny.ITEM | {"unknown_rate": 0}, *([{"name": "kind", "kind": "id", "dim": 4}] if described else [])]
    job = tiny.recipe(
        data={"impressions": "shown"}, label={"features": features, "combine": "sum"},
        loss={"hits": hits, "impressions": GAMMA},
    )  # fmt: skip
    data = tiny.dataset(TRAIN, queries=4, labels=L, label_table=pa.table({"kind": list("abcdefg")}))

    def loss(impressions: np.ndarray) -> float:
        batch = tiny.batch(BATCH, _shown=impressions, _pair=np.arange(B, dtype=np.int32))
        if hits == "mask_known":
            batch["_known"], batch["_known_rows"] = KnownPositives.collect(TRAIN).list_positives(BATCH.queries)
        return float(tiny.model(job, data, batch_size=B).train_step(batch))

    without = np.where(SHOWN_LABELS == 6, BATCH.labels[:, None], SHOWN_LABELS).astype(np.int32)
    if described:
        assert loss(SHOWN_LABELS) == pytest.approx(loss(without), rel=1e-6)
    else:
        assert loss(SHOWN_LABELS) > loss(without) * (1 + 2e-5)


def test_a_batch_holds_the_impressions_of_its_rows(tmp_path: Path) -> None:
    log = {"user": ["a", "b", "c"], "item": ["x", "y", "x"], "shown": [["x", "y"], ["z", "y", "x"], None]}
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    recipe = tiny.recipe(
        data={"train": tmp_path / "log.parquet", "query_id": "user", "label_id": "item", "impressions": "shown"},
        query={"features": [tiny.USER | {"name": "user"}]}, label={"features": [tiny.ITEM | {"name": "item"}]},
        loss={"impressions": 0.5},
    )  # fmt: skip
    dataset = read_dataset(recipe)
    ((_, batch),) = epoch_batches(
        dataset.train, Encoding.fit(recipe, dataset).query, [Impressions(0.5, dataset.train, dataset.impressions)],
        batch_size=3, seed=0, epoch=0,
    )  # fmt: skip

    x, y = (dataset.label_ids.to_pylist().index(name) for name in "xy")
    impressions = {int(pair): row for pair, row in zip(batch["_pair"], batch["_shown"].tolist(), strict=True)}
    assert impressions == {0: [x, y], 1: [y, x], 2: [x, x]}, "z is in no catalogue; places left over hold the positive"

    pq.write_table(pa.table(log | {"shown": ["x|y", "", ""]}), tmp_path / "log.parquet")
    with pytest.raises(DataError, match="column 'shown': expected lists of ids, strings or integers, found text"):
        read_dataset(recipe)


def test_families_without_impressions_are_refused() -> None:
    with pytest.raises(ValueError, match="impressions: not allowed with family 'nce', whose noise must be exactly"):
        LossConfig.model_validate({"family": "nce", "impressions": 0.5})
    assert LossConfig.model_validate({"weight": "importance"}).explain_uncalibrated() is None
    config = LossConfig.model_validate({"weight": "importance", "impressions": 0.5})
    assert config.explain_uncalibrated() == "impressions are negatives that no q draws"
    assert str(config) == "softmax · in_batch · importance · impressions 0.5"
