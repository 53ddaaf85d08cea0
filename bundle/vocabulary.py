"""Ids of one feature and the embedding rows they map to."""

from __future__ import annotations

import re
import string
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from longtail.bundle.arrays import Int32
from longtail.bundle.errors import BundleInvariantError, require
from longtail.bundle.id_rows import IdHashes, IdRows
from longtail.bundle.mapped_table import in_one_piece, map_table, write_table

if TYPE_CHECKING:
    from longtail.bundle.labels import Labels
    from longtail.bundle.manifest import TextStandard

OUT_OF_VOCABULARY = 0


class Vocabulary:
    """Maps ids (strings) to rows 1..n of an embedding table; row 0 is the out-of-vocabulary row.

    Args:
        ids: string [n], distinct and not null; the i-th maps to row i + 1.
    """

    def __init__(self, ids: pa.Array) -> None:
        self.ids = ids
        self._rows_of: Callable[[], IdRows] = cache(lambda: IdRows(ids))

    @property
    def rows(self) -> int:
        """Rows of the embedding table, the out-of-vocabulary row included."""
        return len(self.ids) + 1

    def lookup(self, id_: str) -> int:
        """The row of one id; unknown ids get row 0."""
        return self.lookup_all([id_])[0]

    def lookup_all(self, ids: Iterable[str]) -> list[int]:
        """The rows of a few ids, in order; unknown ids get row 0."""
        return [OUT_OF_VOCABULARY if row is None else row + 1 for row in self._rows_of().of(list(ids))]

    def sharing(self, labels: Labels) -> Vocabulary:
        """The same vocabulary; if it is all labels in their order, in the memory of theirs."""
        return Vocabulary.of_labels(labels) if self.ids.equals(labels.ids) else self

    @classmethod
    def of_labels(cls, labels: Labels) -> Vocabulary:
        """All labels in their order, in the memory of theirs."""
        shared = cls(labels.ids)
        shared._rows_of = cache(lambda: labels.row_of)
        return shared

    def encode(self, column: pa.Array | pa.ChunkedArray) -> Int32:
        """The rows of a column of n strings, int32 [n]; unknown and null ids get row 0."""
        found = pc.index_in(column, value_set=self.ids, skip_nulls=True)
        rows = pc.add(pc.fill_null(found, -1), 1)
        return np.asarray(rows.to_numpy(zero_copy_only=False), dtype=np.int32)

    def write(self, path: Path) -> None:
        """Write as Parquet with one string column `id`."""
        pq.write_table(pa.table({"id": self.ids}), path)

    def write_mappable(self, path: Path) -> None:
        """Write as an Arrow file, with what finds the rows, for `map`."""
        write_table(path, self._rows_of().hashes.table().append_column("id", self.ids))

    @classmethod
    def map(cls, path: Path, *, verify: bool = True) -> Vocabulary:
        """Map what `write_mappable` wrote: its pages are shared with every process that does so.

        Args:
            path: NAME.arrow.
            verify: whether to look at all of it.

        Raises:
            BundleCorruptError: no Arrow file.
            BundleInvariantError: columns that are not those of `write_mappable`.
        """
        table = map_table(path, verify=verify)
        found = table.schema.field("id").type if "id" in table.column_names else "no such column"
        require(f"{path.name} holds ids", found == pa.string(), pa.string(), found)
        ids = in_one_piece(table["id"])
        require(f"{path.name} holds no nulls", ids.null_count == 0, "no nulls", f"{ids.null_count}")
        hashes = IdHashes.from_table(table, len(ids))
        if verify:
            hashes.check(path.name)
        mapped = cls(ids)
        mapped._rows_of = cache(lambda: IdRows(ids, hashes))
        return mapped

    @classmethod
    def read(cls, path: Path) -> Vocabulary:
        """Read what `write` wrote.

        Raises:
            BundleInvariantError: no `id` column of strings, or an id stands twice or is null.
        """
        table = pq.read_table(path, use_threads=False)
        if table.column_names != ["id"] or not pa.types.is_string(table.schema.field("id").type):
            raise BundleInvariantError(
                f"{path.name} holds one column `id` of strings", expected="id: string", found=table.schema
            )
        ids = table["id"].combine_chunks()
        if ids.null_count or pc.count_distinct(ids).as_py() != len(ids):
            raise BundleInvariantError(
                f"{path.name} holds distinct, non-null ids",
                expected=f"{len(ids)} distinct",
                found=f"{pc.count_distinct(ids).as_py()} distinct, {ids.null_count} null",
            )
        return cls(ids)


_WORD = re.compile(r"\w+")


def tokenize(text: str) -> list[str]:
    """Lower-cased runs of word characters: `"Toy Story (1995)"` → `["toy", "story", "1995"]`."""
    return _WORD.findall(text.lower())


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_SPACES = re.compile("[ \t\n\v\f\r]+")


def words_of(text: str, standardize: TextStandard) -> list[str]:
    """The words that Keras' TextVectorization splits a text into: of ASCII alone it knows case, punctuation and spaces.

    Example:
        >>> words_of("L'Été (1995)", "lower_and_strip_punctuation")
        ['lÉté', '1995']
    """
    if standardize in ("lower", "lower_and_strip_punctuation"):
        text = text.translate(_LOWER)
    if standardize in ("strip_punctuation", "lower_and_strip_punctuation"):
        text = text.translate(_PUNCTUATION)
    return [word for word in _SPACES.split(text) if word]


def hash_token(token: str, rows: int) -> int:
    """Row 1..rows−1 of a token: crc32 of its UTF-8, modulo. Row 0 stays out-of-vocabulary."""
    return 1 + zlib.crc32(token.encode()) % (rows - 1)
