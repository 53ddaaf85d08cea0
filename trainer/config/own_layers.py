"""Towers of one's own, as a recipe names them."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from longtail.trainer.config.choice import Choice
from longtail.trainer.layers import TOWERS


class TowerChoice(Choice):
    """A tower of one's own: a row of `TOWERS`, by its name, and its parameters."""

    @model_validator(mode="after")
    def _defined(self) -> Self:
        self._check("tower", TOWERS, lambda tower: tower)
        return self
