"""Labels hidden at run time: never answered, under no filter, and k answered all the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from longtail.index import Filter, QueryError, Release
from tests.index.conftest import KINDS, brute_force, masked
from tests.index.test_filters import check


@pytest.mark.parametrize("spec", KINDS)
def test_hidden_labels_are_never_answered_under_any_filter(spec: str, opened: Callable[[str], Release]) -> None:
    release = opened(spec)
    labels = release.searcher.labels
    best = np.argsort(-brute_force(release.bundle, release.bundle.calibration_queries[0], 1.0))
    for hidden in (best[:1], best[:40], best[:400], best[3:], best):
        searcher = release.searcher.without(hidden)
        for filter_ in (
            None,
            Filter(exclude=best[30:50]),
            Filter(exclude=best[: labels // 2]),
            Filter(allow=best[:5]),
            Filter(allow=best[: labels // 2]),
            Filter(buckets=frozenset({2})),
            Filter(buckets=frozenset({0, 1}), exclude=best[:300], allow=best[100:]),
        ):
            for k in (1, 20, labels):
                check(release, filter_, k, query=0, bias_removal=1.0, hidden=(searcher, hidden))


@pytest.mark.parametrize("spec", ["ivf_flat", "ivf_sq", "ivf_fastscan"])
def test_recall_holds_when_the_best_labels_are_hidden(spec: str, opened: Callable[[str], Release]) -> None:
    release = opened(spec)
    bundle = release.bundle
    queries = bundle.augmentation.queries(bundle.calibration_queries, 0.5)
    hidden = np.random.default_rng(0).choice(release.searcher.labels, release.searcher.labels // 10, replace=False)
    eligible = np.ones(release.searcher.labels, bool)
    eligible[hidden] = False
    scores, _ = release.searcher.without(hidden).search(queries, 20)
    least = [masked(brute_force(bundle, query, 0.5), eligible, 20)[-1] for query in bundle.calibration_queries]
    assert (scores >= np.array(least)[:, None] - 1e-5).mean() > 0.94


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.array([600]), r"hidden labels: expected label rows 0\.\.599, received 600"),
        (np.array([-1]), "received -1"),
        (np.array([0.5]), r"expected label rows, int64 \[R\], received float64 \[1\]"),
        (np.zeros((1, 1), np.int64), r"received int64 \[1, 1\]"),
    ],
)
def test_invalid_rows_are_refused(rows: np.ndarray, message: str, opened: Callable[[str], Release]) -> None:
    with pytest.raises(QueryError, match=message):
        opened("flat").searcher.without(rows)
