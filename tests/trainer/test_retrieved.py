"""Check negatives from the model's own lists: search, draws, weights, resumption and a gain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle import Inputs
from longtail.trainer.checkpoint import Checkpoints
from longtail.trainer.config import LossConfig, Recipe
from longtail.trainer.config.loss import RetrievedConfig
from longtail.trainer.data.batches import epoch_batches
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Requests
from longtail.trainer.errors import CheckpointError, DataError
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.ranking import define_buckets
from longtail.trainer.limits import check_sizes
from longtail.trainer.loss_terms.extra_negatives import Retrieved
from longtail.trainer.model.step import TrainStep
from tests.trainer import tiny

L = 7
TRAIN = tiny.pairs((0, 0), (0, 1), (1, 2), (1, 1), (2, 3), (2, 4), (3, 5), (3, 0))


def retrieved(lists: Any, list_of_pair: list[int], *, negatives: int) -> Retrieved:
    """Lists as if they had been searched."""
    config = RetrievedConfig(negatives=negatives)
    term = Retrieved(tiny.recipe(), config, tiny.dataset(TRAIN, queries=4, labels=L))
    term.lists_AK, term.list_of_N = np.array(lists, np.int32), np.int32(list_of_pair)
    return term


def draw_negatives(term: Retrieved, rows: np.ndarray, positives: np.ndarray, seed: int = 0) -> np.ndarray:
    return term.columns(rows, {"_positive": positives}, np.random.default_rng(seed))["_retrieved"]


def test_entries_of_a_list_are_drawn_equally_often() -> None:
    """Of ten labels each with chance 4/10, best first."""
    term = retrieved(np.arange(20).reshape(2, 10), [1, 0, 1], negatives=4)
    rows = np.zeros(20_000, np.int64)
    drawn = draw_negatives(term, rows, np.full(len(rows), 99, np.int32))
    counts = np.bincount(drawn.ravel(), minlength=20)
    assert not counts[:10].any(), "pair 0 has list 1"
    deviation = 4 * np.sqrt(20_000 * 0.4 * 0.6)
    np.testing.assert_allclose(counts[10:], 8000, atol=deviation)
    assert np.all(np.diff(drawn, axis=1) >= 0)
    assert np.all(drawn[:, 0] <= 12), "the first is of the best quarter, which ends within the third"


CHOSEN = np.array([np.random.default_rng(query).permutation(12)[:5] for query in range(10)])
"""Every label is somebody's: those that nobody chose would read one row, and be equally good."""
DATA = tiny.dataset(
    tiny.pairs(*[(query, label) for query, row in enumerate(CHOSEN) for label in row]), queries=10, labels=12
)
LISTS = {"negatives": 2, "depth": 4, "bias_removal": 1.0}


def job(**retrieved: Any) -> Recipe:
    return tiny.recipe(
        loss={"retrieved_negatives": LISTS | retrieved}, training={"batch_size": 10},
        optimizer={"embedding_learning_rate": 0.1}, model={"label_bias": True},
    )  # fmt: skip


def best(model: Any, depth: int, bias_removal: float) -> list[list[int]]:
    """The labels that every query likes best by the weights of now, its training labels left out; NumPy."""
    counts = np.bincount(DATA.train.labels, minlength=12)
    log_pi = np.log((counts + 0.5) / (counts.sum() + 6))
    scores = model.embed_queries({"user_id": np.arange(1, 11, dtype=np.int32)}) @ model.embed_labels().T
    scores = scores / model.temperature + model.label_biases() + bias_removal * log_pi
    scores[DATA.train.queries, DATA.train.labels] = -np.inf
    return np.argsort(-scores, axis=1)[:, :depth].tolist()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("negatives", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_batches_hold_the_best_labels_by_the_weights_of_their_epoch_s_beginning(
    negatives: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first epoch has no lists."""
    models: list[Any] = []
    lists: list[list[list[int]]] = []
    steps: list[int] = []

    class Watched(TrainStep):
        def __init__(self, model: Any, *arguments: Any, **more: Any) -> None:
            models.append(model)
            super().__init__(model, *arguments, **more)

    def watched(*arguments: Any, **more: Any) -> Iterator[tuple[int, Inputs]]:
        epoch = len(lists)
        lists.append(best(models[0], 4, 1.0))
        of_epoch = lists[epoch]
        for step, batch in epoch_batches(*arguments, **more):
            for query, positive, row in zip(batch["user_id"] - 1, batch["_positive"], batch["_retrieved"], strict=True):
                assert len(row) == negatives
                if epoch == 0:
                    assert set(row) == {positive}
                else:
                    assert set(row) <= set(of_epoch[query])
                    assert len(set(row)) == negatives
            steps.append(step)
            yield step, batch

    monkeypatch.setattr("longtail.trainer.run.TrainStep", Watched)
    monkeypatch.setattr("longtail.trainer.train.epoch_batches", watched)
    tiny.train(job(negatives=negatives), DATA, tmp_path, epochs=3)
    assert steps == 3 * [*range(5)]
    assert lists[2] != lists[1] != lists[0], "the weights have moved on"


def search_lists(recipe: Recipe, data: Dataset, folder: Path, *, within: bool = False) -> Retrieved:
    """A search of an untrained model, whose λ is of label counts."""
    model, counts = tiny.model(recipe, data, batch_size=2), data.label_counts()
    log_pn = np.log((counts + 0.5) / (counts.sum() + 0.5 * len(counts))).astype(np.float32)

    def label_side() -> LabelSide:
        return LabelSide.build(
            model.embed_labels(), model.label_biases(), counts, training_queries=data.training_queries(),
            temperature=model.temperature, log_pn=log_pn, buckets=define_buckets(recipe.evaluation, counts),
        )  # fmt: skip

    query = Encoding.fit(recipe, data).query
    assert recipe.loss.retrieved_negatives is not None
    term = Retrieved(recipe, recipe.loss.retrieved_negatives, data)
    embed = lambda rows: model.embed_queries(query.query_inputs(rows))  # noqa: E731
    term.begin_epoch(1, Checkpoints(folder, "run"), embed, label_side, within=within)
    return term


def list_sets(term: Retrieved, pairs: list[int]) -> list[set[int]]:
    return [set(term.lists_AK[term.list_of_N[pair]].tolist()) - {-1} for pair in pairs]


def test_retrieved_lists_exclude_labels_that_are_no_negatives(tmp_path: Path) -> None:
    """Labels 6 and 7 have no pair: with other features they are no negatives [METHODS §9], with only an id they are."""
    every = {"retrieved_negatives": {"negatives": 1, "depth": 8}}
    plain = tiny.dataset(TRAIN, queries=4, labels=8)
    others = [set(range(8)) - {0, 1}, set(range(8)) - {1, 2}, set(range(8)) - {3, 4}, set(range(8)) - {0, 5}]
    assert list_sets(search_lists(tiny.recipe(loss=every), plain, tmp_path / "plain"), [0, 2, 4, 6]) == others

    described = tiny.recipe(
        label={"features": [tiny.ITEM, {"name": "kind", "kind": "id", "dim": 4}], "combine": "sum"}, loss=every
    )
    data = tiny.dataset(TRAIN, queries=4, labels=8, label_table=pa.table({"kind": list("abcdefgh")}))
    chosen = [labels - {6, 7} for labels in others]
    assert list_sets(search_lists(described, data, tmp_path / "described"), [0, 2, 4, 6]) == chosen


def test_every_request_of_a_query_has_a_list(tmp_path: Path) -> None:
    """Query 0 has two requests with the same chosen labels."""
    pairs = tiny.pairs((0, 0), (0, 1), (1, 2), (1, 1)).take(slice(None))
    pairs = type(pairs)(pairs.queries, pairs.labels, requests=np.int32([0, 1, 2, 2]))
    data = tiny.dataset(pairs, queries=2, labels=5, requests=Requests(np.int32([0, 0, 1])))
    term = search_lists(tiny.recipe(loss={"retrieved_negatives": {"negatives": 1, "depth": 5}}), data, tmp_path)
    assert term.list_of_N.tolist() == [0, 1, 2, 2]
    assert list_sets(term, [0, 1, 2]) == [{2, 3, 4}, {2, 3, 4}, {0, 3, 4}]


def test_lists_lost_within_an_epoch_stop_the_job(tmp_path: Path) -> None:
    """The weights differ from those at the beginning of the epoch."""
    recipe = tiny.recipe(loss={"retrieved_negatives": {"negatives": 1, "depth": 5}})
    with pytest.raises(CheckpointError, match="expected the lists of retrieved negatives from before epoch 2"):
        search_lists(recipe, tiny.dataset(TRAIN, queries=4, labels=8), tmp_path, within=True)


def test_jobs_without_retrieved_negatives_are_refused() -> None:
    def loss(**settings: Any) -> LossConfig:
        return LossConfig.model_validate({"retrieved_negatives": settings.pop("retrieved", {})} | settings)

    with pytest.raises(ValueError, match="retrieved_negatives: not allowed with family 'nce'"):
        loss(family="nce")
    with pytest.raises(
        ValueError, match="expected bias_removal = 0 with sampler 'adversarial', whose noise is a query's"
    ):
        loss(sampler={"name": "adversarial", "negatives": 4}, retrieved={"bias_removal": 1})
    with pytest.raises(ValueError, match="depth: expected at least negatives = 9, received 8"):
        loss(retrieved={"negatives": 9, "depth": 8})
    with pytest.raises(DataError, match=r"retrieved_negatives.depth: expected at most 12, the labels there are, .* 13"):
        check_sizes(job(depth=13), DATA)

    some = loss(weight="importance")
    assert some.explain_uncalibrated() == "retrieved_negatives follow the model's own scores, and no q draws them"
    assert str(some) == "softmax · in_batch · importance · 4 of 200 retrieved"
    assert some.noise_suffix == " of the draws, not of the retrieved negatives"
    assert loss(impressions=0.5).noise_suffix == " of the draws, not of the impressions and retrieved negatives"
    assert loss(retrieved=None).noise_suffix == ""
