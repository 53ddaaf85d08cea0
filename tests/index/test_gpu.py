"""Search on a GPU, with a stand-in that has a GPU's habits: one search at a time, 2,048 results, no selectors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from longtail.index import DeviceError, Filter, IndexSpec, Release, build, open_releases
from longtail.index.release import releases as releases_module
from longtail.index.search.gpu import _resources
from tests.index.conftest import brute_force
from tests.index.test_filters import check

KINDS = ("flat", "ivf_flat", "ivf_sq")


class StandIn:
    """Searches the CPU's index as FAISS's classic GPU backend would."""

    inside = threading.Lock()
    searches = 0

    def __init__(self, index: Any) -> None:
        self._index = index
        self.nprobe = 1

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        assert k <= 2048
        assert 1 <= self.nprobe <= 2048
        assert StandIn.inside.acquire(blocking=False), "two threads inside"
        try:
            StandIn.searches += 1
            time.sleep(0.0005)
            is_ivf = isinstance(self._index, faiss.IndexIVF)
            parameters = faiss.SearchParametersIVF(nprobe=self.nprobe) if is_ivf else None
            return self._index.search(queries, k, params=parameters)
        finally:
            StandIn.inside.release()


@pytest.fixture(name="_gpu")
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", lambda _, __, index: StandIn(index), raising=False)
    _resources.cache_clear()
    StandIn.searches = 0
    yield
    _resources.cache_clear()


@pytest.fixture
def on_gpu(_gpu: None, opened: Callable[[str], Release]) -> Callable[[str], Release]:
    def open_(spec: str) -> Release:
        path = opened(spec).path
        return open_releases(path.parent).open(path.name, device="gpu")

    return open_


@pytest.mark.parametrize("spec", KINDS)
def test_filters_and_hidden_labels_hold(spec: str, on_gpu: Callable[[str], Release]) -> None:
    release = on_gpu(spec)
    labels = release.searcher.labels
    best = np.argsort(-brute_force(release.bundle, release.bundle.calibration_queries[0], 1.0))
    for filter_ in (
        Filter(exclude=best[:30]),
        Filter(exclude=best[: labels // 2]),
        Filter(allow=best[labels // 2 :]),
        Filter(allow=best[:3]),
        Filter(buckets=frozenset({0})),
        Filter(buckets=frozenset({2})),
    ):
        for k in (1, 20, 300):
            check(release, filter_, k, query=0, bias_removal=1.0)
    queries = release.bundle.augmentation.queries(release.bundle.calibration_queries[:1], 1.0)
    _, rows = release.searcher.without(best[:400]).search(queries, 100)
    assert len(set(rows[0]) - set(best[:400]) - {-1}) == 100


@pytest.mark.parametrize("spec", ["flat", "ivf_flat"])
def test_gpu_answers_equal_the_cpu(
    spec: str, on_gpu: Callable[[str], Release], opened: Callable[[str], Release]
) -> None:
    bundle = opened(spec).bundle
    queries = bundle.augmentation.queries(bundle.calibration_queries, 0.5)
    tail = [Filter(buckets=frozenset({2}))] * len(queries)
    for filters in (None, tail):
        _, expected = opened(spec).searcher.search(queries, 20, filters)
        before = StandIn.searches
        _, rows = on_gpu(spec).searcher.search(queries, 20, filters)
        if filters is None:  # the labels of one bucket may be few enough to score each of them
            assert StandIn.searches > before
        assert (rows == expected).mean() > 0.97


def test_an_index_whose_best_are_hidden_is_searched_again_on_the_cpu(on_gpu: Callable[[str], Release]) -> None:
    release = on_gpu("ivf_flat")
    bundle = release.bundle
    queries = bundle.augmentation.queries(bundle.calibration_queries[:1], 1.0)
    exact = brute_force(bundle, bundle.calibration_queries[0], 1.0)
    best = np.argsort(-exact)
    _, rows = release.searcher.without(best[:200]).search(queries, 20)
    visible = best[200:]
    assert len(set(rows[0]) & set(visible[:20])) >= 19


def test_without_a_gpu_the_error_names_the_extra(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(bundle_path, tmp_path, spec=IndexSpec("flat"), name="a")
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    message = r"device gpu: expected a GPU build of FAISS, found faiss .* for CPUs; install the extra `gpu`"
    with pytest.raises(DeviceError, match=message):
        open_releases(tmp_path).open("a", device="gpu")
    with pytest.raises(DeviceError, match=message):
        build(bundle_path, tmp_path, name="b", spec=IndexSpec(device="gpu"))
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0, raising=False)
    # No file is read first: a release may have gigabytes, and a service's state makes it verify them all.
    monkeypatch.setattr(releases_module, "open_release", None)
    with pytest.raises(DeviceError, match="at least one visible NVIDIA GPU, found none"):
        open_releases(tmp_path).open("a", device="gpu", state=tmp_path / "state")
    assert open_releases(tmp_path).names() == ["a"]


@pytest.mark.usefixtures("_gpu")
def test_an_index_that_does_not_fit_is_refused(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("Error in alloc:\n out of memory")

    monkeypatch.setattr(faiss, "index_cpu_to_gpu", full)
    build(bundle_path, tmp_path, spec=IndexSpec("flat"), name="a")
    with pytest.raises(
        DeviceError, match=r"take an index of 600 rows of 13 coordinates, it answered: .* out of memory"
    ):
        open_releases(tmp_path).open("a", device="gpu")
