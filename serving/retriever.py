"""The core: queries in, ranked labels out, all from one release. Knows no HTTP.

Legend: `B` queries in the batch, `D` embedding dimensions, `K` the largest k of the batch, `N` answered labels
of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from bundle import Bundle, Feature
from serving.catalogue import Catalogue
from serving.conditional import ConditionalRanker
from serving.errors import UnservableReleaseError
from serving.features import EXPECTS, Features, Inputs
from serving.ranking import Batch, IndexRanker, LabelSearcher, Ranker
from serving.schemas import Query, SimilarRequest
from serving.selection import Wanted

Float32 = npt.NDArray[np.float32]


class QueryEncoder(Protocol):
    """What turns features into query embeddings; `serving.Encoder` does it with ONNX."""

    @property
    def features(self) -> Sequence[Feature]:
        """What a query may carry."""

    def example(self) -> dict[str, JsonValue]:
        """Features of a valid query."""

    def read(self, features_B: Sequence[Features]) -> Inputs:
        """The query tower's inputs, [B] or [B, P] by name; raises InvalidRequestError."""

    def embed(self, inputs: Inputs) -> Float32:
        """Query embeddings, float32 [B, D]; raises InvalidRequestError."""


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Answers to a batch, and what there is to count about them.

    Attributes:
        results: one per query, as `schemas.RetrieveResult`.
        bucket_counts: labels answered per bucket, in the order of BUCKET_NAMES.
        unknown: ids that the release does not know, in all `exclude` and in all `allow`.
        seconds: duration of each stage.
    """

    results: list[dict[str, Any]]
    bucket_counts: list[int]
    unknown: Mapping[str, int]
    seconds: Mapping[str, float]


class Retriever:
    """One release, ready to answer. Immutable and thread-safe; a hot swap is one assignment of another one.

    Args:
        name: the release's.
        created_at: when the release was built.
        bundle: the model and its labels.
        searcher: finds rows of the bundle's augmented label table. It answers alone, unless the bundle has a tree
            p_n(y|x): its conditional log p_n is then what λ multiplies for queries with features.
        encoder: the bundle's query tower.

    Raises:
        UnservableReleaseError: the searcher does not hold the bundle's labels.
    """

    def __init__(
        self, *, name: str, created_at: datetime, bundle: Bundle, searcher: LabelSearcher, encoder: QueryEncoder
    ) -> None:
        if searcher.labels != bundle.manifest.labels:
            raise UnservableReleaseError(
                f"release {name}: expected an index of {bundle.manifest.labels} labels, found {searcher.labels}"
            )
        self.name = name
        self._created_at = created_at
        self._manifest = bundle.manifest
        self._embeddings_LD = bundle.embeddings
        self._catalogue = Catalogue(bundle.labels)
        self._encoder = encoder
        self._by_label: Ranker = IndexRanker(searcher, bundle.augmentation)
        self._by_query: Ranker = (
            self._by_label
            if bundle.proposal is None
            else ConditionalRanker(searcher, self._by_label, bundle, bundle.proposal)
        )

    def retrieve(self, queries: Sequence[Query]) -> Retrieval:
        """The best labels of each query, scored `s_λ = u·v/T + b + λ·log p_n` [METHODS §6].

        p_n is p_n(y|x) where the bundle has a tree [BM20 eq. 5], else the label's training frequency.

        Raises:
            InvalidRequestError: names the query and field that this release cannot answer.
        """
        started = perf_counter()
        default = self._manifest.bias_removal.default
        wanted = [
            Wanted.from_selection(query, self._manifest, self._catalogue, default=default, prefix=f"queries.{index}.")
            for index, query in enumerate(queries)
        ]
        inputs = self._encoder.read([query.features for query in queries])
        return self._answer(self._by_query, self._encoder.embed(inputs), inputs, wanted, started)

    def similar(self, request: SimilarRequest) -> Retrieval:
        """The labels nearest to given labels, `s_λ = v·v'/T + b' + λ·log p_n'`, the label itself left out.

        λ is 0 unless the request says otherwise: nearness, not popularity. p_n is always the label's training
        frequency: a label has no query features for a tree p_n(y|x) to look at.

        Raises:
            UnknownLabelError: the release has no such label.
            InvalidRequestError: as for `retrieve`.
        """
        started = perf_counter()
        ids = request.labels
        fields = ["id"] if request.ids is None else [f"ids.{index}" for index in range(len(ids))]
        rows = [self._catalogue.row(id_, field=field) for id_, field in zip(ids, fields, strict=True)]
        wanted = Wanted.from_selection(request, self._manifest, self._catalogue, default=0.0)
        without_itself = [wanted.without(row) for row in rows]
        retrieval = self._answer(self._by_label, self._embeddings_LD[rows], {}, without_itself, started)
        for id_, result in zip(ids, retrieval.results, strict=True):
            result["id"] = str(id_)
        return retrieval

    def label(self, id_: str) -> dict[str, Any]:
        """Everything known about one label; raises UnknownLabelError."""
        return self._catalogue.described(self._catalogue.row(id_))

    def warm(self) -> None:
        """Answer one real query, so that what is loaded at first use is loaded before the first client."""
        k = min(10, self._manifest.labels)
        maximum = self._manifest.bias_removal.maximum
        self.retrieve(
            [
                Query(features=self._encoder.example(), k=k, exclude=[""]),
                Query(features={}, k=k, bias_removal=maximum),
            ]
        )

    def describe(self) -> dict[str, Any]:
        """`schemas.ReleaseAnswer`, but for the request's id."""
        manifest = self._manifest
        return {
            "name": self.name,
            "created_at": self._created_at,
            "model": manifest.name,
            **manifest.model_dump(
                include={"labels", "dim", "similarity", "temperature", "loss", "bias_removal", "buckets"}
            ),
            "proposal": self._by_query.proposal,
            "query_features": [
                {
                    "name": feature.name,
                    "kind": feature.kind,
                    "expects": EXPECTS[feature.kind],
                    "max_length": feature.max_length,
                }
                for feature in self._encoder.features
            ],
            "example": self._encoder.example(),
        }

    def _answer(
        self, ranker: Ranker, vectors_BD: Float32, inputs: Inputs, wanted: Sequence[Wanted], started: float
    ) -> Retrieval:
        """One ranking at the largest k; every query takes its own first k from it."""
        encoded = perf_counter()
        largest_k = max(query.k for query in wanted)
        bias_removal_B = np.array([query.bias_removal for query in wanted], np.float32)
        batch = Batch(vectors_BD, inputs, bias_removal_B, [query.filter for query in wanted], largest_k)
        scores_BK, rows_BK = ranker.rank(batch)
        searched = perf_counter()
        k_B = np.array([query.k for query in wanted])
        answered_BK = (np.arange(largest_k) < k_B[:, None]) & (rows_BK >= 0)
        rows_N = rows_BK[answered_BK]
        labels = self._catalogue.ranked(rows_N, scores_BK[answered_BK])
        ends_B = np.cumsum(answered_BK.sum(axis=1)).tolist()
        results = [
            {
                "labels": labels[start:end],
                "bias_removal": query.bias_removal,
                "unknown": {"exclude": query.unknown_exclude, "allow": query.unknown_allow},
            }
            for query, start, end in zip(wanted, [0, *ends_B[:-1]], ends_B, strict=True)
        ]
        return Retrieval(
            results=results,
            bucket_counts=self._catalogue.bucket_counts(rows_N),
            unknown={
                "exclude": sum(query.unknown_exclude for query in wanted),
                "allow": sum(query.unknown_allow for query in wanted),
            },
            seconds={"encode": encoded - started, "search": searched - encoded, "answer": perf_counter() - searched},
        )
