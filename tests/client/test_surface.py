"""What a user of the package sees: two clients of one shape, keys that stay out of sight, an example that runs."""

from __future__ import annotations

import doctest
import inspect
import logging
import textwrap

import httpx2 as httpx
import pytest

from longtail import client
from longtail.client import AsyncClient, Client
from tests.client.conftest import Make, Script, refusal
from tests.client.test_calls import RESULT

KEY = "plain-key-7391"
METHODS = ["add_labels", "delete_label", "delete_labels", "embed", "feedback", "label", "labels"]
METHODS += [
    "monitoring",
    "patch_label",
    "patch_labels",
    "queries_for",
    "ready",
    "release",
    "reload",
    "restore_labels",
    "retrieve",
    "similar",
]
METHODS += ["staged"]


def test_both_clients_have_the_same_methods() -> None:
    for kind, close in ((Client, "close"), (AsyncClient, "aclose")):
        assert sorted({name for name in vars(kind) if not name.startswith("_")} - {close}) == METHODS
    for name in METHODS:
        blocking, awaited = getattr(Client, name), getattr(AsyncClient, name)
        assert blocking.__doc__ == awaited.__doc__
        assert inspect.signature(blocking).parameters == inspect.signature(awaited).parameters
    signature = inspect.signature(Client("http://h").retrieve)
    assert (next(iter(signature.parameters)), signature.return_annotation) == ("queries", "Answer")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_repr_hides_the_key(kind: type[Client | AsyncClient]) -> None:
    built = kind("http://h", KEY)
    assert repr(built) == f"{kind.__name__}(ConnectionSettings(url='http://h', timeout=10.0, retries=3))"
    assert KEY not in repr(vars(built))


def test_the_key_is_sent_and_neither_logged_nor_in_an_error(asker: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    script = Script(refusal(401, "unauthorized"))
    with pytest.raises(client.DeniedError) as raised:
        asker(script, api_key=KEY)("retrieve", features={})
    assert script.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert KEY not in caplog.text + str(raised.value) + repr(vars(raised.value))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:8000"}, "expected http"),
        ({"url": "ftp://h"}, "scheme 'ftp'"),
        ({"url": "http://"}, "expected http"),
        ({"url": "http://h:port"}, "expected http"),
        ({"url": "http://me:plain-key-7391@h"}, "a password"),
        ({"url": "http://h?key=plain-key-7391"}, "query"),
        ({"api_key": ""}, "api_key"),
        ({"api_key": f"{KEY}\n"}, "api_key"),
        ({"api_key": f"{KEY} x"}, "api_key"),
        ({"api_key": f"{KEY}é"}, "api_key"),
        ({"timeout": 0}, "timeout: expected seconds > 0, received 0"),
        ({"timeout": float("inf")}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"retries": -1}, "retries: expected at least 0, received -1"),
    ],
)
def test_invalid_settings_are_refused(kind: type[Client], settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        kind(**({"url": "http://h"} | settings))
    assert KEY not in str(raised.value)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A service in place of the network, for clients of either kind; returns the paths it is asked for."""
    paths: list[str] = []

    def service(_: object, request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        retrieved = {
            "results": [RESULT] * max(1, request.content.count(b'"features"')),
            "release": "r",
            "request_id": "q",
        }
        return httpx.Response(200, json={"accepted": 1, "request_id": "f"} if "feedback" in paths[-1] else retrieved)

    async def service_awaited(transport: object, request: httpx.Request) -> httpx.Response:
        return service(transport, request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", service)
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", service_awaited)
    return paths


def test_the_example_runs(requested: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    example = inspect.getdoc(client)
    assert example is not None
    exec(textwrap.dedent(example.split("\n\n", 1)[1].split("`AsyncClient`")[0]), {})
    assert requested == ["/v1/retrieve", "/v1/feedback", "/v1/retrieve", "/v1/similar"]
    assert capsys.readouterr().out.split() == ["a", "1.5", "tail", "Alpha"]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_the_example_of_a_class_runs(requested: list[str], kind: type[Client | AsyncClient]) -> None:
    (example,) = [result for result in doctest.DocTestFinder().find(kind, globs={}) if result.examples]
    assert doctest.DocTestRunner().run(example).failed == 0
    assert requested == ["/v1/retrieve"]
