"""Attempts, waits and errors of whole calls, against a scripted service and a clock that only sleeps move."""

from __future__ import annotations

import json
import pickle

import httpx2 as httpx
import pytest

from longtail.client import BusyError, DeniedError, Feedback, LongtailError, NoAnswerError, NotFoundError
from longtail.client.attempts import retry_after
from tests.client.conftest import Make, Script, SleepClock, refusal

RELEASE = httpx.Response(200, json={"name": "r", "request_id": "q"})
FULL = refusal(429, "queue_full", Retry_After="1")
NOT_READY = refusal(503, "not_ready")


def test_retry_after_is_respected(asker: Make, clock: SleepClock) -> None:
    script = Script(FULL, NOT_READY, RELEASE)
    assert asker(script)("release")["name"] == "r"
    assert clock.sleeps == pytest.approx([1 + 0.05, 0.1])
    assert len({(r.method, r.url, r.content) for r in script.requests}) == 1


def test_a_lost_connection_is_tried_again(asker: Make, clock: SleepClock) -> None:
    script = Script(httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError, RELEASE)
    assert asker(script)("release")["name"] == "r"
    assert clock.sleeps == pytest.approx([0.05, 0.1, 0.2])


def test_wait_beyond_the_timeout_is_skipped(asker: Make, clock: SleepClock) -> None:
    script = Script(refusal(429, "queue_full", Retry_After="4"))
    with pytest.raises(BusyError):
        asker(script, timeout=10, retries=50)("release")
    assert clock.sleeps == pytest.approx([4.05, 4.1])
    assert len(script.requests) == 3


def test_an_answer_of_another_kind_is_final(asker: Make, clock: SleepClock) -> None:
    for outcome in (*map(httpx.Response, (200, 400, 404, 409, 422, 500, 502, 504)), httpx.LocalProtocolError):
        script = Script(outcome)
        with pytest.raises(LongtailError):
            asker(script)("retrieve", features={})
        assert (len(script.requests), clock.sleeps) == (1, [])


def test_waits_double_up_to_five_seconds(asker: Make, clock: SleepClock) -> None:
    with pytest.raises(NoAnswerError):
        asker(Script(httpx.ReadTimeout), retries=8, timeout=100)("release")
    assert clock.sleeps == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.5, 2.5])


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0), (" 12 ", 12), ("9" * 5000, 999_999_999), ("Sun, 06 Nov 1994 08:49:37 GMT", 37),
        ("Sun, 06 Nov 1994 10:49:37 +0200", 37), ("Sun, 06 Nov 1994 08:48:00 GMT", 0), ("", 0), ("soon", 0), ("-5", 0),
        ("1.5", 0), ("inf", 0), ("٣", 0), ("Sun, 99 Nov 1994 08:49:37 GMT", 0),
    ],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date(value: str, seconds: float) -> None:
    eight_forty_nine = 784_111_740.0  # 1994-11-06T08:49:00Z: 9075 days, 8 h and 49 min after the epoch
    assert eight_forty_nine == ((9075 * 24 + 8) * 60 + 49) * 60
    assert retry_after(value, eight_forty_nine) == seconds


@pytest.mark.usefixtures("clock")
def test_each_attempt_gets_the_remaining_time(asker: Make) -> None:
    script = Script(FULL, RELEASE)
    asker(script, timeout=5)("release")
    remaining = [request.extensions["timeout"]["read"] for request in script.requests]
    assert remaining == pytest.approx([5, 5 - 1.05])


@pytest.mark.usefixtures("clock")
def test_retry_keeps_the_idempotency_key(asker: Make) -> None:
    used = httpx.Response(200, json={"accepted": 2, "request_id": "q"})
    for outcome in (httpx.ReadError, refusal(503, "timeout"), httpx.Response(503, text="upstream reset")):
        script = Script(outcome, used)
        assert asker(script)("feedback", [Feedback(None, ["a"], {}), Feedback(None, ["a"], {})])["accepted"] == 2
        first, again = (json.loads(request.content)["events"] for request in script.requests)
        assert first == again
        assert len({event["idempotency_key"] for event in first}) == 2


@pytest.mark.parametrize(
    ("status", "kind", "error"),
    [
        (401, "unauthorized", DeniedError),
        (403, "forbidden", DeniedError),
        (404, "unknown_label", NotFoundError),
        (409, "release_refused", LongtailError),
        (422, "invalid_request", LongtailError),
        (429, "queue_full", BusyError),
        (500, "internal", LongtailError),
        (503, "timeout", BusyError),
    ],
)
def test_error_has_the_message_of_the_service(asker: Make, status: int, kind: str, error: type[LongtailError]) -> None:
    with pytest.raises(LongtailError) as raised:
        asker(Script(refusal(status, kind, field="queries.0.k")), retries=0)("retrieve", features={})
    raised_error = raised.value
    assert type(raised_error) is error
    assert (raised_error.status, raised_error.type, raised_error.field, raised_error.request_id) == (
        status,
        kind,
        "queries.0.k",
        "r-1",
    )
    assert str(raised_error) == f"{status} {kind} in queries.0.k: expected less, received more (request r-1)"
    copy = pickle.loads(pickle.dumps(raised_error))
    assert (type(copy), str(copy), copy.status) == (error, str(raised_error), status)


@pytest.mark.parametrize("content", [b"<html>Bad Gateway</html>", b"[]", b'{"error": "no"}', b"\xff", b""])
def test_an_error_of_a_gateway_has_its_status(asker: Make, content: bytes) -> None:
    answer = httpx.Response(502, content=content, headers={"X-Request-ID": "g-1"})
    with pytest.raises(LongtailError, match=r"502 http_502: .*POST http://longtail.test/v1/retrieve") as raised:
        asker(Script(answer))("retrieve", features={})
    assert (raised.value.field, raised.value.request_id) == (None, "g-1")


@pytest.mark.parametrize("content", [b"<html>", b"[]", b"null", b"{}", b'{"results": [7]}', b'{"results": 7}', b""])
def test_a_success_with_an_unexpected_body_is_an_error(asker: Make, content: bytes) -> None:
    with pytest.raises(LongtailError, match="unexpected_answer: expected the answer of POST") as raised:
        asker(Script(httpx.Response(200, content=content)))("retrieve", features={})
    assert (raised.value.status, raised.value.type) == (200, "unexpected_answer")


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"score": "1.5"}, "results.0.labels.0.score: Input should be a valid number"),
        ({"id": 7}, "results.0.labels.0.id: Input should be a valid string"),
        ({"bucket": 2}, "results.0.labels.0.bucket: Input should be a valid string"),
    ],
)
def test_a_success_of_wrong_types_names_the_first(asker: Make, part: dict[str, object], named: str) -> None:
    result = {"labels": [{"id": "a", "score": 1, "bucket": "tail", "display": {}} | part], "bias_removal": 0}
    result |= {"popularity": 0, "unknown": {"exclude": 0, "allow": 0}}
    body = {"results": [result], "release": "r", "request_id": "q"}
    with pytest.raises(LongtailError) as raised:
        asker(Script(httpx.Response(200, json=body)))("retrieve", features={})
    source = "POST http://longtail.test/v1/retrieve"
    assert raised.value.message == f"expected the answer of {source}, received other content: {named}"


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("cause", "kind"), [(httpx.ConnectError, "connection"), (httpx.ReadTimeout, "timeout")])
def test_error_without_an_answer_has_its_cause(asker: Make, cause: type[httpx.TransportError], kind: str) -> None:
    with pytest.raises(NoAnswerError) as raised:
        asker(Script(cause))("label", "a/b")
    assert (raised.value.status, raised.value.type) == (None, kind)
    assert str(raised.value) == (
        f"{kind}: expected an answer from GET http://longtail.test/v1/labels/a/b, received none: "
        f"{cause.__name__}: planted"
    )
    assert isinstance(raised.value.__cause__, cause)


@pytest.mark.parametrize("features", [{"price": float("inf")}, {"price": {1}}, {"name": "\ud800"}])
def test_values_outside_json_are_not_sent(asker: Make, features: dict[str, object]) -> None:
    script = Script(RELEASE)
    with pytest.raises((ValueError, TypeError)):
        asker(script)("retrieve", features=features)
    assert script.requests == []
