"""Every filter on every kind: only eligible labels, k of them whenever k exist, and the exact ones on flat."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from longtail.index import Filter, Release, Searcher
from tests.index.conftest import KINDS, brute_force, masked


def eligible_labels(release: Release, filter_: Filter) -> np.ndarray:
    """Return the labels that a filter admits by its definition, bool [L]."""
    rows = np.arange(release.searcher.labels)
    eligible = np.ones(len(rows), bool)
    if filter_.exclude is not None:
        eligible &= ~np.isin(rows, filter_.exclude)
    if filter_.allow is not None:
        eligible &= np.isin(rows, filter_.allow)
    if filter_.buckets is not None:
        eligible &= np.isin(release.bundle.labels.buckets, list(filter_.buckets))
    return eligible


def check(
    release: Release,
    filter_: Filter | None,
    k: int,
    query: int,
    bias_removal: float,
    hidden: tuple[Searcher, np.ndarray] | None = None,
) -> None:
    """Compare the answer to one query with brute force; `hidden` is a searcher and the rows that it hides."""
    bundle = release.bundle
    query_D = bundle.calibration_queries[query]
    queries = bundle.augmentation.queries(query_D[None], bias_removal)
    eligible = eligible_labels(release, filter_ or Filter())
    searcher = release.searcher
    if hidden is not None:
        searcher, rows_R = hidden
        eligible[rows_R] = False
    scores, rows = searcher.search(queries, k, None if filter_ is None else [filter_])
    exact = brute_force(bundle, query_D, bias_removal)
    result_rows = rows[0][rows[0] >= 0]
    assert eligible[result_rows].all()
    assert len(result_rows) == len(set(result_rows)) == min(k, eligible.sum())
    assert np.allclose(scores[0][: len(result_rows)], exact[result_rows], atol=1e-4)
    assert (scores[0][len(result_rows) :] == -np.inf).all()
    assert (rows[0][len(result_rows) :] == -1).all()
    if release.manifest.kind in ("flat", "milvus_flat"):
        assert np.allclose(scores[0], masked(exact, eligible, k), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("spec", KINDS)
def test_filters_worked_case_by_case(spec: str, opened: Callable[[str], Release]) -> None:
    release = opened(spec)
    labels = release.searcher.labels
    best = np.argsort(-brute_force(release.bundle, release.bundle.calibration_queries[0], 1.0))
    nothing = np.empty(0, np.int64)
    for filter_ in (
        Filter(),
        Filter(exclude=nothing),
        Filter(allow=nothing),
        Filter(buckets=frozenset()),
        Filter(buckets=frozenset({0, 1, 2})),
        Filter(exclude=best[:30]),
        Filter(exclude=best[: labels - 5]),
        Filter(exclude=np.repeat(best[:3], 500)),
        Filter(allow=best[-3:]),
        Filter(allow=best[labels // 2 :]),
        Filter(allow=best[labels // 2 :], exclude=best[-labels // 4 :]),
        Filter(allow=best[:20], buckets=frozenset({2}), exclude=best[:5]),
        *(Filter(buckets=frozenset({bucket})) for bucket in (0, 1, 2)),
        Filter(buckets=frozenset({1, 2}), exclude=best[: labels // 2]),
    ):
        for k in (1, 20, 300):
            check(release, filter_, k, query=0, bias_removal=1.0)


@pytest.mark.parametrize("spec", [spec for spec, labels in KINDS.items() if labels < 1000])
def test_any_filter_fills_k(spec: str, opened: Callable[[str], Release]) -> None:
    release = opened(spec)
    rows = st.none() | st.lists(st.integers(0, release.searcher.labels - 1), max_size=60).map(
        lambda values: np.array(values, np.int64)
    )
    ranges = st.tuples(st.integers(0, 599), st.integers(0, 599)).map(lambda ends: np.arange(min(ends), max(ends)))
    buckets = st.none() | st.frozensets(st.integers(0, 2))

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        filter_=st.builds(Filter, exclude=rows | ranges, allow=rows | ranges, buckets=buckets),
        k=st.integers(1, 80),
        query=st.integers(0, 19),
        bias_removal=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    )
    def run(filter_: Filter, k: int, query: int, bias_removal: float) -> None:
        check(release, filter_, k, query, bias_removal)

    run()


@pytest.mark.parametrize("spec", ["ivf_flat", "ivf_sq", "ivf_fastscan"])
def test_recall_holds_under_a_bucket_filter(spec: str, opened: Callable[[str], Release]) -> None:
    release = opened(spec)
    bundle = release.bundle
    queries = bundle.augmentation.queries(bundle.calibration_queries, 0.5)
    tail = Filter(buckets=frozenset({2}))
    eligible = bundle.labels.buckets == 2
    scores, _ = release.searcher.search(queries, 20, [tail] * len(queries))
    least = [masked(brute_force(bundle, query, 0.5), eligible, 20)[-1] for query in bundle.calibration_queries]
    assert (scores >= np.array(least)[:, None] - 1e-5).mean() > 0.94
