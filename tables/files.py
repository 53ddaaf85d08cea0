"""Find the files of a source in a fixed order: of paths, globs, folders, URLs and queries."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from longtail.bundle.validation import did_you_mean
from longtail.extras import pip_install
from longtail.tables.errors import DataError

_ENDINGS = {".parquet": "parquet", ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
PACKED = (".gz", ".bz2", ".zst")
_OBJECT_STORES = ("s3", "s3a", "gs", "az", "abfs")
_ICEBERG = "*.metadata.json"
"""Files in `metadata` of an Iceberg table."""
_HIDDEN = ("_", ".")
"""First characters of file names to skip: leftovers of writers and editors."""
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_LONGEST = 60
"""Most characters of a query in messages."""
_QUERY = re.compile(r"(\s|--[^\n]*\n|/\*.*?\*/)*(select|with|from)\s", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class DataFile:
    """One file of a data set, a lake table, or a query over some.

    Attributes:
        path: path of the file; the query of `sql`, the newest metadata of `iceberg`.
        system: fsspec file system of a remote file; None for a local file.
        partition: values of columns that folders name, such as `day=2026-01-31`.
    """

    name: str
    path: str
    kind: str
    system: Any = None
    partition: dict[str, str | None] = field(default_factory=dict)

    def wrong(self, column: str, expected: str, actual: object) -> DataError:
        """Create an error about a column."""
        return DataError(f"{self.name}: column {column!r}: expected {expected}, found {actual}")


def is_query(source: Path | str) -> bool:
    """Return whether a source is a query: `SELECT …`, `WITH …` or `FROM …`."""
    return isinstance(source, str) and _QUERY.match(source) is not None


def shorten_query(query: str) -> str:
    """Shorten a query to one line, for messages."""
    line = " ".join(query.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def as_source(text: str | Path) -> Path | str:
    """Convert text to a path, unless it is a URL or a query."""
    return text if isinstance(text, str) and ("://" in text or is_query(text)) else Path(text)


def find_files(sources: Path | str | list[Path | str]) -> list[DataFile]:
    """Find every file of some sources, sorted by name within each.

    Below a directory, names that begin with `_` or `.`, and files of other endings, are not read. A directory of a
    Delta or Iceberg table is one table.
    """
    files: list[DataFile] = []
    for source in sources if isinstance(sources, list) else [sources]:
        if is_query(source):
            new_files = [DataFile(shorten_query(str(source)), str(source), "sql")]
        else:
            new_files = _local(source) if isinstance(source, Path) else _remote(source)
        if not new_files:
            kind = file_format(str(source)) or "Parquet, CSV, TSV or JSON"
            below = " below this directory" if isinstance(source, Path) and source.is_dir() else ""
            folder = source.parent if isinstance(source, Path) else None
            names = [] if folder is None or not folder.is_dir() else [path.name for path in folder.iterdir()]
            hint = "" if below or not names else did_you_mean(Path(source).name, names, alike=0.8)
            raise DataError(f"{source}: expected a {kind} file, found none{below}{hint}")
        if unknown := next((file for file in new_files if not file.kind), None):
            suffix = PurePosixPath(unknown.path).suffix
            raise DataError(f"{unknown.name}: expected an ending among {', '.join(_ENDINGS)}, received {suffix!r}")
        files += new_files
    names = [file.path if file.kind == "sql" else file.name for file in files]
    # Queries are compared whole, because their names are shortened.
    if twice := next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None:
        raise DataError(f"expected every file once, found {twice} {names.count(twice)} times")
    for i, file in enumerate(files):
        if file.kind not in ("sql", "delta", "iceberg"):
            pairs = re.findall(r"(?<=/)([^/=]+)=([^/]*)(?=/)", f"/{file.path}")
            partition = {key: None if value == _NO_PARTITION else unquote(value) for key, value in pairs}
            files[i] = replace(file, partition=partition)
    return files


def store_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Add the errors of object stores, if obstore was imported."""
    opened = sys.modules.get("obstore.exceptions")
    return others if opened is None else (*others, opened.BaseError)


def file_format(name: str) -> str | None:
    """Return the format of a file by its ending; None for an unknown one."""
    path = PurePosixPath(name)
    return _ENDINGS.get((path.with_suffix("") if path.suffix in PACKED else path).suffix.lower())


def _local(source: Path) -> list[DataFile]:
    files: list[DataFile] = []
    names: list[str] = []
    if source.exists():
        tops = [source]
    elif "**" in source.parts:
        base, pattern = _split_pattern(source.parts)
        folder = os.path.join(*base) if base else "."
        below = {name: PurePosixPath(name[len(folder) :].lstrip("/")).parts for name in _below(Path(folder))}
        matches = (name for name, parts in below.items() if _meets(parts, pattern))
        names = [name for name in _visible(matches, source.parts) if file_format(name) is not None]
        tops = []
    else:
        tops = [Path(name) for name in _visible(glob.glob(str(source), include_hidden=True), source.parts)]
    for top in tops:
        if not top.is_dir():
            names.append(str(top))
        elif (top / "_delta_log").is_dir():
            files.append(DataFile(str(top), str(top), "delta"))
        elif versions := [str(path) for path in (top / "metadata").glob(_ICEBERG)]:
            files.append(DataFile(str(top), _newest(versions), "iceberg"))
        else:
            names += _listed(_below(top), str(top))
    distinct: dict[str, str] = {}
    for name in names:
        real = os.path.realpath(name)
        if real not in distinct or os.path.abspath(name) == real:  # a link and its file are one, by the file's name
            distinct[real] = name
    return files + [DataFile(name, name, file_format(name) or "") for name in distinct.values()]


def _split_pattern(parts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the parts of a glob before the first that has a wildcard."""
    i = next((j for j, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return parts[:i], parts[i:]


def _visible(paths: Iterable[str], parts: Sequence[str]) -> list[str]:
    """Sort the paths of a glob, without hidden names."""
    base, pattern = _split_pattern(parts)
    spelled = [part for part in pattern if part.startswith(_HIDDEN)]

    def is_visible(path: str) -> bool:
        names = [name for name in PurePosixPath(path).parts[len(base) :] if name.startswith(_HIDDEN)]
        return all(any(fnmatchcase(name, part) for part in spelled) for name in names)

    return sorted(filter(is_visible, paths))


def _meets(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a path matches a glob with `**`."""
    if not pattern or not parts:
        return not parts and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _meets(parts, pattern[1:]) or _meets(parts[1:], pattern)
    return fnmatchcase(parts[0], pattern[0]) and _meets(parts[1:], pattern[1:])


def _below(folder: Path) -> Iterator[str]:
    """Yield the files below a directory, then those of linked directories elsewhere."""
    real_paths: set[str] = set()
    tops = [str(folder)]
    for top in tops:
        for root, below, names in os.walk(top):
            if os.path.realpath(root) in real_paths:
                below.clear()
                continue
            real_paths.add(os.path.realpath(root))
            tops += [path for name in sorted(below) if os.path.islink(path := os.path.join(root, name))]
            yield from (path for name in names if os.path.isfile(path := os.path.join(root, name)))


def _newest(versions: list[str]) -> str:
    """Return the newest version of an Iceberg table: `v3.metadata.json`, `00003-…`."""
    return max(versions, key=lambda name: (int("".join(re.findall(r"/v?(\d+)[^/]*$", name)) or 0), name))


def _remote(url: str) -> list[DataFile]:
    """Find the files of a URL through fsspec, with obstore for object stores."""
    try:
        import fsspec
        import obstore.fsspec

        from longtail.bundle.objects import store_options
    except ImportError as error:
        raise DataError(f"{url}: expected the extra `remote`, {pip_install('remote')}: {error}") from error
    try:
        obstore.fsspec.register([*_OBJECT_STORES])
        options = store_options(url) if url.startswith(tuple(f"{name}://" for name in _OBJECT_STORES)) else {}
        system, path = fsspec.core.url_to_fs(url, **options)
        tops = _visible(system.glob(path), PurePosixPath(path).parts) if glob.has_magic(path) else [path]
        files, paths = [], []
        for top in tops:
            name = system.unstrip_protocol(top)
            if system.isfile(top):
                paths.append(top)
            elif system.isdir(f"{top}/_delta_log"):
                files.append(DataFile(name, name, "delta"))
            elif versions := system.glob(f"{top}/metadata/{_ICEBERG}"):
                files.append(DataFile(name, system.unstrip_protocol(_newest(versions)), "iceberg"))
            elif system.isdir(top):
                paths += _listed(system.find(top), top)
        paths = [*dict.fromkeys(paths)]  # `**` matches a folder and what is in it
        names = [system.unstrip_protocol(path) for path in paths]
    except store_errors(ImportError, OSError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise DataError(f"{url}: expected files of a file system that answers: {why}") from error
    return files + [
        DataFile(name, path, file_format(name) or "", system) for name, path in zip(names, paths, strict=True)
    ]


def _listed(paths: Iterable[str], top: str) -> list[str]:
    """Select data files below a directory, sorted by name."""

    def is_data(path: str) -> bool:
        parts = PurePosixPath(path[len(top) :].lstrip("/")).parts
        hidden = any(part.startswith(_HIDDEN) for part in parts)
        return not hidden and file_format(path) is not None

    return sorted(filter(is_data, paths))
