"""Ids that a release does not know are counted in the answer: those of another spelling look like no one's."""

from __future__ import annotations

from typing import Any

import pytest

from longtail.serving.core.queries import RetrieveQuery
from longtail.serving.monitoring import IdCounts
from tests.bundles import make_bundle
from tests.serving.plane import make_retriever, read_results


def unknown(*queries: dict[str, Any], **request: Any) -> tuple[list[tuple[int, int]], dict[str, IdCounts]]:
    """Unknown ids of the features and of the history of each query, and all of them added up."""
    bundle = make_bundle(labels=60, **request)
    retrieval = make_retriever(bundle).retrieve([RetrieveQuery(**query) for query in queries])
    counts = [result["unknown"] for result in read_results(retrieval)]
    return [(item["query"], item["history"]) for item in counts], dict(retrieval.ids)


@pytest.mark.parametrize(("user", "query"), [("u3", 0), ("U3", 1), ("u3 ", 1), (3, 1), (None, 0)])
def test_a_user_of_another_spelling_is_unknown(user: object, query: int) -> None:
    of_each, together = unknown({"features": {"user_id": user}})
    assert of_each == [(query, 0)]
    assert together["query"] == IdCounts(int(user is not None), int(user is not None), query)


def test_entries_of_a_history_and_queries_without_any() -> None:
    of_each, together = unknown(
        {"features": {"user_id": "u3", "history": ["item-1", "zz1", "zz2"]}}, {"features": {}}, {"vector": [0.5] * 8}
    )
    assert of_each == [(0, 2), (0, 0), (0, 0)]
    assert together == {"query": IdCounts(1, 1, 0), "history": IdCounts(1, 3, 2)}


def test_unknown_ids_of_remembered_queries_and_histories_are_counted() -> None:
    queries = [
        {"features": {"user_id": "u3"}, "history": ["item-1", "zz"]}, {"features": {"user_id": "U3"}},
    ]  # fmt: skip
    of_each, _ = unknown(*queries, cooccurrence=True)
    assert of_each == [(0, 1), (1, 0)]
