"""Public data sets: fetch from official sources, check, write Parquet and a recipe."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from longtail.bundle.store import atomic_directory, refuse_existing
from longtail.bundle.validation import did_you_mean
from longtail.trainer.data.sources import delicious, lists, movielens
from longtail.trainer.data.sources.downloads import Source, fetch, unpacked
from longtail.trainer.errors import DataError

__all__ = ["DATASETS", "KnownDataset", "prepare"]

Tables = dict[str, pa.Table]


@dataclass(frozen=True)
class KnownDataset:
    """Describe a public data set: its sources, the conversion of its files, and the expected counts.

    Attributes:
        sources: sources of the files, in the order of attempts.
        convert: function that reads the raw files of a directory; table name → table, one output file each.
        interactions: names of the tables of interactions.
        expected: published numbers of distinct queries, distinct labels and pairs of these tables.
    """

    sources: tuple[Source, ...]
    convert: Callable[[Path], Tables]
    interactions: tuple[str, ...]
    expected: tuple[int, int, int]


DATASETS: dict[str, KnownDataset] = {
    "movielens-100k": KnownDataset(
        movielens.SOURCES_100K, movielens.read_100k, ("interactions",), (943, 1_682, 100_000)
    ),
    "movielens-1m": KnownDataset(movielens.SOURCES_1M, movielens.read_1m, ("train", "test"), (6_040, 3_706, 1_000_209)),
    "gowalla": KnownDataset(lists.SOURCES_GOWALLA, lists.read_gowalla, ("train", "test"), (29_858, 40_981, 1_027_370)),
    "gowalla-popularity": KnownDataset(
        lists.SOURCES_GOWALLA_POPULARITY, lists.read_gowalla_popularity, ("train", "test"), (29_858, 40_988, 1_027_464)
    ),
    "amazon-beauty": KnownDataset(
        lists.SOURCES_BEAUTY, lists.read_beauty, ("interactions",), (22_363, 12_101, 198_502)
    ),
    "delicious": KnownDataset(delicious.SOURCES, delicious.read_delicious, ("train", "test"), (16_091, 983, 306_317)),
}


def prepare(name: str, out: Path, source: str | Path | None, *, say: Callable[[str], object]) -> None:
    """Write a public data set and its recipe to `out`, once both are complete.

    Args:
        source: raw files, as a directory or as the path or URL of a zip; None downloads them into the user's cache.
    """
    if name not in DATASETS:
        hint = did_you_mean(name, DATASETS)
        raise DataError(f"data set: expected one of {', '.join(DATASETS)}, received {name!r}{hint}")
    refuse_existing(out)
    dataset = DATASETS[name]
    with tempfile.TemporaryDirectory() as folder:
        raw = fetch(name, dataset.sources, say=say) if source is None else unpacked(source, Path(folder))
        try:
            tables = dataset.convert(raw)
            _check_counts(name, raw, [tables[table] for table in dataset.interactions], dataset.expected)
        except DataError:
            if source is None:
                shutil.rmtree(raw)  # so that the next run downloads it again
            raise
    with atomic_directory(out) as working:
        for table_name, table in tables.items():
            pq.write_table(table, working / f"{table_name}.parquet")
        with (
            (files("longtail.trainer") / "recipes" / f"{name}.toml").open("rb") as recipe,
            (working / "recipe.toml").open("wb") as copy,
        ):
            shutil.copyfileobj(recipe, copy)


def _check_counts(name: str, raw: Path, tables: list[pa.Table], expected: tuple[int, int, int]) -> None:
    ids = [
        pa.concat_tables([table.select([column]) for table in tables])[column] for column in tables[0].column_names[:2]
    ]
    counts = (pc.count_distinct(ids[0]).as_py(), pc.count_distinct(ids[1]).as_py(), len(ids[0]))
    if counts != expected:
        raise DataError(f"{raw}: expected {name} to have (queries, labels, pairs) {expected}, found {counts}")
