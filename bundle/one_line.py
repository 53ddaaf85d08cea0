"""Print objects in one line: arrays by type and shape, long texts and collections by their length."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

LONGEST = 200
"""Most characters of a line."""
_LONGEST_VALUE, _FEW = 60, 4


def one_line(value: Any) -> str:
    """Return an object and its set fields as one line, for `__repr__`."""
    parts = [f"{name}={_in_short(part)}" for name, part in _fields(value) if part is not None and not _is_empty(part)]
    return _cut(f"{type(value).__name__}({', '.join(parts)})", LONGEST)


def _fields(value: Any) -> list[tuple[str, Any]]:
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value) if field.repr]
    names = getattr(value, "_fields", ()) or (type(value).model_fields if isinstance(value, BaseModel) else ())
    return [(name, getattr(value, name)) for name in names]


def _is_empty(value: object) -> bool:
    return isinstance(value, Sized) and not isinstance(value, str) and len(value) == 0


def _in_short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return f"{value.type}[{len(value)}]"
    if isinstance(value, pa.Table):
        return f"Table[{value.num_rows}, {value.num_columns}]"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, Mapping | list | tuple | set | frozenset) and (len(value) > _FEW or hasattr(value, "_fields")):
        return f"{type(value).__name__}[{len(value)}]"
    if isinstance(value, BaseModel) or is_dataclass(value):
        return f"{type(value).__name__}(…)"
    return _cut(repr(value), _LONGEST_VALUE)


def _cut(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"
