"""Time and memory to make W from a log, to refresh it with the pairs of an hour, and to compute the term of a request.

python -m benchmarks.cooccurrence_cost --labels 1000000 --pairs 10000000
"""

from __future__ import annotations

import resource
import time

import numpy as np
import pyarrow as pa
import typer

from longtail.bundle.cooccurrence import LogPairs, cooccurrences
from longtail.bundle.manifest import CooccurrenceSettings

_HOURS = 90 * 24


def main(
    labels: int = 1_000_000, pairs: int = 10_000_000, kind: str = "mixed", history: int = 50, seed: int = 0
) -> None:
    """Draw queries of some 20 pairs that keep to one of a thousand tastes, with labels by Zipf's law in each."""
    rng = np.random.default_rng(seed)
    queries = np.sort(rng.integers(0, pairs // 20, pairs).astype(np.int32))
    rank = ((labels // 1000) ** rng.random(pairs)).astype(np.int64)  # P(rank) ∝ 1 / rank
    chosen = ((rank * 1000 + queries % 1000) % labels).astype(np.int32)
    settings = CooccurrenceSettings.model_validate(
        {"default": 1, "maximum": 2, "kind": kind, "power": 0.4, "last": history, "decay": 0.9}
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    began = time.perf_counter()
    (matrix,) = cooccurrences(LogPairs(queries, chosen), labels, [settings])
    built, most = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    began, hour = time.perf_counter(), slice(0, pairs // _HOURS)
    nameless = pa.nulls(int(queries[hour].max()) + 1, pa.string())
    matrix.refreshed(LogPairs(queries[hour], chosen[hour]), nameless, None, None)
    refreshed = time.perf_counter() - began
    histories = chosen[rng.integers(0, pairs, (2_000, history))]
    began = time.process_time()
    reached = sum(len(matrix.term(history_H).rows_C) for history_H in histories) / len(histories)
    micros = (time.process_time() - began) / len(histories) * 1e6
    print(
        f"{labels:,} labels, {pairs:,} pairs, {kind}: W {built:.1f} s, refresh {refreshed:.1f} s, {most:.2f} GiB at "
        f"most, {before:.2f} before; term of {history} entries {micros:.0f} µs, {reached:.0f} labels"
    )


if __name__ == "__main__":
    typer.run(main)
