"""POST /v1/retrieve on the plane: every expected score is worked by hand in tests/serving/plane.py."""

import math

import httpx2 as httpx
import pytest

from longtail.serving.http.schemas.retrieval import RetrieveAnswer

LN2 = math.log(2)


def retrieve(client: httpx.Client, *queries: dict) -> list[dict]:
    response = client.post("/v1/retrieve", json={"queries": list(queries), "answer_ids": False})
    assert response.status_code == 200, response.text
    RetrieveAnswer.model_validate_json(response.content, strict=True)
    return response.json()["results"]


def ids(result: dict) -> list[str]:
    return [label["id"] for label in result["labels"]]


def scores(result: dict) -> list[float]:
    return [label["score"] for label in result["labels"]]


@pytest.mark.parametrize(
    ("user", "bias_removal", "expected"),
    [
        ("east", 0, {"a": 2, "c/é": 1.5, "b": 0, "4": -2}),
        ("east", 1, {"a": 2 - LN2, "c/é": 1.5 - 3 * LN2, "b": -2 * LN2, "4": -2 - 3 * LN2}),
        ("north", 0, {"b": 2, "c/é": 1.8, "a": 0, "4": -1}),
        ("north", 2, {"b": 2 - 4 * LN2, "a": -2 * LN2, "c/é": 1.8 - 6 * LN2, "4": -1 - 6 * LN2}),
        ("north", -1, {"c/é": 1.8 + 3 * LN2, "b": 2 + 2 * LN2, "4": -1 + 3 * LN2, "a": LN2}),
    ],
)
def test_scores_are_the_served_formula_at_every_dial(
    client: httpx.Client, user: str, bias_removal: float, expected: dict[str, float]
) -> None:
    (result,) = retrieve(client, {"features": {"user": user}, "k": 4, "bias_removal": bias_removal})
    assert ids(result) == list(expected)
    assert scores(result) == pytest.approx(list(expected.values()), abs=1e-6)
    assert result["bias_removal"] == bias_removal


def test_a_label_comes_with_bucket_and_display_columns(client: httpx.Client) -> None:
    response = client.post(
        "/v1/retrieve", json={"queries": [{"features": {"user": "north"}, "k": 2, "bias_removal": 0}]}
    )
    answer = response.json()
    assert len(answer["results"][0].pop("answer_id")) < 70
    assert answer == {
        "results": [
            {
                "basis": "model",
                "labels": [
                    {"id": "b", "score": 2.0, "bucket": "torso", "display": {"title": "Beta", "year": None}},
                    {"id": "c/é", "score": 1.8, "bucket": "tail", "display": {"title": "Gamma", "year": 2001}},
                ],
                "bias_removal": 0.0,
                "popularity": 0.0,
                "unknown": {"query": 0, "history": 0, "exclude": 0, "allow": 0},
            }
        ],
        "release": "plane-1",
        "request_id": response.headers["x-request-id"],
    }


def test_display_selects_columns(client: httpx.Client) -> None:
    query = {"features": {"user": "north"}, "k": 3, "bias_removal": 0}
    request = (True, False, [], ["year"], ["title", "year"])
    everything, none, empty, years, both = retrieve(client, *({**query, "display": display} for display in request))
    assert everything == both
    assert none == empty
    assert [label["display"] for label in none["labels"]] == [{}] * 3
    assert [label["display"] for label in years["labels"]] == [{"year": None}, {"year": 2001}, {"year": 1999}]
    assert {**none, "labels": 0} == {**years, "labels": 0} == {**both, "labels": 0}
    for result in (none, years):
        assert [{**label, "display": 0} for label in result["labels"]] == [
            {**label, "display": 0} for label in both["labels"]
        ]
    similar = client.post("/v1/similar", json={"id": "b", "k": 1, "display": ["title"]}).json()
    assert similar["results"][0]["labels"][0]["display"] == {"title": "Gamma"}


@pytest.mark.parametrize("features", [{}, {"user": None}, {"user": "never seen"}])
def test_a_missing_or_unknown_id_is_out_of_vocabulary(client: httpx.Client, features: dict) -> None:
    (result,) = retrieve(client, {"features": features, "k": 2, "bias_removal": 1})
    assert scores(result) == pytest.approx([-LN2, -2 * LN2], abs=1e-6)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ({"exclude": ["a"]}, ["c/é", "b", "4"]),
        ({"exclude": ["a", "b", "c/é", "4"]}, []),
        ({"allow": ["4", "a"]}, ["a", "4"]),
        ({"allow": []}, []),
        ({"allow": None, "buckets": None}, ["a", "c/é", "b", "4"]),
        ({"buckets": ["tail"]}, ["c/é", "4"]),
        ({"buckets": ["head", "torso"]}, ["a", "b"]),
        ({"buckets": ["tail"], "exclude": ["c/é"]}, ["4"]),
        ({"buckets": ["head"], "allow": ["4"]}, []),
    ],
)
def test_filters(client: httpx.Client, selection: dict, expected: list[str]) -> None:
    (result,) = retrieve(client, {"features": {"user": "east"}, "k": 4, "bias_removal": 0, **selection})
    assert ids(result) == expected


BASES = {"model": 2.0, "cooccurrence": 0.0, "popularity": 1.0}


def test_unknown_ids_are_ignored_and_counted(client: httpx.Client) -> None:
    first, second = retrieve(
        client,
        {"features": {"user": "east"}, "k": 4, "bias_removal": 0, "exclude": ["a", "nobody", 10**400]},
        {"features": {"user": "east"}, "k": 4, "bias_removal": 0, "allow": ["a", "nobody"]},
    )
    assert (ids(first), first["unknown"]) == (["c/é", "b", "4"], {"query": 0, "history": 0, "exclude": 2, "allow": 0})
    assert (ids(second), second["unknown"]) == (["a"], {"query": 0, "history": 0, "exclude": 0, "allow": 1})
    (stranger,) = retrieve(client, {"features": {"user": "nobody"}, "k": 2, "bias_removal": 0})
    assert (stranger["basis"], ids(stranger), stranger["popularity"]) == ("popularity", ["a", "b"], 1)
    metrics = client.get("/metrics").text
    assert [f'longtail_bases_total{{basis="{name}"}} {count}' in metrics for name, count in BASES.items()] == [True] * 3
    assert 'longtail_ids_unknown_total{list="exclude"} 2.0' in metrics
    assert 'longtail_ids_unknown_total{list="allow"} 1.0' in metrics


@pytest.mark.parametrize(
    "options",
    [
        {}, {"explore": {"tail": 5}}, {"mmr": 0.5}, {"max_per": {"year": 1}, "pool": 600},
        {"at_least": {"bucket": {"tail": 5, "head": 2}}, "explore": {"tail": 3, "torso": 3}},
        {"at_least": [{"filter": {"year": {"lt": 2002}}, "n": 4}], "mmr": 0.5},
    ],
)  # fmt: skip
def test_k_above_the_catalogue_returns_all_labels(client: httpx.Client, options: dict[str, object]) -> None:
    every = {"a", "b", "c/é", "4"}
    response = client.post("/v1/retrieve", json={"queries": [{"features": {}, "k": 500} | options]})
    assert response.status_code == 200, response.text
    assert {label["id"] for label in response.json()["results"][0]["labels"]} == every
    similar = client.post("/v1/similar", json={"id": "a", "k": 500})
    assert {label["id"] for label in similar.json()["results"][0]["labels"]} == every - {"a"}
