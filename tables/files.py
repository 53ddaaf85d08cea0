"""Files behind the places of a recipe, in a fixed order."""

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
"""Files below `metadata` of an Iceberg table."""
_HIDDEN = ("_", ".")
"""First letters of names that hold no data: leftovers of writers and of editors."""
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_SHOWN = 60
"""Characters of a query that messages show."""
_QUERY = re.compile(r"(\s|--[^\n]*\n|/\*.*?\*/)*(select|with|from)\s", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class DataFile:
    """One file of a data set, a lake table, or a query over some.

    Attributes:
        path: of the file; of `sql`, the query; of `iceberg`, its newest metadata.
        system: the fsspec file system of a remote file; None for a local one.
        partition: texts of the columns that its folders name, such as `day=2026-01-31`.
    """

    name: str
    path: str
    kind: str
    system: Any = None
    partition: dict[str, str | None] = field(default_factory=dict)

    def wrong(self, column: str, expected: str, found: object) -> DataError:
        """Return an error about one of its columns."""
        return DataError(f"{self.name}: column {column!r}: expected {expected}, found {found}")


def is_query(place: Path | str) -> bool:
    """Tell whether a place is a query: `SELECT …`, `WITH …` or `FROM …`."""
    return isinstance(place, str) and _QUERY.match(place) is not None


def in_line(query: str) -> str:
    """Return a query for messages: in one line, of a few words."""
    line = " ".join(query.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


def as_place(text: str | Path) -> Path | str:
    """Return a URL as it is, and other text as a path."""
    return text if isinstance(text, str) and "://" in text else Path(text)


def find_files(places: Path | str | list[Path | str]) -> list[DataFile]:
    """Return every file of some places: entry by entry in their order, within an entry by name.

    Below a directory, names that begin with `_` or `.`, and files of other endings, are not read. A directory of a
    Delta or Iceberg table is one table.
    """
    found: list[DataFile] = []
    for place in places if isinstance(places, list) else [places]:
        if is_query(place):
            files = [DataFile(in_line(str(place)), str(place), "sql")]
        else:
            files = _local(place) if isinstance(place, Path) else _remote(place)
        if not files:
            kind = _ending(str(place)) or "Parquet, CSV, TSV or JSON"
            below = " below this directory" if isinstance(place, Path) and place.is_dir() else ""
            beside = place.parent if isinstance(place, Path) else None
            names = [] if beside is None or not beside.is_dir() else [path.name for path in beside.iterdir()]
            hint = "" if below or not names else did_you_mean(Path(place).name, names, alike=0.8)
            raise DataError(f"{place}: expected a {kind} file, found none{below}{hint}")
        found += files
    names = [file.path if file.kind == "sql" else file.name for file in found]
    if twice := next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None:
        raise DataError(f"expected every file once, found {twice} {names.count(twice)} times")
    return [replace(file, partition=_partition(file)) for file in found]


def store_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return some kinds of errors, and those of object stores where one was opened."""
    opened = sys.modules.get("obstore.exceptions")
    return others if opened is None else (*others, opened.BaseError)


def kind_of(name: str) -> str:
    """Return the format of a file by its ending."""
    if kind := _ending(name):
        return kind
    raise DataError(f"{name}: expected an ending among {', '.join(_ENDINGS)}, received {PurePosixPath(name).suffix!r}")


def _ending(name: str) -> str | None:
    path = PurePosixPath(name)
    return _ENDINGS.get((path.with_suffix("") if path.suffix in PACKED else path).suffix.lower())


def _local(place: Path) -> list[DataFile]:
    files: list[DataFile] = []
    names: list[str] = []
    if place.exists():
        tops = [place]
    elif "**" in place.parts:
        base, pattern = _split_pattern(place.parts)
        folder = os.path.join(*base) if base else "."
        below = {name: PurePosixPath(name[len(folder) :].lstrip("/")).parts for name in _below(Path(folder))}
        matches = (name for name, parts in below.items() if _meets(parts, pattern))
        names = [name for name in _visible(matches, place.parts) if _ending(name) is not None]
        tops = []
    else:
        tops = [Path(name) for name in _visible(glob.glob(str(place), include_hidden=True), place.parts)]
    for top in tops:
        if not top.is_dir():
            names.append(str(top))
        elif (top / "_delta_log").is_dir():
            files.append(DataFile(str(top), str(top), "delta"))
        elif versions := [str(path) for path in (top / "metadata").glob(_ICEBERG)]:
            files.append(DataFile(str(top), _newest(versions), "iceberg"))
        else:
            names += _listed(_below(top), str(top))
    return files + [DataFile(name, name, kind_of(name)) for name in _once(names)]


def _split_pattern(parts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the parts of a glob before the first that has a wildcard."""
    first = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return parts[:first], parts[first:]


def _visible(paths: Iterable[str], parts: Sequence[str]) -> list[str]:
    """Sort the paths of a glob with these parts; leave out those with a hidden name that no part of it spells."""
    base, pattern = _split_pattern(parts)
    spelled = [part for part in pattern if part.startswith(_HIDDEN)]

    def is_visible(path: str) -> bool:
        names = [name for name in PurePosixPath(path).parts[len(base) :] if name.startswith(_HIDDEN)]
        return all(any(fnmatchcase(name, part) for part in spelled) for name in names)

    return sorted(filter(is_visible, paths))


def _meets(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Tell whether the parts of a path meet those of a glob, of which `**` is any number of folders."""
    if not pattern or not parts:
        return not parts and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _meets(parts, pattern[1:]) or _meets(parts[1:], pattern)
    return fnmatchcase(parts[0], pattern[0]) and _meets(parts[1:], pattern[1:])


def _below(folder: Path) -> Iterator[str]:
    """Yield the files below a directory, and then those of linked directories that are elsewhere."""
    seen: set[str] = set()
    tops = [str(folder)]
    for top in tops:
        for root, below, names in os.walk(top):
            if os.path.realpath(root) in seen:
                below.clear()
                continue
            seen.add(os.path.realpath(root))
            tops += [path for name in sorted(below) if os.path.islink(path := os.path.join(root, name))]
            yield from (path for name in names if os.path.isfile(path := os.path.join(root, name)))


def _once(paths: Iterable[str]) -> list[str]:
    """Return every file once, in the order of the paths; one that is reached by links too has the name without."""
    names: dict[str, str] = {}
    for path in paths:
        real = os.path.realpath(path)
        if real not in names or os.path.abspath(path) == real:
            names[real] = path
    return [*names.values()]


def _newest(versions: list[str]) -> str:
    """Return the last of the versions of an Iceberg table, by the number in its name: `v3.metadata.json`, `00003-…`."""
    return max(versions, key=lambda name: (int("".join(re.findall(r"/v?(\d+)[^/]*$", name)) or 0), name))


def _remote(url: str) -> list[DataFile]:
    """Find the files of a URL, by fsspec; those at object stores by obstore."""
    try:
        import fsspec
        import obstore.fsspec

        from longtail.bundle.objects import options_of
    except ImportError as error:
        raise DataError(f"{url}: expected the extra `remote`, {pip_install('remote')}: {error}") from error
    try:
        obstore.fsspec.register([*_OBJECT_STORES])
        options = options_of(url) if url.startswith(tuple(f"{name}://" for name in _OBJECT_STORES)) else {}
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
        names = [system.unstrip_protocol(each) for each in paths]
    except store_errors(ImportError, OSError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise DataError(f"{url}: expected files of a file system that answers: {why}") from error
    return files + [DataFile(name, each, kind_of(name), system) for name, each in zip(names, paths, strict=True)]


def _listed(paths: Iterable[str], top: str) -> list[str]:
    """Return files below a directory that are data, by name."""

    def is_data(path: str) -> bool:
        parts = PurePosixPath(path[len(top) :].lstrip("/")).parts
        hidden = any(part.startswith(_HIDDEN) for part in parts)
        return not hidden and _ending(path) is not None

    return sorted(filter(is_data, paths))


def _partition(file: DataFile) -> dict[str, str | None]:
    if file.kind in ("sql", "delta", "iceberg"):
        return {}
    found = re.findall(r"(?<=/)([^/=]+)=([^/]*)(?=/)", f"/{file.path}")
    return {key: None if value == _NO_PARTITION else unquote(value) for key, value in found}
