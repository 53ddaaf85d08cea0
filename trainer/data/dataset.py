"""A data set: ids, pairs cut into train, valid and test, and feature tables, read from what a recipe names.

Legend: `Q` queries, `L` labels, `N` pairs.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from longtail.bundle.arrays import Array, Float64, Int32, Int64
from longtail.bundle.elapsed import TimeUnit
from longtail.bundle.labels import RESERVED_COLUMNS
from longtail.bundle.sets import distinct
from longtail.trainer.config import DataConfig
from longtail.trainer.config.rows import Places, shown
from longtail.trainer.data.columns import Bags
from longtail.trainer.data.files import DataFile, find_files
from longtail.trainer.data.ids import distinct_ids
from longtail.trainer.data.interactions import CONTEXT, nothing_in, read_interactions
from longtail.trainer.data.pairs import Pairs, Requests, occurrences
from longtail.trainer.data.problems import RowReport, settle
from longtail.trainer.data.requests import impressions_of, number_requests, versions_of
from longtail.trainer.data.scratch import IN_MEMORY, Scratch
from longtail.trainer.data.split import cut, keep_smallest_label, without_repeats
from longtail.trainer.data.tables import IdTable, read_feature_table
from longtail.trainer.data.xmc import read_xmc
from longtail.trainer.errors import DataError

_IDS_AT_ONCE = 1 << 20


class _DigestWriter(io.RawIOBase):
    """A file that keeps only the digest of what is written to it."""

    def __init__(self, digest: hashlib._Hash) -> None:
        self._digest = digest

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._digest.update(content)
        return len(content)


@dataclass(frozen=True)
class Dataset:
    """The data of a training job.

    Attributes:
        query_ids: string [Q], every query of every split and of the feature table.
        label_ids: string [L], the catalogue: labels of every split and of the feature table.
        query_table, label_table: feature tables, one row per id in the ids' order; None without a file. Of queries
            whose attributes change, one row per version, and after the last one without values.
        ordered: whether a query's pairs are in time order, so that a history is what came before.
        requests: the distinct ways in which queries are asked; None where it is one of each.
        contexts: distinct contexts, by the names of their columns; None without.
        impressions: label rows of what was shown with an interaction; None without.
        repeats: `drop` where a split holds every pair once, and so does what splits are put together to.
        report: what was left out of the files' rows, and what is wrong with them.
    """

    query_ids: pa.Array
    label_ids: pa.Array
    train: Pairs
    valid: Pairs
    test: Pairs
    query_table: pa.Table | None
    label_table: pa.Table | None
    ordered: bool
    requests: Requests | None = None
    contexts: pa.Table | None = None
    impressions: Bags | None = None
    read_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    repeats: str = "keep"
    report: RowReport = field(default_factory=RowReport)

    def label_counts(self) -> Int64:
        """Return training pairs of every label, whatever they weigh, int64 [L]."""
        return occurrences(self.train.labels, len(self.label_ids))

    def label_visits(
        self, *, one_label_per_query: bool, weighted: bool = False, chances_N: Float64 | None = None
    ) -> Float64:
        """Return expected visits to every label in an epoch, float64 [L]: its pairs, or 1/t of each where a query of t
        labels is visited with one of them.

        Args:
            weighted: a visit counts as much as its pair weighs, as its loss does: what π is of. Batches, and so
                negatives out of them, are of visits as such.
            chances_N: expected visits of every pair, where not all are visited alike, float64 [N].
        """
        pairs_N = chances_N
        if one_label_per_query:
            pairs_N = 1.0 / np.bincount(self.train.queries)[self.train.queries]
        if weighted and self.train.weights is not None:
            pairs_N = self.train.weights.astype(np.float64) * (1.0 if pairs_N is None else pairs_N)
        if pairs_N is None:
            return self.label_counts().astype(np.float64)
        return np.bincount(self.train.labels, pairs_N, minlength=len(self.label_ids)).astype(np.float64)

    @property
    def request_queries(self) -> Int32 | None:
        """Return query row of every way to ask, int32 [A]; None where it is one of each."""
        return None if self.requests is None else self.requests.queries

    def training_queries(self) -> int:
        """Return distinct queries with training pairs."""
        return len(distinct(self.train.queries))

    @property
    def time_unit(self) -> TimeUnit:
        """Return what the times of the pairs are in, as a bundle says it."""
        if self.report.dates:
            return "date"
        return "number" if self.report.unit is None else cast("TimeUnit", self.report.unit)

    def fingerprint(self) -> str:
        """Return hex sha256 of ids, pairs and feature tables: of all that training may depend on."""
        return self.computed_fingerprint

    @cached_property
    def computed_fingerprint(self) -> str:
        """As `fingerprint`, computed once."""
        digest = hashlib.sha256(f"ordered {self.ordered}\n".encode())
        for ids in (self.query_ids, self.label_ids):
            for start in range(0, len(ids), _IDS_AT_ONCE):
                lines = "\n".join(ids.slice(start, _IDS_AT_ONCE).to_pylist())
                digest.update(f"\n{lines}".encode() if start else lines.encode())
        for pairs in (self.train, self.valid, self.test):
            digest.update(f"\npairs {len(pairs)}\n".encode())
            for array in (pairs.queries, pairs.labels, pairs.weights, pairs.times):
                digest.update(b"none" if array is None else np.ascontiguousarray(array).data)
            for array in (pairs.events, pairs.requests, pairs.shown, pairs.objectives):
                digest.update(b"" if array is None else np.ascontiguousarray(array).data)
        if self.requests is not None:
            for array in (self.requests.queries, self.requests.contexts, self.requests.attributes):
                digest.update(b"none" if array is None else array.tobytes())
        if self.impressions is not None:
            digest.update(self.impressions.offsets.tobytes() + self.impressions.ids.tobytes())
        for table in (self.query_table, self.label_table, self.contexts):
            if table is not None:
                with pa.ipc.new_stream(_DigestWriter(digest), table.schema) as stream:
                    stream.write_table(table)
        return digest.hexdigest()

    def refit(self) -> Dataset:
        """This data set with valid moved into train."""
        train = self.train.followed_by(self.valid)
        train = without_repeats(train) if self.repeats == "drop" else train
        return replace(self, train=train, valid=self.valid.take(slice(0)))


def load_dataset(
    data: DataConfig, *, seed: int, strings: Sequence[str] = (), columns: Mapping[str, Sequence[str]] | None = None,
    context: Sequence[str] = (), objectives: Sequence[int] | None = None, scratch: Scratch = IN_MEMORY,
) -> Dataset:  # fmt: skip
    """Read every file the recipe names and cut the splits.

    Args:
        strings: columns of features that text formats must not read as numbers or dates.
        columns: columns that are needed of each feature table, `query` and `label`; None reads all.
        context: columns of the interactions that query features are read from.
        objectives: the objective of each type of `data.events.weights`; None without objectives.
        scratch: where what is made of interactions is put.

    Ids match by their text: the integer 7 of one file is the `7` of another.
    """
    read_at = datetime.now(UTC)
    places = {name: place for name in ("train", "valid", "test") if (place := getattr(data, name)) is not None}
    if data.split and len(places) == 3:
        raise DataError("data.split: expected at most one of valid and test as a file with it, received both")
    report = RowReport()
    raw, tables = read_files(
        data, places, report, strings=strings, columns=columns, now=read_at, context=context, scratch=scratch
    )
    pa.default_memory_pool().release_unused()  # what it keeps of the files is more than all that is left of them
    query_table, label_table = tables["query"], tables["label"]
    query_ids, queries = _ids_of(raw, "query", query_table, report, scratch)
    label_ids, labels = _ids_of(raw, "label", label_table, report, scratch)
    pairs = {
        name: _pairs(table, queries.pop(name), labels.pop(name), objectives, scratch) for name, table in raw.items()
    }
    pairs, shown = _with_shown(pairs, raw)
    versions, attributes = None, None
    if query_table is not None:
        attributes = None if data.valid_from else query_table.aligned(query_ids)
        if data.valid_from:
            attributes, versions = versions_of(data, query_table, query_ids, list(raw.values()))
    pairs, requests, contexts = number_requests(
        pairs, {name: _contexts(table, context) for name, table in raw.items()}, versions
    )
    del raw
    pa.default_memory_pool().release_unused()
    if data.reduction == "smallest":
        listed = None if label_table is None else label_table.ids
        pairs, label_ids = keep_smallest_label(pairs, label_ids, listed)
    if data.split:
        pairs = cut(pairs["train"], data.split, given=set(pairs), seed=seed, scratch=scratch) | {
            name: given for name, given in pairs.items() if name != "train"
        }
    nothing = pairs["train"].take(slice(0))
    for name in ("train", "valid", "test"):  # one after the other, that no more than one is there twice
        pairs[name] = pairs.pop(name, nothing).sorted(scratch)
    if data.repeats == "drop":
        before = sum(map(len, pairs.values()))
        pairs = {name: without_repeats(split, scratch) for name, split in pairs.items()}
        report.repeats = before - sum(map(len, pairs.values()))
    return Dataset(
        query_ids=query_ids,
        label_ids=label_ids,
        train=pairs["train"],
        valid=pairs["valid"],
        test=pairs["test"],
        query_table=attributes,
        label_table=None if label_table is None else label_table.aligned(label_ids),
        ordered=data.ordered,
        requests=requests,
        contexts=contexts,
        impressions=None if shown is None else impressions_of(shown, label_ids),
        read_at=read_at,
        repeats=data.repeats,
        report=report,
    )


def _ids_of(
    raw: dict[str, pa.Table], side: str, table: IdTable | None, report: RowReport, scratch: Scratch
) -> tuple[pa.Array, dict[str, Int32]]:
    """Return every id of some interactions and of a feature table, once; and the rows of them that the interactions of
    each split name, int32 [N]. Notes ids that the table has no row for."""
    chunks = [chunk for each in raw.values() for chunk in each[side].chunks]
    listed = [] if table is None else [table.ids]
    ids, rows_of = distinct_ids([*(chunk.dictionary for chunk in chunks), *listed], scratch)
    if table is not None:
        rows_of, of_table = rows_of[:-1], rows_of[-1]
        without = len(ids) - len(distinct(of_table))
        every = int(max(rows.max(initial=-1) for rows in rows_of)) + 1
        if without:
            report.unlisted["queries" if side == "query" else "labels"] = without, every
    of_chunks = iter(rows_of)
    return ids, {
        name: scratch.column(np.int32, (next(of_chunks)[chunk.indices.to_numpy()] for chunk in each[side].chunks))
        for name, each in raw.items()
    }


def _pairs(
    table: pa.Table, queries_N: Int32, labels_N: Int32, objectives: Sequence[int] | None, scratch: Scratch
) -> Pairs:
    def column(name: str, kind: type[np.generic]) -> Array | None:
        if name not in table.column_names:
            return None
        return scratch.column(kind, (chunk.to_numpy() for chunk in table[name].chunks))

    events = column("event", np.int32)
    return Pairs(
        queries_N,
        labels_N,
        column("weight", np.float32),
        column("time", np.float64),
        events,
        objectives=None if objectives is None or events is None else np.array(objectives, np.int32)[events],
    )


def _with_shown(pairs: dict[str, Pairs], raw: dict[str, pa.Table]) -> tuple[dict[str, Pairs], pa.ChunkedArray | None]:
    """Return pairs that say which row of the impressions is theirs, and the impressions of all splits; None without."""
    tables = {name: table for name, table in raw.items() if "shown" in table.column_names}
    if not tables:
        return pairs, None
    first = 0
    for name, table in tables.items():
        rows = np.arange(first, first + table.num_rows, dtype=np.int32)
        pairs, first = pairs | {name: replace(pairs[name], shown=rows)}, first + table.num_rows
    return pairs, pa.concat_tables([table.select(["shown"]) for table in tables.values()])["shown"]


def _contexts(table: pa.Table, names: Sequence[str]) -> pa.Table:
    return table.select([CONTEXT + name for name in names]).rename_columns(list(names))


def read_files(
    data: DataConfig, places: dict[str, Places], report: RowReport, *, strings: Sequence[str],
    columns: Mapping[str, Sequence[str]] | None, now: datetime, context: Sequence[str] = (),
    scratch: Scratch = IN_MEMORY,
) -> tuple[dict[str, pa.Table], dict[str, IdTable | None]]:  # fmt: skip
    """Return interactions by split, and the feature tables by side, `query` and `label`; None without a file.

    Args:
        report: gets what was read, what was left out, and why.
        strings: columns of features that text formats must not read as numbers or dates.
        columns: columns that are needed of each feature table; None reads all.
        context: columns of the interactions that query features are read from.
    """
    errors: list[str] = []
    files: dict[str, list[DataFile]] = {}
    for name, place in places.items():
        try:
            files[name] = find_files(place, data.format)
        except DataError as error:
            errors.append(str(error))
    of_queries: IdTable | None = None
    if data.format == "xmc":
        if errors:
            raise DataError("\n".join(errors))
        raw, of_queries = _read_xmc(files)
        report.read = sum(table.num_rows for table in raw.values())
    else:
        interactions = read_interactions(
            files, data, report, now=now, context=context, strings=strings, scratch=scratch
        )
        raw = interactions.tables
        errors += interactions.errors
    tables: dict[str, IdTable | None] = {"query": of_queries, "label": None}
    sides = (("query", data.queries, data.query_id), ("label", data.labels, data.label_id))
    for side, table_places, id_column in sides:
        if table_places is None or (side == "query" and data.format == "xmc"):
            continue
        try:
            table = read_feature_table(
                table_places,
                id_column,
                data,
                report,
                strings=strings,
                columns=None if columns is None else columns[side],
                valid_from=data.valid_from if side == "query" else None,
            )
        except DataError as error:
            errors.append(str(error))
        else:
            tables[side] = table
    rows = report.read + sum(len(table.ids) for table in tables.values() if table is not None)
    settle(report, data, errors, rows=rows)
    for name, of_split in files.items():
        if name not in raw:  # every row was bad, and so many may be
            raise DataError(nothing_in(of_split, report))
    _check_display(data, tables["label"])
    return raw, tables


def _check_display(data: DataConfig, label_table: IdTable | None) -> None:
    """Refuse display columns that the label table lacks or that a bundle's own columns are named like."""
    columns = [] if label_table is None else label_table.table.column_names
    for name in data.display:
        if name not in columns:
            raise DataError(
                f"data.display: expected columns of {shown(data.labels) if data.labels else 'a label table'}, "
                f"found {', '.join(columns) or 'none'}, received {name!r}"
            )
        if name in RESERVED_COLUMNS:
            raise DataError(f"data.display: expected names other than {', '.join(RESERVED_COLUMNS)}, received {name!r}")


def _read_xmc(files: dict[str, list[DataFile]]) -> tuple[dict[str, pa.Table], IdTable]:
    """Return pairs by split, and all rows' features."""
    every = [file for of_split in files.values() for file in of_split]
    stems = [Path(file.path).stem for file in every]
    if len(set(stems)) < len(stems):
        raise DataError(f"data: expected files of distinct names, which name their rows, received {', '.join(stems)}")
    raw, features = {}, []
    for split, of_split in files.items():
        read = [read_xmc(Path(file.path)) for file in of_split]
        raw[split] = pa.concat_tables([rows.pairs for rows in read]).unify_dictionaries().combine_chunks()
        features += [rows.queries for rows in read]
        if not raw[split].num_rows:
            raise DataError(f"{of_split[0].name}: expected at least one interaction, found none")
    table = pa.concat_tables(features)
    return raw, IdTable(table["query"].combine_chunks(), table.select(["features"]))
