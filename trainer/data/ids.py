"""Ids of queries and labels: numbers for their texts, and detection of placeholders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from longtail.tables.database import Database
from longtail.tables.table import canonical_ids
from longtail.tables.values import literal
from longtail.trainer.data.problems import RowCheck

NO_IDS = ("", "undefined", "null", "none", "nan", "nil", "n/a", "na", "unknown", "\\n")
"""Texts that look like a placeholder, in lower case and without surrounding blanks."""
_REWRITES = ((r"[\s\p{Z}\x{feff}\x{200b}]+", ""), (r"(.)\.0+$", r"\1"), (r"^0+(.)", r"\1"))
"""Removal of blanks, of a trailing `.0` and of leading zeros, before ids are compared for likeness."""


@dataclass(frozen=True)
class IdTexts:
    """Hold the texts of the ids of one side.

    Attributes:
        table: table of `text`, `id` and `code`, with codes in the order of first occurrence in the log, then in the
            feature table. If all ids are whole numbers, `39.0` is the id `39`.
        ids: table of `code`, `id`, the first `row_id` in the log, and `listed`, its first in the feature table.
        odd: texts that are, or look like, a placeholder, with their codes.
    """

    database: Database
    table: str
    ids: str
    odd: dict[str, int]

    @classmethod
    def number(cls, database: Database, log: str, listed: str | None, placeholders: Sequence[str]) -> IdTexts:
        """Number distinct texts.

        Args:
            log: an SQL query of `text` and `row_id`, in the log.
            listed: a table of `text` and `row_id`, in the feature table; None without a table.
        """
        sources = [f"SELECT text, row_id, NULL::BIGINT AS listed FROM ({log})"]
        sources += [f"SELECT text, NULL::BIGINT AS row_id, row_id AS listed FROM {listed}"] if listed else []
        distinct, ids, view = database.name("distinct"), database.name("ids"), database.name("texts")
        database.run(
            f"CREATE TABLE {distinct} AS SELECT text, min(row_id) AS row_id, min(listed) AS listed "
            f"FROM ({' UNION ALL '.join(sources)}) WHERE text IS NOT NULL GROUP BY text"
        )
        # A placeholder among whole numbers must not stop `39.0` from meaning `39`.
        canonical = canonical_ids(database, distinct, "text", condition=f"NOT ({odd_condition('text')})")
        texts = f"SELECT text, {canonical} AS id, row_id, listed FROM {distinct}"
        database.run(
            f"CREATE TABLE {ids} AS SELECT *, (row_number() OVER (ORDER BY row_id NULLS LAST, listed) - 1)::INTEGER "
            f"AS code FROM (SELECT id, min(row_id) AS row_id, min(listed) AS listed FROM ({texts}) GROUP BY id)"
        )
        # Where no id is rewritten, a text is its id, and the join is saved.
        unchanged = f"SELECT id AS text, id, code FROM {ids}"
        spelled = f"SELECT text, id, code FROM ({texts}) JOIN {ids} USING (id)"
        database.run(f"CREATE VIEW {view} AS {unchanged if canonical == 'text' else spelled}")
        odd = database.rows(f"SELECT text, code FROM {view} WHERE {odd_condition('text', placeholders)} ORDER BY text")
        return cls(database, view, ids, dict(odd))

    def without_gaps(self, pairs: str, column: str) -> str:
        """Renumber the ids that remain in pairs or in the feature table; `before` is the former code."""
        table = self.database.name("ids")
        used = f"SELECT {column} AS before, min(row_id) AS row_id FROM {pairs} GROUP BY 1"
        self.database.run(
            f"CREATE TABLE {table} AS SELECT id, used.row_id, listed, code AS before, "
            f"(row_number() OVER (ORDER BY used.row_id NULLS LAST, listed) - 1)::INTEGER AS code "
            f"FROM {self.ids} AS ids LEFT JOIN ({used}) AS used ON ids.code = used.before "
            f"WHERE used.row_id IS NOT NULL OR listed IS NOT NULL"
        )
        return table


def odd_condition(text: str, placeholders: Sequence[str] = ()) -> str:
    """Write the SQL condition for texts that look like placeholders or are in `placeholders`."""
    listed = f" OR {text} IN ({', '.join(map(literal, placeholders))})" if placeholders else ""
    return f"lower(trim({text})) IN ({', '.join(map(literal, NO_IDS))}){listed}"


def check_ids(name: str, column: str, odd: Mapping[str, object], placeholders: Sequence[str]) -> Iterator[RowCheck]:
    """Yield checks of a column of ids: missing ids, and placeholders.

    Args:
        column: the column in SQL, texts or codes.
        odd: the value in `column` of each text that `odd_condition` finds.
        placeholders: texts of placeholders, which are bad; other texts that look like one are only reported.
    """
    expected = "an id in every row"
    yield RowCheck(name, f"{column} IS NULL", expected, content="null")
    for text, value in odd.items():
        hint = "" if text in placeholders else ", which looks like a placeholder (data.placeholders)"
        content = f"{text!r}{hint}" if text else "an empty one"
        yield RowCheck(name, f"{column} = {value}", expected, content, fatal=not text or text in placeholders)


def find_placeholders(values: pa.Array) -> list[str]:
    """Return the strings that look like placeholders."""
    return [text for text in values.to_pylist() if text is not None and text.strip().lower() in NO_IDS]


def describe_example(unlisted: pa.Array, listed: pa.Array, *, nothing: bool) -> str:
    """Describe an id without a row, and a similar id, or any if `nothing` matches.

    Example:
        >>> describe_example(pa.array(["b", "39.0"]), pa.array(["a", "39"]), nothing=False)
        ", such as '39.0', where it has '39'"
    """
    rows = pc.index_in(_bare(unlisted), value_set=_bare(listed))
    i = pc.index(pc.is_valid(rows), True).as_py()
    if i < 0 and not (nothing and len(listed)):
        return ""
    log_id, table_id = (unlisted[i], listed[rows[i].as_py()]) if i >= 0 else (unlisted[0], listed[0])
    return f", such as {log_id.as_py()!r}, where it has {table_id.as_py()!r}"


def _bare(ids: pa.Array) -> pa.Array:
    ids = ids.cast(pa.large_string())
    for pattern, instead in _REWRITES:
        ids = pc.replace_substring_regex(ids, pattern, instead)
    return ids
