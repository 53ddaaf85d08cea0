"""The committed OpenAPI document is the one that the code makes; a running service's has examples that it answers."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
from typer.testing import CliRunner

from longtail.serving import create_app
from longtail.serving.cli import app
from tests.serving.client import client_of
from tests.serving.plane import plane_retriever, plane_settings

COMMITTED = Path(__file__).parents[3] / "serving" / "openapi.json"


def test_the_committed_document_is_that_of_the_code() -> None:
    result = CliRunner().invoke(app, ["openapi"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads(COMMITTED.read_text()), (
        "run: longtail-serve openapi > serving/openapi.json"
    )


OPERATIONS = {
    "retrieve_v1_retrieve_post",
    "similar_v1_similar_post",
    "label_v1_labels__id__get",
    "hide_label_v1_labels__id__delete",
    "add_labels_v1_labels_post",
    "feedback_v1_feedback_post",
    "monitoring_v1_monitoring_get",
    "metrics_metrics_get",
    "release_v1_release_get",
    "staged_v1_release_staged_get",
    "reload_v1_release_reload_post",
    "live_livez_get",
    "ready_readyz_get",
}
"""What generated clients call their functions: a name that changes breaks programs. New ones are added here."""


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(method, path, operation) for path, by in document["paths"].items() for method, operation in by.items()]


def body_example(operation: dict[str, Any]) -> Any:
    return operation["requestBody"]["content"]["application/json"]["example"]


def test_every_operation_has_a_name_that_stays_and_an_example() -> None:
    document = json.loads(COMMITTED.read_text())
    assert {operation["operationId"] for _, _, operation in operations(document)} >= OPERATIONS
    for method, path, operation in operations(document):
        assert operation.get("summary")
        if "requestBody" in operation:
            assert body_example(operation), (method, path)
        for parameter in operation.get("parameters", ()):
            if parameter["required"]:
                assert parameter["schema"]["examples"], (method, path)


def call(client: httpx.Client, method: str, path: str, operation: dict[str, Any]) -> httpx.Response:
    """What /docs sends for `Try it out` and `Execute`."""
    for parameter in operation.get("parameters", ()):
        if parameter["required"]:
            path = path.replace("{" + parameter["name"] + "}", quote(parameter["example"]))
    body = {"json": body_example(operation)} if "requestBody" in operation else {}
    return client.request(method.upper(), path, **body)


def test_a_running_service_answers_every_example(tmp_path: Path) -> None:
    service = create_app(plane_settings(tmp_path), retriever=plane_retriever())
    with client_of(service) as client:
        service.state.service.stage(plane_retriever("plane-2"))
        document = client.get("/openapi.json").json()
        made = {operation["operationId"]: (method, path, operation) for method, path, operation in operations(document)}
        assert body_example(made["retrieve_v1_retrieve_post"][2])["queries"][0]["features"].keys() == {
            "user", "seen", "tags", "words", "age"
        }  # fmt: skip
        for name in sorted(made, key=lambda name: (name.startswith("add"), name)):
            if name.startswith("reload"):
                continue  # there is nothing on disk that it could load
            answer = call(client, *made[name])
            assert answer.is_success, (name, answer.text)
            if name.startswith("hide_label_"):
                # The next one reads the document anew, and finds another label.
                another = client.get("/openapi.json").json()["paths"]["/v1/similar"]["post"]
                assert body_example(another)["id"] != body_example(made["similar_v1_similar_post"][2])["id"]
                made["similar_v1_similar_post"] = ("post", "/v1/similar", another)
                made["label_v1_labels__id__get"] = (
                    "get", "/v1/labels/{id}", client.get("/openapi.json").json()["paths"]["/v1/labels/{id}"]["get"],
                )  # fmt: skip


def test_who_may_not_ask_and_who_asks_before_a_release_reads_the_committed_document(tmp_path: Path) -> None:
    committed = json.loads(COMMITTED.read_text())["paths"]
    key = "ask-0123456789abcdef"
    with client_of(create_app(plane_settings(tmp_path / "empty"))) as client:
        assert client.get("/openapi.json").json()["paths"] == committed
    keyed = create_app(plane_settings(tmp_path / "keyed", api_keys=(key,)), retriever=plane_retriever())
    with client_of(keyed) as client:
        assert client.get("/openapi.json").json()["paths"] == committed
        assert client.get("/openapi.json", headers={"x-api-key": "another"}).json()["paths"] == committed
        assert client.get("/openapi.json", headers={"x-api-key": key}).json()["paths"] != committed
