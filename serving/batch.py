"""Answer a table of queries into Parquet files.

OUT holds `_batch.json` with the options and the release, `_labels.jsonl` with the labels that were added and hidden
when the batch began, `_begun.txt` with that time, if labels have lifetimes and `at` names no other, and files of
answers for ranges of rows of QUERIES, each complete or absent. Several processes, each with a share of the files, may
write to one OUT; a restarted process writes the missing files.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from longtail.bundle import Feature, LabelChanges, LabelRecord, Manifest
from longtail.bundle.dates import parse_seconds
from longtail.bundle.errors import describe
from longtail.bundle.histories import REMEMBERED
from longtail.bundle.integrity import read_manifest
from longtail.bundle.label_changes import read_record, record_json
from longtail.index import Releases, open_releases
from longtail.index.release.release import BUNDLE
from longtail.serving.core import lifetimes
from longtail.serving.core.answers import Retrieval
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import ELSEWHERE, LabelId, QueriesFor, RequestModel, RetrieveQuery
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import InvalidRequestError, ServingError
from longtail.serving.settings import explain
from longtail.state import StateLocation, read_label_changes
from longtail.tables import DataError, DataFile, find_files
from longtail.tables.database import Database, OpenedFile, open_database
from longtail.tables.features import WRITTEN, as_json, as_written, feature_columns
from longtail.tables.lake import file_version
from longtail.tables.table import FileRows, Table, open_file, read_table
from longtail.tables.values import is_nested, is_text, type_name

ROWS = 100_000
"""Most rows of a file of answers."""
_AT_ONCE = 512
"""Queries in one search."""
DEFAULT_K = 100
"""Default k, or all labels if there are fewer."""
MEMORY = 2 << 30
"""Bytes of memory for reading tables; DuckDB spills larger tables that are not Parquet to a temporary folder."""
_MANIFEST, _LABELS, _BEGUN = "_batch.json", "_labels.jsonl", "_begun.txt"
"""Names with a leading underscore, which readers of the folder as a table skip."""
_ANSWERS = {"labels": pa.list_(pa.string()), "scores": pa.list_(pa.float32())}


Options = TypeVar("Options", RetrieveQuery, QueriesFor)


class BatchError(ServingError):
    """Queries that cannot be answered offline: no table, a row that the release refuses, or another batch's OUT."""


@dataclass(frozen=True)
class TableOptions:
    """Options of a batch, the same for every row."""

    options: Mapping[str, Any]
    """Query options of `POST /v1/retrieve`, such as `{"k": 100, "bias_removal": 0.5}`."""
    exclude: str | None = None
    """Column of lists of label ids to exclude from the row's answer; None: no exclusions."""
    keep: Sequence[str] | None = None
    """Columns to copy into the answers; None: all columns but lists, maps and structs."""
    history: str | None = None
    """Column of lists of label ids that the row's query chose, the latest last; None: no such column."""
    at: str | None = None
    """Time in ISO 8601 at which labels must be available; None: when the first process began."""


class _Excluded(RequestModel):
    """Labels that a row excludes; unlike in requests, their number is not limited."""

    exclude: list[LabelId]


@dataclass(frozen=True)
class _Slice:
    """Rows of a file whose answers form one file."""

    number: int
    part: FileRows
    start: int
    rows: int

    @property
    def name(self) -> str:
        return f"part-{self.number:06}.parquet"

    def wrong(self, row: int, what: str) -> BatchError:
        return BatchError(f"{self.part.opened.file.name}: row {self.start + row}: {what}")


def answer(
    releases: str | Path,
    queries: Path | str,
    out: Path,
    table_options: TableOptions,
    *,
    release: str | None = None,
    state: StateLocation | None = None,
    share: tuple[int, int] = (0, 1),
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Write the missing answers to the rows of a table.

    Args:
        queries: file, directory, glob or URL of a table; its columns are features by name, and columns to keep.
        release: name of the release; None: CURRENT.
        state: state of a service, whose added and hidden labels apply as they are when the batch begins; None:
            RELEASES/.state, or no state if RELEASES is a URL.
        share: (index, number) of the share of the files that this process writes, counted from 0.

    Raises:
        BatchError: the queries, the options or OUT are wrong; finished files stay.
        LongtailIndexError, BundleError, UnservableReleaseError: the release cannot be used.
        StoreError: the state cannot be read.
        OSError: the disk is full or not writable.
    """
    all_releases = open_releases(releases)
    name = find_release_name(all_releases, release)
    options = _checked(table_options)
    try:
        files = _files(queries, out)
        about = [(Path(file.path).name, *file_version(file)) for file in files]
        manifest = {"release": name, **asdict(table_options), "rows": ROWS, "queries": about}
        # Compared before the table is read, and written only when the table and the release are fine.
        if (out / _MANIFEST).exists():
            _agree(out, manifest)
        with open_database(memory=MEMORY) as duck:
            with all_releases.manifests(name) as folder:
                features = _list_features(read_manifest(folder / BUNDLE))
            table = _read(duck, files, str(queries), features, table_options, say)
            if (empty_files := duck.empty_in_words()) is not None:
                say(empty_files)
            slices = _slices(table, str(queries))
            mine = [item for item in slices if item.number % share[1] == share[0]]
            missing = [item for item in mine if not (out / item.name).exists()]
            if len(missing) < len(mine):
                say(f"{len(mine) - len(missing):,} of {len(mine):,} files are there")
            if not missing:
                return
            retriever = _loaded(all_releases, name, options)
            _agree(out, manifest)
            retriever = retriever.with_changes(_label_changes(out, state or all_releases.root / ".state"))
            retriever = retriever.view_all_at(_moment(out, table_options.at))
            for number, file_slice in enumerate(missing, 1):
                started = perf_counter()
                notes = _write(retriever, file_slice, table, table_options, options, out)
                rate, rows = file_slice.rows / (perf_counter() - started), f"{file_slice.rows:,} queries"
                rows = "; ".join([rows, *(f"{note}: {count:,}" for note, count in notes.items() if count)])
                say(f"{file_slice.name}, {number:,} of {len(missing):,}: {rows}, {rate:,.0f} a second")
    except DataError as error:
        raise BatchError(str(error)) from error


def find_release_name(releases: Releases, release: str | None) -> str:
    """Return a release's name, of the published one by default; raises BatchError if none is published."""
    if (name := releases.current() if release is None else release) is None:
        raise BatchError(f"{releases}: expected a published release, found none; use the path of one")
    return name


def checked(model: type[Options], values: Mapping[str, Any]) -> Options:
    """Check the options of a batch; raises BatchError."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise BatchError(f"--set: {': '.join(filter(None, explain(error, model, ELSEWHERE)))}") from error


def _files(queries: Path | str, out: Path) -> list[DataFile]:
    """Find the files of queries; leave out answers."""
    answers = out.resolve()
    return [
        file
        for file in find_files(queries)
        if file.system is not None or answers not in Path(file.path).resolve().parents
    ]


def _read(
    duck: Database, files: Sequence[DataFile], source: str, features: Sequence[Feature], table_options: TableOptions,
    say: Callable[[str], None],
) -> Table:  # fmt: skip
    """Read the table of queries: columns of features, columns to keep, `exclude` and `history`."""
    expected = [feature.name for feature in features]
    lists = [name for name in (table_options.exclude, table_options.history) if name is not None]
    needed = [*(table_options.keep or ()), *lists]

    def choose_columns(opened: OpenedFile, _: int) -> dict[str, tuple[str, str]]:
        if not {*expected} & {*opened.names}:
            columns = ", ".join(opened.names)
            raise BatchError(
                f"{opened.file.name}: expected columns of the features {', '.join(expected)}, found {columns}"
            )
        every = table_options.keep is None
        names = [name for name in opened.names if name in expected or (every and not is_nested(opened.column(name)[1]))]
        read = {name: opened.column(name) for name in dict.fromkeys([*names, *needed])}
        return read | as_written(opened, [feature for feature in features if feature.name in read])

    table = read_table(duck, files, choose_columns, source, views=("parquet",))
    for part in table.parts:
        for name in table.kinds:
            part.opened.column(name.removeprefix(WRITTEN))
    table.refuse_rejected()
    for name in lists:
        if not (is_text(kind := table.kinds[name]) or kind.endswith("[]")):
            raise BatchError(f"{source}: column {name!r}: expected lists of label ids, found {type_name(kind)}")
    if reserved := [name for name in _columns_to_keep(table, table_options) if name in _ANSWERS]:
        raise BatchError(f"{source}: column {reserved[0]!r}: expected other names than the answers' own: rename it")
    table.find_types([name for name in table.kinds if name not in lists])
    if absent := [name for name in expected if name not in table.kinds]:
        say(f"{source}: no column {', '.join(map(repr, absent))}: queries are answered as without these features")
    return table


def _list_features(manifest: Manifest) -> list[Feature]:
    """List the features of a query, and its id."""
    features, together = manifest.query_features, manifest.cooccurrence
    if together is None or REMEMBERED not in manifest.files:
        return features
    name = together.log.query_id
    by_name = {feature.name for feature in features}
    return features if name in by_name else [*features, Feature(name=name, kind="id", vocabulary=REMEMBERED)]


def _columns_to_keep(table: Table, table_options: TableOptions) -> list[str]:
    """List the columns to copy into the answers."""
    if table_options.keep is not None:
        return list(dict.fromkeys(table_options.keep))
    return [name for name, kind in table.kinds.items() if not is_nested(kind) and not name.startswith(WRITTEN)]


def _slices(table: Table, source: str) -> list[_Slice]:
    starts = [(part, start) for part in table.parts for start in range(0, part.rows, ROWS)]
    if not starts:
        raise BatchError(f"{source}: expected a table with rows, found none")
    return [_Slice(number, part, start, min(ROWS, part.rows - start)) for number, (part, start) in enumerate(starts)]


def _loaded(releases: Releases, name: str, options: Mapping[str, Any]) -> Retriever:
    """Load a release, and check that it supports the options."""
    retriever = load_release(releases, name)
    try:
        retriever.check_options(RetrieveQuery.model_validate({"features": {}, **options}))
    except InvalidRequestError as error:
        raise BatchError(f"--set: {error.field}: {error.message}") from error
    return retriever


def _label_changes(out: Path, location: StateLocation) -> list[LabelRecord]:
    """Read the label changes that the batch's first process recorded."""
    path = out / _LABELS
    if not path.exists():
        try:
            changes = read_label_changes(location)
        except FileNotFoundError:
            changes = LabelChanges()
        _add(path, "\n".join(map(record_json, changes.records())))
    return [read_record(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _moment(out: Path, at: str | None) -> float:
    """Return the time at which labels must be available: as given, or as the first process of the batch recorded."""
    if at is not None:
        return float(parse_seconds(at))
    _add(out / _BEGUN, str(lifetimes.now()))
    return float((out / _BEGUN).read_text(encoding="utf-8"))


def _agree(out: Path, manifest: dict[str, Any]) -> None:
    """Write the batch's options, or compare them with earlier ones."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / _MANIFEST
    if _add(path, json.dumps(manifest, indent=1, ensure_ascii=False)):
        return
    earlier = json.loads(path.read_text(encoding="utf-8"))
    for name, value in json.loads(json.dumps(manifest)).items():
        if earlier.get(name) != value:
            raise BatchError(
                f"{path}: expected a batch of {name} {json.dumps(value)}, found {json.dumps(earlier.get(name))}: "
                "give another OUT, or remove this one"
            )


def _add(path: Path, content: str) -> bool:
    """Write a file completely unless it exists; returns whether it was written."""
    working = path.parent / f".{path.name}.{uuid4().hex}"
    working.write_text(content, encoding="utf-8")
    try:
        # A link fails if the file exists, unlike a rename: of several processes exactly one writes it.
        os.link(working, path)
    except FileExistsError:
        return False
    finally:
        working.unlink()
    return True


def _checked(table_options: TableOptions) -> dict[str, Any]:
    """Check the options, and return those shared by all queries."""
    refused = [
        name for name in ("features", "vector", "explore", "explain", "history") if name in table_options.options
    ]
    if refused:
        raise BatchError(f"--set: expected options of all queries alike, received {refused[0]}")
    # Without columns, which the answers' file does not hold.
    options = {"k": DEFAULT_K, "display": False, **table_options.options}
    try:
        if table_options.at is not None:
            parse_seconds(table_options.at)
    except (ValueError, OverflowError):
        received = describe(table_options.at)
        raise BatchError(f"--at: expected a date or time in ISO 8601, received {received}") from None
    checked(RetrieveQuery, {"features": {}, **options})
    return options


def _write(
    retriever: Retriever, part: _Slice, table: Table, table_options: TableOptions, options: Mapping[str, Any], out: Path
) -> Counter[str]:
    """Answer a slice into one file, complete or absent; count what a column does not say."""
    keep = _columns_to_keep(table, table_options)
    rows_of_slice = table.read_rows(part.part, part.start, part.rows)
    schema = pa.schema([*rows_of_slice.select(keep).schema, *_ANSWERS.items()], {"release": retriever.name})
    working, notes = out / f".{part.name}.{uuid4().hex}", Counter[str]()
    try:
        with pq.ParquetWriter(working, schema) as writer:
            for rows, answers in _answered(retriever, part, rows_of_slice, table_options, options):
                for basis in ("cooccurrence", "popularity"):
                    notes[f"answered by {basis} alone"] += answers.bases.get(basis, 0)
                notes["floors not met"] += answers.floored[1]
                offsets = pa.array([0, *answers.ends_B], pa.int32())
                values = (retriever.catalogue.get_ids(answers.rows_N), pa.array(answers.scores_N, pa.float32()))
                lists = [pa.ListArray.from_arrays(offsets, item) for item in values]
                writer.write_table(pa.table([*rows.select(keep).combine_chunks().columns, *lists], schema=schema))
        # The name appears with the last byte: a restarted process takes a file that exists for complete.
        working.replace(out / part.name)
    finally:
        working.unlink(missing_ok=True)
    return notes


def iterate_answers(
    retriever: Retriever, queries: Path | str, table_options: TableOptions, say: Callable[[str], None]
) -> Iterator[tuple[pa.Table, Retrieval]]:
    """Yield rows of a table of queries and their answers.

    The options are not checked. Columns of `table_options.keep` that the table lacks are left out.

    Raises:
        BatchError: the table cannot be read, or the release refuses a row.
    """
    retriever = retriever.view_at()
    try:
        files = find_files(queries)
        with open_database(memory=MEMORY) as duck:
            names = open_file(duck, files[0]).names
            table_options = replace(table_options, keep=[name for name in table_options.keep or () if name in names])
            table = _read(duck, files, str(queries), _list_features(retriever.manifest), table_options, say)
            for part in _slices(table, str(queries)):
                rows = table.read_rows(part.part, part.start, part.rows)
                yield from _answered(retriever, part, rows, table_options, table_options.options)
    except DataError as error:
        raise BatchError(str(error)) from error


def _answered(
    retriever: Retriever, part: _Slice, table: pa.Table, table_options: TableOptions, options: Mapping[str, Any]
) -> Iterator[tuple[pa.Table, Retrieval]]:
    """Yield rows of a slice and their answers in blocks."""
    for start in range(0, part.rows, _AT_ONCE):
        rows = table.slice(start, _AT_ONCE)
        try:
            yield rows, retriever.retrieve(_queries(rows, part, start, retriever, table_options, options))
        except InvalidRequestError as error:
            _, row, *path = (error.field or "queries.0").split(".")
            field = f"{'.'.join(path)}: " if path else ""
            raise part.wrong(start + int(row), f"{field}{error.message}") from error


def _queries(
    rows: pa.Table,
    part: _Slice,
    first: int,
    retriever: Retriever,
    table_options: TableOptions,
    options: Mapping[str, Any],
) -> list[RetrieveQuery]:
    """Create a query for every row; `first` is the first row's number in the slice."""
    columns = feature_columns(rows, _list_features(retriever.manifest), retriever.vocabularies)
    lists = [
        [None] * rows.num_rows if name is None else as_json(rows[name], as_lists=True)
        for name in (table_options.exclude, table_options.history)
    ]
    queries = []
    for row, (excluded, history) in enumerate(zip(*lists, strict=True)):
        for name, labels in ((table_options.exclude, excluded), (table_options.history, history)):
            if isinstance(labels, str):
                problem = f"column {name!r}: expected lists of label ids, found {describe(labels)}"
                raise part.wrong(first + row, problem)
        features = {name: values[row] for name, values in columns.items()}
        try:
            query = RetrieveQuery.model_validate({**options, "features": features, "history": history})
            # After the validation, which limits the list of a request; that of a row has no limit.
            query.exclude.extend(_Excluded.model_validate({"exclude": excluded or []}).exclude)
            queries.append(query)
        except ValidationError as error:
            raise part.wrong(first + row, ": ".join(filter(None, explain(error, RetrieveQuery)))) from None
    return queries
