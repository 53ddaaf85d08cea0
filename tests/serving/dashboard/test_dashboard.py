"""The page: one file under its policy, in colours for every eye, that shows what the service says."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from longtail.serving.dashboard import csp, page
from longtail.serving.http.schemas.monitoring import MonitoringAnswer
from longtail.serving.http.schemas.operations import ReleaseAnswer
from tests.clock import Clock
from tests.serving.dashboard.browser import render
from tests.serving.monitoring.shop import NOON, answered, chosen, count_batch, count_request, open_monitoring

PAGE = page().decode()
(STYLE,) = re.findall(r"<style>(.*?)</style>", PAGE, flags=re.DOTALL)
(SCRIPT,) = re.findall(r'<script type="module">(.*?)</script>', PAGE, flags=re.DOTALL)
METRICS = {
    name: {"value": value, "low": None, "high": None}
    for name, value in {"recall@20": 0.25, "exposure@20/head": 0.8, "coverage@20": 0.4}.items()
} | {
    "recall@20/head": {"value": 0.3, "low": 0.28, "high": 0.32},
    "recall@20/new": {"value": 0.0, "low": 0.0, "high": 0.7},
}
RELEASE: dict[str, Any] = {
    "name": "r1", "created_at": "2026-03-02T09:41:12+00:00", "model": "shop", "labels": 12, "dim": 4,
    "available": {"labels": 12, "next_change": None},
    "similarity": "dot", "temperature": 1.0, "loss": {"family": "softmax", "sampler": "in_batch", "weight": "unit"},
    "buckets": {"scheme": "quantile", "head_above": 54.0, "tail_upto": 10.0}, "proposal": "label frequencies",
    "bias_removal": {
        "default": 0.5, "minimum": -1.0, "maximum": 2.0, "chosen_by": "valid recall@20", "curve_split": "test",
        "curve": [
            {"bias_removal": at, "popularity": 0.0, "cooccurrence": 0.5, "metrics": METRICS} for at in (0.0, 0.5, 1.0)
        ],
    },
    "popularity": {"default": 0.0, "minimum": -1.0, "maximum": 2.0}, "priors": [], "filterable": [],
    "queries": None,
    "cooccurrence": {
        "default": 0.5, "minimum": 0.0, "maximum": 2.0, "kind": "next", "last": 10, "decay": 0.8, "query_id": "user_id"
    },
    "exclude_history": False, "query_features": [], "example": {"user_id": "196"}, "request_id": "r-release",
}  # fmt: skip
BECAUSE = [{"id": "p7", "share": 0.75}, {"id": "p<9>", "share": 0.25}]
EXPLAINED = {
    "taste": 2.25, "bias": 0.0, "noise": -1.0, "popularity": 0.0, "cooccurrence": 0.5, "because": BECAUSE,
    "bias_removal": [-0.25, 0.75],
}  # fmt: skip
LABELS = [
    {
        "id": "7",
        "score": 1.25,
        "bucket": "tail",
        "display": {"title": "<b>Aparajito</b>", "colour": "red", "price": 9.5, "in_stock": True},
        "explanation": EXPLAINED,
    }
]
RETRIEVED = {
    "results": [
        {"labels": LABELS, "bias_removal": 0.5, "popularity": 0.0, "cooccurrence": 0.5,
         "unknown": {"query": 0, "history": 0, "exclude": 0, "allow": 0}},
    ] * 2,
    "release": "r1", "request_id": "r-retrieve",
}  # fmt: skip


@pytest.fixture
def report(tmp_path: Path) -> dict[str, Any]:
    """What GET /v1/monitoring says of a shop whose tail gets twice what was promised."""
    clock = Clock(NOON)
    monitoring = open_monitoring(tmp_path, clock)
    count_batch(monitoring, answered([[0, 4, 8, 9]] * 400, score=0.5))
    count_request(monitoring, 200, 0.004)
    monitoring.count("shed")
    monitoring.count_choice(chosen([0, 1], [0, 4, 8, 9]))
    clock.pass_(61)
    answer = monitoring.report() | {"request_id": "r-monitoring", "staged": None}
    monitoring.close()
    return answer


@contextmanager
def serving(answers: dict[str, tuple[int, Any]]) -> Iterator[str]:
    """Serve the real page under its real policy, and canned answers by path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, answer = answers.get(self.path, (404, {"error": {"type": "unknown_route", "message": self.path}}))
            content, kind = json.dumps(answer).encode(), "application/json"
            if self.path == "/dashboard":
                status, content, kind = 200, page(), "text/html; charset=utf-8"
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Security-Policy", csp())
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/dashboard"
    server.shutdown()
    server.server_close()
    thread.join()


def text(document: str, id_: str) -> str:
    """The text of the element of an id, white space as one space; nothing of the same tag is inside it."""
    (element,) = re.findall(rf'<(\w+)[^>]* id="{id_}"[^>]*>(.*?)</\1>', document, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", element[1])).split())


@pytest.mark.process
def test_page_shows_the_report(report: dict[str, Any], tmp_path: Path) -> None:
    MonitoringAnswer.model_validate_json(json.dumps(report))
    ReleaseAnswer.model_validate_json(json.dumps(RELEASE))
    well = {"/readyz": {"status": "ready"}, "/v1/monitoring": report, "/v1/release?include=curve": RELEASE}
    with serving({path: (200, body) for path, body in (well | {"/v1/retrieve": RETRIEVED}).items()}) as url:
        document, complaints = render(url, tmp_path / "profile")
    assert complaints == []
    assert [text(document, id_) for id_ in ("state", "release", "model")] == ["Ready", "r1", "shop, 12 labels"]
    assert report["verdict"]["severity"] == "act"
    assert text(document, "severity") == "Act"
    assert text(document, "headline") == report["verdict"]["headline"]
    window = report["windows"]["1h"]
    for bucket in ("head", "torso", "tail"):
        share = window["exposures"][bucket]["share"]
        assert text(document, f"share-{bucket}") == f"{100 * share:.1f} %"
    assert text(document, "psi") == f"{window['psi']['buckets']:.2f}"
    totals = text(document, "totals")
    for figure in ("Queries 400", "Mean λ 0.50", "Coverage 33.3 %", f"Gini {report['gini']:.2f}", "Popularity 28.0"):
        assert figure in totals
    assert "0.500" in text(document, "feedback")
    assert "Turned away 1 answered 429" in text(document, "load-figures")
    assert "<b>Aparajito</b>" in text(document, "results"), "shown as text, not taken as HTML"
    reason = "In the answer from λ −0.25 to 0.75: taste 2.25, λ·log ν −1.00, ω·c 0.50"
    assert f'<li title="{reason}">' in document
    assert f'aria-label="{reason}"' in document
    assert text(document, "bar-note").startswith("Bar, from λ −1 to 2: where the label is among these 1; mark: your λ.")
    assert "7 · red · price: 9.5 · in_stock: true" in text(document, "results")
    assert 'class="old"' not in document
    assert "because of p7, p<9>" in text(document, "results")
    assert "ω 0.50" in text(document, "answer-summary")
    assert text(document, "omega-value") == "0.50"
    assert re.findall(r'class="band (\w+)"', document) == ["head"], "none of a bucket that is never found"
    charts = re.findall(r'<svg[^>]*role="img"[^>]*>', document)
    assert len(charts) >= 10
    assert all("aria-label=" in chart for chart in charts)


@pytest.mark.process
def test_a_difference_is_of_the_answers_that_the_promise_covers(tmp_path: Path) -> None:
    """Five lists are a quarter head; a restricted one, which has no promise, is head alone."""
    clock = Clock(NOON)
    monitoring = open_monitoring(tmp_path, clock)
    count_batch(monitoring, answered([[0, 4, 8, 9]] * 5, score=0.5))
    count_batch(monitoring, answered([[0, 1, 2, 3]], restrictions=["filter"]))
    clock.pass_(61)
    report = monitoring.report() | {"request_id": "r-monitoring", "staged": None}
    monitoring.close()
    window = report["windows"]["1h"]
    assert window["exposures"]["head"]["share"] == pytest.approx(9 / 24)
    assert (window["judged"]["shares"]["head"], window["judged"]["promised"]["head"]) == (0.25, 0.5)
    well = {"/readyz": {"status": "ready"}, "/v1/monitoring": report, "/v1/release?include=curve": RELEASE}
    with serving({path: (200, body) for path, body in well.items()}) as url:
        document, complaints = render(url, tmp_path / "profile")
    assert complaints == []
    assert text(document, "share-head") == "37.5 %"
    note = "25.0 % in what the promise covers, 5 of 6 answers; promised 50.0 %, −25.0 pt · "
    assert note in text(document, "share-rows")
    assert "Queries 6 the promise covers 5 of them" in text(document, "totals")


@pytest.mark.process
@pytest.mark.parametrize(
    ("status", "error", "word"),
    [
        (401, {"type": "unauthorized", "message": "expected an API key"}, "Key needed"),
        (503, {"type": "not_ready", "message": "no release is loaded yet"}, "Not ready"),
    ],
)
def test_a_refusing_service_is_reported(status: int, error: dict[str, str], word: str, tmp_path: Path) -> None:
    refused = (status, {"error": error, "request_id": "r"})
    with serving(dict.fromkeys(("/readyz", "/v1/monitoring", "/v1/release?include=curve"), refused)) as url:
        document, _ = render(url, tmp_path)
    assert text(document, "state") == word


@pytest.mark.process
def test_outdated_figures_are_grey(report: dict[str, Any], tmp_path: Path) -> None:
    well = {"/readyz": {"status": "ready"}, "/v1/monitoring": report, "/v1/release?include=curve": RELEASE}
    refused = (422, {"error": {"type": "invalid_request", "message": "expected k"}, "request_id": "r"})
    with serving({path: (200, body) for path, body in well.items()} | {"/v1/retrieve": refused}) as url:
        document, _ = render(url, tmp_path)
    assert "expected k" in text(document, "ask-error")
    assert re.search(r'<div id="answer"[^>]* class="old"', document)


def source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_policy_allows_this_style_and_this_script_only() -> None:
    directives = dict(directive.split(" ", 1) for directive in csp().split("; "))
    assert (directives["style-src"], directives["script-src"]) == (source(STYLE), source(SCRIPT))
    assert (directives["default-src"], directives["connect-src"]) == ("'none'", "'self'")
    assert (directives["require-trusted-types-for"], directives["trusted-types"]) == ("'script'", "'none'")


def test_page_parses_no_html_or_code() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|Function\(", SCRIPT)
    assert not re.search(r"\sstyle=|\son[a-z]+=", PAGE.replace(SCRIPT, ""))


@pytest.mark.process
def test_script_in_a_title_is_shown_as_text(report: dict[str, Any], tmp_path: Path) -> None:
    """Ids and titles come from data; the browser must run none of them."""
    hostile = '<script>document.title = "taken"</script><img src=x onerror="document.title = 1">'
    labels = [{**label, "id": hostile, "display": {"title": hostile}} for label in RETRIEVED["results"][0]["labels"]]
    retrieved = {**RETRIEVED, "results": [{**RETRIEVED["results"][0], "labels": labels}]}
    well = {"/readyz": {"status": "ready"}, "/v1/monitoring": report, "/v1/release?include=curve": RELEASE}
    with serving({path: (200, body) for path, body in (well | {"/v1/retrieve": retrieved}).items()}) as url:
        document, complaints = render(url, tmp_path / "profile")
    assert complaints == []
    assert "<title>taken" not in document
    assert "<title>1<" not in document
    assert "onerror=" not in re.sub(r">[^<]*<", "><", document)
    assert html.escape(hostile, quote=False) in document
    assert hostile in text(document, "results")
