"""The size of the exact head: told from one index, as if one had been built for every size."""

from __future__ import annotations

import numpy as np
import pytest

from longtail.bundle import Bundle
from longtail.index import IndexSpec, Searcher
from longtail.index.construct.bands import KnownCells, by_reach, make_bands
from longtail.index.construct.head import choose_head, head_sizes
from longtail.index.construct.recall import Calibration
from longtail.index.manifests import Effort
from longtail.index.search.band import pad
from longtail.index.search.joined import JoinedBands
from tests.bundles import make_bundle


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return make_bundle(labels=6000, dim=16)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [(200, [20, 32]), (6_000, [600, 960]), (60_000, [1_000, 3_162, 9_600]), (100_000, [1_000, 3_162, 10_000, 16_000])],
)
def test_sizes_grow_by_half_a_power_of_ten_to_a_sixth_of_the_labels(labels: int, expected: list[int]) -> None:
    assert head_sizes(labels) == expected


@pytest.mark.parametrize("target", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("joined", [True, False])
def test_the_size_is_taken_whose_queries_score_the_fewest_rows(
    bundle: Bundle, target: float, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not joined:
        monkeypatch.setattr(JoinedBands, "fits", lambda _: False)
    rows_LE, spec, sizes = bundle.rows(), IndexSpec("ivf_flat"), [60, 200, 600, 960, 2_000]
    calibration = Calibration(bundle, rows_LE)
    order_L = by_reach(bundle, rows_LE, calibration)
    smallest = make_bands(spec, rows_LE, order_L, sizes[0], "cpu")
    cells = smallest[-1].index.nlist
    known = KnownCells.of(smallest, rows_LE.shape[1])
    assert known is not None
    cost = np.full((len(sizes), len(calibration.places)), np.inf)
    for place, size in enumerate(sizes):
        bands = make_bands(spec, rows_LE, order_L, size, "cpu", known)
        for probes in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128):
            recall, _ = calibration.measure(Searcher(bundle, bands, Effort(probes=probes)))
            for at, measured in enumerate(recall):
                if measured.recall >= target and np.isinf(cost[place, at]):
                    cost[place, at] = size + 3 * probes * (6_000 - sizes[0]) / cells
    assert np.isfinite(cost[1:]).all()
    chosen = choose_head(bundle, smallest, sizes, order_L, calibration, target)
    # Where an effort may leave a part of the head to the cells, the head is what the neediest place asks for.
    own = max(cost.argmin(axis=0)) if joined else cost.mean(axis=1).argmin()
    assert chosen == sizes[int(own)]


@pytest.mark.parametrize("kind", ["ivf_flat", "ivf_sq", "ivf_fastscan"])
def test_a_larger_head_takes_its_labels_out_of_cells_that_stay(bundle: Bundle, kind: str) -> None:
    rows_LE, spec = bundle.rows(), IndexSpec(kind)
    order_L = by_reach(bundle, rows_LE, Calibration(bundle, rows_LE))
    smaller = make_bands(spec, rows_LE, order_L, 100, "cpu")
    known = KnownCells.of(smaller, rows_LE.shape[1])
    assert known is not None
    larger = make_bands(spec, rows_LE, order_L, 700, "cpu", known)[-1]
    assert np.array_equal(larger.rows_N, np.sort(order_L[700:]))
    assert np.array_equal(larger.cells.of_ids, known.of_labels_L[larger.rows_N])
    nearest = larger.index.quantizer.search(pad(rows_LE[larger.rows_N], larger.index.d), 1)[1][:, 0]
    assert np.array_equal(larger.cells.of_ids, nearest)
    assert KnownCells.of(smaller[:1], rows_LE.shape[1]) is None


def test_codes_have_enough_labels_to_train_them() -> None:
    assert head_sizes(700, 624) == [70, 76]
    assert head_sizes(650, 624) == [65]


def test_where_no_size_suffices_the_smallest_is_taken(bundle: Bundle) -> None:
    rows_LE = bundle.rows()
    calibration = Calibration(bundle, rows_LE)
    order_L = by_reach(bundle, rows_LE, calibration)
    bands = make_bands(IndexSpec("ivf_flat"), rows_LE, order_L, 60, "cpu")
    assert choose_head(bundle, bands, [60, 200], order_L, calibration, 1.1) == 60
