"""Find the likeliest known queries of labels.

Legend: `N` labels, `E` dimensions of augmented labels, `D` of embeddings, `K` queries of a label's answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from longtail.bundle.arrays import Float32, Int64
from longtail.serving.core.queries import QueriesFor, SearchOptions
from longtail.serving.core.ranking import NO_ROWS
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import InvalidRequestError

_ROUNDING = 1e-6
"""Largest difference of two λ that are the same."""


def find_known_queries(retriever: Retriever, requests: Sequence[QueriesFor]) -> list[dict[str, Any]]:
    """Find the likeliest known queries of each label; numbers are NumPy's.

    The order is by `log p(y|x) = s − log Z(x)`, and by choices plus log n: see `longtail.index.building.queries`.
    Raises NoQueriesError, InvalidRequestError, NoLabelTowerError or UnknownLabelError.
    """
    index, bundle = retriever.queries, retriever.bundle
    rows, searches = list[Float32](), list[tuple[SearchOptions, list[Int64]]]()
    answers = list[dict[str, Any]]()
    for request in requests:
        bias_removal = _read_bias_removal(retriever, request)
        options = SearchOptions(
            k=request.k, filter=request.filter, exclude=request.exclude, display=request.display,
            bias_removal=float(request.by == "choices"), priors={repr(bias_removal): 1.0},
        )  # fmt: skip
        if request.features is not None:
            rows_NE, left_out = retriever.overlay.embed(request.features), [NO_ROWS]
        else:
            rows_N = np.array(retriever.find_rows(request), np.int64)
            rows_NE, left_out = retriever.overlay.augmented(rows_N), _left_out(retriever, request, rows_N)
        rows += [*rows_NE]
        searches.append((options, left_out))
        heads = [{"id": str(id_)} for id_ in request.labels] or [{}]
        answers += [{**head, "bias_removal": bias_removal} for head in heads]
    rows_NE, dim = np.stack(rows), retriever.manifest.dim
    retrieval = index.near(rows_NE[:, :dim], searches)
    lambdas_N = np.array([answer["bias_removal"] for answer in answers], np.float32)
    # b + λ·log ν + μ·log π + Σ w·r of each label: its score for the vector 0.
    zeros_ND, popularity = np.zeros((len(rows), dim), np.float32), retriever.manifest.popularity.default
    weights_NE = bundle.augmentation.queries(zeros_ND, lambdas_N, popularity, bundle.priors.defaults)
    terms_N = np.einsum("ij,ij->i", rows_NE, weights_NE) / np.float32(retriever.manifest.temperature)
    for i, (result, answer, end) in enumerate(zip(retrieval.results, answers, retrieval.ends_B, strict=True)):
        rows_K = retrieval.rows_N[end - len(result["labels"]) : end]
        log_z_K = -index.bundle.priors.values_LP[rows_K, index.priors.index(repr(answer["bias_removal"]))]
        log_n_K = retrieval.bias_removal_B[i] * index.bundle.labels.log_pn[rows_K]
        log_p_K = np.array([query["score"] for query in result["labels"]], np.float32) - log_n_K + terms_N[i]
        choices_K = np.exp(log_p_K) * (index.bundle.labels.counts[rows_K] + 0.5)
        columns = result["labels"], log_p_K + log_z_K, log_p_K, choices_K.astype(np.float32)
        answer["queries"] = [
            {"id": query["id"], "score": score, "log_p": log_p, "choices": choices, "display": query["display"]}
            for query, score, log_p, choices in zip(*columns, strict=True)
        ]
        answer["unknown"] = result["unknown"]
    return answers


def _read_bias_removal(retriever: Retriever, request: QueriesFor) -> float:
    """Get the λ of a request at which log Z is known; raises InvalidRequestError."""
    bias_removal = retriever.manifest.bias_removal.default if request.bias_removal is None else request.bias_removal
    for value in map(float, retriever.queries.priors):
        if abs(value - bias_removal) <= _ROUNDING:
            return value
    raise InvalidRequestError(
        f"expected a bias_removal at which queries are compared, one of {[*map(float, retriever.queries.priors)]}, "
        f"received {bias_removal}",
        field="bias_removal",
    )


def _left_out(retriever: Retriever, request: QueriesFor, rows_N: Int64) -> list[Int64]:
    """List the queries that chose or refused each label; raises InvalidRequestError."""
    remembered = retriever.bundle.remembered
    excluded = retriever.manifest.exclude_history if request.exclude_history is None else request.exclude_history
    if request.exclude_history and remembered is None:
        raise InvalidRequestError(
            "expected exclude_history false or null, as this release remembers no queries, received true",
            field="exclude_history",
        )
    if remembered is None or not (excluded or retriever.negative_events):
        return [NO_ROWS] * len(rows_N)
    queries_P, ends_L = retriever.queries_by_label(refused=not excluded)
    rows = retriever.overlay.find_built_rows(rows_N).tolist()
    return [queries_P[ends_L[row] : ends_L[row + 1]].astype(np.int64) if row >= 0 else NO_ROWS for row in rows]
