"""The gauges that are computed at the scrape, which alert rules and operators build on."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from longtail import serving
from longtail.serving.monitoring import LiveFigures
from tests.serving.monitoring.shop import Clock, answered, chosen


def busy(live: LiveFigures) -> None:
    live.count_answers(answered([[0, 4, 8]] * 100))
    live.count_choice(chosen([0], [0, 4, 8]))
    live.count_requests([(200, 0.01)])


def series_of(live: LiveFigures) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(live)
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_the_gauges_are_the_reports_figures(live: LiveFigures, clock: Clock) -> None:
    busy(live)
    live.set_label_counts(added=2, hidden=1, available=lambda: 9)
    clock.pass_(1)
    series = series_of(live)
    assert series['longtail_exposure_share{bucket="tail",window="5m"}'] == pytest.approx(1 / 3)
    assert series['longtail_exposure_baseline_share{bucket="head",window="5m"}'] == 0.5
    assert series['longtail_coverage{bucket="all",window="24h"}'] == pytest.approx(3 / 12)
    assert series['longtail_coverage{bucket="head",window="24h"}'] == pytest.approx(1 / 4)
    assert series['longtail_popularity{window="1h"}'] == pytest.approx(37)
    assert series['longtail_online_recall{bucket="head",source="feedback",window="5m"}'] == 1
    assert math.isnan(series['longtail_online_recall{bucket="tail",source="feedback",window="5m"}'])
    assert series['longtail_online_positives{bucket="tail",source="organic",window="5m"}'] == 0
    assert [series[f"longtail_labels_{name}"] for name in ("added", "hidden", "available")] == [2, 1, 9]
    report = live.report()["windows"]["5m"]
    assert series['longtail_exposure_psi{window="5m"}'] == report["psi"]["buckets"]
    assert series['longtail_score_psi{window="5m"}'] == report["psi"]["scores"]
    assert series["longtail_gini"] == live.report()["gini"]
    assert series['longtail_verdict{signal="score_drift"}'] == 2
    assert series['longtail_verdict{signal="refused_release"}'] == 0
    assert series['longtail_verdict{signal="organic_recall"}'] == 0


def test_metrics_md_names_every_series(live: LiveFigures) -> None:
    text = (Path(serving.__path__[0]) / "METRICS.md").read_text()
    documented = set(re.findall(r"^\| `(longtail_\w+)`", text, re.MULTILINE))
    assert {name.partition("{")[0] for name in series_of(live)} <= documented
