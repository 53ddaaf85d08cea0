"""What towers and feature kinds of one's own are built from, and the tables of them. Loads no Keras.

Legend: `B` batch, `P` positions of a bag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import keras

Side = Literal["query", "label"]
Kind = Literal["id", "history", "bag", "text", "number", "vector", "date"]
"""What a feature may read, and the name of our own way to embed it."""

POOLED: tuple[Kind, ...] = ("history", "bag", "text")
"""Kinds of which a tower sees entries with weights."""


class TowerSetup(NamedTuple):
    """What a tower of one's own may know beside its input.

    Attributes:
        name: `query_tower` or `label_tower`; a prefix for names of layers.
        side: which of the two.
        dim: `model.dim`. What the tower returns is projected to it, unless it is as wide.
    """

    name: str
    side: Side
    dim: int


Tower = Callable[..., "keras.KerasTensor"]
"""From the combination of the features [B, width] and a `TowerSetup`, and keyword-only parameters, to [B, any width].
"""

TOWERS: dict[str, Tower] = {}
"""Towers of one's own by the name that a recipe's `tower` calls them."""
