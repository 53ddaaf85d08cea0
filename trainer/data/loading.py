"""Read a recipe's files as a data set: ids, feature tables and pairs in splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.labels import RESERVED_COLUMNS
from longtail.tables import DataFile, find_files
from longtail.tables.database import Database, open_database
from longtail.tables.times import UNITS, Clock
from longtail.tables.values import double
from longtail.trainer.config import DataConfig
from longtail.trainer.config.rows import name_sources
from longtail.trainer.data.columns import Bags
from longtail.trainer.data.cut import column_names, cut, keep_smallest_label, without_repeats
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.ids import IdTexts, describe_example
from longtail.trainer.data.interactions import InteractionLog, check_log, read_log
from longtail.trainer.data.pairs import Pairs, Requests
from longtail.trainer.data.problems import RowReport, refuse_problems
from longtail.trainer.data.tables import IdTable, check_distinct, one_chunk, read_feature_table
from longtail.trainer.errors import DataError

MOST_SHOWN = 32
"""Number of impressions read per interaction, from the first."""
_BATCH = 1 << 20
_SPLITS = ("train", "valid", "test")
_ARRAYS: dict[str, tuple[str, type[np.generic]]] = {
    "query": ("queries", np.int32),
    "label": ("labels", np.int32),
    "weight": ("weights", np.float32),
    "time": ("times", np.float64),
    "event": ("events", np.int32),
    "request": ("requests", np.int32),
    "shown": ("shown_rows", np.int32),
    "objective": ("objectives", np.int32),
}
"""Attribute and type of `Pairs` for each column of the table of pairs."""


def load_dataset(
    data: DataConfig, *, seed: int, columns: Mapping[str, Sequence[str]] | None = None, context: Sequence[str] = (),
    objectives: Sequence[int] | None = None, folder: Path | None = None,
) -> Dataset:  # fmt: skip
    """Read every file of the recipe and cut the splits.

    Ids match by their text: the integer 7 of one file equals the `7` of another.

    Args:
        columns: columns needed from each feature table, `query` and `label`; None reads all.
        context: interaction columns with values of query features.
        objectives: the objective of each type of `data.events.weights`; None without objectives.
        folder: folder for memory-mapped arrays of pairs; reading then uses at most `data.memory`. None keeps all data
            in memory.
    """
    if data.split and data.valid and data.test:
        raise DataError("data.split: expected at most one of valid and test as a file with it, received both")
    # DuckDB gets half of the limit, because reading needs memory outside of DuckDB too.
    with open_database(folder, None if folder is None else data.memory // 2) as database:
        loading = _Loading(database, data, columns, context, folder)
        report = loading.report
        log, tables = loading.read_files()
        query_table, label_table = tables["query"], tables["label"]
        ids = loading.encode_ids(log, tables)
        queries, labels = ids["query"], ids["label"]
        requests = contexts = attributes = None
        if query_table is not None and query_table.dates is None:
            attributes = query_table.take(one_chunk(queries["listed"]))
        if context or data.valid_from:
            requests, contexts, attributes = loading.number_requests(query_table, attributes)
        if objectives is not None and "event" in column_names(database, loading.pairs):
            listed = f"list_extract({[*objectives]}, event + 1)::INTEGER"
            loading.replace_pairs(f"SELECT *, {listed} AS objective FROM {loading.pairs}")
        if data.reduction == "smallest":
            loading.pairs, labels = keep_smallest_label(database, loading.pairs, labels)
        label_ids = one_chunk(labels["id"])
        impressions = loading.read_impressions(label_ids) if "shown" in column_names(database, loading.pairs) else None
        if data.split:
            loading.pairs, remarks = cut(database, loading.pairs, data.split, separate={*loading.files}, seed=seed)
            report.remarks += remarks
        else:
            loading.replace_pairs(f"SELECT *, row_id AS tie FROM {loading.pairs}", stored=False)
        if data.repeats == "drop":
            loading.pairs, report.repeats = without_repeats(database, loading.pairs)
        train, valid, test = map(loading.read_split, _SPLITS)
        return Dataset(
            query_ids=one_chunk(queries["id"]),
            label_ids=label_ids,
            train=train,
            valid=valid,
            test=test,
            query_table=attributes,
            label_table=None if label_table is None else label_table.take(one_chunk(labels["listed"])),
            ordered=data.ordered,
            requests=requests,
            contexts=contexts,
            impressions=impressions,
            read_at=loading.read_at,
            repeats=data.repeats,
            report=report,
        )


@dataclass
class _Loading:
    """Build a data set from DuckDB tables, which each step replaces.

    Attributes:
        columns, context, folder: the arguments of `load_dataset`.
        pairs: name of the table of pairs, with `row_id`, `split` (0 train, 1 valid, 2 test), rows `query` and `label`,
            and optionally `time`, `weight`, `event`, `objective`, `request` and `shown`; `tie` orders pairs of the same
            time.
    """

    database: Database
    data: DataConfig
    columns: Mapping[str, Sequence[str]] | None
    context: Sequence[str]
    folder: Path | None
    read_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    report: RowReport = field(default_factory=RowReport)
    errors: list[str] = field(default_factory=list)
    files: dict[str, list[DataFile]] = field(default_factory=dict)
    texts: dict[str, IdTexts] = field(default_factory=dict)
    pairs: str = ""

    def read_files(self) -> tuple[InteractionLog, dict[str, IdTable | None]]:
        data, report, errors, columns = self.data, self.report, self.errors, self.columns
        # Errors are collected, so that one run names the problems of all files.
        for name in _SPLITS:
            if (source := getattr(data, name)) is None:
                continue
            try:
                self.files[name] = find_files(source)
            except DataError as error:
                errors.append(str(error))
        tables: dict[str, IdTable | None] = {"query": None, "label": None}
        log = read_log(self.database, self.files, data, report, errors, now=self.read_at, context=self.context)
        sides = (("query", data.queries, data.query_id), ("label", data.labels, data.label_id))
        for side, source, id_column in sides:
            if source is None:
                continue
            try:
                tables[side] = read_feature_table(
                    self.database, source, id_column, data, report,
                    columns=None if columns is None else columns[side],
                    valid_from=data.valid_from if side == "query" else None,
                )  # fmt: skip
            except DataError as error:
                errors.append(str(error))
        report.remarks += filter(None, [self.database.empty_in_words()])
        return log, tables

    def encode_ids(self, log: InteractionLog, tables: dict[str, IdTable | None]) -> dict[str, pa.Table]:
        """Number ids by first occurrence, and check every row.

        Returns:
            `id` and `listed`, its row of the feature table or null, by side.
        """
        database, data, report, errors = self.database, self.data, self.report, self.errors
        if not log.table.rows:
            self._refuse(log, tables)
        texts, id_columns = self.texts, {"query": data.query_id, "label": data.label_id}
        for side, table in tables.items():
            rows = f"SELECT {log.table.column(side)} AS text, rowid AS row_id FROM {log.table.name} WHERE {log.alive}"
            texts[side] = IdTexts.number(database, rows, None if table is None else table.listed, data.placeholders)
            if table is not None and table.dates is None:
                try:
                    check_distinct(table, texts[side], id_columns[side], data, report)
                except DataError as error:
                    errors.append(str(error))
        self.pairs = check_log(log, data, report, errors, texts["query"], texts["label"])
        database.run(f"DROP TABLE {log.table.name}")  # later steps read codes, not texts
        self._refuse(log, tables)
        (remaining,) = database.row(f"SELECT count(*) FROM {self.pairs}")
        gaps = remaining < log.table.rows - report.early  # a bad row may have been the only one of its id
        ids, cells, joins = {}, [], []
        for side, side_texts in texts.items():
            if gaps:
                rows = side_texts.without_gaps(self.pairs, side)
                cells.append(f"{rows}.code AS {side}")
                joins.append(f"JOIN {rows} ON pairs.{side} = {rows}.before")
                texts[side] = side_texts = replace(side_texts, ids=rows)
            ids[side] = database.arrow(f"SELECT id, listed FROM {side_texts.ids} ORDER BY code")
            (every,) = database.row(f"SELECT count(row_id) FROM {side_texts.ids}")
            is_listed = ids[side]["listed"].is_valid()
            unlisted = ids[side].filter(pc.invert(is_listed))["id"]
            if len(unlisted) and tables[side] is not None:
                listed_ids = ids[side].filter(is_listed)["id"]
                example = describe_example(unlisted, listed_ids, nothing=len(unlisted) == every)
                report.unlisted["queries" if side == "query" else "labels"] = len(unlisted), every, example
        split = f"list_extract({[_SPLITS.index(split) for split in log.splits]}, file + 1) AS split"
        replaced = f"REPLACE ({', '.join(cells)})" if gaps else ""
        self.replace_pairs(
            f"SELECT pairs.* EXCLUDE (file) {replaced}, {split} FROM {self.pairs} AS pairs {' '.join(joins)}", gaps
        )
        return ids

    def _refuse(self, log: InteractionLog, tables: dict[str, IdTable | None]) -> None:
        """Raise DataError with all problems of the data, if any is fatal; then check `data.display`."""
        data, report, errors = self.data, self.report, self.errors
        rows = report.read + sum(table.table.num_rows for table in tables.values() if table is not None)
        splits: set[str] = set()
        if self.pairs:
            files = self.database.rows(f"SELECT DISTINCT file FROM {self.pairs}")
            splits = {log.splits[file] for (file,) in files}
        empty = [files for split, files in self.files.items() if split not in splits]
        fatal = [problem for problem in report.problems if problem.fatal]
        if not errors and not fatal:
            errors = [describe_empty(files, report) for files in empty]
        if errors or fatal:
            refuse_problems(report, data, list(dict.fromkeys(errors)), fatal, rows=rows)
        if empty:  # every row of a split was bad, and `max_bad_rows` allows that
            raise DataError(describe_empty(empty[0], report))
        columns = [] if (labels := tables["label"]) is None else labels.table.column_names
        for name in data.display:
            if name not in columns:
                source = name_sources(data.labels) if data.labels else "a label table"
                names = ", ".join(columns) or "none"
                raise DataError(f"data.display: expected columns of {source}, found {names}, received {name!r}")
            if name in RESERVED_COLUMNS:
                raise DataError(
                    f"data.display: expected names other than {', '.join(RESERVED_COLUMNS)}, received {name!r}"
                )

    def number_requests(
        self, table: IdTable | None, attributes: pa.Table | None
    ) -> tuple[Requests, pa.Table | None, pa.Table | None]:
        """Number the distinct requests; return requests, contexts, and attributes of queries or of their versions."""
        database, contexts, keys = self.database, None, ["query"]
        if self.context:
            contexts = self._number_contexts(self.context)
            keys.append("context")
        if table is not None and table.dates is not None:
            attributes = self._find_versions(table, table.dates)
            keys.append("version")
        rank = f"(dense_rank() OVER (ORDER BY {', '.join(keys)}) - 1)::INTEGER AS request"
        requests = database.name("requests")
        database.run(
            f"CREATE TABLE {requests} AS SELECT *, {rank} FROM (SELECT DISTINCT {', '.join(keys)} FROM {self.pairs})"
        )
        self.replace_pairs(
            f"SELECT * EXCLUDE ({', '.join(keys[1:])}) FROM {self.pairs} JOIN {requests} USING ({', '.join(keys)})"
        )
        columns = database.arrow(f"SELECT * FROM {requests} ORDER BY request")
        arrays = {key: columns[key].to_numpy().astype(np.int32) for key in keys}
        return Requests(arrays["query"], arrays.get("context"), arrays.get("version")), contexts, attributes

    def _number_contexts(self, names: Sequence[str]) -> pa.Table:
        """Number the distinct contexts by first occurrences of their values; return the contexts."""
        database, contexts = self.database, self.database.name("contexts")
        columns = [f"context_{i}" for i in range(len(names))]
        every = ", ".join(columns)
        distinct = f"SELECT {every}, min(row_id) AS first FROM {self.pairs} GROUP BY ALL"
        firsts = [f"min(first) OVER (PARTITION BY {column}) AS first_{i}" for i, column in enumerate(columns)]
        order = ", ".join(f"first_{i}" for i in range(len(columns)))
        database.run(
            f"CREATE TABLE {contexts} AS SELECT {every}, "
            f"(row_number() OVER (ORDER BY {order}) - 1)::INTEGER AS context "
            f"FROM (SELECT *, {', '.join(firsts)} FROM ({distinct}))"
        )
        same = " AND ".join(f"pairs.{column} IS NOT DISTINCT FROM contexts.{column}" for column in columns)
        self.replace_pairs(
            f"SELECT pairs.* EXCLUDE ({every}), contexts.context FROM {self.pairs} AS pairs "
            f"JOIN {contexts} AS contexts ON {same}"
        )
        table = database.arrow(f"SELECT {every} FROM {contexts} ORDER BY context")
        return table.rename_columns([*names])

    def _find_versions(self, table: IdTable, dates: bool) -> pa.Table:
        """Find the version of each pair's query.

        Returns:
            Versions by query and time, then an empty row.
        """
        database, data = self.database, self.data
        path, name = name_sources(data.queries or ""), data.valid_from
        kinds = ("numbers", "timestamps")
        if "time" in column_names(self.database, self.pairs) and dates != self.report.dates:
            raise DataError(
                f"{path}: column {name!r}: expected {kinds[self.report.dates]} as in column {data.timestamp!r} of the "
                f"interactions, found {kinds[dates]}"
            )
        texts, scale = self.texts["query"], 1.0
        if not dates and self.report.unit is not None:
            # Numbers of the feature table may count in another unit than those of the log.
            unit = Clock.units(database, "since", table.listed, "true", self.read_at)[0] or self.report.unit
            scale = UNITS[self.report.unit] / UNITS[unit]
        versions = database.name("versions")
        database.run(
            f"CREATE TABLE {versions} AS SELECT *, "
            f"(row_number() OVER (ORDER BY query, since, row_id) - 1)::INTEGER AS version "
            f"FROM (SELECT id, ids.code AS query, since * {double(scale)} AS since, listed.row_id, row_number "
            f"FROM {table.listed} AS listed JOIN {texts.table} USING (text) JOIN {texts.ids} AS ids USING (id))"
        )
        again = database.rows(
            f"SELECT id, row_number FROM {versions} "
            "QUALIFY row_number() OVER (PARTITION BY query, since ORDER BY row_id) > 1 ORDER BY row_id LIMIT 1"
        )
        for id_, row_number in again:
            file, row = table.source.locate(row_number)
            raise DataError(
                f"{file}: column {name!r}: expected one row of a query at a time, "
                f"found a second of {id_!r} in row {row}"
            )
        time = "pairs.time" if "time" in column_names(self.database, self.pairs) else "0"
        self.replace_pairs(
            # A pair before its query's first version reads the row after the last, which has no values.
            f"SELECT pairs.*, coalesce(versions.version, {table.table.num_rows})::INTEGER AS version "
            f"FROM {self.pairs} AS pairs ASOF LEFT JOIN {versions} AS versions "
            f"ON pairs.query = versions.query AND {time} >= versions.since"
        )
        order = database.arrow(f"SELECT row_id FROM {versions} ORDER BY version")["row_id"].to_pylist()
        return table.table.combine_chunks().take(pa.array([*order, None], pa.int64()))

    def read_impressions(self, label_ids: pa.Array) -> Bags:
        """Return the first `MOST_SHOWN` labels that were shown with each pair; unknown labels are skipped."""
        database, lists = self.database, self.database.name("shown")
        database.run(
            f"CREATE TABLE {lists} AS SELECT row_id, (row_number() OVER (ORDER BY row_id) - 1)::INTEGER AS row, shown "
            f"FROM {self.pairs} WHERE split < 2"
        )
        self.replace_pairs(
            f"SELECT pairs.* REPLACE (lists.row AS shown) FROM {self.pairs} AS pairs "
            f"LEFT JOIN {lists} AS lists USING (row_id)"
        )
        entries = (
            f"SELECT row, unnest(shown[:{MOST_SHOWN}]) AS text, generate_subscripts(shown[:{MOST_SHOWN}], 1) AS entry "
            f"FROM {lists}"
        )
        labels = database.register(pa.table({"id": label_ids, "label": np.arange(len(label_ids), dtype=np.int32)}))
        impressions = database.arrow(
            f"SELECT row, label FROM ({entries}) JOIN {self.texts['label'].table} USING (text) "
            f"JOIN {labels} USING (id) ORDER BY row, entry"
        )
        (count,) = database.row(f"SELECT count(*) FROM {lists}")
        counts = np.bincount(impressions["row"].to_numpy(), minlength=count)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Bags(offsets, impressions["label"].to_numpy(), np.ones(len(impressions), np.float32))

    def read_split(self, name: str) -> Pairs:
        database, columns, split = self.database, column_names(self.database, self.pairs), _SPLITS.index(name)
        left_out = "shown" if name == "test" and name in self.files else ""  # impressions of test pairs are never read
        kinds = {column: kind for column, kind in _ARRAYS.items() if column in columns and column != left_out}
        (count,) = database.row(f"SELECT count(*) FROM {self.pairs} WHERE split = {split}")
        arrays = {}
        for column, (key, kind) in kinds.items():
            path = None if self.folder is None or not count else self.folder / f"{name}.{key}.npy"
            # With a folder, pairs go straight to the file: they may not fit in memory.
            array = np.empty(count, kind) if path is None else np.lib.format.open_memmap(path, "w+", kind, (count,))
            arrays[column] = array.view(np.ndarray)
        time, start = "time, " * ("time" in columns), 0
        query = f"SELECT {', '.join(kinds)} FROM {self.pairs} WHERE split = {split} ORDER BY query, {time}tie"
        for batch in database.connection.sql(query).to_arrow_reader(_BATCH):
            for column, values in zip(kinds, batch.columns, strict=True):
                arrays[column][start : start + len(values)] = values.to_numpy(zero_copy_only=False)
            start += batch.num_rows
        return Pairs(**{kinds[column][0]: array for column, array in arrays.items()})

    def replace_pairs(self, query: str, stored: bool = True) -> None:
        """Replace the pairs by the result of an SQL query; a view unless `stored`."""
        previous, self.pairs = self.pairs, self.database.name("pairs")
        self.database.run(f"CREATE {'TABLE' if stored else 'VIEW'} {self.pairs} AS {query}")
        if stored:  # a view reads the previous table
            self.database.drop(previous)


def describe_empty(files: list[DataFile], report: RowReport) -> str:
    """Describe files without any remaining row, for an error."""
    why = "; ".join(report.lines()[:1])
    further_files = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0].name}{further_files}: expected at least one interaction, found none{f' ({why})' if why else ''}"
