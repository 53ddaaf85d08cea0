"""A log of events with types and weights counts alike wherever it is read; what a query said no to is not answered."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle, Vocabulary
from longtail.bundle.forecast import Forecast, ForecastSettings
from longtail.bundle.histories import LogPairs, remember
from longtail.bundle.manifest import CooccurrenceSettings
from longtail.bundle.neighbours import cooccurrences
from longtail.index import RefreshOptions, Releases, build, open_releases
from longtail.index.building.refresh import refresh as refresh_release
from longtail.serving import Settings
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import RetrieveQuery
from longtail.serving.events.schema import event_json
from longtail.serving.refresh import refresh
from longtail.trainer.config import Recipe
from longtail.trainer.cooccurrence import remember_queries
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.errors import RecipeError
from longtail.trainer.prior import type_weights
from longtail.trainer.trained import Trained
from tests.bundles import make_bundle
from tests.serving.plane import read_results
from tests.trainer import tiny

WEIGHTS = {"view": 1.0, "buy": 3.0, "hover": 0.0}
TYPES = [*WEIGHTS, "returned", "search", None]
ROWS, USERS, ITEMS, FOREVER = 600, 12, 20, 1e14
EVENTS = {"column": "kind", "weights": WEIGHTS, "negative": ["returned"]}
Row = dict[str, Any]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Events of the last ten days, oldest first; a fifth of the users' labels ends with a return."""
    rng = np.random.default_rng(0)
    begin = round(time.time()) - 864_000
    return [
        {
            "user_id": f"u{rng.integers(USERS)}", "item_id": f"item-{rng.integers(ITEMS)}", "at": begin + 1000 * i,
            "kind": TYPES[rng.choice(len(TYPES), p=[0.4, 0.2, 0.1, 0.2, 0.05, 0.05])],
            "w": float(rng.choice([0.5, 1, 2])),
        }
        for i in range(ROWS)
    ]  # fmt: skip


def largest(rows: list[Row], *, of_column: bool) -> dict[str, float]:
    """Sum over users their largest weight with each label."""
    weights_by_key = defaultdict[tuple[str, str], float](float)
    for row in rows:
        key = row["user_id"], row["item_id"]
        weights_by_key[key] = max(weights_by_key[key], WEIGHTS.get(row["kind"], 0.0) * (row["w"] if of_column else 1.0))
    sums = dict.fromkeys([f"item-{i}" for i in range(ITEMS)], 0.0)
    for (_, item), weight in weights_by_key.items():
        sums[item] += weight
    return sums


def refused(rows: list[Row]) -> dict[str, set[str]]:
    """The labels of each user whose last event that counts is a return."""
    last = {(row["user_id"], row["item_id"]): row["kind"] for row in rows if row["kind"] in ("view", "buy", "returned")}
    return {
        user: {item for (of, item), kind in last.items() if of == user and kind == "returned"}
        for user in (f"u{i}" for i in range(USERS))
    }


@pytest.fixture(scope="module")
def recipe(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    log = tmp_path_factory.mktemp("log") / "log.parquet"
    pq.write_table(pa.Table.from_pylist(rows), log)
    data = {
        "train": log, "timestamp": "at", "weight": "w", "events": EVENTS, "max_bad_rows": ROWS,
    }  # fmt: skip
    return tiny.recipe(data=data, cooccurrence={"kinds": ["walk"], "remember": 200})


@pytest.fixture(scope="module")
def releases(recipe: Recipe, rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Releases:
    """A release `first` that knows no event, `log` and `whole` of the log, and one of the same events of a service."""
    root = tmp_path_factory.mktemp("events")
    bundle = make_bundle(labels=ITEMS, users=USERS, popularity=True)
    columns, until = recipe.log_columns("seconds"), rows[0]["at"] - 1.0
    of_term = {"default": 1, "maximum": 2, "kind": "walk", "last": 5, "decay": 0.9, "neighbours": ITEMS - 1}
    settings = CooccurrenceSettings.model_validate(of_term | {"until": until, "log": columns})
    nothing = LogPairs(np.empty(0, np.int64), np.empty(0, np.int64))
    (term,) = cooccurrences(nothing, ITEMS, [settings])
    of_prior = {"kind": "decayed", "half_lives": [FOREVER], "base": 0, "smoothing": 0.1, "horizon": 86_400, "pairs": 9}
    prior = ForecastSettings.model_validate(columns.model_dump() | of_prior | {"until": until})
    forecast = Forecast(prior, np.zeros((ITEMS, 1)), np.full(ITEMS, np.inf), pa.table({"row": pa.nulls(ITEMS)}))
    memory = remember(nothing, Vocabulary(pa.array(["nobody"])), np.ones(1, np.int32), 200)
    manifest = bundle.manifest.model_copy(update={"cooccurrence": settings, "exclude_history": False})
    replace(bundle, manifest=manifest, cooccurrence=term, remembered=memory, forecast=forecast).write(root / "bundle")
    built = open_releases(root / "releases")
    build(root / "bundle", built.root, spec="flat", name="first")
    built.publish("first")
    for name in ("log", "whole"):
        refresh_release(
            built.root, recipe.data.train, RefreshOptions(whole_log=name == "whole"), name=name, source="first"
        )
    lines = [
        event_json(
            kind="organic", time=row["at"], labels=[row["item_id"]], event=row["kind"], weight=row["w"],
            propensities=[1.0], features=json.dumps({"user_id": row["user_id"]}),
        )
        for row in rows
    ]  # fmt: skip
    (root / "events").mkdir()
    (root / "events" / "live.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    refresh(Settings(releases=built.root, state=root, record_features=True))
    return built


def list_names(bundle: Bundle) -> list[str]:
    names: list[str] = bundle.labels.ids.to_pylist()
    return names


def test_training_weighs_by_type_and_column(recipe: Recipe, rows: list[Row]) -> None:
    dataset = read_dataset(recipe)
    pairs, expected = dataset.train, [row for row in rows if WEIGHTS.get(row["kind"])]
    assert pairs.weights is not None
    assert pairs.times is not None
    weights_by_time = {
        time: weights for time, *weights in zip(pairs.times, pairs.weights, type_weights(recipe, pairs), strict=True)
    }
    assert weights_by_time == {row["at"]: [WEIGHTS[row["kind"]] * row["w"], WEIGHTS[row["kind"]]] for row in expected}
    (term,) = cooccurrences(
        LogPairs(pairs.queries, pairs.labels, pairs.weights), len(dataset.label_ids),
        [CooccurrenceSettings(default=1, maximum=2, kind="walk", last=5, decay=0.9)],
    )  # fmt: skip
    degrees = dict(zip(dataset.label_ids.to_pylist(), term.degrees_L.tolist(), strict=True))
    assert degrees == pytest.approx(largest(rows, of_column=True))


def test_the_forecasts_coordinate_counts_an_event_once(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, nothing = read_dataset(recipe), SimpleNamespace()
    trained = Trained(recipe, dataset, nothing, nothing, nothing, nothing)  # type: ignore[arg-type]
    monkeypatch.setattr(Trained, "log_noise", Trained.log_visits)  # ν of in-batch negatives
    pairs, more = dataset.train, recipe.loss.smoothing
    assert pairs.weights is not None
    mean = pairs.weights.mean(dtype=np.float64)
    weights_L, counts_L = (np.bincount(pairs.labels, of, len(dataset.label_ids)) for of in (pairs.weights, None))
    expected_L = -np.log((weights_L + more * mean) / (counts_L + more))
    assert trained._log_offset == pytest.approx(expected_L)


@pytest.mark.parametrize("name", ["log", "whole", "live"])
def test_refreshes_weigh_as_training_does(name: str, releases: Releases, rows: list[Row]) -> None:
    bundle = releases.open(name if name in releases.names() else str(releases.current())).bundle
    assert bundle.cooccurrence is not None
    assert bundle.forecast is not None
    degrees = dict(zip(list_names(bundle), bundle.cooccurrence.degrees_L.tolist(), strict=True))
    assert degrees == pytest.approx(largest(rows, of_column=True))
    sums = dict(zip(list_names(bundle), bundle.forecast.sums[:, 0].tolist(), strict=True))
    assert sums == pytest.approx(largest(rows, of_column=False))
    expected = releases.open("whole").bundle.cooccurrence
    assert expected is not None
    np.testing.assert_allclose(bundle.cooccurrence.matrix().toarray(), expected.matrix().toarray(), atol=1e-5)


@pytest.mark.parametrize("name", ["fit", "log", "whole", "live"])
def test_negative_events_are_remembered(name: str, recipe: Recipe, releases: Releases, rows: list[Row]) -> None:
    if name == "fit":
        dataset = read_dataset(recipe)
        memory, names = remember_queries(recipe, dataset, dataset.train), dataset.label_ids.to_pylist()
    else:
        bundle = releases.open(name if name in releases.names() else str(releases.current())).bundle
        memory, names = bundle.remembered, list_names(bundle)
    assert memory is not None
    memory.check(len(names))
    for user, items in refused(rows).items():
        assert {names[row] for row in memory.refused(user)} == items
        chosen = [row["item_id"] for row in rows if row["user_id"] == user and WEIGHTS.get(row["kind"])]
        assert [names[row] for row in memory.history(user)] == [item for item in chosen if item not in items]
    selected_rows = np.array([row for row in range(len(names)) if row % 3])
    fewer, user = memory.take(selected_rows), "u1"
    assert {selected_rows[row] for row in fewer.refused(user)} == {row for row in memory.refused(user) if row % 3}


@pytest.mark.parametrize("history", [None, ["item-1", "item-2"]])
def test_labels_of_negative_events_are_not_answered(
    history: list[str] | None, releases: Releases, rows: list[Row]
) -> None:
    retriever = load_release(releases, "log")
    said_no = refused(rows)
    for exclude_history in (False, True):
        queries = [
            RetrieveQuery(features={"user_id": user}, k=ITEMS, history=history, exclude_history=exclude_history)
            for user in said_no
        ]
        for items, result in zip(said_no.values(), read_results(retriever.retrieve(queries)), strict=True):
            answered = {label["id"] for label in result["labels"]}
            assert not answered & items
            if not exclude_history:
                assert len(answered) == ITEMS - len(items)
    assert any(said_no.values())


def test_a_negative_type_has_no_weight() -> None:
    with pytest.raises((RecipeError, ValueError), match=r"events\.negative: expected types without a weight above 0"):
        tiny.recipe(data={"events": {"column": "kind", "weights": {"view": 1}, "negative": ["view"]}})
