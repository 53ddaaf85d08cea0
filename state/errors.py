"""What is wrong with kept state."""

from __future__ import annotations


class StoreError(Exception):
    """State that cannot be read or written, is damaged or of another version; what it holds is as it was."""
