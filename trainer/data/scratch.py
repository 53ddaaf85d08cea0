"""Where what reading makes of a log is put: in memory, or in files that are mapped, a bounded part of it at a time.

Legend: `N` rows.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from longtail.bundle.arrays import Array

_PAIR, _ROW = 256, 512
"""Bytes that a pair takes while it is sorted, and a row of a file while it is read, about."""
_ABOUT = b"longtail"
"""Key of a kept table's metadata under which its facts are."""


class Scratch:
    """A folder for what reading makes, and how much memory working on it may take.

    Files but those of `kept` have no name: each is gone with the last array of it, or with the process.

    Args:
        folder: is made by what is first written; None keeps all in memory.
        memory: bytes, about; without a folder there is no limit.
    """

    def __init__(self, folder: Path | None = None, memory: int = 0) -> None:
        self._folder = folder
        self.memory = sys.maxsize if folder is None else memory

    @property
    def bounded(self) -> bool:
        """Return whether there is a folder, and so a limit of memory."""
        return self._folder is not None

    @property
    def pairs(self) -> int:
        """That are worked on at a time."""
        return max(self.memory // _PAIR, 1)

    @property
    def rows(self) -> int:
        """Of a file that are read at a time, where it says which of its groups of rows are where."""
        return max(self.memory // _ROW, 1)

    def blocks(self, count: int) -> Iterator[slice]:
        """Return slices of at most `pairs`, in order, of this many."""
        for start in range(0, count, self.pairs):
            yield slice(start, min(start + self.pairs, count))

    def columns(self, types: Mapping[str, npt.DTypeLike], parts: Iterable[Mapping[str, Array]]) -> dict[str, Array]:
        """Return columns, each [N], of parts of them that come one after the other."""
        if self._folder is None:
            whole = list(parts)
            if len(whole) == 1:
                return dict(whole[0])
            return {name: np.concatenate([np.empty(0, kind), *(part[name] for part in whole)], dtype=kind)
                    for name, kind in types.items()}  # fmt: skip
        with ExitStack() as stack:
            files = {name: stack.enter_context(self._file()) for name in types}
            for part in parts:
                for name, kind in types.items():
                    np.ascontiguousarray(part[name], kind).tofile(files[name])
            return {name: _mapped(files[name], kind) for name, kind in types.items()}

    def column(self, kind: npt.DTypeLike, parts: Iterable[Array]) -> Array:
        """Return one column, [N], of its parts."""
        return self.columns({"": kind}, ({"": part} for part in parts))[""]

    def empty(self, count: int, kind: npt.DTypeLike) -> Array:
        """Return a column [count] to be filled."""
        if self._folder is None:
            return np.empty(count, kind)
        with self._file() as file:
            file.truncate(count * np.dtype(kind).itemsize)
            return _mapped(file, kind)

    def table(self, table: pa.Table) -> pa.Table:
        """Return the table, where it may stay."""
        if self._folder is None:
            return table
        with self._file() as file:
            return _written(table, file)

    def kept(self, name: str, make: Callable[[], tuple[pa.Table, dict[str, Any]]]) -> tuple[pa.Table, dict[str, Any]]:
        """Return a table and some facts about it: of an earlier attempt whose folder this is, or as they are made.

        Args:
            name: of the file; says of what the table is made.
            make: the table, whose metadata is lost, and facts as JSON has them.
        """
        if self._folder is None:
            return make()
        path = self._folder / f"{name}.arrow"
        with suppress(OSError, pa.ArrowInvalid, KeyError):  # what was not written to its end is made again
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
            return table, json.loads((table.schema.metadata or {})[_ABOUT])
        table, about = make()
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=f".{name}.", delete=False) as file:
            table = _written(table.replace_schema_metadata({_ABOUT: json.dumps(about)}), file)
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):  # of a job that has prepared the same, and removed the folder
            os.replace(file.name, path)
        return table, about

    def texts(self, parts: Iterable[pa.StringArray]) -> pa.StringArray:
        """Return one array of strings, [N], of its parts, which have no nulls."""
        if self._folder is None:
            return pa.concat_arrays([pa.array([], pa.string()), *parts])
        end = 0
        with self._file() as offsets, self._file() as text:
            np.zeros(1, np.int32).tofile(offsets)
            for part in filter(len, parts):
                _, offsets_of, text_of = part.buffers()
                at = np.frombuffer(offsets_of, np.int32)[part.offset : part.offset + len(part) + 1]
                if end + int(at[-1] - at[0]) > np.iinfo(np.int32).max:
                    raise pa.ArrowInvalid("offset overflow while putting arrays together: more than 2 GiB of text")
                (at[1:] + np.int32(end - at[0])).tofile(offsets)
                text.write(memoryview(text_of)[at[0] : at[-1]])
                end += int(at[-1] - at[0])
            columns = _mapped(offsets, np.int32), _mapped(text, np.uint8)
        return pa.StringArray.from_buffers(len(columns[0]) - 1, *map(pa.py_buffer, columns))

    def _file(self) -> IO[bytes]:
        folder = cast("Path", self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder)


IN_MEMORY = Scratch()


def _mapped(file: IO[bytes], kind: npt.DTypeLike) -> Array:
    """Return what was written to a file; changes to it go there, too."""
    file.flush()
    if not os.fstat(file.fileno()).st_size:
        return np.empty(0, kind)
    return np.memmap(file, kind, mode="r+").view(np.ndarray)


def _written(table: pa.Table, file: IO[bytes]) -> pa.Table:
    """Return the table as a file has it by now, mapped."""
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return pa.ipc.open_file(pa.py_buffer(_mapped(file, np.uint8))).read_all()
