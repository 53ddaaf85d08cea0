"""Define the errors of bundles. Messages say what was expected, what was found, and where."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt


class BundleError(Exception):
    """Base class of this package's errors."""


class BundleExistsError(BundleError):
    """The target of a write exists already; nothing was changed."""


class BundleCorruptError(BundleError):
    """A file is missing, unreadable, or has another sha256."""


class BundleVersionError(BundleError):
    """A bundle with a schema version that this installation does not read."""


class BundleInvariantError(BundleError):
    """Files are intact but contradict the contract of FORMAT.md."""

    def __init__(self, invariant: str, *, expected: object, actual: object) -> None:
        super().__init__(f"bundle invariant broken: {invariant}: expected {expected}, found {actual}")
        self.invariant, self.expected, self.actual = invariant, expected, actual


def require(invariant: str, holds: bool, expected: object, actual: object) -> None:
    """Raise BundleInvariantError unless the invariant holds."""
    if not holds:
        raise BundleInvariantError(invariant, expected=expected, actual=actual)


def require_array(file: str, array: npt.NDArray[Any], dtype: npt.DTypeLike, **sizes: int | None) -> None:
    """Require dtype and sizes of an array, by the names of its axes; None for any size."""
    fits = array.dtype == dtype and array.ndim == len(sizes)
    fits = fits and all(size in (None, actual) for size, actual in zip(sizes.values(), array.shape, strict=True))
    expected = ", ".join(name if size is None else str(size) for name, size in sizes.items())
    require(
        f"{file} is {np.dtype(dtype)} [{', '.join(sizes)}]", fits, f"{np.dtype(dtype)} ({expected})",
        f"{array.dtype} {array.shape}",
    )  # fmt: skip


class InputError(BundleError, ValueError):
    """A value of a request is invalid; `field` is its dotted path, such as `features.history.3`."""

    def __init__(self, message: str, *, row: int, field: str) -> None:
        super().__init__(f"{field} in row {row}: {message}")
        self.message = message
        self.row = row
        self.field = field


class FeatureError(InputError):
    """An unknown feature, or a value that the tower cannot read."""


class DisplayError(InputError):
    """An unknown display column, or a value that does not fit the column."""


class ConditionError(BundleError, ValueError):
    """Report a filter that does not fit the display columns.

    Args:
        field: the filter's keys in the request, joined by dots: `filter.price.lt`.
    """

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(f"{field}: {message}")
        self.message, self.field = message, field


class TowerError(BundleError):
    """A file is not a working ONNX model with the manifest's inputs and output."""


class ObjectStoreError(OSError):
    """An object store fails, refuses a request, or returns other bytes than were written."""


class FixedLabelsError(BundleError):
    """A bundle that cannot embed new labels."""


_LONGEST = 60
"""Most characters of a string that an error message quotes."""
LONGEST_NAME = 100
"""Most characters of a client's name of a feature or column that an error's field has."""


def describe(value: object) -> str:
    """Describe any JSON value for an error message, briefly and on one line.

    Results are such as `"abc"`, `-3`, `a list of 3`, `an integer of 401 digits`.
    """
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str):
        text = json.dumps(value[: _LONGEST + 1], ensure_ascii=False)
        return text if len(value) <= _LONGEST else f"{text[:_LONGEST]}… ({len(value)} characters)"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return f"an integer of {len(str(abs(value)))} digits"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    return type(value).__name__
