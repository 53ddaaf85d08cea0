"""Convert values of NumPy, pandas, Polars and Arrow to those of JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_METHODS = ("tolist", "to_list", "to_pylist", "as_py", "isoformat")
"""Methods that return the plain form: of NumPy and pandas, Polars, Arrow's arrays and scalars, and dates and times."""
_MISSING = ("NAType", "NaTType")
"""Types of missing values in pandas."""


def encoded(body: Any) -> bytes:
    """Encode a body as JSON; NaN, NA and NaT become null.

    Raises:
        ValueError, TypeError: JSON cannot represent a value, such as infinity; the message names its field.

    Example:
        >>> import numpy as np
        >>> encoded({"k": np.int64(3), "features": {"age": np.float32(0.5), "taste": np.ones(2), "size": math.nan}})
        b'{"k":3,"features":{"age":0.5,"taste":[1.0,1.0],"size":null}}'
    """
    try:
        return _text(body)
    except (ValueError, TypeError):  # NaN, keys that are no text, or a value to be named
        return _text(plain(body))


def _text(body: Any) -> bytes:
    return json.dumps(body, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_plain_form).encode()


def plain(value: Any, field: str = "") -> Any:
    """Convert a value to one that JSON can represent; NaN, NA and NaT become None.

    Args:
        field: name of the value in errors.

    Raises:
        ValueError, TypeError: JSON cannot represent a value, such as infinity; the message names its field.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise ValueError(f"{field}: expected a finite number, received {value}")
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {str(name): plain(part, f"{field}.{name}".lstrip(".")) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, f"{field}.{i}".lstrip(".")) for i, part in enumerate(value)]
    try:
        form = _plain_form(value)
    except TypeError as error:
        raise TypeError(f"{field}: {error}") from None
    return plain(form, field)


def _plain_form(value: Any) -> Any:
    """Return the form of plain Python of a value of another library."""
    if type(value).__name__ in _MISSING:
        return None
    if isinstance(value, Mapping):
        return dict(value)
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if type(value).__module__ == "numpy" and kind == "M":  # nanoseconds would become a number
        value = value.astype("datetime64[us]")
    for method in _METHODS:
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"expected a value that JSON can represent, received {type(value).__name__}")
