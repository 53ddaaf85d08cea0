"""The gauges that are computed at the scrape, which alert rules and operators build on."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from longtail import serving
from longtail.serving.monitoring import Monitoring
from tests.clock import Clock
from tests.serving.monitoring.shop import answered, chosen, count_batch, count_request, scrape


def busy(monitoring: Monitoring) -> None:
    count_batch(monitoring, answered([[0, 4, 8]] * 100))
    monitoring.count_choice(chosen([0], [0, 4, 8]))
    count_request(monitoring, 200, 0.01)


def test_the_gauges_are_the_reports_figures(monitoring: Monitoring, clock: Clock) -> None:
    busy(monitoring)
    monitoring.set_label_counts(added=2, hidden=1, available=lambda: 9)
    clock.pass_(1)
    series = scrape(monitoring)
    assert series['longtail_exposure_share{bucket="tail",window="5m"}'] == pytest.approx(1 / 3)
    assert series['longtail_exposure_baseline_share{bucket="head",window="5m"}'] == 0.5
    assert series['longtail_coverage{bucket="all",window="24h"}'] == pytest.approx(3 / 12)
    assert series['longtail_coverage{bucket="head",window="24h"}'] == pytest.approx(1 / 4)
    assert series['longtail_popularity{window="1h"}'] == pytest.approx(37)
    assert series['longtail_online_recall{bucket="head",source="feedback",window="5m"}'] == 1
    assert math.isnan(series['longtail_online_recall{bucket="tail",source="feedback",window="5m"}'])
    assert series['longtail_online_positives{bucket="tail",source="organic",window="5m"}'] == 0
    assert [series[f"longtail_labels_{name}"] for name in ("added", "hidden", "available")] == [2, 1, 9]
    report = monitoring.report()["windows"]["5m"]
    assert series['longtail_exposure_psi{window="5m"}'] == report["psi"]["buckets"]
    assert series['longtail_score_psi{window="5m"}'] == report["psi"]["scores"]
    assert series["longtail_gini"] == monitoring.report()["gini"]
    assert series['longtail_verdict{signal="score_drift"}'] == 2
    assert series['longtail_verdict{signal="refused_release"}'] == 0
    assert series['longtail_verdict{signal="organic_recall"}'] == 0


def test_metrics_md_names_every_series(monitoring: Monitoring) -> None:
    text = (Path(serving.__path__[0]) / "METRICS.md").read_text()
    documented = set(re.findall(r"^\| `(longtail_\w+)`", text, re.MULTILINE))
    series = set(re.findall(r"^# TYPE (longtail_\w+)", monitoring.scrape().decode(), re.MULTILINE))
    assert series ^ documented == set()
