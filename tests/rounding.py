"""Compare answers of different batches: BLAS adds in another order, so the last bits of a score differ."""

from __future__ import annotations

from typing import Any

import pytest


def within_rounding(value: Any) -> Any:
    """Replace the floats of an answer by approximate ones, which `==` compares within float32's rounding."""
    if isinstance(value, dict):
        return {name: within_rounding(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(within_rounding, value))
    return pytest.approx(value, rel=1e-5, abs=2e-6) if isinstance(value, float) else value
