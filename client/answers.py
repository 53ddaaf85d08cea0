"""Read the service's answers from JSON by pydantic: wrong types are refused, keys of newer services ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")

BucketName = Literal["head", "torso", "tail", "new"]
"""Frequency bucket of a label by its count in training; `new`: the label has no training pairs."""
LabelState = Literal["visible", "hidden", "added"]
"""`visible`: a label of the release. `hidden`: a label of the release that no answer has. `added`: added since."""


@dataclass(frozen=True, slots=True)
class Label:
    """One label of an answer, with score, frequency bucket and display columns.

    `score` is s = u·v/T + b + λ·log ν + μ·log π + Σ w·r + ω·c in logits. `propensity` is the probability that the label
    is in the answer, 1 unless the query explores.
    """

    id: str
    score: float
    bucket: str
    display: dict[str, Any]
    propensity: float = 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one query, best label first.

    Attributes:
        unknown: numbers of ids that the release does not know: of features (`query`), `history`, `exclude`, `allow`.
        id: the label of a `similar` request.
        bonus, slope, decay: weights other than 0; the keys are those of `Query`.
        exploration: `slots` and `candidates` by bucket and the `temperature`, if the query explores.
        floors: the floors of `at_least`, each with `met`, the number of answered labels that meet it.
        cost: loss of summed scores by these floors, in logits.
        pool: number of labels that `max_per` and `mmr` chose from.
        run, arm: the running experiment, and the arm of this answer.
        counted: whether the comparison of arms counts this answer.
        release: the release that answered, while an experiment runs.
        answer_id: the id by which feedback refers to this answer; None for a preview.
        basis: what ranks the labels: `model`, or where nothing is known of the query `cooccurrence` or `popularity`;
            None for a `similar` request.
    """

    labels: tuple[Label, ...]
    bias_removal: float
    popularity: float
    unknown: Mapping[str, int]
    id: str | None = None
    exploration: Mapping[str, Any] | None = None
    priors: Mapping[str, float] = field(default_factory=dict)
    bonus: Mapping[str, float] = field(default_factory=dict)
    slope: Mapping[str, float] = field(default_factory=dict)
    decay: Mapping[str, Any] | None = None
    pool: int | None = None
    floors: list[Mapping[str, Any]] | None = None
    cost: float | None = None
    run: str | None = None
    arm: str | None = None
    counted: bool | None = None
    release: str | None = None
    answer_id: str | None = None
    cooccurrence: float = 0.0
    basis: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One result per query, in order."""

    results: tuple[Result, ...]
    release: str
    request_id: str


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def read(kind: type[T], content: bytes) -> T:
    """Read JSON as an `Answer` or a `dict[str, Any]`; raises pydantic.ValidationError."""
    value: T = _adapter(kind).validate_json(content, strict=True)
    return value
