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
from longtail.serving.monitoring import Monitoring, Promises, counters, measure_baseline
from longtail.serving.monitoring.counters import Counters, sum_by_minute, sum_counts
from tests.clock import Clock
from tests.serving.monitoring.shop import BASELINE, BUCKETS, COUNTS, NOON, answered, count_batch, count_request

Opening = Callable[..., Monitoring]


def window(monitoring: Monitoring, name: str, clock: Clock) -> dict[str, Any]:
    """A report that is not the one cached."""
    clock.pass_(1)
    figures: dict[str, Any] = monitoring.report()["windows"][name]
    return figures


def test_figures_by_hand(monitoring: Monitoring, clock: Clock) -> None:
    count_batch(monitoring, answered([[0, 1, 4], [0, 8]], bias_removal=0.25, score=1.5))
    count_batch(monitoring, answered([[0]], bias_removal=1.0, popularity=-1.5, score=9.0))
    count_request(monitoring, 200, 0.004)
    count_request(monitoring, 503, 0.004)
    monitoring.count("shed")
    for name in ("5m", "1h", "24h"):
        figures = window(monitoring, name, clock)
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
    assert monitoring.report()["gini"] == pytest.approx(2 * (9 + 10 + 11 + 12 * 3) / (12 * 6) - 13 / 12)


def test_restricted_answers_are_shown_and_not_judged(monitoring: Monitoring, clock: Clock) -> None:
    count_batch(monitoring, answered([[0, 4]], score=2.5))
    count_batch(monitoring, answered([[8, 9, 10]], restrictions=["buckets"]))
    figures = window(monitoring, "5m", clock)
    assert (figures["queries"], figures["exposures"]["tail"]["count"]) == (2, 3)
    assert figures["restricted"] == {"queries": 1, "buckets": 1, "allow": 0, "filter": 0}
    assert {name: of for name, of in figures["judged"].items() if name != "recall"} == {
        "queries": 1, "labels": 2, "shares": {"head": 0.5, "torso": 0.5, "tail": 0.0, "new": 0.0},
        "promised": {"head": 0.5, "torso": 0.25, "tail": 0.25, "new": 0.0},
        "scores": [0, 0, 2, 0, 0, 0, 0, 0, 0, 0],
    }  # fmt: skip


def test_gini_covers_two_days(monitoring: Monitoring, clock: Clock) -> None:
    count_batch(monitoring, answered([[0]]))
    clock.pass_(86_400)
    count_batch(monitoring, answered([[0, 1]]))
    clock.pass_(1)
    # Ten 0, one 1, one 2; then ten 0, one 1, one 1; then one 2 alone.
    assert monitoring.report()["gini"] == pytest.approx(2 * (11 + 12 * 2) / (12 * 3) - 13 / 12)
    clock.pass_(86_400)
    count_batch(monitoring, answered([[5], [5]]))
    assert monitoring.report()["gini"] == pytest.approx(2 * (9.5 * 0 + 10 + 11 + 12 * 2) / (12 * 4) - 13 / 12)
    clock.pass_(3 * 86_400)
    assert monitoring.report()["gini"] is None


def test_new_labels_count_with_the_tail_in_the_drift(monitoring: Monitoring, clock: Clock) -> None:
    """The baseline knows no label that was added since: each would be a shift of its own."""
    count_batch(monitoring, answered([[0, 0, 4, 12]] * 50))
    figures = window(monitoring, "5m", clock)
    assert (figures["exposures"]["new"]["share"], figures["psi"]["buckets"]) == (0.25, 0)
    assert monitoring.report()["series"]["psi"] == [0]


@pytest.mark.parametrize(
    ("name", "still", "gone"), [("5m", 3 * 60, 5 * 60), ("1h", 49 * 60, 60 * 60), ("24h", 20 * 3600, 24 * 3600)]
)
def test_windows_forget_old_minutes(monitoring: Monitoring, clock: Clock, name: str, still: float, gone: float) -> None:
    count_batch(monitoring, answered([[0, 4, 8]]))
    count_request(monitoring, 200, 0.001)
    clock.now = NOON + still
    figures = window(monitoring, name, clock)
    assert (figures["queries"], figures["coverage"], figures["requests"]["count"]) == (1, 3 / 12, 1)
    clock.now = NOON + gone
    figures = window(monitoring, name, clock)
    assert (figures["queries"], figures["coverage"], figures["requests"]["count"]) == (0, 0, 0)
    assert figures["exposures"]["head"]["share"] is None


def test_workers_add_up(open_monitoring: Opening, clock: Clock) -> None:
    first, second = open_monitoring(worker=0), open_monitoring(worker=1)
    count_batch(first, answered([[0, 1]]))
    count_batch(second, answered([[0, 8]]))
    count_request(second, 200, 0.001)
    for monitoring in (first, second):
        figures = window(monitoring, "1h", clock)
        assert (figures["queries"], figures["requests"]["count"]) == (2, 1)
        assert figures["coverage"] == pytest.approx(3 / 12)
        assert figures["exposures"]["head"]["count"] == 3


def test_figures_continue_after_a_restart(open_monitoring: Opening, clock: Clock) -> None:
    first = open_monitoring()
    count_batch(first, answered([[0, 4, 8]]))
    count_request(first, 200, 0.001)
    since = first.report()["since"]
    first.close()
    clock.pass_(60)
    second = open_monitoring()
    count_batch(second, answered([[0]]))
    report = second.report()
    figures = report["windows"]["5m"]
    assert report["since"] == since
    assert (figures["queries"], figures["requests"]["count"], figures["coverage"]) == (2, 1, 3 / 12)


def test_windows_count_the_served_release(monitoring: Monitoring, clock: Clock) -> None:
    count_batch(monitoring, answered([[0]]))
    clock.pass_(120)
    monitoring.begin_release("r2", BUCKETS, None)
    count_batch(monitoring, answered([[4], [5]], release="r2"))
    count_batch(monitoring, answered([[1]], release="r1"))
    report = monitoring.report()
    assert report["windows"]["5m"]["queries"] == 2
    assert report["windows"]["5m"]["exposures"]["head"]["count"] == 0
    assert report["baseline"] is None
    assert report["windows"]["5m"]["psi"] == {"buckets": None, "scores": None}
    assert report["series"]["queries"] == [1, 3]
    assert report["series"]["release"] == ["r1", "r2"]
    assert report["since"] == "2023-11-15T12:02:00Z"


def test_series_by_minute(monitoring: Monitoring, clock: Clock) -> None:
    clock.pass_(30)
    count_batch(monitoring, answered([[0, 0, 4, 8]] * 50, bias_removal=1.0))
    clock.pass_(120)
    count_request(monitoring, 200, 0.004)
    series = monitoring.report()["series"]
    assert series["at"] == ["2023-11-15T12:00:00Z", "2023-11-15T12:02:00Z"]
    assert series["queries"] == [50, 0]
    assert series["share"] == {"head": [0.5, None], "torso": [0.25, None], "tail": [0.25, None], "new": [0, None]}
    assert series["psi"] == [0, None]
    assert series["bias_removal"] == [1, None]
    # The minute under way is thirty seconds old.
    assert series["requests_per_second"] == [0, pytest.approx(1 / 30)]
    assert series["p50_ms"][0] is None
    assert series["release"] == ["r1", "r1"]


def test_no_report_before_a_release(open_monitoring: Opening) -> None:
    monitoring = open_monitoring(begin=False)
    count_request(monitoring, 503, 0.1)
    monitoring.count("shed")
    with pytest.raises(NotReadyError, match="no release"):
        monitoring.report()


def test_report_is_at_most_a_second_old(monitoring: Monitoring, clock: Clock) -> None:
    before = monitoring.report()["windows"]["5m"]["queries"]
    count_batch(monitoring, answered([[0]]))
    clock.pass_(0.9)
    assert monitoring.report()["windows"]["5m"]["queries"] == before
    monitoring.set_label_counts(added=3, hidden=1, available=lambda: 7)
    assert monitoring.report()["labels"] == {"added": 3, "hidden": 1, "available": 7}
    clock.pass_(0.1)
    assert monitoring.report()["windows"]["5m"]["queries"] == before + 1


def test_the_baseline_by_hand() -> None:
    rows = np.array([[0, 1, 4, 8], [0, 9, -1, -1]])
    scores = np.array([[6, 5, 4, 3], [2, 1, 99, 99]], np.float32)
    baseline = measure_baseline(scores, rows, BUCKETS, COUNTS, 0.5, 4)
    assert baseline is not None
    assert baseline.shares == pytest.approx((3 / 6, 1 / 6, 2 / 6, 0))
    assert baseline.popularity == pytest.approx((300 + 10 + 2) / 6)
    assert baseline.score_edges[4] == pytest.approx(3.5)
    assert sum(baseline.score_shares) == pytest.approx(1)
    by_k = baseline.by_k[1:]
    assert by_k[:, :4].tolist() == [[1, 0, 0, 0], [1.5, 0, 0.5, 0], [1.5, 0.5, 0.5, 0], [1.5, 0.5, 1, 0]]
    assert by_k[:, 4:14].sum(axis=1) == pytest.approx([1, 2, 2.5, 3])
    assert by_k[-1, 4:14] / 3 == pytest.approx(baseline.score_shares)
    assert baseline.coverage == (0.5, 0.25, 0.5, 0)
    assert measure_baseline(scores[:, :1], np.full((2, 1), -1), BUCKETS, COUNTS, 0.5, 1) is None


def test_files_of_old_releases_are_deleted(open_monitoring: Opening, tmp_path: Path) -> None:
    monitoring = open_monitoring(releases=2)
    for name in ("r2", "r3"):
        monitoring.begin_release(name, BUCKETS, None)
    assert sorted(path.name for path in (tmp_path / "live").iterdir()) == ["minutes.0", "r2.shown", "r3.shown"]


def test_full_disk_keeps_counts_in_memory(
    monitoring: Monitoring, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", full)
        monitoring.begin_release("r2", BUCKETS, Promises(BASELINE))
    assert "kept in memory only" in caplog.text
    count_batch(monitoring, answered([[0, 4]], release="r2"))
    count_request(monitoring, 200, 0.001)
    figures = window(monitoring, "5m", clock)
    assert (figures["queries"], figures["coverage"], figures["requests"]["count"]) == (1, 2 / 12, 1)


@pytest.mark.parametrize("value", [-(2.0**60), 2.0**60, math.nan, math.inf])
def test_damaged_counts_are_left_out(monitoring: Monitoring, clock: Clock, tmp_path: Path, value: float) -> None:
    count_batch(monitoring, answered([[0, 1, 4, 8]] * 400))
    clock.pass_(60)
    count_batch(monitoring, answered([[0]]))
    file = np.memmap(tmp_path / "live/minutes.0", counters._FILE, "r+")
    file["rows"]["counts"]["judged_queries"][0, 0] = value
    assert window(monitoring, "5m", clock)["queries"] == 1


def test_file_of_another_size_is_replaced(
    open_monitoring: Opening, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "live").mkdir()
    (tmp_path / "live/minutes.0").write_bytes(b"another")
    monitoring = open_monitoring()
    assert "found 7; started again" in caplog.text
    count_batch(monitoring, answered([[0]]))
    assert window(monitoring, "5m", clock)["queries"] == 1
    monitoring.close()
    assert window(open_monitoring(), "5m", clock)["queries"] == 1


@pytest.mark.parametrize("back", [90.0, 3 * 3600, 86_400, 400 * 86_400])
def test_clock_set_back_hides_no_counts(open_monitoring: Opening, clock: Clock, back: float) -> None:
    monitoring = open_monitoring()
    for i in range(3):
        count_batch(monitoring, answered([[0, 1, 4, 8]] * (1 + i)))
        clock.pass_(60)
    clock.pass_(-back)
    count_batch(monitoring, answered([[0, 1, 4, 8]] * 20))
    assert window(monitoring, "5m", clock)["queries"] >= 20
    monitoring.close()
    monitoring = open_monitoring()
    count_batch(monitoring, answered([[4]] * 5))
    assert window(monitoring, "5m", clock)["queries"] >= 25
    monitoring.close()
    clock.pass_(back)
    monitoring = open_monitoring()
    count_batch(monitoring, answered([[4]] * 7))
    day = window(monitoring, "24h", clock)["queries"]
    assert day == (13 if back >= 86_400 else 38)


def test_oldest_minutes_are_evicted_into_totals(tmp_path: Path) -> None:
    counted = Counters(tmp_path, 0)
    for minute in range(counters.ROWS + 10):
        counted.get_minute(60.0 * minute, "r1")["queries"] += 1
    now = 60.0 * (counters.ROWS + 9)
    assert sum_counts(counted.read_day(now))["queries"] == 1440
    assert Counters(tmp_path, 1).read_day(now)["minute"].min() == counters.ROWS + 9 - 1439
    assert sum_by_minute(counted.read_day(now), now)["queries"].tolist() == [1.0] * 1440
    assert counted.read_totals()[0]["queries"] == counters.ROWS + 10
