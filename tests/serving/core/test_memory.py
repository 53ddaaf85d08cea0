"""What a release takes of a worker's own memory, and that swaps give it back."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle import Labels
from longtail.serving.core.catalogue import Catalogue
from tests.bundles import make_bundle

COUNT = 50_000


def test_a_label_takes_bytes_and_no_objects() -> None:
    labels = Labels(
        ids=pa.array([f"item-{row}" for row in range(COUNT)]),
        counts=np.ones(COUNT, np.int64),
        log_pn=np.full(COUNT, -np.log(COUNT), np.float32),
        buckets=np.zeros(COUNT, np.int8),
        bias=None,
        display=pa.table({"title": [f"Title of the label {row}" for row in range(COUNT)]}),
    )
    Catalogue(make_bundle().labels, np.zeros((60, 1), np.float32)).answered(np.arange(9))  # imports on first use
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    catalogue = Catalogue(labels, np.zeros((COUNT, 1), np.float32))
    assert catalogue.rows(["item-49999", "x"])[0].tolist() == [49_999]
    catalogue.answered(np.arange(100))
    held_bytes = tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - arrow
    tracemalloc.stop()
    assert held_bytes / COUNT <= 30


def test_a_release_that_another_follows_keeps_nothing_to_be_quick_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtail.bundle.id_rows._ALL_KEPT", 10)
    catalogue = Catalogue(make_bundle(labels=50).labels, np.zeros((50, 1), np.float32))

    def look_up() -> tuple[object, ...]:
        chosen, _ = catalogue.attributes.select({"title": "Title 7"}, "filter")
        return (
            catalogue.answered(np.arange(9)).json_N,
            catalogue.rows(["item-3", "x"])[0].tolist(),
            np.flatnonzero(chosen.mask).tolist(),
        )

    before = look_up()
    catalogue.forget()
    attributes = catalogue.attributes
    assert (catalogue._json_of_row, catalogue.row_of._cache, attributes._of_labels._read) == ({}, {}, {})
    assert attributes._selected.cache_info().currsize == 0
    assert look_up() == before == (before[0], [3], [7])
