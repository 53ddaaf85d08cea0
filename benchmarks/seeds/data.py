"""Generated data sets of the studies: rows around independent means."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from longtail.bundle import BundleExistsError
from longtail.bundle.arrays import Float32, Float64, Int64
from longtail.bundle.store import atomic_directory

DIMS, MIXTURE_NOISE = 32, 0.2
_RATIO = 100
"""Ratio of the largest to the smallest count of a label in a profile."""
Profile = Literal["exp", "step"]

_GENERATED = """# x = a label's mean + noise; the means are independent, so no hierarchy made them.
name = "{name}"

[data]
train = "train.parquet"
valid = "valid.parquet"
test = "test.parquet"
query_id = "row_id"
label_id = "label"
queries = "rows.parquet"

[query]
features = [{{ name = "x", kind = "bag", dim = 32, max_length = 64, combiner = "sum", unknown_rate = 0.0 }}]

[label]
features = [{{ name = "label", kind = "id", dim = 32 }}]

[model]
dim = 32
"""


def derive(data: Path, name: str) -> None:
    """Write a derived data set below `data`, unless it exists; ignore names of other data sets."""
    if (data / name).exists():
        return
    with suppress(BundleExistsError):  # another shard may have written the same data set
        if name in _GENERATORS:
            _write(data / name, *_GENERATORS[name]())


def mixture() -> tuple[Int64, dict[str, int]]:
    """Draw labels of all rows by Zipf's law; return them and the numbers of train, valid and test rows."""
    parts = {"train": 100_000, "valid": 2_000, "test": 5_000}
    frequency_L = 1 / (np.arange(10_000) + 10.0)
    rng = np.random.default_rng(0)
    return rng.choice(10_000, sum(parts.values()), p=frequency_L / frequency_L.sum()).astype(np.int64), parts


def _profiled(kind: Profile) -> tuple[Int64, dict[str, int]]:
    """Draw 100 labels with a long tail in training [R21 §5.1].

    Of 500 training rows of each label the tail is cut; valid has 10 rows of each, test 50.
    """
    train = profile(100, 500, kind) // 500
    valid, test = np.repeat(np.arange(100), 10), np.repeat(np.arange(100), 50)
    return np.concatenate([train, valid, test]), {"train": len(train), "valid": len(valid), "test": len(test)}


def profile(labels: int, rows: int, kind: Profile) -> Int64:
    """Down-sample balanced labels, with `rows` consecutive rows per label, to a long tail [R21 §5.1].

    Label i keeps `floor(rows · s_i)` rows, drawn without replacement. `exp`: s_i = 100^(−i / (L − 1)) [Cui et al.
    2019]. `step`: s_i = 1 for the first ⌊L / 2⌋ labels, 1 / 100 for the others [Cao et al. 2019].
    """
    ranks_L = np.arange(labels)
    shares_L = _RATIO ** (-ranks_L / (labels - 1)) if kind == "exp" else np.where(ranks_L < labels // 2, 1, 1 / _RATIO)
    # float64 may round a whole number slightly down; then take the whole number.
    count_L = np.floor(rows * shares_L * (1 + 1e-12)).astype(np.int64)
    shuffled_N = np.random.default_rng(0).permutation(labels * rows)
    by_label_LN = shuffled_N[np.argsort(shuffled_N // rows, kind="stable")].reshape(labels, rows)
    selected: Int64 = np.sort(by_label_LN[np.arange(rows) < count_L[:, None]])
    return selected


_GENERATORS = {
    "mixture-10k": mixture,
    "exp-100": lambda: _profiled("exp"),
    "step-100": lambda: _profiled("step"),
}


def rows_around_means(labels_N: Int64, *, noise: float) -> tuple[Float32, Float64]:
    """Draw x = mean of the label + noise, with independent means of expected norm 1.

    Args:
        noise: standard deviation of every coordinate.

    Returns:
        x, float32 [N, 32], and the means of labels 0 to the largest, float64 [L, 32].
    """
    rng = np.random.default_rng(0)
    means_LD = rng.standard_normal((labels_N.max() + 1, DIMS)) / np.sqrt(DIMS)
    x_ND: Float32 = (means_LD[labels_N] + noise * rng.standard_normal((len(labels_N), DIMS))).astype(np.float32)
    return x_ND, means_LD


def _write(target: Path, labels_N: Int64, parts: dict[str, int]) -> None:
    rows = len(labels_N)
    x_ND, _ = rows_around_means(labels_N, noise=MIXTURE_NOISE if target.name == "mixture-10k" else 0.3)
    ids = pa.array([f"r{row}" for row in range(rows)])
    names = pa.array([f"x{dim}" for dim in range(DIMS)])
    keys = names.take(pa.array(np.tile(np.arange(DIMS), rows)))
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * DIMS)
    pairs = pa.table({"row_id": ids, "label": pa.array(labels_N.astype(np.str_))})
    with atomic_directory(target) as working:
        values = pa.MapArray.from_arrays(offsets, keys, pa.array(x_ND.ravel()))
        pq.write_table(pa.table({"row_id": ids, "x": values}), working / "rows.parquet")
        start = 0
        for part, size in parts.items():
            pq.write_table(pairs.slice(start, size), working / f"{part}.parquet")
            start += size
        (working / "recipe.toml").write_text(_GENERATED.format(name=target.name), encoding="utf-8")
