"""Per-user list files: one line per query, `query label label …`, oldest first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.trainer.data.files import DataFile, find_files
from longtail.trainer.data.ids import in_use
from longtail.trainer.errors import DataError


def read_lists(file: DataFile | Path) -> pa.Table:
    """Return pairs of `query` and `label` from lines of words separated by blanks or tabs."""
    if isinstance(file, Path):
        (file,) = find_files(file, "lists")
    lines = _lines(file)
    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(lines))
    per_line = np.asarray(pc.list_value_length(words))
    flat = pc.list_flatten(words).dictionary_encode()
    starts = np.concatenate([[0], np.cumsum(per_line)])
    is_query = np.zeros(len(flat), bool)
    is_query[starts[:-1]] = True
    indices = flat.indices.to_numpy()
    query = np.repeat(indices[starts[:-1]], per_line - 1)

    def compact(values: np.ndarray) -> pa.DictionaryArray:
        return in_use(pa.DictionaryArray.from_arrays(pa.array(values), flat.dictionary))

    return pa.table({"query": compact(query), "label": compact(indices[~is_query])})


def _lines(file: DataFile) -> pa.Array:
    """Return all non-empty lines of a UTF-8 text file."""
    try:
        with file.filesystem.open_input_stream(file.path) as stream:
            content = stream.read()
    except OSError as error:
        raise DataError(f"{file.name}: expected a readable text file: {error}") from error
    text = content.replace(b"\r\n", b"\n").rstrip(b"\n")
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
    offsets = np.concatenate([[0], ends + 1, [len(text) + 1]]).astype(np.int64)
    raw = pa.Array.from_buffers(
        pa.large_string(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(text + b"\n")]
    )
    try:
        raw.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DataError(f"{file.name}: expected UTF-8 text: {error}") from error
    trimmed = pc.utf8_rtrim(raw, "\n").cast(pa.string())
    return trimmed.filter(pc.not_equal(pc.utf8_trim_whitespace(trimmed), ""))
