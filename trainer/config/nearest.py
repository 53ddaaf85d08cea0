"""Nearest neighbours that a row's query and label are held to: `[loss] neighbours`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from longtail.trainer.config.base import Section

Side = Literal["query", "label"]


class NeighboursConfig(Section):
    """A row's query and its label are each contrasted with one of their nearest neighbours in the training pairs,
    against those of the batch, a term added to any family's loss (NESCL) [METHODS §10.3].

    Neighbours are found once, before training; their lists hold k × 4 bytes for every query and every label.
    """

    k: Annotated[int, Field(ge=1)] = 5
    """Neighbours of a query or label, at most: those whose training pairs have the highest cosine with its own."""
    temperature: float = Field(default=0.1, gt=0)
    """T of the term, whose scores are cosines whatever `model.similarity` is."""
    weight: float = Field(default=0.1, ge=0)
    """What a side's term counts beside a row's loss; 0 is no term at all."""
    sides: Annotated[tuple[Side, ...], Field(min_length=1, max_length=2)] = ("query", "label")
    """Whose neighbours: `query`, `label` or both. `query` needs features that are the query's whatever the row."""

    @field_validator("sides")
    @classmethod
    def _once(cls, sides: tuple[Side, ...]) -> tuple[Side, ...]:
        if len(set(sides)) < len(sides):
            raise ValueError(f"expected each side once, received {', '.join(sides)}")
        return sides

    def __str__(self) -> str:
        return f"{self.k} neighbours of {' and '.join(self.sides)}, {self.weight:g} within {self.temperature:g}"
