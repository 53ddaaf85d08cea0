"""Forecasts of label popularity by a regression on the log [METHODS §6].

Legend: `L` labels, `N` pairs, `W` half-lives, `S` smoothings, `R` rows of the regression, `F` columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from longtail.bundle.arrays import Bools, Float32, Float64
from longtail.bundle.calendar import HOURS, Window, hour_of_week
from longtail.bundle.dates import span_seconds
from longtail.bundle.forecast import (
    SINCE,
    CalendarSettings,
    Forecast,
    ForecastSettings,
    NatsAt,
)
from longtail.bundle.weighed_pairs import WeighedPairs
from longtail.tables.times import UNITS
from longtail.trainer.config import FeatureConfig, Recipe
from longtail.trainer.data.columns import read_numbers, read_seconds, read_strings
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.errors import DataError

_HALVINGS = 8
"""Half-lives are the log's span, halved 0 to this many times."""
_FOREVER = 1000.0
"""Half-life without decay, in spans of the log."""
_SMOOTHINGS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_FIRST_ORIGIN, _ORIGINS = 0.25, 12
"""Smallest share of the log before an origin."""
_CHOOSING = 4
"""Number of origins by which half-life and smoothing are chosen."""
_ROWS = 400_000
"""Largest number of rows of the regression, which then takes about twenty seconds.

It uses one core, so that figures repeat on any machine.
"""
_WINDOWS: tuple[list[Window], ...] = (["day"], ["hour"], ["day", "hour"])
_WEEKDAYS = "Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"
_SHRINKAGES = (10.0, 30.0, 100.0)
_PERIODS = 10
"""Parts of the log of which the last three say whether a calendar makes pairs likelier."""
_LEAST_SPANS: dict[Window, float] = {"day": 21 * 86_400.0, "hour": 3 * 86_400.0}
"""Shortest logs, in seconds, in which an effect is no trend."""
_MOST_VALUES = 2_000
"""Largest number of an attribute's values with a calendar, whose sums then take 2.7 MB."""
_LEAST_GAIN = 0.002
"""Least gain of held-out pairs by a calendar, nats a pair."""
_VISITS, _LEAST_GAIN_OF_VOTES = 0.5, 0.01
"""Power of the rank in a visit, and the nats per vote from which it is used."""
_TREES, _PATIENCE = 500, 20
_BOOSTER = {
    "objective": "count:poisson", "eta": 0.05, "max_leaves": 31, "max_depth": 0, "grow_policy": "lossguide",
    "min_child_weight": 5, "lambda": 1, "colsample_bytree": 0.7, "subsample": 0.7, "nthread": 1,
}  # fmt: skip


class _Origin(NamedTuple):
    """Hold a time within the log: sums before it, and the horizon's pairs and votes of every label, float64 [L]."""

    forecast: Forecast
    pairs_L: Float64
    votes_L: Float64

    def nats(self, log_share_L: Float64) -> float:
        """Compute the mean log-probability of the horizon's pairs under unnormalised shares, float64 [L]."""
        return self._mean_nats(self.pairs_L, log_share_L)

    def vote_nats(self, log_share_L: Float64) -> float:
        """Compute the mean log-probability of the horizon's votes under unnormalised shares, float64 [L]."""
        return self._mean_nats(self.votes_L, log_share_L)

    def _mean_nats(self, count_L: Float64, log_share_L: Float64) -> float:
        count_n, log_n = count_L[self.available], log_share_L[self.available]
        return float(count_n @ (log_n - np.logaddexp.reduce(log_n)) / max(float(count_n.sum()), 1.0))

    @property
    def available(self) -> Bools:
        """Mask labels that are available within the horizon, bool [L]."""
        return self.forecast.find_existing(self.forecast.settings.end)


def fit_forecast_once(recipe: Recipe, dataset: Dataset, known_pairs: Pairs) -> Forecast | None:
    """Fit π* of the horizon after the known pairs, once for a data set; None for kind `count`."""
    if recipe.prior.kind == "count":
        return None
    features = [feature.model_dump_json() for feature in recipe.label.features if feature.name in recipe.prior.features]
    key = f"{len(known_pairs)} {recipe.seed} {recipe.prior.model_dump_json()} {features}"
    if key not in dataset.forecasts:
        dataset.forecasts[key] = fit_forecast(recipe, dataset, known_pairs)
    return dataset.forecasts[key]


def fit_forecast(recipe: Recipe, dataset: Dataset, known_pairs: Pairs) -> Forecast:
    """Fit π* of the horizon after the known pairs; raises DataError if times do not allow it.

    Half-life, smoothing and number of trees maximise the likelihood in periods before the last. The last period
    compares all kinds of priors. The pairs of a visit count less by their rank where votes are likelier so.
    """
    config = recipe.prior
    times_N, _, horizon, origin_times, within = _schedule_origins(recipe, dataset, known_pairs)
    assert config.kind != "count"
    begin, end = float(times_N.min()), float(times_N.max())
    span = end - begin
    lives = [_FOREVER * span, *(span / 2.0**i for i in range(_HALVINGS))]

    def weigh_log(visits: float) -> WeighedPairs:
        types_N = type_weights(recipe, known_pairs)
        return WeighedPairs.weigh(known_pairs.queries, known_pairs.labels, times_N, types_N, visits)

    log = weigh_log(0.0)
    attributes, numbers, about = _about(recipe, dataset)
    settings = ForecastSettings(
        kind=config.kind, half_lives=lives, base=0, smoothing=1.0, horizon=horizon, pairs=1.0, until=begin,
        attributes=attributes, numbers=numbers, since=config.since,
        since_feature=next((date.name for date in recipe.label.features if date.source == config.since), None),
        **recipe.log_columns(dataset.report.unit).model_dump(),
    )  # fmt: skip
    labels = len(dataset.label_ids)
    empty = Forecast(settings, np.zeros((labels, len(lives))), np.full(labels, np.inf), about)
    if recipe.evaluation.history == "fixed":  # its metrics are means over queries
        chosen, by_rank = origin_times[:-within][-_CHOOSING:], weigh_log(_VISITS)
        if _best_vote_nats(empty, by_rank, chosen) > _best_vote_nats(empty, log, chosen) + _LEAST_GAIN_OF_VOTES:
            log, empty = by_rank, replace(empty, settings=settings.model_copy(update={"visits": _VISITS}))
    empty = _choose_calendar(empty, log, max(horizon, span / _PERIODS))
    fitted = _fit_base_and_regression(empty, log, origin_times, within, recipe.seed)
    update = {"by_time": _measure_by_time(fitted, log, max(horizon, span / _PERIODS))}
    fitted = fitted.with_settings(**update)
    return fitted.counted(log, end)


def _fit_base_and_regression(
    empty: Forecast, log: WeighedPairs, origin_times: list[float], within: int, seed: int
) -> Forecast:
    """Choose half-life, smoothing and regression; the last origin compares the kinds.

    `within` is the number of steps between origins in a horizon. The forecast returned is without pairs.
    """
    horizon, begin = empty.settings.horizon, float(log.times_N[0])
    last = float(log.times_N[-1]) - horizon
    once = float((1 - np.exp2(-log.select_between(-np.inf, last).gaps_N / horizon)).sum())
    settings = empty.settings.model_copy(update={"pairs": max(once, 1.0) * horizon / (last - begin)})
    origins = _origins(replace(empty, settings=settings), log, [*origin_times[:-within][-_CHOOSING:], origin_times[-1]])
    settings, nats = _choose_base(settings, origins)
    decayed = replace(empty, settings=settings.model_copy(update={"nats": nats, "served": "decayed"}))
    if settings.kind == "forecast":
        model, nats["forecast"] = _fit_regression(
            decayed, log, origin_times, (len(origin_times) - 2 * within, len(origin_times) - within), seed
        )
        if nats["forecast"] > nats["decayed"]:
            return replace(decayed, model=model).kinds()["forecast"]
    return decayed


def type_weights(recipe: Recipe, pairs: Pairs) -> Float64:
    """Return the weights of pairs by event type, float64 [N]. `data.weight`, which may fade, is left out."""
    events = recipe.weighted_data.events
    if events is None or pairs.events is None:
        return np.ones(len(pairs))
    return np.array([*events.by_type.values()])[pairs.events]


def check_forecast(recipe: Recipe, dataset: Dataset, known_pairs: Pairs) -> None:
    """Raise DataError where `fit_forecast` would, without a fit."""
    *_, origin_times, within = _schedule_origins(recipe, dataset, known_pairs)
    *_, about = _about(recipe, dataset)
    if recipe.prior.since is not None:
        first = origin_times[0] if recipe.prior.kind == "forecast" else origin_times[:-within][-_CHOOSING:][0]
        if not (~(about[SINCE].to_numpy() > first)).any():
            raise _none_there(first, recipe.prior.since)


def _none_there(origin: float, since: str | None) -> DataError:
    return DataError(
        f"prior.since: expected labels that are there on {datetime.fromtimestamp(origin, UTC):%Y-%m-%d}, within the "
        f"log, found none by {since!r}"
    )


def _schedule_origins(
    recipe: Recipe, dataset: Dataset, known_pairs: Pairs
) -> tuple[Float64, float, float, list[float], int]:
    """Place the origins of a log.

    Returns:
        Seconds since 1970 of every pair, float64 [N]; units of time in a second; seconds of the horizon; seconds since
        1970 of every origin; and steps between origins in a horizon.
    """
    config, unit = recipe.prior, dataset.report.unit
    if known_pairs.times is None or unit is None or config.kind == "count":
        raise DataError(f"prior.kind: expected dates in data.timestamp with {config.kind!r}, found numbers or none")
    times_N = known_pairs.times / UNITS[unit]
    begin, end = float(times_N.min()), float(times_N.max())
    horizon, span = _horizon(recipe, dataset, UNITS[unit]), end - begin
    earliest = begin + _FIRST_ORIGIN * span
    if not span or end - 3 * horizon < earliest:  # one horizon to fit in, one to choose in, one to compare in
        raise DataError(
            f"prior.horizon: expected at most ¼ of the log, {0.25 * span / 86_400:.3g} days, "
            f"received {horizon / 86_400:.3g} days"
        )
    last = end - horizon
    # A horizon is a whole number of steps between origins, so that no earlier horizon overlaps the one for comparison.
    most = _ORIGINS - 1
    within = min(max(1, int(np.ceil(horizon * most / (last - earliest)))), most // 2)
    steps = min(most, int((last - earliest) * within / horizon + 1e-9))
    return times_N, UNITS[unit], horizon, [last - horizon / within * i for i in reversed(range(steps + 1))], within


def _horizon(recipe: Recipe, dataset: Dataset, unit: float) -> float:
    """Return the seconds until the next prior: the recipe's horizon, or the length of the held-out period."""
    if recipe.prior.horizon is not None:
        return span_seconds(recipe.prior.horizon)
    for held_out in (dataset.valid, dataset.test):
        if len(held_out) and held_out.times is not None and np.ptp(held_out.times) > 0:
            return float(np.ptp(held_out.times)) / unit
    raise DataError("prior.horizon: expected a span such as '7d' without held-out pairs, received none")


def _about(recipe: Recipe, dataset: Dataset) -> tuple[list[str], list[str], pa.Table]:
    """Return names of id features and numbers, and their columns with `since`."""
    features = {feature.name: feature for feature in recipe.label.features}
    source = dataset.label_features(recipe.data.label_id)
    attributes: list[str] = []
    numbers: list[str] = []
    columns: dict[str, pa.Array] = {}
    for name in recipe.prior.features:
        feature = features[name]
        if feature.kind == "id":
            attributes.append(name)
            columns[name] = read_strings(feature, source).cast(pa.string()).dictionary_encode()
        else:
            numbers.append(name)
            columns[name] = pa.array(read_numbers(feature, source).astype(np.float64))
    if recipe.prior.since is not None:
        since = read_seconds(FeatureConfig(name="since", kind="date", column=recipe.prior.since), source)
        columns[SINCE] = pa.array(np.where(since == np.iinfo(np.int64).min, np.nan, since.astype(np.float64)))
    table = pa.table(columns) if columns else pa.table({"row": pa.nulls(len(dataset.label_ids))})
    return attributes, numbers, table


def _origins(empty: Forecast, log: WeighedPairs, origin_times: list[float]) -> Iterator[_Origin]:
    """Yield the origins of a log, by time."""
    forecast, previous, horizon = empty, -np.inf, empty.settings.horizon
    for origin in origin_times:
        added = log.select_between(previous, origin)
        forecast, labels = forecast.counted(added, origin), len(forecast.first)
        if not forecast.find_existing(origin).any():
            raise _none_there(origin, empty.settings.since)
        coming = log.select_between(origin, origin + horizon)
        yield _Origin(forecast, coming.pairs_after(origin, labels), coming.votes_after(origin, labels))
        previous = origin


def _choose_calendar(empty: Forecast, log: WeighedPairs, seconds: float) -> Forecast:
    """Choose a calendar by its gains in the last three periods.

    Without a gain in every period there is no calendar. The last gain does not choose between calendars.
    """
    begin, end = float(log.times_N[0]), float(log.times_N[-1])
    origin_times = [end - seconds * i for i in (3, 2, 1)]
    windows = [
        choice for choice in _WINDOWS if max(_LEAST_SPANS[window] for window in choice) <= origin_times[0] - begin
    ]
    best, mean = empty, _LEAST_GAIN
    for feature in empty.settings.attributes if windows else []:
        values = empty.about[feature].combine_chunks().dictionary.to_pylist()
        if not 1 < len(values) <= _MOST_VALUES:
            continue
        calendar = CalendarSettings(feature=feature, values=values, windows=["day"], shrinkage=1)
        none = replace(empty, seasons=np.zeros((len(values) + 1, HOURS)))
        counted = [origin.forecast for origin in _origins(none.with_settings(calendar=calendar), log, origin_times)]
        for selected, shrinkage in product(windows, _SHRINKAGES):
            tried = calendar.model_copy(update={"windows": selected, "shrinkage": shrinkage})
            *gains, last = (_gain(forecast.with_settings(calendar=tried), log, seconds) for forecast in counted)
            if min(*gains, last) > 0 and np.mean(gains) > mean:
                best, mean = none.with_settings(calendar=tried.model_copy(update={"gain": last})), float(np.mean(gains))
    return best


def _gain(forecast: Forecast, log: WeighedPairs, seconds: float) -> float:
    """Compute the gain by a forecast's calendar, nats a pair."""
    start = forecast.settings.until
    later = log.select_between(start, start + seconds)
    assert forecast.calendar is not None
    gains_N = forecast.calendar.gains(forecast.groups[later.labels_N], later.times_N)
    return _mean(gains_N, later.once_after(start))


def _mean(values_n: Float64, weights_n: Float64) -> float:
    return float(values_n @ weights_n / (weights_n.sum() or 1.0))


def _measure_by_time(fitted: Forecast, log: WeighedPairs, seconds: float) -> list[NatsAt]:
    """Measure decayed counts and calendar in the last period, by weekday and six UTC hours."""
    start = float(log.times_N[-1]) - seconds
    (origin,) = _origins(fitted, log, [start])
    forecast, later = origin.forecast.kinds()["decayed"], log.select_between(start, np.inf)
    plain = replace(forecast, settings=forecast.settings.model_copy(update={"calendar": None}), seasons=None)
    nats_N, weights_N = plain.log_shares(include_future=True)[later.labels_N], later.once_after(start)
    gains_N = np.zeros(len(nats_N))
    if forecast.calendar is not None:
        gains_N = forecast.calendar.gains(forecast.groups[later.labels_N], later.times_N)
    hours_N = hour_of_week(later.times_N)
    parts = {day: hours_N // 24 == i for i, day in enumerate(_WEEKDAYS)}
    parts |= {f"{hour:02}–{hour + 6:02} h": hours_N % 24 // 6 == hour // 6 for hour in range(0, 24, 6)}
    return [
        NatsAt(
            time=time, pairs=float(weights_N[of_N].sum()), nats=_mean(nats_N[of_N], weights_N[of_N]),
            gain=_mean(gains_N[of_N], weights_N[of_N]),
        )
        for time, of_N in parts.items()
    ]  # fmt: skip


def _choose_base(settings: ForecastSettings, origins: Iterator[_Origin]) -> tuple[ForecastSettings, dict[str, float]]:
    """Choose half-life and smoothing; the last origin measures the nats."""
    grid = [(base, smoothing) for base in range(len(settings.half_lives)) for smoothing in _SMOOTHINGS]
    *choosing_OG, last_G = [
        [origin.nats(origin.forecast.compute_log_base(*pair)) for pair in grid] for origin in origins
    ]
    mean_G = np.mean(choosing_OG, axis=0)
    # The first half-life has no decay: its counts are those of kind `count`.
    best, count = int(mean_G.argmax()), int(mean_G[: len(_SMOOTHINGS)].argmax())
    base, smoothing = grid[best]
    nats = {"count": last_G[count], "decayed": last_G[best]}
    return settings.model_copy(update={"base": base, "smoothing": smoothing}), nats


def _best_vote_nats(empty: Forecast, log: WeighedPairs, origin_times: list[float]) -> float:
    """Compute a vote's mean log-probability at origins, by the best half-life and smoothing."""
    grid = [*product(range(len(empty.settings.half_lives)), _SMOOTHINGS)]
    nats_OG = [
        [origin.vote_nats(origin.forecast.compute_log_base(*pair)) for pair in grid]
        for origin in _origins(empty, log, origin_times)
    ]
    return float(np.mean(nats_OG, axis=0).max())


def _fit_regression(
    empty: Forecast, log: WeighedPairs, origin_times: list[float], origin_counts: tuple[int, int], seed: int
) -> tuple[bytes, float]:
    """Fit the regression; measure one of earlier origins at the last origin.

    Args:
        origin_counts: two numbers of origins. The regression on the first number chooses the number of trees, at the
            last of the earlier origins. The second number counts the earlier origins, whose horizons end before the
            last one's begins.
    """
    import xgboost

    rng, parts, settings = np.random.default_rng(seed), list[_Rows](), _BOOSTER | {"seed": seed}
    for origin in _origins(empty, log, origin_times):
        parts.append(_sample_rows(origin, _ROWS // len(origin_times), rng))

    def matrix(selected: list[_Rows]) -> xgboost.DMatrix:
        columns, pairs, weights, log_base = (np.concatenate(parts) for parts in zip(*selected, strict=True))
        return xgboost.DMatrix(columns, pairs, weight=weights, base_margin=log_base, nthread=1)

    first, earlier = origin_counts
    # `best_iteration` counts from 0.
    trees = 1 + xgboost.train(
        settings, matrix(parts[:first]), _TREES, verbose_eval=False,
        evals=[(matrix(parts[earlier - 1 : earlier]), "next")], early_stopping_rounds=_PATIENCE,
    ).best_iteration  # fmt: skip
    tried = xgboost.train(settings, matrix(parts[:earlier]), trees)
    last = replace(origin.forecast, model=bytes(tried.save_raw("ubj"))).kinds()["forecast"]
    nats = origin.nats(last.log_shares(include_future=True))
    return bytes(xgboost.train(settings, matrix(parts), trees).save_raw("ubj")), nats


class _Rows(NamedTuple):
    """Hold rows of the regression: columns, float32 [R, F], pairs, weights, and the log of pairs expected by the
    base."""

    columns: Float32
    pairs: Float64
    weights: Float64
    log_base: Float64


def _sample_rows(origin: _Origin, most: int, rng: np.random.Generator) -> _Rows:
    """Return the rows of one origin: half for the most frequent labels, half for a sample of the others."""
    forecast = origin.forecast
    log_base_L = forecast.log_base - np.logaddexp.reduce(forecast.log_base[origin.available])
    rows_R = np.flatnonzero(origin.available)
    weights_R = np.ones(len(rows_R))
    if len(rows_R) > most:
        rows_R = rows_R[np.argsort(-log_base_L[rows_R], kind="stable")]
        others, drawn = len(rows_R) - most // 2, most - most // 2
        sample = most // 2 + rng.choice(others, drawn, replace=False)
        rows_R = np.concatenate([rows_R[: most // 2], rows_R[sample]])
        # The weight of a drawn label includes its share of the labels that were not drawn.
        weights_R = np.concatenate([np.ones(most // 2), np.full(drawn, others / drawn)])
    pairs = np.log(max(float(origin.pairs_L[origin.available].sum()), 1.0))
    return _Rows(forecast.columns(rows_R), origin.pairs_L[rows_R], weights_R, log_base_L[rows_R] + pairs)
