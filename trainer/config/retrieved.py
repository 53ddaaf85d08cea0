"""Negatives that the model itself retrieves for a query: `[loss] retrieved_negatives`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from longtail.trainer.config.base import Section

Count = Annotated[int, Field(ge=1)]


class RetrievedConfig(Section):
    """Before an epoch the labels that the model ranks first are looked up for every training query, its training
    positives left out, and each row of a batch takes some of its query's as negatives (ANCE) [METHODS §3.1].

    A search costs what an evaluation of all training queries does, and holds depth × 4 bytes for each of them.
    """

    negatives: Count = 4
    """Labels that a row takes of its query's list: one at random of each of as many equal parts of it."""
    depth: Count = 200
    """Length of the lists. Long lists are safer where positives are missing in the data, which come first in them."""
    weight: float = Field(default=1.0, gt=0)
    """What each of them weighs as a negative, as it stands: no sampler drew it."""
    warm_up: int = Field(default=1, ge=0)
    """Epochs before the first search, which have the sampler's negatives alone."""
    every: Count = 1
    """Epochs between searches."""
    bias_removal: float = Field(default=0.0, ge=-1, le=2)
    """λ of the score that is searched by. 0 is the score that the loss is of; a list of what is served, bias removed,
    has its λ, mostly 1."""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.depth < self.negatives:
            raise ValueError(f"depth: expected at least negatives = {self.negatives}, received {self.depth}")
        return self

    def searched_before(self, epoch: int) -> int | None:
        """Return the epoch before which the lists of an epoch were searched, both from 0; None while it warms up.

        Example:
            >>> [RetrievedConfig(warm_up=1, every=2).searched_before(epoch) for epoch in range(5)]
            [None, 1, 1, 3, 3]
        """
        return None if epoch < self.warm_up else epoch - (epoch - self.warm_up) % self.every

    def __str__(self) -> str:
        return f"{self.negatives} of {self.depth} retrieved, each {self.weight:g}"
