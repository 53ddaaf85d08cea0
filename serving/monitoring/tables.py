"""The tables of answers and feedback, the same in SQLite and PostgreSQL."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Dialect,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)

VERSION = 1


class _Text(TypeDecorator[str]):
    """Text with `?` for what UTF-8 cannot hold, and ␀ for the character that PostgreSQL's cannot."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """What is kept."""
        if value is None:
            return None
        kept = value.encode("utf-8", "replace").decode()
        return kept.replace("\0", "␀") if dialect.name == "postgresql" else kept


_WHOLE = BigInteger().with_variant(Integer, "sqlite")
"""64 bits; in SQLite under the one name that makes a primary key the row's own number."""


def _whole(name: str, **options: Any) -> Column[int]:
    return Column(name, _WHOLE, nullable=False, **options)


metadata = MetaData()

# One row, in PostgreSQL: the version of these tables. In SQLite it stands in the file's head.
feedback_version = Table("feedback_version", MetaData(), Column("version", Integer, nullable=False))

# One query's answer. key: hash of the answer's id and the query's place; request_key: of the id that the request came
# with, request_id; both null where it came with none. (Before version 3, key was of the request's id, its own or not.)
# labels: a CRC-32 per label id; buckets: a byte per label; propensities: a float32 per label, null where all are 1;
# features: the query's, JSON, null where they are not recorded or not kept any more; at: when it was kept; run, arm,
# unit: of an experiment whose arms are compared by it; null: of none. Keys are random, and an index of them alone would
# have every page written over and over: led by the generation, a thirty-second of the answers, only those of the newest
# and the oldest are.
answers = Table(
    "answers",
    metadata,
    Column("id", _WHOLE, primary_key=True, autoincrement=False),
    _whole("generation"),
    _whole("key"),
    Column("at", Double),
    Column("release", _Text, nullable=False),
    Column("labels", LargeBinary, nullable=False),
    Column("buckets", LargeBinary, nullable=False),
    Column("propensities", LargeBinary),
    Column("bias_removal", Double),
    Column("popularity", Double),
    Column("features", LargeBinary),
    Column("request_key", _WHOLE),
    Column("request_id", _Text),
    Column("run", _Text),
    Column("arm", _Text),
    Column("unit", _WHOLE),
)
Index("answers_by_key", answers.c.generation, answers.c.key)
_NAMED = text("request_key IS NOT NULL")
Index("answers_by_request", answers.c.generation, answers.c.request_key, sqlite_where=_NAMED, postgresql_where=_NAMED)

# One label interacted with, once for each type of event. bucket: −1 unknown; state: 0 pending, 1 joined, 2 its answer
# was never found, or was one of several, 3 organic, without an answer and with a key of chance, 4 said before, by
# another name of its answer. key: hash of the id that names the answer and of the query's place; answer_id: that id;
# null: request_id is. From the answer, when joined: release, position (null: not in the answer), propensity, λ, μ,
# features, run, arm, unit (as in `answers`), the request_id that it has, and the bucket, −1 of a label that an earlier
# event of the same answer has counted.
feedback = Table(
    "feedback",
    metadata,
    Column("id", _WHOLE, primary_key=True, autoincrement=True),
    _whole("key"),
    Column("label", _Text, nullable=False),
    _whole("bucket"),
    Column("at", Double, nullable=False),
    _whole("state"),
    Column("event", _Text, nullable=False, server_default="click"),
    Column("weight", Double, nullable=False, server_default="1"),
    Column("request_id", _Text),
    Column("query", _WHOLE),
    Column("release", _Text),
    Column("position", _WHOLE),
    Column("propensity", Double),
    Column("bias_removal", Double),
    Column("popularity", Double),
    Column("features", LargeBinary),
    Column("answer_id", _Text),
    Column("run", _Text),
    Column("arm", _Text),
    Column("unit", _WHOLE),
    UniqueConstraint("key", "label", "event"),
)
_PENDING = text("state = 0")
Index("pending", feedback.c.at, sqlite_where=_PENDING, postgresql_where=_PENDING)

# Organic choices that came under an idempotency key, of which this is a hash.
organic = Table(
    "organic",
    metadata,
    Column("id", _WHOLE, primary_key=True, autoincrement=True),
    _whole("key", unique=True),
    Column("at", Double, nullable=False),
)

# Positives and hits by minute since 1970.
recall = Table(
    "recall",
    metadata,
    Column("release", _Text, primary_key=True),
    _whole("minute", primary_key=True),
    Column("source", _Text, primary_key=True),
    _whole("bucket", primary_key=True),
    _whole("positives"),
    _whole("hits"),
    sqlite_with_rowid=False,
)

totals = Table("totals", metadata, Column("name", _Text, primary_key=True), _whole("value"), sqlite_with_rowid=False)
