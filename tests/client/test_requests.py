"""What every method sends, and what it makes of the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import httpx
import pytest

from longtail.client import (
    Accepted,
    Answer,
    CatalogueLabel,
    Deleted,
    Embedded,
    Feedback,
    Interaction,
    Label,
    ListedLabel,
    NewLabel,
    Query,
    Reloaded,
    Result,
    Unknown,
)
from tests.client.asking import Asker, Script

Make = Callable[..., Asker]
LABEL = {"id": "a", "score": 1.5, "bucket": "tail", "display": {"title": "Alpha"}}
RESULT = {"labels": [LABEL], "bias_removal": 0.5, "unknown": {"exclude": 1, "allow": 0}}
"""As a service from before μ answers."""
RETRIEVED = {"results": [RESULT], "release": "r", "answer_id": "q0", "request_id": "q", "added_later": 1}
SIMILAR = {"results": [{**RESULT, "id": "b"}], "release": "r", "request_id": "q"}
RANKED = (Label("a", 1.5, "tail", {"title": "Alpha"}),)
ANSWER = Answer((Result(RANKED, 0.5, Unknown(exclude=1, allow=0)),), "r", "q", "q0")
NEAREST = Answer((Result(RANKED, 0.5, Unknown(exclude=1, allow=0), id="b"),), "r", "q")
DESCRIBED = {"id": "a", "count": 3, "log_pn": -1.5, "bucket": "tail", "bias": None, "display": {}}
NEWER = {"results": [{**RESULT, "popularity": -0.5}], "release": "r", "request_id": "q"}
WITH_PRIOR = Answer((Result(RANKED, 0.5, Unknown(exclude=1, allow=0), popularity=-0.5),), "r", "q")
DESCRIBED |= {"release": "r", "request_id": "q"}
LISTED = ListedLabel("a", 3, -1.5, "tail", None, {}, "hidden", -2.5)
ONE_PAGE = {"labels": [asdict(LISTED)], "next_cursor": None, "release": "r", "request_id": "q"}
VECTORS: dict[str, Any] = {"vectors": ((0.5, 1.0),), "dim": 2, "similarity": "dot", "temperature": 0.5}
VECTORS |= {"release": "r", "request_id": "q"}
TAKEN = {"accepted": 2, "request_id": "q"}
GONE = {"id": "a", "release": "r", "request_id": "q"}
SWAPPED = {"release": "r", "changed": True, "request_id": "q"}
PARTS = {"k": 3, "bias_removal": 0.0, "popularity": 0.25, "exclude": ["x", 4], "allow": [], "buckets": ["tail"]}
PARTS |= {"display": ["title"], "filter": {"price": {"lt": 20}, "brand": "acme"}}
PARTS |= {"max_per": {"brand": 2}, "mmr": 0.25, "pool": 99}
SENT = PARTS | {"mmr": {"weight": 0.25}}

CASES: list[tuple[str, tuple[Any, ...], dict[str, Any], str, dict[str, Any] | None, Any, Any]] = [
    ("retrieve", (), {"features": {}}, "POST /v1/retrieve", {"queries": [{"features": {}}]}, RETRIEVED, ANSWER),
    (
        "retrieve",
        (),
        {"features": {"u": 1}, **PARTS, "release": "r1", "preview": True, "unit": "me", "arm": "tail"},
        "POST /v1/retrieve",
        {"queries": [{"features": {"u": 1}, **SENT}], "release": "r1", "preview": True, "unit": "me", "arm": "tail"},
        RETRIEVED,
        ANSWER,
    ),
    (
        "retrieve",
        (Query({"u": 1}, **PARTS),),
        {},
        "POST /v1/retrieve",
        {"queries": [{"features": {"u": 1}, **SENT}]},
        RETRIEVED,
        ANSWER,
    ),
    (
        "retrieve",
        ([Query({"u": "a"}, exclude={"x"}), Query({"u": "b"}, exclude={"x"})],),
        {"release": "r1"},
        "POST /v1/retrieve",
        {
            "queries": [{"features": {"u": "a"}, "exclude": ["x"]}, {"features": {"u": "b"}, "exclude": ["x"]}],
            "release": "r1",
        },
        RETRIEVED,
        ANSWER,
    ),
    (
        "retrieve",
        (),
        {"features": {}, "popularity": -0.5},
        "POST /v1/retrieve",
        {"queries": [{"features": {}, "popularity": -0.5}]},
        NEWER,
        WITH_PRIOR,
    ),
    ("similar", ("b",), {}, "POST /v1/similar", {"id": "b"}, SIMILAR, NEAREST),
    ("similar", (4,), {"preview": True}, "POST /v1/similar", {"id": 4, "preview": True}, SIMILAR, NEAREST),
    ("similar", (["b", 4],), PARTS, "POST /v1/similar", {"ids": ["b", 4], **SENT}, SIMILAR, NEAREST),
    ("label", ("a",), {}, "GET /v1/labels/a", None, DESCRIBED, CatalogueLabel(**DESCRIBED)),
    ("label", (4,), {}, "GET /v1/labels/4", None, DESCRIBED, CatalogueLabel(**DESCRIBED)),
    ("label", ("c/é?#% ",), {}, "GET /v1/labels/c%2F%C3%A9%3F%23%25%20", None, DESCRIBED, CatalogueLabel(**DESCRIBED)),
    (
        "label",
        ("b",),
        {},
        "GET /v1/labels/b",
        None,
        {**DESCRIBED, "log_popularity": -2.5},
        CatalogueLabel(**DESCRIBED, log_popularity=-2.5),
    ),
    ("label", ("..",), {}, "GET /v1/labels/%2E%2E", None, DESCRIBED, CatalogueLabel(**DESCRIBED)),
    ("label", ("a.b",), {}, "GET /v1/labels/a.b", None, DESCRIBED, CatalogueLabel(**DESCRIBED)),
    (
        "add_labels",
        (NewLabel("n", {"title": "New"}),),
        {},
        "POST /v1/labels",
        {"labels": [{"id": "n", "features": {"title": "New"}}]},
        {**TAKEN, "release": "r"},
        Accepted(2, request_id="q", release="r"),
    ),
    (
        "add_labels",
        ([NewLabel("n", {}, display={"title": "N"}, priors={"recent": 0.3}), NewLabel(7, {})],),
        {},
        "POST /v1/labels",
        {
            "labels": [
                {"id": "n", "features": {}, "display": {"title": "N"}, "priors": {"recent": 0.3}},
                {"id": 7, "features": {}},
            ]
        },
        {**TAKEN, "release": "r"},
        Accepted(2, request_id="q", release="r"),
    ),
    (
        "restore_label",
        ("a",),
        {},
        "POST /v1/labels",
        {"labels": [{"id": "a"}]},
        {**TAKEN, "release": "r"},
        Accepted(2, request_id="q", release="r"),
    ),
    (
        "retrieve",
        ([Query(vector=(0.5, 1), k=2), Query({})],),
        {},
        "POST /v1/retrieve",
        {"queries": [{"vector": [0.5, 1.0], "k": 2}, {"features": {}}]},
        RETRIEVED,
        ANSWER,
    ),
    ("embed", ({"u": 1},), {}, "POST /v1/embed", {"queries": [{"features": {"u": 1}}]}, VECTORS, Embedded(**VECTORS)),
    (
        "embed",
        ([{}, {"u": 1}],),
        {"release": "r"},
        "POST /v1/embed",
        {"queries": [{"features": {}}, {"features": {"u": 1}}], "release": "r"},
        VECTORS,
        Embedded(**VECTORS),
    ),
    ("embed", (), {"labels": {"a": 1}}, "POST /v1/embed", {"labels": ["a"]}, VECTORS, Embedded(**VECTORS)),
    ("labels", (), {}, "GET /v1/labels", None, ONE_PAGE, [LISTED]),
    (
        "labels",
        (),
        {"search": "a&b é", "state": "hidden", "bucket": "tail", "page_size": 2},
        "GET /v1/labels?limit=2&search=a%26b+%C3%A9&state=hidden&bucket=tail",
        None,
        ONE_PAGE,
        [LISTED],
    ),
    (
        "delete_labels",
        (["a", 4],),
        {},
        "POST /v1/labels/delete",
        {"ids": ["a", 4]},
        {**TAKEN, "release": "r"},
        Accepted(2, request_id="q", release="r"),
    ),
    (
        "restore_labels",
        ({"a"},),
        {},
        "POST /v1/labels/restore",
        {"ids": ["a"]},
        {**TAKEN, "release": "r"},
        Accepted(2, request_id="q", release="r"),
    ),
    ("delete_label", ("a/b",), {}, "DELETE /v1/labels/a%2Fb", None, GONE, Deleted("a", "r", "q")),
    (
        "feedback",
        (Feedback("q0", ["a"]),),
        {},
        "POST /v1/feedback",
        {"events": [{"request_id": "q0", "query": 0, "labels": ["a"]}]},
        TAKEN,
        Accepted(2, request_id="q"),
    ),
    (
        "feedback",
        ([Feedback(answer_id="q0", labels={"a"}, query=1), Feedback("r1", (4,), answer_id="q1")],),
        {},
        "POST /v1/feedback",
        {
            "events": [
                {"answer_id": "q0", "query": 1, "labels": ["a"]},
                {"answer_id": "q1", "query": 0, "labels": [4]},
            ]
        },
        TAKEN,
        Accepted(2, request_id="q"),
    ),
    (
        "interactions",
        (
            [
                Interaction(
                    {"u": 1}, ["a"], bias_removal=0.5, exclude=["s"], popularity=1.0, idempotency_key="visit-1"
                ),
                Interaction({}, ["b"], idempotency_key=None),
            ],
        ),
        {},
        "POST /v1/feedback",
        {
            "events": [
                {
                    "features": {"u": 1},
                    "labels": ["a"],
                    "bias_removal": 0.5,
                    "popularity": 1.0,
                    "exclude": ["s"],
                    "idempotency_key": "visit-1",
                },
                {"features": {}, "labels": ["b"]},
            ]
        },
        TAKEN,
        Accepted(2, request_id="q"),
    ),
    ("release", (), {}, "GET /v1/release", None, {"name": "r"}, {"name": "r"}),
    ("staged", (), {}, "GET /v1/release/staged", None, {"queries": 1}, {"queries": 1}),
    ("monitoring", (), {}, "GET /v1/monitoring", None, {"windows": {}}, {"windows": {}}),
    ("reload", (), {}, "POST /v1/release/reload", None, SWAPPED, Reloaded("r", changed=True, request_id="q")),
    ("ready", (), {}, "GET /readyz", None, {"status": "ready"}, True),
]


@pytest.mark.parametrize(("method", "args", "kwargs", "line", "body", "answer", "value"), CASES)
def test_request_and_value(
    asker: Make, method: str, args: Any, kwargs: Any, line: str, body: Any, answer: Any, value: Any
) -> None:
    script = Script(httpx.Response(200, json=answer))
    assert asker(script, url="http://longtail.test/behind/")(method, *args, **kwargs) == value
    (request,) = script.requests
    verb, path = line.split()
    assert (request.method, request.url.raw_path.decode()) == (verb, f"/behind{path}")
    assert (json.loads(request.content) if request.content else None) == body


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "either queries or features, received neither"),
        (([],), {"features": {}}, "either queries or features, received both"),
        ((Query({}),), {"k": 3, "allow": []}, "expected k, allow in every Query"),
        ((Query(),), {}, "expected either features or vector, received neither"),
        (([Query({}, vector=[1])],), {}, "expected either features or vector, received both"),
    ],
)
def test_a_question_of_two_minds_is_refused(asker: Make, args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asker(Script(httpx.Response(500)))("retrieve", *args, **kwargs)


@pytest.mark.parametrize(("args", "kwargs", "received"), [((), {}, "neither"), (({},), {"labels": ["a"]}, "both")])
def test_vectors_of_two_minds_are_refused(asker: Make, args: Any, kwargs: Any, received: str) -> None:
    with pytest.raises(ValueError, match=f"expected either queries or labels, received {received}"):
        asker(Script(httpx.Response(500)))("embed", *args, **kwargs)


def test_labels_are_read_page_by_page(asker: Make) -> None:
    pages = [{**ONE_PAGE, "next_cursor": "n/1"}, {**ONE_PAGE, "labels": [], "next_cursor": "n2"}, ONE_PAGE]
    script = Script(*(httpx.Response(200, json=page) for page in pages))
    assert asker(script)("labels", state="hidden", page_size=1) == [LISTED, LISTED]
    assert [request.url.query.decode() for request in script.requests] == [
        "limit=1&state=hidden",
        "limit=1&cursor=n%2F1&state=hidden",
        "limit=1&cursor=n2&state=hidden",
    ]


def test_feedback_on_no_answer_is_refused(asker: Make) -> None:
    with pytest.raises(ValueError, match="expected an answer_id, or the request_id of an older service's answer"):
        asker(Script(httpx.Response(500)))("feedback", Feedback(labels=["a"]))


@pytest.mark.parametrize(
    ("method", "args", "kwargs"),
    [
        ("retrieve", (), {"features": {}, "exclude": "item-1"}),
        ("retrieve", (Query({}, allow="item-1"),), {}),
        ("similar", ("a",), {"buckets": "tail"}),
        ("feedback", (Feedback("q", "item-1"),), {}),
        ("interactions", (Interaction({}, "item-1"),), {}),
        ("delete_labels", ("item-1",), {}),
        ("restore_labels", ("item-1",), {}),
        ("embed", (), {"labels": "item-1"}),
    ],
)
def test_a_string_is_no_collection_of_ids(asker: Make, method: str, args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError, match="expected a collection, received one string"):
        asker(Script(httpx.Response(500)))(method, *args, **kwargs)
