"""Delta and Iceberg tables, written by their own libraries: every version, partitions, deletes, other columns."""

from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from longtail.tables import DataError, find_files
from longtail.tables.lake import file_version
from tests.s3 import BUCKET, S3Server
from tests.tables.reading import read, read_rows


def log(*rows: tuple[str, int, str]) -> pa.Table:
    users, items, days = zip(*rows, strict=True)
    return pa.table({"user": users, "item": items, "day": days})


def catalog(warehouse: Path | str, **properties: str) -> Any:
    from pyiceberg.catalog.sql import SqlCatalog

    built = SqlCatalog("shop", uri="sqlite:///:memory:", warehouse=str(warehouse), **properties)
    built.create_namespace("shop")
    return built


def test_newest_version_of_delta_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    deltalake.write_deltalake(path, log(("a", 1, "007"), ("b", 2, "008")), partition_by=["day"])
    deltalake.write_deltalake(path, log(("c", 3, "007")), mode="append")
    deltalake.DeltaTable(path).delete("user = 'b'")
    wider = log(("d", 4, "009")).append_column("price", pa.array([Decimal("1.50")]))
    deltalake.write_deltalake(path, wider, mode="append", schema_mode="merge")

    rows, kinds, _ = read(path)

    assert [(row["user"], row["item"], row["day"], row["price"]) for row in rows] == [
        ("a", 1, "007", None), ("c", 3, "007", None), ("d", 4, "009", Decimal("1.50")),
    ]  # fmt: skip
    assert kinds == {"user": "VARCHAR", "item": "BIGINT", "day": "VARCHAR", "price": "DECIMAL(3,2)"}
    assert read_rows(f"SELECT user FROM '{path}' WHERE price > 1") == [{"user": "d"}]


def test_newest_version_of_iceberg_is_read(tmp_path: Path) -> None:
    from pyiceberg.types import DoubleType

    first = log(("a", 1, "007"), ("b", 2, "008"))
    table = catalog(tmp_path).create_table("shop.log", first.schema)
    with table.update_spec() as spec:
        spec.add_identity("day")
    table.append(first)
    table.append(log(("c", 3, "007")))
    table.delete("user == 'b'")
    with table.update_schema() as schema:
        schema.rename_column("item", "product")
        schema.add_column("price", DoubleType())
    table.append(pa.table({"user": ["d"], "product": [4], "day": ["009"], "price": [1.5]}))
    path = tmp_path / "shop" / "log"

    rows = read_rows(path)

    assert sorted((row["user"], row["product"], row["day"], row["price"]) for row in rows) == [
        ("a", 1, "007", None), ("c", 3, "007", None), ("d", 4, "009", 1.5),
    ]  # fmt: skip
    assert read_rows(path) == rows
    assert read_rows(f"SELECT user FROM '{path}' WHERE price > 1") == [{"user": "d"}]


def delta(folder: Path) -> tuple[Path, list[Callable[[], object]]]:
    path = folder / "log"
    table = log(("a", 1, "x"), ("b", 2, "x"))
    deltalake.write_deltalake(path, table)
    return path, [
        lambda: deltalake.write_deltalake(path, table, mode="append"),
        lambda: deltalake.write_deltalake(path, table, mode="overwrite"),
        lambda: deltalake.DeltaTable(path).delete("item = 1"),
    ]


def iceberg(folder: Path) -> tuple[Path, list[Callable[[], object]]]:
    rows = log(("a", 1, "x"), ("b", 2, "x"))
    table = catalog(folder).create_table("shop.log", rows.schema)
    table.append(rows)
    return folder / "shop" / "log", [
        lambda: table.append(rows), lambda: table.overwrite(rows), lambda: table.delete("item == 1"),
    ]  # fmt: skip


@pytest.mark.parametrize("write", [delta, iceberg])
def test_versions_differ(tmp_path: Path, write: Any) -> None:
    path, changes = write(tmp_path)
    observed = {file_version(find_files(path)[0])}
    assert file_version(find_files(path)[0]) in observed
    for number, change in enumerate(changes, start=2):
        change()
        observed.add(file_version(find_files(path)[0]))
        assert len(observed) == number


def test_iceberg_reads_a_file_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyiceberg.io.pyarrow import ArrowScan

    rows = log(("a", 1, "x"))
    table = catalog(tmp_path).create_table("shop.log", rows.schema)
    for _ in range(3):
        table.append(rows)
    tasks: list[int] = []
    full = ArrowScan.to_table
    monkeypatch.setattr(ArrowScan, "to_table", lambda scan, of: tasks.append(len(of)) or full(scan, of))
    assert len(read_rows(tmp_path / "shop" / "log")) == 3
    assert {*tasks} == {1}


def test_times_of_a_lake_are_times(tmp_path: Path) -> None:
    when = datetime(2026, 1, 31, 12, 30, 0, 5, tzinfo=UTC)
    rows = pa.table({"user": ["a"], "when": pa.array([when], pa.timestamp("us", "UTC"))})
    deltalake.write_deltalake(tmp_path / "delta", rows)
    catalog(tmp_path).create_table("shop.log", rows.schema).append(rows)
    for path in (tmp_path / "delta", tmp_path / "shop" / "log"):
        result, kinds, _ = read(path)
        assert kinds["when"] == "TIMESTAMP WITH TIME ZONE"
        assert result[0]["when"] == when


def test_unsupported_delta_feature_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    deltalake.write_deltalake(path, log(("a", 1, "x")))
    first = path / "_delta_log" / "00000000000000000000.json"
    old = first.read_text()
    text = old.replace('"minReaderVersion":1', '"minReaderVersion":3').replace(
        '"minWriterVersion":2', '"minWriterVersion":7,"readerFeatures":["deletionVectors"],'
        '"writerFeatures":["deletionVectors"]'
    )  # fmt: skip
    assert text != old
    first.write_text(text)
    with pytest.raises(DataError, match=r"log: expected a Delta .* deltalake can read: .*deletionVectors.*copy"):
        read_rows(path)


def test_broken_lake_table_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "delta"
    deltalake.write_deltalake(path, log(("a", 1, "x")))
    next(path.glob("*.parquet")).unlink()
    with pytest.raises(DataError, match="delta: expected a readable delta file"):
        read_rows(path)
    (tmp_path / "ice" / "metadata").mkdir(parents=True)
    (tmp_path / "ice" / "metadata" / "v1.metadata.json").write_text("{}")
    with pytest.raises(DataError, match="ice: expected an Iceberg table that pyiceberg can read"):
        read_rows(tmp_path / "ice")


def test_newest_iceberg_metadata_has_the_highest_number(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    for name in ("v10.metadata.json", "v9.metadata.json", "v2.metadata.json"):
        (tmp_path / "metadata" / name).write_text("{}")
    assert find_files(tmp_path)[0].path.endswith("v10.metadata.json")


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deltalake.write_deltalake(tmp_path / "log", log(("a", 1, "x")))
    monkeypatch.setitem(__import__("sys").modules, "deltalake", None)
    with pytest.raises(DataError, match=r"log: expected the extra `lake`, pip install '.*\[lake\]'"):
        read_rows(tmp_path / "log")


def test_lakes_in_s3(s3: S3Server) -> None:
    rows = log(("a", 1, "x"), ("b", 2, "x"))
    deltalake.write_deltalake(
        f"s3://{BUCKET}/delta", rows, storage_options={"aws_allow_http": "true", "AWS_S3_ALLOW_UNSAFE_RENAME": "true"}
    )
    of = catalog(f"s3://{BUCKET}/ice", **{"s3.endpoint": s3.environment["AWS_ENDPOINT_URL"], "s3.region": "us-east-1"})
    of.create_table("shop.log", rows.schema).append(rows)
    for source in (f"s3://{BUCKET}/delta", f"s3://{BUCKET}/ice/shop/log"):
        assert read_rows(source) == rows.to_pylist()
        assert read_rows(f"SELECT user FROM '{source}' WHERE item = 2") == [{"user": "b"}]


def test_rows_of_an_iceberg_table_come_oldest_first(tmp_path: Path) -> None:
    table = catalog(tmp_path).create_table("shop.log", log(("a", 1, "x")).schema)
    for at in range(8):
        table.append(log((f"u{at}", at, "x")))
    assert [row["user"] for row in read_rows(tmp_path / "shop" / "log")] == [f"u{at}" for at in range(8)]
