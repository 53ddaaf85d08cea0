"""Serve a shop hour by hour: a prior as released, and a prior that is refreshed every hour, with one model.

    python -m benchmarks.hours --out runs/hours --law seasonal --seed 11

The model is trained by `init`'s recipe; every hour of the last nine days is answered with what the service would have
served.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.shops.__main__ import train
from benchmarks.shops.generate import LAWS, write
from longtail.bundle import Bundle
from longtail.trainer.evaluation.bundle import RollingFigures, evaluate_rolling

_METRICS = ("recall@20", "recall@20/head", "recall@20/torso", "recall@20/tail", "recall@20/new")


def main(
    out: Annotated[Path, typer.Option(help="Where shops and runs are kept; what is there is not made again.")],
    law: Annotated[list[str] | None, typer.Option(help="Only these laws of `benchmarks.shops`.")] = None,
    seed: int = 11,
    hours: int = 216,
    users: int = 6_000,
    products: int = 5_000,
    events: int = 150_000,
) -> None:
    """Print recall@20 of each prior, averaged over the pairs of test."""
    print(f"| shop | prior | {' | '.join(_METRICS)} |\n| --- | --- {'| --- ' * len(_METRICS)}|")
    for name in LAWS:
        if name not in (law or LAWS):
            continue
        folder = out / f"{name}-{events}-{seed}"
        if not folder.exists():
            out.mkdir(parents=True, exist_ok=True)
            write(folder, name, products=products, users=users, events=events, seed=seed)
        tables = ["--labels", folder / "products.parquet", "--queries", folder / "users.parquet"]
        train(folder, folder / "events.parquet", tables)
        bundle = Bundle.load(folder / "run")
        figures = evaluate_rolling(bundle, folder / "recipe.toml", hours)
        for prior in sorted({period.prior for period in figures}):
            values = [_mean(metric, [period for period in figures if period.prior == prior]) for metric in _METRICS]
            print(f"| {folder.name} | {prior} | {' | '.join(f'{value:.4f}' for value in values)} |", flush=True)


def _mean(metric: str, periods: list[RollingFigures]) -> float:
    """Average a metric over periods that have it, by their pairs."""
    periods = [period for period in periods if metric in period.metrics]
    values = [period.metrics[metric].value for period in periods]
    return float(np.average(values, weights=[period.pairs for period in periods])) if periods else 0.0


if __name__ == "__main__":
    typer.run(main)
