"""Sums that halve with time, π* of labels with and without pairs, and the file that holds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle import Augmentation, BundleCorruptError
from longtail.bundle.forecast import (
    CalendarSettings,
    Forecast,
    ForecastSettings,
)
from longtail.bundle.weighed_pairs import WeighedPairs, visit_weights

DAY = 86_400.0
LABELS, LIVES = 50, [8 * DAY, 2 * DAY]
RNG = np.random.default_rng(4)
PAIRS = RNG.integers(0, LABELS - 2, 500)  # the last two labels have none
TIMES = np.sort(RNG.uniform(0, 20 * DAY, 500))
ABOUT = pa.table({"kind": pa.array(["a", "b"] * 25).dictionary_encode(), "price": np.linspace(1, 2, LABELS)})


def forecast(dates: np.ndarray | None = None, **settings: object) -> Forecast:
    """An empty forecast at day 0."""
    arguments = {"kind": "decayed", "half_lives": LIVES, "base": 1, "smoothing": 0.1, "horizon": 2 * DAY, "pairs": 50.0}
    arguments |= {"until": 0.0, "attributes": ["kind"], "numbers": ["price"]}
    about = ABOUT if dates is None else ABOUT.append_column("there since", pa.array(dates))
    built = ForecastSettings.model_validate(arguments | settings)
    return Forecast(built, np.zeros((LABELS, len(LIVES))), np.full(LABELS, np.inf), about)


def pairs(labels: object, times: object) -> WeighedPairs:
    """Pairs of as many queries."""
    return WeighedPairs.weigh(np.arange(len(np.array(labels))), np.array(labels, int), np.array(times, float))


def test_sums_halve_with_time_and_take_later_pairs() -> None:
    at_once = forecast().counted(pairs(PAIRS, TIMES), 20 * DAY)
    early = TIMES < 7 * DAY
    in_two = forecast().counted(pairs(PAIRS[early], TIMES[early]), 7 * DAY)
    in_two = in_two.counted(pairs(PAIRS[~early], TIMES[~early]), 20 * DAY)

    expected = [
        [np.sum(0.5 ** ((20 * DAY - TIMES[label == PAIRS]) / life)) for life in LIVES] for label in range(LABELS)
    ]
    np.testing.assert_allclose(at_once.sums, expected)
    np.testing.assert_allclose(in_two.sums, expected)
    np.testing.assert_array_equal(in_two.first, at_once.first)
    assert at_once.first[PAIRS[0]] == TIMES[0]
    assert np.isinf(at_once.first[-2:]).all()


def test_decayed_popularity_is_the_smoothed_sum() -> None:
    result = forecast().counted(pairs(PAIRS, TIMES), 20 * DAY)
    smoothed = result.sums[:, 1] + 0.1 * result.sums[:, 1].mean()

    np.testing.assert_allclose(result.log_popularity(), np.log(smoothed / smoothed.sum()), atol=1e-9)
    np.testing.assert_allclose(np.logaddexp.reduce(result.log_popularity()), 0, atol=1e-9)


def test_label_with_a_future_date_has_no_share() -> None:
    since = np.where(np.arange(LABELS) < 48, np.nan, [21 * DAY] * LABELS)
    since[49] = 30 * DAY
    result = forecast(since, since="since").counted(pairs(PAIRS, TIMES), 20 * DAY)

    now, horizon = np.exp(result.log_popularity()), np.exp(result.log_popularity(include_future=True))
    assert now[48:].max() < 1e-12
    assert horizon[48] > 1e-5  # it is there on day 21, and the horizon ends on day 22
    assert horizon[49] < 1e-12
    later = np.exp(result.counted(pairs([], []), 21 * DAY).log_popularity())
    assert later[48] > 1e-5
    assert later[49] < 1e-12


def test_new_label_equals_a_label_without_pairs() -> None:
    result = forecast(np.full(LABELS, 0.0), since="listed").counted(pairs(PAIRS, TIMES), 20 * DAY)
    new = result.log_popularity_of_new([{"listed": "1970-01-11"}, {}, {"listed": "1970-02-01"}], [20 * DAY] * 3)

    np.testing.assert_allclose(new[:2], result.log_popularity()[-1])
    assert new[2] < np.log(1e-12)


def test_announced_label_exists_after_its_date() -> None:
    result = forecast(np.full(LABELS, 0.0), since="listed").counted(pairs(PAIRS, TIMES), 20 * DAY)
    announced = [{"listed": "1970-01-25"}], [20 * DAY]

    assert result.log_popularity_of_new(*announced)[0] < np.log(1e-12)
    later = result.counted(pairs([], []), 26 * DAY)
    assert later.log_popularity_of_new(*announced)[0] > np.log(1e-4)


def test_changed_label_keeps_other_columns() -> None:
    result = forecast(np.arange(LABELS) * DAY, since="listed", attributes=["kind"]).counted(
        pairs(PAIRS, TIMES), 60 * DAY
    )
    more = result.with_labels(np.array([3, 4]), [{"price": 9}, {"kind": 39.0, "listed": "1970-01-02"}], [60 * DAY] * 2)

    assert more.about["there since"].to_pylist()[-2:] == [3 * DAY, DAY]
    assert more.about["kind"].to_pylist()[-2:] == ["b", "39"]
    assert more.about["price"].to_pylist()[-2:] == [9, ABOUT["price"][4].as_py()]


def test_labels_all_in_the_future_are_equal() -> None:
    result = forecast(np.full(LABELS, 90 * DAY), since="listed").counted(pairs(PAIRS, TIMES), 20 * DAY)

    np.testing.assert_allclose(result.log_popularity(), -np.log(LABELS))
    assert np.isfinite(result.log_popularity_of_new([{}], [20 * DAY])).all()


@pytest.fixture(scope="module")
def boosted() -> Forecast:
    """A forecast whose regression was fitted to labels of kind a, wanted twice as much as those of kind b."""
    import xgboost

    result = forecast().counted(pairs(PAIRS, TIMES), 20 * DAY)
    columns = np.repeat(result.columns(), 40, axis=0)
    target = np.tile(np.arange(LABELS).repeat(40) % 2 == 0, 1) + 1
    data = xgboost.DMatrix(columns, target, base_margin=np.zeros(len(target)))
    model = xgboost.train({"objective": "count:poisson", "nthread": 1}, data, 30)
    settings = result.settings.model_copy(update={"kind": "forecast", "served": "forecast"})
    return replace(result, model=bytes(model.save_raw("ubj")), settings=settings)


def test_new_label_is_forecast_by_attributes(boosted: Forecast) -> None:
    arguments = [{"kind": kind, "price": 1.5} for kind in ("a", "b")]
    of_new = boosted.log_popularity_of_new(arguments, [20 * DAY] * 2)

    twin = replace(boosted, about=ABOUT.set_column(1, "price", pa.array([1.5] * LABELS)))
    np.testing.assert_allclose(of_new - of_new[0], twin._log_rates[-2:] - twin._log_rates[-2], atol=1e-6)
    assert np.isfinite(boosted.log_popularity_of_new([{"kind": "unknown", "price": None}, {}], [0.0, 0.0])).all()
    assert len(boosted.log_popularity_of_new([], [])) == 0


def test_write_and_read_round_trip(boosted: Forecast, tmp_path: Path) -> None:
    boosted.write(tmp_path / "forecast.arrow")
    read = Forecast.read(tmp_path / "forecast.arrow")

    assert read.settings == boosted.settings
    np.testing.assert_array_equal(read.log_popularity(), boosted.log_popularity())


def test_released_prior_is_served_until_100_pairs_are_compared(boosted: Forecast, tmp_path: Path) -> None:
    def refreshed(forecast: Forecast, pairs: int, day: float) -> Forecast:
        labels, times = np.full(pairs, LABELS - 1), np.linspace(day - 0.5, day, pairs) * DAY
        return forecast.refreshed(np.arange(pairs), labels, times, day * DAY)

    few = refreshed(boosted, 150, 21)
    assert (few.settings.served, few.settings.compared) == ("released", 75)
    np.testing.assert_allclose(few.log_popularity(), boosted.log_popularity(), atol=1e-9)
    assert few.settings.comparison.endswith("until 100 later pairs can be compared, 75 so far")
    many = refreshed(few, 50, 22)
    assert (many.settings.served, many.settings.compared) == ("forecast", 100)
    assert many.settings.comparison.startswith("forecast is served, by 100 later pairs; nats a pair: count -")
    assert many.log_popularity()[-1] > boosted.log_popularity()[-1] + 1
    np.testing.assert_allclose(many.released, boosted.log_popularity(), atol=1e-9)

    few.write(tmp_path / "forecast.arrow")
    read = Forecast.read(tmp_path / "forecast.arrow")
    np.testing.assert_array_equal(read.log_popularity(), few.log_popularity())
    assert read.about.equals(few.about)
    arguments, now = [{"kind": "a", "price": 1.5}], [21 * DAY]
    added = read.with_labels(np.array([3, -1]), [{}, *arguments], now * 2).take(np.array([2, LABELS, LABELS + 1]))
    assert added.released is not None
    np.testing.assert_allclose(added.released[:2], boosted.log_popularity()[2:4], atol=1e-9)
    np.testing.assert_allclose(added.released[2], few.kinds()["forecast"].log_popularity_of_new(arguments, now)[0])


def test_an_offset_is_added_to_every_label(boosted: Forecast, tmp_path: Path) -> None:
    offset = np.linspace(-1, 1, LABELS)
    settings = boosted.settings.model_copy(update={"offset": -2.0})
    shifted = replace(boosted, offset=offset, settings=settings)
    shifted.write(tmp_path / "forecast.arrow")
    read = Forecast.read(tmp_path / "forecast.arrow")
    arguments, now = [{"kind": "a", "price": 1.5}], [20 * DAY]

    expected = np.exp(boosted.log_popularity() + offset)
    np.testing.assert_allclose(np.exp(read.log_popularity()), expected / expected.sum())
    np.testing.assert_allclose(read.log_shares(), boosted.log_popularity())
    of_new = boosted.log_popularity_of_new(arguments, now) - 2 - np.log(expected.sum())
    np.testing.assert_allclose(read.log_popularity_of_new(arguments, now), of_new)
    more = read.with_labels(np.array([3, -1]), [{}, *arguments], now * 2).take(np.array([0, LABELS, LABELS + 1]))
    assert more.offset is not None
    np.testing.assert_array_equal(more.offset, [-1, offset[3], -2])


def test_likelier_released_prior_is_served(boosted: Forecast) -> None:
    # A flood of one label in the earlier half says nothing about the later half.
    rng = np.random.default_rng(1)
    labels = np.r_[np.full(600, LABELS - 1), rng.integers(0, LABELS - 2, 600)]
    fresh = boosted.refreshed(np.arange(1200), labels, np.linspace(20.01, 20.5, 1200) * DAY, 20.5 * DAY)

    assert fresh.settings.served == "released"
    assert fresh.settings.nats["released"] > fresh.settings.nats["forecast"] + 0.1
    np.testing.assert_allclose(fresh.log_popularity(), boosted.log_popularity(), atol=1e-9)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    with pa.ipc.new_file(tmp_path / "forecast.arrow", ABOUT.schema) as file:
        file.write_table(ABOUT.combine_chunks())
    with pytest.raises(BundleCorruptError, match="expected sums and settings of a forecast"):
        Forecast.read(tmp_path / "forecast.arrow")


def test_query_weighs_at_most_one_per_label() -> None:
    queries, labels = np.array([7] * 3000 + [8]), np.array([3] * 3000 + [3])
    times = np.r_[np.linspace(0, 20 * DAY, 3000), 20 * DAY]
    repeated = WeighedPairs.weigh(queries, labels, times)
    at_once = forecast().counted(repeated, 20 * DAY)
    later = at_once.counted(pairs([], []), 28 * DAY)

    np.testing.assert_allclose(at_once.sums[3], [2, 2])  # of one client 3,000 clicks in 20 days, of another one
    np.testing.assert_allclose(later.sums[3], [2 / 2, 2 / 16])  # 8 days on, at half-lives of 8 and 2
    in_two = forecast().counted(repeated.select(slice(100)), DAY)
    in_two = in_two.counted(repeated.select(slice(100, None)), 20 * DAY)
    np.testing.assert_allclose(in_two.sums, at_once.sums)


def test_labels_of_a_visit_weigh_less_by_rank() -> None:
    queries, labels = np.array([7, 8, 7, 7, 7, 7, 7]), np.array([0, 0, 1, 1, 2, 3, 4])
    times = np.array([0, 0, 100, 200, DAY - 1, DAY + 150, DAY + 150])
    gaps = WeighedPairs.weigh(queries, labels, times).gaps_N

    # Label 1 is repeated; a day later label 0 and the first click on label 1 are out of the visit.
    expected = np.array([1, 1, 2, 2, 3, 3, 3])
    np.testing.assert_allclose(visit_weights(queries, times, gaps, 1.0), 1 / expected)
    np.testing.assert_allclose(visit_weights(queries, times, gaps, 0.5), expected**-0.5)
    assert visit_weights(queries, times, gaps, 0.0).tolist() == [1] * 7


def test_refresh_weighs_visits_like_the_fit() -> None:
    queries, labels, times = np.array([7, 7, 9]), np.array([3, 4, 4]), np.array([20.1, 20.2, 20.3]) * DAY
    before = forecast(visits=0.5)
    sums = before.refreshed(queries, labels, times, 20.3 * DAY).sums[[3, 4], 0]

    np.testing.assert_allclose(sums, [2 ** (-0.2 / 8), 2**-0.5 * 2 ** (-0.1 / 8) + 1])


def test_a_persistent_client_counts_once_in_refreshes() -> None:
    before = forecast().counted(pairs(PAIRS, TIMES), 20 * DAY)
    hours = np.arange(20 * 24, 27 * 24 + 1)
    times = np.repeat(hours * DAY / 24, 20) + np.tile(np.arange(1.0, 21), len(hours))
    fresh = before
    for hour in hours[1:]:  # every hour, with the pairs of a week before it
        observed = times < hour * DAY / 24
        fresh = fresh.refreshed(
            np.zeros(observed.sum(), int), np.full(observed.sum(), LABELS - 1), times[observed], hour * DAY / 24
        )

    assert 0.9 < fresh.sums[LABELS - 1, 0] <= 1
    assert 0.9 < fresh.sums[LABELS - 1, 1] <= 1
    assert fresh.settings.compared < 7 * 24 + 1  # not one for every click


def test_lists_at_the_theoretical_setting_match_the_shifted_distribution() -> None:
    """p*(y|x) ∝ p(y|x)·π*_y(t)/π_y: f = log p(y|x) − log π_y of a model, served at λ = 0, μ = 1, has its order."""
    taste = RNG.normal(size=(20, LABELS))
    log_pi = np.log(RNG.dirichlet(np.ones(LABELS)))
    joint = np.exp(taste + log_pi)
    conditional = joint / joint.sum(axis=1, keepdims=True)
    embeddings = (np.log(conditional) - log_pi).T.astype(np.float32)  # u = e_x, v = f(x, ·)
    for day in (3.0, 9.0):
        shifted = np.log(RNG.dirichlet(np.exp(np.sin(np.arange(LABELS) + day))))
        law = conditional * np.exp(shifted - log_pi)
        law /= law.sum(axis=1, keepdims=True)
        augmentation = Augmentation.fitted(1.0, embeddings, log_pi.astype(np.float32), None, shifted.astype(np.float32))
        rows = augmentation.rows(embeddings, log_pi.astype(np.float32), None, shifted.astype(np.float32))
        scores = augmentation.queries(np.eye(20, dtype=np.float32), 0.0, 1.0) @ rows.T

        assert (np.argsort(-scores, axis=1) == np.argsort(-law, axis=1)).all()
        spread = scores - np.log(law)
        np.testing.assert_allclose(spread, spread[:, :1].repeat(LABELS, axis=1), atol=2e-5)


def test_a_calendar_moves_shares_to_the_hours_to_come(tmp_path: Path) -> None:
    """Labels of kind a sell by day, those of kind b by night, both alike in sum."""
    days, labels = np.repeat(np.arange(28), LABELS), np.tile(np.arange(LABELS), 28)
    times = (days + np.where(labels % 2 == 0, 0.5, 0.0)) * DAY + 60
    calendar = CalendarSettings(feature="kind", values=["a", "b"], windows=["hour"], shrinkage=1e-6)
    base = {"base": 0, "smoothing": 1e-9, "calendar": calendar}
    empty = replace(forecast(**base), seasons=np.zeros((3, 168)))
    now = empty.counted(pairs(labels[times < 27 * DAY], times[times < 27 * DAY]), 27 * DAY).refreshed(
        labels, labels, times, 28 * DAY, ahead=3600.0
    )

    def share_of_a(forecast: Forecast) -> float:
        return float(np.exp(forecast.log_shares())[::2].sum())

    assert now.settings.served == "released"
    assert share_of_a(now) < 0.01
    noon = replace(now, settings=now.settings.model_copy(update={"until": 28.5 * DAY}))
    assert share_of_a(noon) > 0.99
    entire = replace(now, settings=now.settings.model_copy(update={"ahead": 7 * DAY}))
    assert share_of_a(entire) == pytest.approx(0.5, abs=0.01)
    # Fast sums of noon say little of kind b, unless they are seen at even hours.
    fast = forecast(base=0, smoothing=1e-9, calendar=calendar, half_lives=[DAY / 24, 8 * DAY])
    later = replace(fast, seasons=np.zeros((3, 168))).counted(pairs(labels, times), 27.5 * DAY + 7200)
    assert share_of_a(later.kinds()["decayed"]) == pytest.approx(0.5, abs=0.01)

    now.write(tmp_path / "forecast.arrow")
    read = Forecast.read(tmp_path / "forecast.arrow")
    np.testing.assert_array_equal(read.log_popularity(), now.log_popularity())
    new = read.log_popularity_of_new([{"kind": "a"}, {"kind": "b"}], [28 * DAY] * 2)
    assert new[1] > new[0] + 3
    more = read.with_labels(np.array([-1, -1]), [{"kind": "b"}, {"kind": "a"}], [28 * DAY] * 2)
    added = more.take(np.arange(LABELS, LABELS + 2)).log_shares()
    assert added[0] > added[1] + 3
