"""Define the error of stored state."""

from __future__ import annotations


class StoreError(Exception):
    """State that cannot be read or written, is damaged, or has another version; its content is unchanged."""
