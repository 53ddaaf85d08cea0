"""An ONNX file without its embedding tables, which refer to the file instead: ONNX Runtime then maps them.

Read as a file, a model is parsed into memory and its tables are copied: for a history over a million labels of 64
dimensions, 256 MB in every process. As external data of the same file, tables stay in the page cache, which processes
share. Written with the wire format of protocol buffers alone, so that serving needs no package `onnx`.

Field numbers are those of onnx.proto: <https://github.com/onnx/onnx/blob/main/onnx/onnx.proto>.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_GRAPH = 7
"""ModelProto.graph."""
_NODE, _INITIALIZER = 1, 5
"""GraphProto.node, .initializer."""
_INPUT, _OP_TYPE = 1, 4
"""NodeProto.input, .op_type."""
_NAME, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 8, 9, 13, 14
"""TensorProto."""
_KEY, _VALUE = 1, 2
"""StringStringEntryProto."""
_EXTERNAL = 1
"""TensorProto.DataLocation."""
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}
_LEAST_BYTES = 1 << 20
"""Smaller tables are copied: a mapping has its price, too."""


class _Field(NamedTuple):
    """A field of a message: its number, where it starts, and where its value starts and ends."""

    number: int
    start: int
    value: int
    end: int


def without_tables(path: Path, least: int = _LEAST_BYTES) -> bytes | None:
    """The model whose embedding tables are external data of `path`, by its name without directories.

    Tables are initializers that only `Gather` reads, row by row: those need not be aligned in memory.

    Args:
        path: an ONNX file.
        least: bytes of a table that is left out, at least.

    Returns:
        None where nothing is left out, or the file is no model.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            return _Model(mapped, path.name).without_tables(least)
    except (IndexError, ValueError):
        return None


class _Model:
    def __init__(self, content: mmap.mmap, name: str) -> None:
        self._content = content
        self._name = name.encode()
        self._left_out = False

    def without_tables(self, least: int) -> bytes | None:
        written = bytearray()
        for field in self._fields(0, len(self._content)):
            written += self._graph(field, least) if field.number == _GRAPH else self._content[field.start : field.end]
        return bytes(written) if self._left_out else None

    def _graph(self, graph: _Field, least: int) -> bytes:
        fields = list(self._fields(graph.value, graph.end))
        gathered, others = set[bytes](), set[bytes]()
        for field in fields:
            if field.number == _NODE:
                parts = list(self._fields(field.value, field.end))
                inputs = [self._content[part.value : part.end] for part in parts if part.number == _INPUT]
                types = [self._content[part.value : part.end] for part in parts if part.number == _OP_TYPE]
                if types == [b"Gather"]:
                    gathered.update(inputs[:1])
                    others.update(inputs[1:])
                else:
                    others.update(inputs)
        written = bytearray()
        for field in fields:
            if field.number == _INITIALIZER and field.end - field.value >= least:
                written += self._tensor(field, least, gathered - others)
            else:
                written += self._content[field.start : field.end]
        return _message(_GRAPH, bytes(written))

    def _tensor(self, tensor: _Field, least: int, tables: set[bytes]) -> bytes:
        fields = list(self._fields(tensor.value, tensor.end))
        name = b"".join(self._content[field.value : field.end] for field in fields if field.number == _NAME)
        written = bytearray()
        for field in fields:
            size = field.end - field.value
            if field.number == _RAW_DATA and size >= least and name in tables:
                self._left_out = True
                where = {b"location": self._name, b"offset": b"%d" % field.value, b"length": b"%d" % size}
                for key, value in where.items():
                    written += _message(_EXTERNAL_DATA, _message(_KEY, key) + _message(_VALUE, value))
                written += _varint(_DATA_LOCATION << 3 | _VARINT) + _varint(_EXTERNAL)
            else:
                written += self._content[field.start : field.end]
        return _message(_INITIALIZER, bytes(written))

    def _fields(self, start: int, end: int) -> Iterator[_Field]:
        """The fields of a message; raises IndexError or ValueError if it is none."""
        while start < end:
            tag, value = self._read_varint(start)
            kind = tag & 7
            if kind == _BYTES:
                size, value = self._read_varint(value)
                after = value + size
            elif kind == _VARINT:
                after = self._read_varint(value)[1]
            elif kind in _FIXED:
                after = value + _FIXED[kind]
            else:
                raise ValueError(f"expected a wire type of protocol buffers, found {kind}")
            if after > end:
                raise ValueError(f"expected a field that ends by byte {end}, found one that ends at {after}")
            yield _Field(tag >> 3, start, value, after)
            start = after

    def _read_varint(self, at: int) -> tuple[int, int]:
        number = shift = 0
        while shift < 64:
            byte = self._content[at]
            number |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return number, at
        raise ValueError("expected a number of at most 64 bits")


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
