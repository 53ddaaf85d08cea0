"""Priors in a request, against the formula `s = u·v/T + b + λ·log ν + μ·log π + Σ w·r` worked by hand or by NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest

from longtail.bundle import Bundle, Prior, Priors, Tower, Upsert
from longtail.serving import Retriever, create_app
from longtail.serving.errors import UnservableReleaseError
from longtail.serving.http.schemas.retrieval import RetrieveAnswer
from longtail.state import LabelStore
from tests.bundles import label_features, make_bundle
from tests.serving.client import open_client
from tests.serving.http.test_feedback import recorded_events
from tests.serving.plane import (
    ExactSearcher,
    PlaneEncoder,
    make_retriever,
    plane_bundle,
    plane_retriever,
    plane_settings,
    rows_in_use,
)

AT = datetime(2026, 6, 1, tzinfo=UTC)
RECENT = Prior(name="recent", minimum=-1, default=0, maximum=2, missing=-3, kappa=0.7)
MARGIN = Prior(name="margin", minimum=0, default=0.5, maximum=1, missing=0, kappa=2)
OF_PLANE = np.float32([[0, 1], [-1, 0], [1, 3], [2, -2]])


def plane_with_priors(name: str = "plane-1") -> Retriever:
    return plane_retriever(name, bundle=replace(plane_bundle(), priors=Priors((RECENT, MARGIN), OF_PLANE)))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    with open_client(create_app(plane_settings(tmp_path), retriever=plane_with_priors())) as client:
        yield client


@pytest.mark.parametrize(
    ("query_options", "expected"),
    [
        ({}, {"a": 2.5, "c/é": 3, "b": 0, "4": -3}),
        ({"margin": 0}, {"a": 2, "c/é": 1.5, "b": 0, "4": -2}),
        ({"margin": 0, "recent": 2}, {"a": 2, "c/é": 3.5, "b": -2, "4": 2}),
        ({"margin": 1, "recent": -1}, {"a": 3, "c/é": 3.5, "b": 1, "4": -6}),
    ],
)
def test_scores_are_the_served_formula(client: httpx.Client, query_options: dict, expected: dict[str, float]) -> None:
    query = {"features": {"user": "east"}, "k": 4, "bias_removal": 0, "priors": query_options}
    answer = client.post("/v1/retrieve", json={"queries": [query]})
    RetrieveAnswer.model_validate_json(answer.content, strict=True)
    (result,) = answer.json()["results"]
    assert {label["id"]: label["score"] for label in result["labels"]} == pytest.approx(expected, abs=1e-5)
    scores = [label["score"] for label in result["labels"]]
    assert scores == sorted(scores, reverse=True)
    assert result["priors"] == {"recent": 0.0, "margin": 0.5} | query_options


def test_events_have_the_weights_of_their_answers(tmp_path: Path) -> None:
    app = create_app(plane_settings(tmp_path, answer_share=1), retriever=plane_with_priors())
    with open_client(app) as client:
        query = {"features": {"user": "east"}, "priors": {"recent": 0.25}}
        (result,) = client.post("/v1/retrieve", json={"queries": [query]}).json()["results"]
        event = {"answer_id": result["answer_id"], "labels": ["a"]}
        assert client.post("/v1/feedback", json={"events": [event]}).status_code == 200
    for kind in ("choice", "answer"):
        assert [event["priors"] for event in recorded_events(tmp_path, kind)] == [[0.25, 0.5]]


def test_similar_labels_ignore_priors_by_default(client: httpx.Client) -> None:
    def similar(**options: object) -> tuple[dict[str, float], dict[str, float]]:
        (result,) = client.post("/v1/similar", json={"id": "a", "k": 3, **options}).json()["results"]
        return {label["id"]: round(label["score"], 5) for label in result["labels"]}, result["priors"]

    assert similar() == ({"c/é": 1.5, "b": 0, "4": -2}, {"recent": 0, "margin": 0})
    assert similar(priors={"recent": 1}) == ({"c/é": 2.5, "4": 0, "b": -1}, {"recent": 1, "margin": 0})


@pytest.mark.parametrize(
    ("priors", "field", "message"),
    [
        ({"age": 1}, "priors", "expected priors of this release, ['recent', 'margin'], received \"age\""),
        ({"recent": 2.5}, "priors.recent", "expected -1.0 <= priors.recent <= 2.0, received 2.5"),
        ({"margin": -1e308}, "priors.margin", "expected 0.0 <= priors.margin <= 1.0, received -1e+308"),
        ({"recent": "1"}, "priors.recent", 'expected a valid number, received "1"'),
        ({"recent": None}, "priors.recent", "expected a valid number, received null"),
        ([1], "priors", "expected an object, received a list of 1"),
        ({"x" * 100_00: 1}, "priors", "expected priors of this release"),
    ],
)
def test_priors_that_cannot_be_weighed(client: httpx.Client, priors: object, field: str, message: str) -> None:
    answer = client.post("/v1/retrieve", json={"queries": [{"features": {}, "priors": priors}]})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["field"] == f"queries.0.{field}"
    assert message in error["message"]
    assert len(answer.text) < 2000


def test_a_release_without_priors_refuses_them(tmp_path: Path) -> None:
    before = plane_with_priors()
    bundle = plane_bundle()
    after = Retriever(
        name="plane-2", created_at=AT, bundle=bundle, searcher=ExactSearcher(bundle), encoder=PlaneEncoder()
    )
    with pytest.raises(UnservableReleaseError, match="prior 'recent': expected as in the published release, found no"):
        after.check_compatible(before)
    with open_client(create_app(plane_settings(tmp_path), retriever=after)) as client:
        answer = client.post("/v1/retrieve", json={"queries": [{"features": {}, "priors": {"recent": 1}}]})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"] == (
        'expected priors of this release, [], received "recent"; longtail-index build --priors declares others'
    )


def add_priors(bundle: Bundle) -> Bundle:
    values = np.random.default_rng(5).normal(0, 2, (bundle.manifest.labels, 2)).astype(np.float32)
    return replace(bundle, priors=Priors((RECENT, MARGIN), values))


def test_an_upsert_sets_priors_and_scores_equal_numpy(tmp_path: Path) -> None:
    bundle = add_priors(make_bundle(labels=60, bias=True, popularity=True, label_tower=True))
    assert bundle.priors is not None
    priors_P = bundle.priors.values_LP[7]
    labels = [
        {"id": "fresh", "features": label_features(3), "priors": {"recent": 0.3}},
        {"id": "other", "features": label_features(4)},
        {"id": "item-7", "features": label_features(3), "priors": {"margin": -1.5}},
    ]
    query_options = {"recent": 0.75, "margin": 1.0}
    query = {"features": {"user_id": "u3"}, "k": 62, "bias_removal": 0.5, "popularity": 0.25, "priors": query_options}
    numbers = {"fresh": (0.3, 0.0), "other": (-3.0, 0.0), "item-7": (float(priors_P[0]), -1.5)}
    app = create_app(plane_settings(tmp_path), retriever=make_retriever(bundle, "flat"))
    with open_client(app) as client:

        def scores() -> dict[str, float]:
            (result,) = client.post("/v1/retrieve", json={"queries": [query]}).json()["results"]
            return {label["id"]: label["score"] for label in result["labels"]}

        def expected(id_: str, numbers: tuple[float, float]) -> float:
            added = app.state.service.retriever().overlay.added
            row = added.ids.tolist().index(id_)
            encoder = Tower(bundle.query_tower, bundle.manifest.query_features, bundle.vocabularies, 8)
            f = encoder.embed(encoder.read([query["features"]]))[0].astype(float) @ added.embeddings[row]  # type: ignore[list-item]
            score = f / bundle.manifest.temperature + added.bias[row]
            score += 0.5 * added.log_pn[row] + 0.25 * added.log_popularity[row]
            return float(score + np.dot(numbers, [0.75, 1.0]))

        assert client.post("/v1/labels", json={"labels": labels}).status_code == 200
        scores_by_id = scores()
        for id_, values in numbers.items():
            assert scores_by_id[id_] == pytest.approx(expected(id_, values), abs=1e-4)
        again = [{name: value for name, value in label.items() if name != "priors"} for label in labels]
        assert client.post("/v1/labels", json={"labels": again}).status_code == 200
        scores_by_id = scores()  # what a change leaves out stays
        for id_, values in numbers.items():
            assert scores_by_id[id_] == pytest.approx(expected(id_, values), abs=1e-4)
    with closing(LabelStore(app.state.service.settings.state_directory)) as store:
        records = store.read_from().records
    assert [record.priors for record in records if isinstance(record, Upsert)][:3] == [
        {"recent": 0.3}, {}, {"margin": -1.5}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("label", "field", "message"),
    [
        ({"priors": {"age": 1}}, ".priors", "expected priors of this release, ['recent', 'margin'], received \"age\""),
        ({"priors": {"recent": 1e38}}, ".priors.recent", "received 1e+38"),
        ({"priors": {"recent": "1"}}, ".priors.recent", 'expected a valid number, received "1"'),
        ({"priors": {"recent": None}}, ".priors.recent", "expected a valid number, received null"),
    ],
)
def test_numbers_that_a_label_cannot_have(tmp_path: Path, label: dict, field: str, message: str) -> None:
    bundle = add_priors(make_bundle(labels=60, label_tower=True))
    good = {"id": "good", "features": label_features(1), "priors": {"recent": -1e30}}
    with open_client(create_app(plane_settings(tmp_path), retriever=make_retriever(bundle, "flat"))) as client:
        body = {"labels": [good, {"id": "bad", "features": label_features(1), **label}]}
        answer = client.post("/v1/labels", json=body)
        assert answer.status_code == 422
        error = answer.json()["error"]
        assert (error["field"], message in error["message"]) == (f"labels.1{field}", True), error
        assert error["message"].count("expected") == 1
        assert client.get("/v1/labels/good").status_code == 404


def test_a_number_that_another_release_has_no_prior_for_keeps_no_label_out() -> None:
    arguments = {"recent": 0.3, "of the release before": 7.0}
    upsert = Upsert(id="fresh", at=datetime(2027, 1, 1, tzinfo=UTC), features=label_features(3), priors=arguments)
    bundle = make_bundle(labels=60, label_tower=True)
    without = make_retriever(bundle, "flat").with_changes([upsert])
    assert without.overlay.added.priors.shape == (1, 0)
    assert rows_in_use(without.overlay) == {"fresh": 60}
    stored = make_retriever(add_priors(bundle), "flat").with_changes([upsert])
    assert stored.overlay.added.priors is not None
    assert stored.overlay.added.priors.tolist() == [[pytest.approx(0.3), 0]]
    assert stored.overlay.skipped == {}
