"""A refresh of the forecast after silence, or by thin events, is no worse than none, whatever popularity does."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache

import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle.arrays import Float64, Int32
from longtail.bundle.forecast import Forecast
from longtail.trainer.config import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.problems import RowReport
from longtail.trainer.init.sections import draft_prior
from longtail.trainer.prior import fit_forecast

START, DAY = 1.7e9, 86_400.0
LABELS, DAYS, HORIZON, STEPS = 400, 60, 4, 4
"""Labels, days of the log, days of the horizon, and steps of popularity a day."""
PER_DAY = 500
LAWS = "static", "walk", "drift", "weekly", "calendar"
CATEGORIES = 10


@cache
def compute_shares(law: str) -> Float64:
    """The true share of every label in each quarter of a day, float64 [S, L]."""
    rng = np.random.default_rng(LAWS.index(law))
    day_S1 = np.arange((DAYS + 20) * STEPS)[:, None] / STEPS
    log_LS = -np.log(rng.permutation(LABELS) + 5.0) + 0 * day_S1
    if law == "walk":
        log_LS += np.cumsum(rng.normal(0, 0.08, log_LS.shape), axis=0)
    if law == "drift":
        log_LS -= np.abs(day_S1 - rng.uniform(-15, DAYS + 35, LABELS)) / 6
    if law == "weekly":
        log_LS += np.cos(2 * np.pi * (day_S1 / 7 - rng.uniform(0, 1, LABELS)))
    if law == "calendar":  # every category has its weekday and its hour
        category_L = np.arange(LABELS) % CATEGORIES
        log_LS += np.cos(2 * np.pi * (day_S1 / 7 - category_L / 10)) + np.cos(2 * np.pi * (day_S1 - category_L / 5))
    shares = np.exp(log_LS)
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


def draw_pairs(law: str, begin: float, end: float, share: float = 1.0) -> tuple[Int32, Float64]:
    """Labels and times of the pairs between two days, of which a share is seen."""
    rng = np.random.default_rng(round(1000 * (begin + end + share)))
    times = np.sort(rng.uniform(begin, end, rng.poisson(PER_DAY * share * (end - begin))))
    labels = [rng.choice(LABELS, p=compute_shares(law)[int(day * STEPS)]) for day in times]
    return np.array(labels, np.int32), START + times * DAY


def build_data(law: str) -> tuple[Recipe, Dataset]:
    """A recipe, and a log without a gap."""
    recipe = Recipe.model_validate({
        "name": "refreshed", "data": {"train": "none.parquet", "query_id": "user", "label_id": "item",
                                      "timestamp": "at", "split": {"strategy": "temporal"}},
        "query": {"features": [{"name": "user", "kind": "id", "dim": 8}]},
        "label": {"features": [{"name": name, "kind": "id", "dim": 8} for name in ("item", "category")]},
        "model": {"dim": 8}, "loss": {"sampler": "in_batch", "weight": "unit"},
        "prior": {"kind": "forecast", "horizon": f"{HORIZON}d", "features": ["category"]},
        "training": {"epochs": 1},
        "evaluation": {"ks": [10], "metric": "recall@10"},
    })  # fmt: skip
    labels, times = draw_pairs(law, 0, DAYS)
    pairs, ids = Pairs(np.arange(len(labels), dtype=np.int32), labels, times=times), pa.array(map(str, range(LABELS)))
    none, queries = pairs.take(slice(0)), pa.array(map(str, range(len(labels))))
    report = RowReport(unit="seconds")
    about = pa.table({"category": [f"c{label % CATEGORIES}" for label in range(LABELS)]})
    dataset = Dataset(queries, ids, pairs, none, none, None, about, ordered=True, report=report)
    return recipe, dataset


@cache
def fitted(law: str) -> Forecast:
    """The forecast after the log."""
    recipe, dataset = build_data(law)
    return fit_forecast(recipe, dataset, dataset.train)


def divergence(law: str, forecast: Forecast, day: float, days: float = HORIZON) -> float:
    """KL of the true shares of the days after a day from π*, nats."""
    true_L = compute_shares(law)[int(day * STEPS) : max(int((day + days) * STEPS), int(day * STEPS) + 1)].mean(axis=0)
    return float(true_L @ (np.log(true_L) - forecast.log_popularity(include_future=True)))


def refreshed(
    forecast: Forecast, labels: Int32, times: Float64, until: float, refreshes: int, days: float
) -> Iterator[tuple[float, Forecast]]:
    """Refresh in equal steps up to a day, as a service does; yields days and forecasts."""
    for now in np.linspace((times[0] - START) / DAY, until, refreshes + 1)[1:]:
        forecast = forecast.refreshed(np.arange(len(labels)), labels, times, START + now * DAY, ahead=days * DAY)
        yield float(now), forecast


SILENCES = [(gap, hours, 1.0) for gap in (0, 1, 3, 7) for hours in (2, 24)]
EVERY = [(HORIZON, 1), (HORIZON, 6), (0.25, 1), pytest.param(0.25, 40, marks=pytest.mark.nightly)]
"""Days that are forecast, and number of refreshes."""
THIN = [(0, 240, share) for share in (1.0, 0.3, 0.1, 0.03, 0.01)]


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_the_order_of_a_forecast_is_no_worse_than_recent_counts(law: str) -> None:
    """For queries of which nothing is known: recall of the next days' choices in 20 places, against the last tenth."""
    labels, _ = draw_pairs(law, 0, DAYS)
    counts_L = np.bincount(labels[-len(labels) // 10 :], minlength=LABELS)
    true_L = compute_shares(law)[DAYS * STEPS : (DAYS + HORIZON) * STEPS].mean(axis=0)
    forecast, recent = (true_L[np.argsort(-scores)[:20]].sum() for scores in (fitted(law).log_shares(), counts_L))
    assert forecast > recent - 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("days", "refreshes"), EVERY)
@pytest.mark.parametrize("law", LAWS)
def test_a_refresh_is_not_worse_than_none(law: str, days: float, refreshes: int) -> None:
    table, released = dict[tuple[float, float, float], tuple[float, float]](), fitted(law)
    of_hours = days < HORIZON
    # A service that forecasts six hours does not wait ten days.
    for gap, hours, share in SILENCES if of_hours and refreshes == 1 else [*SILENCES, *THIN]:
        now = DAYS + gap + hours / 24
        labels, times = draw_pairs(law, DAYS + gap, now, share)
        recalls = [
            [divergence(law, forecast, day, days) for forecast in (released, later)]
            for day, later in refreshed(released, labels, times, now, refreshes, days)
        ]
        before, after = np.mean(recalls[-28:], axis=0)  # a single period of six hours may be any hour of any weekday
        table[gap, hours, share] = float(before), float(after)

    worse = {case: nats for case, nats in table.items() if nats[1] > 1.02 * nats[0] + 0.004}
    assert not worse
    if law == "calendar" and of_hours:  # the hours to come are known without any event
        assert max(after / before for before, after in table.values()) < 0.5
    if law in ("drift", "walk") and (not of_hours or refreshes > 1):  # a refresh by enough pairs is worth its while
        for case in [(7, 24, 1.0), (0, 240, 1.0), (0, 240, 0.3)]:
            before, after = table[case]
            assert after < 0.9 * before


@pytest.mark.slow
def test_a_calendar_is_there_where_categories_have_hours_alone() -> None:
    # By chance the categories of `weekly`, whose labels have weekdays, have some too.
    static, walk, drift, _, calendar = (fitted(law).settings.calendar for law in LAWS)

    assert (static, walk, drift) == (None, None, None)
    assert calendar is not None
    assert set(calendar.windows) == {"day", "hour"}
    assert calendar.gain > 0.3
    kind, lines = draft_prior(*build_data("calendar"))
    assert kind == "forecast"
    drafted = "\n".join(lines)
    assert re.search(r"By the hour they are \+0\.[3-9]\d nats likelier by the day and hour of each category", drafted)
    assert tomllib.loads(drafted)["prior"] == {"kind": "forecast", "features": ["category"]}
    by_time = fitted("calendar").settings.by_time
    assert [len(by_time), by_time[0].time, by_time[7].time] == [11, "Thursday", "00–06 h"]
    for parts in (by_time[:7], by_time[7:]):
        pairs = [part.pairs for part in parts]
        assert np.average([part.gain for part in parts], weights=pairs) == pytest.approx(calendar.gain)
