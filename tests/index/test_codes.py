"""Kinds that keep rows as codes: small files, candidates by code, answers by the rows themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from longtail.index import Filter, Release
from longtail.index.search.eligible import Eligible
from tests.index.conftest import brute_force

CODES = ("ivf_sq", "ivf_fastscan")


@pytest.mark.parametrize(("spec", "most"), [("ivf_sq", 16), ("ivf_fastscan", 6)])
def test_a_code_has_one_byte_per_coordinate_or_half_a_byte_per_two(
    spec: str, most: int, opened: Callable[[str], Release]
) -> None:
    """Rows have 10 coordinates and 6 zeros, or 9 and a zero."""
    index = opened(spec).searcher.index
    assert index.kind == spec
    assert index.index.code_size <= most


@pytest.mark.parametrize("spec", CODES)
@pytest.mark.parametrize("filter_", [None, Filter(buckets=frozenset({1, 2})), Filter(exclude=np.arange(0, 400, 3))])
def test_answers_have_the_scores_of_the_rows_not_of_the_codes(
    spec: str, filter_: Filter | None, opened: Callable[[str], Release]
) -> None:
    release = opened(spec)
    bundle, index = release.bundle, release.searcher.index
    every = Eligible.from_mask(np.ones(index.labels, np.bool_))
    for bias_removal in (-1.0, 0.0, 0.5, 1.0, 2.0):
        queries = bundle.augmentation.queries(bundle.calibration_queries, bias_removal)
        exact = np.stack([brute_force(bundle, query_D, bias_removal) for query_D in bundle.calibration_queries])
        scores, rows = release.searcher.search(queries, 30, [filter_] * len(queries))
        np.testing.assert_allclose(scores, np.take_along_axis(exact, rows, 1), atol=1e-5)
        code_scores, code_rows = index.search(queries, 30, release.manifest.params, every)
        assert np.abs(code_scores - np.take_along_axis(exact, code_rows, 1)).max() > 1e-4
