"""Read label vectors, counts and display columns from files into a bundle.

Legend: `L` labels, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from longtail.bundle import Bundle, ChosenTogether, TrainingFacts, bundle_from_vectors
from longtail.bundle.arrays import Float32, Float64
from longtail.bundle.labels import RESERVED_COLUMNS
from longtail.bundle.manifest import LogColumns
from longtail.bundle.vectors import Similarity
from longtail.index.building.pairs import read_pairs
from longtail.index.errors import VectorsError
from longtail.tables import DataError, find_files
from longtail.tables.database import Database, OpenedFile, open_database
from longtail.tables.table import Table, id_expression, open_file, read_table
from longtail.tables.values import to_number, type_name

_NOISE = "noise"


@dataclass(frozen=True)
class VectorFiles:
    """Files of labels, their vectors and example queries, and names of the columns.

    Args:
        labels: file, folder, glob or URL of a table with the columns `id`, `count`, `vector` (unless `vectors` is
            given), and optionally `noise`, the noise ν of training, numbers above 0, without which ν is the label
            frequency π; every other column is shown in answers.
        vectors: a `.npy` file of float32 or float16 [L, D], rows in the order of `labels`.
        queries: a table with a column `vector`, or a `.npy` file [C, D]. None: 1,000 label vectors, by popularity.
        temperature: divisor of u·v in training, or of |u − v|² with `l2`.
        query_tower, label_tower: ONNX models of float inputs. Without the first, requests give vectors.
        pairs: log of choices, from which the term of co-occurrence is made; without it there is no term. Its columns
            are `label_id`, `query_id` or one column of another name, and optionally `time`. Without `time`, rows are
            in order of time. If `queries` has the column of query ids, held-out pairs choose ω.
        remembered: last labels to keep of each query of `pairs`; 0 keeps none.
    """

    labels: Path | str
    vectors: Path | None = None
    queries: Path | str | None = None
    id: str = "label_id"
    vector: str = "vector"
    count: str = "count"
    similarity: Similarity = "dot"
    temperature: float = 1.0
    query_tower: Path | None = None
    label_tower: Path | None = None
    pairs: Path | str | None = None
    remembered: int = 50

    def read(self, name: str, progress: Callable[[str], None]) -> Bundle:
        """Create a bundle with this name; raises VectorsError, BundleError or OSError."""
        try:
            with open_database() as duck:
                table = self._table(duck)
                if empty_files := duck.empty_in_words():
                    progress(f"labels: {empty_files[0].lower()}{empty_files[1:]}")
                if reserved := [
                    column for column in RESERVED_COLUMNS if column in table.kinds and column not in self._read
                ]:
                    raise VectorsError(f"{self.labels}: columns {reserved} are not allowed to be shown; rename them")
                columns = [column for column in table.kinds if column not in self._read]
                ids = table.ids(self.id)
                counts = self._counts(table)
                noise = self._numbers(table, _NOISE) if _NOISE in table.kinds else None
                vectors = _vectors(table, self.vector, self.labels) if self.vectors is None else _array(self.vectors)
                display = table.arrow(columns) if columns else None
                log, timed = self._log_columns(duck)
            queries, query_ids = self._queries(vectors.shape[1], log)
        except DataError as error:
            raise VectorsError(str(error)) from error
        if ids.null_count:
            raise VectorsError(
                f"{self.labels}, column {self.id!r}: expected an id in every row, found {ids.null_count} nulls"
            )
        if queries is None:
            progress(
                "queries: label vectors, drawn by popularity; recall of queries that lie elsewhere is not measured: "
                "--queries gives examples"
            )
        pairs = None if self.pairs is None else self._pairs(log, timed, query_ids, progress)
        models = [None if path is None else path.read_bytes() for path in (self.query_tower, self.label_tower)]
        facts = TrainingFacts(
            ids, counts.astype(np.int64), self.similarity, self.temperature, noise, display=display, pairs=pairs
        )
        return bundle_from_vectors(
            vectors, facts, name=name, queries=queries, query_tower=models[0], label_tower=models[1]
        )

    @property
    def _read(self) -> list[str]:
        """Return the columns that answers do not show."""
        return [self.id, self.count, self.vector, _NOISE]

    def _table(self, duck: Database) -> Table:
        needed = [self.id, self.count, *([] if self.vectors else [self.vector])]

        def columns(opened: OpenedFile, _: int) -> dict[str, tuple[str, str]]:
            for name in needed:
                if name not in opened.names:
                    raise VectorsError(
                        f"{opened.file.name}: expected a column {name!r}, found {', '.join(opened.names)}: "
                        f"SELECT … AS {name} FROM … names another"
                    )
            expressions = {name: opened.column(name) for name in (*needed, *opened.names)}
            return expressions | {self.id: id_expression(opened, self.id, *expressions[self.id])}

        files = find_files(self.labels)
        if self.vectors is not None and len(files) > 1:
            raise VectorsError(
                f"{self.labels}: {len(files)} files are not allowed with vectors in {self.vectors}, because the order "
                f"of their rows is that of the files' names, from {files[0].name} to {files[-1].name}; use one file, "
                f"or a column {self.vector!r}"
            )
        table = read_table(duck, files, columns, str(self.labels))
        table.refuse_rejected()
        table.find_types([name for name in table.kinds if name not in (self.id, self.vector)])
        return table

    def _counts(self, table: Table) -> Float64:
        counts = self._numbers(table, self.count)
        # Beyond 2⁵³ float64 skips whole numbers.
        is_count = (counts >= 0) & (counts == np.floor(counts)) & (counts <= 2**53)
        if not is_count.all():
            row = int(np.argmin(is_count))
            raise VectorsError(
                f"{self.labels}, column {self.count!r}: expected whole numbers from 0 on, such as pairs, found "
                f"{counts[row]:g} in row {row}"
            )
        return counts

    def _numbers(self, table: Table, name: str) -> Float64:
        cell, kind = table.column(name), table.kinds[name]
        if (number := to_number(cell, kind)) is None:
            raise VectorsError(f"{self.labels}, column {name!r}: expected numbers, found {type_name(kind)}")
        numbers = table.database.arrow(f"SELECT {number}::DOUBLE AS value FROM {table.name} ORDER BY rowid")["value"]
        if numbers.null_count:
            raise VectorsError(
                f"{self.labels}, column {name!r}: expected a number in every row, found {numbers.null_count:,} without"
            )
        return np.asarray(numbers, np.float64)

    def _log_columns(self, duck: Database) -> tuple[LogColumns, bool]:
        """Return the columns of `pairs`, and whether it has times."""
        log = LogColumns()
        if self.pairs is None:
            return log, True
        names = open_file(duck, find_files(self.pairs)[0]).names
        others = [name for name in names if name not in (log.label_id, log.timestamp)]
        if log.query_id not in others:
            if len(others) != 1:
                raise VectorsError(
                    f"{self.pairs}: expected query ids in {log.query_id!r}, or in the only column besides "
                    f"{log.label_id!r} and {log.timestamp!r}, found {', '.join(names)}: SELECT … FROM … chooses columns"
                )
            log = LogColumns(query_id=others[0])
        return log, log.timestamp in names

    def _pairs(
        self, log: LogColumns, timed: bool, query_ids: pa.Array | None, progress: Callable[[str], None]
    ) -> ChosenTogether:
        """Read `pairs`; raises PriorsError."""
        assert self.pairs is not None
        rows = read_pairs(self.pairs, log, progress, timed=timed).sort_by("time")
        if query_ids is None:
            progress(
                "pairs: the weight of co-occurrence is 0 unless requests give it; queries with ids would choose it"
            )
        table = pa.table({"query_id": rows["id"], "label_id": rows["label"], "time": rows["time"]})
        table = table if timed else table.drop_columns(["time"])
        return ChosenTogether(table, log, self.remembered, query_ids)

    def _queries(self, dim: int, log: LogColumns) -> tuple[Float32 | None, pa.Array | None]:
        """Read vectors of queries, and their ids, if pairs have the same column."""
        if self.queries is None:
            return None, None
        ids = None
        if str(self.queries).endswith(".npy") and "://" not in str(self.queries):
            array = _array(Path(self.queries))
        else:
            with open_database() as duck:
                columns = partial(self._query_columns, log.query_id)
                table = read_table(duck, find_files(self.queries), columns, str(self.queries))
                array = _vectors(table, self.vector, self.queries)
                if log.query_id in table.kinds:
                    ids = table.arrow([log.query_id])[log.query_id].combine_chunks()
        if array.shape[1] != dim:
            raise VectorsError(
                f"{self.queries}: expected vectors of {dim} numbers, the labels', found {array.shape[1]}"
            )
        return array, ids

    def _query_columns(self, name: str, opened: OpenedFile, _: int) -> dict[str, tuple[str, str]]:
        expressions = {self.vector: opened.column(self.vector)}
        if self.pairs is not None and name in opened.names:
            expressions[name] = id_expression(opened, name, *opened.column(name))
        return expressions


def _vectors(table: Table, name: str, source: Path | str) -> Float32:
    """Return a column of lists of numbers as float32 [L, D]."""
    kind = table.kinds[name]
    if not kind.endswith("]"):
        raise VectorsError(f"{source}, column {name!r}: expected lists of numbers, found {type_name(kind)}")
    column = table.arrow([name])[name].combine_chunks()
    if not len(column):
        raise VectorsError(f"{source}: expected rows, found none")
    try:
        lists = column.cast(pa.list_(pa.float32()))
    except pa.ArrowException as error:
        raise VectorsError(f"{source}, column {name!r}: expected lists of numbers, found {type_name(kind)}") from error
    dims = set(lists.value_lengths().to_pylist())
    if len(dims) != 1 or not (dim := dims.pop()) or lists.flatten().null_count:
        raise VectorsError(f"{source}, column {name!r}: expected lists of one length and no nulls, found others")
    return np.asarray(lists.flatten(), np.float32).reshape(-1, dim)


def _array(path: Path) -> Float32:
    """Read a matrix of numbers; raises VectorsError."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise VectorsError(f"{path}: expected an array of .npy: {error}") from error
    if not isinstance(array, np.ndarray):
        raise VectorsError(f"{path}: expected one array, .npy, found several")
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating):
        raise VectorsError(f"{path}: expected floats [rows, D], found {array.dtype} {list(array.shape)}")
    return np.ascontiguousarray(array, np.float32)
