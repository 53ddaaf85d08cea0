"""Two bundles side by side: figures at the dials they serve, both curves, and what their recipes differ in."""

from __future__ import annotations

import json
import math
from pathlib import Path

from rich.table import Table

from longtail.bundle import CurvePoint, Interval
from longtail.bundle.integrity import read_manifest
from longtail.bundle.manifest import Manifest, dial_words
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.metric_registry import k_of
from longtail.trainer.trackers import flattened

_RECIPE = "recipe.json"


def compare(a: Path, b: Path, metric: str | None = None) -> list[Table]:
    """Compare two bundles by what they were written with; their data is not read.

    Args:
        metric: whose k is shown; by default recall@20, or recall of the longest lists.
    """
    manifests = read_manifest(a), read_manifest(b)
    for path, manifest in zip((a, b), manifests, strict=True):
        if not manifest.bias_removal.curve:
            raise DataError(f"{path}: expected figures on held-out pairs, found none")
    split, other_split = (manifest.bias_removal.curve_split for manifest in manifests)
    if split != other_split:
        raise DataError(f"{b}: expected figures on {split}, as {a} has, found {other_split}")
    figures = _default_point(manifests[0]).metrics, _default_point(manifests[1]).metrics
    names = _shown([name for name in figures[0] if name in figures[1]], metric)
    dials = [dial_words(manifest.bias_removal.default, manifest.popularity.default) for manifest in manifests]
    same_data = len({manifest.training_data.get("fingerprint") for manifest in manifests}) == 1
    titles = [f"On {split}, each at its own dials", f"a  {a}, {dials[0]}", f"b  {b}, {dials[1]}"]
    titles += [] if same_data else ["Not the same data: differences are of the data too."]
    at_defaults = _table("\n".join(titles), "metric", "a", "b", "b − a", "95 %")
    for name in names:
        change = difference(figures[0][name], figures[1][name])
        bounds = "" if change.low is None or change.high is None else f"[{change.low:+.4f}, {change.high:+.4f}]"
        values = (f"{side[name].value:.4f}" for side in figures)
        at_defaults.add_row(name, *values, f"{change.value:+.4f}", bounds)
    curves = [{Setting.of(point): point.metrics for point in it.bias_removal.curve} for it in manifests]
    at_same = _table("At the same dials, a → b", "λ", "μ", *names)
    for at in (setting for setting in curves[0] if setting in curves[1]):
        one, other = curves[0][at], curves[1][at]
        both = (
            f"{one[name].value:.4f} → {other[name].value:.4f}" if name in one and name in other else ""
            for name in names
        )
        at_same.add_row(*(f"{number:g}" for number in at), *both)
    recipes = _settings(a), _settings(b)
    differing = [key for key in recipes[0] | recipes[1] if recipes[0].get(key) != recipes[1].get(key)]
    settings = _table("Recipes" if differing else "Recipes: no difference", "key", "a", "b")
    for key in differing:
        settings.add_row(key, *(recipe.get(key, "–") for recipe in recipes))
    return [at_defaults, at_same, settings]


def difference(a: Interval, b: Interval) -> Interval:
    """Compute b − a, with an interval that takes the two as independent; without bounds where either has none."""
    change = b.value - a.value
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Interval(value=change)
    below = math.hypot(b.value - b.low, a.high - a.value)
    above = math.hypot(b.high - b.value, a.value - a.low)
    return Interval(value=change, low=change - below, high=change + above)


def _shown(names: list[str], metric: str | None) -> list[str]:
    """Choose a metric, by default recall@20, with nDCG, recall by bucket and coverage at its k."""
    if metric is None:
        ks = [int(k) for name, _, k in (it.partition("@") for it in names) if name == "recall" and k.isdigit()]
        metric = f"recall@{20 if 20 in ks or not ks else max(ks)}"
    if metric not in names:
        raise DataError(f"--metric: expected one of {', '.join(names)}, received {metric!r}")
    k = k_of(metric)
    buckets = [name for name in names if name.startswith(f"recall@{k}/")]
    wanted = dict.fromkeys([metric, f"recall@{k}", f"ndcg@{k}", *buckets, f"coverage@{k}"])
    return [name for name in wanted if name in names]


def _default_point(manifest: Manifest) -> CurvePoint:
    """Return the measured point nearest to the dials that are served by default."""
    served = manifest.bias_removal.default, manifest.popularity.default
    return min(manifest.bias_removal.curve, key=lambda it: math.dist(Setting.of(it), served))


def _settings(bundle: Path) -> dict[str, str]:
    """Return the recipe that a bundle keeps, by dotted key; nothing of one that keeps none."""
    file = bundle / _RECIPE
    return dict(flattened(json.loads(file.read_text(encoding="utf-8")))) if file.is_file() else {}


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("metric", "key") else "right")
    return table
