"""Map ids to rows of an embedding table, and split texts into words."""

from __future__ import annotations

import re
import string
import zlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from unicodedata import category, normalize

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Int32
from longtail.bundle.id_rows import IdRows
from longtail.bundle.mapped_table import ORDER, map_columns, write_table

if TYPE_CHECKING:
    from longtail.bundle.manifest import TextStandard

OUT_OF_VOCABULARY = 0


class Vocabulary(IdRows):
    """Map ids (strings) to rows 1..n of an embedding table; row 0 is the out-of-vocabulary row.

    Args:
        ids: string [n], distinct and not null; the i-th maps to row i + 1.
        order_L: int32 [n], positions in the order of the ids by code points; None: sorted when first needed.
    """

    first, unknown = 1, OUT_OF_VOCABULARY

    @property
    def rows(self) -> int:
        """Return the number of rows of the embedding table, with the out-of-vocabulary row."""
        return len(self.ids) + 1

    def encode(self, column: pa.Array | pa.ChunkedArray) -> Int32:
        """Get the rows of a column of n strings, int32 [n]; unknown and null ids get row 0."""
        indices = pc.index_in(column, value_set=self.ids, skip_nulls=True)
        rows = pc.add(pc.fill_null(indices, -1), 1)
        return np.asarray(rows.to_numpy(zero_copy_only=False), dtype=np.int32)

    def write(self, path: Path) -> None:
        """Write an Arrow file of the ids and their order."""
        write_table(path, pa.table({"id": self.ids, ORDER: self.order}))

    @classmethod
    def read(cls, path: Path, *, verify: bool = True) -> Vocabulary:
        """Map a file of `write`; `verify` checks that no text ends beyond the file."""
        ids, numbers, _ = map_columns(path, "id", {ORDER: np.int32}, verify=verify)
        return cls(ids, numbers[ORDER])


_PLANES_WITH_MARKS = (*range(0x300, 0x20000), *range(0xE0100, 0xE01F0))
"""Code points that are searched for Unicode's combining marks."""


def tokenize(text: str) -> list[str]:
    """Split a text into words, in lower case and NFC.

    A word is a run of letters, digits and `_`, including combining marks after them and zero-width joiners between
    them. A following `++` belongs to the word, and so does a `+` or `#` that no such character follows.

    Example:
        >>> tokenize("Toy Story (1995), C++ & C#")
        ['toy', 'story', '1995', 'c++', 'c#']
    """
    return _word().findall(normalize("NFC", text.lower()))


@cache
def _word() -> re.Pattern[str]:
    """Compile the pattern of a word, with combining marks for Hindi, Thai or Hebrew."""
    marks = "".join(mark for mark in map(chr, _PLANES_WITH_MARKS) if category(mark) in ("Mn", "Mc"))
    # A character class of this size is slow, so characters that usually end Latin words are ruled out first.
    more = rf"(?![\0-\u02ff])(?:[{marks}]|[\u200c\u200d](?=[\w{marks}]))\w*"
    return re.compile(rf"\w+(?:{more})*(?:\+\++|[+#](?!\w))?")


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_SPACES = re.compile("[ \t\n\v\f\r]+")


def split_words(text: str, standardize: TextStandard) -> list[str]:
    """Split a text like Keras' TextVectorization, which knows ASCII alone.

    Example:
        >>> split_words("L'Été (1995)", "lower_and_strip_punctuation")
        ['lÉté', '1995']
    """
    if standardize in ("lower", "lower_and_strip_punctuation"):
        text = text.translate(_LOWER)
    if standardize in ("strip_punctuation", "lower_and_strip_punctuation"):
        text = text.translate(_PUNCTUATION)
    return [word for word in _SPACES.split(text) if word]


def hash_token(token: str, rows: int) -> int:
    """Hash a token to a row 1..rows−1 by crc32 of its UTF-8; row 0 is the out-of-vocabulary row."""
    return 1 + zlib.crc32(token.encode()) % (rows - 1)
