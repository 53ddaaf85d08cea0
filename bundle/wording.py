"""How an error message shows what was received: short, on one line, whatever a client sent."""

from __future__ import annotations

import json

_LONGEST = 60


def received(value: object) -> str:
    """A JSON value in words: `"abc"`, `-3`, `a list of 3`, `an integer of 401 digits`."""
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
