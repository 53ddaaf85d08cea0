"""Every file that a recipe names: interactions by split, and feature tables; what is wrong with any is one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import pyarrow as pa

from longtail.bundle.labels import RESERVED_COLUMNS
from longtail.trainer.config import DataConfig
from longtail.trainer.config.rows import Places, shown
from longtail.trainer.data.files import DataFile, find_files
from longtail.trainer.data.interactions import nothing_in, read_interactions
from longtail.trainer.data.problems import RowReport, settle
from longtail.trainer.data.scratch import IN_MEMORY, Scratch
from longtail.trainer.data.tables import IdTable, read_feature_table
from longtail.trainer.data.xmc import read_xmc
from longtail.trainer.errors import DataError


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
        id_types: dict[str, dict[str, str]] = {}
    else:
        interactions = read_interactions(
            files, data, report, now=now, context=context, strings=strings, scratch=scratch
        )
        raw, id_types = interactions.tables, interactions.id_types
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
            id_types.setdefault(id_column, {}).update(table.id_types)
    rows = report.read + sum(len(table.ids) for table in tables.values() if table is not None)
    settle(report, data, errors, rows=rows)
    for name, of_split in files.items():
        if name not in raw:  # every row was bad, and so many may be
            raise DataError(nothing_in(of_split, report))
    for name, types in id_types.items():
        if len(set(types.values())) > 1:
            found = ", ".join(f"{kind} in {path}" for path, kind in types.items())
            raise DataError(f"column {name!r}: expected ids of one type in all Parquet files, found {found}")
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
    return raw, IdTable(table["query"].combine_chunks(), table.select(["features"]), {})
