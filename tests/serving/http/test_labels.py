"""/v1/similar, /v1/labels/{id} and /v1/release on the plane."""

import math
from urllib.parse import quote

import httpx2 as httpx
import pytest

from longtail.serving.http.schemas.labels import LabelAnswer
from longtail.serving.http.schemas.operations import ReleaseAnswer
from longtail.serving.http.schemas.retrieval import SimilarAnswer

LN2 = math.log(2)


def similar(client: httpx.Client, **body: object) -> list[dict]:
    response = client.post("/v1/similar", json=body)
    assert response.status_code == 200, response.text
    SimilarAnswer.model_validate_json(response.content, strict=True)
    return response.json()["results"]


def pairs(result: dict) -> list[tuple[str, float]]:
    return [(label["id"], pytest.approx(label["score"], abs=1e-6)) for label in result["labels"]]


def test_similar_labels_without_the_label_itself(client: httpx.Client) -> None:
    (result,) = similar(client, id="a")
    assert result["id"] == "a"
    assert result["bias_removal"] == 0
    assert pairs(result) == [("c/é", 1.5), ("b", 0), ("4", -2)]


def test_similar_takes_the_dial_and_filters(client: httpx.Client) -> None:
    (dialled,) = similar(client, id="a", bias_removal=1)
    assert pairs(dialled) == [("c/é", 1.5 - 3 * LN2), ("b", -2 * LN2), ("4", -2 - 3 * LN2)]
    (filtered,) = similar(client, id="a", exclude=["c/é", "nobody"], k=1)
    assert (pairs(filtered), filtered["unknown"]) == ([("b", 0)], {"query": 0, "history": 0, "exclude": 1, "allow": 0})
    (tail,) = similar(client, id="4", buckets=["tail"])
    assert pairs(tail) == [("c/é", (-0.75 - 0.45) / 0.5)]


@pytest.mark.parametrize(
    ("id_", "count", "log_pn", "bucket", "title", "year"),
    [
        ("a", 8, -LN2, "head", "Alpha", 1999),
        ("c/é", 1, -3 * LN2, "tail", "Gamma", 2001),
        ("4", 1, -3 * LN2, "tail", "Four", 2002),
    ],
)
@pytest.mark.parametrize("safe", ["", "/"])
def test_label(
    client: httpx.Client, id_: str, count: int, log_pn: float, bucket: str, title: str, year: int, safe: str
) -> None:
    response = client.get(f"/v1/labels/{quote(id_, safe=safe)}")
    LabelAnswer.model_validate_json(response.content, strict=True)
    logs = dict.fromkeys(("log_pn", "log_popularity"), pytest.approx(log_pn, abs=1e-6))
    assert response.json() == logs | {
        "id": id_, "count": count, "bucket": bucket, "bias": None, "display": {"title": title, "year": year},
        "available": True, "release": "plane-1", "request_id": response.headers["x-request-id"],
    }  # fmt: skip


@pytest.mark.parametrize("id_", ["z", "", "%ff", "a/", "../a%00", "a" * 5000])
def test_unknown_label(client: httpx.Client, id_: str) -> None:
    response = client.get(f"/v1/labels/{id_}")
    assert response.status_code == 404
    assert response.json()["error"]["type"] in ("unknown_label", "unknown_route")
    assert len(response.text) < 800


def test_release(client: httpx.Client) -> None:
    response = client.get("/v1/release")
    ReleaseAnswer.model_validate_json(response.content)
    answer = response.json()
    assert [*answer][:5] == ["name", "created_at", "model", "example", "query_features"]
    assert answer.pop("request_id")
    assert answer == {
        "name": "plane-1",
        "created_at": "2026-01-02T00:00:00+00:00",
        "model": "plane",
        "labels": 4,
        "available": {"labels": 4, "next_change": None},
        "dim": 2,
        "similarity": "dot",
        "exclude_history": False,
        "temperature": 0.5,
        "loss": {"family": "softmax", "sampler": "in_batch", "weight": "unit"},
        "bias_removal": {
            "noise": "π",
            "default": 0.5,
            "minimum": -1.0,
            "maximum": 2.0,
            "chosen_by": "the recipe, for want of validation data",
            "curve_split": "none",
        },
        "popularity": {"default": 0.0, "minimum": -1.0, "maximum": 2.0},
        "priors": [],
        "bonus": {},
        "slope": {},
        "decay": {},
        "queries": None,
        "cooccurrence": None,
        "forecast": None,
        "buckets": {"scheme": "count", "head_above": 7.0, "tail_upto": 3.0},
        "proposal": "label frequencies",
        "query_features": [
            {"name": name, "kind": kind, "expects": expects, "max_length": longest, "dims": None}
            for name, kind, expects, longest in (
                ("user", "id", "an id (a string, number or boolean)", None),
                ("seen", "history", "a list of ids (strings, numbers or booleans), oldest first", 2),
                ("tags", "bag", "a list of ids (strings, numbers or booleans), or an object of id to weight", 3),
                ("words", "text", "a string", 3),
                ("age", "number", "a finite number", None),
            )
        ],
        "filterable": [
            {"name": "title", "kind": "string", "operators": ["eq", "ne", "in", "not_in", "exists"]},
            {
                "name": "year",
                "kind": "number",
                "operators": ["eq", "ne", "in", "not_in", "lt", "le", "gt", "ge", "exists"],
            },
        ],
        "example": {"user": "north", "seen": ["north"], "tags": ["north"], "words": "some words", "age": 7.5},
    }


def test_the_curve_is_included_on_request(client: httpx.Client) -> None:
    response = client.get("/v1/release?include=curve")
    ReleaseAnswer.model_validate_json(response.content)
    full = response.json()
    assert full["bias_removal"].pop("curve") == []
    without = client.get("/v1/release").json()
    assert full | {"request_id": ""} == without | {"request_id": ""}
    for query, field in (("include=evaluation", "include"), ("fields=curve", "fields"), ("include=", "include")):
        refused = client.get(f"/v1/release?{query}")
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, field)
