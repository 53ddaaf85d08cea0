"""A data set: ids, pairs cut into train, valid and test, and feature tables, read from what a recipe names.

Legend: `Q` queries, `L` labels, `N` pairs.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Float64, Int32, Int64
from longtail.bundle.labels import RESERVED_COLUMNS
from longtail.trainer.config import DataConfig, Recipe
from longtail.trainer.data.askings import ask, impressions_of, versions_of
from longtail.trainer.data.columns import Bags
from longtail.trainer.data.pairs import Asked, Pairs
from longtail.trainer.data.split import cut, keep_smallest_label
from longtail.trainer.data.tables import (
    CONTEXT,
    file_format,
    ids_of,
    no_interactions,
    read_interactions,
    read_table,
    stored_id_type,
)
from longtail.trainer.data.xmc import read_xmc
from longtail.trainer.errors import DataError

_ID = "__id"
"""Column of a feature table that holds its ids as strings, while the table is being read."""


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
        train, valid, test: pairs; valid and test may be empty.
        query_table, label_table: feature tables, one row per id in the ids' order; None without a file. Of queries
            whose attributes change, one row per version, and after the last one without values.
        ordered: whether a query's pairs are in time order, so that a history is what came before.
        asked: the ways in which queries are asked; None where it is one of each.
        contexts: distinct contexts, by the names of their columns; None without.
        impressions: label rows of what was shown with an interaction; None without.
        read_at: when the files were read, UTC.
    """

    query_ids: pa.Array
    label_ids: pa.Array
    train: Pairs
    valid: Pairs
    test: Pairs
    query_table: pa.Table | None
    label_table: pa.Table | None
    ordered: bool
    asked: Asked | None = None
    contexts: pa.Table | None = None
    impressions: Bags | None = None
    read_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def label_counts(self) -> Int64:
        """Training pairs of every label, int64 [L]."""
        return np.bincount(self.train.labels, minlength=len(self.label_ids)).astype(np.int64)

    def label_visits(self, *, one_label_per_query: bool) -> Float64:
        """Expected visits to every label in an epoch, float64 [L]: its pairs, or 1/t of each where a query of t
        labels is visited with one of them.
        """
        pairs_N = 1.0 / np.bincount(self.train.queries)[self.train.queries] if one_label_per_query else None
        return np.bincount(self.train.labels, pairs_N, minlength=len(self.label_ids)).astype(np.float64)

    @property
    def askers(self) -> Int32 | None:
        """Query row of every way to ask, int32 [A]; None where it is one of each."""
        return None if self.asked is None else self.asked.queries

    def training_queries(self) -> int:
        """Distinct queries with training pairs."""
        return len(np.unique(self.train.queries))

    def fingerprint(self) -> str:
        """Hex sha256 of ids, pairs and feature tables: of all that training may depend on."""
        digest = hashlib.sha256(f"ordered {self.ordered}\n".encode())
        for ids in (self.query_ids, self.label_ids):
            digest.update("\n".join(ids.to_pylist()).encode())
        for pairs in (self.train, self.valid, self.test):
            digest.update(f"\npairs {len(pairs)}\n".encode())
            for array in (pairs.queries, pairs.labels, pairs.weights, pairs.times):
                digest.update(b"none" if array is None else array.tobytes())
            for array in (pairs.asked, pairs.shown):
                digest.update(b"" if array is None else array.tobytes())
        if self.asked is not None:
            for array in (self.asked.queries, self.asked.contexts, self.asked.attributes):
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
        return replace(self, train=self.train.followed_by(self.valid), valid=self.valid.take(slice(0)))


def read_dataset(recipe: Recipe) -> Dataset:
    """The data of a recipe, with the columns that its features are read from.

    Raises:
        DataError: as `load_dataset`.
    """
    return load_dataset(recipe.data, seed=recipe.seed, strings=recipe.string_columns, context=recipe.context_columns)


def load_dataset(data: DataConfig, *, seed: int, strings: Sequence[str] = (), context: Sequence[str] = ()) -> Dataset:
    """Read every file the recipe names and cut the splits.

    Args:
        data: names the files.
        seed: what a random split is drawn by.
        strings: columns of features that text formats must not read as numbers or dates.
        context: columns of the interactions that query features are read from.

    Ids match by their text: integer 7 in Parquet, `7` in CSV. Text formats have no types; Parquet files must
    agree whether a column of ids holds integers or strings, since they would match by accident otherwise.

    Raises:
        DataError: what `read_interactions` raises; ids that are integers in one Parquet file and strings in
            another; an id twice in a feature table; a display column the label table does not have; `valid_from` and
            `timestamp` of which one is numbers and one timestamps.
    """
    read_at = datetime.now(UTC)
    files = {name: path for name in ("train", "valid", "test") if (path := getattr(data, name)) is not None}
    if data.split and len(files) == 3:
        raise DataError("data.split: expected at most one of valid and test as a file beside it, received both")
    raw, query_table = _read(data, files, strings, context)
    label_table = _feature_table(data.labels, data.label_id, strings)
    _check_id_types(data, files)
    _check_display(data, label_table)
    query_ids = _union([table["query"] for table in raw.values()], query_table)
    label_ids = _union([table["label"] for table in raw.values()], label_table)
    pairs = {name: _pairs(table, query_ids, label_ids) for name, table in raw.items()}
    shown = [table.select(["shown"]) for table in raw.values() if "shown" in table.column_names]
    first = 0
    for name, table in raw.items():
        if "shown" in table.column_names:
            rows = np.arange(first, first + table.num_rows, dtype=np.int32)
            pairs[name], first = replace(pairs[name], shown=rows), first + table.num_rows
    versions = None
    if data.valid_from is None or query_table is None:
        query_table = _aligned(query_table, query_ids)
    else:
        query_table, versions = versions_of(data, query_table, _ID, query_ids, list(raw.values()))
    contexts = {name: _contexts(table, context) for name, table in raw.items()}
    pairs, asked, context_table = ask(pairs, contexts, versions)
    if data.reduction == "smallest":
        listed = None if label_table is None else label_table[_ID].combine_chunks()
        pairs, label_ids = keep_smallest_label(pairs, label_ids, listed)
    if data.split:
        pairs = cut(pairs["train"], data.split, given=set(pairs), seed=seed) | {
            name: given for name, given in pairs.items() if name != "train"
        }
    impressions = impressions_of(pa.concat_tables(shown)["shown"], label_ids) if shown else None
    nothing = pairs["train"].take(slice(0))
    return Dataset(
        query_ids=query_ids,
        label_ids=label_ids,
        train=pairs["train"].sorted(),
        valid=pairs.get("valid", nothing).sorted(),
        test=pairs.get("test", nothing).sorted(),
        query_table=query_table,
        label_table=_aligned(label_table, label_ids),
        ordered=data.timestamp is not None or (data.split is not None and data.split.strategy == "leave_last_out"),
        asked=asked,
        contexts=context_table,
        impressions=impressions,
        read_at=read_at,
    )


def _check_id_types(data: DataConfig, files: dict[str, Path]) -> None:
    """Refuse a column of ids that is integers in one Parquet file and strings in another."""
    for name, table in ((data.query_id, data.queries), (data.label_id, data.labels)):
        places = [(path, file_format(path, data)) for path in files.values()]
        if table is not None:
            places.append((table, file_format(table, data.model_copy(update={"format": "auto"}))))
        types = {path: found for path, kind in places if (found := stored_id_type(path, name, kind)) is not None}
        if len(set(types.values())) > 1:
            found = ", ".join(f"{kind} in {path}" for path, kind in types.items())
            raise DataError(f"column {name!r}: expected ids of one type in all Parquet files, found {found}")


def _check_display(data: DataConfig, label_table: pa.Table | None) -> None:
    """Refuse display columns that the label table lacks or that a bundle's own columns are named like."""
    columns = [] if label_table is None else [name for name in label_table.column_names if name != _ID]
    for name in data.display:
        if name not in columns:
            raise DataError(
                f"data.display: expected columns of {data.labels or 'a label table'}, "
                f"found {', '.join(columns) or 'none'}, received {name!r}"
            )
        if name in RESERVED_COLUMNS:
            raise DataError(f"data.display: expected names other than {', '.join(RESERVED_COLUMNS)}, received {name!r}")


def _read(
    data: DataConfig, files: dict[str, Path], strings: Sequence[str], context: Sequence[str]
) -> tuple[dict[str, pa.Table], pa.Table | None]:
    """Interactions by split, and the feature table of queries: each file is read once."""
    if file_format(data.train, data) != "xmc":
        raw = {
            name: read_interactions(path, data, context=context, strings=strings, impressions=name != "test")
            for name, path in files.items()
        }
        return raw, _feature_table(data.queries, data.query_id, strings, versions=data.valid_from is not None)
    stems = [path.stem for path in files.values()]
    if len(set(stems)) < len(stems):
        raise DataError(f"data: expected files of distinct names, which name their rows, received {', '.join(stems)}")
    raw, tables = {}, []
    for name, path in files.items():
        rows = read_xmc(path)
        if rows.pairs.num_rows == 0:
            raise no_interactions(path)
        raw[name] = rows.pairs
        tables.append(rows.queries.rename_columns([_ID, "features"]))
    return raw, pa.concat_tables(tables)


def _feature_table(
    path: Path | None, id_column: str, strings: Sequence[str], *, versions: bool = False
) -> pa.Table | None:
    """A feature table with its ids, as strings, in the column `_ID`; distinct unless there are versions of a row."""
    if path is None:
        return None
    table = read_table(path, strings=[id_column, *strings])
    ids = ids_of(table, id_column, path)
    if not versions and len(ids.dictionary) != len(ids):
        twice = pc.value_counts(ids.dictionary_decode())
        worst = twice[int(np.asarray(twice.field("counts")).argmax())].as_py()
        raise DataError(
            f"{path}: column {id_column!r}: expected distinct ids, found {worst['values']!r} {worst['counts']} times"
        )
    return table.append_column(_ID, ids.dictionary_decode())


def _union(columns: list[pa.ChunkedArray], table: pa.Table | None) -> pa.Array:
    """Every id of some pairs and of a feature table, once."""
    parts = [chunk.dictionary for column in columns for chunk in column.chunks]
    if table is not None:
        parts.append(table[_ID].combine_chunks())
    return pc.unique(pa.concat_arrays(parts))


def _contexts(table: pa.Table, names: Sequence[str]) -> pa.Table:
    return table.select([CONTEXT + name for name in names]).rename_columns(list(names))


def _pairs(table: pa.Table, query_ids: pa.Array, label_ids: pa.Array) -> Pairs:
    def rows(name: str, ids: pa.Array) -> Int32:
        column = table[name].combine_chunks()
        found = np.asarray(pc.index_in(column.dictionary, value_set=ids), np.int32)
        mapped: Int32 = found[column.indices.to_numpy()]
        return mapped

    return Pairs(
        rows("query", query_ids),
        rows("label", label_ids),
        table["weight"].to_numpy() if "weight" in table.column_names else None,
        table["time"].to_numpy() if "time" in table.column_names else None,
    )


def _aligned(table: pa.Table | None, ids: pa.Array) -> pa.Table | None:
    """The feature table in the order of `ids`; ids without a row get nulls."""
    if table is None:
        return None
    rows = pc.index_in(ids, value_set=table[_ID].combine_chunks())
    values = table.drop_columns([_ID]).combine_chunks()
    in_order = len(ids) == len(values) and rows.equals(pa.array(np.arange(len(ids)), rows.type))
    return values if in_order else values.take(rows)
