"""Recall and recall of torso and tail along λ, a bonus and reserved places, with and without co-occurrence.

    python -m benchmarks.promises data/gowalla/recipe.toml --out runs/promises-gowalla --refitted runs/gowalla
    python -m benchmarks.promises data/movielens-100k/recipe.toml --out runs/promises-ml --seeds 3 \
        --set 'data.split={strategy="random",valid=0.1,test=0.2}' --set 'cooccurrence={}'

`OUT/SEED` is trained without refit unless it is there. Every way is tuned on its validation pairs: λ (μ where the prior
is a forecast) by recall, ω as `fit` chose it, then, for a loss of recall of 1 % and of 5 %, the point of each way with
the highest recall of the tail that loses no more than that against the best λ without co-occurrence. Test pairs are
measured once, for the tables; pairs of several seeds are pooled.

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

_DIAL = [*np.linspace(0, 0.5, 6), *np.linspace(0.55, 1.5, 20)]
_TORSO, _TAIL = (0.0, 0.5, 1.0), tuple(np.arange(0, 4.25, 0.25).tolist())
_PLACES = range(11)
_FIRST = 1e3
_LOSSES = (0.01, 0.05)
_SHOWN: dict[str, list[tuple[float, ...]]] = {
    "dial": [(dial,) for dial in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)],
    "bonus": [*((0.0, tail) for tail in (0.5, 1.0, 1.5, 2.0, 2.5)), *((0.5, tail) for tail in (1.0, 1.5, 2.0))],
    "places": [(1.0,), (2.0,), (3.0,), (5.0,), (8.0,)],
}
_NAMES = ("recall@20", "recall@20/torso", "recall@20/tail")

Line = dict[tuple[float, ...], Float64]
"""Figures by the values of a way: λ or μ, β of torso and tail, places."""


class Split(NamedTuple):
    """Measure lists of a bundle on the valid or test pairs of a recipe."""

    recipe: Recipe
    bundle: Bundle
    name: str

    def lines(self, best: Sequence[float] | None = None) -> list[dict[str, Line]]:
        """Measure all ways without and with the term; without the `best` value of the dial of both, the dial alone."""
        noise, term = Noise.of_bundle(self.bundle), self.bundle.manifest.cooccurrence
        weights = [0.0] if term is None or not term.default else [0.0, term.default]
        measured = _Measured(self)

        def at(dial: float, weight: float) -> Setting:
            return Setting(0.0, dial, weight) if noise.ahead or noise.constant else Setting(dial, 0.0, weight)

        lines = []
        for i, weight in enumerate(weights):
            ways: dict[str, Line] = {"dial": {}, "bonus": {}, "places": {}}
            settings: dict[tuple[str, tuple[float, ...]], Setting]
            settings = {("dial", (float(dial),)): at(float(dial), weight) for dial in _DIAL}
            if best is not None:
                base = at(best[i], weight)
                settings |= {
                    ("bonus", (torso, tail)): base.with_bonus(torso, tail, described=noise.described)
                    for torso in _TORSO
                    for tail in _TAIL
                }
                settings |= {("first", (0.0,)): base, ("first", (1.0,)): base._replace(tail=_FIRST)}
            top_of = dict(zip(settings, measured.lists([*settings.values()]), strict=True))
            for (way, value), top_NK in top_of.items():
                if way in ways:
                    ways[way][value] = measured.figures(top_NK)
            if best is not None:
                for places in _PLACES:
                    top_NK = with_places(
                        top_of["first", (0.0,)], top_of["first", (1.0,)], self.bundle.labels.buckets, places
                    )  # fmt: skip
                    ways["places"][(float(places),)] = measured.figures(top_NK)
            lines.append(ways)
        return lines


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
    dials = _pooled([valid.lines() for valid, _ in splits])
    best = [max(ways["dial"], key=lambda at: _recalls(ways["dial"][at])[0])[0] for ways in dials]
    chosen_on, shown = (_pooled([pair[at].lines(best) for pair in splits]) for at in range(2))
    print("| way | at | recall@20 | torso | tail |\n|---|---|---|---|---|")
    for i, ways in enumerate(shown):
        for way, values in _SHOWN.items():
            for value in values:
                at = next((each for each in ways[way] if np.allclose(each, value)), None)
                if at is not None:
                    print(f"| {_words(way, i)} | {_at(way, at, best[i])} | {_row(ways[way][at])} |")
    highest = _recalls(chosen_on[0]["dial"][best[0],])[0]
    print("\n| loss | way | chosen on valid | recall@20 | torso | tail | tail, of λ's |\n|---|---|---|---|---|---|---|")
    for loss in _LOSSES:
        reference = None
        for i, ways in enumerate(chosen_on):
            for way, line in ways.items():
                reached = [at for at in line if _recalls(line[at])[0] >= (1 - loss) * highest - 1e-12]
                if not reached:
                    continue
                at = max(reached, key=lambda at: (_recalls(line[at])[2], _recalls(line[at])[0]))
                tail = _recalls(shown[i][way][at])[2]
                reference = tail if reference is None else reference
                ratio = f"{tail / reference:.1f}" if reference else "–"
                print(
                    f"| {loss:.0%} | {_words(way, i)} | {_at(way, at, best[i])} | {_row(shown[i][way][at])} | {ratio} |"
                )


def _pooled(lines_of_seeds: Sequence[list[dict[str, Line]]]) -> list[dict[str, Line]]:
    """Add up the figures of several seeds."""
    return [
        {way: {at: sum(ways[way][at] for ways in of_seeds) for at in of_seeds[0][way]} for way in of_seeds[0]}
        for of_seeds in zip(*lines_of_seeds, strict=False)
    ]


def _recalls(figures: Float64) -> Float64:
    return figures[:, 0] / np.maximum(figures[:, 1], 1)


def _row(figures: Float64) -> str:
    return " | ".join(f"{value:.4f}" for value in _recalls(figures))


def _words(way: str, term: int) -> str:
    return f"{way}{' + co-occurrence' if term else ''}"


def _at(way: str, value: tuple[float, ...], best: float) -> str:
    if way == "dial":
        return f"{value[0]:g}"
    if way == "places":
        return f"{best:g}; {value[0]:g} places"
    return f"{best:g}; {f'β torso {value[0]:g}, ' if value[0] else ''}β tail {value[1]:g}"


if __name__ == "__main__":
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    typer.run(main)
