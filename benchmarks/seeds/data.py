"""Data sets that the studies derive: Gowalla by histories, and clustered features with 200,000 labels."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from longtail.bundle import atomic_directory

LABELS, PAIRS, TESTS, DIMS = 200_000, 500_000, 5_000, 32

_HISTORY = """# Gowalla: the next check-in from the others, one label drawn per user and visit.
name = "gowalla-history"

[data]
train = "train.parquet"
test = "test.parquet"
query_id = "user_id"
label_id = "item_id"
reduction = "sample"

[query]
features = [{ name = "history", kind = "history", table = "history_items", max_length = 50 }]

[label]
features = [{ name = "item_id", kind = "id" }]
"""

_SYNTHETIC = f"""# {LABELS:,} labels as leaves of a hierarchy of means in {DIMS} dimensions, Zipf frequencies.
name = "synthetic-200k"

[data]
train = "train.parquet"
test = "test.parquet"
query_id = "row_id"
label_id = "label"
queries = "rows.parquet"

[query]
features = [{{ name = "x", kind = "bag", dim = {DIMS}, max_length = {DIMS}, combiner = "sum", unknown_rate = 0.0 }}]

[label]
features = [{{ name = "label", kind = "id", dim = {DIMS} }}]

[model]
dim = {DIMS}
"""


def derive(data: Path) -> None:
    """Write what is missing of the derived data sets below `data`."""
    if not (data / "synthetic-200k").exists():
        _synthetic(data / "synthetic-200k")
    if not (data / "gowalla-history").exists() and (data / "gowalla").exists():
        with atomic_directory(data / "gowalla-history") as working:
            for name in ("train.parquet", "test.parquet"):
                shutil.copyfile(data / "gowalla" / name, working / name)
            (working / "recipe.toml").write_text(_HISTORY, encoding="utf-8")


def _synthetic(target: Path) -> None:
    """x = a label's mean + noise; means part at every level of a binary hierarchy, by less and less."""
    rng = np.random.default_rng(0)
    levels = LABELS.bit_length()
    means_LD = np.zeros((LABELS, DIMS), np.float32)
    leaves = rng.permutation(LABELS)
    for level in range(levels):
        steps = rng.standard_normal((2 ** (level + 1), DIMS)).astype(np.float32) * 0.8**level
        means_LD += steps[leaves >> (levels - level - 1)]
    frequency = 1 / (np.arange(LABELS) + 10.0)
    labels_N = rng.choice(LABELS, PAIRS + TESTS, p=frequency / frequency.sum())
    x_ND = means_LD[labels_N] + 0.5 * rng.standard_normal((PAIRS + TESTS, DIMS)).astype(np.float32)
    ids = pa.array([f"r{row}" for row in range(PAIRS + TESTS)])
    names = pa.array([f"x{dim}" for dim in range(DIMS)])
    keys = names.take(pa.array(np.tile(np.arange(DIMS), PAIRS + TESTS)))
    offsets = pa.array(np.arange(PAIRS + TESTS + 1, dtype=np.int32) * DIMS)
    with atomic_directory(target) as working:
        pq.write_table(
            pa.table({"row_id": ids, "x": pa.MapArray.from_arrays(offsets, keys, pa.array(x_ND.ravel()))}),
            working / "rows.parquet",
        )
        pairs = pa.table({"row_id": ids, "label": pa.array(labels_N).cast(pa.string())})
        pq.write_table(pairs.slice(0, PAIRS), working / "train.parquet")
        pq.write_table(pairs.slice(PAIRS), working / "test.parquet")
        (working / "recipe.toml").write_text(_SYNTHETIC, encoding="utf-8")
