"""Several models in one application: whose routes a path means, what each keeps to itself, and what is one for all."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request, Response

from longtail.serving import create_app
from longtail.serving.http.app import apply_settings
from longtail.serving.http.direct import Application
from longtail.serving.http.schemas.operations import ModelsAnswer
from longtail.serving.logs import JsonFormatter
from longtail.serving.monitoring.workers import Workers, WorkerState
from tests.serving.client import client_of
from tests.serving.http.test_direct import JSON, ask
from tests.serving.plane import plane_retriever, plane_settings

EAST = {"features": {"user": "east"}, "k": 3, "bias_removal": 0}
QUERY = {"queries": [EAST]}
KEY, ADMIN = "ask-0123456789abcdef", "admin-0123456789abcdef"


def models_app(root: Path, *, served: bool = True, workers: Workers | None = None, **changes: object) -> Application:
    """`default` and `books`, whose labels begin with b/; books' release is put in place, or left out."""
    settings = plane_settings(root / "first", models={"books": root / "books"}, poll_seconds=60, **changes)
    app = create_app(settings, retriever=plane_retriever(), workers=workers)
    assert isinstance(app, Application)
    if served:
        app.models["books"].state.service.serve(plane_retriever("books-1", "b/"))
    return app


@pytest.fixture
def app(tmp_path: Path) -> Application:
    return models_app(tmp_path)


@pytest.fixture
def client(app: Application) -> Iterator[httpx.Client]:
    with client_of(app) as client:
        yield client


def ids(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [label["id"] for label in answer.json()["results"][0]["labels"]]


def error(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, answer.json()["error"]["type"]


def series(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_a_path_names_its_model_and_without_one_it_is_the_first(client: httpx.Client) -> None:
    assert ids(client.post("/v1/retrieve", json=QUERY)) == ["a", "c/é", "b"]
    assert ids(client.post("/v1/models/default/retrieve", json=QUERY)) == ["a", "c/é", "b"]
    assert ids(client.post("/v1/models/books/retrieve", json=QUERY)) == ["b/a", "b/c/é", "b/b"]
    assert client.get("/v1/models/books/release").json()["name"] == "books-1"
    assert client.get("/v1/models/books/labels/b/c/%C3%A9").json()["id"] == "b/c/é"
    assert error(client.get("/v1/labels/b/a")) == (404, "unknown_label")
    assert client.get("/v1/models/books/readyz").json()["status"] == "ready"
    plain = {"accept-encoding": "identity"}
    head, whole = (client.request(method, "/v1/models/books/release", headers=plain) for method in ("HEAD", "GET"))
    assert (head.status_code, int(head.headers["content-length"])) == (200, len(whole.content))


def test_the_list_of_models(client: httpx.Client) -> None:
    answer = client.get("/v1/models")
    ModelsAnswer.model_validate_json(answer.content, strict=True)
    assert answer.json()["models"] == [
        {"name": "default", "release": "plane-1", "labels": 4, "ready": True, "problem": None},
        {"name": "books", "release": "books-1", "labels": 4, "ready": True, "problem": None},
    ]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/films/retrieve", "/v1/models/Books/retrieve", "/v1/models/../retrieve", "/v1/models//retrieve",
        "/v1/models/b%C3%B6cher/retrieve", "/v1/models/%00/retrieve", "/v1/models/books%20/retrieve", "/v1/models/",
        "/v1/models/books\n/retrieve", f"/v1/models/{'x' * 5000}/retrieve", "/v1/models/__class__/retrieve",
        "/v1/models/books/models/books/retrieve/..", "/v1/models/books/models/films/retrieve",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["POST", "GET", "HEAD", "OPTIONS", "DELETE"])
def test_models_that_there_are_not(app: Application, client: httpx.Client, path: str, method: str) -> None:
    del client  # whose lifespan runs
    scope_path = path.replace("%C3%B6", "ö").replace("%00", "\0").replace("%20", " ")
    status, headers, body = asyncio.run(ask(app, (scope_path, [JSON], [b"{}"]), method))
    assert status == 404
    assert headers[b"content-type"] == b"application/problem+json"
    if "models/books/models/books" in path:
        assert json.loads(body)["error"]["type"] == "unknown_route"
        return
    error = json.loads(body)["error"]
    assert error["type"] == "unknown_model"
    assert error["message"].startswith("expected one of the models ['default', 'books'], received ")
    assert len(body) < 800


@pytest.mark.parametrize(
    "path", ["/v1/models/books", "/v1/models/books/", "/v1/models/books/nowhere", "/v1/models/books/metrics",
             "/v1/models/books/v1/retrieve", "/v1/models/books/../../livez",
             "/v1/models/default/models/default/release"],
)  # fmt: skip
def test_routes_that_a_model_has_not(app: Application, client: httpx.Client, path: str) -> None:
    del client
    status, _, body = asyncio.run(ask(app, (path, [], [b""]), "GET"))
    error = json.loads(body)["error"]
    assert (status, error["type"]) == (404, "unknown_route")
    assert path in error["message"]


def test_other_methods_are_told_what_the_route_takes(client: httpx.Client) -> None:
    answer = client.options("/v1/models/books/retrieve")
    assert (error(answer), answer.headers["allow"]) == ((405, "wrong_method"), "POST")
    assert "/v1/models/books/retrieve" in answer.json()["detail"]
    assert error(client.post("/v1/models", json={})) == (405, "wrong_method")


def test_a_service_of_one_model_has_it_by_name_as_well(tmp_path: Path) -> None:
    with client_of(create_app(plane_settings(tmp_path), retriever=plane_retriever())) as client:
        assert ids(client.post("/v1/models/default/retrieve", json=QUERY)) == ["a", "c/é", "b"]
        assert [model["name"] for model in client.get("/v1/models").json()["models"]] == ["default"]
        unknown = client.post("/v1/models/books/retrieve", json=QUERY)
        assert error(unknown) == (404, "unknown_model")
        assert "['default']" in unknown.json()["detail"]
        assert "model=" not in client.get("/metrics").text


def test_the_direct_door_is_taken_for_every_model(app: Application, client: httpx.Client) -> None:
    """No request for a search reaches FastAPI's router, of any model."""
    routed = []
    for name, model in app.models.items():
        router = model.router.middleware_stack

        async def counting(*given: Any, name: str = name, router: Any = router) -> None:
            routed.append(name)
            await router(*given)

        model.router.middleware_stack = counting
    for path in ("/v1", "/v1/models/default", "/v1/models/books"):
        assert client.post(f"{path}/retrieve", json=QUERY).status_code == 200
        assert client.post(f"{path}/embed", json={"queries": [{"features": {}}]}).status_code == 200
    assert routed == []
    client.get("/v1/models/books/release")
    assert routed == ["books"]


def test_middleware_that_others_add_sees_requests_to_every_model(app: Application) -> None:
    seen = []

    @app.middleware("http")
    async def see(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        seen.append(request.url.path)
        return await call(request)

    with client_of(app) as client:
        for path, first in (("/v1", "a"), ("/v1/models/default", "a"), ("/v1/models/books", "b/a")):
            answer = client.post(f"{path}/retrieve", json=QUERY, headers={"x-request-id": "one"})
            assert ids(answer)[0] == first
            assert answer.headers.get_list("x-request-id") == ["one"]
        counted = series(client)
    assert seen[:3] == ["/v1/retrieve", "/v1/models/default/retrieve", "/v1/models/books/retrieve"]
    assert counted['longtail_requests_total{route="/v1/retrieve",status="2xx"}'] == 2
    assert counted['longtail_requests_total{model="books",route="/v1/retrieve",status="2xx"}'] == 1


def test_behind_a_prefix_the_paths_are_those_behind_it(app: Application, client: httpx.Client) -> None:
    del client
    status, _, body = asyncio.run(
        ask(app, ("/x/v1/models/books/retrieve", [JSON], [json.dumps(QUERY).encode()]), root="/x")
    )
    assert (status, json.loads(body)["release"]) == (200, "books-1")


def test_label_changes_and_feedback_of_one_are_not_the_others(app: Application, client: httpx.Client) -> None:
    assert client.delete("/v1/models/books/labels/b/a").status_code == 200
    assert ids(client.post("/v1/models/books/retrieve", json=QUERY))[0] == "b/c/é"
    assert ids(client.post("/v1/retrieve", json=QUERY))[0] == "a"
    answer = client.post("/v1/models/books/retrieve", json=QUERY).json()
    for path in ("/v1", "/v1/models/books"):
        events = [{"answer_id": answer["answer_id"], "labels": ["b/b"]}]
        assert client.post(f"{path}/feedback", json={"events": events}).status_code == 200
    for model in app.models.values():
        model.state.service.monitoring.figures.flush()
    first, books = (client.get(f"{path}/monitoring").json() for path in ("/v1", "/v1/models/books"))
    assert (first["labels"], books["labels"]) == ({"added": 0, "hidden": 0}, {"added": 0, "hidden": 1})
    found = [report["windows"]["5m"]["recall"]["feedback"]["all"]["positives"] for report in (first, books)]
    assert found == [0, 1]
    assert [report["windows"]["5m"]["queries"] for report in (first, books)] == [1, 2]
    counted = series(client)
    assert counted["longtail_labels_hidden"] == 0
    assert counted['longtail_labels_hidden{model="books"}'] == 1


def test_one_scrape_has_all_models_and_the_process_once(client: httpx.Client) -> None:
    client.post("/v1/models/books/retrieve", json=QUERY)
    text = client.get("/metrics").text
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(set(types)) == len(types)
    counted = series(client)
    assert (counted["longtail_queries_total"], counted['longtail_queries_total{model="books"}']) == (0, 1)
    assert counted['longtail_release_info{model="books",release="books-1"}'] == 1
    assert counted['longtail_release_info{release="plane-1"}'] == 1
    assert counted['longtail_exposure_share{bucket="head",model="books",window="5m"}'] > 0
    assert counted['longtail_ready{model="books"}'] == 1
    of_books = {name for name in counted if 'model="books"' in name}
    unnamed = {name.replace('model="books",', "").replace(',model="books"', "").replace('{model="books"}', "")
               for name in of_books}  # fmt: skip
    own = {"longtail_queue_depth", "longtail_queue_limit", "longtail_workers", "longtail_memory_limit_bytes"}
    own |= {"longtail_open_files_limit"}
    missing = {
        name for name in set(counted) - of_books - unnamed if not name.startswith(("process_", "longtail_worker_"))
    }
    assert missing == own | {'longtail_release_info{release="plane-1"}'}
    assert unnamed - set(counted) == {'longtail_release_info{release="books-1"}'}


def test_the_first_models_series_are_what_they_are_without_others(tmp_path: Path) -> None:
    """Names, labels, help, and order."""

    def lines(client: httpx.Client) -> list[str]:
        text = client.get("/metrics").text
        return [
            line if line[0] == "#" else line.rsplit(" ", 1)[0] for line in text.splitlines() if "model=" not in line
        ]

    alone = create_app(plane_settings(tmp_path / "alone"), retriever=plane_retriever())
    with client_of(alone) as one, client_of(models_app(tmp_path)) as several:
        assert lines(several) == lines(one)


def test_readiness_of_all_and_of_each(tmp_path: Path) -> None:
    app = models_app(tmp_path, served=False)
    with client_of(app) as client:
        answer = client.get("/readyz")
        assert error(answer) == (503, "not_ready")
        assert "books: no release is loaded yet" in answer.json()["detail"]
        assert "default" not in answer.json()["detail"]
        assert client.get("/v1/models/default/readyz").json()["workers"] == {"expected": 1, "ready": 1}
        assert error(client.get("/v1/models/books/readyz")) == (503, "not_ready")
        assert error(client.post("/v1/models/books/retrieve", json=QUERY)) == (503, "not_ready")
        assert client.post("/v1/retrieve", json=QUERY).status_code == 200
        assert series(client)['longtail_worker_ready{worker="0"}'] == 0
        listed = client.get("/v1/models").json()["models"][1]
        assert (listed["release"], listed["ready"]) == (None, False)
        app.models["books"].state.service.set_release_problem("broken, could not be loaded, none is served")
        listed = client.get("/v1/models").json()["models"][1]["problem"]
        assert listed == "the published release, broken, could not be loaded, none is served; the log says why"
        app.models["books"].state.service.serve(plane_retriever("books-1", "b/"))
        assert client.get("/readyz").json()["workers"] == {"expected": 1, "ready": 1}
        assert series(client)['longtail_worker_ready{worker="0"}'] == 1
        for model in app.models.values():
            model.state.service.drain()
        assert error(client.get("/v1/models/books/readyz")) == (503, "not_ready")


def test_a_worker_is_counted_ready_for_each_model_and_for_all(tmp_path: Path) -> None:
    workers = Workers(2, models=2)
    for worker in range(2):
        workers.start(worker, again=False)
    with client_of(models_app(tmp_path, workers=workers)) as client:
        workers.become(1, WorkerState.ready, 0)
        assert client.get("/v1/models/default/readyz").json()["workers"] == {"expected": 2, "ready": 2}
        assert error(client.get("/v1/models/books/readyz")) == (503, "not_ready")
        workers.become(1, WorkerState.up, 1)
        assert client.get("/readyz").json()["workers"] == {"expected": 2, "ready": 1}
        assert client.get("/v1/models/books/readyz").json()["workers"] == {"expected": 2, "ready": 1}


def test_keys_are_the_same_for_all_and_change_for_all(tmp_path: Path) -> None:
    app = models_app(tmp_path, api_keys=(KEY,), admin_keys=(ADMIN,))
    with client_of(app) as client:
        for path in ("/v1/models/books/retrieve", "/v1/models/films/retrieve", "/v1/models/default/retrieve"):
            assert error(client.post(path, json=QUERY)) == (401, "unauthenticated")
        assert error(client.get("/v1/models")) == (401, "unauthenticated")
        for open_path in ("dashboard", "docs", "openapi.json", "readyz"):
            assert client.get(f"/v1/models/books/{open_path}").status_code == 200
        client.headers["x-api-key"] = KEY
        assert client.post("/v1/models/books/retrieve", json=QUERY).status_code == 200
        assert error(client.delete("/v1/models/books/labels/b/a")) == (403, "forbidden")
        another = app.state.service.settings.model_copy(update={"api_keys": (), "max_k": 2})
        apply_settings(app, another)
        assert error(client.post("/v1/models/books/retrieve", json=QUERY)) == (401, "unauthenticated")
        client.headers["x-api-key"] = ADMIN
        assert error(client.post("/v1/models/books/retrieve", json=QUERY)) == (422, "invalid_request")
        assert app.models["books"].state.service.settings.state_directory == tmp_path / "books/.state"


def test_lines_of_the_log_name_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.setFormatter(JsonFormatter())
    caplog.set_level(logging.INFO, "longtail")
    (tmp_path / "books").mkdir()
    (tmp_path / "books/CURRENT").write_text("nothing\n")
    app = models_app(tmp_path, access_log=True, served=False)
    with client_of(app) as client:
        client.delete("/v1/labels/a")
        client.delete("/v1/models/books/labels/b/a")
        client.get("/v1/models/films/release")
    lines = [json.loads(line) for line in caplog.text.splitlines() if line.startswith("{")]
    told = {(line["logger"].rpartition(".")[2], line.get("model")) for line in lines}
    assert told >= {("audit", "default"), ("audit", "books"), ("middleware", "default"), ("middleware", "books")}
    assert ("follower", "books") in told
    assert all("model" in line for line in lines)


def test_pages_and_document_of_a_model_name_its_paths(client: httpx.Client) -> None:
    document = client.get("/v1/models/books/openapi.json").json()
    assert document["info"]["title"] == "Longtail: books"
    assert {"/v1/models/books/retrieve", "/v1/models/books/readyz"} <= set(document["paths"])
    assert all(path.startswith("/v1/models/books/") for path in document["paths"])
    example = document["paths"]["/v1/models/books/similar"]["post"]["requestBody"]["content"]["application/json"][
        "example"
    ]
    assert client.post("/v1/models/books/similar", json=example).status_code == 200
    assert (
        client.get("/openapi.json").json()["paths"].keys()
        == client.get("/v1/models/default/openapi.json").json()["paths"].keys()
    )
    page = client.get("/v1/models/books/docs").text
    assert "'/v1/models/books/openapi.json'" in page
    assert client.get("/v1/models/books/docs/assets/swagger-ui.css").status_code == 200
    assert client.get("/v1/models/books/dashboard").text == client.get("/dashboard").text


def test_an_error_of_one_model_says_the_path_that_was_asked(app: Application, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret")

    app.models["books"].state.service.retriever().retrieve = broken
    with client_of(app) as client:
        assert error(client.post("/v1/models/books/retrieve", json=QUERY)) == (500, "internal")
        assert client.post("/v1/retrieve", json=QUERY).status_code == 200
    assert "'/v1/models/books/retrieve' failed" in caplog.text
