"""Forecast popularity: π*, every label's share of the pairs of the next period [METHODS §6].

The pairs of a label are stored as exponentially decaying sums, one for each of several half-lives, so that later pairs
can be added without the earlier ones. π* is one of these sums, smoothed, times a factor from a boosted Poisson
regression on the label's shares of all sums, the shares of its category or brand, its age and its numbers.

Legend: `L` labels, `M` new labels, `W` half-lives, `N` pairs, `G` values of an attribute, `F` columns of the
regression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from longtail.bundle.arrays import Array, Bools, Float32, Float64, Int64
from longtail.bundle.calendar import HOURS, Calendar, Window, pairs_by_hour
from longtail.bundle.dates import parse_seconds
from longtail.bundle.errors import BundleCorruptError
from longtail.bundle.frequency import log_frequencies
from longtail.bundle.ids import id_text
from longtail.bundle.manifest import LogColumns
from longtail.bundle.mapped_table import combine_chunks, map_table, write_table
from longtail.bundle.one_line import one_line
from longtail.bundle.values import parse_number
from longtail.bundle.weighed_pairs import WeighedPairs

_LEAST = 0.01
"""Pairs per horizon that are added before a logarithm is taken."""
_RELEASED = "released"
"""Kind of prior: π* before its first refresh."""
_ABSENT = 1e-12
"""π* of a label whose date lies in the future, as a fraction of an average label's."""
_ENOUGH = 100
"""Fewest later pairs by which π* is compared with π* as released, which is served until then."""
_COMPARED = 1_000
"""Fewest later pairs for decayed counts in place of a regression; earlier pairs that count in a later comparison."""
_SPAN = 1
"""Position of the half-life of the calendar's sums: the span of the log."""
_SUMS, _FIRST, SINCE = "pair sums", "first pair", "there since"
_LOG_SHARES, _OFFSET = "log shares as released", "log noise over shares"
"""Columns of the file; features cannot have such names, because features are identifiers."""
_ABOUT, _MODEL, _SEASONS = b"forecast", b"xgboost", b"pairs by hour of the week"


class CalendarSettings(BaseModel):
    """Settings of the calendar of an attribute."""

    model_config = ConfigDict(extra="forbid")

    feature: str
    """Attribute whose values have a calendar."""
    values: list[str]
    """Values with a calendar of their own, in the order of the rows; all others share the last row."""
    windows: list[Window]
    """Effects that are estimated: `day` of the week, `hour` of the day."""
    shrinkage: float = Field(gt=0)
    """Number of pairs, observed and expected, that are added to every window."""
    gain: float = 0.0
    """Gain of the held-out pairs of a last period by the calendar, nats a pair."""


class NatsAt(BaseModel):
    """Likelihood of held-out pairs at a weekday or hours, UTC."""

    time: str
    pairs: float
    nats: float
    """Mean log-probability under decayed counts, without a calendar."""
    gain: float
    """What the calendar adds; 0 without one."""


class ForecastSettings(LogColumns):
    """Settings with which a forecast was fitted."""

    kind: Literal["decayed", "forecast"]
    half_lives: list[float] = Field(min_length=1)
    """Half-lives in seconds, descending [W]."""
    base: int = Field(ge=0)
    """Position of the half-life whose sum is multiplied by the regression's factor."""
    smoothing: float = Field(gt=0)
    """Fraction of an average label's sum that is added to every label's sum."""
    horizon: float = Field(gt=0)
    """Length of the forecast period in seconds."""
    pairs: float = Field(gt=0)
    """Number of pairs in a horizon of the log, repeats by a query discounted, with which the forecast was fitted."""
    until: float
    """Time of the last pairs in the sums, in seconds since 1970."""
    attributes: list[str] = Field(default_factory=list)
    """Label features that are one id, such as a category."""
    numbers: list[str] = Field(default_factory=list)
    """Label features that are numbers."""
    by_time: list[NatsAt] = Field(default_factory=list)
    """Likelihood of the pairs of a last period by weekday and by hours of the day."""
    calendar: CalendarSettings | None = None
    """Calendar of an attribute; None where it makes held-out pairs no likelier."""
    ahead: float | None = Field(default=None, gt=0)
    """Seconds after `until` that a refresh forecasts by the calendar; None: the horizon."""
    offset: float = 0.0
    """Offset of a label that is added while serving, nats."""
    visits: float = Field(default=0.0, ge=0, le=1)
    """Power by which the rank of a pair in its query's visit divides its weight; 0: all pairs count alike."""
    since: str | None = None
    """Column with the date since which a label exists."""
    since_feature: str | None = None
    """Label feature that reads this column, if there is one."""
    served: Literal["decayed", "forecast", "released"] = "decayed"
    """Kind that is served: the likeliest on held-out pairs; `released` is π* before the first refresh."""
    nats: dict[str, float] = Field(default_factory=dict)
    """Mean log-probability of held-out pairs by kind of prior: of a last period, or of pairs since the release."""
    compared: int = Field(default=0, ge=0)
    """Number of pairs since the release in `nats`; the latest count most."""

    @property
    def comparison(self) -> str:
        """Describe the served kind and the comparison that chose it."""
        nats = ", ".join(f"{kind} {value:.3f}" for kind, value in self.nats.items())
        if self.compared < _ENOUGH and self.served == _RELEASED:
            return f"π* as released is served until {_ENOUGH} later pairs can be compared, {self.compared} so far"
        kind = "π* as released" if self.served == _RELEASED else self.served
        return f"{kind} is served, by {self.compared:,} later pairs; nats a pair: {nats}"

    @property
    def end(self) -> float:
        """Return the end of the horizon in seconds since 1970."""
        return self.until + self.horizon


@dataclass(frozen=True)
class Forecast:
    """Decayed sums of every label's pairs, attributes of the labels, and the regression.

    Attributes:
        sums: Σ 2^(−age / half-life) over the queries that chose a label, of the newest pair of each, float64 [L, W].
        first: seconds since 1970 of a label's first pair, float64 [L]; +∞ without one.
        about: `settings.attributes` as dictionaries of strings, `settings.numbers` as float64, and `since` in seconds
            since 1970, float64, NaN where missing; L rows.
        model: XGBoost model as UBJSON; None for `decayed`.
        released: log π* before the first refresh, without the calendar, float64 [L]; None if there was no refresh.
        seasons: decayed sums of the calendar's values by hour of the week, float64 [G, 168]; None without a calendar.
        offset: log ν − log π_w, float64 [L]: the noise of training over the labels' shares of the training pairs, as
            weighted in the loss; None if both are the same. With it a score f + k·log(ν·π*/π_w) is k·log p*(y|x).
    """

    settings: ForecastSettings
    sums: Float64
    first: Float64
    about: pa.Table
    model: bytes | None = None
    released: Float64 | None = None
    offset: Float64 | None = None
    seasons: Float64 | None = None

    __repr__ = one_line

    def counted(self, pairs: WeighedPairs, until: float) -> Forecast:
        """Decay the sums to a later time, and add the pairs since `settings.until`."""
        lives_W = np.asarray(self.settings.half_lives)
        # Exponential decay is multiplicative: one factor per half-life ages all earlier pairs at once.
        aged_W = np.exp2((self.settings.until - until) / lives_W)
        sums_LW, first_L, seasons_GH = self.sums * aged_W, self.first.copy(), self.seasons
        for w, life in enumerate(lives_W):
            decayed_N = np.exp2((pairs.times_N - until) / life)
            # A repeated pair adds what its predecessor has lost, so that a query weighs at most its largest weight.
            added_N = -np.expm1(-np.log(2) * pairs.gaps_N / life) * pairs.weights_N
            added_N += pairs.increases_N * np.exp2(-pairs.gaps_N / life)
            sums_LW[:, w] += np.bincount(pairs.labels_N, decayed_N * added_N, len(first_L))
            if w == _SPAN and seasons_GH is not None:
                groups_N = self.groups[pairs.labels_N]
                more_GH = pairs_by_hour(groups_N, pairs.times_N, decayed_N * added_N, len(seasons_GH))
                seasons_GH = seasons_GH * aged_W[w] + more_GH
        # An assignment by rows would keep only the last time of a label with several pairs.
        np.minimum.at(first_L, pairs.labels_N, pairs.times_N)
        return replace(self.with_settings(until=until), sums=sums_LW, first=first_L, seasons=seasons_GH)

    def with_settings(self, **settings: Any) -> Forecast:
        """Replace some settings."""
        return replace(self, settings=self.settings.model_copy(update=settings))

    def refreshed(
        self, queries_N: npt.NDArray[np.integer], labels_N: npt.NDArray[np.integer], times_N: Float64, until: float,
        weights_N: Float64 | None = None, ahead: float | None = None,
    ) -> Forecast:  # fmt: skip
        """Add the pairs between `settings.until` and a later time; a query weighs at most its largest on a label.

        The later half of these pairs compares the kinds of priors, which know the earlier half. The likeliest kind is
        served. π* as released is served until 100 pairs were compared; decayed counts replace a regression after 1,000.

        Args:
            queries_N: number of each pair's query. Earlier pairs serve to recognise repeated ones.
            weights_N: weights of the pairs by their types of events; None for 1 each.
            ahead: seconds after `until` that are forecast by the calendar; None: the horizon.
        """
        pairs = WeighedPairs.weigh(queries_N, labels_N, times_N, weights_N, self.settings.visits)
        begin, end = np.searchsorted(pairs.times_N, (self.settings.until, until), side="right")
        new_n = begin + np.flatnonzero(pairs.previous_N[begin:end] < begin)
        # A kind must be judged by pairs that it has not counted, so the earlier half is counted first.
        half = int(new_n[len(new_n) // 2]) if len(new_n) else end
        before = self if self.released is not None else self._as_released()
        fresh = before.counted(pairs.select(slice(begin, end)), until).with_settings(ahead=ahead)
        middle = before
        if half > begin:
            middle = before.counted(pairs.select(slice(begin, half)), pairs.times_N[half - 1])
        middle = middle.with_settings(ahead=max(until - middle.settings.until, 1.0))
        first_n, settings = half + np.flatnonzero(pairs.previous_N[half:end] < half), before.settings
        compared_n, weights_n = pairs.labels_N[first_n], pairs.weights_N[first_n]
        weights_n = weights_n * (len(weights_n) / (weights_n.sum() or 1.0))
        weight = min(settings.compared, _COMPARED)
        compared = weight + len(compared_n)
        if not compared:
            return fresh
        nats = {
            kind: (weight * settings.nats.get(kind, 0.0)
                   + float(weights_n @ prior.log_shares(include_future=True)[compared_n])) / compared
            for kind, prior in middle.kinds().items()
        }  # fmt: skip
        served: list[str] = [] if compared < _ENOUGH else ["decayed" if before.model is None else "forecast"]
        served += ["decayed"] if compared >= _COMPARED else []
        return fresh.with_settings(nats=nats, compared=compared, served=max([_RELEASED, *served], key=nats.__getitem__))

    def _as_released(self) -> Forecast:
        """Keep π* as released, which is served until later pairs have compared it."""
        released = self._log_rates - self._log_total - self._log_ahead
        return replace(self.with_settings(served=_RELEASED, nats={}, compared=0), released=released)

    def kinds(self) -> dict[str, Forecast]:
        """Return undecayed counts and the kinds of priors that can be served."""
        kinds = {"count": self.with_settings(served="decayed", base=0), "decayed": self.with_settings(served="decayed")}
        kinds |= {} if self.model is None else {"forecast": self.with_settings(served="forecast")}
        return kinds if self.released is None else kinds | {_RELEASED: self.with_settings(served=_RELEASED)}

    def with_labels(
        self, rows_M: npt.NDArray[np.integer], values_M: Sequence[Mapping[str, Any]], now_M: Sequence[float]
    ) -> Forecast:
        """Append labels: labels of the catalogue with their pairs, and new labels (row −1) without pairs.

        Args:
            values_M, now_M: see `log_popularity_of_new`.
        """
        in_bundle_M, settings = rows_M >= 0, self.settings
        more: dict[str, list[Any]] = {SINCE: self._read_dates(values_M, now_M).tolist()}
        more |= {name: [id_text(values.get(name)) for values in values_M] for name in settings.attributes}
        more |= {name: [_number(values.get(name)) for values in values_M] for name in settings.numbers}
        names = {SINCE: (settings.since, settings.since_feature)}
        # A label of the catalogue keeps the columns that a change does not set.
        for position in map(int, np.flatnonzero(in_bundle_M)):
            for name in self.about.column_names:
                if not any(column in values_M[position] for column in names.get(name, (name,))):
                    more.setdefault(name, [None] * len(values_M))[position] = self.about[name][rows_M[position]].as_py()
        columns = {}
        for name in self.about.column_names:
            coded = name in self.settings.attributes
            before = self.about[name].cast(pa.string()) if coded else self.about[name]
            joined = pa.chunked_array([*before.chunks, pa.array(more.get(name, [None] * len(values_M)), before.type)])
            columns[name] = joined.combine_chunks().dictionary_encode() if coded else joined
        return replace(
            self,
            sums=np.concatenate([self.sums, np.where(in_bundle_M[:, None], self.sums[rows_M], 0.0)]),
            first=np.concatenate([self.first, np.where(in_bundle_M, self.first[rows_M], np.inf)]),
            about=pa.table(columns),
            released=None if self.released is None else np.concatenate(
                [self.released, np.where(
                    in_bundle_M, self.released[rows_M],
                    self._log_shares_of_new(values_M, now_M) - self._log_ahead_of_new(values_M),
                )]
            ),
            offset=None if self.offset is None else np.concatenate(
                [self.offset, np.where(in_bundle_M, self.offset[rows_M], settings.offset)]
            ),
        )  # fmt: skip

    def take(self, rows_n: npt.NDArray[np.integer]) -> Forecast:
        """Select labels by rows, int [n], in that order."""
        released, offset = (None if column is None else column[rows_n] for column in (self.released, self.offset))
        return replace(
            self, sums=self.sums[rows_n], first=self.first[rows_n], about=self.about.take(rows_n), released=released,
            offset=offset,
        )  # fmt: skip

    def find_existing(self, time: float) -> Bools:
        """Compute which labels exist at a time, in seconds since 1970, bool [L]."""
        return ~(self._since > time)  # NaN, a missing date, counts as existing

    @cached_property
    def log_base(self) -> Float64:
        """Compute the log of the smoothed base sum times the calendar, float64 [L]."""
        return self.compute_log_base(self.settings.base, self.settings.smoothing)

    def compute_log_base(self, base: int, smoothing: float) -> Float64:
        """Compute `log_base` by another half-life and smoothing, float64 [L]."""
        return np.log(self._even_sums[:, base] + self._added(base, smoothing)) + self._log_ahead

    def log_popularity(self, *, include_future: bool = False) -> Float64:
        """Compute what μ multiplies, log(ν·π*/π_w), nats, float64 [L]; logsumexp is 0. Without `offset` it is log π*.

        Args:
            include_future: see `log_shares`.
        """
        return self.with_offset(self.log_shares(include_future=include_future))

    def with_offset(self, log_share_L: Float64) -> Float64:
        """Add `offset` to other log shares, float64 [L], and normalise."""
        log_L = log_share_L if self.offset is None else log_share_L + self.offset
        total = float(np.logaddexp.reduce(log_L))
        return log_L - total

    def log_shares(self, *, include_future: bool = False) -> Float64:
        """Compute log π* of the horizon that begins at `settings.until`, nats, float64 [L]; logsumexp is 0.

        Args:
            include_future: include labels whose date lies within the horizon; a service leaves them out.
        """
        exists_L = self.find_existing(self.settings.end if include_future else self.settings.until)
        highest = float(self._log_rates[exists_L].max(initial=-np.inf)) if exists_L.any() else 0.0
        shares_L = np.where(exists_L, np.exp(self._log_rates - highest), 0.0)
        return log_frequencies(shares_L, smoothing=max(_ABSENT * float(shares_L.mean()), np.finfo(float).tiny))

    def log_popularity_of_new(self, values_M: Sequence[Mapping[str, Any]], now_M: Sequence[float]) -> Float64:
        """Compute `log_popularity` of new labels, which have no pairs yet, nats, float64 [M].

        Args:
            values_M: values by name of feature or column; unknown attributes count as average ones.
            now_M: time when each label was added, in seconds since 1970; a label without a date exists since then.
        """
        since_M, until = self._read_dates(values_M, now_M), self.settings.until
        exists_M = since_M <= np.maximum(np.asarray(now_M, np.float64), until)
        shares_M = np.where(exists_M, self._log_shares_of_new(values_M, now_M), np.log(_ABSENT / len(self.first)))
        return shares_M + self.settings.offset - self._log_offset_total

    def columns(self, rows_n: npt.NDArray[np.integer] | slice = slice(None)) -> Float32:
        """Compute the regression's inputs, float32 [n, F]."""
        codes = {name: np.asarray(self._coded(name).indices.fill_null(-1))[rows_n] for name in self.settings.attributes}
        numbers = {name: np.asarray(self.about[name])[rows_n] for name in self.settings.numbers}
        now, since = self.settings.until, self._since[rows_n]
        return self._columns(self._even_sums[rows_n], self.first[rows_n], codes, numbers, since, now)

    def write(self, path: Path) -> None:
        """Write as an Arrow file, with settings and regression in the schema."""
        sums = pa.FixedSizeListArray.from_arrays(self.sums.reshape(-1), self.sums.shape[1])
        table = self.about.append_column(_SUMS, sums).append_column(_FIRST, pa.array(self.first))
        for name, column in ((_LOG_SHARES, self.released), (_OFFSET, self.offset)):
            table = table if column is None else table.append_column(name, pa.array(column))
        about = {_ABOUT: self.settings.model_dump_json().encode()}
        about |= {} if self.model is None else {_MODEL: self.model}
        about |= {} if self.seasons is None else {_SEASONS: self.seasons.tobytes()}
        write_table(path, table.replace_schema_metadata(about))

    @classmethod
    def read(cls, path: Path, *, verify: bool = True) -> Forecast:
        """Map what `write` wrote; raises BundleCorruptError."""
        table = map_table(path, verify=verify)
        about = table.schema.metadata or {}
        try:
            settings = ForecastSettings.model_validate_json(about[_ABOUT])
            sums = np.asarray(combine_chunks(table[_SUMS]).flatten()).reshape(len(table), -1)
            numbers = [_FIRST, *(name for name in (_LOG_SHARES, _OFFSET) if name in table.column_names)]
            columns = {name: np.asarray(combine_chunks(table[name])) for name in numbers}
            rest = table.drop_columns([_SUMS, *columns]).replace_schema_metadata(None)
            seasons = None
            if settings.calendar is not None:
                groups = len(settings.calendar.values) + 1
                seasons = np.frombuffer(about[_SEASONS], np.float64).reshape(groups, HOURS)
        except (KeyError, ValueError) as error:
            raise BundleCorruptError(f"{path}: expected sums and settings of a forecast: {error}") from error
        released, offset = map(columns.get, (_LOG_SHARES, _OFFSET))
        return cls(settings, sums, columns[_FIRST], rest, about.get(_MODEL), released, offset, seasons)

    def _read_dates(self, values_M: Sequence[Mapping[str, Any]], now_M: Sequence[float]) -> Float64:
        """Return the dates of new labels, in seconds since 1970, float64 [M]; `now` for labels without one."""
        names = [name for name in (self.settings.since, self.settings.since_feature) if name]
        dates = [next((values[name] for name in names if values.get(name) is not None), None) for values in values_M]
        return np.array([_seconds(date, now) for date, now in zip(dates, now_M, strict=True)], np.float64)

    @cached_property
    def _since(self) -> Float64:
        if self.settings.since is None:
            return np.full(len(self.first), np.nan)
        return np.asarray(self.about[SINCE])

    def _added(self, base: int, smoothing: float) -> float:
        return smoothing * float(self._even_sums[:, base].mean()) + np.finfo(float).tiny

    @cached_property
    def calendar(self) -> Calendar | None:
        """Return the calendar with its present sums; None without one."""
        if self.settings.calendar is None or self.seasons is None:
            return None
        return Calendar(self.seasons, self.settings.calendar.windows, self.settings.calendar.shrinkage)

    @cached_property
    def groups(self) -> Int64:
        """Find every label's row of the calendar, int64 [L]."""
        assert self.settings.calendar is not None
        coded, calendar_rows = self._coded(self.settings.calendar.feature), self._calendar_rows
        row_C = np.array(
            [
                *(calendar_rows.get(value, len(calendar_rows)) for value in coded.dictionary.to_pylist()),
                len(calendar_rows),
            ]
        )
        return np.asarray(row_C.astype(np.int64)[np.asarray(coded.indices.fill_null(len(coded.dictionary)))])

    @cached_property
    def _calendar_rows(self) -> dict[str, int]:
        assert self.settings.calendar is not None
        return {value: row for row, value in enumerate(self.settings.calendar.values)}

    @cached_property
    def _even_sums(self) -> Float64:
        """Divide the sums by the calendar's past factor, float64 [L, W]."""
        if self.calendar is None:
            return self.sums
        past_GW = self.calendar.past(self.settings.until, np.asarray(self.settings.half_lives))
        return np.asarray(self.sums / past_GW[self.groups])

    @cached_property
    def _log_ahead_by_group(self) -> Float64 | None:
        """Compute the log of the calendar's coming factor, float64 [G]."""
        if self.calendar is None:
            return None
        return np.log(self.calendar.ahead(self.settings.until, self.settings.ahead or self.settings.horizon))

    @property
    def _log_ahead(self) -> Float64 | float:
        """Return the log of each label's coming factor, float64 [L]; 0 without a calendar."""
        return 0.0 if self._log_ahead_by_group is None else self._log_ahead_by_group[self.groups]

    def _log_ahead_of_new(self, values_M: Sequence[Mapping[str, Any]]) -> Float64:
        """Compute `_log_ahead` of new labels, float64 [M]."""
        if self._log_ahead_by_group is None or self.settings.calendar is None:
            return np.zeros(len(values_M))
        feature, calendar_rows = self.settings.calendar.feature, self._calendar_rows
        rows_M = [calendar_rows.get(id_text(values.get(feature)) or "", len(calendar_rows)) for values in values_M]
        return np.asarray(self._log_ahead_by_group[np.array(rows_M, np.int64)])

    @cached_property
    def _log_rates(self) -> Float64:
        if self.settings.served == _RELEASED:
            assert self.released is not None
            return self.released + self._log_ahead
        return self.log_base + self._factor(self.columns()) if self.settings.served == "forecast" else self.log_base

    @cached_property
    def _log_total(self) -> float:
        exists_L = self.find_existing(self.settings.until)
        return float(np.logaddexp.reduce(self._log_rates[exists_L if exists_L.any() else slice(None)]))

    @cached_property
    def _log_offset_total(self) -> float:
        """Compute the constant by which `with_offset` normalises; 0 without an offset."""
        return 0.0 if self.offset is None else float(np.logaddexp.reduce(self.log_shares() + self.offset))

    def _log_shares_of_new(self, values_M: Sequence[Mapping[str, Any]], now_M: Sequence[float]) -> Float64:
        """Compute log π* of new labels, if all existed, nats, float64 [M]."""
        settings, kinds = self.settings, self.kinds()
        if settings.served == _RELEASED:  # new labels have no π* of the release
            return kinds["decayed" if self.model is None else "forecast"]._log_shares_of_new(values_M, now_M)
        rates_M = np.log(self._added(settings.base, settings.smoothing)) + self._log_ahead_of_new(values_M)
        if settings.served == "forecast" and values_M:
            codes = {
                name: np.array([self._codes[name].get(id_text(values.get(name)) or "", -1) for values in values_M])
                for name in settings.attributes
            }
            numbers = {name: np.array([_number(values.get(name)) for values in values_M]) for name in settings.numbers}
            now, since = np.maximum(np.asarray(now_M, np.float64), settings.until), self._read_dates(values_M, now_M)
            none_M = np.zeros((len(values_M), len(settings.half_lives))), np.full(len(values_M), np.inf)
            rates_M += self._factor(self._columns(*none_M, codes, numbers, since, now))
        return np.asarray(rates_M - self._log_total)

    def _factor(self, columns_XF: Float32) -> Float64:
        """Compute the logarithm of the regression's factor, float64 [L] or [M]."""
        rows = _xgboost().DMatrix(columns_XF, base_margin=np.zeros(len(columns_XF)), nthread=1)
        return np.asarray(self._booster.predict(rows, output_margin=True), np.float64)

    @cached_property
    def _booster(self) -> Any:
        booster = _xgboost().Booster({"nthread": 1})
        # XGBoost reads a model from a `bytearray` alone.
        booster.load_model(bytearray(self.model or b""))
        return booster

    def _coded(self, name: str) -> pa.DictionaryArray:
        return combine_chunks(self.about[name])

    @cached_property
    def _codes(self) -> dict[str, dict[str, int]]:
        return {
            name: {value: code for code, value in enumerate(self._coded(name).dictionary.to_pylist())}
            for name in self.settings.attributes
        }

    @cached_property
    def _group_means(self) -> dict[str, Float64]:
        """Average the sums over each attribute value, float64 [G + 1, W]; last row: all labels."""
        means = {}
        for name in self.settings.attributes:
            coded = self._coded(name)
            code_L, values = np.asarray(coded.indices.fill_null(len(coded.dictionary))), len(coded.dictionary)
            labels_G = np.maximum(np.bincount(code_L, minlength=values + 1), 1)
            sums = [np.bincount(code_L, column_L, values + 1) / labels_G for column_L in self._even_sums.T]
            means[name] = np.stack(sums, axis=1)
            means[name][-1] = self._even_sums.mean(axis=0)
        return means

    def _columns(
        self, sums: Float64, first: Float64, codes: Mapping[str, Array], numbers: Mapping[str, Float64],
        since: Float64, now: float | Float64,
    ) -> Float32:  # fmt: skip
        """Compute log shares, their differences, shares of attributes, ages and numbers.

        Shares instead of rates: a log that is interrupted or thinned says nothing about demand.
        """
        totals_W = self._even_sums.sum(axis=0) + np.finfo(float).tiny
        per_pair_W = self.settings.pairs / totals_W
        levels = np.log(sums * per_pair_W + _LEAST)
        of_groups = [np.log(self._group_means[name] * per_pair_W + _LEAST)[code] for name, code in codes.items()]
        horizon = self.settings.horizon
        ages = np.where(first <= now, (now - first) / horizon, -1.0), (now - since) / horizon
        columns = [
            levels,
            np.diff(levels, axis=1),
            *of_groups,
            *(column[:, None] for column in (*ages, *numbers.values())),
        ]
        return np.concatenate(columns, axis=1, dtype=np.float32)


def _number(value: Any) -> float:
    try:
        number = parse_number(value) if isinstance(value, str) else float(value)
        return np.nan if number is None else number
    except (TypeError, ValueError):
        return np.nan


def _seconds(value: Any, now: float) -> float:
    """Parse a date in ISO 8601 to seconds since 1970; `now` for a missing one."""
    try:
        return parse_seconds(str(value)) if value is not None else now
    except (ValueError, OverflowError):
        return now


def _xgboost() -> Any:
    import xgboost  # takes half a second, which programs without a forecast save

    return xgboost
