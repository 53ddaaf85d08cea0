"""Gowalla, split in two ways, and Amazon Beauty, in the forms research publishes them."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from longtail.tables import find_files
from longtail.tables.engine import engine
from longtail.tables.table import all_columns, read_table
from longtail.trainer.data.sources.downloads import Download, Source
from longtail.trainer.errors import DataError

_LIGHTGCN = "https://raw.githubusercontent.com/gusye1234/LightGCN-PyTorch/master/data/gowalla"
_IR_BENCHMARK = "https://raw.githubusercontent.com/Tiny-Snow/IR-Benchmark-Dataset/main/data_ood"
_BEAUTY = "https://snap.stanford.edu/data/amazon/productGraph/categoryFiles/reviews_Beauty_5.json.gz"

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
        (Download(f"{_IR_BENCHMARK}/gowalla-popularity/proc.zip", "proc.zip"),),
        "data_ood/gowalla-popularity in https://github.com/Tiny-Snow/IR-Benchmark-Dataset",
    ),
)
SOURCES_BEAUTY = (
    Source(
        "the Amazon product data of McAuley et al.",
        (Download(_BEAUTY, "reviews_Beauty_5.json.gz"),),
        "Beauty 5-core at https://jmcauley.ucsd.edu/data/amazon/",
    ),
)


def read_gowalla(folder: Path) -> dict[str, pa.Table]:
    """`train`, `test` (`user_id`, `item_id`) of the NGCF / LightGCN split.

    A user's list keeps its order, of which nothing is published. It is no accident: what comes before tells what comes
    after. Test is not what comes after the lists (benchmarks/RESULTS.md). Pairs of a separate `valid.txt`, taken out of
    them nobody knows where, come first.
    """
    train = [
        read_lists(path) for name in ("valid", "train") if (path := folder / f"{name}.txt").is_file() or name == "train"
    ]
    return {"train": _pairs(*train), "test": _pairs(read_lists(folder / "test.txt"))}


def read_gowalla_popularity(folder: Path) -> dict[str, pa.Table]:
    """`train`, `test` (`user_id`, `item_id`) of the split whose test pairs are drawn uniformly over labels.

    Reads `train.tsv` and `test.tsv` (a head, then a user and an item a line), or `train.txt` and `test.txt` (per-user
    lists).
    """
    if (folder / "train.tsv").is_file():
        return {name: _pairs(_read_columns(folder / f"{name}.tsv")) for name in ("train", "test")}
    return {name: _pairs(read_lists(folder / f"{name}.txt")) for name in ("train", "test")}


def read_beauty(folder: Path) -> dict[str, pa.Table]:
    """`interactions` (`user_id`, `item_id`), each user's oldest first.

    Reads `sequences.txt` (per-user lists), or the 5-core reviews with their times.
    """
    if (folder / "sequences.txt").is_file():
        return {"interactions": _pairs(read_lists(folder / "sequences.txt"))}
    archive = folder / "reviews_Beauty_5.json.gz"
    if not archive.is_file():
        raise DataError(f"{folder}: expected sequences.txt or {archive.name}, found neither")
    schema = pa.schema([("reviewerID", pa.string()), ("asin", pa.string()), ("unixReviewTime", pa.int64())])
    options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    reviews = pyarrow.json.read_json(io.BytesIO(gzip.decompress(archive.read_bytes())), parse_options=options)
    reviews = reviews.sort_by([("reviewerID", "ascending"), ("unixReviewTime", "ascending")])
    return {"interactions": pa.table({"user_id": reviews["reviewerID"], "item_id": reviews["asin"]})}


def _read_columns(path: Path) -> pa.Table:
    """Return pairs of `query` and `label` from two columns under a head."""
    options = pa.csv.ParseOptions(delimiter="\t")
    names = pa.csv.ReadOptions(column_names=["query", "label"], skip_rows=1)
    try:
        return pa.csv.read_csv(path, parse_options=options, read_options=names)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path.name}: expected a head and then two columns, a user and an item: {error}") from error


def read_lists(path: Path) -> pa.Table:
    """Return pairs of `query` and `label` from a file of a line for each query, `query label label …`."""
    with engine() as reader:
        return read_table(reader, find_files(path, "lists"), all_columns, str(path)).arrow(["query", "label"])


def _pairs(*tables: pa.Table) -> pa.Table:
    plain = pa.schema([("query", pa.string()), ("label", pa.string())])
    return pa.concat_tables([table.cast(plain) for table in tables]).rename_columns(["user_id", "item_id"])
