"""The tables of what replicas tell each other, in PostgreSQL."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, Index, Integer, LargeBinary, MetaData, Table, Text

VERSION = 1

metadata = MetaData()
replica_store = Table("replica_store", metadata, Column("version", Integer, nullable=False))
# A row of the figures of one kind and release, as a worker of a replica counts them: the numbers of a period of time.
# layout: JSON, says what numbers they are; content: packed, empty where they are gone; expires_at: when nobody wants it
# any more, seconds since 1970.
figure_rows = Table(
    "figure_rows",
    metadata,
    Column("replica", Text, primary_key=True),
    Column("worker", Integer, primary_key=True, autoincrement=False),
    Column("release", Text, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("period", BigInteger, primary_key=True, autoincrement=False),
    Column("layout", Text, nullable=False),
    Column("content", LargeBinary, nullable=False),
    Column("checksum", BigInteger, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("version", BigInteger, nullable=False),
    Index("figure_rows_by_version", "replica", "version"),
    Index("figure_rows_by_end", "expires_at"),
)
# Which release replicas went over to, in their order, with what its traffic is compared with, JSON.
served = Table(
    "served",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=True),
    Column("release", Text, nullable=False),
    Column("since", Double, nullable=False),
    Column("baseline", Text),
)
# version: of the rows that it told last, never given twice; served: where it is in their order.
replicas = Table(
    "replicas",
    metadata,
    Column("replica", Text, primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("served", BigInteger),
    Column("seen_at", Double, nullable=False),
)
staged_counts = Table(
    "staged_counts",
    metadata,
    Column("writer", Text, primary_key=True),
    Column("counts", Text, nullable=False),
    Column("changed_at", Double, nullable=False),
)
