from __future__ import annotations

import errno
import fcntl
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtail.serving.errors import NotReadyError
from longtail.serving.monitoring import LiveFigures, Promises, measure_baseline, ring
from longtail.serving.monitoring.ring import MinuteRing, by_minute, total
from tests.serving.monitoring.shop import BASELINE, BUCKETS, COUNTS, NOON, Clock, answered

Opening = Callable[..., LiveFigures]


def window(live: LiveFigures, name: str, clock: Clock) -> dict[str, Any]:
    """A report that is not the one cached."""
    clock.pass_(1)
    figures: dict[str, Any] = live.report()["windows"][name]
    return figures


def test_figures_by_hand(live: LiveFigures, clock: Clock) -> None:
    live.count_answers(answered([[0, 1, 4], [0, 8]], bias_removal=0.25, score=1.5))
    live.count_answers(answered([[0]], bias_removal=1.0, popularity=-1.5, score=9.0))
    live.count_requests([(200, 0.004)])
    live.count_requests([(503, 0.004)])
    live.count("shed")
    for name in ("5m", "1h", "24h"):
        figures = window(live, name, clock)
        assert figures["queries"] == 3
        assert figures["bias_removal"] == pytest.approx(0.5)
        assert figures["popularity_weight"] == pytest.approx(-0.5)
        counts = {name: of["count"] for name, of in figures["exposures"].items()}
        assert counts == {"head": 4, "torso": 1, "tail": 1, "new": 0}
        assert figures["exposures"]["head"] == {
            "count": 4,
            "share": pytest.approx(4 / 6),
            "coverage": 2 / 4,
        }
        assert figures["coverage"] == pytest.approx(4 / 12)
        assert figures["popularity"] == pytest.approx((4 * 100 + 10 + 1) / 6)
        assert figures["judged"]["scores"] == [0, 5, 0, 0, 0, 0, 0, 0, 0, 1]
        assert figures["psi"] == {"buckets": None, "scores": None}
        assert (figures["requests"]["count"], figures["requests"]["errors"], figures["requests"]["shed"]) == (2, 1, 1)
        assert 3 < figures["requests"]["p50_ms"] < 5
    # Exposures of the twelve: eight 0, three 1, one 3.
    assert live.report()["gini"] == pytest.approx(2 * (9 + 10 + 11 + 12 * 3) / (12 * 6) - 13 / 12)


def test_restricted_answers_are_shown_and_not_judged(live: LiveFigures, clock: Clock) -> None:
    live.count_answers(answered([[0, 4]], score=2.5))
    live.count_answers(answered([[8, 9, 10]], restrictions=["buckets"]))
    figures = window(live, "5m", clock)
    assert (figures["queries"], figures["exposures"]["tail"]["count"]) == (2, 3)
    assert figures["restricted"] == {"queries": 1, "buckets": 1, "allow": 0, "filter": 0}
    assert {name: of for name, of in figures["judged"].items() if name != "recall"} == {
        "queries": 1, "labels": 2, "shares": {"head": 0.5, "torso": 0.5, "tail": 0.0, "new": 0.0},
        "promised": {"head": 0.5, "torso": 0.25, "tail": 0.25, "new": 0.0},
        "scores": [0, 0, 2, 0, 0, 0, 0, 0, 0, 0],
    }  # fmt: skip


def test_gini_is_of_today_and_yesterday(live: LiveFigures, clock: Clock) -> None:
    live.count_answers(answered([[0]]))
    clock.pass_(86_400)
    live.count_answers(answered([[0, 1]]))
    clock.pass_(1)
    # Ten 0, one 1, one 2; then ten 0, one 1, one 1; then one 2 alone.
    assert live.report()["gini"] == pytest.approx(2 * (11 + 12 * 2) / (12 * 3) - 13 / 12)
    clock.pass_(86_400)
    live.count_answers(answered([[5], [5]]))
    assert live.report()["gini"] == pytest.approx(2 * (9.5 * 0 + 10 + 11 + 12 * 2) / (12 * 4) - 13 / 12)
    clock.pass_(3 * 86_400)
    assert live.report()["gini"] is None


def test_new_labels_count_with_the_tail_in_the_drift(live: LiveFigures, clock: Clock) -> None:
    """The baseline knows no label that was added since: each would be a shift of its own."""
    live.count_answers(answered([[0, 0, 4, 12]] * 50))
    figures = window(live, "5m", clock)
    assert (figures["exposures"]["new"]["share"], figures["psi"]["buckets"]) == (0.25, 0)
    assert live.report()["series"]["psi"] == [0]


@pytest.mark.parametrize(
    ("name", "still", "gone"), [("5m", 3 * 60, 5 * 60), ("1h", 49 * 60, 60 * 60), ("24h", 20 * 3600, 24 * 3600)]
)
def test_windows_roll(live: LiveFigures, clock: Clock, name: str, still: float, gone: float) -> None:
    live.count_answers(answered([[0, 4, 8]]))
    live.count_requests([(200, 0.001)])
    clock.now = NOON + still
    figures = window(live, name, clock)
    assert (figures["queries"], figures["coverage"], figures["requests"]["count"]) == (1, 3 / 12, 1)
    clock.now = NOON + gone
    figures = window(live, name, clock)
    assert (figures["queries"], figures["coverage"], figures["requests"]["count"]) == (0, 0, 0)
    assert figures["exposures"]["head"]["share"] is None


def test_workers_add_up(open_live: Opening, clock: Clock) -> None:
    first, second = open_live(worker=0), open_live(worker=1)
    first.count_answers(answered([[0, 1]]))
    second.count_answers(answered([[0, 8]]))
    second.count_requests([(200, 0.001)])
    for live in (first, second):
        figures = window(live, "1h", clock)
        assert (figures["queries"], figures["requests"]["count"]) == (2, 1)
        assert figures["coverage"] == pytest.approx(3 / 12)
        assert figures["exposures"]["head"]["count"] == 3


def test_a_restart_goes_on(open_live: Opening, clock: Clock) -> None:
    first = open_live()
    first.count_answers(answered([[0, 4, 8]]))
    first.count_requests([(200, 0.001)])
    since = first.report()["since"]
    first.close()
    clock.pass_(60)
    second = open_live()
    second.count_answers(answered([[0]]))
    report = second.report()
    figures = report["windows"]["5m"]
    assert report["since"] == since
    assert (figures["queries"], figures["requests"]["count"], figures["coverage"]) == (2, 1, 3 / 12)


def test_windows_are_of_the_release_in_service(live: LiveFigures, clock: Clock) -> None:
    live.count_answers(answered([[0]]))
    clock.pass_(120)
    live.begin_release("r2", BUCKETS, None)
    live.count_answers(answered([[4], [5]], release="r2"))
    live.count_answers(answered([[1]], release="r1"))
    report = live.report()
    assert report["windows"]["5m"]["queries"] == 2
    assert report["windows"]["5m"]["exposures"]["head"]["count"] == 0
    assert report["baseline"] is None
    assert report["windows"]["5m"]["psi"] == {"buckets": None, "scores": None}
    assert report["series"]["queries"] == [1, 3]
    assert report["series"]["release"] == ["r1", "r2"]
    assert report["since"] == "2023-11-15T12:02:00Z"


def test_the_series_by_minute(live: LiveFigures, clock: Clock) -> None:
    clock.pass_(30)
    live.count_answers(answered([[0, 0, 4, 8]] * 50, bias_removal=1.0))
    clock.pass_(120)
    live.count_requests([(200, 0.004)])
    series = live.report()["series"]
    assert series["at"] == ["2023-11-15T12:00:00Z", "2023-11-15T12:02:00Z"]
    assert series["queries"] == [50, 0]
    assert series["share"] == {"head": [0.5, None], "torso": [0.25, None], "tail": [0.25, None], "new": [0, None]}
    assert series["psi"] == [0, None]
    assert series["bias_removal"] == [1, None]
    # The minute under way is thirty seconds old.
    assert series["requests_per_second"] == [0, pytest.approx(1 / 30)]
    assert series["p50_ms"][0] is None
    assert series["release"] == ["r1", "r1"]


def test_no_report_before_a_release(open_live: Opening) -> None:
    live = open_live(begin=False)
    live.count_requests([(503, 0.1)])
    live.count("shed")
    with pytest.raises(NotReadyError, match="no release"):
        live.report()


def test_reports_are_a_second_old_at_most(live: LiveFigures, clock: Clock) -> None:
    before = live.report()["windows"]["5m"]["queries"]
    live.count_answers(answered([[0]]))
    clock.pass_(0.9)
    assert live.report()["windows"]["5m"]["queries"] == before
    live.set_label_counts(added=3, hidden=1, available=lambda: 7)
    assert live.report()["labels"] == {"added": 3, "hidden": 1, "available": 7}
    clock.pass_(0.1)
    assert live.report()["windows"]["5m"]["queries"] == before + 1


def test_the_baseline_by_hand() -> None:
    rows = np.array([[0, 1, 4, 8], [0, 9, -1, -1]])
    scores = np.array([[6, 5, 4, 3], [2, 1, 99, 99]], np.float32)
    baseline = measure_baseline(scores, rows, BUCKETS, COUNTS, 0.5, 4)
    assert baseline is not None
    assert baseline.shares == pytest.approx((3 / 6, 1 / 6, 2 / 6, 0))
    assert baseline.popularity == pytest.approx((300 + 10 + 2) / 6)
    assert baseline.score_edges[4] == pytest.approx(3.5)
    assert sum(baseline.score_shares) == pytest.approx(1)
    by_k = np.array(baseline.by_k)
    assert by_k[:, :4].tolist() == [[1, 0, 0, 0], [1.5, 0, 0.5, 0], [1.5, 0.5, 0.5, 0], [1.5, 0.5, 1, 0]]
    assert by_k[:, 4:14].sum(axis=1) == pytest.approx([1, 2, 2.5, 3])
    assert by_k[-1, 4:14] / 3 == pytest.approx(baseline.score_shares)
    assert baseline.coverage == (0.5, 0.25, 0.5, 0)
    assert measure_baseline(scores[:, :1], np.full((2, 1), -1), BUCKETS, COUNTS, 0.5, 1) is None


def test_files_of_labels_go_with_their_releases(open_live: Opening, tmp_path: Path) -> None:
    live = open_live(releases=2)
    for name in ("r2", "r3"):
        live.begin_release(name, BUCKETS, None)
    assert sorted(path.name for path in (tmp_path / "live").iterdir()) == ["minutes.0", "r2.shown", "r3.shown"]


def test_a_full_disk_refuses_no_release(
    live: LiveFigures, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", full)
        live.begin_release("r2", BUCKETS, Promises(BASELINE))
    assert "kept in memory only" in caplog.text
    live.count_answers(answered([[0, 4]], release="r2"))
    live.count_requests([(200, 0.001)])
    figures = window(live, "5m", clock)
    assert (figures["queries"], figures["coverage"], figures["requests"]["count"]) == (1, 2 / 12, 1)


@pytest.mark.parametrize("value", [-(2.0**60), 2.0**60, math.nan, math.inf])
def test_damaged_counts_are_left_out(live: LiveFigures, clock: Clock, tmp_path: Path, value: float) -> None:
    live.count_answers(answered([[0, 1, 4, 8]] * 400))
    clock.pass_(60)
    live.count_answers(answered([[0]]))
    table = np.memmap(tmp_path / "live/minutes.0", ring._ROW, "r+")
    table["counts"]["judged_queries"][0] = value
    assert window(live, "5m", clock)["queries"] == 1


def test_a_file_of_another_size_is_started_again(
    open_live: Opening, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "live").mkdir()
    (tmp_path / "live/minutes.0").write_bytes(b"another")
    live = open_live()
    assert "found 7; started again" in caplog.text
    live.count_answers(answered([[0]]))
    assert window(live, "5m", clock)["queries"] == 1
    live.close()
    assert window(open_live(), "5m", clock)["queries"] == 1


@pytest.mark.parametrize("back", [90.0, 3 * 3600, 86_400, 400 * 86_400])
def test_a_clock_that_was_set_back_hides_nothing(open_live: Opening, clock: Clock, back: float) -> None:
    live = open_live()
    for place in range(3):
        live.count_answers(answered([[0, 1, 4, 8]] * (1 + place)))
        clock.pass_(60)
    clock.pass_(-back)
    live.count_answers(answered([[0, 1, 4, 8]] * 20))
    assert window(live, "5m", clock)["queries"] >= 20
    live.close()
    live = open_live()
    live.count_answers(answered([[4]] * 5))
    assert window(live, "5m", clock)["queries"] >= 25
    live.close()
    clock.pass_(back)
    live = open_live()
    live.count_answers(answered([[4]] * 7))
    day = window(live, "24h", clock)["queries"]
    assert day == (13 if back >= 86_400 else 38)


def test_the_oldest_minutes_give_way(tmp_path: Path) -> None:
    counted = MinuteRing(tmp_path, 0)
    for minute in range(ring.ROWS + 10):
        counted.at(60.0 * minute, "r1")["queries"] += 1
    now = 60.0 * (ring.ROWS + 9)
    assert total(counted.read(now))["queries"] == 1440
    assert MinuteRing(tmp_path, 1).read(now)["minute"].min() == ring.ROWS + 9 - 1439
    assert by_minute(counted.read(now), now)["queries"].tolist() == [1.0] * 1440
