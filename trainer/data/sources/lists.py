"""Gowalla and Amazon Beauty, in the forms research publishes them."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.json

from longtail.trainer.data.lists import read_lists
from longtail.trainer.data.sources.downloads import Download, Source
from longtail.trainer.errors import DataError

_LIGHTGCN = "https://raw.githubusercontent.com/gusye1234/LightGCN-PyTorch/master/data/gowalla"
_BEAUTY = "https://snap.stanford.edu/data/amazon/productGraph/categoryFiles/reviews_Beauty_5.json.gz"

SOURCES_GOWALLA = (
    Source(
        "the LightGCN repository",
        (Download(f"{_LIGHTGCN}/train.txt", "train.txt"), Download(f"{_LIGHTGCN}/test.txt", "test.txt")),
        "data/gowalla in https://github.com/gusye1234/LightGCN-PyTorch",
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
    """`train`, `test` (`user_id`, `item_id`) of the NGCF / LightGCN split; a separate `valid.txt` joins train.

    Raises:
        DataError: `train.txt` or `test.txt` is missing, or not lists of ids.
    """
    train = [
        read_lists(path) for name in ("train", "valid") if (path := folder / f"{name}.txt").is_file() or name == "train"
    ]
    return {"train": _pairs(*train), "test": _pairs(read_lists(folder / "test.txt"))}


def read_beauty(folder: Path) -> dict[str, pa.Table]:
    """`interactions` (`user_id`, `item_id`), each user's oldest first.

    Reads `sequences.txt` (per-user lists), or the 5-core reviews with their times.

    Raises:
        DataError: neither file is there, or `sequences.txt` is not lists of ids.
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


def _pairs(*tables: pa.Table) -> pa.Table:
    plain = pa.schema([("query", pa.string()), ("label", pa.string())])
    return pa.concat_tables([table.cast(plain) for table in tables]).rename_columns(["user_id", "item_id"])
