"""Comparison of the recipe of `longtail-train init` with other libraries, on generated shops and real logs.

    python -m benchmarks.shops --out runs/shops
    python -m benchmarks.shops --out runs/shops --law drift --seed 7 --users 20000 --products 20000 --events 600000
    python -m benchmarks.shops --out runs/shops --log data/gowalla/train.parquet

No setting is chosen per shop: `init` examines the files, and `fit` trains its recipe. Baselines are tuned on the same
validation pairs, and all methods answer the same test queries. The law of a shop is an upper bound for every method,
except for the effect of a visit's own events. Seconds cover training and answering with the chosen settings, then the
choice; for Longtail, the whole of `fit`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.baselines import Row
from benchmarks.shops.generate import DAYS, LAWS, log_odds, shop_of, write
from benchmarks.shops.measure import Measurement
from longtail.bundle import Bundle
from longtail.bundle.arrays import Float64
from longtail.trainer import load_recipe
from longtail.trainer.evaluation.baselines import BASELINES

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
        changes = [word for each in ("evaluation.baselines=[]", *overrides) for word in ("--set", each)]
        _run("fit", recipe, "--out", run, *changes)
        (folder / "seconds.json").write_text(json.dumps(time.perf_counter() - began), encoding="utf-8")


def _rows(name: str, data: Path, log: Path, tables: list[object], odds_UP: Float64 | None = None) -> str:
    """Print the rows of one data set, with the law's row if known; return Longtail's leads as text."""
    recipe, run = data / "recipe.toml", data / "run"
    train(data, log, tables)
    measurement = Measurement(load_recipe(recipe), Bundle.load(run))
    ours = measurement.ours(json.loads((data / "seconds.json").read_text(encoding="utf-8")))
    _print(name, measurement, ours)
    others = [row for baseline in BASELINES if (row := measurement.baseline(baseline))]
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


if __name__ == "__main__":
    typer.run(main)
