"""Locate state: a directory of this host, or a PostgreSQL schema that replicas share."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from longtail.bundle.errors import describe

_SCHEMES = ("postgresql", "postgres")
SCHEMA = "longtail"
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,47}")


@dataclass(frozen=True, slots=True)
class Postgres:
    """A schema of a PostgreSQL database.

    Attributes:
        url: URL of the database in libpq's form; missing parts come from libpq's variables, such as PGPASSFILE.
        schema: schema of the tables; one for each service that shares the database.
    """

    url: URL = field(repr=False)
    schema: str = SCHEMA

    @classmethod
    def parse(cls, text: str) -> Postgres:
        """Parse `postgresql://USER:PASSWORD@HOST:PORT/DATABASE?schema=NAME`; all parts after `//` are optional."""
        try:
            url = make_url(text)
        except (ArgumentError, ValueError):
            raise ValueError("expected postgresql://USER@HOST/DATABASE, received what is no URL") from None
        if url.drivername not in _SCHEMES:
            raise ValueError(f"expected postgresql://USER@HOST/DATABASE, received {describe(url.drivername)}://…")
        if secret := {"password", "sslpassword"} & url.query.keys():
            raise ValueError(f"expected a password before the host or in PGPASSFILE, received {secret.pop()}=…")
        schema = url.query.get("schema", SCHEMA)
        if not isinstance(schema, str) or not _SCHEMA.fullmatch(schema):
            raise ValueError(
                f"expected a schema of at most 48 of a-z, 0-9 and _, no digit first, received {describe(schema)}"
            )
        return cls(url.difference_update_query(["schema"]).set(drivername="postgresql+psycopg"), schema)

    def __str__(self) -> str:
        """Return host, database and schema, without the password."""
        url = self.url.set(drivername="postgresql", query={})
        return f"{url.render_as_string(hide_password=True)}, schema {self.schema}"


StateLocation = Path | Postgres


def parse_location(text: str | Path | Postgres) -> StateLocation:
    """Convert text to a state directory or a database URL; return locations unchanged."""
    if isinstance(text, str):
        return Postgres.parse(text) if "://" in text else Path(text)
    return text
