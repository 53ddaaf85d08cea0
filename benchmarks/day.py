"""Simulate a day of a shop whose popularity moves within hours: hourly priors, daily training, and neither.

    python -m benchmarks.day --out runs/day

The log has nine days. A product's demand rises and falls by a factor of e in 29 hours (the law `drift` of
`benchmarks.shops`, with a day in 2.4 hours). One model is trained on seven days and serves the ninth, with the prior of
its training, and with a prior that is refreshed every hour. The other model is trained again at midnight, on eight
days, and keeps its prior.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import matplotlib
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.shops.__main__ import train
from benchmarks.shops.generate import START, write
from longtail.trainer.evaluation.bundle import RollingFigures, evaluate_rolling

_DAYS, _FASTER = 9, 10
_SMOOTHED = 3
"""Number of hours averaged in a point of the plot."""


def main(
    out: Annotated[Path, typer.Option(help="Where the shop, the runs and the plot are kept.")],
    events: int = 250_000,
    seed: int = 11,
) -> None:
    """Print recall@20 of the ninth day, in total and by six hours, and plot it by hour."""
    if not (out / "shop").exists():
        out.mkdir(parents=True, exist_ok=True)
        write(out / "shop", "drift", products=5_000, users=6_000, events=events, seed=seed)
    log = pq.read_table(out / "shop" / "events.parquet")
    seconds_N = (log["time"].to_numpy() - START) / np.timedelta64(_FASTER, "s")
    log = log.set_column(log.column_names.index("time"), "time", pa.array(START + seconds_N.astype("timedelta64[s]")))
    tables = ["--labels", out / "shop" / "products.parquet", "--queries", out / "shop" / "users.parquet"]
    lines = dict[str, list[RollingFigures]]()
    for name, days in (("trained once", _DAYS - 2), ("trained at midnight", _DAYS - 1)):
        folder, midnight = out / name.replace(" ", "-"), pa.scalar(START + np.timedelta64(days, "D"))
        folder.mkdir(exist_ok=True)
        for part, rows in (
            ("train", pc.less(log["time"], midnight)),
            ("test", pc.greater_equal(log["time"], midnight)),
        ):
            pq.write_table(log.filter(rows), folder / f"{part}.parquet")
        split = 'data.split={strategy = "temporal", valid = 0.1, test = 0}'
        test = f'data.test="{folder.resolve() / "test.parquet"}"'
        overrides = (test, split, 'prior.horizon="1d"')
        train(folder, folder / "train.parquet", tables, overrides)
        figures = evaluate_rolling(folder / "run", folder / "recipe.toml", 24 * (_DAYS - days), overrides=overrides)
        for prior, said in (
            ("forecast", name),
            ("refreshed", f"{name}, prior by the hour"),
            ("counts", f"{name}, counts"),
        ):
            lines[said] = [each for each in figures if each.prior == prior][-24:]
    print("| served | all day | 0–6 h | 6–12 h | 12–18 h | 18–24 h |\n|---|---|---|---|---|---|")
    for name, hours in lines.items():
        recalls = np.array([hour.metrics["recall@20"].value for hour in hours])
        print(
            f"| {name} | {recalls.mean():.4f} | {' | '.join(f'{part.mean():.4f}' for part in recalls.reshape(4, 6))} |"
        )
    _draw(lines, out / "day.png")


def _draw(lines: dict[str, list[RollingFigures]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for name, hours in lines.items():
        recalls = np.array([hour.metrics["recall@20"].value for hour in hours])
        smooth = np.convolve(recalls, np.ones(_SMOOTHED) / _SMOOTHED, "valid")
        axes.plot(np.arange(len(smooth)) + _SMOOTHED / 2, smooth, label=name)
    axes.set(xlabel="hour of the day", ylabel=f"recall@20, mean of {_SMOOTHED} hours", ylim=(0, None), xlim=(0, 24))
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    typer.run(main)
