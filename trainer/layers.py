"""What towers and feature kinds of one's own are built from, and the tables of them. Loads no Keras.

Legend: `B` batch, `P` positions of a bag, history, audience or text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import keras

Side = Literal["query", "label"]
Kind = Literal["id", "history", "audience", "bag", "text", "number", "vector", "date"]
"""What a feature is read as, from columns and requests alike, and the name of our own way to embed it."""

POOLED: tuple[Kind, ...] = ("history", "audience", "bag", "text")
"""Kinds of which a tower sees entries with weights."""


class TowerSetup(NamedTuple):
    """What a tower of one's own may know beside its input.

    Attributes:
        name: `query_tower` or `label_tower`; a prefix for names of layers.
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


class FeatureSetup(NamedTuple):
    """What a feature kind of one's own may know beside its tensors.

    Attributes:
        name: the feature's; a prefix for names of layers.
        max_length: of a history, audience, bag or text: P at most, of an audience in training; else None.
        mean, std: of a number: of its training values; else None.
    """

    name: str
    side: Side
    max_length: int | None = None
    mean: float | None = None
    std: float | None = None


class FeatureKind(NamedTuple):
    """A feature kind of one's own: what it is read as, and the layers that make a part of the tower's input of it.

    Attributes:
        part: from tensors and a `FeatureSetup`, and keyword-only parameters, to [B, width]. The tensors are the
            entries' embeddings [B, P, dim] and weights [B, P] of a history, audience, bag or text, and one tensor of
            the other kinds: the embedding [B, dim] of an id or a date, the numbers [B, dims] of a vector, the number
            itself, not standardised, [B, 1].
        reads: the kind that columns, requests and bundles know it as.
    """

    part: Callable[..., keras.KerasTensor]
    reads: Kind

    @property
    def tensors(self) -> int:
        """Return how many tensors it is called with."""
        return 2 if self.reads in POOLED else 1


FEATURES: dict[str, FeatureKind] = {}
"""Feature kinds of one's own by the name that a recipe's `kind` calls them."""
