"""Priors of the next period: what is fitted, what is refused, and what `fit` serves."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xgboost
from pydantic import ValidationError

from longtail.bundle import BiasRemoval, Bundle, BundleInvariantError, CurvePoint, Popularity
from longtail.bundle.forecast import Forecast
from longtail.trainer import evaluate, fit
from longtail.trainer.config import Recipe
from longtail.trainer.config.sections import EvaluationConfig
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.errors import DataError, RecipeError
from longtail.trainer.evaluation.bundle import evaluate_rolling
from longtail.trainer.evaluation.dial import Dial, Noise
from longtail.trainer.prior import fit_forecast
from longtail.trainer.results import report_grids
from longtail.trainer.trained import Trained
from tests.trainer import tiny

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
ITEMS, DAYS = 120, 60


def write_log(folder: Path, rows: int = 12_000, start: datetime.datetime = START) -> Path:
    """Write a log in which every item has its week, and a table with category, price and first day of the items."""
    rng = np.random.default_rng(5)
    peak, days = rng.uniform(0, DAYS, ITEMS), np.sort(rng.uniform(0, DAYS, rows))
    items = [rng.choice(ITEMS, p=_shares(peak, day)) for day in days]
    at = [start + datetime.timedelta(days=float(day)) for day in days]
    log = {
        "user": [f"u{user}" for user in rng.integers(0, 400, rows)],
        "item": [f"i{item}" for item in items],
        "at": at,
    }
    pq.write_table(pa.table(log), folder / "log.parquet")
    about = {
        "item": [f"i{item}" for item in range(ITEMS)], "category": [f"c{int(day // 10)}" for day in peak],
        "price": peak, "imported": [start + datetime.timedelta(days=DAYS)] * ITEMS,
        "listed": [start + datetime.timedelta(days=float(day) - 20) for day in peak],
    }  # fmt: skip
    pq.write_table(pa.table(about), folder / "items.parquet")
    return folder


def _shares(peak: np.ndarray, day: float) -> np.ndarray:
    weights = np.exp(-np.abs(day - peak) / 4)
    return weights / weights.sum()


def recipe(folder: Path, prior: dict[str, Any], **sections: Any) -> Recipe:
    """A small recipe over the log."""
    return Recipe.model_validate({
        "name": "weeks",
        "data": {
            "train": str(folder / "log.parquet"), "labels": str(folder / "items.parquet"), "query_id": "user",
            "label_id": "item", "timestamp": "at", "split": {"strategy": "temporal"},
        },
        "query": {"features": [{"name": "user", "kind": "id", "dim": 8}]},
        "label": {"features": [
            {"name": "item", "kind": "id", "dim": 8}, {"name": "category", "kind": "id", "dim": 8},
            {"name": "price", "kind": "number"},
        ], "combine": "concat"},
        "model": {"dim": 8}, "loss": {"sampler": "in_batch", "weight": "unit"}, "prior": prior,
        "training": {"epochs": 1, "batch_size": 256},
        "evaluation": {"ks": [10], "metric": "recall@10", "baselines": []},
    } | sections)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("weeks"))


FORECAST = {"kind": "forecast", "features": ["category", "price"], "since": "listed"}


def test_forecast_beats_decay_and_decay_beats_counts(folder: Path) -> None:
    of = recipe(folder, FORECAST)
    dataset = read_dataset(of)
    forecast = fit_forecast(of, dataset, dataset.pairs_before("test"))

    nats = forecast.settings.nats
    assert nats["forecast"] > nats["decayed"] + 0.02 > nats["count"] + 0.5
    # The period after it, which nothing was fitted to, says so too.
    tested_L = np.bincount(dataset.test.labels, minlength=ITEMS)
    counts = np.bincount(dataset.pairs_before("test").labels, minlength=ITEMS) + 0.5
    gain = tested_L @ (forecast.log_popularity(include_future=True) - np.log(counts / counts.sum())) / tested_L.sum()
    assert gain > 0.5
    assert forecast.settings.horizon == pytest.approx(np.ptp(dataset.valid.times) / 1e6, rel=1e-3)
    assert fit_forecast(of, dataset, dataset.pairs_before("test")).model == forecast.model


def test_a_burst_of_one_query_is_one_pair(folder: Path) -> None:
    of = recipe(folder, {"kind": "decayed"})
    dataset = read_dataset(of)
    earlier = dataset.pairs_before("test")
    last = int(np.argmax(earlier.times))
    burst = earlier.take(np.r_[np.arange(len(earlier)), np.repeat(last, 1000)])

    alone, with_burst = (fit_forecast(of, dataset, pairs).log_popularity() for pairs in (earlier, burst))
    np.testing.assert_allclose(with_burst, alone)


def test_large_visits_count_less_if_likelier(folder: Path) -> None:
    of = recipe(folder, {"kind": "decayed"})
    dataset = read_dataset(of)
    earlier = dataset.pairs_before("test")
    rng, days = np.random.default_rng(2), np.arange(1, DAYS - 8)
    # Every day a collector, a new query, takes half of the items in an hour, the same in every week.
    more = earlier.take(np.r_[np.arange(len(earlier)), np.zeros(len(days) * 60, int)])
    queries, labels, times = more.queries.copy(), more.labels.copy(), more.times.copy()
    queries[len(earlier) :] = earlier.queries.max() + 1 + np.repeat(days, 60)
    labels[len(earlier) :] = np.concatenate([rng.permutation(ITEMS)[:60] for _ in days])
    times[len(earlier) :] = (
        earlier.times.min() + np.repeat(days, 60) * 86_400e6 + np.tile(np.arange(60), len(days)) * 60e6
    )
    collected = replace(more, queries=queries, labels=labels, times=times)

    assert fit_forecast(of, dataset, earlier).settings.visits == 0
    assert fit_forecast(of, dataset, collected).settings.visits == 0.5
    growing = of.model_copy(update={"evaluation": of.evaluation.model_copy(update={"history": "growing"})})
    assert fit_forecast(growing, dataset, collected).settings.visits == 0, "its metric is a mean over pairs"


@pytest.mark.parametrize("prior", [{"kind": "decayed"}, FORECAST])
def test_a_persistent_client_weighs_as_one_click(folder: Path, prior: dict[str, Any]) -> None:
    of = recipe(folder, prior)
    dataset = read_dataset(of)
    earlier = dataset.pairs_before("test")
    plain = fit_forecast(of, dataset, earlier)
    label = int(np.argsort(-plain.log_popularity())[ITEMS // 8])

    def with_clicks(clicks: int) -> Forecast:
        """Add clicks of one client with one label in the last third of the log."""
        until, many = earlier.times.max(), np.arange(clicks)
        more = earlier.take(np.r_[np.arange(len(earlier)), np.zeros(clicks, int)])
        queries, labels, times = more.queries.copy(), more.labels.copy(), more.times.copy()
        queries[len(earlier) :], labels[len(earlier) :] = earlier.queries.max() + 1, label
        times[len(earlier) :] = until - many * 20 * 86_400e6 / clicks
        return fit_forecast(of, dataset, replace(more, queries=queries, labels=labels, times=times))

    once, often = with_clicks(1), with_clicks(3000)
    before, single, heavy = (np.exp(forecast.log_popularity()) for forecast in (plain, once, often))
    assert heavy[label] < 1.5 * before[label]
    assert heavy[label] < 1.3 * single[label]
    assert abs(int((heavy > heavy[label]).sum()) - int((before > before[label]).sum())) <= ITEMS // 20
    assert often.settings.base == plain.settings.base


def test_last_period_is_compared_out_of_sample(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = recipe(folder, FORECAST)
    dataset = read_dataset(of)
    earlier = dataset.pairs_before("test")
    last = earlier.times.max() - np.ptp(dataset.valid.times)
    trained, train = list[tuple[int, bytes]](), xgboost.train

    def noted(settings: Any, rows: Any, trees: int, **options: Any) -> Any:
        booster = train(settings, rows, trees, **options)
        trained.append((booster.num_boosted_rounds(), rows.get_label().tobytes()))
        return booster

    monkeypatch.setattr(xgboost, "train", noted)
    forecast = fit_forecast(of, dataset, earlier)
    nats = forecast.settings.nats
    moved = earlier.labels.copy()
    moved[earlier.times > last] = (moved[earlier.times > last] + 1) % ITEMS
    elsewhere = fit_forecast(of, dataset, replace(earlier, labels=moved))

    assert trained[:2] == trained[3:5]  # the choice of the trees, and the model that is compared
    assert trained[2] != trained[5]
    assert (elsewhere.settings.base, elsewhere.settings.smoothing) == (
        forecast.settings.base,
        forecast.settings.smoothing,
    )
    assert elsewhere.settings.nats["forecast"] < nats["forecast"]


REFUSED = {
    "no times": ({"kind": "forecast"}, {"timestamp": None}, "expected data.timestamp with 'forecast'"),
    "no such feature": ({"kind": "forecast", "features": ["brand"]}, {}, r"kinds id and number, received \['brand'\]"),
    "features of a count": ({"features": ["price"]}, {}, "features: expected none with kind = 'count'"),
    "horizon of a count": ({"horizon": "7d"}, {}, "horizon and since: expected none with kind = 'count'"),
}


@pytest.mark.parametrize(("prior", "data", "message"), REFUSED.values(), ids=REFUSED)
def test_impossible_prior_settings_are_refused(
    folder: Path, prior: dict[str, Any], data: dict[str, Any], message: str
) -> None:
    sections = recipe(folder, {}).model_dump(by_alias=True, exclude_unset=True)
    if data:
        sections["data"] |= data | {"split": {"strategy": "random"}}
    with pytest.raises(ValidationError, match=message):
        Recipe.model_validate(sections | {"prior": prior})


@pytest.mark.parametrize(
    ("prior", "message"),
    [({"kind": "decayed", "horizon": "50d"}, "expected at most ¼ of the log"),
     ({"kind": "forecast", "since": "born"}, "expected a column 'born'"),
     ({"kind": "decayed", "since": "imported"}, "expected labels that are there on 2026-")],
)  # fmt: skip
def test_data_without_horizons_are_refused(folder: Path, prior: dict[str, Any], message: str) -> None:
    of = recipe(folder, prior)
    dataset = read_dataset(of)
    with pytest.raises(DataError, match=message):
        fit_forecast(of, dataset, dataset.train)


def test_scores_that_hold_popularity_already_get_the_change_of_popularity(folder: Path, tmp_path: Path) -> None:
    bundle = fit(recipe(folder, {"kind": "decayed"}, loss={"sampler": "full", "weight": "unit"}), tmp_path / "run")

    assert bundle.forecast is not None
    counts = bundle.labels.counts + 0.5
    change = bundle.forecast.log_shares() - np.log(counts)
    off = bundle.labels.log_popularity - change
    np.testing.assert_allclose(off - off.mean(), 0, atol=1e-4)
    assert {point.bias_removal for point in bundle.manifest.bias_removal.curve} == {0.0}
    by_time = json.loads((tmp_path / "run" / "metrics.json").read_bytes())["forecast"]["by_time"]
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "<h2>Popularity by weekday and hour</h2>" in report
    assert (
        f"<th>Friday</th><th>{by_time[1]['pairs']:,.0f}</th><td>{by_time[1]['nats']:.3f}</td><td>+0.000</td>" in report
    )


def test_fit_says_that_the_best_weight_of_the_prior_is_an_end_of_its_grid() -> None:
    noise = Noise("π", constant=False, separate_prior=True, ahead=True)

    def describe(best: float, **grid: list[float]) -> str:
        config = EvaluationConfig.model_validate({"ks": [10], "metric": "recall@10", **grid})
        points = [
            CurvePoint(bias_removal=at, popularity=weight, metrics={})
            for at, weight in [(0.0, 0.0), (0.0, 0.5), (0.0, 1.0), (0.5, best)]
        ]
        dial = Dial(
            BiasRemoval(default=0.0, noise="π", chosen_by="", curve_split="valid", curve=points),
            Popularity(default=best),
        )
        trained = SimpleNamespace(recipe=SimpleNamespace(evaluation=config), noise=lambda: noise)
        reporter, screen = tiny.record_output()
        report_grids(cast(Trained, trained), dial, reporter)
        return screen.getvalue()

    words = "μ = 1, the best on valid, is an end of evaluation.popularity: try a wider grid\n"
    assert describe(1.0, popularity=[0, 0.5, 1]) == words
    assert "evaluation.bias_removal" in describe(1.0)
    assert not describe(0.5)
    assert not describe(0.0)


@pytest.mark.nightly
def test_fit_serves_the_prior_that_it_evaluated(folder: Path, tmp_path: Path) -> None:
    of = recipe(folder, FORECAST)
    bundle = fit(of, tmp_path / "run")
    count = fit(recipe(folder, {}), tmp_path / "count")

    read = Bundle.load(tmp_path / "run")
    assert read.forecast is not None
    assert read.manifest.popularity.default > 0
    np.testing.assert_allclose(read.labels.log_popularity, read.forecast.log_popularity(), atol=1e-5)
    with pytest.raises(BundleInvariantError, match="has a row per label"):
        replace(read, forecast=read.forecast.take(np.arange(3))).validate()
    dataset = read_dataset(of)
    assert read.forecast.settings.until == pytest.approx(dataset.pairs_before("test").times.max() / 1e6)
    later_pairs = (
        "later than the bundle's forecast of popularity, which knows pairs up to 2026-0.*: their popularity would"
    )
    with pytest.raises(RecipeError, match=f"expected valid pairs {later_pairs}"):
        evaluate(bundle, of, split="valid")
    later, test = float(dataset.test.times.max()) / 1e6, dataset.test
    refreshed = read.forecast.refreshed(test.queries, test.labels, test.times / 1e6, later)
    with pytest.raises(RecipeError, match=f"expected test pairs {later_pairs}"):
        evaluate(replace(bundle, forecast=refreshed), of)
    rolled = evaluate_rolling(bundle, of, 3)
    assert [period.prior for period in rolled] == ["counts", "forecast", "refreshed"] * 3
    assert sum(period.pairs for period in rolled[::3]) == len(dataset.test)
    early = {period.prior: period.metrics["recall@10"].value for period in rolled[:3]}
    assert early["forecast"] == pytest.approx(early["refreshed"], abs=0.02)  # no pair has come before the first period
    late = {period.prior: period.metrics["recall@10"].value for period in rolled[-3:]}
    assert late["refreshed"] > late["counts"]
    each_pair = {"ks": [10], "metric": "recall@10", "baselines": [], "history": "growing"}
    growing = recipe(folder, FORECAST, evaluation=each_pair)
    _, forecast, _ = evaluate_rolling(bundle, growing, 1)  # one period is the whole of test
    assert forecast.metrics["recall@10"].value == pytest.approx(evaluate(bundle, growing).value())
    assert forecast.metrics["recall@10"].value != pytest.approx(evaluate(bundle).value(), abs=1e-4)
    stored, again = evaluate(bundle), evaluate(bundle, of)
    assert again.value() == pytest.approx(stored.value(), abs=1e-3)
    assert stored.value() > 1.3 * evaluate(count).value()
