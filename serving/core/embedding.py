"""Vectors of the query tower and of labels, handed out; and vectors that take the place of a query's features.

Legend: `B` queries in the batch, `D` embedding dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol, Self

import numpy as np
from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from longtail.bundle import Feature, Features, Inputs
from longtail.bundle.arrays import Float32
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.queries import LabelId, Query, RequestModel, ResolvedQuery
from longtail.serving.errors import InvalidRequestError

_LARGEST_NORM = 1e12
"""Of a vector in a query: products with any label's embedding, and sums of them, stay numbers that float32 holds."""


class QueryEncoder(Protocol):
    """Turns features into query embeddings; `bundle.Tower` does it with ONNX."""

    @property
    def features(self) -> Sequence[Feature]:
        """What a query may carry."""

    def example(self) -> dict[str, JsonValue]:
        """Features of a valid query."""

    def read(self, features_B: Sequence[Features]) -> Inputs:
        """The query tower's inputs, [B] or [B, P] by name; raises FeatureError."""

    def embed(self, inputs: Inputs) -> Float32:
        """Query embeddings, float32 [B, D]; raises FeatureError."""


class QueryFeatures(RequestModel):
    """One query of which the vector is wanted."""

    features: dict[str, JsonValue] = Field(description="By name, as GET /v1/release lists them.")


class ToEmbed(RequestModel):
    """Queries or labels whose vectors are wanted."""

    queries: list[QueryFeatures] | None = Field(
        default=None, min_length=1, description="Queries, to embed by the query tower."
    )
    labels: list[LabelId] | None = Field(
        default=None, min_length=1, description="Or ids of labels that may be answered; those added count too."
    )

    @property
    def count(self) -> int:
        """How many vectors are wanted."""
        return len(self.queries or self.labels or ())

    @model_validator(mode="after")
    def _one_of_queries_and_labels(self) -> Self:
        if (self.queries is None) == (self.labels is None):
            received = "neither" if self.queries is None else "both"
            raise PydanticCustomError(
                "queries_or_labels", "expected either queries or labels, received {received}", {"received": received}
            )
        return self


def embed_queries(
    queries: Sequence[Query], dim: int, embed: Callable[[Sequence[Features]], tuple[Float32, Inputs]]
) -> tuple[Float32, Inputs]:
    """Return u of queries of which some are vectors, float32 [B, D], and the tower's inputs; a vector has none.

    Args:
        queries: of one batch.
        dim: D.
        embed: from features to u and inputs.

    Raises:
        InvalidRequestError: names a vector that this release cannot have.
    """
    given = {
        place: _read_vector(query.vector, dim, f"queries.{place}.vector")
        for place, query in enumerate(queries)
        if query.vector is not None
    }
    if len(given) == len(queries):
        return np.stack(list(given.values())), {}
    vectors_BD, inputs = embed([query.features or {} for query in queries])
    vectors_BD = vectors_BD.copy()
    vectors_BD[list(given)] = list(given.values())
    return vectors_BD, inputs


def read_by_label(
    features: Sequence[Feature], features_B: Sequence[Features], catalogue: Catalogue, encoder: QueryEncoder
) -> Inputs:
    """Return the query tower's inputs, with the label's vector where a query gives a label's id.

    An id that no answered label has, and a label without a vector, read as a vector that is missing.

    Args:
        features: those with `of_label`.
        features_B: each query's, by name.
        catalogue: the labels.
        encoder: reads everything else.
    """
    others_B = [dict(given) for given in features_B]
    ids = [
        (row, feature, str(others.pop(feature.name)))
        for feature in features
        for row, others in enumerate(others_B)
        if isinstance(value := others.get(feature.name), str | int) and not isinstance(value, bool)
    ]
    inputs = encoder.read(others_B)
    for row, feature, id_ in ids:
        vector = catalogue.vector(str(feature.of_label), id_)
        if vector is not None:
            inputs[feature.name][row] = vector
            inputs[f"{feature.name}__missing"][row] = 0
    return inputs


def refuse_for_tree(queries: Sequence[Query], resolved: Sequence[ResolvedQuery]) -> None:
    """Raise InvalidRequestError for a vector with λ ≠ 0 under a tree p_n(y|x), which looks at features alone."""
    for place, (query, asked) in enumerate(zip(queries, resolved, strict=True)):
        if query.vector is not None and asked.bias_removal != 0:
            default = ", this release's default" if query.bias_removal is None else ""
            raise InvalidRequestError(
                "expected bias_removal 0 beside a vector: the tree p_n(y|x) of this release looks at a query's "
                f"features, which a vector has not; received {asked.bias_removal}{default}",
                field=f"queries.{place}.bias_removal",
            )


def vectors_of(
    requests: Sequence[ToEmbed], embed: Callable[[Sequence[Features]], tuple[Float32, Inputs]], catalogue: Catalogue
) -> list[list[Float32]]:
    """Return vectors for each request in its order, float32 [D]: of queries u, of labels v of `s = u·v/T + …`.

    Args:
        requests: of one batch.
        embed: from features to u, float32 [B, D], and inputs.
        catalogue: the labels.

    Raises:
        UnknownLabelError: the release has no such label.
    """
    features_B = [query.features for request in requests for query in request.queries or ()]
    rows = [
        catalogue.row(id_, field=f"labels.{place}")
        for request in requests
        for place, id_ in enumerate(request.labels or ())
    ]
    queries = iter(embed(features_B)[0] if features_B else ())
    labels = iter(catalogue.embeddings(rows) if rows else ())
    return [list(islice(queries if request.labels is None else labels, request.count)) for request in requests]


def _read_vector(numbers: Sequence[float], dim: int, field: str) -> Float32:
    """A query's vector, float32 [D].

    Args:
        numbers: finite, as they came.
        dim: D.
        field: where they stand in the request, for errors.

    Raises:
        InvalidRequestError: not D of them, or so large that scores would not be numbers.
    """
    if len(numbers) != dim:
        raise InvalidRequestError(
            f"expected the {dim} numbers of a vector of this release, received {len(numbers)}", field=field
        )
    norm = math.hypot(*numbers)
    if not norm <= _LARGEST_NORM:
        raise InvalidRequestError(
            f"expected a vector of norm <= {_LARGEST_NORM:g}, whose scores float32 can hold, received one of {norm:g}",
            field=field,
        )
    return np.array(numbers, np.float32)
