"""Delicious, in the sparse format of the extreme classification repository (Bhatia et al. 2016).

A file has a first line `rows features labels`, then a line per row: `label,label feature:value …`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Int64
from longtail.tables import DataFile
from longtail.tables.database import lines_source, open_database
from longtail.trainer.data.sources.downloads import Download, Source, listing
from longtail.trainer.errors import DataError

TRAIN_ROWS, TEST_ROWS, FEATURES, LABELS = 12_920, 3_185, 500, 983
"""Published sizes."""
_LINE = r"(\d*,)*\d*([ \t]+\d+:[^ \t:]+)*[ \t\r]*"

SOURCES = (
    Source(
        "the extreme classification repository",
        (
            Download(
                "https://drive.google.com/uc?export=download&id=0B3lPMIHmG6vGdG1jZ19VS2NWRVU", "Delicious.zip"
            ),
        ),
        "Delicious, BoW features, at http://manikvarma.org/downloads/XC/XMLRepository.html",
    ),
)  # fmt: skip


def read_delicious(folder: Path) -> dict[str, pa.Table]:
    """Read `train` and `test` (`row_id`, `tag`), and `rows` (`row_id`, `features`).

    Reads `train.txt` and `test.txt`, or `Delicious_data.txt` with the first column of `delicious_trSplit.txt` and
    `delicious_tstSplit.txt`, which count rows from 1. Rows are named `train-0`, `test-0`.
    """
    every_row = folder / "Delicious_data.txt"
    if (folder / "train.txt").is_file():
        splits = {
            "train": _read_rows(folder / "train.txt", TRAIN_ROWS), "test": _read_rows(folder / "test.txt", TEST_ROWS)
        }  # fmt: skip
    elif every_row.is_file():
        count = TRAIN_ROWS + TEST_ROWS
        row_numbers = {
            name: _read_row_numbers(folder / f"delicious_{suffix}.txt", count)
            for name, suffix in (("train", "trSplit"), ("test", "tstSplit"))
        }
        rows = _read_rows(every_row, count)
        splits = {name: rows.take(numbers) for name, numbers in row_numbers.items()}
    else:
        raise DataError(
            f"{folder}: expected train.txt and test.txt, or Delicious_data.txt and its splits, found {listing(folder)}"
        )
    tables, features = {}, []
    for name, rows in splits.items():
        ids = pc.binary_join_element_wise(name, pa.array(np.arange(len(rows))).cast(pa.string()), "-")
        row_numbers = pc.list_parent_indices(rows["labels"]).combine_chunks()
        tags = pc.list_flatten(rows["labels"]).cast(pa.string())
        tables[name] = pa.table({"row_id": ids.take(row_numbers), "tag": tags})
        features.append(pa.table({"row_id": ids, "features": rows["features"]}))
    return tables | {"rows": pa.concat_tables(features)}


def _read_rows(path: Path, rows: int) -> pa.Table:
    """Read `labels`, lists of int32, and `features`, maps from int32 to float32.

    A row may lack labels (its line starts with a blank) or features. A label that a row names twice counts once.
    """
    if not path.is_file():
        raise DataError(f"{path}: expected a text file, found none")
    with path.open("rb") as content:
        header = content.readline(100).decode("utf-8", "backslashreplace").strip()
    expected = f"{rows} {FEATURES} {LABELS}"
    if header.split() != expected.split():
        raise DataError(f"{path}: expected the first line `{expected}` (rows, features, labels), found {header!r}")
    file = DataFile(str(path), str(path), "text")
    with open_database() as reader, reader.reading(file):
        table = reader.arrow(f"""
            WITH split AS (
                SELECT line, string_split_regex(rtrim(line, ' \t\r'), '[ \t]+') AS words
                FROM (SELECT coalesce(line, '') AS line FROM {lines_source(reader, file, skip=1)})
            ), parsed AS (
                SELECT
                    line,
                    list_transform(
                        list_filter(string_split(words[1], ','), lambda x: x <> ''), lambda x: TRY_CAST(x AS INTEGER)
                    ) AS labels,
                    list_transform(words[2:], lambda x: TRY_CAST(split_part(x, ':', 1) AS INTEGER)) AS features,
                    list_transform(words[2:], lambda x: TRY_CAST(split_part(x, ':', 2) AS FLOAT)) AS numbers
                FROM split
            )
            SELECT
                list_filter(labels, lambda x, i: list_position(labels, x) = i) AS labels,
                features,
                numbers,
                CASE WHEN NOT regexp_full_match(line, '{_LINE}')
                    OR len(list_filter(labels, lambda x: x IS NULL OR x >= {LABELS})) > 0
                    OR len(list_filter(features, lambda x: x IS NULL OR x >= {FEATURES})) > 0
                    OR len(list_filter(numbers, lambda x: x IS NULL OR NOT isfinite(x))) > 0
                THEN line[:80] END AS wrong
            FROM parsed""").combine_chunks()
    wrong = table["wrong"].is_valid().index(True).as_py()
    if wrong >= 0:
        raise DataError(
            f"{path}: line {wrong + 2}: expected `label,label feature:value …` of labels below {LABELS}, features "
            f"below {FEATURES} and finite values, found {table['wrong'][wrong].as_py()!r}"
        )
    used = pc.or_(*(pc.greater(pc.list_value_length(table[name]), 0) for name in ("labels", "features")))
    if len(table) < rows or pc.any(used[rows:]).as_py():  # blank lines at the end are no rows
        raise DataError(f"{path}: expected {rows} rows as its header says, found {len(table)}")
    table = table[:rows].combine_chunks()
    keys, numbers = (table[name].combine_chunks() for name in ("features", "numbers"))
    features = pa.MapArray.from_arrays(keys.offsets, keys.flatten(), numbers.flatten())
    return pa.table({"labels": table["labels"], "features": features})


def _read_row_numbers(path: Path, rows: int) -> Int64:
    """Read the row numbers of a split, from 0: the first column of a file that counts from 1."""
    if not path.is_file():
        raise DataError(f"{path}: expected a file of row numbers, found none")
    try:
        row_numbers: Int64 = np.loadtxt(path, dtype=np.int64, ndmin=2)[:, 0] - 1
    except ValueError as error:
        raise DataError(f"{path}: expected columns of row numbers: {error}") from error
    outside = row_numbers[(row_numbers < 0) | (row_numbers >= rows)]
    if len(outside):
        raise DataError(f"{path}: expected rows from 1 to {rows}, found {outside[0] + 1}")
    return row_numbers
