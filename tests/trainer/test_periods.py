"""Batches of one period each, whose negatives have the popularity of that time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from longtail.bundle.arrays import Float64, Int64
from longtail.trainer.data.batches import epoch_batches, one_period_per_batch
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.errors import RecipeError
from tests.trainer import tiny

USERS, LABELS, PERIODS, BATCH = 60, 12, 4, 32


def passing(seed: int = 0, rows: int = 1_000) -> Dataset:
    """Each user comes in one of two seasons, and all choose alike: in each season one half of the labels is popular."""
    rng = np.random.default_rng(seed)
    users = rng.integers(0, USERS, rows).astype(np.int32)
    times = (users % 2 + rng.random(rows)) * 50
    popular = (users % 2) ^ (rng.random(rows) < 0.1)
    labels = (popular * (LABELS // 2) + rng.integers(0, LABELS // 2, rows)).astype(np.int32)
    return tiny.dataset(Pairs(users, labels, times=times), queries=USERS, labels=LABELS)


def list_batches(dataset: Dataset, *, periods: int, epoch: int = 0) -> list[Int64]:
    """The rows of the pairs of every batch."""
    job = tiny.recipe()
    batches = epoch_batches(
        dataset.train,
        Encoding.fit(job, dataset).query,
        batch_size=BATCH,
        seed=1,
        epoch=epoch,
        visits=one_period_per_batch(dataset.train, periods, BATCH),
    )
    return [batch["_pair"] for _, batch in batches]


def spans(dataset: Dataset, batches: list[Int64]) -> Float64:
    """The time between the first and the last pair of every batch."""
    assert dataset.train.times is not None
    return np.array([np.ptp(dataset.train.times[rows_B]) for rows_B in batches])


def test_a_batch_is_of_one_period_and_an_epoch_visits_every_pair_once() -> None:
    dataset = passing()
    uncut, cut = (list_batches(dataset, periods=periods) for periods in (1, PERIODS))
    assert len(uncut) == len(cut) == len(dataset.train) // BATCH
    visited = np.concatenate(cut)
    assert len(np.unique(visited)) == len(visited) > len(dataset.train) - BATCH
    assert spans(dataset, uncut).min() > 80
    assert spans(dataset, cut).max() < 1.2 * 100 / PERIODS
    assert dataset.train.times is not None
    begins = np.array([dataset.train.times[rows_B].min() for rows_B in cut])
    assert (np.diff(begins) < 0).any(), "batches of an epoch are in random order"
    again, later = list_batches(dataset, periods=PERIODS), list_batches(dataset, periods=PERIODS, epoch=1)
    assert all((batch == other).all() for batch, other in zip(cut, again, strict=True))
    assert any((batch != other).any() for batch, other in zip(cut, later, strict=True))


def test_more_periods_than_batches_are_batches_in_the_order_of_time() -> None:
    dataset = passing()
    assert dataset.train.times is not None
    times = [dataset.train.times[rows_B] for rows_B in list_batches(dataset, periods=1_000)]
    assert all(before.max() <= after.min() for before, after in pairwise(sorted(times, key=np.min)))


def test_towers_do_not_learn_the_popularity_that_passes() -> None:
    """All users choose alike at any time, so scores in which popularity is no part tell labels not apart."""
    gaps = {}
    for periods in (1, PERIODS):
        dataset = passing(rows=4_000)
        job = tiny.recipe(
            loss={"sampler": "in_batch", "weight": "unit"}, model={"similarity": "dot", "temperature": 1.0},
            optimizer={"embedding_learning_rate": 0.02}, training={"batch_size": 64},
        )  # fmt: skip
        model = tiny.model(job, dataset, batch_size=64)
        features, visits = Encoding.fit(job, dataset).query, one_period_per_batch(dataset.train, periods, 64)
        for epoch in range(8):
            for _, batch in epoch_batches(dataset.train, features, batch_size=64, seed=1, epoch=epoch, visits=visits):
                model.train_step(batch)
        scores_QL = model.embed_queries({"user_id": np.arange(USERS) + 1}) @ model.embed_labels().T
        halves_Q2 = scores_QL.reshape(USERS, 2, -1).mean(axis=2)
        sides_Q = np.where(np.arange(USERS) % 2, -1, 1)
        gaps[periods] = float((sides_Q * (halves_Q2[:, 0] - halves_Q2[:, 1])).mean())
    assert gaps[1] > 1.5, "the log-odds of a label in its season over those in all time differ by log 9"
    assert abs(gaps[PERIODS]) < 0.3


@pytest.mark.parametrize("sections", [
    {},
    {"data": {"timestamp": "at"}, "query": {"features": [
        {"name": "history", "kind": "history", "table": "item_id", "dim": 4, "encoder": {"name": "sasrec", "heads": 1}},
    ]}, "loss": {"hits": "mask_known"}},
])  # fmt: skip
def test_periods_need_times_and_no_sequence(sections: dict[str, object]) -> None:
    with pytest.raises((RecipeError, ValueError), match=r"training.periods: expected 1 with (no times|the sequence)"):
        tiny.recipe(training={"periods": 2}, **sections)
