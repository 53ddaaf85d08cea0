"""Reading interactions and feature tables, column by column.

Whatever the file format, interactions come out as a table of `query`, `label` (dictionary-encoded
strings), and where the recipe names them `time`, `weight`, `shown` and the columns of contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from longtail.trainer.data.xmc import read_xmc
from longtail.trainer.errors import DataError

if TYPE_CHECKING:
    from longtail.trainer.config import DataConfig

CONTEXT = "context:"
"""Before the name of a column that a query feature is read from."""
_ENDINGS = {".parquet": "parquet", ".csv": "csv", ".tsv": "tsv"}


def file_format(path: Path, data: DataConfig) -> str:
    """The format of an interactions file: what the recipe says, or what the ending says.

    Raises:
        DataError: `auto`, and an ending that says nothing.
    """
    if data.format != "auto":
        return data.format
    try:
        return _ENDINGS[path.suffix]
    except KeyError:
        endings = ", ".join(_ENDINGS)
        raise DataError(
            f"{path}: expected an ending among {endings}, or data.format in the recipe, received {path.suffix!r}"
        ) from None


def read_interactions(
    path: Path, data: DataConfig, *, context: Sequence[str] = (), strings: Sequence[str] = (), impressions: bool = True
) -> pa.Table:
    """Interactions of one file: `query`, `label`, and what else the recipe names.

    The schema's metadata has a key `timestamps` if the times are timestamps, in microseconds then.

    Args:
        path: the file.
        data: names the columns.
        context: columns that query features are read from.
        strings: those that text formats must not read as numbers or dates.
        impressions: whether to read those, if the recipe names a column.

    Raises:
        DataError: missing, empty or garbled file, unknown column, null id, ids that are not strings or
            integers, impressions that are no lists of these, or a weight that is not a finite number ≥ 0.
    """
    kind = file_format(path, data)
    if kind == "lists":
        pairs = read_lists(path)
    elif kind == "xmc":
        pairs = read_xmc(path).pairs
    else:
        raw = read_table(path, kind, strings=[data.query_id, data.label_id, *(set(context) & set(strings))])
        if raw.num_rows == 0:
            raise no_interactions(path)
        columns = {"query": ids_of(raw, data.query_id, path), "label": ids_of(raw, data.label_id, path)}
        if data.timestamp:
            columns["time"] = times_of(raw, data.timestamp, path)
        if data.weight:
            columns["weight"] = _weights_of(raw, data.weight, path)
        if data.impressions and impressions:
            columns["shown"] = _lists_of(raw, data.impressions, path)
        columns |= {CONTEXT + name: column_of(raw, name, path) for name in context}
        timestamps = data.timestamp is not None and pa.types.is_temporal(raw.schema.field(data.timestamp).type)
        pairs = pa.table(columns).replace_schema_metadata({"timestamps": "µs"} if timestamps else None)
    if pairs.num_rows == 0:
        raise no_interactions(path)
    return pairs


def no_interactions(path: Path) -> DataError:
    """The error of a file without any."""
    return DataError(f"{path}: expected at least one interaction, found none")


def read_table(path: Path, kind: str | None = None, *, strings: list[str]) -> pa.Table:
    """A Parquet, CSV or TSV file; in text formats the columns named in `strings` are read as strings.

    Raises:
        DataError: missing, empty or garbled.
    """
    kind = kind or _ENDINGS.get(path.suffix, "")
    if not path.is_file():
        raise DataError(f"{path}: expected a {kind or 'Parquet, CSV or TSV'} file, found none")
    try:
        if kind == "parquet":
            return pq.read_table(path)
        if kind in ("csv", "tsv"):
            return pyarrow.csv.read_csv(
                path,
                parse_options=pyarrow.csv.ParseOptions(delimiter="," if kind == "csv" else "\t"),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=dict.fromkeys(strings, pa.string()), null_values=[""], strings_can_be_null=True
                ),
            )
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected a readable {kind} file: {error}") from error
    raise DataError(f"{path}: expected an ending among {', '.join(_ENDINGS)}, received {path.suffix!r}")


def column_of(table: pa.Table, name: str, path: Path) -> pa.ChunkedArray:
    """A column by name; raises DataError naming the columns there are."""
    if table.column_names.count(name) > 1:
        raise DataError(f"{path}: expected one column {name!r}, found {table.column_names.count(name)}")
    if name not in table.column_names:
        raise DataError(f"{path}: expected a column {name!r}, found {', '.join(table.column_names)}")
    return table[name]


def ids_of(table: pa.Table, name: str, path: Path) -> pa.DictionaryArray:
    """A column of ids, as dictionary-encoded strings.

    Raises:
        DataError: no such column, a null or empty id, or a type that is neither string nor integer.
    """
    column = column_of(table, name, path)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
        raise DataError(f"{path}: column {name!r}: expected ids as strings or integers, found {column.type}")
    if column.null_count:
        row = pc.index(pc.is_null(column), True).as_py()
        raise DataError(f"{path}: column {name!r}: expected an id in every row, found null in row {row}")
    encoded = column.combine_chunks()
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    empty = pc.index(encoded.dictionary.cast(pa.string()), "").as_py()
    if empty >= 0 and (row := pc.index(encoded.indices, empty).as_py()) >= 0:
        raise DataError(f"{path}: column {name!r}: expected an id in every row, found an empty one in row {row}")
    return pa.DictionaryArray.from_arrays(encoded.indices.cast(pa.int32()), encoded.dictionary.cast(pa.string()))


def stored_id_type(path: Path, name: str, kind: str) -> str | None:
    """Whether a readable Parquet file holds a column of ids as `integers` or `strings`; None for text formats."""
    if kind != "parquet":
        return None
    column = pq.read_schema(path).field(name).type
    value = column.value_type if pa.types.is_dictionary(column) else column
    return "integers" if pa.types.is_integer(value) else "strings"


def read_lists(path: Path) -> pa.Table:
    """Per-user list files: one line per query, `query label label …` separated by blanks or tabs.

    Raises:
        DataError: missing or not text.
    """
    lines = _lines(path)
    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(lines))
    per_line = np.asarray(pc.list_value_length(words))
    flat = pc.list_flatten(words).dictionary_encode()
    starts = np.concatenate([[0], np.cumsum(per_line)])
    is_query = np.zeros(len(flat), bool)
    is_query[starts[:-1]] = True
    indices = flat.indices.to_numpy()
    query = np.repeat(indices[starts[:-1]], per_line - 1)
    return pa.table({"query": _compact(query, flat.dictionary), "label": _compact(indices[~is_query], flat.dictionary)})


def _lines(path: Path) -> pa.Array:
    """All non-empty lines of a UTF-8 text file."""
    if not path.is_file():
        raise DataError(f"{path}: expected a text file, found none")
    text = path.read_bytes().replace(b"\r\n", b"\n").rstrip(b"\n")
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
    offsets = np.concatenate([[0], ends + 1, [len(text) + 1]]).astype(np.int64)
    raw = pa.Array.from_buffers(
        pa.large_string(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(text + b"\n")]
    )
    try:
        raw.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: expected UTF-8 text: {error}") from error
    trimmed = pc.utf8_rtrim(raw, "\n").cast(pa.string())
    return trimmed.filter(pc.not_equal(pc.utf8_trim_whitespace(trimmed), ""))


def _compact(indices: np.ndarray, dictionary: pa.Array) -> pa.DictionaryArray:
    """A dictionary array whose dictionary holds only what occurs, in order of first occurrence."""
    values, first, inverse = np.unique(indices, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return pa.DictionaryArray.from_arrays(pa.array(rank[inverse], pa.int32()), dictionary.take(pa.array(values[order])))


def times_of(table: pa.Table, name: str, path: Path) -> pa.Array:
    """A column of times as float64: numbers as they are, timestamps in microseconds.

    Raises:
        DataError: no such column, another type, or a value that is missing or not finite.
    """
    column = column_of(table, name, path)
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise DataError(f"{path}: column {name!r}: expected numbers or timestamps, found {column.type}")
    times = column.cast(pa.float64()).combine_chunks()
    _require_finite(times, name, path)
    return times


def _lists_of(table: pa.Table, name: str, path: Path) -> pa.ChunkedArray:
    column = column_of(table, name, path)
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not (
        pa.types.is_string(kind.value_type) or pa.types.is_integer(kind.value_type)
    ):
        raise DataError(f"{path}: column {name!r}: expected lists of ids, strings or integers, found {kind}")
    return column.cast(pa.list_(pa.string()))


def _weights_of(table: pa.Table, name: str, path: Path) -> pa.Array:
    column = column_of(table, name, path)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise DataError(f"{path}: column {name!r}: expected numbers, found {column.type}")
    weights = column.cast(pa.float32()).combine_chunks()
    _require_finite(weights, name, path)
    if len(weights) and pc.max(weights).as_py() == 0:
        raise DataError(f"{path}: column {name!r}: expected some weight > 0, found only zeros")
    if len(weights) and pc.min(weights).as_py() < 0:
        row = int(np.asarray(weights).argmin())
        raise DataError(f"{path}: column {name!r}: expected weights >= 0, found {weights[row].as_py()} in row {row}")
    return weights


def _require_finite(column: pa.Array, name: str, path: Path) -> None:
    finite = np.isfinite(column.to_numpy(zero_copy_only=False))
    if not finite.all():
        row = int(finite.argmin())
        raise DataError(f"{path}: column {name!r}: expected finite numbers, found {column[row].as_py()} in row {row}")
