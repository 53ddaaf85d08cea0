"""The query box: the slider asks again, late answers are dropped, errors are told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from longtail.serving.http.schemas.retrieval import RetrieveRequest
from tests.serving.dashboard import canned
from tests.serving.dashboard.browser import Page
from tests.serving.dashboard.service import Answer, Service, refusal

Opened = Callable[..., Page]
SUMMARY = "document.getElementById('answer-summary').textContent"


def set_(page: Page, id_: str, value: object) -> None:
    page.run(
        f"((field) => {{ field.value = {json.dumps(value)}; field.dispatchEvent(new Event('input')) }})"
        f"(document.getElementById('{id_}'))"
    )


def shown(page: Page) -> list[list[str]]:
    cells = "[...row.children].map((cell) => cell.innerText.trim())"
    return page.run(f"[...document.querySelectorAll('#results li')].map((row) => {cells})")


def test_the_release_example_is_asked_first(opened: Opened, service: Service) -> None:
    page = opened()
    assert service.asked("/v1/retrieve") == [
        {"queries": [{"features": canned.release()["example"], "k": 10, "bias_removal": 0.8}], "preview": True}
    ]
    assert page.run(SUMMARY) == "4 head · 3 torso · 3 tail · 0 new at λ 0.80, the default"
    range_ = page.run("((l) => [l.min, l.max, l.value])(document.getElementById('lambda'))")
    assert range_ == ["-1", "2", "0.8"]
    assert shown(page)[0] == ["1", "", "World of Apu, The (Apur Sansar) (1959) 1512 · Drama", "tail", "2.63"]


def test_the_slider_asks_again_from_the_keyboard_and_shows_moves(opened: Opened, service: Service) -> None:
    page = opened()
    page.run("document.getElementById('lambda').focus()")
    page.press("ArrowRight")
    page.until(SUMMARY, lambda text: "λ 0.81" in text)
    asked = service.asked("/v1/retrieve")[-1]
    assert [query["bias_removal"] for query in asked["queries"]] == [0.81, 0.8]
    assert RetrieveRequest.model_validate_json(json.dumps(asked)).preview
    set_(page, "lambda", 2)
    page.until(SUMMARY, lambda text: "λ 2.00" in text)
    default = [label["id"] for label in canned.ranked(0.8, 10)]
    expected = []
    for rank, label in enumerate(canned.ranked(2, 10)):
        before = default.index(label["id"]) if label["id"] in default else None
        by = 0 if before is None else before - rank
        mark = f"▲ up {by}" if by > 0 else f"▼ down {-by}" if by < 0 else ""
        expected.append(["new" if before is None else mark, label["display"]["title"], label["bucket"]])
    found = [[row[1].replace("\n", " "), row[2], row[3]] for row in shown(page)]
    assert [[mark, bucket] for mark, _, bucket in found] == [[mark, bucket] for mark, _, bucket in expected]
    assert all(what.startswith(title) for (_, what, _), (_, title, _) in zip(found, expected, strict=True))
    assert {mark[:1] for mark, *_ in found} >= {"▲", "▼", "n"}


def test_the_prior_is_asked_beside_the_slider_and_the_button_takes_both_back(opened: Opened, service: Service) -> None:
    page = opened()
    range_ = page.run("((mu) => [mu.min, mu.max, mu.value])(document.getElementById('mu'))")
    assert range_ == ["-1", "2", "0"]
    set_(page, "mu", -0.5)
    page.until(SUMMARY, lambda text: "at λ 0.80, μ -0.50; moves against the default, 0.80" in text.replace("−", "-"))
    asked = service.asked("/v1/retrieve")[-1]
    dials = [(query["bias_removal"], query.get("popularity")) for query in asked["queries"]]
    assert dials == [(0.8, -0.5), (0.8, None)]
    page.run("document.getElementById('default').click()")
    page.until(SUMMARY, lambda text: text.endswith("at λ 0.80, the default"))
    assert page.run("document.getElementById('mu').value") == "0"


def test_sliding_asks_once_it_pauses(opened: Opened, service: Service) -> None:
    count = "window.waits = []; window.setTimeout = (work, ms) => { waits.push(ms); return wait(work, ms) }"
    page = opened(before=f"{{ const wait = setTimeout; {count} }}")
    before = len(service.asked("/v1/retrieve"))
    slide = "[0.1, 0.2, 0.3, 0.4].forEach((at) => { l.value = at; l.dispatchEvent(new Event('input')) })"
    page.run(f"((l) => {slide})(document.getElementById('lambda'))")
    assert page.text("#lambda-value") == "0.40"
    page.until(SUMMARY, lambda text: "λ 0.40" in text)
    assert len(service.asked("/v1/retrieve")) == before + 1
    assert page.run("waits.filter((ms) => ms === 120).length") == 4


def test_a_late_answer_is_dropped(opened: Opened, service: Service) -> None:
    page = opened()
    release, answered = threading.Event(), threading.Event()

    def slow(body: dict[str, Any]) -> Answer:
        if body["queries"][0]["bias_removal"] == 0.1:
            release.wait(10)
            answered.set()
        return 200, canned.retrieved(body)

    service.retrieve = slow
    set_(page, "lambda", 0.1)
    page.run("document.querySelector('#ask [type=submit]').click()")
    set_(page, "lambda", 0.2)
    page.run("document.querySelector('#ask [type=submit]').click()")
    page.until(SUMMARY, lambda text: "λ 0.20" in text)
    release.set()
    assert answered.wait(10)
    page.run("fetch('/readyz').then((answer) => answer.json())")  # the late answer came before this one
    page.run("new Promise((done) => setTimeout(done, 50))")
    assert "λ 0.20" in page.run(SUMMARY)


def test_what_cannot_be_asked_is_told_and_not_sent(opened: Opened, service: Service) -> None:
    page = opened()
    before = len(service.asked("/v1/retrieve"))
    error = "document.getElementById('ask-error').textContent"
    set_(page, "features", '{"user_id": ')
    page.until(error, lambda text: text.startswith("Features: expected JSON."))
    assert page.run("document.getElementById('features').getAttribute('aria-invalid')") == "true"
    set_(page, "features", "[1]")
    page.until(error, lambda text: text == 'Features: expected an object such as {"user_id": "u42"}.')
    set_(page, "features", "{}")
    page.until(error, lambda text: text == "")
    assert page.run("document.getElementById('features').getAttribute('aria-invalid')") == "false"
    set_(page, "k", "")
    page.until(error, lambda text: text == 'k: expected a whole number from 1, received "".')
    assert len(service.asked("/v1/retrieve")) == before + 1
    assert len(shown(page)) == 10
    assert page.problems() == []


def test_the_services_own_words_are_shown(opened: Opened, service: Service) -> None:
    page = opened()
    message = "expected an id, received a list"
    service.retrieve = lambda _: (
        422,
        {"error": {"type": "invalid_request", "message": message, "field": "queries.0.features.user_id"}},
    )
    set_(page, "k", 3)
    error = page.until("document.getElementById('ask-error').textContent")
    assert error == f"queries.0.features.user_id: {message}"
    service.retrieve = lambda _: refusal(429, "queue_full", "expected room in the queue")
    set_(page, "k", 4)
    page.until("document.getElementById('ask-error').textContent", lambda text: text == "expected room in the queue")
    service.retrieve = lambda body: (200, canned.retrieved(body))
    page.run("document.getElementById('default').click()")
    page.until("document.querySelectorAll('#results li').length === 4")
    assert page.text("#ask-error") == ""
