"""Gowalla, with and without a popularity shift, and Amazon Beauty."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from longtail.tables import DataFile
from longtail.tables.database import lines_source, open_database
from longtail.tables.table import all_columns, read_table
from longtail.trainer.data.sources.downloads import Download, Source
from longtail.trainer.errors import DataError

_LIGHTGCN = "https://raw.githubusercontent.com/gusye1234/LightGCN-PyTorch/master/data/gowalla"
_IR_BENCHMARK = "https://raw.githubusercontent.com/Tiny-Snow/IR-Benchmark-Dataset/main"
_REVIEWS = "reviews_Beauty_5.json.gz"

SOURCES_GOWALLA = (
    Source(
        "the LightGCN repository",
        (Download(f"{_LIGHTGCN}/train.txt", "train.txt"), Download(f"{_LIGHTGCN}/test.txt", "test.txt")),
        "data/gowalla in https://github.com/gusye1234/LightGCN-PyTorch",
    ),
)
SOURCES_GOWALLA_POPULARITY = (
    Source(
        "the IR-Benchmark data repository",
        (Download(f"{_IR_BENCHMARK}/data_ood/gowalla-popularity/proc.zip", "proc.zip"),),
        "data_ood/gowalla-popularity in https://github.com/Tiny-Snow/IR-Benchmark-Dataset",
    ),
)
SOURCES_BEAUTY = (
    Source(
        "the Amazon product data of McAuley et al.",
        (Download(f"https://snap.stanford.edu/data/amazon/productGraph/categoryFiles/{_REVIEWS}", _REVIEWS),),
        "Beauty 5-core at https://jmcauley.ucsd.edu/data/amazon/",
    ),
)


def read_gowalla(folder: Path) -> dict[str, pa.Table]:
    """Read `train` and `test` (`user_id`, `item_id`) of the NGCF / LightGCN split.

    A user's list keeps its published order, whose meaning is not documented. The order is not random: earlier items of
    a list predict later ones. Test items do not continue the lists (benchmarks/RESULTS.md). Pairs of a separate
    `valid.txt`, whose original positions are unknown, come first.
    """
    train = [
        read_lists(path) for name in ("valid", "train") if (path := folder / f"{name}.txt").is_file() or name == "train"
    ]
    return {"train": _pairs(*train), "test": _pairs(read_lists(folder / "test.txt"))}


def read_gowalla_popularity(folder: Path) -> dict[str, pa.Table]:
    """Read `train` and `test` (`user_id`, `item_id`) of Gowalla under a popularity shift.

    The files are `train.tsv` and `test.tsv` (a header, then a user and an item per line), or `train.txt` and `test.txt`
    (per-user lists).
    """
    if (folder / "train.tsv").is_file():
        return {name: _pairs(_read(folder / f"{name}.tsv", "tsv")) for name in ("train", "test")}
    return {name: _pairs(read_lists(folder / f"{name}.txt")) for name in ("train", "test")}


def read_beauty(folder: Path) -> dict[str, pa.Table]:
    """Read `interactions` (`user_id`, `item_id`), each user's oldest first.

    The file is `sequences.txt` (per-user lists), or the 5-core reviews with their times.
    """
    if (folder / "sequences.txt").is_file():
        return {"interactions": _pairs(read_lists(folder / "sequences.txt"))}
    archive = folder / _REVIEWS
    if not archive.is_file():
        raise DataError(f"{folder}: expected sequences.txt or {archive.name}, found neither")
    reviews = _read(archive, "jsonl", ["reviewerID", "asin", "unixReviewTime"])
    reviews = reviews.sort_by([("reviewerID", "ascending"), ("unixReviewTime", "ascending")])
    return {"interactions": pa.table({"user_id": reviews["reviewerID"], "item_id": reviews["asin"]})}


def read_lists(path: Path) -> pa.Table:
    """Read pairs from a file with lines `query label label …`."""
    if not path.is_file():
        raise DataError(f"{path}: expected a text file, found none")
    words, file = "string_split_regex(trim(line, ' \t\r'), '[ \t]+')", DataFile(str(path), str(path), "text")
    with open_database() as reader, reader.reading(file):
        lines = f"SELECT {words} AS words FROM {lines_source(reader, file)}"
        return reader.arrow(f"SELECT words[1] AS query, unnest(words[2:]) AS label FROM ({lines})")


def _read(path: Path, kind: str, names: Sequence[str] = ()) -> pa.Table:
    """Read columns of a file, by default all; DataError for a line that is no row."""
    with open_database() as reader:
        table = read_table(reader, [DataFile(str(path), str(path), kind)], all_columns, str(path))
        if lines := table.parts[0].rejected:
            raise DataError(f"{path}: line {lines[0].line}: expected {lines[0].expected}, found {lines[0].received}")
        return table.arrow(names or [*table.kinds])


def _pairs(*tables: pa.Table) -> pa.Table:
    plain = pa.schema([("user_id", pa.string()), ("item_id", pa.string())])
    for table in tables:
        if table.num_columns != len(plain):
            names = ", ".join(table.column_names)
            raise DataError(f"expected two columns, a user and an item, found {names}")
    return pa.concat_tables([table.rename_columns(plain.names).cast(plain) for table in tables])
