"""What is wrong with kept state."""

from __future__ import annotations


class StoreError(Exception):
    """State that cannot be read or written; what it holds is as it was."""


class StoreCorruptError(StoreError):
    """What is kept is not what was written."""


class StoreVersionError(StoreError):
    """It was written in another version of its format."""
