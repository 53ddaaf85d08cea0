"""The client and the committed OpenAPI document name the same routes and the same keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from longtail.client import Client, Feedback, Interaction, NewLabel, NoAnswerError, Query

DOCUMENT = Path(__file__).parent.parent.parent / "serving" / "openapi.json"
EVERYTHING: dict[str, Any] = {
    "k": 1, "bias_removal": 0.5, "popularity": 0.5, "exclude": ["a"], "allow": ["a"], "buckets": ["tail"],
    "explore": {"tail": 1}, "display": ["title"], "priors": {"recent": 0.5},
}  # fmt: skip
FREE = ("features", "display", "explore", "priors")
"""Keys whose values are the user's own JSON, or keyed by bucket or prior."""


class Call(NamedTuple):
    method: str
    path: str
    body: Any


def sent_by(method: str, *args: Any, **kwargs: Any) -> Call:
    """What a method of the client sends."""
    requests: list[httpx.Request] = []

    def keep(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        raise httpx.ConnectError("nobody there")

    with suppress(NoAnswerError), Client("http://h", retries=0, transport=httpx.MockTransport(keep)) as longtail:
        answer = getattr(longtail, method)(*args, **kwargs)
        if isinstance(answer, Iterator):
            next(answer)
    (request,) = requests
    return Call(
        request.method,
        request.url.raw_path.decode().partition("?")[0],
        json.loads(request.content) if request.content else None,
    )


CALLS: dict[str, Call] = {
    "retrieve": sent_by("retrieve", Query({}, **EVERYTHING), release="r", preview=True, unit="u", arm="a"),
    "similar one": sent_by("similar", "a", **EVERYTHING, release="r", preview=True),
    "similar several": sent_by("similar", ["a"], **EVERYTHING, release="r", preview=True),
    "retrieve by vector": sent_by("retrieve", Query(vector=[0.5, 1])),
    "embed queries": sent_by("embed", [{}], release="r"),
    "embed labels": sent_by("embed", labels=["a"]),
    "label": sent_by("label", "a"),
    "labels": sent_by("labels", search="x", state="hidden", bucket="tail", page_size=3),
    "delete_labels": sent_by("delete_labels", ["a"]),
    "restore_labels": sent_by("restore_labels", ["a"]),
    "add_labels": sent_by("add_labels", NewLabel("a", {}, display={})),
    "restore_label": sent_by("restore_label", "a"),
    "delete_label": sent_by("delete_label", "a"),
    "feedback": sent_by("feedback", Feedback("q", ["a"], event="purchase", weight=2.0)),
    "interactions": sent_by("interactions", Interaction({}, ["a"], bias_removal=0.5, exclude=["a"], popularity=1.0)),
    "release": sent_by("release"),
    "monitoring": sent_by("monitoring"),
    "reload": sent_by("reload"),
    "staged": sent_by("staged"),
    "models": sent_by("models"),
    "ready": sent_by("ready"),
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DOCUMENT.read_text(encoding="utf-8"))
    return loaded


def routes_of(call: Call, document: dict[str, Any]) -> list[tuple[str, str]]:
    """The routes of the document that a call would meet."""
    return [
        (method, route)
        for route, operations in document["paths"].items()
        for method in operations
        if method == call.method.lower() and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", route), call.path)
    ]


def keys_sent(body: Any) -> set[str]:
    if isinstance(body, list):
        return set().union(*map(keys_sent, body))
    if not isinstance(body, dict):
        return set()
    return set(body).union(*(keys_sent(value) for key, value in body.items() if key not in FREE))


def keys_read(schema: Any, document: dict[str, Any]) -> set[str]:
    """Every property below a schema, references followed."""
    if isinstance(schema, list):
        return set().union(*(keys_read(part, document) for part in schema))
    if not isinstance(schema, dict):
        return set()
    if "$ref" in schema:
        return keys_read(document["components"]["schemas"][schema["$ref"].split("/")[-1]], document)
    return set(schema.get("properties", ())).union(
        *(
            keys_read(list(part.values()) if name == "properties" else part, document)
            for name, part in schema.items()
            if name in ("properties", "items", "anyOf", "oneOf", "allOf")
        )
    )


@pytest.mark.parametrize("name", CALLS)
def test_every_method_has_its_route_and_sends_keys_that_it_reads(name: str, document: dict[str, Any]) -> None:
    call = CALLS[name]
    routes = routes_of(call, document)
    assert len(routes) == 1, f"{call.method} {call.path}"
    ((method, route),) = routes
    if call.body is not None:
        content = document["paths"][route][method]["requestBody"]["content"]["application/json"]
        assert keys_sent(call.body) <= keys_read(content["schema"], document)


def test_every_route_has_its_method(document: dict[str, Any]) -> None:
    asked = {route for call in CALLS.values() for route in routes_of(call, document)}
    offered = {(method, route) for route, by in document["paths"].items() for method in by if route.startswith("/v1/")}
    assert offered <= asked
