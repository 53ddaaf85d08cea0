"""Compare `longtail-train init`'s recipe with other libraries on generated shops and real logs.

    python -m benchmarks.shops --out runs/shops
    python -m benchmarks.shops --out runs/shops --law drift --seed 7 --users 20000 --products 20000 --events 600000
    python -m benchmarks.shops --out runs/shops --log data/gowalla/train.parquet

No setting is chosen per shop: `init` examines the files, and `fit` trains its recipe. Baselines are tuned on the same
validation pairs, and all methods answer the same test queries. The law of a shop is an upper bound for every method,
except for the effect of a visit's own events. Seconds cover training and answering with the chosen settings, then the
choice; for Longtail, the whole of `fit`.

Legend: `N` test queries, `K` list length, `L` labels, `U` users, `P` products.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.baselines import Row, Trial
from benchmarks.shops.generate import DAYS, LAWS, log_odds, shop_of, write
from longtail.bundle import Bundle, Interval
from longtail.bundle.arrays import Float32, Float64, Int32
from longtail.bundle.tower import onnx_session
from longtail.trainer import Recipe, load_recipe
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.evaluation.baselines import BASELINES, top_labels
from longtail.trainer.evaluation.cooccurrence import HistoryEntries, HistoryTerm
from longtail.trainer.evaluation.dial import Dial
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.ranking import RankedModel, tower_lists

_TRAIN = Path(sys.executable).parent / "longtail-train"
_TESTED = 0.95 * DAYS
"""Middle of the test period."""
_METRICS = ("recall@20", "ndcg@20", "recall@20/head", "recall@20/torso", "recall@20/tail", "recall@20/new")


def main(
    out: Annotated[Path, typer.Option(help="Where shops and runs are kept; what is there is not made again.")],
    law: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(LAWS)}.")] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(help="Real logs in place of shops; items.parquet and users.parquet beside one are its tables."),
    ] = None,
    users: int = 6_000,
    products: int = 5_000,
    events: int = 150_000,
    seed: int = 0,
) -> None:
    """Print the table, then Longtail's lead over each method, with 95 % intervals over test queries."""
    out.mkdir(parents=True, exist_ok=True)
    print(f"| set | method | {' | '.join(_METRICS)} | s | s to choose |")
    print("| --- " * (len(_METRICS) + 4) + "|")
    ahead = []
    for name in LAWS:
        if not log and name in (law or LAWS):
            data = out / f"{name}-{events}-{seed}"
            if not data.exists():
                write(data, name, products=products, users=users, events=events, seed=seed)
            tables = ["--labels", data / "products.parquet", "--queries", data / "users.parquet"]
            odds = log_odds(shop_of(name, products=products, users=users, seed=seed), name, _TESTED)
            ahead.append(_rows(name, data, data / "events.parquet", tables, odds))
    for file in log or []:
        tables = []
        for option, table in (("--labels", "items.parquet"), ("--queries", "users.parquet")):
            tables += [option, file.with_name(table)] if file.with_name(table).exists() else []
        data = out / file.parent.name
        data.mkdir(exist_ok=True)
        ahead.append(_rows(file.parent.name, data, file, tables))
    print("\nAhead in recall@20:")
    for line in ahead:
        print(f"- {line}")


def train(folder: Path, log: Path, tables: Sequence[object], overrides: Sequence[str] = ()) -> None:
    """Draft `recipe.toml` and fit `run` in a folder, unless they exist; store the seconds of the fit."""
    recipe, run = folder / "recipe.toml", folder / "run"
    if not recipe.exists():
        _run("init", log, *tables, "--out", recipe)
    if not run.exists():
        began = time.perf_counter()
        changes = [word for change in ("evaluation.baselines=[]", *overrides) for word in ("--set", change)]
        _run("fit", recipe, "--out", run, *changes)
        (folder / "seconds.json").write_text(json.dumps(time.perf_counter() - began), encoding="utf-8")


def _rows(name: str, data: Path, log: Path, tables: list[object], odds_UP: Float64 | None = None) -> str:
    """Print the rows of one data set, with the law's row if known; return Longtail's leads as text."""
    recipe, run = data / "recipe.toml", data / "run"
    train(data, log, tables)
    measurement = Measurement(load_recipe(recipe), Bundle.load(run))
    ours = measurement.ours(json.loads((data / "seconds.json").read_text(encoding="utf-8")))
    _print(name, measurement, ours)
    others = measurement.baselines()
    if odds_UP is not None:
        others.append(measurement.law(odds_UP))
    words = []
    for row in others:
        _print(name, measurement, row)
        by = measurement.ahead(ours, row)
        words.append(f"{row.method.partition(' (')[0]} by {by.value:+.4f} [{by.low:+.4f}, {by.high:+.4f}]")
    return f"{name}: {', '.join(words)}"


def _print(name: str, measurement: Measurement, row: Row) -> None:
    metrics = measurement.metrics(row)
    figures = [f"{metrics[key].value:.4f}" if key in metrics else "–" for key in _METRICS]
    seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
    choosing = "" if row.choosing is None else f"{row.choosing:.0f}"
    print(f"| {' | '.join([name, row.method, *figures, seconds, choosing])} |", flush=True)


def _run(*words: object) -> None:
    subprocess.run([str(_TRAIN), *map(str, words)], check=True, stdout=subprocess.DEVNULL)


class Measurement:
    """Measure lists for the test queries of a recipe; buckets are those of the bundle."""

    def __init__(self, recipe: Recipe, bundle: Bundle) -> None:
        self.recipe, self.bundle, self.dataset = recipe, bundle, read_dataset(recipe)
        if not self.dataset.label_ids.equals(bundle.labels.ids):
            raise ValueError("bundle: expected the labels of the recipe's data, in their order, received others")
        self._trial = Trial(recipe, self.dataset)
        self.task, self._facts = self._trial.task, self._trial.facts
        queries, labels = int(bundle.manifest.training_data["training_queries"]), bundle.labels
        if bundle.forecast is not None:  # labels that appear within the test period are there, as in `evaluate`
            log_prior_L = bundle.forecast.log_popularity(include_future=True).astype(np.float32)
            labels = replace(labels, log_popularity=log_prior_L)
        self.label_side = LabelSide.read_bundle(
            labels, bundle.embeddings, bundle.augmentation, training_queries=queries
        )

    def ours(self, seconds: float) -> Row:
        """Answer by the bundle at its default λ, μ and ω."""
        manifest, matrix = self.bundle.manifest, self.bundle.cooccurrence
        encoding = Encoding.fit(self.recipe, self.dataset, dict(self.bundle.vocabularies), manifest.query_features)
        features = encoding.query.with_history(self.task.past)
        session = onnx_session(self.bundle.query_model, "query_tower.onnx")
        dial = Dial.read_manifest(manifest).default
        lists, _ = tower_lists(
            self.task,
            RankedModel(lambda rows_B: session.run(None, features.query_inputs(rows_B))[0], self.label_side),
            [dial.of_towers],
        )
        entries = HistoryEntries(self.task.past, self.recipe.history_events)
        (top_NK,) = lists.select_lists([dial], None if matrix is None else HistoryTerm(matrix, entries))
        return Row(f"Longtail ({dial})", top_NK, seconds, None)

    def baselines(self) -> list[Row]:
        """Answer by all baselines that run on such data, tuned on validation."""
        return [row for name in BASELINES if isinstance(row := self._trial.answers(name), Row)]

    def law(self, log_odds_UP: Float64) -> Row:
        """Answer by the law of a shop, an upper bound for every method up to chance.

        Args:
            log_odds_UP: float64 [U, P] of users `u0`, `u1`, … and products `p0`, `p1`, …
        """
        users_Q, products_L = (
            np.array([int(id_[1:]) for id_ in ids.to_pylist()])
            for ids in (self.dataset.query_ids, self.dataset.label_ids)
        )
        data = self._trial.learnt_from(self._trial.earlier, self.task)
        lowest = np.float32(np.finfo(np.float32).min)

        def scores(rows_B: Int32) -> Float32:
            users_B = users_Q[self.task.past.queries(rows_B)]
            return np.maximum(log_odds_UP[users_B][:, products_L].astype(np.float32), lowest)

        return Row("the law itself", top_labels(self.task, data, scores), None, None)

    def metrics(self, row: Row) -> dict[str, Interval]:
        """Compute every metric of a method's lists."""
        return self.task.metrics(row.top_NK, self._facts)

    def ahead(self, ours: Row, other: Row) -> Interval:
        """Compute the lead of Longtail in the recipe's metric, paired by query."""
        metric = self.recipe.evaluation.metric
        (ours_N, denominator_N), (theirs_N, _) = (
            self.task.ratio(metric, row.top_NK, self._facts) for row in (ours, other)
        )
        return self.task.bootstrap.interval(ours_N - theirs_N, denominator_N)


if __name__ == "__main__":
    typer.run(main)
