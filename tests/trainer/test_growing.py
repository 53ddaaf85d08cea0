"""Held-out pairs that are found one by one, each from the pairs before it (`evaluation.history = "growing"`)."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from longtail.bundle import Buckets
from longtail.serving.core.queries import RetrieveQuery
from longtail.trainer import evaluate, fit
from longtail.trainer.check import check
from longtail.trainer.config import EvaluationConfig, load_recipe
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs, Requests
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.baselines import BASELINES, Interactions, top_labels
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.groups import figures_by_group
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.metrics import Bootstrap, LabelFacts
from longtail.trainer.evaluation.ranking import RankedModel, bias_removal_curve
from longtail.trainer.evaluation.task import HeldOut, Task
from tests.serving.plane import make_retriever
from tests.trainer import tiny

L = 6
# Before test, query 0 chose labels 4 and 1, query 1 none, query 2 label 0.
TRAIN = Pairs(np.int32([0, 0, 2]), np.int32([4, 1, 0]), times=np.float64([1, 3, 2]))
# In test, query 0 chooses 2 and 1, query 1 chooses 3, 3 and 0, query 2 chooses 5: six events, numbered 0 … 5.
TEST = Pairs(np.int32([0, 0, 1, 1, 1, 2]), np.int32([2, 1, 3, 3, 0, 5]), times=np.float64([5, 6, 7, 8, 9, 10]))
DATA = tiny.dataset(TRAIN, queries=3, labels=L, ordered=True, test=TEST)
HELD_OUT, PAST = DATA.with_past(TEST, TRAIN, "growing")
COUNTS = np.array([6, 5, 4, 3, 2, 1])
FACTS = LabelFacts(COUNTS, Buckets.by_count().assign(COUNTS))


def config(**changes: Any) -> EvaluationConfig:
    defaults = {"ks": [1, 2], "metric": "recall@2", "bootstrap": 10, "history": "growing"}
    return EvaluationConfig.model_validate(defaults | changes)


def metrics(held_out: Pairs = HELD_OUT, **changes: Any) -> dict[str, float]:
    """Figures of a model whose score falls from label 0 to label 5 for every event."""
    side = LabelSide.build(
        np.eye(L, dtype=np.float32), None, COUNTS, training_queries=3, temperature=1.0,
        log_pn=np.zeros(L, np.float32), buckets=Buckets.by_count(),
    )  # fmt: skip
    model = RankedModel(lambda rows_B: np.tile(np.float32([6, 5, 4, 3, 2, 1]), (len(rows_B), 1)), side)
    (point,) = bias_removal_curve(held_out, PAST, model, config(**changes), seed=0, settings=[Setting(0.0)])
    return {name: interval.value for name, interval in point.metrics.items()}


@pytest.mark.parametrize(
    ("changes", "events"),
    [({}, 4), ({"exclude_seen": False}, 6), ({"least_history": 1}, 3), ({"least_history": 2}, 2)],
)
def test_every_event_is_found_from_the_pairs_before_it(changes: dict[str, Any], events: int) -> None:
    """Events 1 and 3 choose labels of their history. Of the others, with history left out:

    0 after 4, 1: list 0, 2, finds 2 second. 2 after nothing: list 0, 1, misses 3. 4 after 3, 3: list 0, 1, finds 0
    first. 5 after 0: list 1, 2, misses 5. With seen labels, all six events have the list 0, 1: event 1 finds 1 second,
    event 4 finds 0 first. Histories have 2, 3, 0, 1, 2 and 1 pairs: at least 1 leaves events 0, 4 and 5, 2 leaves 0
    and 4.
    """
    figures = metrics(**changes)
    assert figures["recall@1"] == pytest.approx(1 / events)
    assert figures["recall@2"] == figures["hit_rate@2"] == pytest.approx(2 / events)
    assert figures["mrr@2"] == pytest.approx((1 + 1 / 2) / events)


def test_nothing_to_find_after_enough_pairs_is_an_error() -> None:
    with pytest.raises(DataError, match=r"expected held-out pairs to find, found none of 6: .* 6 with too few earlier"):
        metrics(least_history=9)


def test_events_are_counted_with_what_is_left_out() -> None:
    all_events = HeldOut.count(HELD_OUT, PAST, config(exclude_seen=False), labels=L)
    assert asdict(all_events) == {
        "pairs": 6, "distinct": 6, "short": 0, "repeated": 0, "measured": 6, "queries": 3, "requests": 6
    }  # fmt: skip
    assert str(all_events) == "6 pairs → 6 to find of 3 queries in 6 requests"
    later = HeldOut.count(HELD_OUT, PAST, config(least_history=2), labels=L)
    assert str(later) == (
        "6 pairs → 2 to find of 2 queries, 3 with too few earlier pairs (evaluation.least_history), "
        "1 seen before (evaluation.exclude_seen)"
    )


def test_least_history_counts_known_pairs_of_queries_with_a_fixed_history() -> None:
    """Query 0 has two known pairs and query 2 one; distinct pairs are (0, 2), (0, 1), (1, 3), (1, 0) and (2, 5)."""
    held_out, past = DATA.with_past(TEST, TRAIN, "fixed")
    counts = HeldOut.count(held_out, past, config(history="fixed", least_history=1), labels=L)
    assert (counts.distinct, counts.short, counts.repeated, counts.measured, counts.queries) == (5, 2, 1, 2, 2)


def test_intervals_resample_queries_with_all_their_events() -> None:
    of_events = Bootstrap(4, resamples=100, seed=0, queries_N=np.int32([7, 7, 7, 9]))
    of_queries = Bootstrap(2, resamples=100, seed=0)
    values, totals = np.array([1.0, 1, 0, 1]), np.ones(4)
    assert of_events.interval(values, totals) == of_queries.interval(np.array([2.0, 1]), np.array([3.0, 1]))
    assert of_events.per_query(values).tolist() == [2, 1]
    first_and_last = of_events.select_rows(np.array([True, False, False, True]))
    assert first_and_last.interval(values[[0, 3]], totals[:2]) == of_queries.interval(np.ones(2), np.ones(2))


def test_the_tower_reads_the_history_of_each_event() -> None:
    recipe = tiny.recipe(
        data={"timestamp": "at"},
        query={"features": [{"name": "seen", "kind": "history", "dim": 4, "max_length": 2, "unknown_rate": 0}]},
        label={"features": [tiny.ITEM]},
    )
    encoding = Encoding.fit(recipe, replace(DATA, train=TRAIN.merge_later(TEST)))  # all labels are in the vocabulary
    row_of = encoding.vocabularies["seen"].encode(DATA.label_ids)

    inputs = encoding.query.with_history(PAST).query_inputs(np.int32([1, 2, 3, 4, 0, 5]))

    histories = [[1, 2], [], [3], [3, 3], [4, 1], [0]]  # of event 1 the last two of 4, 1, 2
    rows = [[*row_of[labels].tolist(), 0, 0][:2] for labels in histories]
    assert inputs["seen"].tolist() == rows
    assert inputs["seen__weight"].tolist() == [[1, 1], [0, 0], [1, 0], [1, 1], [1, 1], [1, 0]]


def test_histories_of_some_event_types_and_contexts_are_those_of_each_event() -> None:
    """Label 3 of event 2 is viewed and not bought; every event has a context of its own."""
    train = replace(TRAIN, events=np.int32([1, 1, 1]), requests=np.int32([0, 0, 3]))
    test = replace(TEST, events=np.int32([1, 1, 0, 1, 1, 1]), requests=np.int32([1, 0, 2, 2, 2, 3]))
    requests = Requests(np.int32([0, 0, 1, 2]), contexts=np.int32([2, 0, 1, 0]))
    contexts = pa.table({"device": ["tv", "web", "phone"]})
    data = tiny.dataset(train, queries=3, labels=L, ordered=True, test=test, requests=requests, contexts=contexts)
    recipe = tiny.recipe(
        data={"timestamp": "at", "events": {"column": "type", "weights": {"view": 1, "buy": 1}}},
        query={"features": [
            {"name": "bought", "kind": "history", "dim": 4, "events": ["buy"], "unknown_rate": 0},
            {"name": "device", "from": "row", "kind": "id", "dim": 4, "unknown_rate": 0},
        ]},
    )  # fmt: skip
    encoding = Encoding.fit(recipe, data)

    _, past = data.with_past(test, train, "growing")
    inputs = encoding.query.with_history(past).query_inputs(np.arange(6, dtype=np.int32))

    assert inputs["bought__weight"].sum(axis=1).tolist() == [2, 3, 0, 0, 1, 1]
    ids = encoding.vocabularies["device"].ids.to_pylist()
    assert [ids[row - 1] if row else None for row in inputs["device"]] == ["tv", "phone", None, None, None, "tv"]


def test_baselines_read_the_history_of_each_event() -> None:
    """Queries of training chose 0 with 1, and 2 with 3: after one of a pair, item-kNN answers the other."""
    train = tiny.pairs(*[(row, label) for row in range(4, 12) for label in ((0, 1) if row % 2 else (2, 3))])
    test = Pairs(np.int32([0, 0, 1, 1]), np.int32([0, 1, 2, 3]), times=np.float64([1, 2, 3, 4]))
    data = tiny.dataset(train, queries=12, labels=4, ordered=True, test=test)
    held_out, past = data.with_past(test, data.train, "growing")
    task = Task.create(held_out, past, config(), labels=4, seed=0)
    interactions = Interactions(data.train, past, queries=12, labels=4, seed=0, ordered=True)

    assert interactions.histories(np.int32([1, 2, 3])).toarray().tolist() == [[1, 0, 0, 0], [0] * 4, [0, 0, 1, 0]]
    for name in ("item-kNN", "RP3beta", "EASE", "Turbo-CF", "iALS"):
        lists = top_labels(task, interactions, BASELINES[name].fit(interactions, BASELINES[name].settings))
        assert lists[[1, 3], 0].tolist() == [1, 3], name
        assert lists[[0, 2]].tolist() == [[0, 1], [0, 1]], f"{name}: popularity without history"
    popular = top_labels(task, interactions, BASELINES["popularity"].fit(interactions, {}))
    assert popular.tolist() == [[0, 1], [1, 2], [0, 1], [0, 1]]


def test_groups_are_of_the_history_of_each_event() -> None:
    """Lengths are 2, 3, 0, 1, 2 and 1, of which the median above 0 is 2; the query table has the country."""
    data = replace(DATA, query_table=pa.table({"country": ["DE", "FR", "DE"]}))
    task = Task.create(HELD_OUT, PAST, config(exclude_seen=False), labels=L, seed=0)
    lists = np.tile(np.int32([0, 1]), (6, 1))  # finds events 1 and 4

    groups = figures_by_group(["country"], data, task, lists, FACTS)

    assert {group.name: (group.queries, group.pairs, group.metrics["recall@2"].value) for group in groups} == {
        "history = new": (1, 1, 0),
        "history = few": (3, 4, 1 / 4),
        "history = many": (1, 1, 1),
        "country = DE": (2, 3, pytest.approx(1 / 3)),
        "country = FR": (1, 3, pytest.approx(1 / 3)),
    }


def test_events_of_an_objective_have_the_history_of_all() -> None:
    bought = HELD_OUT.take(np.array([False, True, False, False, True, False]))
    assert metrics(bought, exclude_seen=False)["mrr@2"] == (1 / 2 + 1) / 2
    assert metrics(bought)["mrr@2"] == 1, "event 1 chooses a label of its history"


def test_at_most_some_events_are_measured() -> None:
    task = Task.create(HELD_OUT, PAST, config(exclude_seen=False), labels=L, seed=0, max_queries=4)
    assert len(task.rows_N) == 4
    assert task.positives.label_rows.tolist() == TEST.labels[task.rows_N].tolist()


@pytest.mark.parametrize(
    ("data", "received"),
    [({}, "none"), ({"timestamp": "at", "split": {"strategy": "random_per_query"}}, "a random data.split")],
)
def test_pairs_without_an_order_are_refused(data: dict[str, Any], received: str) -> None:
    message = rf"evaluation\.history: expected pairs in time order with 'growing', .*, received {received}"
    with pytest.raises(ValidationError, match=message):
        tiny.recipe(data=data, evaluation={"history": "growing"})


def write_sessions(folder: Path, labels: int = 12) -> Path:
    """Sessions of five clicks, one after another, in each of which every click is followed by the next label."""
    first = np.random.default_rng(0).integers(labels, size=240)
    items = (first[:, None] + np.arange(5)) % labels
    table = {"session": np.repeat(np.arange(240), 5), "item": items.ravel(), "at": np.arange(1200)}
    pq.write_table(pa.table(table), folder / "sessions.parquet")
    return tiny.write_recipe(
        folder,
        data={
            "train": folder / "sessions.parquet", "query_id": "session", "label_id": "item", "timestamp": "at",
            "split": {"strategy": "temporal", "valid": 0.2, "test": 0.2},
        },
        query={"features": [
            {"name": "clicks", "kind": "history", "dim": 16, "max_length": 1, "unknown_rate": 0},
        ]},
        label={"features": [{"name": "item", "kind": "id", "dim": 16}]}, model={"dim": 16}, loss={"sampler": "full"},
        optimizer={"embedding_learning_rate": 0.1}, training={"epochs": 12, "batch_size": 64},
        evaluation={
            "ks": [1], "metric": "recall@1", "bias_removal": [0.0, 1.0], "baselines": ["popularity", "item-kNN"],
            "history": "growing", "least_history": 1, "exclude_seen": False,
        },
    )  # fmt: skip


def test_a_job_measures_the_next_click_of_sessions_that_begin_in_test(tmp_path: Path) -> None:
    """240 clicks of 48 sessions are held out in each split; only their first clicks have no history."""
    recipe = write_sessions(tmp_path)

    bundle = fit(recipe, tmp_path / "bundle")

    figures = json.loads((tmp_path / "bundle" / "metrics.json").read_text())
    counts = {
        "pairs": 240, "distinct": 240, "short": 48, "repeated": 0, "measured": 192, "queries": 48, "requests": 192,
    }  # fmt: skip
    assert figures["held_out"] == {"valid": counts, "test": counts}
    recall = evaluate(bundle).value("recall@1")
    assert recall > 0.95
    assert figures["baselines"]["popularity"]["recall@1"]["value"] < 0.3
    assert "on the same 192 requests of 48 queries" in figures["against_best_baseline"]["in_words"]
    again = evaluate(bundle, recipe)
    assert again.value("recall@1") == pytest.approx(recall)
    of_all = evaluate(bundle, recipe, overrides=["evaluation.least_history=0"])
    assert of_all.value("recall@1") < recall, "the first click of a session cannot be known"
    _, items, _ = (column.to_pylist() for column in pq.read_table(tmp_path / "sessions.parquet").columns)
    queries = [RetrieveQuery(features={"clicks": items[at - at % 5 : at]}, k=1) for at in range(960, 1200)]
    results = make_retriever(bundle).retrieve(queries).results
    assert [result["basis"] for result in results] == ["popularity", *["model"] * 4] * 48
    hits = [result["labels"][0]["id"] == str(item) for result, item in zip(results, items[960:], strict=True)]
    assert np.mean(hits) == pytest.approx(of_all.value("recall@1"))
    valid = json.loads((tmp_path / "bundle" / "history.json").read_text())["metrics"]
    assert max(valid.values()) > 0.95, "epochs are chosen by the same measure"
    assert len(np.unique(bundle.calibration_queries, axis=0)) > 1, "calibration queries are events, with histories"
    with_fixed = ["evaluation.history=fixed", "evaluation.least_history=0"]
    assert evaluate(bundle, recipe, overrides=with_fixed).value("recall@1") < 0.5


def test_labels_outside_of_a_bundle_stay_in_the_order_of_events(tmp_path: Path) -> None:
    """A bundle without label 0, from data without it: its events keep their places, and read what is left."""
    recipe = write_sessions(tmp_path)
    bundle = fit(recipe, tmp_path / "bundle", overrides=["data.train=SELECT * FROM 'sessions.parquet' WHERE item <> 0"])
    assert "0" not in bundle.labels.ids.to_pylist()

    recall = evaluate(bundle, recipe).value("recall@1")

    # Of the 192 events, those that choose label 0 are not to be found, and those after label 0 may be guessed.
    dataset = read_dataset(load_recipe(recipe))
    items = [int(id_) for id_ in dataset.label_ids.take(dataset.test.labels).to_pylist()]
    clicks = [click for i, click in enumerate(pairwise(items)) if i % 5 < 4]
    before = [earlier for earlier, item in clicks if item != 0]
    assert 0 < before.count(0) < 30
    assert recall > 1 - before.count(0) / len(before) - 0.02


def test_check_counts_events_that_are_left_out(tmp_path: Path) -> None:
    report = check(write_sessions(tmp_path), overrides=["evaluation.least_history=3"])
    assert {name: report.splits["test"][name] for name in ("pairs", "short", "seen", "to find")} == {
        "pairs": 240, "short": 144, "seen": 0, "to find": 96
    }  # fmt: skip
    assert "test: evaluation.least_history leaves out 144 of 240 distinct pairs" in report.warnings
