"""The extreme-classification repository's sparse format, read in blocks of bytes.

A first line `rows features labels`, then a line per row: `label,label feature:value feature:value`.
Each block is split by NumPy and its numbers are parsed by pyarrow's CSV reader, so nothing but a block is
ever text: memory is proportional to the non-zeros.

Legend: `R` rows, `E` non-zero features, `P` pairs of a row and a label.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from longtail.bundle.arrays import Array, Float32, Int32
from longtail.trainer.errors import DataError

_BLOCK_BYTES = 16 << 20
_NEWLINE, _BLANK, _COMMA = b"\n ,"
_LARGEST = float(np.finfo(np.float32).max)
_OFFSET_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class XmcRows:
    """Rows of the extreme-classification format.

    Attributes:
        pairs: `query`, `label` (dictionary-encoded strings): one row per distinct (row, label); rows are named
            `NAME-0`, `NAME-1`, …, labels by their number.
        queries: `query` and `features`, a map from feature number, int32, to its value, float32; a row without
            features has an empty one.
    """

    pairs: pa.Table
    queries: pa.Table


class _Sizes(NamedTuple):
    """The three numbers of the header line."""

    rows: int
    features: int
    labels: int


class _Block(NamedTuple):
    """Consecutive rows, parsed: R rows with E features and P labels in all.

    Attributes:
        features_per_row: int32 [R].
        features: feature numbers, row after row, int32 [E].
        values: values of those features, float32 [E].
        labels_per_row: int32 [R].
        labels: label numbers, row after row, int32 [P].
    """

    features_per_row: Int32
    features: Int32
    values: Float32
    labels_per_row: Int32
    labels: Int32


def read_xmc(path: Path, *, name: str | None = None) -> XmcRows:
    """Read a file of the extreme-classification format.

    A row may lack labels (its line starts with a blank) or features; a label that a row names twice counts
    once. Blank lines after the last row are ignored.

    Args:
        name: what rows are named after, `NAME-0`; None takes the file's stem.
    """
    if not path.is_file():
        raise DataError(f"{path}: expected a text file, found none")
    parts: list[list[Any]] = [[] for _ in _Block._fields]
    with path.open("rb") as file:
        sizes = _header(file.readline(), path)
        line = 2
        for text in _blocks(file):
            block = _parsed(text, sizes, line, path)
            for part, column in zip(parts, block, strict=True):
                part.append(column)
            line += len(block.labels_per_row)
    return _rows(_Block(*(_joined(part) for part in parts)), sizes, path, path.stem if name is None else name)


def _header(line: bytes, path: Path) -> _Sizes:
    words = line.split()
    if len(words) != 3 or not all(word.isdigit() for word in words):
        raise DataError(f"{path}: expected a first line `rows features labels`, found {_shown(line)}")
    return _Sizes(*map(int, words))


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Return the rest of a file in blocks of whole lines."""
    rest = b""
    while chunk := file.read(_BLOCK_BYTES):
        end = chunk.rfind(b"\n") + 1
        if end:
            yield rest + chunk[:end]
            rest = chunk[end:]
        else:
            rest += chunk
    if rest:
        yield rest + b"\n"


def _joined(parts: list[Array]) -> npt.NDArray[Any]:
    """Return one array; the parts are released."""
    joined = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    parts.clear()
    return joined


def _rows(block: _Block, sizes: _Sizes, path: Path, name: str) -> XmcRows:
    """Return tables of all rows, sharing the block's memory."""
    found = len(block.labels_per_row)
    used = (block.labels_per_row > 0) | (block.features_per_row > 0)
    if found < sizes.rows or used[sizes.rows :].any():
        raise DataError(f"{path}: expected {sizes.rows} rows as its header says, found {found}")
    if len(block.features) > _OFFSET_LIMIT:
        raise DataError(f"{path}: expected at most {_OFFSET_LIMIT} non-zero features, found {len(block.features)}")
    labels_per_row, features_per_row = block.labels_per_row[: sizes.rows], block.features_per_row[: sizes.rows]
    names = pc.binary_join_element_wise(name, pa.array(np.arange(sizes.rows)).cast(pa.string()), "-")
    parents = np.repeat(np.arange(sizes.rows, dtype=np.int32), labels_per_row)
    labels = pa.array(block.labels).dictionary_encode()
    offsets = np.concatenate([[0], np.cumsum(features_per_row, dtype=np.int64)]).astype(np.int32)
    return XmcRows(
        pairs=pa.table(
            {
                "query": pa.DictionaryArray.from_arrays(pa.array(parents), names),
                "label": pa.DictionaryArray.from_arrays(labels.indices, labels.dictionary.cast(pa.string())),
            }
        ),
        queries=pa.table(
            {
                "query": names,
                "features": pa.MapArray.from_arrays(
                    pa.array(offsets), pa.array(block.features), pa.array(block.values)
                ),
            }
        ),
    )


def _parsed(text: bytes, sizes: _Sizes, line: int, path: Path) -> _Block:
    """Return the numbers of whole lines, the first of which is `line`."""
    bytes_ = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(bytes_ <= _BLANK)
    lengths = np.diff(ends, prepend=-1) - 1
    last = bytes_[ends] == _NEWLINE
    first = np.concatenate([[True], last[:-1]])
    is_entry = (lengths > 0) & ~first
    entries_before = np.concatenate([[0], np.cumsum(is_entry)[last]])
    label_starts, label_lengths = (ends - lengths)[first], lengths[first]
    at = np.repeat(label_starts - np.cumsum(label_lengths + 1) + label_lengths + 1, label_lengths + 1)
    at += np.arange(len(at))
    label_text, entry_text = bytes_[at], bytes_.copy()
    label_text[label_text <= _BLANK] = _NEWLINE
    entry_text[at] = entry_text[ends] = _NEWLINE
    try:
        features, values = _numbers(entry_text, int(entries_before[-1]), [pa.int32(), pa.float32()])
        labels, labels_per_row = _labels(label_text)
    except pa.ArrowInvalid as error:
        raise _format_error(text, sizes, line, path) from error
    if not (_below(features, sizes.features) and _below(labels, sizes.labels) and np.isfinite(values).all()):
        raise _format_error(text, sizes, line, path)
    return _Block(np.diff(entries_before).astype(np.int32), features, values, labels_per_row, labels)


def _labels(text: npt.NDArray[np.uint8]) -> tuple[Int32, Int32]:
    """Get distinct labels of `label,label` lines in their order, int32 [P], and how many each line has, int32 [R]."""
    ends = np.flatnonzero((text == _COMMA) | (text == _NEWLINE))
    last = text[ends] == _NEWLINE
    rows = (np.cumsum(last) - last)[np.diff(ends, prepend=-1) > 1]
    separated = text.copy()
    separated[ends] = _NEWLINE
    (numbers,) = _numbers(separated, len(rows), [pa.int32()])
    distinct, first = np.unique((rows << 32) + numbers, return_index=True)
    if len(distinct) < len(numbers):
        kept = np.sort(first)
        rows, numbers = rows[kept], numbers[kept]
    return numbers, np.bincount(rows, minlength=int(last.sum())).astype(np.int32)


def _numbers(text: npt.NDArray[np.uint8], count: int, types: list[pa.DataType]) -> list[npt.NDArray[Any]]:
    """Return columns of `count` lines `number:number`; empty lines are none."""
    if count == 0:
        return [np.zeros(0, kind.to_pandas_dtype()) for kind in types]
    names = [str(at) for at in range(len(types))]
    table = pyarrow.csv.read_csv(
        pa.BufferReader(pa.py_buffer(text)),
        read_options=pyarrow.csv.ReadOptions(column_names=names, block_size=4 << 20),
        parse_options=pyarrow.csv.ParseOptions(delimiter=":", quote_char=False),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=dict(zip(names, types, strict=True)), null_values=[], strings_can_be_null=False
        ),
    )
    return [table[name].to_numpy() for name in names]


def _below(numbers: Int32, bound: int) -> bool:
    return len(numbers) == 0 or bool(numbers.min() >= 0 and numbers.max() < bound)


def _format_error(text: bytes, sizes: _Sizes, line: int, path: Path) -> DataError:
    """Return what is wrong with these lines: the first entry that cannot be read, found one by one."""
    lines = text.split(b"\n")
    for number, content in enumerate(lines, line):
        where = f"{path}: line {number}: expected"
        labels, *entries = re.split(rb"[\x00-\x20]", content)
        for label in filter(None, labels.split(b",")):
            if not label.isdigit():
                return DataError(f"{where} labels as numbers before the first blank, found {_shown(label)}")
            if int(label) >= sizes.labels:
                return DataError(f"{where} labels below {sizes.labels} as its header says, found {_shown(label)}")
        for entry in filter(None, entries):
            feature, _, value = entry.partition(b":")
            if not (feature.isdigit() and value):
                return DataError(f"{where} entries `feature:value`, found {_shown(entry)}")
            if int(feature) >= sizes.features:
                return DataError(f"{where} features below {sizes.features} as its header says, found {_shown(entry)}")
            try:
                finite = abs(float(value)) <= _LARGEST
            except ValueError:
                return DataError(f"{where} a number after every `feature:`, found {_shown(entry)}")
            if not finite:
                return DataError(f"{where} finite feature values, found {_shown(entry)}")
    return DataError(f"{path}: lines {line} to {line + len(lines) - 2}: expected plain decimal numbers, found others")


def _shown(word: bytes) -> str:
    return repr(word.strip()[:60].decode("utf-8", "backslashreplace"))
