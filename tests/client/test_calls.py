"""The request of every method, held against the committed OpenAPI document, and the value made of the answer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from longtail.client import Answer, Feedback, Label, NewLabel, Query, Result, calls
from longtail.client.calls import Call
from tests.client.conftest import Make, Script

DOCUMENT = Path(__file__).parent.parent.parent / "serving" / "openapi.json"
FREE = ("features", "display", "explore", "priors", "filter", "max_per", "at_least")
"""Keys whose values are the user's own JSON, or keyed by bucket, prior or column."""
PARTS: dict[str, Any] = {
    "k": 3, "bias_removal": 0.0, "popularity": 0.25, "priors": {"recent": 0.5}, "exclude": {"x"}, "allow": [],
    "buckets": ("tail",), "filter": {"price": {"lt": 20}}, "explore": {"new": 2}, "max_per": {"brand": 2}, "mmr": 0.25,
    "pool": 99, "at_least": [{"bucket": "tail", "n": 1}], "display": ["title"], "cooccurrence": 0.5,
}  # fmt: skip
SENT = PARTS | {"exclude": ["x"], "buckets": ["tail"]}
ORGANIC = Feedback(None, ["a"], {"u": 1}, bias_removal=0.5, popularity=1.0, exclude=["s"], idempotency_key="visit-1")
TOGETHER = Feedback(None, ["a"], {"u": 1}, cooccurrence=0.5, history=["h", 7], idempotency_key="visit-2")
RETRIEVE, SIMILAR, FEEDBACK = "POST /v1/retrieve", "POST /v1/similar", "POST /v1/feedback"

CASES: list[tuple[Call[Any], str, Any]] = [
    (calls.retrieve(features={}), RETRIEVE, {"queries": [{"features": {}}]}),
    (
        calls.retrieve(features={"u": 1}, **PARTS, release="r1", preview=True, unit="me", arm="tail"),
        RETRIEVE,
        {"queries": [{"features": {"u": 1}, **SENT}], "release": "r1", "preview": True, "unit": "me", "arm": "tail"},
    ),
    (
        calls.retrieve([Query({"u": "a"}, **PARTS), Query(vector=(0.5, 1), display=False)]),
        RETRIEVE,
        {"queries": [{"features": {"u": "a"}, **SENT}, {"vector": [0.5, 1.0], "display": False}]},
    ),
    (calls.similar("b"), SIMILAR, {"id": "b"}),
    (
        calls.retrieve(features={}, history=("h", 7)), RETRIEVE, {"queries": [{"features": {}, "history": ["h", 7]}]}
    ),
    (calls.similar("b", by="cooccurrence"), SIMILAR, {"id": "b", "by": "cooccurrence"}),
    (
        calls.feedback(TOGETHER),
        FEEDBACK,
        {"events": [{
            "labels": ["a"], "features": {"u": 1}, "cooccurrence": 0.5, "history": ["h", 7],
            "idempotency_key": "visit-2",
        }]},
    ),
    (calls.similar(4, preview=True), SIMILAR, {"id": 4, "preview": True}),
    (calls.similar(["b", 4], release="r", **PARTS), SIMILAR, {"ids": ["b", 4], "release": "r", **SENT}),
    (calls.queries_for("b"), "POST /v1/queries", {"id": "b"}),
    (
        calls.queries_for(["b", 4], k=3, by="choices", bias_removal=0.5, filter={"age": 9}, exclude=["u"], release="r"),
        "POST /v1/queries",
        {"ids": ["b", 4], "k": 3, "by": "choices", "bias_removal": 0.5, "filter": {"age": 9}, "exclude": ["u"]}
        | {"release": "r"},
    ),
    (
        calls.queries_for(features={"year": 1}, exclude_history=False, display=["age"]),
        "POST /v1/queries",
        {"features": {"year": 1}, "exclude_history": False, "display": ["age"]},
    ),
    (calls.embed({"u": 1}), "POST /v1/embed", {"queries": [{"features": {"u": 1}}]}),
    (calls.embed([{}], release="r"), "POST /v1/embed", {"queries": [{"features": {}}], "release": "r"}),
    (calls.embed(labels={"a": 1}), "POST /v1/embed", {"labels": ["a"]}),
    (calls.label(4), "GET /v1/labels/4", None),
    (calls.label("c/é?#% "), "GET /v1/labels/c%2F%C3%A9%3F%23%25%20", None),
    (calls.label(".."), "GET /v1/labels/%2E%2E", None),
    (calls.label("a.b"), "GET /v1/labels/a.b", None),
    (calls.label_page(None, {}), "GET /v1/labels", None),
    (
        calls.label_page("a&b é/1", {"state": "hidden", "limit": 2}),
        "GET /v1/labels?cursor=a%26b+%C3%A9%2F1&state=hidden&limit=2",
        None,
    ),
    (
        calls.add_labels([NewLabel("n", {}, {"title": "N"}, {"recent": 0.3}), NewLabel(7, {})]),
        "POST /v1/labels",
        {
            "labels": [
                {"id": "n", "features": {}, "display": {"title": "N"}, "priors": {"recent": 0.3}},
                {"id": 7, "features": {}},
            ]
        },
    ),
    (calls.delete_label("a/b"), "DELETE /v1/labels/a%2Fb", None),
    (calls.delete_labels(["a", 4]), "POST /v1/labels/delete", {"ids": ["a", 4]}),
    (calls.patch_label("a/b", {"price": 2}), "PATCH /v1/labels/a%2Fb", {"display": {"price": 2}}),
    (calls.patch_labels({"a": {"price": 2}}), "PATCH /v1/labels", {"labels": [{"id": "a", "display": {"price": 2}}]}),
    (calls.restore_labels({"a"}), "POST /v1/labels/restore", {"ids": ["a"]}),
    (
        calls.feedback(
            [
                Feedback("q0", {"a"}, idempotency_key="tap-1"),
                Feedback("q1", (4,), {"u": 1}, event="buy", weight=2.0, idempotency_key="tap-2"),
            ]
        ),
        FEEDBACK,
        {
            "events": [
                {"answer_id": "q0", "labels": ["a"], "idempotency_key": "tap-1"},
                {
                    "answer_id": "q1", "labels": [4], "features": {"u": 1}, "event": "buy", "weight": 2.0,
                    "idempotency_key": "tap-2",
                },
            ]
        },
    ),
    (
        calls.feedback(ORGANIC),
        FEEDBACK,
        {
            "events": [
                {
                    "features": {"u": 1}, "labels": ["a"], "bias_removal": 0.5, "popularity": 1.0, "exclude": ["s"],
                    "idempotency_key": "visit-1",
                }
            ]
        },
    ),
    (calls.release(), "GET /v1/release", None),
    (calls.release(curve=True), "GET /v1/release?include=curve", None),
    (calls.staged(), "GET /v1/release/staged", None),
    (calls.monitoring(), "GET /v1/monitoring", None),
    (calls.reload(), "POST /v1/release/reload", None),
]  # fmt: skip


@pytest.mark.parametrize(("call", "line", "body"), CASES)
def test_request(call: Call[Any], line: str, body: Any) -> None:
    assert (f"{call.method} {call.path}", call.body) == (line, body)


def keys_sent(body: Any) -> set[str]:
    if isinstance(body, list):
        return set().union(*map(keys_sent, body))
    if not isinstance(body, dict):
        return set()
    return set(body).union(*(keys_sent(value) for key, value in body.items() if key not in FREE))


def test_every_route_has_a_method_with_every_key() -> None:
    document = json.loads(DOCUMENT.read_text(encoding="utf-8"))
    schemas = document["components"]["schemas"]

    def keys_read(schema: Any) -> set[str]:
        if isinstance(schema, list):
            return set().union(*map(keys_read, schema))
        if not isinstance(schema, dict):
            return set()
        if "$ref" in schema:
            return keys_read(schemas[schema["$ref"].split("/")[-1]])
        below = [part for name, part in schema.items() if name in ("items", "anyOf", "oneOf", "allOf")]
        return set(schema.get("properties", ())).union(
            *map(keys_read, [*below, *schema.get("properties", {}).values()])
        )

    offered = {(method, route) for route, by in document["paths"].items() for method in by if route.startswith("/v1/")}
    met = set()
    for call, *_ in CASES:
        method, path = call.method.lower(), call.path.partition("?")[0]
        routes = [
            single
            for single in offered
            if single[0] == method and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", single[1]), path)
        ]
        # GET /v1/release/staged meets no route but its own.
        (route,) = routes
        met.add(route)
        if call.body is not None:
            content = document["paths"][route[1]][method]["requestBody"]["content"]["application/json"]
            assert keys_sent(call.body) <= keys_read(content["schema"]), call
    assert met == offered


RESULT = {
    "labels": [{"id": "a", "score": 1.5, "bucket": "tail", "display": {"title": "Alpha"}}],
    "bias_removal": 0.5, "popularity": 0.25, "cooccurrence": 0.75,
    "unknown": {"query": 0, "history": 2, "exclude": 1, "allow": 0}, "answer_id": "q0",
}  # fmt: skip
ALPHA = Label("a", 1.5, "tail", {"title": "Alpha"})
RETRIEVED = {"results": [RESULT], "release": "r", "request_id": "q", "added_later": 1}
LABEL = {"id": "a", "count": 3, "log_pn": -1.5, "log_popularity": -2.5, "bucket": "tail", "bias": None, "display": {}}
LISTED, ANSWER_SOURCE = {**LABEL, "state": "hidden"}, {"release": "r", "request_id": "q"}


@pytest.mark.parametrize(
    ("method", "args", "answer", "value"),
    [
        (
            "retrieve", (Query({}),), RETRIEVED,
            Answer(
                (
                    Result(
                        (ALPHA,), 0.5, 0.25, {"query": 0, "history": 2, "exclude": 1, "allow": 0}, answer_id="q0",
                        cooccurrence=0.75,
                    ),
                ), "r", "q",
            ),
        ),
        ("label", ("a",), LABEL | ANSWER_SOURCE, LABEL | ANSWER_SOURCE),
        ("labels", (), {"labels": [LISTED], "next_cursor": None}, [LISTED]),
        ("monitoring", (), {"windows": {}}, {"windows": {}}),
    ],
)  # fmt: skip
def test_value(asker: Make, method: str, args: Any, answer: Any, value: Any) -> None:
    script = Script(httpx.Response(200, json=answer))
    assert asker(script, url="http://longtail.test/behind/")(method, *args) == value
    assert script.requests[0].url.raw_path.decode().startswith("/behind/v1/")


def test_labels_are_read_page_by_page(asker: Make) -> None:
    page = {"labels": [LISTED], "next_cursor": None}
    pages = [{**page, "next_cursor": "n/1"}, {"labels": [], "next_cursor": "n2"}, page]
    script = Script(*(httpx.Response(200, json=page) for page in pages))
    assert asker(script)("labels", state="hidden", limit=1) == [LISTED, LISTED]
    queries = [request.url.query.decode() for request in script.requests]
    assert queries == [f"{cursor}state=hidden&limit=1" for cursor in ("", "cursor=n%2F1&", "cursor=n2&")]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: calls.retrieve(), ValueError, "either queries or features, received neither"),
        (lambda: calls.retrieve([], features={}), ValueError, "either queries or features, received both"),
        (
            lambda: calls.retrieve({"user_id": "u1"}, k=3),  # type: ignore[arg-type]
            ValueError,
            r"received features: did you mean features={'user_id': 'u1'}\?",
        ),
        (lambda: calls.retrieve(Query({}), k=3, allow=[]), ValueError, "expected k, allow in every Query"),
        (lambda: calls.retrieve(Query()), ValueError, "expected either features or vector, received neither"),
        (lambda: calls.retrieve(Query({}, vector=[1])), ValueError, "features or vector, received both"),
        (lambda: calls.retrieve(features={}, K=3), TypeError, "unexpected keyword argument 'K'"),
        (lambda: calls.embed(), ValueError, "either queries or labels, received neither"),
        (lambda: calls.embed({}, labels=["a"]), ValueError, "either queries or labels, received both"),
        (lambda: calls.retrieve(features={}, exclude="item-1"), TypeError, "exclude: expected a collection"),
        (lambda: calls.similar("a", buckets="tail"), TypeError, "buckets: expected a collection"),
        (lambda: calls.feedback(Feedback("q", "item-1")), TypeError, "labels: expected a collection"),
        (lambda: calls.delete_labels("item-1"), TypeError, "ids: expected a collection"),
        (lambda: calls.embed(labels="item-1"), TypeError, "labels: expected a collection"),
    ],
)
def test_ambiguous_arguments_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_every_event_has_a_unique_key() -> None:
    sent = calls.feedback([Feedback("q", ["a"]), Feedback("q", ["a"]), Feedback(None, ["a"], {})]).body
    assert sent is not None
    assert len({event["idempotency_key"] for event in sent["events"]}) == 3
