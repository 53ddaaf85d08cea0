"""The answers to a table of queries, offline: what `POST /v1/retrieve` would answer each, in Parquet files.

OUT holds `_batch.json`, which says what was asked of which release, and a file for some of the rows of QUERIES, each
there whole or not at all. Processes that are told which share is theirs may write to one OUT, and whoever is started
again does what is not there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from decimal import Decimal
from itertools import chain, groupby
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from longtail.bundle import LabelChanges
from longtail.bundle.errors import describe
from longtail.bundle.ids import as_float64, id_text
from longtail.bundle.mapped_table import in_one_piece
from longtail.index import Releases
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import LabelId, Query, RequestModel
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import InvalidRequestError, ServingError
from longtail.state import Place, read_label_changes

ROWS = 100_000
"""Rows of a file of answers, at most."""
_AT_ONCE = 512
"""Queries of a search."""
_K = 100
"""Labels of a query where its options do not say, at most."""
_MANIFEST = "_batch.json"
"""Whoever reads the folder as a table passes over names that begin so."""
_ANSWERS = {"labels": pa.list_(pa.string()), "scores": pa.list_(pa.float32())}


class BatchError(ServingError):
    """Queries that cannot be answered offline: no such table, a row that the release refuses, another batch's OUT."""


@dataclass(frozen=True)
class Asked:
    """Options of a batch, the same for every row."""

    options: Mapping[str, Any]
    """Query options as `POST /v1/retrieve` takes them, such as `{"k": 100, "bias_removal": 0.5}`."""
    exclude: str | None = None
    """Column of lists of label ids that are not to be answered; None without."""
    keep: Sequence[str] | None = None
    """Columns that go into the answers; None: all that are neither lists, maps nor structs."""


class _Excluded(RequestModel):
    """Labels that a row leaves out: of any number, unlike a request's."""

    exclude: list[LabelId]


@dataclass(frozen=True)
class _Part:
    """Rows of a group of rows of a file of queries, whose answers are one file."""

    number: int
    file: Path
    group: int
    start: int
    rows: int

    @property
    def name(self) -> str:
        return f"part-{self.number:06}.parquet"

    def wrong(self, row: int, what: str) -> BatchError:
        return BatchError(f"{self.file}: row {self.start + row} of row group {self.group}: {what}")


def answer(
    releases: str | Path,
    queries: Path,
    out: Path,
    asked: Asked,
    *,
    release: str | None = None,
    state: Place | None = None,
    share: tuple[int, int] = (0, 1),
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Write the answers to every row of a table that are not there yet.

    Args:
        releases: directory or URL of releases.
        queries: Parquet file, or a directory of them; columns are features by name, and what is kept.
        out: directory of the answers; made if missing.
        asked: the same for every row.
        release: which; CURRENT by default.
        state: the service's, whose added and hidden labels count; by default RELEASES/.state, and of a URL none.
        share: of the files, (which, of how many), from 0.
        say: gets a line for every file.

    Raises:
        BatchError: as its name says; files that are done stay.
        LongtailIndexError, BundleError, UnservableReleaseError: what is wrong with the release.
        StoreError: what is wrong with the state.
        OSError: the disk.
    """
    found = Releases(releases)
    name = found.current() if release is None else release
    if name is None:
        raise BatchError(f"{releases}: expected a published release, found none: name one with --release")
    options, files = _checked(asked), _files(queries, out)
    parts = _parts(queries, files)
    about = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    manifest = {"release": name, **asdict(asked), "rows": ROWS, "queries": about}
    if (out / _MANIFEST).exists():
        _agree(out, manifest)
    mine = [part for part in parts if part.number % share[1] == share[0]]
    missing = [part for part in mine if not (out / part.name).exists()]
    if len(missing) < len(mine):
        say(f"{len(mine) - len(missing):,} of {len(mine):,} files are there")
    if not missing:
        return
    try:
        changes = read_label_changes(state or found.root / ".state")
    except FileNotFoundError:
        changes = LabelChanges()
    retriever = load_release(found, name).with_changes(changes.records())
    options = {"k": _K, **options}
    try:
        retriever.check_options(Query.model_validate({"features": {}, **options}))
    except InvalidRequestError as error:
        raise BatchError(f"--options: {error.field}: {error.message}") from error
    columns = {file: _columns(file, retriever, asked) for file in files}
    _agree(out, manifest)
    done = 0
    for (file, group), of_group in groupby(missing, key=lambda part: (part.file, part.group)):
        table = _read_group(file, group, dict.fromkeys([*chain(*columns[file]), *filter(None, [asked.exclude])]))
        for part in of_group:
            started, done = perf_counter(), done + 1
            rows = table.slice(part.start, part.rows)
            _write(retriever, part, rows, columns[file], asked.exclude, options, out)
            rate = part.rows / (perf_counter() - started)
            say(f"{part.name}, {done:,} of {len(missing):,}: {part.rows:,} queries, {rate:,.0f} a second")


def _parts(queries: Path, files: Sequence[Path]) -> list[_Part]:
    parts: list[_Part] = []
    for file in files:
        with _opened(file) as parquet:
            sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
        for group, size in enumerate(sizes):
            for start in range(0, size, ROWS):
                parts.append(_Part(len(parts), file, group, start, min(ROWS, size - start)))
    if not parts:
        raise BatchError(f"{queries}: expected Parquet files with rows, found none")
    return parts


def _files(queries: Path, out: Path) -> list[Path]:
    """The files of queries: none that is an answer, and as readers of folders have it, none that is hidden."""
    if not queries.is_dir():
        return [queries]
    return sorted(
        file
        for file in queries.rglob("*.parquet")
        if out.resolve() not in file.resolve().parents
        and not any(part.startswith(("_", ".")) for part in file.relative_to(queries).parts)
    )


def _opened(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise BatchError(f"{file}: expected a readable Parquet file: {error}") from error


def _agree(out: Path, manifest: dict[str, Any]) -> None:
    """Write what a batch is about, or compare it with what an earlier process has written."""
    out.mkdir(parents=True, exist_ok=True)
    path, working = out / _MANIFEST, out / f".{_MANIFEST}.{uuid4().hex}"
    working.write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
    try:
        os.link(working, path)
    except FileExistsError:
        found = json.loads(path.read_text(encoding="utf-8"))
        for name, value in json.loads(json.dumps(manifest)).items():
            if found.get(name) != value:
                raise BatchError(
                    f"{path}: expected a batch of {name} {json.dumps(value)}, found {json.dumps(found.get(name))}: "
                    "give another OUT, or remove this one"
                ) from None
    finally:
        working.unlink()


def _checked(asked: Asked) -> dict[str, Any]:
    """The options of a query, none of which is of one row."""
    refused = [name for name in ("features", "vector", "explore") if name in asked.options]
    if refused:
        raise BatchError(f"--options: expected options of all queries alike, received {refused[0]}")
    options = {"display": False, **asked.options}
    try:
        Query.model_validate({"features": {}, **options})
    except ValidationError as error:
        raise BatchError(f"--options: {_first(error)}") from error
    return options


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, received {describe(first['input'])}"


def _columns(file: Path, retriever: Retriever, asked: Asked) -> tuple[list[str], list[str]]:
    """The columns of a file that are features, and those that go into the answers; raises BatchError."""
    with _opened(file) as parquet:
        schema = parquet.schema_arrow
    expected = [feature.name for feature in retriever.manifest.query_features]
    features = [name for name in expected if name in schema.names]
    found = ", ".join(schema.names)
    if not features:
        raise BatchError(f"{file}: expected columns of the features {', '.join(expected)}, found {found}")
    kept = [field.name for field in schema if not pa.types.is_nested(field.type)]
    if asked.keep is not None:
        kept = list(dict.fromkeys(asked.keep))
    for name in (*features, *kept, *([] if asked.exclude is None else [asked.exclude])):
        if (count := schema.names.count(name)) != 1:
            a_column, found = ("a column", found) if count == 0 else ("one column", str(count))
            raise BatchError(f"{file}: expected {a_column} {name!r}, found {found}")
    if asked.exclude is not None:
        kind = schema.field(asked.exclude).type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            raise BatchError(f"{file}: column {asked.exclude!r}: expected lists of label ids, found {kind}")
    if taken := [name for name in kept if name in _ANSWERS]:
        raise BatchError(f"{file}: column {taken[0]!r}: expected other names than the answers' own; see --keep")
    return features, kept


def _read_group(file: Path, group: int, columns: Iterable[str]) -> pa.Table:
    try:
        with _opened(file) as parquet:
            return parquet.read_row_group(group, columns=[*columns])
    except (pa.ArrowInvalid, OSError) as error:
        raise BatchError(f"{file}: row group {group}: expected rows, found {error}") from error


def _write(
    retriever: Retriever,
    part: _Part,
    table: pa.Table,
    columns: tuple[list[str], list[str]],
    exclude: str | None,
    options: Mapping[str, Any],
    out: Path,
) -> None:
    """Answer the rows of a part, in a file that is there whole or not at all."""
    features, kept = columns
    schema = pa.schema([*table.select(kept).schema, *_ANSWERS.items()], {"release": retriever.name})
    working = out / f".{part.name}.{uuid4().hex}"
    try:
        with pq.ParquetWriter(working, schema) as writer:
            for start in range(0, table.num_rows, _AT_ONCE):
                rows = table.slice(start, _AT_ONCE)
                try:
                    found = retriever.retrieve(_queries(rows, part, start, features, exclude, options))
                except InvalidRequestError as error:
                    _, place, *path = (error.field or "queries.0").split(".")
                    where = f"{'.'.join(path)}: " if path else ""
                    raise part.wrong(start + int(place), f"{where}{error.message}") from error
                offsets = pa.array([0, *found.ends_B], pa.int32())
                lists = (retriever.catalogue.ids_of(found.rows_N), pa.array(found.scores_N, pa.float32()))
                answers = [pa.ListArray.from_arrays(offsets, values) for values in lists]
                shown = rows.select(kept).combine_chunks().columns
                writer.write_table(pa.table([*shown, *answers], schema=schema))
        working.replace(out / part.name)
    finally:
        working.unlink(missing_ok=True)


def _queries(
    table: pa.Table, part: _Part, first: int, features: list[str], exclude: str | None, options: Mapping[str, Any]
) -> list[Query]:
    """A query for every row; `first` is the number of the first in its part."""
    columns = {name: _as_json(table[name]) for name in features}
    excluded = [[]] * table.num_rows if exclude is None else _as_json(table[exclude])
    queries = []
    for row, labels in enumerate(excluded):
        given = {name: values[row] for name, values in columns.items()}
        try:
            query = Query.model_validate({**options, "features": given})
            query.exclude.extend(_Excluded.model_validate({"exclude": labels or []}).exclude)
            queries.append(query)
        except ValidationError as error:
            raise part.wrong(first + row, _first(error)) from None
    return queries


def _as_json(column: pa.ChunkedArray) -> list[Any]:
    """Get the values of a column as a request gives them."""
    array = in_one_piece(column)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_timestamp(kind):
        array = array.cast(pa.timestamp("us", kind.tz), safe=False)
    values: list[Any] = as_float64(array).to_pylist()
    lists = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
    plain = pa.types.is_string(kind) or (
        lists and not (pa.types.is_nested(kind.value_type) or _is_odd(kind.value_type))
    )
    return values if plain else [*map(_json_value, values)]


def _is_odd(kind: pa.DataType) -> bool:
    return bool(pa.types.is_temporal(kind) or pa.types.is_decimal(kind))


def _json_value(value: Any) -> Any:
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return id_text(value)
    if isinstance(value, dict):
        return {name: _json_value(each) for name, each in value.items()}
    if isinstance(value, list):
        pairs = value and isinstance(value[0], tuple)  # of a map
        return {str(id_text(key)): _json_value(each) for key, each in value} if pairs else [*map(_json_value, value)]
    return None if value != value else value
