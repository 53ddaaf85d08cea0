"""Gowalla, Amazon Beauty and Delicious, in the forms research publishes them."""

from __future__ import annotations

import gzip
import io
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.json

from longtail.trainer.data.sources.downloads import Download, Source
from longtail.trainer.data.tables import read_lists
from longtail.trainer.data.xmc import read_xmc
from longtail.trainer.errors import DataError

_LIGHTGCN = "https://raw.githubusercontent.com/gusye1234/LightGCN-PyTorch/master/data/gowalla"
_BEAUTY = "https://snap.stanford.edu/data/amazon/productGraph/categoryFiles/reviews_Beauty_5.json.gz"
_DELICIOUS = "https://drive.google.com/uc?export=download&id=0B3lPMIHmG6vGdG1jZ19VS2NWRVU"

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
SOURCES_DELICIOUS = (
    Source(
        "the extreme classification repository",
        (Download(_DELICIOUS, "Delicious.zip"),),
        "Delicious at http://manikvarma.org/downloads/XC/XMLRepository.html",
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


def read_delicious(folder: Path) -> dict[str, pa.Table]:
    """`train`, `test` (`row_id`, `tag`), `rows` (`row_id`, `features`: word number → count).

    Reads `train.txt` and `test.txt`, or the repository's `Delicious_data.txt` with its first split.

    Raises:
        DataError: neither form is there, or a file breaks the extreme-classification format.
    """
    if (folder / "train.txt").is_file():
        parts = {name: read_xmc(folder / f"{name}.txt") for name in ("train", "test")}
    elif (folder / "Delicious_data.txt").is_file():
        header, *lines = (folder / "Delicious_data.txt").read_text(encoding="utf-8").splitlines()
        with tempfile.TemporaryDirectory() as scratch:
            parts = {}
            for name, split in (("train", "delicious_trSplit.txt"), ("test", "delicious_tstSplit.txt")):
                chosen = np.loadtxt(folder / split, dtype=np.int64, ndmin=2)[:, 0] - 1
                part = Path(scratch, f"{name}.txt")
                sizes = " ".join([str(len(chosen)), *header.split()[1:]])
                part.write_text("\n".join([sizes, *(lines[row] for row in chosen), ""]), encoding="utf-8")
                parts[name] = read_xmc(part)
    else:
        raise DataError(f"{folder}: expected train.txt and test.txt, or Delicious_data.txt, found neither")
    rows = pa.concat_tables([part.queries for part in parts.values()])
    splits = {name: _pairs(part.pairs, names=("row_id", "tag")) for name, part in parts.items()}
    return splits | {"rows": rows.rename_columns(["row_id", "features"])}


def _pairs(*tables: pa.Table, names: tuple[str, str] = ("user_id", "item_id")) -> pa.Table:
    plain = pa.schema([("query", pa.string()), ("label", pa.string())])
    return pa.concat_tables([table.cast(plain) for table in tables]).rename_columns(list(names))
