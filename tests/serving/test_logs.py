"""Log lines: JSON, one a line, with the id of the request they are about."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest

from longtail.serving import create_app
from longtail.serving.logs import JsonFormatter, configure
from tests.serving.client import open_client
from tests.serving.plane import plane_retriever, plane_settings

QUERY = {"queries": [{"features": {"user": "east"}, "k": 1}]}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """What this project has logged so far, read from JSON."""
    caplog.handler.setFormatter(JsonFormatter())
    caplog.set_level(logging.WARNING, "httpx2")
    caplog.set_level(logging.INFO)
    return lambda: [json.loads(line) for line in caplog.text.splitlines()]


def test_every_request_is_a_line_with_its_id(tmp_path: Path, lines: Any) -> None:
    app = create_app(plane_settings(tmp_path, access_log=True), retriever=plane_retriever())
    with open_client(app) as client:
        client.post("/v1/retrieve", json=QUERY, headers={"x-request-id": "id-1"})
        client.get("/v1/labels/nobody", headers={"x-request-id": "id-2"})
        created = client.get("/livez?secret=1", headers={"authorization": "Bearer sesame"}).headers["x-request-id"]
    first, second, third = lines()
    assert first.pop("milliseconds") > 0
    assert datetime.fromisoformat(first.pop("at")).tzinfo is not None
    assert first == {
        "level": "info",
        "logger": "longtail.serving.http.middleware",
        "message": "POST /v1/retrieve",
        "request_id": "id-1",
        "status": 200,
        "client": "127.0.0.1",
    }
    assert (second["message"], second["request_id"], second["status"]) == ("GET /v1/labels/{id:path}", "id-2", 404)
    assert (third["message"], third["request_id"], third["status"]) == ("GET /livez", created, 200)
    assert not any(word in json.dumps(lines()) for word in ("nobody", "secret", "sesame", "east"))


def test_label_changes_and_calls_of_admins_are_audited(tmp_path: Path, lines: Any) -> None:
    asking, admin = "asking-0123456789abcdef", "admin-0123456789abcdef"
    of_admin, of_asking = (hashlib.sha256(key.encode()).hexdigest()[:12] for key in (admin, asking))
    settings = plane_settings(tmp_path, api_keys=(asking,), admin_keys=(admin,))
    with open_client(create_app(settings, retriever=plane_retriever())) as client:
        client.headers["x-api-key"] = admin
        hidden = client.delete("/v1/labels/b")
        client.post("/v1/release/reload")
        client.get("/v1/release")
        client.headers["x-api-key"] = asking
        client.delete("/v1/labels/a", headers={"x-request-id": "not-allowed"})
    audited = [line for line in lines() if line["logger"] == "longtail.serving.audit"]
    first, second, third = audited
    assert (first["message"], first["status"], first["labels"]) == ("DELETE /v1/labels/{id:path}", 200, ["b"])
    assert (first["key"], first["client"]) == (of_admin, "127.0.0.1")
    assert first["request_id"] == hidden.headers["x-request-id"]
    assert (second["message"], second["key"]) == ("POST /v1/release/reload", of_admin)
    assert (third["status"], third["key"], third["labels"]) == (403, of_asking, ["a"])
    assert third["request_id"] == "not-allowed"
    assert not any(key in json.dumps(audited) for key in (asking, admin))


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_are_text_on_a_terminal_and_json_elsewhere(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    stream, root = io.StringIO(), logging.getLogger()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    configure("info")
    fields = {"dashboard": "http://127.0.0.1:8000/dashboard", "labels": ["a b"], "why": 'of "x"'}
    logging.getLogger("longtail.any").info("listening on %s", "http://127.0.0.1:8000", extra={"fields": fields})
    line = stream.getvalue()
    if terminal:
        assert re.fullmatch(
            r"\d\d:\d\d:\d\d INFO listening on http://127\.0\.0\.1:8000 dashboard=http://127\.0\.0\.1:8000/dashboard "
            r'labels=\["a b"\] why="of \\"x\\""\n',
            line,
        )
    else:
        content = json.loads(line)
        del content["at"]
        assert content == {
            "level": "info",
            "logger": "longtail.any",
            "message": "listening on http://127.0.0.1:8000",
            **fields,
        }


def test_a_failure_is_one_line_with_the_exception(tmp_path: Path, lines: Any) -> None:
    def broken(_: object) -> NoReturn:
        raise RuntimeError("first\nsecond")

    retriever = plane_retriever()
    retriever.label = broken  # type: ignore[method-assign]
    with open_client(create_app(plane_settings(tmp_path), retriever=retriever)) as client:
        assert client.get("/v1/labels/a%0Ab", headers={"x-request-id": "id-3"}).status_code == 500
    (line,) = lines()
    assert line["request_id"] == "id-3"
    assert line["message"] == "request id-3: GET '/v1/labels/a\\nb' failed"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("RuntimeError: first\nsecond")
