"""Forecast of label popularity by a regression on the past of a log, one row per label and origin [METHODS §6].

Legend: `L` labels, `N` pairs, `W` half-lives, `S` smoothings, `R` rows of the regression, `F` columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from longtail.bundle.arrays import Bools, Float32, Float64, Int64
from longtail.bundle.dates import span_seconds
from longtail.bundle.forecast import SINCE, Forecast, ForecastSettings, gaps_of, largest_weights, previous_pairs
from longtail.tables.times import UNITS
from longtail.trainer.config import FeatureConfig, Recipe
from longtail.trainer.data.columns import FeatureTable, numbers_in, seconds_in, strings_of
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.errors import DataError

_HALVINGS = 8
"""Half-lives are the log's span, halved 0 to this many times."""
_FOREVER = 1000.0
"""Half-life without decay, in spans of the log."""
_SMOOTHINGS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_FIRST_ORIGIN = 0.25
"""Smallest share of the log before an origin."""
_CHOOSING = 4
"""Number of origins by which half-life and smoothing are chosen."""
_ROWS = 400_000
"""Largest number of rows of the regression, which then takes about twenty seconds.

It uses one core, so that figures repeat on any machine.
"""
_TREES, _PATIENCE = 500, 20
_BOOSTER = {
    "objective": "count:poisson", "eta": 0.05, "max_leaves": 31, "max_depth": 0, "grow_policy": "lossguide",
    "min_child_weight": 5, "lambda": 1, "colsample_bytree": 0.7, "subsample": 0.7, "nthread": 1,
}  # fmt: skip


class _Origin(NamedTuple):
    """Hold a time within the log: sums before it, and pairs of every label in the horizon after it, float64 [L]."""

    forecast: Forecast
    pairs_L: Float64

    def nats(self, log_share_L: Float64) -> float:
        """Compute the mean log-probability of the horizon's pairs under unnormalised shares, float64 [L]."""
        pairs_n, log_n = self.pairs_L[self.there], log_share_L[self.there]
        return float(pairs_n @ (log_n - np.logaddexp.reduce(log_n)) / max(float(pairs_n.sum()), 1.0))

    @property
    def there(self) -> Bools:
        """Mask labels whose date is not later than the end of the horizon, bool [L]."""
        return self.forecast.there(self.forecast.settings.end)


class _Log(NamedTuple):
    """Hold pairs with weight by time: label rows, seconds since 1970, seconds since the query's previous pair with the
    label, and `largest_weights`, [N] each."""

    labels_N: Int64
    times_N: Float64
    gaps_N: Float64
    weights_N: Float64
    increases_N: Float64

    def between(self, after: float, until: float) -> _Log:
        """Return the pairs later than `after`, up to `until`."""
        inside = slice(*np.searchsorted(self.times_N, (after, until), side="right"))
        of_time = self.times_N[inside], self.gaps_N[inside]
        return _Log(self.labels_N[inside], *of_time, self.weights_N[inside], self.increases_N[inside])

    def pairs_after(self, after: float, labels: int) -> Float64:
        """Count each label's pairs, a query once at its largest weight; the mean weight is 1, float64 [L]."""
        first_N = self.times_N - self.gaps_N <= after
        weights_N = np.where(first_N, self.weights_N, self.increases_N)
        weights_N *= first_N.sum() / (weights_N.sum() or 1.0)
        return np.bincount(self.labels_N, weights_N, labels).astype(np.float64)


def fit_forecast(recipe: Recipe, dataset: Dataset, known: Pairs) -> Forecast:
    """Fit π* of the horizon after the known pairs; raises DataError if times do not allow it.

    Half-life, smoothing and number of trees maximise the likelihood in periods before the last. The last period
    compares all kinds of priors.
    """
    config = recipe.prior
    times_N, _, horizon, at, within = _origins_of(recipe, dataset, known)
    assert config.kind != "count"
    begin, until = float(times_N.min()), float(times_N.max())
    span = until - begin
    lives = [_FOREVER * span, *(span / 2.0**place for place in range(_HALVINGS))]
    by_time = np.argsort(times_N, kind="stable")
    queries_N, labels_N, times_N = known.queries[by_time], known.labels[by_time], times_N[by_time]
    gaps_N = gaps_of(times_N, previous_pairs(queries_N, labels_N))
    weights_N = largest_weights(type_weights(recipe, known)[by_time], queries_N, labels_N)
    log = _Log(labels_N.astype(np.int64), times_N, gaps_N, *weights_N)
    attributes, numbers, about = _about(recipe, dataset)
    last = until - horizon
    pairs = (
        max(float((1 - np.exp2(-log.between(-np.inf, last).gaps_N / horizon)).sum()), 1.0) * horizon / (last - begin)
    )
    settings = ForecastSettings(
        kind=config.kind, half_lives=lives, base=0, smoothing=1.0, horizon=horizon, pairs=pairs, until=begin,
        attributes=attributes, numbers=numbers, since=config.since,
        since_feature=next((each.name for each in recipe.label.features if each.source == config.since), None),
        **recipe.log_columns(dataset.report.unit).model_dump(),
    )  # fmt: skip
    labels = len(dataset.label_ids)
    empty = Forecast(settings, np.zeros((labels, len(lives))), np.full(labels, np.inf), about)
    earlier, first = at[:-within], len(at) - 2 * within
    settings, nats = _with_base(settings, _origins(empty, log, [*earlier[-_CHOOSING:], at[-1]]))
    empty, model = replace(empty, settings=settings), None
    if config.kind == "forecast":
        parts = first, len(earlier)
        model, nats["forecast"] = _boosted(_origins(empty, log, at), parts, _ROWS // len(at), recipe.seed)
        model = model if nats["forecast"] > nats["decayed"] else None
    served = "decayed" if model is None else "forecast"
    settings = settings.model_copy(update={"nats": nats, "served": served})
    return replace(empty, settings=settings, model=model).counted(log.labels_N, log.times_N, until, *log[2:])


def type_weights(recipe: Recipe, pairs: Pairs) -> Float64:
    """Return the weights of pairs by their types of events, float64 [N], without `data.weight`, which may fade."""
    events = recipe.weighted_data.events
    if events is None or pairs.events is None:
        return np.ones(len(pairs))
    return np.array([*events.by_type.values()])[pairs.events]


def check_forecast(recipe: Recipe, dataset: Dataset, known: Pairs) -> None:
    """Raise DataError where `fit_forecast` would, without a fit."""
    *_, at, within = _origins_of(recipe, dataset, known)
    *_, about = _about(recipe, dataset)
    if recipe.prior.since is not None:
        first = at[0] if recipe.prior.kind == "forecast" else at[:-within][-_CHOOSING:][0]
        if not (~(about[SINCE].to_numpy() > first)).any():
            raise _none_there(first, recipe.prior.since)


def _none_there(origin: float, since: str | None) -> DataError:
    return DataError(
        f"prior.since: expected labels that are there on {datetime.fromtimestamp(origin, UTC):%Y-%m-%d}, within the "
        f"log, found none by {since!r}"
    )


def _origins_of(recipe: Recipe, dataset: Dataset, known: Pairs) -> tuple[Float64, float, float, list[float], int]:
    """Place the origins of a log.

    Returns:
        Seconds since 1970 of every pair, float64 [N]; units of time in a second; seconds of the horizon; seconds since
        1970 of every origin; and steps between origins in a horizon.
    """
    config, unit = recipe.prior, dataset.report.unit
    if known.times is None or unit is None or config.kind == "count":
        raise DataError(f"prior.kind: expected dates in data.timestamp with {config.kind!r}, found numbers or none")
    times_N = known.times / UNITS[unit]
    begin, until = float(times_N.min()), float(times_N.max())
    horizon, span = _horizon(recipe, dataset, UNITS[unit]), until - begin
    earliest = begin + _FIRST_ORIGIN * span
    if not span or until - 3 * horizon < earliest:  # one horizon to fit in, one to choose in, one to compare in
        raise DataError(
            f"prior.horizon: expected at most ¼ of the log, {0.25 * span / 86_400:.3g} days, "
            f"received {horizon / 86_400:.3g} days"
        )
    last = until - horizon
    # A horizon is a whole number of steps between origins, so that no earlier horizon overlaps the one for comparison.
    most = config.origins - 1
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
    """Return the names of id features and of numbers in the recipe, and their columns with `since`."""
    features = {feature.name: feature for feature in recipe.label.features}
    source = FeatureTable(dataset.label_ids, dataset.label_table, recipe.data.label_id, None, np.empty(0, np.int64))
    attributes: list[str] = []
    numbers: list[str] = []
    columns: dict[str, pa.Array] = {}
    for name in recipe.prior.features:
        feature = features[name]
        if feature.kind == "id":
            attributes.append(name)
            columns[name] = strings_of(feature, source).cast(pa.string()).dictionary_encode()
        else:
            numbers.append(name)
            columns[name] = pa.array(numbers_in(feature, source).astype(np.float64))
    if recipe.prior.since is not None:
        since = seconds_in(FeatureConfig(name="since", kind="date", column=recipe.prior.since), source)
        columns[SINCE] = pa.array(np.where(since == np.iinfo(np.int64).min, np.nan, since.astype(np.float64)))
    table = pa.table(columns) if columns else pa.table({"row": pa.nulls(len(dataset.label_ids))})
    return attributes, numbers, table


def _origins(empty: Forecast, log: _Log, at: list[float]) -> Iterator[_Origin]:
    """Yield the origins of a log, by time."""
    forecast, before, horizon = empty, -np.inf, empty.settings.horizon
    for origin in at:
        added = log.between(before, origin)
        forecast = forecast.counted(added.labels_N, added.times_N, origin, *added[2:])
        if not forecast.there(origin).any():
            raise _none_there(origin, empty.settings.since)
        yield _Origin(forecast, log.between(origin, origin + horizon).pairs_after(origin, len(forecast.first)))
        before = origin


def _with_base(settings: ForecastSettings, origins: Iterator[_Origin]) -> tuple[ForecastSettings, dict[str, float]]:
    """Choose half-life and smoothing on all origins except the last, which measures the nats."""
    grid = [(base, smoothing) for base in range(len(settings.half_lives)) for smoothing in _SMOOTHINGS]

    def nats(origin: _Origin, base: int, smoothing: float) -> float:
        sums_L = origin.forecast.sums[:, base]
        return origin.nats(np.log(sums_L + smoothing * sums_L.mean() + np.finfo(float).tiny))

    *choosing, last_G = [np.array([nats(origin, *pair) for pair in grid]) for origin in origins]
    mean_G = np.mean(choosing, axis=0)
    best, count = int(mean_G.argmax()), int(mean_G[: len(_SMOOTHINGS)].argmax())
    base, smoothing = grid[best]
    found = {"count": float(last_G[count]), "decayed": float(last_G[best])}
    return settings.model_copy(update={"base": base, "smoothing": smoothing}), found


def _boosted(origins: Iterator[_Origin], until: tuple[int, int], most: int, seed: int) -> tuple[bytes, float]:
    """Fit the regression, and measure the nats of a regression on earlier origins at the last origin.

    Args:
        most: largest number of rows of each origin.
        until: two numbers of origins. The regression on the first number chooses the number of trees, at the last of
            the earlier origins. The second number counts the earlier origins, whose horizons end before the last one's
            begins.
    """
    import xgboost

    rng, parts, settings = np.random.default_rng(seed), list[_Rows](), _BOOSTER | {"seed": seed}
    for origin in origins:
        parts.append(_rows_of(origin, most, rng))

    def matrix(some: list[_Rows]) -> xgboost.DMatrix:
        columns, pairs, weights, log_base = (np.concatenate(each) for each in zip(*some, strict=True))
        return xgboost.DMatrix(columns, pairs, weight=weights, base_margin=log_base, nthread=1)

    first, earlier = until
    trees = 1 + xgboost.train(
        settings, matrix(parts[:first]), _TREES, verbose_eval=False,
        evals=[(matrix(parts[earlier - 1 : earlier]), "next")], early_stopping_rounds=_PATIENCE,
    ).best_iteration  # fmt: skip
    tried = xgboost.train(settings, matrix(parts[:earlier]), trees)
    last = replace(origin.forecast, model=bytes(tried.save_raw("ubj"))).kinds()["forecast"]
    nats = origin.nats(last.log_shares(whole=True))
    return bytes(xgboost.train(settings, matrix(parts), trees).save_raw("ubj")), nats


class _Rows(NamedTuple):
    """Hold rows of the regression: columns, float32 [R, F], pairs, weights, and the log of pairs expected by the
    base."""

    columns: Float32
    pairs: Float64
    weights: Float64
    log_base: Float64


def _rows_of(origin: _Origin, most: int, rng: np.random.Generator) -> _Rows:
    """Return the rows of one origin: half for the most frequent labels, half for a sample of the others."""
    forecast = origin.forecast
    log_base_L = forecast.log_base - np.logaddexp.reduce(forecast.log_base[origin.there])
    rows_R = np.flatnonzero(origin.there)
    weights_R = np.ones(len(rows_R))
    if len(rows_R) > most:
        rows_R = rows_R[np.argsort(-log_base_L[rows_R], kind="stable")]
        rest, drawn = len(rows_R) - most // 2, most - most // 2
        sample = most // 2 + rng.choice(rest, drawn, replace=False)
        rows_R = np.concatenate([rows_R[: most // 2], rows_R[sample]])
        weights_R = np.concatenate([np.ones(most // 2), np.full(drawn, rest / drawn)])
    pairs = np.log(max(float(origin.pairs_L[origin.there].sum()), 1.0))
    return _Rows(forecast.columns(rows_R), origin.pairs_L[rows_R], weights_R, log_base_L[rows_R] + pairs)
