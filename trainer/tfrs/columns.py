"""Convert raw columns to Keras inputs and to values of requests.

Legend: `B` queries or labels, `P` list length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf
from pydantic import JsonValue

from longtail.bundle.arrays import Array, Float32
from longtail.trainer.errors import ExportError

Ids = Sequence[str] | Sequence[int] | Array
"""Raw ids: [B] strings or integers."""

_BATCH = 1024


@dataclass(frozen=True)
class RawColumns:
    """Hold the inputs of a Keras model: tensors by name, [B], [B, 1] or [B, P], or a `single` one, not a dict."""

    tensors: Mapping[str, tf.Tensor]
    single: bool = False

    @classmethod
    def read(cls, columns: Any, name: str, title: str) -> RawColumns:
        """Read a mapping of columns, or one column with the name `name`; errors begin with `title`."""
        single = not isinstance(columns, Mapping)
        tensors = {}
        for column, values in ({name: columns} if single else columns).items():
            try:
                tensors[str(column)] = tf.convert_to_tensor(values)
            except (TypeError, ValueError) as error:
                raise ExportError(f"{title}: expected a rectangular array for {column!r}, found: {error}") from error
        lengths = {column: int(tensor.shape[0]) if tensor.shape.rank else None for column, tensor in tensors.items()}
        if len(set(lengths.values())) != 1 or None in lengths.values() or 0 in lengths.values():
            raise ExportError(f"{title}: expected columns of one length >= 1, received {lengths}")
        return cls(tensors, single)

    def __len__(self) -> int:
        return int(next(iter(self.tensors.values())).shape[0])

    def argument(self, tensors: Mapping[str, tf.Tensor]) -> Any:
        """Build the model's argument from tensors by name, [B] or [B, P]."""
        return next(iter(tensors.values())) if self.single else dict(tensors)

    def take(self, rows: Any) -> RawColumns:
        """Get some rows, int [n]."""
        return RawColumns({name: tf.gather(column, rows) for name, column in self.tensors.items()}, self.single)

    def embed(self, model: Callable[[Any], Any], title: str) -> Float32:
        """Compute the model's embeddings, float32 [B, D]; refuses a model that does not take these columns."""
        blocks = []
        for start in range(0, len(self), _BATCH):
            block = {name: column[start : start + _BATCH] for name, column in self.tensors.items()}
            try:
                blocks.append(np.asarray(model(self.argument(block)), np.float32))
            except Exception as error:  # Keras raises errors of any type about its inputs.
                inputs = "one tensor" if self.single else f"tensors by name: {', '.join(block)}"
                raise ExportError(f"{title}: expected a model that takes {inputs}; found: {error}") from error
        embeddings_BD = np.concatenate(blocks)
        if not np.isfinite(embeddings_BD).all():
            row = int(np.argwhere(~np.isfinite(embeddings_BD))[0][0])
            values = {name: column[row].numpy().tolist() for name, column in self.tensors.items()}
            raise ExportError(f"{title}: expected finite embeddings, found others for {values}")
        return embeddings_BD

    def rows(self) -> list[tuple[Any, ...]]:
        """Get every row's values, strings as bytes, lists as tuples."""
        columns = (column.numpy().tolist() for column in self.tensors.values())
        return [tuple(tuple(value) if isinstance(value, list) else value for value in row) for row in zip(*columns)]  # noqa: B905 (of one length)

    def holds(self, name: str, ids: pa.Array) -> bool:
        """Check whether a column's values are the first ids, of string [L]."""
        column = self.tensors.get(name)
        if column is None or column.dtype.is_floating or column.shape[1:].num_elements() != 1:
            return False
        return bool(strings(column.numpy().reshape(-1)).equals(ids[: len(self)]))


def strings(ids: Any) -> pa.Array:
    """Convert ids to what the bundle writes: UTF-8 text, integers in decimal."""
    return pa.array(map(_text, np.asarray(ids).tolist()), pa.string())


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def values(column: tf.Tensor, kind: str, padding: str | None = None) -> list[JsonValue]:
    """Convert a raw column to values of requests.

    Args:
        padding: what fills the lists of a history, and is left out.
    """
    rows = column.numpy()
    if kind in ("number", "vector"):
        return list(rows.astype(np.float64).reshape((-1, *rows.shape[1:]) if kind == "vector" else -1).tolist())
    if kind == "history":
        return [[id_ for id_ in map(_text, row) if id_ != padding] for row in rows.tolist()]
    return [_text(value) for value in rows.reshape(-1).tolist()]
