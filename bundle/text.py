"""Text tokens and the embedding rows they hash to; the same in training and in the service."""

from __future__ import annotations

import re
import zlib

_WORD = re.compile(r"\w+")


def tokenize(text: str) -> list[str]:
    """Lower-cased runs of word characters: `"Toy Story (1995)"` → `["toy", "story", "1995"]`."""
    return _WORD.findall(text.lower())


def hash_token(token: str, rows: int) -> int:
    """Row 1..rows−1 of a token: crc32 of its UTF-8, modulo. Row 0 stays out-of-vocabulary."""
    return 1 + zlib.crc32(token.encode()) % (rows - 1)
