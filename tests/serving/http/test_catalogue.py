"""GET /v1/labels, POST /v1/labels/delete and /restore on the plane."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.applications import Starlette

from longtail.bundle import LabelRecord
from longtail.serving import create_app
from longtail.serving.errors import UnservableReleaseError
from longtail.serving.http.schemas.labels import LabelPage, LabelsAnswer
from longtail.state import LabelStore
from tests.serving.client import check_error, open_client
from tests.serving.plane import plane_retriever, plane_settings

LABELS = ["4", "a", "b", "c/é"]


def page(client: httpx.Client, **parameters: Any) -> dict[str, Any]:
    response = client.get("/v1/labels", params=parameters)
    assert response.status_code == 200, response.text
    LabelPage.model_validate_json(response.content, strict=True)
    answer: dict[str, Any] = response.json()
    return answer


def listed(client: httpx.Client, **parameters: Any) -> list[tuple[str, str]]:
    return [(label["id"], label["state"]) for label in page(client, **parameters)["labels"]]


def change(client: httpx.Client, what: str, ids: list[Any]) -> httpx.Response:
    return client.post(f"/v1/labels/{what}", json={"ids": ids})


def test_pages_follow_one_another(app: Starlette, client: httpx.Client) -> None:
    first = page(client, limit=3)
    assert ([label["id"] for label in first["labels"]], first["release"]) == (LABELS[:3], "plane-1")
    app.state.service.serve(plane_retriever("plane-2"))
    last = page(client, limit=3, cursor=first["next_cursor"])
    assert ([label["id"] for label in last["labels"]], last["release"]) == (LABELS[3:], "plane-2")
    assert last["next_cursor"] is None
    single = client.get("/v1/labels/a").json()
    (displayed,) = [label for label in first["labels"] if label["id"] == "a"]
    assert displayed == {name: single[name] for name in displayed if name != "state"} | {"state": "visible"}
    assert client.head("/v1/labels").status_code == 200


def test_hidden_labels_are_listed_and_restored(client: httpx.Client) -> None:
    assert change(client, "delete", ["b", 4, "b"]).json()["accepted"] == 2
    assert listed(client, state="hidden") == [("4", "hidden"), ("b", "hidden")]
    assert listed(client, state="visible", bucket="head") == [("a", "visible")]
    answer = change(client, "restore", ["b"])
    LabelsAnswer.model_validate_json(answer.content, strict=True)
    assert (answer.json()["accepted"], answer.json()["release"]) == (1, "plane-1")
    assert listed(client) == [("4", "hidden"), ("a", "visible"), ("b", "visible"), ("c/é", "visible")]


def test_many_changes_are_one_write_and_may_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batches: list[list[LabelRecord]] = []
    append = LabelStore.append

    def counted(store: LabelStore, records: list[LabelRecord], **options: Any) -> None:
        batches.append(list(records))
        append(store, records, **options)

    monkeypatch.setattr(LabelStore, "append", counted)
    caplog.set_level(logging.INFO, "longtail.serving.audit")
    with open_client(create_app(plane_settings(tmp_path), retriever=plane_retriever())) as client:
        for _ in range(2):
            assert change(client, "delete", ["a", "b"]).status_code == 200
            assert listed(client, state="hidden") == [("a", "hidden"), ("b", "hidden")]
        for _ in range(2):
            assert change(client, "restore", ["a", "b", "4"]).status_code == 200
            assert listed(client, state="hidden") == []
        change(client, "delete", ["a"])
    assert [[record.id for record in batch] for batch in batches] == [["a", "b"]] * 2 + [["a", "b", "4"]] * 2 + [["a"]]
    lines = [record for record in caplog.records if record.name == "longtail.serving.audit"]
    assert [(line.getMessage(), line.fields["labels"]) for line in lines][1:3] == [  # type: ignore[attr-defined]
        ("POST /v1/labels/delete", ["a", "b"]),
        ("POST /v1/labels/restore", ["a", "b", "4"]),
    ]
    # They were on disk.
    with open_client(create_app(plane_settings(tmp_path), retriever=plane_retriever())) as client:
        assert listed(client, state="hidden") == [("a", "hidden")]


@pytest.mark.parametrize("what", ["delete", "restore"])
@pytest.mark.parametrize(
    ("body", "status", "field", "message"),
    [
        ({}, 422, "ids", "expected a value for ids, received none; /docs has examples"),
        ({"ids": []}, 422, "ids", "expected a list of at least 1, received an empty one"),
        ({"ids": [1] * 10_001}, 422, "ids", "expected at most 10000 of them, received 10001"),
        ({"ids": "a"}, 422, "ids", 'expected a list, such as ["a"], received "a"'),
        ({"ids": ["a", None]}, 422, "ids.1", "expected an id (a string or a whole number), received null"),
        (
            {"ids": ["a"], "id": "a"},
            422,
            "id",
            "expected one of the keys ['ids'], received \"id\": did you mean 'ids'?",
        ),
        (
            {"ids": ["a", "z", 17, "z"]},
            404,
            "ids.1",
            'expected ids of labels of this release, received 2 that it does not have: "z" (ids.1), "17" (ids.2); none '
            "was changed",
        ),
    ],
)
def test_all_change_or_none(client: httpx.Client, what: str, body: Any, status: int, field: str, message: str) -> None:
    change(client, "delete", ["b"])
    kind = "unknown_label" if status == 404 else "invalid_request"
    assert check_error(client.post(f"/v1/labels/{what}", json=body), status, kind, field) == message
    assert listed(client, state="hidden") == [("b", "hidden")]


@pytest.mark.parametrize(
    ("query", "field", "message"),
    [
        ("limit=0", "limit", 'expected greater than or equal to 1, received "0"'),
        ("limit=1001", "limit", "expected limit <= 1000, received 1001"),
        ("limit=x", "limit", "expected a valid integer, unable to parse string as an integer, received \"x\""),
        ("limit=" + "9" * 5000, "limit", None),
        ("limit=1.5", "limit", None),
        ("limit=", "limit", None),
        ("limit=1&limit=2", "limit", "expected every parameter once, received one 2 times"),
        ("state=Hidden", "state", "expected 'all', 'visible', 'hidden' or 'added', received \"Hidden\""),
        ("bucket=", "bucket", "expected 'head', 'torso', 'tail' or 'new', received \"\""),
        (
            "page=2", "page",
            "expected one of the keys ['limit', 'cursor', 'state', 'bucket'], received \"page\"",
        ),
        ("%ff" * 300 + "=2", None, None),
    ],
)  # fmt: skip
def test_parameters_that_cannot_be(client: httpx.Client, query: str, field: str | None, message: str | None) -> None:
    response = client.get(f"/v1/labels?{query}")
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (422, "invalid_request")
    assert error.get("field") == field or field is None
    assert error["message"] == message or message is None
    assert len(response.text) < 1500


def test_a_staged_release_that_cannot_take_a_change_is_dropped_and_holds_up_none(app: Starlette) -> None:
    def fail(*_: object) -> None:
        raise UnservableReleaseError("no tower")

    service = app.state.service
    with open_client(app) as client:
        service.stage(plane_retriever("plane-2"))
        service.mirror.staged.with_changes = fail
        assert client.post("/v1/labels/delete", json={"ids": ["b"]}).status_code == 200
        assert service.mirror.staged is None
        answer = client.post("/v1/retrieve", json={"queries": [{"features": {"user": "east"}}]}).json()
        assert "b" not in [label["id"] for label in answer["results"][0]["labels"]]
