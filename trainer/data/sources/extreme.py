"""Data sets of the extreme classification repository (Bhatia et al. 2016), in every layout it publishes them in."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from longtail.bundle.arrays import Int64
from longtail.trainer.data.sources.downloads import Download, Source, listing
from longtail.trainer.data.xmc import XmcRows, read_xmc
from longtail.trainer.errors import DataError

_PAGE = "http://manikvarma.org/downloads/XC/XMLRepository.html"


@dataclass(frozen=True)
class ExtremeDataset:
    """A data set of the repository: what its files are called, and the sizes that its table of data sets states.

    Attributes:
        stem: how its files begin in the older archives, `STEM_train.txt`.
        labels: labels of both; some may have no row.
        label: column of the labels in the tables that `read` makes.
        download: where its archive can be fetched; None where the address asks for a click, so that `--from` is needed.
    """

    name: str
    stem: str
    train: int
    test: int
    features: int
    labels: int
    label: str = "label"
    download: Download | None = None

    @property
    def source(self) -> Source:
        """Return the repository, as `fetch` asks it and as messages name it."""
        parts = () if self.download is None else (self.download,)
        return Source("the extreme classification repository", parts, f"{self.name}, BoW features, at {_PAGE}")

    def read(self, folder: Path) -> dict[str, pa.Table]:
        """`train`, `test` (`row_id` and `label`'s column), `rows` (`row_id`, `features`: feature number → value).

        Reads `train.txt` and `test.txt`; or `STEM_train.txt` and `STEM_test.txt`; or `NAME_data.txt` with the first
        column of `STEM_trSplit.txt` and `STEM_tstSplit.txt`, rows counted from 1. Rows are named `train-0`, `test-0`.
        """
        for prefix in ("", f"{self.stem}_"):
            if (folder / f"{prefix}train.txt").is_file():
                parts = {part: self._read(folder / f"{prefix}{part}.txt", part) for part in ("train", "test")}
                break
        else:
            if not (folder / f"{self.name}_data.txt").is_file():
                raise DataError(
                    f"{folder}: expected train.txt and test.txt, {self.stem}_train.txt and {self.stem}_test.txt, or "
                    f"{self.name}_data.txt and its splits, found {listing(folder)}. Get {self.source.by_hand}"
                )
            parts = self._read_split(folder)
        rows = pa.concat_tables([part.queries for part in parts.values()])
        return {name: _pairs(part.pairs, self.label) for name, part in parts.items()} | {
            "rows": rows.rename_columns(["row_id", "features"])
        }

    def _read(self, path: Path, part: str) -> XmcRows:
        """Return a file whose header says the published sizes; refused before its rows are read if it does not."""
        if not path.is_file():
            raise DataError(f"{path}: expected a text file, found none")
        with path.open("rb") as file:
            found = file.readline(100).decode("utf-8", "backslashreplace").strip()
        expected = f"{self.train if part == 'train' else self.test} {self.features} {self.labels}"
        if found.split() != expected.split():
            raise DataError(
                f"{path}: expected the first line `{expected}` (rows, features, labels), as {_PAGE} has the {part} "
                f"rows of {self.name}, found {found!r}"
            )
        return read_xmc(path, name=part)

    def _read_split(self, folder: Path) -> dict[str, XmcRows]:
        """Train and test rows of one file, cut by the first of its published splits."""
        header, *lines = (folder / f"{self.name}_data.txt").read_text(encoding="utf-8").splitlines()
        parts = {}
        with tempfile.TemporaryDirectory() as scratch:
            for part, ending in (("train", "trSplit"), ("test", "tstSplit")):
                chosen = _split(folder / f"{self.stem}_{ending}.txt", len(lines))
                cut = Path(scratch, f"{part}.txt")
                sizes = " ".join([str(len(chosen)), *header.split()[1:]])
                cut.write_text("\n".join([sizes, *(lines[row] for row in chosen), ""]), encoding="utf-8")
                parts[part] = self._read(cut, part)
        return parts


def _split(path: Path, rows: int) -> Int64:
    """Return rows of a part, from 0: the first column of a file that counts from 1."""
    if not path.is_file():
        raise DataError(f"{path}: expected a file of row numbers, found none")
    try:
        chosen: Int64 = np.loadtxt(path, dtype=np.int64, ndmin=2)[:, 0] - 1
    except ValueError as error:
        raise DataError(f"{path}: expected columns of row numbers: {error}") from error
    outside = chosen[(chosen < 0) | (chosen >= rows)]
    if len(outside):
        raise DataError(f"{path}: expected rows from 1 to {rows}, found {outside[0] + 1}")
    return chosen


def _pairs(pairs: pa.Table, label: str) -> pa.Table:
    plain = pa.schema([("query", pa.string()), ("label", pa.string())])
    return pairs.cast(plain).rename_columns(["row_id", label])


DELICIOUS = ExtremeDataset(
    "Delicious", "delicious", 12_920, 3_185, 500, 983, label="tag",
    download=Download(
        "https://drive.google.com/uc?export=download&id=0B3lPMIHmG6vGdG1jZ19VS2NWRVU", "Delicious.zip"
    ),
)  # fmt: skip
EURLEX_4K = ExtremeDataset("EURLex-4K", "eurlex", 15_539, 3_809, 5_000, 3_993)
AMAZONCAT_13K = ExtremeDataset("AmazonCat-13K", "amazonCat", 1_186_239, 306_782, 203_882, 13_330)
WIKILSHTC_325K = ExtremeDataset("WikiLSHTC-325K", "wikiLSHTC", 1_778_351, 587_084, 1_617_899, 325_056)
AMAZON_670K = ExtremeDataset("Amazon-670K", "amazon", 490_449, 153_025, 135_909, 670_091)
