"""Two bundles side by side: figures at the dials they serve, both curves, and what their recipes differ in."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from longtail.bundle import CurvePoint, Interval
from longtail.bundle.integrity import read_manifest
from longtail.bundle.manifest import Manifest, dial_words
from longtail.trainer.errors import DataError
from longtail.trainer.metric_registry import k_of
from longtail.trainer.trackers import flattened

_RECIPE = "recipe.json"


@dataclass(frozen=True)
class Figure:
    """One metric of two bundles; `difference` is b − a, with an interval that takes the two as independent."""

    a: Interval
    b: Interval
    difference: Interval

    @classmethod
    def of(cls, a: Interval, b: Interval) -> Figure:
        """Return the difference of two intervals; without bounds where either has none."""
        difference = b.value - a.value
        if a.low is None or a.high is None or b.low is None or b.high is None:
            return cls(a, b, Interval(value=difference))
        below = math.hypot(b.value - b.low, a.high - a.value)
        above = math.hypot(b.high - b.value, a.value - a.low)
        return cls(a, b, Interval(value=difference, low=difference - below, high=difference + above))


@dataclass(frozen=True)
class Comparison:
    """What two bundles have in common and what not.

    Attributes:
        dials: λ and μ that each serves by default, in words.
        metrics: every metric that both have, at the dials each serves by default.
        curve: (λ, μ) to the metrics of a and b, where both were measured.
        recipe: dotted keys whose values differ, as JSON; None where a recipe does not have it.
    """

    names: tuple[str, str]
    dials: tuple[str, ...]
    split: str
    same_data: bool
    metrics: dict[str, Figure]
    curve: dict[tuple[float, float], dict[str, tuple[float, float]]]
    recipe: dict[str, tuple[str | None, str | None]]

    def as_json(self) -> str:
        """Return all of it, as one JSON object; `curve` is a list of points."""
        content: dict[str, Any] = asdict(self) | {
            "metrics": {
                name: {side: getattr(figure, side).model_dump() for side in ("a", "b", "difference")}
                for name, figure in self.metrics.items()
            },
            "curve": [
                {"bias_removal": at[0], "popularity": at[1], "metrics": values} for at, values in self.curve.items()
            ],
        }
        return json.dumps(content, indent=1, ensure_ascii=False)

    def show(self, console: Console, names: list[str]) -> None:
        """Print tables of the figures, of the curve and of the recipes' differences."""
        console.print(f"a  {self.names[0]}, {self.dials[0]}\nb  {self.names[1]}, {self.dials[1]}", highlight=False)
        if not self.same_data:
            console.print("Not the same data: differences are of the data too.", highlight=False)
        names = [name for name in names if name in self.metrics]
        table = _table(f"On {self.split}, each at its own dials", "metric", "a", "b", "b − a", "95 %")
        for name in names:
            figure = self.metrics[name]
            change = figure.difference
            bounds = "" if change.low is None or change.high is None else f"[{change.low:+.4f}, {change.high:+.4f}]"
            cells = (f"{figure.a.value:.4f}", f"{figure.b.value:.4f}", f"{change.value:+.4f}", bounds)
            table.add_row(name, *cells)
        console.print(table)
        curve = _table("At the same dials, a → b", "λ", "μ", *names)
        for (bias_removal, popularity), values in self.curve.items():
            pairs = [values.get(name) for name in names]
            cells_of_point = ["" if pair is None else f"{pair[0]:.4f} → {pair[1]:.4f}" for pair in pairs]
            curve.add_row(f"{bias_removal:g}", f"{popularity:g}", *cells_of_point)
        console.print(curve)
        settings = _table("Recipes" if self.recipe else "Recipes: no difference", "key", "a", "b")
        for key, (a, b) in self.recipe.items():
            settings.add_row(key, a or "–", b or "–")
        console.print(settings)


def compare(a: Path, b: Path) -> Comparison:
    """Compare two bundles by what they were written with; their data is not read."""
    one, other = read_manifest(a), read_manifest(b)
    for path, manifest in ((a, one), (b, other)):
        if not manifest.bias_removal.curve:
            raise DataError(f"{path}: expected figures on held-out pairs, found none")
    splits = one.bias_removal.curve_split, other.bias_removal.curve_split
    if splits[0] != splits[1]:
        raise DataError(f"{b}: expected figures on {splits[0]}, as {a} has, found {splits[1]}")
    at_default = _default_point(one).metrics, _default_point(other).metrics
    points, others = (
        {(point.bias_removal, point.popularity): point.metrics for point in each.bias_removal.curve}
        for each in (one, other)
    )
    settings = _settings(a), _settings(b)
    differing = [key for key in {**settings[0], **settings[1]} if settings[0].get(key) != settings[1].get(key)]
    return Comparison(
        names=(str(a), str(b)),
        dials=tuple(dial_words(each.bias_removal.default, each.popularity.default) for each in (one, other)),
        split=splits[0],
        same_data=one.training_data.get("fingerprint") == other.training_data.get("fingerprint"),
        metrics={
            name: Figure.of(it, at_default[1][name]) for name, it in at_default[0].items() if name in at_default[1]
        },
        curve={
            at: {name: (it.value, others[at][name].value) for name, it in metrics.items() if name in others[at]}
            for at, metrics in points.items()
            if at in others
        },
        recipe={key: (settings[0].get(key), settings[1].get(key)) for key in differing},
    )


def shown(comparison: Comparison, metric: str | None = None) -> list[str]:
    """Choose metrics to show: one, by default recall@20, with nDCG, recall by bucket and coverage at its k."""
    if metric is None:
        ks = [
            int(k)
            for name, _, k in (it.partition("@") for it in comparison.metrics)
            if name == "recall" and k.isdigit()
        ]
        metric = f"recall@{20 if 20 in ks or not ks else max(ks)}"
    if metric not in comparison.metrics:
        raise DataError(f"--metric: expected one of {', '.join(comparison.metrics)}, received {metric!r}")
    k = k_of(metric)
    buckets = [name for name in comparison.metrics if name.startswith(f"recall@{k}/")]
    return list(dict.fromkeys([metric, f"recall@{k}", f"ndcg@{k}", *buckets, f"coverage@{k}"]))


def _default_point(manifest: Manifest) -> CurvePoint:
    """Return the measured point nearest to the dials that are served by default."""
    served = manifest.bias_removal.default, manifest.popularity.default
    return min(manifest.bias_removal.curve, key=lambda it: math.dist((it.bias_removal, it.popularity), served))


def _settings(bundle: Path) -> dict[str, str]:
    """Return the recipe that a bundle keeps, by dotted key; nothing of one that keeps none."""
    file = bundle / _RECIPE
    return dict(flattened(json.loads(file.read_text(encoding="utf-8")))) if file.is_file() else {}


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("metric", "key") else "right")
    return table
