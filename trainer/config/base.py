"""What every table of a recipe has in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of a recipe: unknown keys are refused, values are fixed and finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def one_of(what: str, table: Mapping[str, Any], name: str, *, also: str = "") -> None:
    """Raise ValueError for a name that is not in the table, nor what else could have put it there."""
    if name not in table:
        lacking = f", which is neither registered nor {also}" if also else ""
        raise ValueError(f"{what}: expected one of {', '.join(table) or 'none'}, received {name!r}{lacking}")
