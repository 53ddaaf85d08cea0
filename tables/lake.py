"""Read Delta and Iceberg tables by their libraries."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from longtail.extras import pip_install
from longtail.tables.errors import DataError
from longtail.tables.files import DataFile

_TABLES = {"delta": "a Delta table that deltalake", "iceberg": "an Iceberg table that pyiceberg"}


def lake_reader(file: DataFile) -> Any:
    """Return an Arrow source of a table, which can be read repeatedly; rows are oldest first."""
    with _reading(file):
        return _delta_rows(_delta(file)) if file.kind == "delta" else _IcebergRows(_iceberg(file))


def file_version(file: DataFile) -> tuple[int, int]:
    """Return size and modification time (ns) of a file, or fsspec's checksum; 0 and a hash for a lake table."""
    if file.kind in ("delta", "iceberg"):
        return 0, _hash_table(file)
    if file.system is not None:
        return file.system.size(file.path) or 0, file.system.checksum(file.path)
    about = os.stat(file.path)
    return about.st_size, about.st_mtime_ns


def _hash_table(file: DataFile) -> int:
    with _reading(file):
        if file.kind == "delta":
            table = _delta(file)
            about = [str(table.metadata().id), table.schema().to_json(), *sorted(table.file_uris())]
        else:
            about = [_iceberg(file).metadata.model_dump_json()]
    return int(hashlib.sha256("\n".join(about).encode()).hexdigest()[:15], 16)


@contextmanager
def _reading(file: DataFile) -> Iterator[None]:
    """Add the table's name to errors; raises DataError."""
    try:
        yield
    except ImportError as error:
        raise DataError(f"{file.name}: expected the extra `lake`, {pip_install('lake')}: {error}") from error
    except Exception as error:  # the libraries have no common one
        why = str(error).partition("\n")[0]
        hint = ": write a copy without, or Parquet" if "reader feature" in why else ""
        raise DataError(f"{file.name}: expected {_TABLES[file.kind]} can read: {why}{hint}") from error


def _delta(file: DataFile) -> Any:
    from deltalake import DeltaTable

    options = {}
    if "://" in file.path:
        from longtail.bundle.objects import store_options

        options = {**store_options(file.path).get("config", {}), "aws_allow_http": "true"}
    return DeltaTable(file.path, storage_options=options)


def _delta_rows(table: Any) -> Any:
    """Return a dataset of the table's files, oldest first."""
    from pyarrow.dataset import FileSystemDataset  # loads pandas, where that is installed

    rows, written = table.to_pyarrow_dataset(), pa.table(table.get_add_actions(flatten=True))
    times = dict(zip(written["path"].to_pylist(), written["modification_time"].to_pylist(), strict=True))
    files = sorted(rows.get_fragments(), key=lambda file: (times.get(file.path, 0), file.path))
    return FileSystemDataset(files, rows.schema, rows.format, rows.filesystem)


def _iceberg(file: DataFile) -> Any:
    from pyiceberg.table import StaticTable

    names = {"s3.endpoint": ("AWS_ENDPOINT_URL",), "s3.region": ("AWS_REGION", "AWS_DEFAULT_REGION")}
    options = {key: next(filter(None, map(os.environ.get, variables)), None) for key, variables in names.items()}
    return StaticTable.from_metadata(file.path, {key: value for key, value in options.items() if value})


class _IcebergRows:
    """Rows of an Iceberg table, with one data file in memory at a time."""

    def __init__(self, table: Any) -> None:
        from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow

        self._table, self._scan = table, table.scan()
        self._reader = ArrowScan(table.metadata, table.io, self._scan.projection(), self._scan.row_filter)
        self.schema = schema_to_pyarrow(self._scan.projection(), include_field_ids=False)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return pa.RecordBatchReader.from_batches(self.schema, self._batches()).__arrow_c_stream__(requested_schema)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        written: dict[str, int] = {}
        if self._table.current_snapshot() is not None:
            entries = self._table.inspect.entries().to_pylist()
            written = {entry["data_file"]["file_path"]: entry["sequence_number"] for entry in entries}

        def age(task: Any) -> tuple[int, str]:
            return written.get(task.file.file_path, 0), task.file.file_path

        for task in sorted(self._scan.plan_files(), key=age):  # oldest first
            yield from self._reader.to_table([task]).cast(self.schema).to_batches()
