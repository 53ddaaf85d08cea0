"""What the page shows is what /v1/monitoring and /v1/release say."""

from __future__ import annotations

import copy
import itertools
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
    return f"{100 * share:.1f}\u00a0%"


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
        assert page.text(f"#share-{bucket}") == percent(share).replace("\u00a0", " ")
        assert page.run(f"document.querySelector('.bullet .{bucket}').getAttribute('width')") == f"{100 * share:.2f}%"
    assert page.text("#psi") == f"{window['psi']['buckets']:.2f}"
    assert figures(page, "totals") == {
        "Queries": f"{window['queries']:,}",
        "Mean λ": f"{window['bias_removal']:.2f}",
        "Coverage": percent(0.412),
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
        "p50": "4.32\u00a0ms",
        "p99": "14.8\u00a0ms",
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


def lines(page: Page, list_: str) -> list[list[str]]:
    """The findings of a list, as a reader sees them: severity, bucket or signal, sentence."""
    cells = "[...item.children].map((cell) => cell.innerText.trim().replaceAll('\\u00a0', ' '))"
    return page.run(f"[...document.querySelectorAll('{list_} li')].map((item) => {cells})")


def test_the_verdict_is_the_services_worst_first(opened: Opened) -> None:
    page = opened()
    told = MONITORING["verdict"]
    assert (told["severity"], told["findings"][0]["bucket"]) == ("act", "tail")
    assert page.text("#severity") == "Act"
    assert page.text("#headline") == told["headline"]
    assert "10.7 times as much" in told["headline"]
    off = [found for found in told["findings"][1:] if found["severity"] != "steady"]
    names = {"errors": "Errors", "share_drift": "Shares", "dials": "Dials"}
    assert lines(page, "#findings") == [
        ["Watch", (found["bucket"] or "").capitalize() or names[found["signal"]], found["sentence"]] for found in off
    ]
    assert len(off) == 4
    steady = sum(found["severity"] == "steady" for found in told["findings"])
    assert page.text("#steady summary") == f"{steady} findings that are steady"
    page.run("document.querySelector('#steady summary').click()")
    assert len(lines(page, "#steady")) == steady
    assert page.run("document.title") == "Act · Longtail"
    # The figures of another window, the same verdict.
    page.run("document.querySelector('[value=\"24h\"]').click()")
    assert page.text("#headline") == told["headline"]


@pytest.mark.parametrize(("severity", "word"), [("watch", "Watch"), ("unknown", "Too early"), ("steady", "Steady")])
def test_the_verdict_in_a_word(opened: Opened, service: Service, severity: str, word: str) -> None:
    findings = [found | {"severity": severity} for found in MONITORING["verdict"]["findings"][:3]]
    data = MONITORING | {"verdict": {"severity": severity, "headline": "All of 5 % is said.", "findings": findings}}
    service.monitoring = lambda: (200, data)
    page = opened()
    assert (page.text("#severity"), page.text("#headline")) == (word, "All of 5 % is said.")
    # The worst is the headline, unless all is well.
    assert (len(lines(page, "#findings")), len(lines(page, "#steady"))) == ((0, 3) if severity == "steady" else (2, 0))
    assert page.run("document.title") == ("Watch · Longtail" if severity == "watch" else "Longtail")


def test_figures_stay_with_their_signs(opened: Opened) -> None:
    page = opened(width=390)
    orphans = "document.querySelector('main').textContent.match(/[0-9] (%|ms|pt)( |$|[.,;:)])/g)"
    assert page.run(orphans) is None


def test_what_was_asked_of_the_dials(opened: Opened, service: Service) -> None:
    page = opened()
    assert page.text("#totals div:nth-child(2) small") == "62 % at 0.80, 38 % at 0.30"
    bars = "[...document.querySelectorAll('#asked-charts rect.bar')].map((bar) => Number(bar.getAttribute('height')))"
    low, high = page.run(bars)
    assert low / high == pytest.approx(38 / 62, abs=0.01)
    page.run("document.querySelector('#asked-charts summary').click()")
    queries = MONITORING["windows"]["1h"]["queries"]
    assert page.until(rows_of("#asked-charts"), lambda found: len(found) == 2) == [
        ["0.30", "38.0\u00a0%", f"{round(0.38 * queries):,}"],
        ["0.80", "62.0\u00a0%", f"{queries - round(0.38 * queries):,}"],
    ]
    assert page.run("document.querySelectorAll('#asked-charts article').length") == 1
    data = copy.deepcopy(MONITORING)
    for window in data["windows"].values():
        window["dials"]["popularity_weight"] = [{"at": -0.5, "queries": 3}]
    service.monitoring = lambda: (200, data)
    page.run("document.dispatchEvent(new Event('visibilitychange'))")
    page.until(
        "document.querySelectorAll('#asked-charts h3')[1]?.textContent",
        lambda text: text == "μ asked for, the last hour",
    )
    assert page.problems() == []


@pytest.mark.parametrize(
    ("minutes", "name", "step", "words"),
    [
        (3, "1h", 1, "since the start at 14:05, minute by minute"),
        (40, "24h", 1, "since the start at 13:28, minute by minute"),
        (100, "1h", 5, "since the start at 12:28 in steps of 5 minutes"),
        (100, "5m", 1, "the last hour, minute by minute"),
    ],
)
def test_the_charts_of_a_young_service_start_at_its_start(
    opened: Opened, service: Service, minutes: int, name: str, step: int, words: str
) -> None:
    data = copy.deepcopy(MONITORING)

    def last(values: Any) -> Any:
        if isinstance(values, dict):
            return {key: last(value) for key, value in values.items()}
        return values[-minutes:] if isinstance(values, list) else values

    data["series"] = last(data["series"])
    data["since"] = data["series"]["at"][0]
    data["releases"] = [{"name": canned.NEW, "from": data["since"], "until": None}]
    service.monitoring = lambda: (200, data)
    page = opened()
    page.run(f"document.querySelector('[value=\"{name}\"]').click()")
    assert page.text("#share-span") == f"Over time, {words}"
    spec = "document.querySelector('#share-rows .chart').spec"
    covered, first = page.run(f"(({{x, lines: [{{points}}]}}) => [x.to - x.from, points[0][0] - x.from])({spec})")
    assert covered / 60_000 == pytest.approx(60 if name == "5m" else max(5, minutes), abs=1)
    assert 0 <= first < 60_000
    at = page.run(f"{spec}.lines[0].points.map(([at]) => at)")
    assert {round((b - a) / 60_000) for a, b in itertools.pairwise(at[1:])} <= {step}
    assert page.run("document.querySelectorAll('#share-rows .chart path.line').length") == 5
    assert page.problems() == []


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
    assert page.text("#dial-lead").startswith(
        "The last hour: 62 % at 0.80, 38 % at 0.30. The default is 0.80, chosen by"
    )
    texts = "[...document.querySelectorAll('#dial-charts svg')].map((s) => [...s.querySelectorAll('text.mark')]"
    assert page.run(f"{texts}.map((t) => t.textContent))") == [["38\u00a0% at 0.30", "default 0.80"]] * 2
    assert page.run("[...document.querySelectorAll('#dial-charts h3')].map((h) => h.textContent)") == [
        "Recall@20 against λ",
        "Share of the top 20 against λ",
    ]
    assert page.run("document.querySelectorAll('#dial-charts .band').length") == 4
    page.run("document.querySelectorAll('#dial-charts summary').forEach((summary) => summary.click())")
    (first, *_, last) = page.until(rows_of("#dial-charts article:first-child"), lambda found: len(found) == 7)
    assert first == ["0.00", "0.183 (0.162–0.208)", "0.153 (0.126–0.183)", "0.291 (0.238–0.361)", "0.178 (0.067–0.286)"]
    assert last[4] == "0.000 (0.000–0.000)"
    assert page.run(rows_of("#dial-charts article:last-child"))[0] == ["0.00", *map(percent, (0.376, 0.371, 0.253))]


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
    expected = page.run(f"((c) => `${{{at}}}   head ${{{value}}}\\u00a0%`)({head})")
    assert page.run(f"{head}.querySelector('.cursor text').textContent") == expected
    page.run(f"{head}.dispatchEvent(new PointerEvent('pointerleave'))")
    assert page.run(f"{head}.querySelector('.cursor')") is None


def test_a_young_service_says_what_to_do(opened: Opened, service: Service) -> None:
    service.monitoring = lambda: (200, canned.fresh())
    service.release = lambda: (200, canned.uncharted())
    page = opened()
    assert (page.text("#severity"), page.text("#headline")) == (
        "Too early", "No queries in the last 24 hours: there is nothing to judge yet. Send one to POST /v1/retrieve.",
    )  # fmt: skip
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
    data = copy.deepcopy({**MONITORING, "baseline": None})
    for window in data["windows"].values():
        window["psi"] = {"buckets": None, "scores": None}
    data["verdict"] = canned.verdict(data["windows"], None)
    service.monitoring = lambda: (200, data)
    page = opened()
    no_baseline = "No baseline: this release was not evaluated offline. Train with a validation split to see drift."
    assert no_baseline in [page.text("#headline"), *(sentence for *_, sentence in lines(page, "#findings"))]
    assert page.run("document.querySelectorAll('.bullet .baseline').length") == 0
    assert page.problems() == []
