"""What a release keeps of its bundle's tables is what would be made of them, and is refused where it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.bundle import BundleError, Labels, MappedTables
from longtail.bundle.lookup import Lookup, fingerprints
from longtail.bundle.mapped_table import map_table, write_table
from tests.bundles import make_bundle

IDS = pa.array(["b", "ä" * 90, "", "a", "\U0001f600", "item-7"])
FILES = {"lookup.arrow", "vocabularies/users.arrow"}


@pytest.fixture
def tables(tmp_path: Path) -> MappedTables:
    bundle = make_bundle(labels=60)
    bundle.labels.write(tmp_path / "labels.arrow")
    return MappedTables.write(tmp_path, bundle.labels, bundle.vocabularies)


def labels_of(tables: MappedTables, *, verify: bool) -> Labels:
    return Labels.read(tables.directory / "labels.arrow", lookup=tables.lookup, verify=verify)


@given(ids=st.lists(st.text(st.characters(codec="utf-8"), max_size=9), unique=True, max_size=50))
def test_a_mapped_lookup_is_the_one_that_was_made(tmp_path_factory: pytest.TempPathFactory, ids: list[str]) -> None:
    column = pa.array(ids, pa.string())
    path = tmp_path_factory.mktemp("lookup") / "lookup.arrow"
    Lookup(column).write(path)
    mapped = Lookup.map(path, column)
    assert mapped.row_of.of([*ids, "no such id"]) == [*range(len(ids)), None]
    assert mapped.row_of.of(ids * 130) == [*range(len(ids))] * 130
    assert [ids[row] for row in mapped.rows_by_id] == sorted(ids)
    assert mapped.fingerprints.tolist() == fingerprints(ids).tolist() == Lookup(column).fingerprints.tolist()


def test_no_table_takes_memory_of_its_own(tables: MappedTables) -> None:
    allocated = pa.total_allocated_bytes()
    labels = labels_of(tables, verify=False)
    users = tables.vocabulary("users", labels, verify=False)
    assert (labels.row_of["item-7"], users.lookup_all(["u1", "nobody"])) == (7, [2, 0])
    for array in (labels.lookup.rows_by_id, labels.lookup.fingerprints, labels.row_of.hashes.hashes_L):
        assert not array.flags.owndata
    assert pa.total_allocated_bytes() == allocated


def test_a_vocabulary_that_is_all_labels_is_theirs(tables: MappedTables) -> None:
    assert tables.names == FILES
    labels = labels_of(tables, verify=True)
    items = tables.vocabulary("items", labels, verify=True)
    assert items.ids is labels.ids
    assert items.lookup_all(["item-0", "item-59", "x"]) == [1, 60, 0]


def test_labels_made_of_mapped_ones_are_found_by_ids_of_their_own(tables: MappedTables) -> None:
    labels = labels_of(tables, verify=True)
    renamed = replace(labels, ids=pa.array([f"other-{row}" for row in range(60)]))
    assert (renamed.row_of.get("item-7"), renamed.row_of["other-7"]) == (None, 7)


def broken(table: pa.Table, column: str, values: object) -> pa.Table:
    return table.set_column(table.column_names.index(column), column, pa.array(values, table.schema.field(column).type))


@pytest.mark.parametrize("file", ["lookup.arrow", "vocabularies/users.arrow"])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("row", "expected rows 0 to"),
        ("hash", "expected ascending"),
        ("key", "expected 32 digits"),
        ("gone", "no such column"),
        ("short", "rows, 0 nulls"),
    ],
)
def test_what_would_lead_astray_is_refused(tables: MappedTables, file: str, what: str, message: str) -> None:
    path = tables.directory / file
    table = map_table(path)
    rows = len(table)
    if what == "row":
        table = broken(table, "row", [rows] + [0] * (rows - 1))
    elif what == "hash":
        table = broken(table, "hash", table["hash"].to_pylist()[::-1])
    elif what == "key":
        table = table.replace_schema_metadata({})
    elif what == "gone":
        table = table.drop_columns(["row"])
    else:
        table = broken(table, "row", [None] * rows)
    write_table(tables.directory / "other", table)
    (tables.directory / "other").replace(path)
    labels = make_bundle(labels=60).labels
    with pytest.raises(BundleError, match=message):
        _ = labels_of(tables, verify=True), tables.vocabulary("users", labels, verify=True)


def test_a_lookup_of_fewer_labels_is_refused(tmp_path: Path) -> None:
    Lookup(IDS.slice(1)).write(tmp_path / "lookup.arrow")
    with pytest.raises(BundleError, match=r"expected 6 rows, 0 nulls, found 5 rows, 0 nulls"):
        Lookup.map(tmp_path / "lookup.arrow", IDS)


def test_rows_by_id_that_are_none_are_refused(tmp_path: Path) -> None:
    Lookup(IDS).write(tmp_path / "made.arrow")
    write_table(tmp_path / "lookup.arrow", broken(map_table(tmp_path / "made.arrow"), "row_by_id", [0, 1, 2, 3, 4, -1]))
    with pytest.raises(BundleError, match=r"column 'row_by_id': expected rows 0 to 5"):
        Lookup.map(tmp_path / "lookup.arrow", IDS)
    write_table(tmp_path / "lookup.arrow", broken(map_table(tmp_path / "made.arrow"), "row_by_id", [5, 4, 3, 2, 1, 0]))
    with pytest.raises(BundleError, match=r"the labels in the order of their ids: expected ascending ids"):
        Lookup.map(tmp_path / "lookup.arrow", IDS)
    assert np.array_equal(Lookup.map(tmp_path / "lookup.arrow", IDS, verify=False).rows_by_id, [5, 4, 3, 2, 1, 0])


def test_ids_that_stand_twice_are_counted_once(tmp_path: Path) -> None:
    Lookup(IDS).write(tmp_path / "lookup.arrow")
    assert (Lookup(IDS).distinct, Lookup.map(tmp_path / "lookup.arrow", IDS).distinct) == (6, 6)
    twice = pa.array(["b", "a", "a", "c", "d", "e"])
    assert Lookup(twice).distinct == 5
    assert Lookup.map(tmp_path / "lookup.arrow", twice, verify=False).distinct == 5
