"""What can be wrong with a bundle. Every message says what was expected, what was found, and where."""

from __future__ import annotations

import json


class BundleError(Exception):
    """Base of everything this package raises."""


class BundleExistsError(BundleError):
    """The target of a write is already there; nothing was touched."""


class BundleCorruptError(BundleError):
    """A file is missing, unreadable, or not the one that was written (sha256)."""


class BundleVersionError(BundleError):
    """The bundle has another schema version than this installation reads."""


class BundleInvariantError(BundleError):
    """Files are intact but contradict the contract of FORMAT.md."""

    def __init__(self, invariant: str, *, expected: object, found: object) -> None:
        super().__init__(f"bundle invariant broken: {invariant}: expected {expected}, found {found}")
        self.invariant, self.expected, self.found = invariant, expected, found


def require(invariant: str, holds: bool, expected: object, found: object) -> None:
    """Raise BundleInvariantError unless the invariant holds."""
    if not holds:
        raise BundleInvariantError(invariant, expected=expected, found=found)


class InputError(BundleError, ValueError):
    """A value of a request is invalid; `field` is its dotted path, such as `features.history.3`."""

    def __init__(self, message: str, *, row: int, field: str) -> None:
        super().__init__(f"{field} in row {row}: {message}")
        self.message = message
        self.row = row
        self.field = field


class FeatureError(InputError):
    """A feature that the tower does not have, or a value that it cannot read."""


class DisplayError(InputError):
    """A display column that the labels do not have, or a value that it cannot hold."""


class TowerError(BundleError):
    """Not an ONNX model that runs here, or one whose inputs or output are not what the manifest says."""


class StorageError(OSError):
    """An object store that does not answer, refuses, or gives other bytes than were put there."""


class FixedLabelsError(BundleError):
    """A bundle that cannot embed new labels: no label tower, or a tree p_n(y|x) that has no leaf for them."""


_LONGEST = 60
"""Characters of a string that an error message repeats."""


def describe(value: object) -> str:
    """A received JSON value for an error message: short, on one line, whatever a client sent.

    Such as `"abc"`, `-3`, `a list of 3`, `an integer of 401 digits`.
    """
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str):
        shown = json.dumps(value[: _LONGEST + 1], ensure_ascii=False)
        return shown if len(value) <= _LONGEST else f"{shown[:_LONGEST]}… ({len(value)} characters)"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return f"an integer of {len(str(abs(value)))} digits"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    return type(value).__name__
