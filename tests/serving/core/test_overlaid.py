"""Added labels by the thousand, in an index of their own: as good as a scan, whatever goes and whatever is asked."""

from __future__ import annotations

import numpy as np
import pytest

from longtail.bundle import Bundle
from longtail.index import Filter, Selection
from longtail.serving.core import overlay as overlay_module
from longtail.serving.core.overlaid import OverlaidSearcher
from longtail.serving.core.overlay import Overlay
from tests.bundles import make_bundle
from tests.serving.core.test_overlay import L, hide, overlay_of, upsert

ADDED, SCANNED = 3_000, 1_000


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many labels each index that was made in memory has."""
    made: list[int] = []
    index = overlay_module.index_in_memory

    def counting(bundle: Bundle) -> object:
        made.append(len(bundle.embeddings))
        return index(bundle)

    monkeypatch.setattr(overlay_module, "_SCANNED_UP_TO", SCANNED)
    monkeypatch.setattr(overlay_module, "index_in_memory", counting)
    return made


def some_overlay(bundle: Bundle) -> Overlay:
    """3,000 labels in three parts, some of them replacing the release's."""
    rng = np.random.default_rng(0)
    records = [
        upsert(f"item-{row}" if row < 20 else f"new-{row}", year=float(rng.normal()), genres=[f"g{row % 5}"])
        for row in range(ADDED)
    ]
    overlay = overlay_of(bundle, *records[:700], most=10_000)
    for start in (700, 1500, 2600):
        overlay = overlay.with_changes(records[start : {700: 1500, 1500: 2600, 2600: ADDED}[start]])
    return overlay


def by_scan(overlay: Overlay, queries: np.ndarray, filter_: Filter | None) -> np.ndarray:
    """The score of every row for every query, float32 [B, L + M]; −inf of those that are not eligible."""
    searcher = overlay.searcher
    assert isinstance(searcher, OverlaidSearcher)
    scan = OverlaidSearcher(searcher._base, L, overlay.rows_ME, overlay.added.buckets)
    scores, rows = scan.search(queries, overlay.labels, None if filter_ is None else [filter_] * len(queries))
    by_row = np.full((len(queries), overlay.labels + 1), -np.inf, np.float32)
    np.put_along_axis(by_row, rows, scores, axis=1)  # what is missing, −1, goes to the last place
    return by_row[:, :-1]


def test_an_index_is_made_when_too_many_are_left_to_scan(builds: list[int]) -> None:
    overlay = some_overlay(make_bundle(labels=L, label_tower=True))

    assert builds == [1500, 2600]
    assert overlay.indexed is not None
    assert (len(overlay.added), len(overlay.indexed)) == (ADDED, 2600)


@pytest.mark.parametrize(
    "filter_",
    [
        None,
        Filter(buckets=frozenset({3}), exclude=np.arange(L, L + 2_700, 2)),
        Filter(beyond=Selection(np.arange(ADDED) % 3 == 0), selection=Selection(np.zeros(L, bool))),
        Filter(beyond=Selection(np.arange(ADDED) % 100 == 7)),
    ],
    ids=["all", "excluded", "selected", "few"],
)
@pytest.mark.usefixtures("builds")
def test_what_is_found_is_what_a_scan_finds(filter_: Filter | None) -> None:
    """Nearly all of the 50 best of index and added rows; every score is exact, and every row eligible."""
    bundle = make_bundle(labels=L, label_tower=True)
    overlay = some_overlay(bundle)
    dials = np.random.default_rng(1).choice([0.0, 0.5, 1.0], len(bundle.calibration_queries)).astype(np.float32)
    queries = bundle.augmentation.queries(bundle.calibration_queries, dials)
    scores, rows = overlay.searcher.search(queries, 50, None if filter_ is None else [filter_] * len(queries))

    expected = by_scan(overlay, queries, filter_)
    best = np.sort(expected, axis=1)[:, :-51:-1]
    there = np.isfinite(best)
    assert (rows[:, : there[0].sum()] >= 0).all()
    np.testing.assert_allclose(scores[there], np.take_along_axis(expected, rows, 1)[there], rtol=1e-5, atol=1e-6)
    assert (
        (scores >= best[:, [there[0].sum() - 1]] - 1e-5) & there
    ).sum() >= 0.97 * there.sum()  # .99 of its own hundred
    assert (rows >= L).mean() > 0.2


def test_labels_that_go_are_out_and_the_others_move_up(builds: list[int]) -> None:
    bundle = make_bundle(labels=L, label_tower=True)
    overlay = some_overlay(bundle)
    queries = bundle.augmentation.queries(bundle.calibration_queries, 0.5)
    best = [overlay.added.ids[row - L] for row in np.unique(overlay.searcher.search(queries, 5)[1]) if row >= L]
    assert len(best) > 10
    gone, moved = best[:-3], best[-3:]
    later = overlay.with_changes([hide(id_) for id_ in gone] + [upsert(id_, year=-50.0) for id_ in moved])

    assert builds == [1500, 2600]
    assert later.indexed is not None
    assert len(later.added) == ADDED - len(gone)
    scores, rows = later.searcher.search(queries, 40)
    np.testing.assert_allclose(scores, np.take_along_axis(by_scan(later, queries, None), rows, 1), rtol=1e-5, atol=1e-6)
    assert not {later.added.ids[row - L] for row in np.unique(rows[rows >= L])} & set(gone)
    assert all(np.unique(line).size == 40 for line in rows)


def test_an_index_of_which_nothing_is_left_goes(builds: list[int]) -> None:
    bundle = make_bundle(labels=L, label_tower=True)
    overlay = overlay_of(bundle, *[upsert(f"new-{row}", year=row / 9) for row in range(1_001)], most=10_000)
    assert len(overlay.indexed or ()) == 1_001

    emptied = overlay.with_changes([hide(f"new-{row}") for row in range(1_001)])
    assert emptied.indexed is None
    assert len(emptied.added) == 0
    again = emptied.with_changes([upsert("new-7", year=1)])
    assert again.searcher.search(bundle.augmentation.queries(bundle.calibration_queries[:1], 0.5), L + 1)[1].max() == L
    assert builds == [1_001]


@pytest.mark.usefixtures("builds")
def test_an_empty_batch_has_an_empty_answer() -> None:
    overlay = some_overlay(make_bundle(labels=L, label_tower=True))
    scores, rows = overlay.searcher.search(np.empty((0, overlay.rows_ME.shape[1]), np.float32), 5)

    assert scores.shape == rows.shape == (0, 5)
