"""Define the tables of state, the same in SQLite and PostgreSQL."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, LargeBinary, MetaData, Table, Text

VERSION = 1

metadata = MetaData()
# One row: the version of these tables, and a unique name of the store.
label_store = Table(
    "label_store",
    metadata,
    Column("version", Integer, nullable=False),
    Column("generation", Text, nullable=False),
)
# Numbers are never reused, and rise in the order of commits. at: microseconds since 1970; record: JSON.
label_changes = Table(
    "label_changes",
    metadata,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("at", BigInteger, nullable=False),
    Column("record", Text, nullable=False),
    Index("label_changes_by_date", "at"),
    sqlite_autoincrement=True,
)
# Only in PostgreSQL; a state directory has a file that only its owner may read instead. at: seconds since 1970.
answer_keys = Table(
    "answer_keys",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("at", BigInteger, nullable=False),
    Column("secret", LargeBinary, nullable=False),
)
