"""Recall and recall of torso and tail along λ, a bonus and reserved places, with and without co-occurrence.

    python -m benchmarks.promises data/gowalla/recipe.toml --out runs/promises-gowalla --refitted runs/gowalla
    python -m benchmarks.promises data/movielens-100k/recipe.toml --out runs/promises-ml --seeds 3 \
        --set 'data.split={strategy="random",valid=0.1,test=0.2}' --set 'cooccurrence={}'

`OUT/SEED` is trained without refit unless it is there. Validation pairs choose λ (μ where the prior is a forecast) by
recall; ω is the choice of `fit`. They also choose one point of each way for a loss of recall of 1, 3 and 5 %: the point
with the highest recall of the tail within this loss against the best λ at the same ω. Places are reserved at the best
λ; β is chosen together with λ. Test pairs are measured once, for the tables; pairs of several seeds are pooled.

Legend: `N` queries, `K` list length, `S` settings; figures are (recall, torso, tail) × (numerator, denominator).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32, Float64, Int32
from longtail.bundle.tower import onnx_session
from longtail.trainer import Recipe, fit, load_recipe
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.evaluation.cooccurrence import HistoryEntries, TermOf
from longtail.trainer.evaluation.dial import Noise, Setting
from longtail.trainer.evaluation.frontier import with_places
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.ranking import tower_lists
from longtail.trainer.evaluation.task import VALID_QUERIES, Task

_DIAL = tuple(np.round([*np.linspace(0, 0.5, 6), *np.linspace(0.55, 1.5, 20)], 2).tolist())
_WITH_BONUS = (0.7, 1.0, 1.3)
"""λ with which β is tried, and the best."""
_TORSO, _TAIL = (0.0, 0.5, 1.0), tuple(np.arange(0.0, 3.25, 0.25).tolist())
_RESERVED = range(11)
_FIRST = 1e3
_LOSSES = (0.01, 0.03, 0.05)
_SHOWN = {
    "dial": (1.0, 0.8, 0.6, 0.4, 0.2, 0.0),
    "bonus": (0.5, 1.0, 1.5, 2.0, 2.5),
    "places": (1.0, 2.0, 3.0, 5.0, 8.0),
}
"""Values in the first table; β of the tail at the best λ."""
_NAMES = ("recall@20", "recall@20/torso", "recall@20/tail")

At = tuple[str, float, float, float]
"""A way, λ or μ, and β of torso and tail, or places and 0."""


class Split(NamedTuple):
    """Measure lists of a bundle on the valid or test pairs of a recipe."""

    recipe: Recipe
    bundle: Bundle
    name: str

    @property
    def weights(self) -> list[float]:
        """Return ω = 0, and the bundle's ω if that is another."""
        term = self.bundle.manifest.cooccurrence
        return [0.0] if term is None or not term.default else [0.0, term.default]

    def figures(self, points: Sequence[Sequence[At]]) -> list[dict[At, Float64]]:
        """Measure points without the term, and others with it."""
        noise, measured, figures = Noise.of_bundle(self.bundle), _Measured(self), list[dict[At, Float64]]()

        def setting(at: At, weight: float, *, first: bool = False) -> Setting:
            way, dial, *bonus = at
            moved = Setting(0.0, dial, weight) if noise.ahead or noise.constant else Setting(dial, 0.0, weight)
            if way == "places":
                return moved._replace(tail=_FIRST) if first else moved
            return moved.with_bonus(*bonus)

        for weight, of_weight in zip(self.weights, points, strict=False):
            settings = {(at, first): setting(at, weight, first=first) for at in of_weight for first in (False, True)}
            distinct = [*dict.fromkeys(settings.values())]
            top_of = dict(zip(distinct, measured.lists(distinct), strict=True))
            figures.append({})
            for at in of_weight:
                top_NK = top_of[settings[at, False]]
                if at[0] == "places":
                    tail_first_NK = top_of[settings[at, True]]
                    top_NK = with_places(top_NK, tail_first_NK, self.bundle.labels.buckets, int(at[2]))
                figures[-1][at] = measured.figures(top_NK)
        return figures


class _Measured:
    def __init__(self, split: Split) -> None:
        recipe, bundle = split.recipe, split.bundle
        dataset, labels = read_dataset(recipe), bundle.labels
        if not dataset.label_ids.equals(labels.ids):
            raise ValueError("bundle: expected the labels of the recipe's data, in their order, received others")
        if bundle.forecast is not None:
            log_prior_L = bundle.forecast.log_popularity(whole=True).astype(np.float32)
            labels = replace(labels, log_popularity=log_prior_L)
        held_out, past = dataset.with_past(
            getattr(dataset, split.name), dataset.before(split.name), recipe.evaluation.history
        )
        most = VALID_QUERIES if split.name == "valid" else None
        count = len(dataset.label_ids)
        self.task = Task.of(held_out, past, recipe.evaluation, labels=count, seed=recipe.seed, max_queries=most)
        encoding = Encoding.fit(recipe, dataset, dict(bundle.vocabularies), bundle.manifest.query_features)
        self._features, self._bundle = encoding.query.with_history(past), bundle
        queries = int(bundle.manifest.training_data["training_queries"])
        self._side = LabelSide.of_bundle(labels, bundle.embeddings, bundle.augmentation, training_queries=queries)
        self._facts = self._side.facts(recipe.evaluation)
        entries = HistoryEntries(past, recipe.history_events)
        self._term = None if bundle.cooccurrence is None else TermOf(bundle.cooccurrence, entries)

    @cached_property
    def _vectors(self) -> Float32:
        session, centre = onnx_session(self._bundle.query_model, "query_tower.onnx"), self._bundle.manifest.centre
        blocks = np.array_split(self.task.rows_N, -(-len(self.task.rows_N) // 4096))
        vectors = [session.run(None, self._features.of_queries(rows_B))[0] for rows_B in blocks]
        return np.concatenate(vectors) - np.array(0 if centre is None else centre, np.float32)

    def lists(self, settings: Sequence[Setting]) -> Int32:
        """Return the exact lists at some settings, int32 [S, N, K]."""
        towers = [*dict.fromkeys(setting.of_towers for setting in settings)]
        lists, _ = tower_lists(
            self.task, lambda rows_B: self._vectors[np.searchsorted(self.task.rows_N, rows_B)], self._side, towers
        )
        return lists.at(settings, self._term)

    def figures(self, top_NK: Int32) -> Float64:
        """Compute numerators and denominators of the three recalls, float64 [3, 2]."""
        ratios = self.task.ratios("20", top_NK, self._facts)
        return np.array([[part_N.sum() for part_N in ratios[name]] for name in _NAMES])


def main(
    recipe: Path,
    out: Annotated[Path, typer.Option(help="Folder of the bundles, one for each seed.")],
    refitted: Annotated[Path | None, typer.Option(help="Bundle of train + valid, for test and seed 0.")] = None,
    seeds: int = 1,
    changes: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of the recipe.")] = None,
) -> None:
    """Print figures along every way on test, then those of the points chosen on valid."""
    out.mkdir(parents=True, exist_ok=True)
    splits = []
    for seed in range(seeds):
        overrides = [*(changes or []), "training.refit=false", "evaluation.baselines=[]", f"seed={seed}"]
        if not (out / str(seed)).exists():
            fit(recipe, out / str(seed), overrides=overrides)
        loaded = load_recipe(
            recipe, [*overrides, "evaluation.ks=[20]", "evaluation.bootstrap=10", "evaluation.metric=recall@20"]
        )  # fmt: skip
        validated = Bundle.load(out / str(seed))
        final = validated if refitted is None else Bundle.load(refitted)
        splits.append((Split(loaded, validated, "valid"), Split(loaded, final, "test")))
    dials = [("dial", dial, 0.0, 0.0) for dial in _DIAL]
    valid = _pooled([valid.figures([dials, dials]) for valid, _ in splits])
    best = [max(dials, key=lambda at: _recalls(figures[at])[0])[1] for figures in valid]
    ways = [
        [("bonus", dial, torso, tail) for dial in {*_WITH_BONUS, top} for torso in _TORSO for tail in _TAIL]
        + [("places", top, float(reserved), 0.0) for reserved in _RESERVED]
        for top in best
    ]
    for figures, more in zip(valid, _pooled([valid.figures(ways) for valid, _ in splits]), strict=True):
        figures |= more
    shown = [
        [("dial", dial, 0.0, 0.0) for dial in _SHOWN["dial"]]
        + [("bonus", top, torso, tail) for torso in (0.0, 0.5) for tail in _SHOWN["bonus"]]
        + [("places", top, reserved, 0.0) for reserved in _SHOWN["places"]]
        for top in best
    ]
    chosen = [
        {
            (loss, way): _chosen({at: value for at, value in figures.items() if at[0] == way}, loss, top, figures)
            for loss in _LOSSES
            for way in _SHOWN
        }
        for figures, top in zip(valid, best, strict=True)
    ]
    points = [[*dict.fromkeys([*some, *of_ways.values()])] for some, of_ways in zip(shown, chosen, strict=True)]
    test = _pooled([test.figures(points) for _, test in splits])
    print("| way | at | recall@20 | torso | tail |\n|---|---|---|---|---|")
    for term, some in enumerate(shown):
        for at in some:
            print(f"| {_words(at[0], term)} | {_at(at)} | {_row(test[term][at])} |")
    print("\n| loss | way | chosen on valid | recall@20 | torso | tail | tail, of λ's |\n|---|---|---|---|---|---|---|")
    for loss in _LOSSES:
        of_dial = _recalls(test[0][chosen[0][loss, "dial"]])[2]
        for term, of_ways in enumerate(chosen):
            for way in _SHOWN:
                at = of_ways[loss, way]
                tail = _recalls(test[term][at])[2]
                ratio = f"{tail / of_dial:.1f}" if of_dial else "–"
                print(f"| {loss:.0%} | {_words(way, term)} | {_at(at)} | {_row(test[term][at])} | {ratio} |")


def _chosen(line: dict[At, Float64], loss: float, top: float, figures: dict[At, Float64]) -> At:
    """Return the point with the highest recall of the tail within a loss of recall."""
    least = (1 - loss) * _recalls(figures["dial", top, 0.0, 0.0])[0] - 1e-12
    reached = [at for at in line if _recalls(line[at])[0] >= least]
    return max(reached, key=lambda at: (_recalls(line[at])[2], _recalls(line[at])[0]))


def _pooled(figures_of_seeds: Sequence[list[dict[At, Float64]]]) -> list[dict[At, Float64]]:
    """Add up the figures of several seeds."""
    return [
        {at: np.sum([figures[at] for figures in of_seeds], axis=0) for at in of_seeds[0]}
        for of_seeds in zip(*figures_of_seeds, strict=True)
    ]


def _recalls(figures: Float64) -> Float64:
    recalls: Float64 = figures[:, 0] / np.maximum(figures[:, 1], 1)
    return recalls


def _row(figures: Float64) -> str:
    return " | ".join(f"{value:.4f}" for value in _recalls(figures))


def _words(way: str, term: int) -> str:
    return f"{way}{' + co-occurrence' if term else ''}"


def _at(at: At) -> str:
    way, dial, first, tail = at
    if way == "places":
        return f"{dial:g}; {first:g} places"
    return f"{dial:g}" + (f"; {f'β torso {first:g}, ' if first else ''}β tail {tail:g}" if way == "bonus" else "")


if __name__ == "__main__":
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    typer.run(main)
