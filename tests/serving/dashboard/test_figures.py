"""What the page shows is what /v1/monitoring and /v1/release say."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from longtail.serving.http.schemas.monitoring import MonitoringAnswer
from longtail.serving.http.schemas.operations import ReleaseAnswer
from tests.serving.dashboard import canned
from tests.serving.dashboard.browser import Page
from tests.serving.dashboard.service import Service

Opened = Callable[..., Page]
MONITORING = canned.monitoring()
CHART = "document.querySelectorAll('.chart')"


def test_the_canned_answers_are_the_services() -> None:
    for answer in (MONITORING, canned.fresh()):
        MonitoringAnswer.model_validate_json(json.dumps(answer))
    ReleaseAnswer.model_validate_json(json.dumps(canned.release()))


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def rows(page: Page, table: str) -> list[list[str]]:
    cells = "[...row.children].map((cell) => cell.innerText.trim())"
    return page.run(f"[...document.querySelectorAll('{table} tbody tr')].map((row) => {cells})")


def figures(page: Page, id_: str) -> dict[str, str]:
    pair = "[entry.firstChild.textContent, entry.lastChild.firstChild.textContent]"
    return page.run(f"Object.fromEntries([...document.querySelectorAll('#{id_} div')].map((entry) => {pair}))")


@pytest.mark.parametrize("name", ["5m", "1h", "24h"])
def test_figures_of_a_window(opened: Opened, name: str) -> None:
    page = opened()
    page.run(f"document.querySelector('[value=\"{name}\"]').click()")
    window = MONITORING["windows"][name]
    for bucket in canned.BUCKETS:
        share = window["exposures"][bucket]["share"]
        assert page.text(f"#share-{bucket}") == percent(share)
        assert page.run(f"document.querySelector('.bullet .{bucket}').getAttribute('width')") == f"{100 * share:.2f}%"
    assert page.text("#psi") == f"{window['psi']['buckets']:.2f}"
    assert figures(page, "totals") == {
        "Queries": f"{window['queries']:,}",
        "Mean λ": f"{window['bias_removal']:.2f}",
        "Coverage": "41.2 %",
        "Gini": "0.83",
        "Popularity": "151.4",
        "Score PSI": "0.04",
    }
    for source in ("feedback", "shadow"):
        expected = window["recall"][source]
        assert rows(page, f"#{source} .intervals") == [
            [
                kind.capitalize(),
                f"{expected[kind]['value']:.3f}",
                "",
                f"{expected[kind]['low']:.3f}–{expected[kind]['high']:.3f}",
                f"{expected[kind]['hits']:,} / {expected[kind]['positives']:,}",
            ]
            for kind in ("all", "head", "torso", "tail", "new")
        ]
    assert figures(page, "load-figures") == {
        "Requests": f"{window['requests']['count']:,}",
        "p50": "4.32 ms",
        "p99": "14.8 ms",
        "Shed": f"{window['requests']['shed']:,}",
        "Errors": "2",
    }
    assert page.problems() == []


def test_status_and_releases(opened: Opened) -> None:
    page = opened()
    assert page.text("#state") == "Ready"
    assert page.text("#release") == canned.NEW
    assert page.text("#model") == "movielens-100k, 1,682 labels"
    assert page.text("#since") == "2 Mar 09:42, 4 h 25 min"
    assert rows(page, "#releases") == [
        [canned.NEW, "2 Mar 09:42", "now", "4 h 25 min"],
        [canned.OLD, "1 Mar 22:01", "2 Mar 09:42", "11 h 41 min"],
    ]
    assert figures(page, "label-figures") == {"Labels added": "17", "Labels hidden": "3"}


@pytest.mark.parametrize(
    ("tail", "psi", "sentence"),
    [
        (0.006, 0.02, "Steady. The shares are what the release promised (PSI 0.02)."),
        (0.04, 0.1, "Shifted. Tail gets 4.0 % of the answers where the release promised 0.5 % (PSI 0.10)."),
        (0.04, 0.25, "Shifted. Tail gets 4.0 % of the answers where the release promised 0.5 % (PSI 0.25)."),
        (0.09, 0.31, "Drifted. Tail gets 9.0 % of the answers where the release promised 0.5 % (PSI 0.31)."),
        (0.09, None, "Too few answers in the last hour to tell a drift."),
        (0.0, 0.26, "Drifted. Tail gets 0.0 % of the answers where the release promised 0.5 % (PSI 0.26)."),
    ],
)
def test_drift_in_words(opened: Opened, service: Service, tail: float, psi: float | None, sentence: str) -> None:
    data = copy.deepcopy(MONITORING)
    data["windows"]["1h"]["exposures"]["tail"]["share"] = tail
    data["windows"]["1h"]["exposures"]["new"]["share"] = 0.0
    data["windows"]["1h"]["exposures"]["torso"]["share"] = 0.1369
    data["windows"]["1h"]["exposures"]["head"]["share"] = 0.8631 - tail
    data["windows"]["1h"]["psi"]["buckets"] = psi
    service.monitoring = lambda: (200, data)
    assert opened().text("#verdict") == sentence


def test_shares_over_time_with_baseline_swap_and_window(opened: Opened) -> None:
    page = opened()
    tail = "document.querySelectorAll('#share-rows .chart')[2]"
    assert page.run(f"{tail}.spec.levels[0].at") == 0.0052
    assert page.run(f"{tail}.spec.marks.map(({{at}}) => at)") == [canned.SWAPPED.timestamp() * 1000]
    assert page.run(f"{tail}.querySelectorAll('line.level, line.swap, rect.shade').length") == 3
    page.run("document.querySelector('#share-table summary').click()")
    shown = {row[0]: row for row in page.until(rows_of("#share-table"), bool)}
    series = MONITORING["series"]
    at = [i for i, text in enumerate(series["at"]) if text[:16] in [f"2026-03-02T13:0{m}" for m in range(5)]]
    queries = [series["queries"][i] for i in at]
    weighted = sum(n * series["share"]["tail"][i] for n, i in zip(queries, at, strict=True)) / sum(queries)
    assert shown["2 Mar 13:00"][1] == f"{sum(queries):,}"
    assert shown["2 Mar 13:00"][4] == percent(weighted)
    assert len(shown) == 73  # 6 hours of 5 minutes, the first and the last cut


def rows_of(table: str) -> str:
    return f"[...document.querySelectorAll('{table} tbody tr')].map((row) => [...row.children].map((c) => c.innerText))"


def test_the_curve_with_its_intervals_default_and_todays_setting(opened: Opened) -> None:
    page = opened()
    assert page.text("#dial-lead").startswith("Mean λ in the last hour: 0.61; the default is 0.80, chosen by valid")
    texts = "[...document.querySelectorAll('#dial-charts svg')].map((s) => [...s.querySelectorAll('text.mark')]"
    assert page.run(f"{texts}.map((t) => t.textContent))") == [["now 0.61", "default 0.80"]] * 2
    assert page.run("[...document.querySelectorAll('#dial-charts h3')].map((h) => h.textContent)") == [
        "Recall@20 against λ",
        "Share of the top 20 against λ",
    ]
    assert page.run("document.querySelectorAll('#dial-charts .band').length") == 4
    page.run("document.querySelectorAll('#dial-charts summary').forEach((summary) => summary.click())")
    (first, *_, last) = page.until(rows_of("#dial-charts article:first-child"), lambda found: len(found) == 7)
    assert first == ["0.00", "0.183 (0.162–0.208)", "0.153 (0.126–0.183)", "0.291 (0.238–0.361)", "0.178 (0.067–0.286)"]
    assert last[4] == "0.000 (0.000–0.000)"
    assert page.run(rows_of("#dial-charts article:last-child"))[0] == ["0.00", "37.6 %", "37.1 %", "25.3 %"]


def test_a_gap_in_the_traffic_is_a_gap_in_the_line(opened: Opened, service: Service) -> None:
    data = copy.deepcopy(MONITORING)

    def without(values: Any) -> Any:
        if isinstance(values, dict):
            return {key: without(value) for key, value in values.items()}
        return values[:1380] + values[1410:] if isinstance(values, list) else values

    data["series"] = without(data["series"])
    service.monitoring = lambda: (200, data)
    assert opened().run("document.querySelectorAll('#share-rows .chart')[1].querySelectorAll('path.line').length") == 2


def test_pointing_at_a_chart_reads_it_off(opened: Opened) -> None:
    page = opened()
    head = "document.querySelector('#share-rows .chart')"
    page.run(f"{head}.dispatchEvent(new PointerEvent('pointermove', {{clientX: innerWidth}}))")
    at = "new Date(c.spec.lines[0].points.at(-1)[0]).toISOString().slice(11, 16)"
    value = "(100 * c.spec.lines[0].points.at(-1)[1]).toFixed(1)"
    expected = page.run(f"((c) => `${{{at}}}   head ${{{value}}} %`)({head})")
    assert page.run(f"{head}.querySelector('.cursor text').textContent") == expected
    page.run(f"{head}.dispatchEvent(new PointerEvent('pointerleave'))")
    assert page.run(f"{head}.querySelector('.cursor')") is None


def test_a_young_service_says_what_to_do(opened: Opened, service: Service) -> None:
    service.monitoring = lambda: (200, canned.fresh())
    service.release = lambda: (200, canned.uncharted())
    page = opened()
    assert page.text("#verdict").startswith("No queries in the last hour. Send one to POST /v1/retrieve")
    assert "POST /v1/feedback" in page.text("#feedback .empty")
    assert "POST /v1/feedback" in page.text("#shadow .empty")
    assert page.text("#dial-lead") == "The default is 0.80, chosen by the recipe, for want of validation data."
    assert page.text("#dial-charts").startswith("No curve: this release was not evaluated offline. Train with")
    assert page.text("#load-charts").startswith("No requests yet")
    assert "NaN" not in page.text("main")
    assert page.problems() == []
    service.monitoring = lambda: (200, MONITORING)
    service.release = lambda: (200, canned.release())
    page.run("document.dispatchEvent(new Event('visibilitychange'))")
    page.until("document.querySelectorAll('#load-charts svg, #feedback .chart svg').length === 3")
    assert page.problems() == []


def test_traffic_without_a_baseline(opened: Opened, service: Service) -> None:
    data = {**MONITORING, "baseline": None}
    for window in data["windows"].values():
        window["psi"] = {"buckets": None, "scores": None}
    service.monitoring = lambda: (200, data)
    page = opened()
    assert page.text("#verdict").startswith("No baseline: this release was not evaluated offline. Train with")
    assert page.run("document.querySelectorAll('.bullet .baseline').length") == 0
    assert page.problems() == []
