"""Data sets of the extreme classification repository (Bhatia et al. 2016), in all published layouts.

The sparse format has a first line `rows features labels`, then a line per row: `label,label feature:value …`.

Legend: `R` rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Int64
from longtail.tables import DataFile
from longtail.tables.engine import engine, read_lines
from longtail.trainer.data.sources.downloads import Download, Source, listing
from longtail.trainer.errors import DataError

_PAGE = "http://manikvarma.org/downloads/XC/XMLRepository.html"
_ROW = r"(\d*,)*\d*([ \t]+\d+:[^ \t:]+)*[ \t\r]*"


@dataclass(frozen=True)
class ExtremeDataset:
    """Describe a data set of the repository: names of its files, and its published sizes.

    Attributes:
        stem: beginning of file names in the older archives, `STEM_train.txt`.
        labels: number of labels in train and test; some may have no row.
        label: column of the labels in the tables of `read`.
        download: URL of the archive; None if the page needs a click in a browser, so that `--from` is required.
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
        """Return the repository as a source for `fetch` and for messages."""
        parts = () if self.download is None else (self.download,)
        return Source("the extreme classification repository", parts, f"{self.name}, BoW features, at {_PAGE}")

    def read(self, folder: Path) -> dict[str, pa.Table]:
        """Read `train` and `test` (`row_id` and the column of labels), and `rows` (`row_id`, `features`).

        Reads `train.txt` and `test.txt`; or `STEM_train.txt` and `STEM_test.txt`; or `NAME_data.txt` with the first
        column of `STEM_trSplit.txt` and `STEM_tstSplit.txt`, rows counted from 1. Rows are named `train-0`, `test-0`.
        """
        whole = folder / f"{self.name}_data.txt"
        prefix = next((each for each in ("", f"{self.stem}_") if (folder / f"{each}train.txt").is_file()), None)
        if prefix is not None:
            parts = {
                part: self._rows(folder / f"{prefix}{part}.txt", rows)
                for part, rows in (("train", self.train), ("test", self.test))
            }
        elif whole.is_file():
            rows = self.train + self.test
            chosen = {
                part: _split(folder / f"{self.stem}_{ending}.txt", rows)
                for part, ending in (("train", "trSplit"), ("test", "tstSplit"))
            }
            every = self._rows(whole, rows)
            parts = {part: every.take(of_part) for part, of_part in chosen.items()}
        else:
            raise DataError(
                f"{folder}: expected train.txt and test.txt, {self.stem}_train.txt and {self.stem}_test.txt, or "
                f"{self.name}_data.txt and its splits, found {listing(folder)}. Get {self.source.by_hand}"
            )
        tables, names = {}, []
        for part, of_part in parts.items():
            ids = pc.binary_join_element_wise(part, pa.array(np.arange(len(of_part))).cast(pa.string()), "-")
            of_pairs = pc.list_parent_indices(of_part["labels"])
            labels = pc.list_flatten(of_part["labels"]).cast(pa.string())
            tables[part] = pa.table({"row_id": ids.take(of_pairs.combine_chunks()), self.label: labels})
            names.append(pa.table({"row_id": ids, "features": of_part["features"]}))
        return tables | {"rows": pa.concat_tables(names)}

    def _rows(self, path: Path, rows: int) -> pa.Table:
        """Read `labels`, lists of int32, and `features`, maps from int32 to float32, from a file with `rows` rows.

        A row may lack labels (its line starts with a blank) or features. A label that a row names twice counts once.
        """
        if not path.is_file():
            raise DataError(f"{path}: expected a text file, found none")
        with path.open("rb") as content:
            found = content.readline(100).decode("utf-8", "backslashreplace").strip()
        expected = f"{rows} {self.features} {self.labels}"
        if found.split() != expected.split():
            raise DataError(
                f"{path}: expected the first line `{expected}` (rows, features, labels), as {_PAGE} has the rows of "
                f"{self.name}, found {found!r}"
            )
        file = DataFile(str(path), str(path), "text")
        with engine() as reader, reader.reading(file):
            query = f"""
                WITH split AS (
                    SELECT line, string_split_regex(rtrim(line, ' \t\r'), '[ \t]+') AS words
                    FROM (SELECT coalesce(line, '') AS line FROM {read_lines(reader, file, skip=1)})
                ), parsed AS (
                    SELECT
                        line,
                        list_transform(
                            list_filter(string_split(words[1], ','), lambda x: x <> ''),
                            lambda x: TRY_CAST(x AS INTEGER)
                        ) AS labels,
                        list_transform(words[2:], lambda x: TRY_CAST(split_part(x, ':', 1) AS INTEGER)) AS features,
                        list_transform(words[2:], lambda x: TRY_CAST(split_part(x, ':', 2) AS FLOAT)) AS numbers
                    FROM split
                )
                SELECT
                    list_filter(labels, lambda x, i: list_position(labels, x) = i) AS labels,
                    features,
                    numbers,
                    CASE WHEN NOT regexp_full_match(line, '{_ROW}')
                        OR len(list_filter(labels, lambda x: x IS NULL OR x >= {self.labels})) > 0
                        OR len(list_filter(features, lambda x: x IS NULL OR x >= {self.features})) > 0
                        OR len(list_filter(numbers, lambda x: x IS NULL OR NOT isfinite(x))) > 0
                    THEN line[:80] END AS wrong
                FROM parsed"""
            table = reader.arrow(query).combine_chunks()
        wrong = table["wrong"].is_valid().index(True).as_py()
        if wrong >= 0:
            raise DataError(
                f"{path}: line {wrong + 2}: expected `label,label feature:value …` of labels below {self.labels}, "
                f"features below {self.features} and finite values, found {table['wrong'][wrong].as_py()!r}"
            )
        used = pc.or_(*(pc.greater(pc.list_value_length(table[name]), 0) for name in ("labels", "features")))
        if len(table) < rows or pc.any(used[rows:]).as_py():
            raise DataError(f"{path}: expected {rows} rows as its header says, found {len(table)}")
        table = table[:rows].combine_chunks()
        keys, numbers = (table[name].combine_chunks() for name in ("features", "numbers"))
        features = pa.MapArray.from_arrays(keys.offsets, keys.flatten(), numbers.flatten())
        return pa.table({"labels": table["labels"], "features": features})


def _split(path: Path, rows: int) -> Int64:
    """Read the rows of a part, from 0: the first column of a file that counts from 1."""
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
