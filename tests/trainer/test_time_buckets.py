"""Histories that tell times: what training, the bundle's reader and both layouts make of them, and what is learnt."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from longtail.trainer.data.encode import Encoding
from longtail.trainer.errors import DataError
from tests.trainer import tiny
from tests.trainer.test_sequences import ENCODERS, LABELS, embedded, job, shaken, tensors

LENGTHS = (1, 4, 6, 2, 3)


def history(name: str, **more: Any) -> dict[str, Any]:
    encoder = {"name": name, "heads": 2, "dropout": 0, "time_buckets": 40, "without_times": 0} | more
    return {"name": "history", "kind": "history", "table": "item_id", "dim": 4, "max_length": 6, "unknown_rate": 0,
            "encoder": encoder}  # fmt: skip


def data(**more: Any) -> Any:
    """Queries whose pairs are seconds to months apart."""
    rng = np.random.default_rng(0)
    rows = [(query, int(label)) for query, n in enumerate(LENGTHS) for label in rng.integers(0, LABELS, n)]
    times = np.cumsum(np.exp(rng.uniform(0, 16, len(rows))))
    pairs = replace(tiny.pairs(*rows), times=times, **more)
    return tiny.dataset(pairs, queries=len(LENGTHS), labels=LABELS, ordered=True)


def of(encoding: Encoding, rows: np.ndarray, *, packed: bool) -> dict[str, np.ndarray]:
    return encoding.query.of_pairs(rows, np.random.default_rng(0), packed=packed)


def test_ages_are_counted_from_the_pair_that_is_asked_for() -> None:
    """Whole seconds; of packed histories from the last pair, since a place is asked for when the next entry was."""
    train = replace(tiny.pairs((0, 1), (0, 2), (0, 3), (1, 4)), times=np.array([10.9, 20.0, 99.9, 5.0]))
    dataset = tiny.dataset(train, queries=3, labels=LABELS, ordered=True)
    encoding = Encoding.fit(job(history("hstu")), dataset)

    padded, packed = (of(encoding, np.arange(4), packed=packed) for packed in (False, True))
    assert padded["history__time"].tolist() == [[0, 0], [10, 0], [89, 79], [0, 0]]
    assert packed["history__time"].tolist() == [[89, 79, 0, 0, 0, 0]]
    assert encoding.query_features[0].times == "number"
    asked = np.int32([0, 1, 2])
    assert encoding.query.of_queries(asked)["history__time"].tolist() == [[89, 79, 0, 0], [94, 0, 0, 0], [0] * 4]
    later = replace(tiny.pairs((0, 5), (0, 6), (2, 2)), times=np.array([300.0, 200.0, 1.0]))
    found = encoding.query.with_history(train, later).of_queries(asked)["history__time"]
    assert found.tolist() == [[190, 180, 101, 0], [94, 0, 0, 0], [0] * 4], "when the first held-out pair was chosen"
    early = replace(tiny.pairs((0, 5)), times=np.array([15.0]))
    found = encoding.query.with_history(train, early).of_queries(asked)["history__time"]
    assert found.tolist() == [[5, 0, 0, 0], [94, 0, 0, 0], [0] * 4], "nothing lies in the future"


@pytest.mark.parametrize("name", ["hstu", pytest.param("sasrec", marks=pytest.mark.nightly)])
def test_one_pass_over_packed_histories_is_a_pass_for_every_pair(name: str) -> None:
    recipe, dataset = job(history(name), tiny.USER), data()
    model, encoding = shaken(tiny.model(recipe, dataset, batch_size=4)), Encoding.fit(recipe, dataset)
    for rows in (np.array([0, 1]), np.array([9, 3, 15, 10, 0]), np.arange(16)):
        one_by_one = np.concatenate([embedded(model, of(encoding, row[None], packed=False)) for row in rows])
        packed = of(encoding, rows, packed=True)
        np.testing.assert_allclose(embedded(model, of(encoding, rows, packed=False)), one_by_one, atol=2e-5)
        np.testing.assert_allclose(embedded(model, packed), one_by_one, atol=2e-5)
    nothing_known = embedded(model, packed | {"history__time": np.full_like(packed["history__time"], -1)})
    assert np.abs(nothing_known - embedded(model, packed)).max() > 1e-3


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ENCODERS)
def test_a_step_moves_the_rows_of_times_alike_in_both_layouts(name: str) -> None:
    recipe, dataset = job(history(name), optimizer={"embeddings": "sgd", "dense": "sgd"}), data()
    encoding, after, rows = Encoding.fit(recipe, dataset), [], np.array([5, 6, 7, 8, 12, 13, 14, 1])
    for packed in (True, False):
        model = shaken(tiny.model(recipe, dataset, batch_size=len(rows)))
        before = {each.path: np.asarray(each) for each in model.dense_variables}
        labels = {"_positive": dataset.train.labels[rows], "_weight": np.ones(len(rows), np.float32)}
        model.train_step(tensors(of(encoding, rows, packed=packed), labels, {"_pair": rows.astype(np.int32)}))
        after.append({each.path: np.asarray(each) for each in model.dense_variables})
        timed = [path for path in before if "gaps" in path or "time_bias" in path]
        assert len(timed) == {"sasrec": 1, "hstu": 2}[name]
        assert all((after[-1][path] != before[path]).any() for path in timed)
        assert all((after[-1][path][0] == before[path][0]).all() for path in timed), "no history was without times"
    for one, other in zip(*(each.values() for each in after), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_some_histories_are_read_without_times() -> None:
    """Whole ones, in both layouts, and at the rate that is asked for."""
    count = 4000
    rows = [(query, label) for query in range(count) for label in (1, 2, 3)]
    train = replace(tiny.pairs(*rows), times=np.arange(3.0 * count))
    encoding = Encoding.fit(job(history("hstu", without_times=0.25)), tiny.dataset(
        train, queries=count, labels=LABELS, ordered=True))  # fmt: skip
    last = np.arange(2, 3 * count, 3)
    padded = of(encoding, last, packed=False)["history__time"]
    assert set(map(tuple, padded.tolist())) == {(-1, -1), (2, 1)}
    packed = of(encoding, last, packed=True)
    ages = packed["history__time"][packed["_history__segment"] > 0].reshape(-1, 2)
    assert set(map(tuple, ages.tolist())) == {(-1, -1), (2, 1)}
    for found in (padded, ages):
        assert abs((found[:, 0] < 0).mean() - 0.25) < 0.03


def test_a_history_of_some_events_is_asked_for_at_every_pair_s_own_time() -> None:
    """Views between two purchases share the history of purchases, each at a time of its own: nothing is packed."""
    events = {"column": "event", "weights": {"view": 1, "buy": 1}}
    feature = history("hstu") | {"events": ["buy"]}
    recipe = job(feature, data={"timestamp": "time", "events": events})
    train = replace(
        tiny.pairs((0, 1), (0, 2), (0, 3), (0, 4)), times=np.array([0.0, 10.0, 200.0, 3000.0]),
        events=np.int32([1, 0, 0, 1]),
    )  # fmt: skip
    encoding = Encoding.fit(recipe, tiny.dataset(train, queries=1, labels=LABELS, ordered=True))
    batch = of(encoding, np.arange(4), packed=True)
    assert batch["history__time"].tolist() == [[0], [10], [200], [3000]]
    assert "_history__segment" not in batch


def test_what_times_cannot_be_is_refused() -> None:
    def refused(match: str, *, timestamp: str | None = "time", **encoder: Any) -> None:
        with pytest.raises(ValidationError, match=match):
            job(history("hstu", **encoder), data={"timestamp": timestamp, "split": {"strategy": "leave_last_out"}})

    refused(r"query feature 'history': expected data\.timestamp with", timestamp=None)
    refused(
        r"encoder: expected without_times with time_buckets only, received 0\.1", time_buckets=None, without_times=0.1
    )
    refused(r"time_buckets\n.*greater than or equal to 2", time_buckets=1)
    untimed = tiny.dataset(tiny.pairs((0, 1), (0, 2)), queries=1, labels=LABELS, ordered=True)
    with pytest.raises(DataError, match=r"data.timestamp: expected times of all pairs .* found none"):
        Encoding.fit(job(history("hstu")), untimed)
