"""Large bodies: each is refused after a bounded part of it, so that other requests do not wait."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from longtail.serving import create_app
from longtail.serving.http.bridge import Body
from longtail.serving.http.schemas.labels import LabelIdsRequest, LabelsRequest
from longtail.serving.http.schemas.monitoring import FeedbackRequest
from longtail.serving.http.schemas.retrieval import EmbedRequest, QueriesRequest, RetrieveRequest, SimilarRequest
from tests.serving.client import open_client
from tests.serving.plane import plane_retriever, plane_settings

MEGABYTE, VALUES = 1 << 20, 65_000
HISTORY = '{"queries":[{"features":{"history":['
RETRIEVE, FEEDBACK, LABELS, DELETE = "/v1/retrieve", "/v1/feedback", "/v1/labels", "/v1/labels/delete"
SIMILAR, EMBED, QUERIES = "/v1/similar", "/v1/embed", "/v1/queries"
ENTRIES = {
    "empty queries": (RETRIEVE, '{"queries":[', "{}", "]}"),
    "queries": (RETRIEVE, '{"queries":[', '{"features":{}}', "]}"),
    "keys of a query": (RETRIEVE, '{"queries":[{"features":{},', '"%d":1', "}]}"),
    "keys": (RETRIEVE, "{", '"%d":1', "}"),
    "exclude": (RETRIEVE, '{"queries":[{"features":{},"exclude":[', "1", "]}]}"),
    "wrong exclude": (RETRIEVE, '{"queries":[{"features":{},"exclude":[', "[]", "]}]}"),
    "allow": (RETRIEVE, '{"queries":[{"features":{},"allow":[', "{}", "]}]}"),
    "many excludes": (RETRIEVE, '{"queries":[', '{"features":{},"exclude":[' + ",".join(["1"] * 999) + "]}", "]}"),
    "many long excludes": (
        RETRIEVE,
        '{"queries":[',
        '{"features":{},"exclude":[' + ",".join(["1"] * 9999) + "]}",
        "]}",
    ),
    "buckets": (RETRIEVE, '{"queries":[{"features":{},"buckets":[', "1", "]}]}"),
    "display": (RETRIEVE, '{"queries":[{"features":{},"display":[', "1", "]}]}"),
    "wrong vector": (RETRIEVE, '{"queries":[{"vector":[', "[]", "]}]}"),
    "features": (RETRIEVE, '{"queries":[{"features":{', '"%d":1', "}}]}"),
    "history": (RETRIEVE, HISTORY, '"u%d"', "]}}]}"),
    "nested": (RETRIEVE, HISTORY, "[]", "]}}]}"),
    "filters": (RETRIEVE, '{"queries":[{"features":{},"filter":{', '"%d":1', "}}]}"),
    "filter": (RETRIEVE, '{"queries":[{"features":{},"filter":{"title":{"in":[', '"%d"', "]}}}]}"),
    "priors": (RETRIEVE, '{"queries":[{"features":{},"priors":{', '"%d":1', "}}]}"),
    "wrong priors": (RETRIEVE, '{"queries":[{"features":{},"priors":{', '"%d":[]', "}}]}"),
    "explore": (RETRIEVE, '{"queries":[{"features":{},"explore":{', '"%d":[]', "}}]}"),
    "max_per": (RETRIEVE, '{"queries":[{"features":{},"max_per":{', '"%d":1', "}}]}"),
    "lists in mmr": (RETRIEVE, '{"queries":[{"features":{},"mmr":[', "{}", "]}]}"),
    "lists in release": (RETRIEVE, '{"queries":[{"features":{}}],"release":[', "{}", "]}"),
    "a list": (RETRIEVE, "[", "{}", "]"),
    "half a list": (RETRIEVE, '{"queries":[', "{}", "]"),
    "empty events": (FEEDBACK, '{"events":[', "{}", "]}"),
    "events": (FEEDBACK, '{"events":[', '{"features":{},"labels":[1]}', "]}"),
    "labels of an event": (FEEDBACK, '{"events":[{"features":{},"labels":[', '"l%d"', "]}]}"),
    "many labels of events": (
        FEEDBACK,
        '{"events":[',
        '{"features":{},"labels":[' + ",".join(["1"] * 999) + "]}",
        "]}",
    ),
    "features of an event": (FEEDBACK, '{"events":[{"labels":[1],"features":{', '"%d":1', "}}]}"),
    "empty labels": (LABELS, '{"labels":[', '{"features":{}}', "]}"),
    "labels": (LABELS, '{"labels":[', '{"id":1}', "]}"),
    "features of a label": (LABELS, '{"labels":[{"id":1,"features":{', '"%d":1', "}}]}"),
    "genres of a label": (LABELS, '{"labels":[{"id":"n","features":{"genres":[', '"g%d"', "]}}]}"),
    "columns of a label": (LABELS, '{"labels":[{"id":1,"features":{},"display":{', '"%d":1', "}}]}"),
    "priors of a label": (LABELS, '{"labels":[{"id":1,"features":{},"priors":{', '"%d":1', "}}]}"),
    "ids": (DELETE, '{"ids":[', "%d", "]}"),
    "wrong ids": (DELETE, '{"ids":[', "{}", "]}"),
    "similar": (SIMILAR, '{"ids":[', "%d", "]}"),
    "similar to lists": (SIMILAR, '{"ids":[', "[]", "]}"),
    "queries of lists": (QUERIES, '{"ids":[', "[]", "]}"),
    "lists as an id": (SIMILAR, '{"id":[', "[]", "]}"),
    "empty queries to embed": (EMBED, '{"queries":[', "{}", "]}"),
    "queries to embed": (EMBED, '{"queries":[', '{"features":{}}', "]}"),
    "labels to embed": (EMBED, '{"labels":[', "{}", "]}"),
}


def filled(start: str, entry: str, end: str, most: int) -> bytes:
    """A body of as many entries as a megabyte holds, and `most` commas, colons and brackets."""
    item, size, entries = sum(map(entry.count, ",:[{")) + 1, len(start) + len(end), []
    while (size := size + len(text := entry.replace("%d", str(len(entries)))) + 1) <= MEGABYTE and most >= item:
        entries.append(text)
        most -= item
    return (start + ",".join(entries) + end).encode()


JSON = {"content-type": "application/json"}
MODELS: dict[str, type[Body]] = {
    RETRIEVE: RetrieveRequest, FEEDBACK: FeedbackRequest, LABELS: LabelsRequest, DELETE: LabelIdsRequest,
    SIMILAR: SimilarRequest, EMBED: EmbedRequest, QUERIES: QueriesRequest,
}  # fmt: skip
ACCEPTED_FIELDS = {"keys", "keys of a query"}
"""Unknown keys, which pydantic collects: the only errors that can be many."""
ANSWERED = {
    "many excludes",
    "many long excludes",
    "many labels of events",
    "history",
    "nested",
    "filter",
    "genres of a label",
}
"""Those that the schema takes."""


def find_arrays(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict) and schema.get("type") == "definitions":  # of any JSON, which has no error
        schema = schema["schema"]
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    if isinstance(schema, dict) and schema.get("type") in ("list", "dict", "set", "tuple"):
        yield schema
    for part in parts:
        yield from find_arrays(part)


def bodies(base: type[Body]) -> Iterator[type[Body]]:
    for model in base.__subclasses__():
        yield from () if model.__name__.startswith("_") else (model,)
        yield from bodies(model)


@pytest.mark.parametrize("model", [*bodies(Body)])
def test_every_array_of_a_body_is_bounded_and_ends_at_its_first_error(model: type[Body]) -> None:
    arrays = list(find_arrays(model.__pydantic_core_schema__))
    assert arrays
    for array in arrays:
        assert array["fail_fast"], array
        assert array["max_length"] <= 10_000, array


@pytest.mark.parametrize("case", sorted(ENTRIES.keys() - ACCEPTED_FIELDS - ANSWERED))
def test_reading_ends_at_the_first_error(case: str) -> None:
    path, *parts = ENTRIES[case]
    with pytest.raises(ValidationError) as caught:
        MODELS[path].model_validate_json(filled(*parts, MEGABYTE))
    assert caught.value.error_count() == 1


@pytest.mark.parametrize("case", ENTRIES)
def test_a_megabyte_of_values_is_not_read(case: str, tmp_path: Path) -> None:
    path, *parts = ENTRIES[case]
    app = create_app(plane_settings(tmp_path, max_body_bytes=MEGABYTE), retriever=plane_retriever())
    with open_client(app) as client:
        body = filled(*parts, MEGABYTE)
        refused = sum(map(body.count, (b",", b":", b"[", b"{"))) > 1 << 17
        answer = client.post(path, content=body, headers=JSON)
        assert answer.status_code == (413 if refused else 422)
        if refused:
            message = answer.json()["detail"]
            assert message == "expected a body of at most 131072 commas, colons, [ and {, received more"
        body = filled(*parts, VALUES)
        answer = client.post(path, content=body, headers=JSON)
        brackets = body.count(b"[") + body.count(b"{")
        assert answer.status_code in ((413,) if brackets > 16_384 else (200, 400, 422))
        if case in ACCEPTED_FIELDS:
            assert answer.json()["detail"].startswith("expected an object of known keys, received one of 3")


def test_long_dictionaries_are_refused(tmp_path: Path) -> None:
    app = create_app(plane_settings(tmp_path, max_body_bytes=MEGABYTE), retriever=plane_retriever())
    with open_client(app) as client:
        features = {str(i): 1 for i in range(10_001)}
        answer = client.post(FEEDBACK, json={"events": [{"labels": ["a"], "features": features}]})
    error = {"message": "expected at most 10000 of them, received more", "field": "events.0.features"}
    assert answer.json()["error"] == error | {"type": "invalid_request"}


def test_requests_of_many_pieces_keep_their_order_and_positions(tmp_path: Path) -> None:
    app = create_app(plane_settings(tmp_path, max_queries=256, max_batch=64), retriever=plane_retriever())
    queries = [{"features": {"user": "east" if i % 3 else "north"}, "k": 1 + i % 4} for i in range(200)]
    ids = ["a", "b", "4"] * 60
    with open_client(app) as client:

        def ask(path: str, **body: Any) -> Any:
            answer = client.post(f"/v1/{path}", json={**body, "answer_ids": False} if path != "embed" else body)
            # A product of other sizes may round otherwise.
            return json.loads(answer.text, parse_float=lambda number: round(float(number), 5))

        four = {(i % 3 > 0, i % 4): ask("retrieve", queries=[queries[i]])["results"][0] for i in range(12)}
        results = ask("retrieve", queries=queries)["results"]
        assert results == [four[i % 3 > 0, i % 4] for i in range(200)]
        near = [ask("similar", id=id_, k=2)["results"][0] for id_ in ids[:3]]
        assert ask("similar", ids=ids, k=2)["results"] == near * 60
        vectors = [ask("embed", labels=[id_])["vectors"][0] for id_ in ids[:3]]
        assert ask("embed", labels=ids)["vectors"] == vectors * 60
        wrong = [*queries[:150], {"features": {"usr": "u"}}, *queries[150:]]
        assert ask("retrieve", queries=wrong)["error"]["field"] == "queries.150.features.usr"
        features = [{"features": query["features"]} for query in wrong]
        assert ask("embed", queries=features)["error"]["field"] == "queries.150.features.usr"
        assert ask("similar", ids=[*ids[:150], "none"])["error"]["field"] == "ids.150"
        assert ask("embed", labels=[*ids[:150], "none"])["error"]["field"] == "labels.150"
        assert ask("retrieve", queries=queries)["results"] == results


def test_an_answer_that_is_longer_than_estimated_is_refused(tmp_path: Path) -> None:
    app = create_app(plane_settings(tmp_path, max_answer_bytes=600), retriever=plane_retriever())
    query = {"features": {"user": "east"}, "k": 1, "display": False}
    with open_client(app) as client:
        answer = client.post(RETRIEVE, json={"queries": [query] * 5})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "queries")
