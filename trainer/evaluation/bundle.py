"""Measure a bundle from its own files: ONNX query tower, embeddings, log ν, log π."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from longtail.bundle import (
    BiasRemoval,
    Bonus,
    BonusBucket,
    Bundle,
    CurvePoint,
    Interval,
    Labels,
    Popularity,
    log_frequencies,
)
from longtail.bundle.arrays import Int32
from longtail.bundle.forecast import Forecast
from longtail.bundle.manifest import CooccurrenceSettings
from longtail.bundle.sets import distinct
from longtail.bundle.tower import onnx_session
from longtail.tables.times import UNITS, format_time
from longtail.trainer.config import EvaluationConfig, Recipe, load_recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.errors import DataError, RecipeError
from longtail.trainer.evaluation.cooccurrence import HistoryEntries, HistoryTerm
from longtail.trainer.evaluation.dial import Dial, Noise, Setting, lines, removes_nothing
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.ranking import (
    RankedModel,
    bias_removal_curve,
    create_log_proposal,
    create_unknown_finder,
)
from longtail.trainer.prior import type_weights


@dataclass(frozen=True)
class EvaluationResult:
    """Figures of a bundle: every metric at every setting of the curve; `metric` is the one that chose λ and epochs.

    Attributes:
        left_out: line about held-out pairs whose label the bundle lacks; None without any.
    """

    name: str
    metric: str
    bias_removal: BiasRemoval
    popularity: Popularity
    cooccurrence: CooccurrenceSettings | None = None
    bonus: Mapping[BonusBucket, Bonus] = field(default_factory=dict)
    left_out: str | None = None

    def __repr__(self) -> str:
        measured = {Setting.read_point(point): point.metrics for point in self.curve}.get(self.dial.default, {}).get(
            self.metric
        )
        value = "not measured" if measured is None else f"{measured.value:.4f}"
        return f"EvaluationResult({self.name[:60]!r}, {self.metric} {value}, {len(self.curve)} settings)"

    @property
    def dial(self) -> Dial:
        """Return the dials in the form that tables take."""
        return Dial(self.bias_removal, self.popularity, self.cooccurrence, self.bonus)

    @property
    def curve(self) -> list[CurvePoint]:
        """List points by λ in the grid's order, then by μ, ω and β; values are in `point.metrics[NAME]`."""
        return self.bias_removal.curve

    def value(
        self,
        metric: str | None = None,
        *,
        bias_removal: float | None = None,
        popularity: float | None = None,
        cooccurrence: float | None = None,
        bonus: Mapping[str, float] | None = None,
    ) -> float:
        """Return the value of one metric at one setting.

        Args:
            metric: such as `recall@20` or `recall@20/tail`; by default the metric that chose the model.
            bias_removal: a λ of the grid; by default the bundle's default. If ν is the same for every label, any λ
                gives the value at λ = 0.
            popularity: μ; by default 0 if λ is given, as in the curve over λ, otherwise the bundle's default.
            cooccurrence: ω; by default the bundle's default.
            bonus: β by bucket; by default the bundle's defaults.
        """
        at = {Setting.read_point(point): point.metrics for point in self.curve}
        if popularity is None:
            popularity = self.popularity.default if bias_removal is None else 0.0
        if bias_removal is None:
            bias_removal = self.bias_removal.default
        elif removes_nothing(self.bias_removal.noise) and {setting.bias_removal for setting in at} == {0.0}:
            bias_removal = 0.0
        weight = self.dial.default.cooccurrence if cooccurrence is None else cooccurrence
        chosen = Setting(bias_removal, popularity, weight, **(self.dial.default.bonus if bonus is None else bonus))
        name = metric or self.metric
        if chosen not in at:
            raise KeyError(f"bias_removal, popularity: expected one of {', '.join(map(str, at))}, received {chosen}")
        if name not in at[chosen]:
            raise KeyError(f"metric: expected one of {', '.join(at[chosen])}, received {name!r}")
        return at[chosen][name].value


def evaluate(
    bundle: Bundle | Path | str,
    recipe: Recipe | Path | str | None = None,
    *,
    split: str = "test",
    overrides: Sequence[str] = (),
) -> EvaluationResult:
    """Return a bundle's figures at every setting of its curve: the stored ones, or new ones measured from its files.

    A recipe's log-likelihood is measured only if the bundle was trained with the recipe's loss; otherwise it is left
    out with a warning.

    Args:
        recipe: recipe whose data to measure on; None returns the figures stored in the bundle.
        overrides: `KEY=VALUE` overrides of a recipe given by its path.

    Raises:
        RecipeError: the recipe is wrong, does not suit the bundle, or is missing though `split` or `overrides` is
            given.
        DataError: no held-out pair has a label in the bundle.
        BundleError: the bundle cannot be loaded.

    Example:
        >>> result = evaluate("runs/tiny")
        >>> result.name, result.metric, [point.bias_removal for point in result.curve]
        ('tiny', 'recall@5', [0.0, 0.5, 1.0])
        >>> again = evaluate("runs/tiny", "recipe.toml")
        >>> again.value("recall@5", bias_removal=0.5) == result.value("recall@5", bias_removal=0.5)
        True
    """
    if split not in ("valid", "test"):
        raise RecipeError(f"split: expected valid or test, received {split!r}")
    if recipe is None and (split != "test" or overrides):
        raise RecipeError(
            f"{'--set' if overrides else 'split'}: expected a recipe with it (--recipe), received none: a bundle holds "
            "one table"
        )
    source = "the bundle" if isinstance(bundle, Bundle) else str(bundle)
    if not isinstance(bundle, Bundle):
        bundle = Bundle.load(Path(bundle))
    name, stored = bundle.manifest.name, bundle.manifest.bias_removal
    if recipe is None:
        return EvaluationResult(name, _parse_metric(stored), stored, *Dial.read_manifest(bundle.manifest)[1:])
    data = "the recipe" if isinstance(recipe, Recipe) else str(recipe)
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    if bundle.proposal is not None and min(recipe.evaluation.bias_removal) < 0:
        raise RecipeError(
            f"{data}: evaluation.bias_removal: expected λ >= 0 for {source}, which has a tree, "
            f"received {min(recipe.evaluation.bias_removal):g}"
        )
    nothing = f"{data}: expected {split} pairs of labels in {source}, found none"
    curve, left_out = _measure(bundle, recipe, split, nothing=nothing)
    measured = stored.model_copy(update={"curve": curve, "curve_split": split})
    dials = Dial.read_manifest(bundle.manifest)[1:]
    return EvaluationResult(name, recipe.evaluation.metric, measured, *dials, left_out=left_out)


class RollingFigures(NamedTuple):
    """Hold a bundle's figures in one period with one prior.

    Attributes:
        begin: start of the period, seconds since 1970.
        prior: `counts` of the training pairs, the bundle's `forecast` as released, or `refreshed` by earlier pairs.
        pairs: number of the period's pairs whose labels are in the bundle.
    """

    begin: float
    prior: str
    pairs: int
    metrics: Mapping[str, Interval]


def evaluate_rolling(
    bundle: Bundle | Path, recipe: Recipe | Path, periods: int, *, overrides: Sequence[str] = ()
) -> list[RollingFigures]:
    """Measure one model with several priors over test periods.

    A query's labels of earlier periods are in its history and excluded from its lists, as for `test` as a whole.

    Raises:
        RecipeError: the bundle has no forecast.
        DataError: times are not dates, or a period has no pair with a label in the bundle.
        BundleError: the bundle cannot be loaded.
    """
    bundle = bundle if isinstance(bundle, Bundle) else Bundle.load(bundle)
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    if bundle.forecast is None:
        raise RecipeError("rolling: expected a bundle with a forecast, [prior] in its recipe, received one without")
    measured = _OnData.read(bundle, recipe)
    training, test, unit = measured.dataset.pairs_before("test"), measured.dataset.test, measured.dataset.report.unit
    if test.times is None or unit is None or training.times is None:
        raise DataError("rolling: expected dates in data.timestamp, found numbers or none")
    count = log_frequencies(bundle.labels.counts)
    default = Dial.read_manifest(bundle.manifest).default
    figures, forecast = list[RollingFigures](), bundle.forecast
    # From just below the first time, because a period holds the times after its begin.
    ends = np.linspace(np.nextafter(test.times.min(), -np.inf), test.times.max(), periods + 1)
    for begin, end in pairwise(ends):
        held_out = test.take((test.times > begin) & (test.times <= end))
        earlier = training.merge_later(test.take(test.times <= begin))
        pairs = _by_bundle_rows(earlier, measured.rows_L)
        assert pairs.times is not None
        # A forecast cannot be refreshed to a time before the last that it knows.
        until = max(begin / UNITS[unit], forecast.settings.until)
        weights_N = type_weights(recipe, pairs)
        seconds_N, ahead = pairs.times / UNITS[unit], float(end - begin) / UNITS[unit]
        forecast = forecast.refreshed(pairs.queries, pairs.labels, seconds_N, until, weights_N, ahead)
        priors = {
            "counts": forecast.with_offset(count),
            "forecast": bundle.forecast.log_popularity(include_future=True),
        }
        priors["refreshed"] = forecast.log_popularity(include_future=True)
        for name, log_prior in priors.items():
            labels = replace(bundle.labels, log_popularity=log_prior.astype(np.float32))
            nothing = f"rolling: expected pairs of labels in the bundle from {begin:g} to {end:g}, found none"
            (point,) = measured.curve(held_out, earlier, labels, [default], nothing=nothing)
            of_bundle = int((measured.rows_L[held_out.labels] >= 0).sum())
            figures.append(RollingFigures(begin / UNITS[unit], name, of_bundle, point.metrics))
    return figures


@dataclass(frozen=True)
class _OnData:
    """A bundle and a recipe's data; `rows_L` has the bundle's row of every label in the data, −1 if missing."""

    bundle: Bundle
    recipe: Recipe
    dataset: Dataset
    rows_L: Int32

    @classmethod
    def read(cls, bundle: Bundle, recipe: Recipe) -> _OnData:
        dataset = read_dataset(recipe)
        rows_L = pc.fill_null(pc.index_in(dataset.label_ids, value_set=bundle.labels.ids), -1).to_numpy()
        return cls(bundle, recipe, dataset, rows_L)

    @cached_property
    def _encoding(self) -> Encoding:
        manifest = self.bundle.manifest
        return Encoding.fit(self.recipe, self.dataset, dict(self.bundle.vocabularies), manifest.query_features)

    def curve(
        self, held_out: Pairs, earlier: Pairs, labels: Labels, settings: Sequence[Setting], *, nothing: str
    ) -> list[CurvePoint]:
        """Measure some settings; raises DataError with the text `nothing` if no pair is left to find."""
        bundle, recipe, dataset = self.bundle, self.recipe, self.dataset
        held_out, past = dataset.with_past(held_out, earlier, recipe.evaluation.history)
        features = self._encoding.query.with_history(past)
        session, centre = onnx_session(bundle.query_model, "query_tower.onnx"), bundle.manifest.centre
        centre_D = np.array(0 if centre is None else centre, np.float32)
        training_queries = bundle.manifest.training_data.get("training_queries", dataset.training_queries())
        held_out = _by_bundle_rows(held_out, self.rows_L)
        if not len(held_out):
            raise DataError(nothing)
        past, term = past.with_labels(self.rows_L), None
        if bundle.cooccurrence is not None:
            term = HistoryTerm(bundle.cooccurrence, HistoryEntries(past, recipe.history_events))
        model = RankedModel(
            lambda rows_B: session.run(None, features.query_inputs(rows_B))[0] - centre_D,
            LabelSide.read_bundle(
                labels, bundle.embeddings, bundle.augmentation, training_queries=int(training_queries)
            ),
            create_log_proposal(bundle.proposal, features),
            term,
            create_unknown_finder(bundle.manifest.query_features, features) if bundle.ranks_by_popularity else None,
            calibrated_at=0.0 if Noise.read_bundle(bundle).constant else recipe.loss.calibrated_at,
            described=recipe.describes_labels,
        )
        return bias_removal_curve(held_out, past, model, _config(bundle, recipe), seed=recipe.seed, settings=settings)


def _measure(bundle: Bundle, recipe: Recipe, split: str, *, nothing: str) -> tuple[list[CurvePoint], str | None]:
    """Measure the curve on a recipe's data, and describe missing labels.

    Raises DataError with the text `nothing` if no pair is left to find.
    """
    measured, labels = _OnData.read(bundle, recipe), bundle.labels
    held_out = measured.dataset.test if split == "test" else measured.dataset.valid
    if bundle.forecast is not None:
        _refuse_known(bundle.forecast, held_out, measured.dataset.report.unit, split)
        labels = replace(labels, log_popularity=bundle.forecast.log_popularity(include_future=True).astype(np.float32))
    default = Dial.read_manifest(bundle.manifest).default
    settings = lines(recipe.evaluation, Noise.read_bundle(bundle), default)
    if default.cooccurrence:  # the line over ω, and the best setting of the towers alone, are the stored ones
        stored = (Setting.read_point(point) for point in bundle.manifest.bias_removal.curve)
        settings += [it for it in stored if it.cooccurrence != default.cooccurrence and it not in settings]
    curve = measured.curve(held_out, measured.dataset.pairs_before(split), labels, settings, nothing=nothing)
    return curve, _lacking(held_out, measured.rows_L, split)


def _lacking(held_out: Pairs, rows_L: Int32, split: str) -> str | None:
    """Describe the held-out pairs whose label the bundle lacks; None without any."""
    lacking_n = rows_L[held_out.labels] < 0
    if not lacking_n.any():
        return None
    queries = distinct(held_out.queries)
    without = len(queries) - len(distinct(held_out.queries[~lacking_n]))
    return (
        f"Left out of all figures: {lacking_n.sum():,} of {len(held_out):,} {split} pairs, of "
        f"{len(distinct(held_out.labels[lacking_n])):,} labels that the bundle lacks, and with them {without:,} of "
        f"{len(queries):,} queries. It finds none of these pairs: figures of all {split} pairs would be lower"
    )


def _refuse_known(forecast: Forecast, held_out: Pairs, unit: str | None, split: str) -> None:
    """Refuse to measure a forecast on pairs that it knows; raises RecipeError."""
    if unit is None or held_out.times is None or not len(held_out):
        return
    until, first = forecast.settings.until, float(held_out.times.min()) / UNITS[unit]
    if until > first:
        raise RecipeError(
            f"split: expected {split} pairs later than the bundle's forecast of popularity, which knows pairs up to "
            f"{format_time(until, 'seconds')}, found the first at {format_time(first, 'seconds')}: their popularity "
            "would leak into the figures; `fit` measures valid with a forecast of its time"
        )


def _config(bundle: Bundle, recipe: Recipe) -> EvaluationConfig:
    """Return the settings, without likelihood if the losses differ (with a warning)."""
    config, loss, stored = recipe.evaluation, bundle.manifest.loss, None
    if not config.log_likelihood:
        return config
    if bundle.path is not None and (bundle.path / "recipe.json").is_file():
        stored = json.loads((bundle.path / "recipe.json").read_bytes())["loss"]
    if stored == recipe.loss.model_dump(mode="json"):
        return config
    warnings.warn(
        "log_likelihood: left out, for the bundle's scores are log-probabilities at a λ that only its own loss says: "
        f"expected a bundle of the recipe's loss {recipe.loss}, received one of {loss.family} · {loss.sampler} · "
        f"{loss.weight} whose ν is {bundle.manifest.bias_removal.noise}",
        stacklevel=4,
    )
    return config.model_copy(update={"log_likelihood": False})


def _parse_metric(dial: BiasRemoval) -> str:
    """Return the metric that chose the stored λ; recall at the first k if no metric did."""
    measured = dial.curve[0].metrics if dial.curve else {"recall@20": None}
    chosen = dial.chosen_by.split()[-1]
    return chosen if chosen in measured else next(name for name in measured if name.startswith("recall@"))


def _by_bundle_rows(pairs: Pairs, rows_L: Int32) -> Pairs:
    """Select pairs of the bundle's labels, with its label rows."""
    rows = rows_L[pairs.labels]
    selected = pairs.take(rows >= 0)
    return replace(selected, labels=rows[rows >= 0].astype(np.int32))
