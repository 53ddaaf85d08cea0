"""Logs on disk: write tables, read them as a data set, and name its pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from longtail.trainer.config import DataConfig
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.loading import load_dataset
from longtail.trainer.data.pairs import Pairs


def write_table(path: Path, **columns: Any) -> Path:
    """Write columns as Parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def write_text(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def load(train: Any, *, seed: int = 0, **settings: Any) -> Dataset:
    """Read logs with columns `user` and `item`, unless settings name others."""
    columns = {"train": train, "query_id": "user", "label_id": "item"}
    return load_dataset(DataConfig.model_validate(columns | settings), seed=seed)


def name_pairs(dataset: Dataset, pairs: Pairs | None = None) -> list[str]:
    """Format pairs, by default those of training, as `query-label`."""
    pairs = dataset.train if pairs is None else pairs
    queries, labels = dataset.query_ids.to_pylist(), dataset.label_ids.to_pylist()
    return [f"{queries[query]}-{labels[label]}" for query, label in zip(pairs.queries, pairs.labels, strict=True)]
