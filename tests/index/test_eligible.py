"""Sets of labels reuse what earlier versions of them computed, with equal results."""

from __future__ import annotations

import numpy as np

from longtail.index.search.eligible import Eligible


def test_incremental_sets_equal_new_sets() -> None:
    rng, labels = np.random.default_rng(0), 1_003
    lists_L = rng.integers(0, 9, labels).astype(np.int32)
    mask_L, latest = rng.random(labels) < 0.5, None
    for step in range(40):
        rows_R = np.sort(rng.choice(labels, rng.choice([0, 1, 9, 400]), replace=False))
        is_member_R = rng.random(len(rows_R)) < 0.5
        before = Eligible.from_mask(mask_L) if latest is None else latest
        mask_L[rows_R] = is_member_R
        now = before.changed(rows_R, is_member_R).succeeding(latest)
        assert now.rows.tolist() == np.flatnonzero(mask_L).tolist()
        assert now.count == mask_L.sum()
        assert now.excluded_rows.tolist() == np.flatnonzero(~mask_L).tolist()
        if step % 3:  # of every third set nothing is computed
            expected_C = np.bincount(lists_L[mask_L], minlength=9)
            assert now.per_list(lists_L, 9).tolist() == expected_C.tolist()
        latest = now
    assert latest is not None
    assert latest.changed(np.empty(0, np.int64), np.empty(0, np.bool_)).succeeding(latest) is latest


def test_minus_lists_the_rows_that_another_set_lacks() -> None:
    visible_L, filtered_L = np.arange(20) % 4 != 0, np.arange(20) < 10
    filtered = Eligible.from_mask(filtered_L)
    eligible = filtered.intersect(Eligible.from_mask(visible_L)).without(np.array([2, 9]))
    assert eligible.rows.tolist() == [1, 3, 5, 6, 7]
    assert filtered.minus(eligible).tolist() == [0, 2, 4, 8, 9]
    assert filtered.minus(filtered).size == 0
