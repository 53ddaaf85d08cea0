"""The label table as answers need it: ids to rows on the way in, rows to ids and display columns on the way out.

Legend: `L` labels, `N` answered labels of a whole batch.

Ids are held as Python strings with a dictionary (about 150 bytes a label); display columns stay in
Arrow and are taken columnar, so a million titles cost no objects until they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import JsonValue

from bundle import BUCKET_NAMES, Labels
from serving.errors import UnknownLabelError, UnservableReleaseError
from serving.wording import received

Rows = npt.NDArray[np.int64]
_CHUNK = 1 << 16


class Catalogue:
    """Labels of one release.

    Raises:
        UnservableReleaseError: a display column that JSON cannot hold.
    """

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._display = {name: _json_ready(name, labels.display[name]) for name in labels.display.column_names}
        self._ids: list[str] = []
        self._row_of: dict[str, int] = {}
        # In chunks, so that a release loading beside a live one never holds the interpreter for long.
        for start in range(0, len(labels.ids), _CHUNK):
            ids = labels.ids[start : start + _CHUNK].to_pylist()
            self._ids += ids
            self._row_of.update(zip(ids, range(start, start + len(ids)), strict=True))

    def row(self, id_: str | int, *, field: str | None = None) -> int:
        """The row of a label; raises UnknownLabelError."""
        row = self._row_of.get(str(id_))
        if row is None:
            raise UnknownLabelError(
                f"expected the id of a label of this release, received {received(id_)}", field=field
            )
        return row

    def rows(self, ids: Sequence[str | int]) -> tuple[Rows, int]:
        """The distinct rows of the ids that this release has, int64, ascending; and how many ids it has not."""
        if not ids:
            return np.empty(0, np.int64), 0
        row_of = self._row_of
        rows = [row_of.get(id_ if isinstance(id_, str) else str(id_), -1) for id_ in ids]
        known = np.unique(np.array([row for row in rows if row >= 0], np.int64))
        return known, rows.count(-1)

    def bucket_counts(self, rows_N: Rows) -> list[int]:
        """How many of the rows are head, torso and tail."""
        counts: list[int] = np.bincount(self._labels.buckets[rows_N], minlength=len(BUCKET_NAMES)).tolist()
        return counts

    def ranked(self, rows_N: Rows, scores_N: npt.NDArray[np.float32]) -> list[dict[str, Any]]:
        """`schemas.RankedLabel` of every row, in order."""
        ids = self._ids
        return [
            {"id": ids[row], "score": score, "bucket": BUCKET_NAMES[bucket], "display": display}
            for row, score, bucket, display in zip(
                rows_N.tolist(),
                scores_N,
                self._labels.buckets[rows_N].tolist(),
                self._display_of(rows_N),
                strict=True,
            )
        ]

    def described(self, row: int) -> dict[str, Any]:
        """`schemas.LabelAnswer` of one row."""
        labels = self._labels
        return {
            "id": self._ids[row],
            "count": int(labels.counts[row]),
            "log_pn": labels.log_pn[row],
            "bucket": BUCKET_NAMES[labels.buckets[row]],
            "bias": None if labels.bias is None else labels.bias[row],
            "display": self._display_of(np.array([row]))[0],
        }

    def _display_of(self, rows_N: Rows) -> list[dict[str, JsonValue]]:
        taken = pa.array(rows_N)
        names = list(self._display)
        columns = [column.take(taken).to_pylist() for column in self._display.values()]
        if not columns:
            return [{} for _ in rows_N]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _json_ready(name: str, column: pa.ChunkedArray) -> pa.Array:
    """One contiguous array of a type that JSON has; dates, decimals and the like become strings."""
    column = column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _is_json(column.type):
        return column
    try:
        return column.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UnservableReleaseError(
            f"labels.parquet column {name!r}: expected text, numbers, booleans, dates or lists of them to display, "
            f"found {column.type}"
        ) from error


def _is_json(type_: pa.DataType) -> bool:
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return _is_json(type_.value_type)
    if pa.types.is_struct(type_):
        return all(_is_json(field.type) for field in type_)
    return any(
        test(type_)
        for test in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_integer,
            pa.types.is_floating,
            pa.types.is_boolean,
            pa.types.is_null,
        )
    )
