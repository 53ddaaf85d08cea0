"""The status line and its banner: keys, outages, start and end of the service, swaps, and what strangers write."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest

from tests.serving.dashboard import canned
from tests.serving.dashboard.browser import Page
from tests.serving.dashboard.service import Service, refusal
from tests.serving.process import until

Opened = Callable[..., Page]
# The page waits 5 s between polls; the tests do not.
HURRY = "{ const wait = setTimeout; window.setTimeout = (work, ms) => wait(work, ms === 5000 ? 30 : ms) }"
EVIL = "<img src=x onerror=window.pwned=1><script>window.pwned=1</script>"
STATE = "document.getElementById('state').className"
BANNER = "document.getElementById('banner').textContent"


def enter(page: Page, key: str) -> None:
    page.run(f"document.getElementById('key-field').value = {key!r}")
    page.press("Enter")


def test_a_service_with_keys_asks_for_one(opened: Opened, service: Service) -> None:
    service.key = "k-123"
    page = opened("refused")
    assert page.text("#banner") == "The service wants an API key."
    assert page.run("document.activeElement.id") == "key-field"
    assert page.run("document.querySelector('#shares').checkVisibility()") is False
    enter(page, "k-999")
    page.until(BANNER, lambda text: text == "The service does not know this API key.")
    enter(page, "kälte")
    page.until(BANNER, lambda text: text.startswith("A key is made of letters"))
    enter(page, "k-123")
    page.until("document.querySelectorAll('#results li').length === 10")
    assert page.text("#banner") == ""
    assert page.run("document.querySelector('#key').checkVisibility()") is False
    assert {who for path, _, who in service.requests if path == "/v1/retrieve"} == {"Bearer k-123"}
    assert page.run("[Object.values(sessionStorage), localStorage.length, document.cookie]") == [["k-123"], 0, ""]
    page.run("document.getElementById('forget').click()")
    page.until(f"{STATE} === 'refused'")
    assert page.run("sessionStorage.length") == 0
    assert page.problems() == []


def test_an_outage_keeps_the_last_figures_and_says_so(opened: Opened, service: Service) -> None:
    page = opened(before=HURRY)
    service.lost = True
    page.until(f"{STATE} === 'lost'")
    assert page.text("#banner").startswith("The service cannot be reached. Trying again every 5 seconds. The figures")
    assert page.text("#state") == "Unreachable"
    assert page.text("#share-tail") != "–"
    service.lost = False
    page.until(f"{STATE} === 'ready'")
    assert page.text("#banner") == ""


def test_a_service_without_a_release(opened: Opened, service: Service) -> None:
    service.monitoring = lambda: refusal(503, "not_ready", "no release is loaded")
    page = opened("waiting", before=HURRY)
    assert page.text("#banner").startswith("no release is loaded. Publish a release")
    service.monitoring = lambda: (200, canned.monitoring())
    page.until(f"{STATE} === 'ready'")


def test_a_service_that_cannot_read_its_figures(opened: Opened, service: Service) -> None:
    service.monitoring = lambda: refusal(503, "storage", "expected figures that can be read, found none")
    page = opened("waiting")
    assert page.text("#banner") == "expected figures that can be read, found none."


def test_a_service_that_shuts_down(opened: Opened, service: Service) -> None:
    service.ready = lambda: refusal(503, "not_ready", "shutting down")
    page = opened("waiting")
    assert page.text("#banner") == "The service answers, but takes no queries: shutting down."
    assert page.text("#release") == canned.NEW


def test_a_hidden_tab_does_not_ask(opened: Opened, service: Service) -> None:
    page = opened(before=HURRY)
    page.until("true")
    page.run("Object.defineProperty(document, 'hidden', { get: () => window.away !== false, configurable: true })")
    page.run("document.dispatchEvent(new Event('visibilitychange'))")

    def asks_no_more() -> bool:
        """What was on its way may still come."""
        before = len(service.asked("/v1/monitoring"))
        time.sleep(0.4)
        return len(service.asked("/v1/monitoring")) == before

    until(asks_no_more, "the page to leave off asking")
    before = len(service.asked("/v1/monitoring"))
    page.run("window.away = false, document.dispatchEvent(new Event('visibilitychange'))")
    until(lambda: len(service.asked("/v1/monitoring")) > before, "the page to ask again")


def test_a_swap_is_followed(opened: Opened, service: Service) -> None:
    page = opened(before=HURRY)
    assert len(service.asked("/v1/release")) == 1
    data, release = canned.monitoring(), canned.release()
    data["release"] = release["name"] = "20260302T140000Z-next"
    release["bias_removal"] |= {"default": 0.3, "maximum": 1.0}
    service.release = lambda: (200, release)
    service.monitoring = lambda: (200, data)
    page.until("document.getElementById('answer-summary').textContent", lambda text: "λ 0.30, the default" in text)
    assert page.text("#release") == "20260302T140000Z-next"
    assert page.run("document.getElementById('lambda').max") == "1"
    assert len(service.asked("/v1/release")) == 2


def test_what_strangers_write_stays_text(opened: Opened, service: Service) -> None:
    data, release = copy.deepcopy(canned.monitoring()), canned.release()
    data["release"] = release["name"] = data["releases"][1]["name"] = EVIL
    release |= {"model": EVIL, "example": {EVIL: EVIL}}
    release["bias_removal"]["chosen_by"] = EVIL
    service.monitoring, service.release = lambda: (200, data), lambda: (200, release)
    label = {
        "id": EVIL,
        "score": 1.0,
        "bucket": "tail",
        "display": {"title": EVIL, "genres": [EVIL], "more": {"a": EVIL}},
    }
    answer = {"labels": [label], "bias_removal": 0.8, "popularity": 0.0, "unknown": {"exclude": 0, "allow": 0}}
    service.retrieve = lambda _: (200, {"results": [answer], "release": EVIL, "request_id": "r"})
    page = opened()
    assert page.text("#results b") == EVIL
    assert page.text("#release") == EVIL
    assert EVIL in page.text("#dial-lead")
    assert page.text("#history th") == EVIL
    service.retrieve = lambda _: refusal(422, "invalid_request", EVIL)
    page.run("document.getElementById('default').click()")
    page.until("document.getElementById('ask-error').textContent", lambda text: text == EVIL)
    assert page.run("[window.pwned === undefined, document.querySelectorAll('img').length]") == [True, 0]
    assert page.problems() == []


def test_the_policy_is_in_force_and_a_breach_would_be_noticed(opened: Opened) -> None:
    page = opened()
    with pytest.raises(RuntimeError, match="TrustedHTML"):
        page.run(f"document.body.innerHTML = {EVIL!r}")
    page.run("document.body.setAttribute('style', 'color: red')")
    assert page.run("getComputedStyle(document.body).color") != "rgb(255, 0, 0)"
    assert any("Content Security Policy" in problem for problem in page.problems())
