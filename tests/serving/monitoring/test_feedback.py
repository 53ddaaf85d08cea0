"""Recall of choices, by hand: from answers, and organic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from longtail.serving.monitoring import Monitoring
from longtail.serving.monitoring.records import Source
from tests.clock import Clock
from tests.serving.monitoring.shop import BUCKETS, answered, chosen, count_batch


def recall(monitoring: Monitoring, clock: Clock, source: Source = "feedback") -> dict[str, tuple[int, int]]:
    """Positives and hits by bucket, of a report that is not the one cached."""
    clock.pass_(1)
    figures: dict[str, Any] = monitoring.report()["windows"]["24h"]["recall"][source]
    return {bucket: (of["positives"], of["hits"]) for bucket, of in figures.items()}


def test_recall_by_hand(monitoring: Monitoring, clock: Clock) -> None:
    monitoring.count_choice(chosen([0, 2, 8, 11], [0, 1, 8]))
    monitoring.count_choice(chosen([4], [4, 5, 9]))
    assert recall(monitoring, clock) == {"head": (2, 1), "torso": (1, 1), "tail": (2, 1), "new": (0, 0), "all": (5, 3)}
    assert recall(monitoring, clock, "organic")["all"] == (0, 0)
    figures = monitoring.report()["windows"]["5m"]["recall"]["feedback"]["all"]
    # Clopper and Pearson's interval of 3 of 5.
    exact = pytest.approx((3 / 5, 0.1466, 0.9473), abs=1e-4)
    assert (figures["value"], figures["low"], figures["high"]) == exact
    series = monitoring.report()["series"]["recall"]
    assert (series["feedback"]["head"], series["organic"]["head"]) == ([pytest.approx(1 / 2)], [None])


def test_organic_recall_by_hand(monitoring: Monitoring, clock: Clock) -> None:
    # A label that nobody knows (−1) is no positive; one added since (row 12) is new.
    monitoring.count_choice(chosen([0, 1, 12], [0, 4, 12], source="organic"))
    monitoring.count_choice(chosen([4, -1], [5], source="organic"))
    organic = {"head": (2, 1), "torso": (1, 0), "tail": (0, 0), "new": (1, 1), "all": (4, 2)}
    assert recall(monitoring, clock, "organic") == organic
    assert recall(monitoring, clock)["all"] == (0, 0)


def test_choices_count_for_the_answering_release(monitoring: Monitoring, clock: Clock) -> None:
    monitoring.begin_release("r2", BUCKETS, None)
    monitoring.count_choice(chosen([0], [0]))
    assert recall(monitoring, clock)["all"] == (0, 0)
    assert monitoring.report()["series"]["recall"]["feedback"]["all"] == [1]


def test_other_loaded_releases_count_answers_and_choices(monitoring: Monitoring, clock: Clock) -> None:
    """A staged release that an arm of an experiment answers from."""
    count_batch(monitoring, answered([[0, 4]], release="staged"))
    monitoring.count_choice(chosen([0, 5], [0, 4], release="staged"))
    assert recall(monitoring, clock)["all"] == (0, 0)
    monitoring.begin_release("staged", BUCKETS, None)
    assert recall(monitoring, clock)["all"] == (2, 1)
    assert monitoring.report()["windows"]["5m"]["queries"] == 1


def test_planted_recall_is_recovered(monitoring: Monitoring) -> None:
    rng, planted = np.random.default_rng(0), {"head": 0.8, "torso": 0.5, "tail": 0.15}
    for _ in range(1500):
        # One label of every bucket is chosen, and answered as often as planted.
        rows = [int(4 * bucket + rng.integers(4)) for bucket in range(3)]
        monitoring.count_choice(
            chosen(rows, [row for row, of in zip(rows, planted.values(), strict=True) if rng.random() < of])
        )
    figures = monitoring.report()["windows"]["5m"]["recall"]["feedback"]
    for bucket, share in planted.items():
        assert figures[bucket]["positives"] == 1500
        assert figures[bucket]["low"] < share < figures[bucket]["high"] < figures[bucket]["low"] + 0.06
