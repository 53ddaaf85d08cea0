"""Interfaces and registries of custom towers and feature kinds, without loading Keras.

Legend: `B` batch, `P` positions of a bag, history, audience or text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import keras

Side = Literal["query", "label"]
Kind = Literal["id", "history", "audience", "bag", "text", "number", "vector", "date"]
"""Built-in feature kinds: each defines how columns and requests are read, and how values are embedded."""

POOLED: tuple[Kind, ...] = ("history", "audience", "bag", "text")
"""Kinds whose values are bags: entries with weights."""


class TowerSetup(NamedTuple):
    """Describe the tower that a custom function builds.

    Attributes:
        name: `query_tower` or `label_tower`; a prefix for names of layers.
        dim: `model.dim`, the width to which an output of another width is projected.
    """

    name: str
    side: Side
    dim: int


Tower = Callable[..., "keras.KerasTensor"]
"""A function of the features' combination [B, width], a `TowerSetup` and keyword-only parameters to [B, any width]."""

TOWERS: dict[str, Tower] = {}
"""Custom towers, by their names in a recipe's `tower`."""


class FeatureSetup(NamedTuple):
    """Describe a feature of a custom kind.

    Attributes:
        name: name of the feature; a prefix for names of layers.
        max_length: largest P of a history, bag or text, and of an audience in training; else None.
        mean, std: mean and standard deviation of a number's training values; else None.
    """

    name: str
    side: Side
    max_length: int | None = None
    mean: float | None = None
    std: float | None = None


class FeatureKind(NamedTuple):
    """Define a custom feature kind: the built-in kind of its values, and the layers of its part.

    Attributes:
        part: function of tensors, a `FeatureSetup` and keyword-only parameters to a part [B, width] of the tower's
            input. A history, audience, bag or text has two tensors: the entries' embeddings [B, P, dim] and weights
            [B, P]. Other kinds have one: the embedding [B, dim] of an id or a date, the numbers [B, dims] of a vector,
            or the number itself, not standardised, [B, 1].
        reads: the built-in kind by which columns, requests and bundles treat the feature.
    """

    part: Callable[..., keras.KerasTensor]
    reads: Kind

    @property
    def tensors(self) -> int:
        """Return the number of tensors that `part` gets."""
        return 2 if self.reads in POOLED else 1


FEATURES: dict[str, FeatureKind] = {}
"""Custom feature kinds, by their names in a recipe's `kind`."""
