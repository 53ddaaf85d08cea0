"""The committed OpenAPI document is the one that the code makes, and that a service shows."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from longtail.serving import create_app
from longtail.serving.cli import app
from tests.serving.client import open_client
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


def test_every_operation_has_a_name_that_stays_and_an_example() -> None:
    document = json.loads(COMMITTED.read_text())
    assert {operation["operationId"] for _, _, operation in operations(document)} >= OPERATIONS
    for method, path, operation in operations(document):
        assert len(operation["summary"].split()) >= 5, "the first line of the docstring, not the function's name"
        assert not operation["summary"].endswith(".")
        assert not operation.get("description", "").startswith(operation["summary"])
        if "requestBody" in operation:
            body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            assert document["components"]["schemas"][body]["examples"], (method, path)
        for parameter in operation.get("parameters", ()):
            if parameter["required"]:
                assert parameter["schema"]["examples"], (method, path)


def test_a_service_shows_it_to_everybody(tmp_path: Path) -> None:
    service = create_app(plane_settings(tmp_path, api_keys=("ask-0123456789abcdef",)), retriever=plane_retriever())
    with open_client(service) as client:
        assert client.get("/openapi.json").json()["paths"] == json.loads(COMMITTED.read_text())["paths"]
