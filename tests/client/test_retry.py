"""The policy, worked by hand: first wait up to 0.1 s, doubled each time, up to 5 s."""

from __future__ import annotations

import httpx
import pytest

from longtail.client.transport import may_repeat, retry_after, seconds_to_wait

RESPONSE = {status: httpx.Response(status) for status in (200, 400, 404, 409, 422, 429, 500, 502, 503, 504)}


@pytest.mark.parametrize("status", RESPONSE)
def test_429_and_503_alone_are_repeated(status: int) -> None:
    assert may_repeat(RESPONSE[status], "any", repeatable=True) == (status in (429, 503))


@pytest.mark.parametrize(
    ("error", "repeatable", "unrepeatable"),
    [
        (httpx.ConnectError, True, True),
        (httpx.ConnectTimeout, True, True),
        (httpx.PoolTimeout, True, True),
        (httpx.ReadError, True, False),
        (httpx.WriteError, True, False),
        (httpx.ReadTimeout, True, False),
        (httpx.WriteTimeout, True, False),
        (httpx.RemoteProtocolError, True, False),
        (httpx.LocalProtocolError, False, False),
        (httpx.UnsupportedProtocol, False, False),
        (httpx.DecodingError, False, False),
    ],
)
def test_what_may_have_been_taken_is_repeated_only_if_twice_does_what_once_does(
    error: type[httpx.RequestError], repeatable: bool, unrepeatable: bool
) -> None:
    assert may_repeat(error("planted"), None, repeatable=True) == repeatable
    assert may_repeat(error("planted"), None, repeatable=False) == unrepeatable


@pytest.mark.parametrize(
    ("status", "kind", "repeated"),
    [
        (429, "queue_full", True),
        (429, "http_429", True),
        (503, "not_ready", True),
        (503, "timeout", False),
        (503, "http_503", False),
        (409, "not_ready", False),
    ],
)
def test_an_interaction_is_repeated_only_if_it_was_surely_not_taken(status: int, kind: str, repeated: bool) -> None:
    assert may_repeat(RESPONSE[status], kind, repeatable=False) == repeated


@pytest.mark.parametrize(("attempt", "ceiling"), [(0, 0.1), (1, 0.2), (2, 0.4), (5, 3.2), (6, 5.0), (5000, 5.0)])
def test_backoff_doubles_up_to_five_seconds_with_full_jitter(attempt: int, ceiling: float) -> None:
    for outcome in (RESPONSE[503], httpx.ConnectError("planted")):
        for draw in (0.0, 0.25, 0.999):
            assert seconds_to_wait(outcome, attempt, now=0, draw=draw) == pytest.approx(draw * ceiling)


def test_never_earlier_than_the_service_asks() -> None:
    response = httpx.Response(429, headers={"Retry-After": "7"})
    assert seconds_to_wait(response, 0, now=0, draw=0.0) == 7
    assert seconds_to_wait(response, 1, now=0, draw=0.5) == pytest.approx(7.1)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0),
        (" 12 ", 12),
        ("9" * 5000, 999_999_999),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 37),
        ("Sun, 06 Nov 1994 10:49:37 +0200", 37),
        ("Sun, 06 Nov 1994 08:48:00 GMT", 0),
        ("", 0),
        ("soon", 0),
        ("-5", 0),
        ("1.5", 0),
        ("inf", 0),
        ("٣", 0),
        ("Sun, 99 Nov 1994 08:49:37 GMT", 0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str, seconds: float) -> None:
    eight_forty_nine = 784_111_740.0  # 1994-11-06T08:49:00Z: 9075 days, 8 h and 49 min after the epoch
    assert eight_forty_nine == ((9075 * 24 + 8) * 60 + 49) * 60
    assert retry_after(value, eight_forty_nine) == seconds
