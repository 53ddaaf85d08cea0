"""The section of the experiment that runs: hidden without one, the arms, what is real, what cannot be trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from longtail.serving.monitoring import Design, experiments_json
from longtail.serving.monitoring.arm_counts import ArmCounts
from tests.serving.dashboard.browser import Page
from tests.serving.dashboard.service import Service

pytestmark = pytest.mark.process


def report(hits: tuple[int, int] = (480, 700), units: tuple[int, int] = (3923, 4095)) -> dict[str, Any]:
    """Of 4,096 answers in each arm, four in each cluster, and so many hits; a few labels chosen were not answered."""
    arms = [
        {"name": name, "share": 0.5, "settings": {}, "release": None, "unavailable": None}
        for name in ("control", "tail")
    ]
    counts = {}
    for arm, found, of_arm, tail in zip(("control", "tail"), hits, units, (300, 1200), strict=True):
        each = ArmCounts(1_700_000_000.0, dict.fromkeys(ArmCounts().counts, 0))
        each.counts.update(answers=4096, units=of_arm, head=8000, torso=2000, tail=tail)  # type: ignore[attr-defined]
        each.answers_C[:] = 4
        each.hits_BC[0] = np.arange(1024) < found
        each.positives_BC[0] = np.arange(1024) < min(found + 200, 1024)
        counts[arm] = each
    design = {"name": "tail_week", "run": "e7795076365f", "unit": "user_id", "traffic": 0.5, "arms": arms}
    return {**experiments_json(Design(design), counts), "request_id": "r"}


def test_it_is_hidden_where_no_experiment_runs(opened: Callable[..., Page]) -> None:
    page = opened()
    assert page.run("document.getElementById('experiment').hidden")


def test_arms_stand_beside_each_other(opened: Callable[..., Page], service: Service) -> None:
    found = report()
    service.experiments = lambda: (200, found)
    page = opened()
    page.until("!document.getElementById('experiment').hidden")
    difference = found["experiment"]["arms"][1]["difference"]
    assert difference["real"]
    lead = page.text("#experiment-lead")
    assert lead == "tail_week: tail brings +0.0537 hits per answer beside control, and that is real."
    table = page.text("#arms")
    for figure in ("3,923", "4,095", "2.9 %", "10.7 %", "0.1172", "0.1709", f"+{difference['low']:.4f}"):
        assert figure in table, figure
    assert "e7795076365f" in page.text("#experiment-note")
    assert "50 % of the units" in page.text("#experiment-note").replace("\u00a0", " ")


def test_what_is_not_real_or_not_to_be_trusted_is_said(opened: Callable[..., Page], service: Service) -> None:
    found = report(hits=(480, 490))
    found["refused"] = "experiments.x.arms: expected a valid dictionary"
    service.experiments = lambda: (200, found)
    page = opened()
    page.until("!document.getElementById('experiment').hidden")
    assert page.text("#experiment-lead").endswith("hits per answer beside control, which may be chance yet.")
    assert "expected a valid dictionary" in page.text("#experiment-refused")
    service.experiments = lambda: (200, report(units=(3000, 4095)))
    other = opened()
    other.until("!document.getElementById('experiment').hidden")
    assert "Do not trust" in other.text("#experiment-lead")
