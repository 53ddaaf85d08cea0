"""Who may ask and who may change things, by key and by route."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from longtail.serving import create_app
from tests.serving.client import open_client
from tests.serving.plane import plane_retriever, plane_settings

ASKING, OTHER, ADMIN, UNICODE = (
    "ask-0123456789abcdef",
    "other-0123456789abcd",
    "admin-0123456789abcd",
    "ключ-0123456789äöü€",
)
ASK = {"queries": [{"features": {}, "k": 1}]}
EVENT = {"events": [{"features": {}, "labels": ["a"]}]}
MAY_ASK = [
    ("POST", "/v1/retrieve", ASK),
    ("POST", "/v1/similar", {"id": "a", "k": 1}),
    ("POST", "/v1/embed", {"labels": ["a"]}),
    ("GET", "/v1/labels", None),
    ("GET", "/v1/labels/a", None),
    ("POST", "/v1/feedback", EVENT),
    ("GET", "/v1/monitoring", None),
    ("GET", "/v1/release", None),
    ("GET", "/metrics", None),
]
MAY_CHANGE = [
    ("DELETE", "/v1/labels/b", None),
    ("POST", "/v1/labels/delete", {"ids": ["b"]}),
    ("POST", "/v1/labels/restore", {"ids": ["b"]}),
    ("POST", "/v1/release/reload", None),
]
OPEN_PATHS = ["/", "/livez", "/readyz", "/dashboard", "/docs", "/docs/assets/swagger-ui.css", "/openapi.json"]


@contextmanager
def guarded(tmp_path: Path, **keys: object) -> Iterator[httpx.Client]:
    settings = plane_settings(tmp_path, **keys)
    with open_client(create_app(settings, retriever=plane_retriever())) as client:
        yield client


KEYS = {"api_keys": (ASKING, OTHER, UNICODE), "admin_keys": (ADMIN,)}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    with guarded(tmp_path, **KEYS) as client:
        yield client


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """One for all tests that change nothing."""
    with guarded(tmp_path_factory.mktemp("state"), **KEYS) as client:
        yield client


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"Authorization": b"Bearer " + key.encode()}


def header(key: str) -> dict[bytes, bytes]:
    return {b"X-API-Key": key.encode()}


REFUSED = {
    "none": {},
    "wrong": header("ask-0123456789abcdee"),
    "wrong bearer": bearer("x" * 20),
    "empty": header(""),
    "empty bearer": {b"Authorization": b"Bearer"},
    "blanks": bearer("    "),
    "beginning of a key": header(ASKING[:-1]),
    "more than a key": header(ASKING + "0"),
    "two keys": header(f"{ASKING},{OTHER}"),
    "upper case": header(ASKING.upper()),
    "basic": {b"Authorization": b"Basic " + ASKING.encode()},
    "bare": {b"Authorization": ASKING.encode()},
    "not utf-8": {b"X-API-Key": b"\xff\xfe" + ASKING.encode()},
    "wrong bearer beside a right key": bearer("x" * 20) | header(ASKING),
    "two words": bearer(f"{ASKING} x"),
    "comma": bearer(f"{ASKING},"),
    "percent-encoded NUL": header(f"{ASKING}%00"),
    "underscores": {b"X_API_Key": ASKING.encode()},
    "cookie": {b"Cookie": b"X-API-Key=" + ASKING.encode()},
    "forwarded": {b"X-Forwarded-For": b"127.0.0.1", b"X-Original-URL": b"/livez", b"X-Rewrite-URL": b"/livez"},
}


NO_KEY = ("none", "empty", "empty bearer", "blanks", "basic", "bare", "underscores", "cookie", "forwarded")


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize(("method", "path", "body"), [*MAY_ASK, *MAY_CHANGE, ("GET", "/v1/nothing", None)])
def test_without_a_key_of_the_service_nothing_is_answered(
    unchanged: httpx.Client, method: str, path: str, body: object, case: str
) -> None:
    response = unchanged.request(method, path, json=body, headers=REFUSED[case])
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    received = "none" if case in NO_KEY else "another one"
    assert error == {
        "type": "unauthenticated",
        "message": f"expected a key of this service in Authorization: Bearer or X-API-Key, received {received}",
    }


@pytest.mark.parametrize(
    "headers",
    [
        header(ASKING), bearer(ASKING), bearer(OTHER), {b"authorization": b"bEaReR   " + ASKING.encode() + b" "},
        bearer(ASKING) | header("wrong"), {b"Authorization": b"Basic eDp5"} | header(OTHER), header(UNICODE),
        bearer(UNICODE), header(ADMIN),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("method", "path", "body"), MAY_ASK)
def test_any_key_may_ask(
    unchanged: httpx.Client, method: str, path: str, body: object, headers: dict[bytes, bytes]
) -> None:
    assert unchanged.request(method, path, json=body, headers=headers).status_code == 200


@pytest.mark.parametrize(("method", "path", "body"), MAY_CHANGE)
def test_only_an_admin_key_may_change_things(client: httpx.Client, method: str, path: str, body: object) -> None:
    for headers in (header(ASKING), bearer(OTHER), header(UNICODE)):
        response = client.request(method, path, json=body, headers=headers)
        assert response.status_code == 403
        assert response.json()["error"]["type"] == "forbidden"
    assert client.get("/v1/labels/b", headers=header(ASKING)).status_code == 200
    for headers in (header(ADMIN), bearer(ADMIN)):
        # A release that was handed to the application has no CURRENT to reload.
        assert client.request(method, path, json=body, headers=headers).status_code in (200, 409)


def test_refused_requests_are_counted_separately(client: httpx.Client) -> None:
    def counted(route: str) -> float:
        metrics = client.get("/metrics", headers=header(ASKING)).text
        return float(metrics.split(f'longtail_requests_total{{route="{route}",status="4xx"}} ')[1].split()[0])

    before = counted("refused"), counted("/v1/retrieve")
    for key in ("guess-1", "guess-2"):
        assert client.post("/v1/retrieve", json={}, headers=header(key)).status_code == 401
    assert (counted("refused"), counted("/v1/retrieve")) == (before[0] + 2, before[1])


def test_unauthorised_requests_are_refused_before_reading_the_body(client: httpx.Client) -> None:
    assert client.post("/v1/labels", content=b"\xff" * 30_000).status_code == 401
    assert client.post("/v1/labels", content=b"\xff" * 30_000, headers=header(ASKING)).status_code == 403


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_what_tells_nothing_of_the_model_is_open(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/livez/", "//livez", "/livez%2f..%2fmetrics", "/docs/assets", "/docs/../v1/release",
        "/docs/assets/../../metrics", "/docs/assets/%2e%2e/%2e%2e/metrics", "/Metrics", "/metrics/",
        "/v1/labels/livez", "/dashboard/data",
    ],
)  # fmt: skip
def test_no_spelling_of_a_path_opens_another(client: httpx.Client, path: str) -> None:
    response = client.get(str(client.base_url).rstrip("/") + path)  # "//livez" alone would name a host
    assert response.status_code in (401, 404)
    assert response.json()["error"]["type"] in ("unauthenticated", "unknown_route")


def test_without_keys_everybody_may_do_everything(tmp_path: Path) -> None:
    with guarded(tmp_path) as client:
        for method, path, body in (*MAY_ASK, *MAY_CHANGE):
            assert client.request(method, path, json=body).status_code in (200, 409)
        assert client.get("/v1/release", headers=header("any")).status_code == 200


def test_api_keys_cannot_change_labels(tmp_path: Path) -> None:
    with guarded(tmp_path, api_keys=(ASKING,)) as client:
        assert client.delete("/v1/labels/b", headers=header(ASKING)).status_code == 403
        assert client.delete("/v1/labels/b").status_code == 401


def test_admin_keys_alone_are_for_everything(tmp_path: Path) -> None:
    with guarded(tmp_path, admin_keys=(ADMIN,)) as client:
        assert client.get("/v1/release").status_code == 401
        assert client.get("/v1/release", headers=header(ADMIN)).status_code == 200
        assert client.delete("/v1/labels/b", headers=header(ADMIN)).status_code == 200


def test_the_first_of_two_headers_counts(client: httpx.Client) -> None:
    twice = [(b"x-api-key", b"wrong"), (b"x-api-key", ASKING.encode())]
    assert client.get("/v1/release", headers=twice).status_code == 401
    assert client.get("/v1/release", headers=[*reversed(twice)]).status_code == 200


@pytest.mark.parametrize(
    ("inputs", "headers"),
    [
        ({"api_keys": (ASKING,)}, {"host": "shop.example"}),
        ({"insecure": True}, {"host": "shop.example"}),
        ({"insecure": True}, {"origin": "https://shop.example"}),
    ],
)
def test_with_keys_or_a_gateway_other_hosts_may_ask(tmp_path: Path, inputs: dict, headers: dict) -> None:
    with guarded(tmp_path, **inputs) as client:
        assert client.get("/v1/release", headers=headers | {"x-api-key": ASKING}).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("127.9.9.9:80", 200),
        ("[::1]:8000", 200),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("10.0.0.7", 403),
        ("", 403),
        ("[", 403),
        ("evil.example@127.0.0.1", 403),
        ("evil.example:80@localhost:8000", 403),
        ("localhost/evil.example", 403),
        ("localhost?evil.example", 403),
    ],
)
def test_dns_rebinding_is_refused_without_keys(tmp_path: Path, host: str, status: int) -> None:
    """DNS rebinding: to the browser the page and the service have one origin."""
    with guarded(tmp_path) as client:
        answer = client.get("/v1/release", headers={"host": host})
        assert answer.status_code == status
        assert client.get("/livez", headers={"host": host}).status_code == 200
    if status == 403:
        assert answer.json()["error"]["message"] == (
            "expected keys, LONGTAIL_INSECURE behind a gateway, or a Host that is this machine, such as localhost, "
            f'received "{host}"'
        )


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://localhost:8000", 200),
        ("http://127.0.0.1", 200),
        ("http://[::1]:3000", 200),
        ("https://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("http://127.0.0.1.evil.example", 403),
        ("null", 403),
        ("http://evil.example@localhost", 403),
        ("http://[", 403),
    ],
)
def test_without_keys_pages_of_other_hosts_may_not_ask(tmp_path: Path, origin: str | None, status: int) -> None:
    headers = {} if origin is None else {"origin": origin}
    with open_client(create_app(plane_settings(tmp_path), retriever=plane_retriever())) as client:
        assert client.delete("/v1/labels/a", headers=headers).status_code == status
        assert client.get("/v1/labels/a", headers=headers).status_code == (404 if status == 200 else 403)
