"""Time and memory to fit a forecast of popularity on a log, and to refresh it with the pairs of an hour.

python -m benchmarks.forecast_cost --labels 1000000 --pairs 10000000
"""

from __future__ import annotations

import resource
import time

import numpy as np
import pyarrow as pa
import typer

from longtail.trainer import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.problems import RowReport
from longtail.trainer.prior import fit_forecast

_DAYS, _DAY, _HOUR = 90, 86_400.0, 3_600.0


def main(labels: int = 1_000_000, pairs: int = 10_000_000, seed: int = 0) -> None:
    """Draw labels by a drifting Zipf law, fit on 90 days, and count the pairs of one more hour."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0, _DAYS * _DAY, pairs))
    rank = (labels ** rng.random(pairs)).astype(np.int64)  # P(rank) ∝ 1 / rank
    chosen = ((rank * 7919 + (times // (10 * _DAY)).astype(np.int64) * 104_729) % labels).astype(np.int32)
    known = Pairs(rng.integers(0, pairs // 20, pairs).astype(np.int32), chosen, times=times)
    category = pa.array(rng.integers(0, 500, labels)).cast(pa.string())
    none = known.take(slice(0))
    dataset = Dataset(
        pa.array([], pa.string()), pa.array(np.arange(labels)).cast(pa.string()), known, none, none, None,
        pa.table({"category": category}), ordered=True, report=RowReport(unit="seconds"),
    )  # fmt: skip
    recipe = Recipe.model_validate({
        "name": "cost", "data": {"train": "-", "query_id": "user", "label_id": "item", "timestamp": "at"},
        "query": {"features": [{"name": "user", "kind": "id"}]},
        "label": {"features": [{"name": "item", "kind": "id"}, {"name": "category", "kind": "id"}]},
        "prior": {"kind": "forecast", "horizon": "7d", "features": ["category"]},
    })  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    began = time.perf_counter()
    forecast = fit_forecast(recipe, dataset, known)
    fitted = time.perf_counter() - began
    began = time.perf_counter()
    hour, until = pairs // (24 * _DAYS), forecast.settings.until + _HOUR
    at = until - rng.random(hour) * _HOUR
    forecast.refreshed(rng.integers(0, hour, hour), rng.integers(0, labels, hour), at, until).log_popularity()
    refreshed = time.perf_counter() - began
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{labels:,} labels, {pairs:,} pairs: fit {fitted:.1f} s, refresh {refreshed:.1f} s, {most:.2f} GiB at most, "
          f"{before:.2f} before")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
