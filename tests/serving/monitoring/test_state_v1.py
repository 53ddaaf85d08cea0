"""State of version 1, as it was on disk on 2026-11-21, is opened for ever.

tests/fixtures/state_v1 is what two workers left: release r0 for ten minutes, then r1 with a baseline; a query batch
every ten minutes, feedback on it, a shed and a failed request, organic choices, an event whose answer never came and
one that is pending still. Its files are never written again. `report.json` is what the code that wrote them said of
them at 12:00:20 UTC; rings are mostly zeros, so they are kept compressed.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from longtail.serving import create_app
from longtail.serving.monitoring import LiveFigures
from tests.serving.client import client_of
from tests.serving.monitoring.shop import BASELINE, BUCKETS, COUNTS, NOON, Clock, answered
from tests.serving.plane import plane_retriever, plane_settings

FIXTURE = Path(__file__).parents[2] / "fixtures" / "state_v1"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A copy of the fixture as the service left it."""
    root = tmp_path / "state"
    shutil.copytree(FIXTURE, root)
    for compressed in root.rglob("*.gz"):
        compressed.with_suffix("").write_bytes(gzip.decompress(compressed.read_bytes()))
        compressed.unlink()
    return root


@pytest.mark.parametrize("worker", [0, 1, 2])
def test_the_report_is_what_it_was(state: Path, worker: int) -> None:
    live = LiveFigures(state, worker=worker, max_answers=1000, clock=Clock(NOON + 20))
    live.begin_release("r1", BUCKETS, BASELINE)
    report = live.report()
    live.close()
    # Of μ, which it did not know, there was none.
    for figures in (report["baseline"], *report["windows"].values()):
        assert figures.pop("popularity_weight") == 0
    # Of settings of the dials one by one, of what shares rest on, of answers dropped and of a verdict it knew nothing.
    assert report.pop("verdict")["findings"][0]["signal"] == "score_drift"
    assert [report["baseline"].pop(name) for name in ("queries", "telling", "coverage")] == [0, None, None]
    for figures in report["windows"].values():
        assert figures.pop("dials") == {"bias_removal": [], "popularity_weight": []}
        assert figures.pop("dropped") == 0
        assert {of.pop("telling") for of in figures["exposures"].values()} == {figures["queries"]}
    # Labels without training pairs were tail.
    assert report["baseline"]["shares"].pop("new") == 0
    for figures in report["windows"].values():
        assert figures["exposures"].pop("new") == {"count": 0, "share": 0, "coverage": 0}
    of_series = report["series"]
    for recall in (of_series["recall"], *(figures["recall"] for figures in report["windows"].values())):
        for of in recall.values():
            none = of.pop("new")
            assert none == [None] * len(of_series["at"]) or none["positives"] == 0
    assert set(of_series["share"].pop("new")) <= {0, None}
    assert report == json.loads((FIXTURE / "report.json").read_text())
    # Nothing was put aside and begun anew.
    assert not list(state.rglob("*.aside"))


def test_the_figures_by_hand(state: Path) -> None:
    live = LiveFigures(state, max_answers=1000, clock=Clock(NOON + 20))
    live.begin_release("r1", BUCKETS, BASELINE)
    figures = live.report()["windows"]["24h"]
    registry = CollectorRegistry()
    registry.register(live)
    series = generate_latest(registry).decode()
    live.close()
    # Two workers, eleven times four queries of 5 head, 3 torso and 3 tail labels; then one query of 2 head and 1 tail.
    assert figures["queries"] == 2 * 11 * 4 + 1
    assert {name: of["count"] for name, of in figures["exposures"].items()} == {
        "head": 2 * 11 * 5 + 2,
        "torso": 2 * 11 * 3,
        "tail": 2 * 11 * 3 + 1,
        "new": 0,
    }
    assert figures["bias_removal"] == pytest.approx((11 * 4 * 0.25 + 11 * 4 * 0.5 + 0.5) / 89)
    exposed = sum(COUNTS[[0, 4, 8, 1, 5, 2, 3, 0, 9]]) * 22 + 11 * 2 * COUNTS[6] + 2 * COUNTS[0] + COUNTS[10]
    assert figures["popularity"] == pytest.approx(exposed / 245)
    # item-4 was answered and item-7 was not, eleven times, and once it was; item-1 was, eleven times.
    feedback = figures["recall"]["feedback"]
    assert (feedback["torso"]["positives"], feedback["torso"]["hits"]) == (23, 12)
    assert (feedback["head"]["positives"], feedback["head"]["hits"]) == (11, 11)
    shadow = figures["recall"]["shadow"]["tail"]
    assert (shadow["positives"], shadow["hits"]) == (3, 1)
    requests = figures["requests"]
    assert (requests["count"], requests["errors"], requests["shed"]) == (23, 1, 2)
    for line in (
        'longtail_feedback_events_total{kind="answer"} 26.0',
        'longtail_feedback_events_total{kind="organic"} 2.0',
        "longtail_feedback_unmatched_total 1.0",
    ):
        assert line in series


def test_the_state_goes_on(state: Path) -> None:
    clock = Clock(NOON + 20)
    live = LiveFigures(state, max_answers=1000, clock=clock)
    live.begin_release("r1", BUCKETS, BASELINE)
    live.flush()  # as its thread may have by now, which then looks for older events again in five seconds
    # The event that is pending in the fixture names an answer that comes only now.
    live.count_answers(answered([[3]], names=["nobody"]))
    live.count_request(0.001, 200)
    clock.pass_(5)
    live.flush()
    clock.pass_(1)
    figures = live.report()["windows"]["24h"]
    live.close()
    assert (figures["queries"], figures["requests"]["count"]) == (90, 24)
    head = figures["recall"]["feedback"]["head"]
    assert (head["positives"], head["hits"]) == (12, 12)
    with closing(sqlite3.connect(state / "feedback.sqlite")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (5,)
        assert connection.execute("SELECT state, count(*) FROM feedback GROUP BY state ORDER BY state").fetchall() == [
            (1, 38),
            (2, 1),
        ]


def test_the_service_takes_it_over(state: Path, tmp_path: Path) -> None:
    app = create_app(plane_settings(tmp_path, state=state), retriever=plane_retriever("r2"))
    with client_of(app) as client:
        report, series = client.get("/v1/monitoring").json(), client.get("/metrics").text
    assert [release["name"] for release in report["releases"]] == ["r0", "r1", "r2"]
    assert report["releases"][0] == {"name": "r0", "from": "2023-11-15T10:00:00Z", "until": "2023-11-15T10:10:00Z"}
    assert report["releases"][1]["from"] == "2023-11-15T10:10:00Z"
    for line in (
        'longtail_feedback_events_total{kind="answer"} 26.0',
        'longtail_feedback_events_total{kind="organic"} 2.0',
    ):
        assert line in series
    assert not list(state.rglob("*.aside"))
