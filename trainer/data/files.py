"""Files behind the places of a recipe, in a fixed order, and the columns that are read from one of them."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.csv
import pyarrow.fs
import pyarrow.parquet

from longtail.trainer.config.rows import Places, shown
from longtail.trainer.errors import DataError

_ENDINGS = {".parquet": "parquet", ".csv": "csv", ".tsv": "tsv"}
_BY_ENDING = ("auto", "table")
_PACKED = (".gz", ".bz2", ".zst")
_OBJECT_STORES = ["s3", "s3a", "gs", "az", "abfs"]
_CASTABLE = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_timestamp, pa.types.is_date)
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class DataFile:
    """One file of a data set.

    Attributes:
        partition: values of the columns that its folders name, such as `day=2026-01-31`.
        groups: those of a Parquet file's groups of rows that are meant; None for all of a file.
        first: number of the first row that is meant.
    """

    name: str
    path: str
    filesystem: pa.fs.FileSystem
    kind: str
    partition: dict[str, Any] = field(default_factory=dict)
    groups: range | None = None
    first: int = 0

    def wrong(self, column: str, expected: str, found: object) -> DataError:
        """Return an error about one of its columns."""
        return DataError(f"{self.name}: column {column!r}: expected {expected}, found {found}")


def find_files(places: Places, file_format: str = "auto") -> list[DataFile]:
    """Return every file of some places: entry by entry in their order, within an entry by name.

    Below a directory, names that begin with `_` or `.` are not read, nor, where endings say the format, are files of
    other endings.

    Args:
        file_format: `auto`, and `table` of a feature table, go by every file's ending.
    """
    found: list[DataFile] = []
    for place in places if isinstance(places, list) else [places]:
        files = _local(place, file_format) if isinstance(place, Path) else _remote(place, file_format)
        if not files:
            kind = file_format if file_format not in _BY_ENDING else _ending(str(place)) or "Parquet, CSV or TSV"
            what = "text" if kind in ("lists", "xmc") else kind
            below = " below this directory" if isinstance(place, Path) and place.is_dir() else ""
            raise DataError(f"{place}: expected a {what} file, found none{below}")
        found += files
    names = [file.name for file in found]
    if twice := next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None:
        raise DataError(f"{shown(places)}: expected every file once, found {twice} {names.count(twice)} times")
    return _partitioned(found)


def pieces_of(file: DataFile, rows: int, measured: Iterable[str] = ()) -> list[DataFile]:
    """Return a Parquet file as pieces of at most so many rows, or of one group of rows; any other file whole.

    Args:
        measured: columns of numbers or times. A file that has one as text, of which all rows together tell what it
            is, stays whole.
    """
    if file.kind != "parquet":
        return [file]
    with _readable(file), pa.parquet.ParquetFile(file.path, filesystem=file.filesystem) as parquet:
        sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
        types = {field.name: field.type for field in parquet.schema_arrow}
    if any(name in types and not pa.types.is_primitive(types[name]) for name in measured):
        return [file]
    pieces, first, start, size = [], 0, 0, 0
    for group, of_group in enumerate(sizes):
        if group > start and size + of_group > rows:
            pieces.append(replace(file, groups=range(start, group), first=first))
            first, start, size = first + size, group, 0
        size += of_group
    return [*pieces, replace(file, groups=range(start, len(sizes)), first=first)] if pieces else [file]


@contextmanager
def _readable(file: DataFile) -> Iterator[None]:
    """Say of which file an error of reading is."""
    try:
        yield
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file.name}: expected a readable {file.kind} file: {error}") from error


def kind_of(name: str, file_format: str) -> str:
    """Return the format of a file: what the recipe says, or what its ending says."""
    if file_format not in _BY_ENDING:
        return file_format
    if kind := _ending(name):
        return kind
    hint = ", or data.format in the recipe" if file_format == "auto" else ""
    raise DataError(
        f"{name}: expected an ending among {', '.join(_ENDINGS)}{hint}, received {PurePosixPath(name).suffix!r}"
    )


def read_columns(file: DataFile, wanted: Sequence[str] | None, *, strings: Iterable[str]) -> pa.Table:
    """Return some columns of a columnar file.

    Args:
        wanted: names; None, or any that the file lacks, reads all of them.
        strings: columns that text formats must not read as numbers or dates.
    """
    with _readable(file):
        names = _stored_names(file)
        own = [name for name in file.partition if name not in names]
        once = [name for name in names if names.count(name) == 1]
        needed = None
        if wanted is not None and set(wanted) <= {*once, *own}:
            needed = [name for name in dict.fromkeys(wanted) if name in once]
        elif len(once) < len(names):
            _refuse_double(file, names if wanted is None else wanted, names)
            needed = once
        table = _read(file, needed, strings)
    for name in own:
        value = file.partition[name]
        table = table.append_column(name, pa.array([value] * table.num_rows, pa.scalar(value).type))
    for at, column in enumerate(table.schema):
        if pa.types.is_string_view(column.type):
            table = table.set_column(at, column.name, table[at].cast(pa.string()))
        elif pa.types.is_binary(column.type) and file.kind != "parquet":
            raise file.wrong(column.name, "UTF-8 text", "other bytes")
    return table


def names_in(file: DataFile) -> list[str]:
    """Return the columns of a columnar file, those that its folders name among them."""
    with _readable(file):
        return list(dict.fromkeys([*_stored_names(file), *file.partition]))


def joined(tables: Sequence[pa.Table], where: str) -> pa.Table:
    """Return tables as one; integers, booleans and times, or lists of them, are text where another table has text."""

    def of(kind: pa.DataType) -> tuple[bool, pa.DataType]:
        return (True, kind.value_type) if pa.types.is_list(kind) or pa.types.is_large_list(kind) else (False, kind)

    every = {(column.name, *of(column.type)) for table in tables for column in table.schema}
    texts = {
        (name, listed) for name, listed, kind in every if pa.types.is_string(kind) or pa.types.is_large_string(kind)
    }
    alike = []
    for table in tables:
        for at, column in enumerate(table.schema):
            listed, kind = of(column.type)
            if any(is_kind(kind) for is_kind in _CASTABLE) and (column.name, listed) in texts:
                wanted = pa.list_(pa.string()) if listed else pa.string()
                table = table.set_column(at, column.name, table[at].cast(wanted))
        alike.append(table)
    try:
        return pa.concat_tables(alike, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"{where}: expected files whose columns are of one type each: {error}") from error


def decoded(table: pa.Table) -> pa.Table:
    """Return a table with the values of its dictionary-encoded columns, such as categories of pandas."""
    for at, column in enumerate(table.schema):
        if pa.types.is_dictionary(column.type):
            table = table.set_column(at, column.name, table[at].cast(column.type.value_type))
    return table


def _read(file: DataFile, columns: list[str] | None, strings: Iterable[str]) -> pa.Table:
    """Return some columns of a file; None reads all."""
    if file.groups is not None:
        with pa.parquet.ParquetFile(file.path, filesystem=file.filesystem) as parquet:
            return parquet.read_row_groups(list(file.groups), columns=columns)
    if file.kind == "parquet":
        return pa.parquet.read_table(file.path, columns=columns, filesystem=file.filesystem, partitioning=None)
    with file.filesystem.open_input_stream(file.path) as stream:
        return pa.csv.read_csv(
            stream,
            parse_options=_delimited(file),
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(strings, pa.string()), null_values=[""], strings_can_be_null=True,
                include_columns=columns,
            ),
        )  # fmt: skip


def _stored_names(file: DataFile) -> list[str]:
    """Return the columns of a file as its schema or its header names them."""
    if file.kind == "parquet":
        stored: list[str] = pa.parquet.read_schema(file.path, filesystem=file.filesystem).names
        return stored
    with file.filesystem.open_input_stream(file.path) as stream:
        reader = pa.csv.open_csv(stream, parse_options=_delimited(file))
        names: list[str] = reader.schema.names
        reader.close()
    return names


def _delimited(file: DataFile) -> pa.csv.ParseOptions:
    return pa.csv.ParseOptions(delimiter="," if file.kind == "csv" else "\t")


def _refuse_double(file: DataFile, wanted: Sequence[str], names: list[str]) -> None:
    """Raise DataError for a wanted column that a file has twice."""
    for name in wanted:
        if names.count(name) > 1:
            raise DataError(f"{file.name}: expected one column {name!r}, found {names.count(name)}")


def _ending(name: str) -> str | None:
    path = PurePosixPath(name)
    return _ENDINGS.get((path.with_suffix("") if path.suffix in _PACKED else path).suffix.lower())


def _local(place: Path, file_format: str) -> list[DataFile]:
    """Return files of a path or a glob of this machine."""
    paths = [place] if place.exists() else [Path(name) for name in sorted(glob.glob(str(place), recursive=True))]
    files = []
    for path in paths:
        below = [str(each) for each in path.rglob("*") if each.is_file()] if path.is_dir() else []
        names = _listed(below, str(path), file_format) if path.is_dir() else [str(path)]
        files += [DataFile(name, name, pa.fs.LocalFileSystem(), kind_of(name, file_format)) for name in names]
    return files


def _remote(url: str, file_format: str) -> list[DataFile]:
    """Find the files of a URL, by fsspec; those at object stores by obstore."""
    try:
        import fsspec
        import obstore.fsspec

        from longtail.bundle.objects import options_of
    except ImportError as error:
        raise DataError(f"{url}: expected the extra `remote`, pip install 'longtail[remote]': {error}") from error
    try:
        obstore.fsspec.register(_OBJECT_STORES)
        options = options_of(url) if url.startswith(tuple(f"{name}://" for name in _OBJECT_STORES)) else {}
        system, path = fsspec.core.url_to_fs(url, **options)
        tops = sorted(system.glob(path)) if re.search(r"[*?\[]", path) else [path]
        paths = []
        for top in tops:
            if system.isdir(top):
                paths += _listed(system.find(top), top, file_format)
            elif system.isfile(top):
                paths.append(top)
        names = [system.unstrip_protocol(each) for each in paths]
    except (ImportError, OSError, ValueError) as error:
        raise DataError(f"{url}: expected files of a file system that answers: {error}") from error
    filesystem = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(system))
    return [
        DataFile(name, each, filesystem, kind_of(name, file_format)) for name, each in zip(names, paths, strict=True)
    ]


def _listed(paths: Iterable[str], top: str, file_format: str) -> list[str]:
    """Return files below a directory that are data, by name."""

    def is_data(path: str) -> bool:
        parts = PurePosixPath(path[len(top) :].lstrip("/")).parts
        hidden = any(part.startswith(("_", ".")) for part in parts)
        return not hidden and (file_format not in _BY_ENDING or _ending(path) is not None)

    return sorted(filter(is_data, paths))


def _partitioned(files: list[DataFile]) -> list[DataFile]:
    """Return files with the columns that their folders name: integers where all values are, else strings."""
    texts = [
        {key: unquote(value) for key, value in re.findall(r"(?<=/)([^/=]+)=([^/]*)(?=/)", f"/{file.path}")}
        for file in files
    ]
    values: dict[str, list[str]] = {}
    for text in texts:
        for key, value in text.items():
            values.setdefault(key, []).append(value)
    whole = {
        key: all(re.fullmatch(r"-?\d{1,18}", value) for value in found if value != _NO_PARTITION)
        for key, found in values.items()
    }

    def typed(key: str, value: str) -> Any:
        if value == _NO_PARTITION:
            return None
        return int(value) if whole[key] else value

    return [
        replace(file, partition={key: typed(key, value) for key, value in text.items()})
        for file, text in zip(files, texts, strict=True)
    ]
