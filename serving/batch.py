"""Answer a table of queries offline, as `POST /v1/retrieve` would each, into Parquet files.

OUT holds `_batch.json`, which has the options and the release, `_labels.jsonl`, which has the labels that were added
and hidden when the batch began, and files for some of the rows of QUERIES each, there whole or not at all. Processes
with a share each may write to one OUT; one that is started again does what is not there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from longtail.bundle import Feature, LabelChanges, LabelRecord, Vocabulary, read_manifest, read_record, record_json
from longtail.bundle.errors import describe
from longtail.bundle.ids import as_float64, id_text, parts_of, respelled
from longtail.bundle.mapped_table import in_one_piece
from longtail.index import Releases
from longtail.index.release.release import BUNDLE
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import ELSEWHERE, LabelId, Query, RequestModel
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import InvalidRequestError, ServingError
from longtail.serving.settings import explain
from longtail.state import Place, read_label_changes
from longtail.tables import DataError, DataFile, find_files
from longtail.tables.engine import Engine, Opened, engine
from longtail.tables.table import Part, Table, read_table
from longtail.tables.values import TEXT, in_words, is_nested, is_text

ROWS = 100_000
"""Rows of a file of answers, at most."""
_AT_ONCE = 512
"""Queries of a search."""
_K = 100
"""Labels of a query where its options do not say, at most."""
_MEMORY = 2 << 30
"""Bytes that reading may take; what a table that is no Parquet has beyond them lies in a temporary folder."""
_WRITTEN = "written:"
"""Before the name of an id's column, as it stands in a text file."""
_MANIFEST, _LABELS = "_batch.json", "_labels.jsonl"
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
class _Slice:
    """Rows of a file of queries, whose answers are one file."""

    number: int
    part: Part
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
    asked: Asked,
    *,
    release: str | None = None,
    state: Place | None = None,
    share: tuple[int, int] = (0, 1),
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Write the answers to every row of a table that are not there yet.

    Args:
        queries: file, directory, glob or URL of a table; columns are features by name, and what is kept.
        release: which; CURRENT by default.
        state: the service's, whose added and hidden labels count as they are when the batch begins; by default
            RELEASES/.state, and of a URL none.
        share: of the files of answers, (which, of how many), from 0.

    Raises:
        BatchError: the queries, the options or OUT; files that are done stay.
        LongtailIndexError, BundleError, UnservableReleaseError: what is wrong with the release.
        StoreError: what is wrong with the state.
        OSError: the disk.
    """
    found = Releases(releases)
    name = found.current() if release is None else release
    if name is None:
        raise BatchError(f"{releases}: expected a published release, found none: name one with --release")
    options = _checked(asked)
    try:
        files = _files(queries, out)
        about = [(Path(file.path).name, *file.version()) for file in files]
        manifest = {"release": name, **asdict(asked), "rows": ROWS, "queries": about}
        if (out / _MANIFEST).exists():
            _agree(out, manifest)
        with engine(memory=_MEMORY) as duck:
            with found.manifests(name) as folder:
                features = read_manifest(folder / BUNDLE).query_features
            table = _read(duck, files, str(queries), features, asked, say)
            slices = _slices(table, str(queries))
            mine = [each for each in slices if each.number % share[1] == share[0]]
            missing = [each for each in mine if not (out / each.name).exists()]
            if len(missing) < len(mine):
                say(f"{len(mine) - len(missing):,} of {len(mine):,} files are there")
            if not missing:
                return
            retriever = _loaded(found, name, options)
            _agree(out, manifest)
            retriever = retriever.with_changes(_label_changes(out, state or found.root / ".state"))
            for done, each in enumerate(missing, 1):
                started = perf_counter()
                _write(retriever, each, table, asked, options, out)
                rate = each.rows / (perf_counter() - started)
                say(f"{each.name}, {done:,} of {len(missing):,}: {each.rows:,} queries, {rate:,.0f} a second")
    except DataError as error:
        raise BatchError(str(error)) from error


def _files(queries: Path | str, out: Path) -> list[DataFile]:
    """Return the files of queries, none of which is an answer."""
    answers = out.resolve()
    found = find_files(queries)
    return [file for file in found if file.system is not None or answers not in Path(file.path).resolve().parents]


def _read(
    duck: Engine, files: Sequence[DataFile], where: str, features: Sequence[Feature], asked: Asked,
    say: Callable[[str], None],
) -> Table:  # fmt: skip
    """Return the table of queries, with the columns that are features, that are kept, and `exclude`."""
    expected = [feature.name for feature in features]
    ids = [feature.name for feature in features if feature.kind == "id"]
    needed = [*(asked.keep or ()), *([] if asked.exclude is None else [asked.exclude])]

    def wanted(opened: Opened, _: int) -> dict[str, tuple[str, str]]:
        if not {*expected} & {*opened.names}:
            found = ", ".join(opened.names)
            raise BatchError(
                f"{opened.file.name}: expected columns of the features {', '.join(expected)}, found {found}"
            )
        every = asked.keep is None
        names = [name for name in opened.names if name in expected or (every and not is_nested(opened.column(name)[1]))]
        read = {name: opened.column(name) for name in dict.fromkeys([*names, *needed])}
        as_written = [name for name in ids if name in read and read[name][1] == TEXT]
        return read | {_WRITTEN + name: (read[name][0], "VARCHAR") for name in as_written}

    table = read_table(duck, files, wanted, where, views=("parquet",))
    for part in table.parts:
        for name in table.kinds:
            part.opened.column(name.removeprefix(_WRITTEN))
    table.refuse_rejected()
    if asked.exclude is not None and not (is_text(kind := table.kinds[asked.exclude]) or kind.endswith("[]")):
        raise BatchError(f"{where}: column {asked.exclude!r}: expected lists of label ids, found {in_words(kind)}")
    if taken := [name for name in _kept(table, asked) if name in _ANSWERS]:
        raise BatchError(f"{where}: column {taken[0]!r}: expected other names than the answers' own; see --keep")
    table.find_types([name for name in table.kinds if name != asked.exclude])
    if absent := [name for name in expected if name not in table.kinds]:
        say(f"{where}: no column {', '.join(map(repr, absent))}: queries are answered as without these features")
    return table


def _kept(table: Table, asked: Asked) -> list[str]:
    """Return the columns that go into the answers."""
    if asked.keep is not None:
        return list(dict.fromkeys(asked.keep))
    return [name for name, kind in table.kinds.items() if not is_nested(kind) and not name.startswith(_WRITTEN)]


def _slices(table: Table, where: str) -> list[_Slice]:
    starts = [(part, start) for part in table.parts for start in range(0, part.rows, ROWS)]
    if not starts:
        raise BatchError(f"{where}: expected a table with rows, found none")
    return [_Slice(number, part, start, min(ROWS, part.rows - start)) for number, (part, start) in enumerate(starts)]


def _loaded(found: Releases, name: str, options: Mapping[str, Any]) -> Retriever:
    """Return a release that takes the options."""
    retriever = load_release(found, name)
    try:
        retriever.check_options(Query.model_validate({"features": {}, **options}))
    except InvalidRequestError as error:
        raise BatchError(f"--options: {error.field}: {error.message}") from error
    return retriever


def _label_changes(out: Path, place: Place) -> list[LabelRecord]:
    """Return the changes of labels that the first process of a batch found, and so all others too."""
    path = out / _LABELS
    if not path.exists():
        try:
            changes = read_label_changes(place)
        except FileNotFoundError:
            changes = LabelChanges()
        _add(path, "\n".join(map(record_json, changes.records())))
    return [read_record(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _agree(out: Path, manifest: dict[str, Any]) -> None:
    """Write what a batch is about, or compare it with what an earlier process has written."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / _MANIFEST
    if _add(path, json.dumps(manifest, indent=1, ensure_ascii=False)):
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    for name, value in json.loads(json.dumps(manifest)).items():
        if found.get(name) != value:
            raise BatchError(
                f"{path}: expected a batch of {name} {json.dumps(value)}, found {json.dumps(found.get(name))}: "
                "give another OUT, or remove this one"
            )


def _add(path: Path, content: str) -> bool:
    """Write a file whole unless another process has; returns whether it did."""
    working = path.parent / f".{path.name}.{uuid4().hex}"
    working.write_text(content, encoding="utf-8")
    try:
        os.link(working, path)
    except FileExistsError:
        return False
    finally:
        working.unlink()
    return True


def _checked(asked: Asked) -> dict[str, Any]:
    """Return the options that all queries share."""
    refused = [name for name in ("features", "vector", "explore", "explain") if name in asked.options]
    if refused:
        raise BatchError(f"--options: expected options of all queries alike, received {refused[0]}")
    options = {"k": _K, "display": False, **asked.options}
    try:
        Query.model_validate({"features": {}, **options})
    except ValidationError as error:
        raise BatchError(f"--options: {': '.join(filter(None, explain(error, Query, ELSEWHERE)))}") from error
    return options


def _write(
    retriever: Retriever, part: _Slice, table: Table, asked: Asked, options: Mapping[str, Any], out: Path
) -> None:
    """Answer the rows of a slice, in a file that is there whole or not at all."""
    kept = _kept(table, asked)
    found = table.rows_of(part.part, part.start, part.rows)
    schema = pa.schema([*found.select(kept).schema, *_ANSWERS.items()], {"release": retriever.name})
    working = out / f".{part.name}.{uuid4().hex}"
    try:
        with pq.ParquetWriter(working, schema) as writer:
            for start in range(0, part.rows, _AT_ONCE):
                rows = found.slice(start, _AT_ONCE)
                try:
                    answers = retriever.retrieve(_queries(rows, part, start, retriever, asked.exclude, options))
                except InvalidRequestError as error:
                    _, place, *path = (error.field or "queries.0").split(".")
                    where = f"{'.'.join(path)}: " if path else ""
                    raise part.wrong(start + int(place), f"{where}{error.message}") from error
                offsets = pa.array([0, *answers.ends_B], pa.int32())
                values = (retriever.catalogue.ids_of(answers.rows_N), pa.array(answers.scores_N, pa.float32()))
                lists = [pa.ListArray.from_arrays(offsets, each) for each in values]
                writer.write_table(pa.table([*rows.select(kept).combine_chunks().columns, *lists], schema=schema))
        working.replace(out / part.name)
    finally:
        working.unlink(missing_ok=True)


def _queries(
    rows: pa.Table, part: _Slice, first: int, retriever: Retriever, exclude: str | None, options: Mapping[str, Any]
) -> list[Query]:
    """Return a query for every row; `first` is the number of the first in its slice."""
    features = [each for each in retriever.manifest.query_features if each.name in rows.column_names]
    columns = {each.name: _as_json(rows[each.name], as_lists=each.kind == "history") for each in features}
    for each in features:
        if (written := _WRITTEN + each.name) in rows.column_names:
            known = retriever.vocabularies[str(each.vocabulary)]
            columns[each.name] = _as_known(rows[written].to_pylist(), columns[each.name], known)
    excluded = [None] * rows.num_rows if exclude is None else _as_json(rows[exclude], as_lists=True)
    queries = []
    for row, labels in enumerate(excluded):
        if isinstance(labels, str):
            found = f"column {exclude!r}: expected lists of label ids, found {describe(labels)}"
            raise part.wrong(first + row, found)
        given = {name: values[row] for name, values in columns.items()}
        try:
            query = Query.model_validate({**options, "features": given})
            query.exclude.extend(_Excluded.model_validate({"exclude": labels or []}).exclude)
            queries.append(query)
        except ValidationError as error:
            raise part.wrong(first + row, ": ".join(filter(None, explain(error, Query)))) from None
    return queries


def _as_known(texts: list[str | None], values: list[Any], vocabulary: Vocabulary) -> list[Any]:
    """Return ids of a text file as they are written where the release has them so, else what they spell."""
    words = [text or "" for text in texts]
    rows = zip(vocabulary.lookup_all(words), vocabulary.lookup_all(map(respelled, words)), strict=True)
    return [text if text and any(found) else value for text, value, found in zip(texts, values, rows, strict=True)]


def _as_json(column: pa.ChunkedArray, *, as_lists: bool = False) -> list[Any]:
    """Get the values of a column as a request gives them; with `as_lists`, text of a list as the list."""
    array = in_one_piece(column)
    kind = array.type
    if pa.types.is_timestamp(kind):
        array = array.cast(pa.timestamp("us", kind.tz), safe=False)
    values: list[Any] = as_float64(array).to_pylist()
    if as_lists and pa.types.is_string(kind):
        return [text if text is None or (found := parts_of(text, None)) is None else found for text in values]
    lists = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
    plain = pa.types.is_string(kind) or (
        lists and not (pa.types.is_nested(kind.value_type) or _is_odd(kind.value_type))
    )
    return values if plain else [*map(_json_value, values)]


def _is_odd(kind: pa.DataType) -> bool:
    return bool(pa.types.is_temporal(kind) or pa.types.is_decimal(kind) or pa.types.is_binary(kind))


def _json_value(value: Any) -> Any:
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return id_text(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes):  # text that its writer did not name as such
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, dict):  # of JSON lines, where an entry that a row lacks is null
        return {name: _json_value(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        pairs = value and isinstance(value[0], tuple)  # of a map
        return {str(id_text(key)): _json_value(each) for key, each in value} if pairs else [*map(_json_value, value)]
    return None if value != value else value
