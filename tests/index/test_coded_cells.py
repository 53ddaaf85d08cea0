"""Centroids found by codes give the same cells in every kind, in files, updates and a GPU's copy."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest

from longtail.bundle import Bundle
from longtail.index import Filter, IndexSpec, build, open_releases, spec as specs
from longtail.index.building.training import train_index
from longtail.index.recall import Calibration, all_dial_points
from longtail.index.search.gpu import GpuIndex
from tests.bundles import make_bundle
from tests.index.conftest import brute_force

LABELS = 12_000


@pytest.fixture(autouse=True)
def _coded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "_CODED_LISTS", 100)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return make_bundle(labels=LABELS, dim=8, queries=20)


def trained(kind: str, rows_LE: np.ndarray, centroids_CE: np.ndarray | None = None) -> faiss.IndexIVF:
    factory, width = IndexSpec(kind).factory(*rows_LE.shape)
    return train_index(factory, width, rows_LE, "cpu", centroids_CE=centroids_CE)


@pytest.mark.parametrize("kind", ["ivf_flat", pytest.param("ivf_sq", marks=pytest.mark.nightly), "ivf_fastscan"])
def test_rows_are_in_the_nearest_cell_by_all_coordinates(kind: str, bundle: Bundle) -> None:
    rows_LE = bundle.rows()
    index = trained(kind, rows_LE)
    cells = faiss.downcast_index(index.quantizer)
    assert isinstance(cells, faiss.IndexRefine)
    assert isinstance(faiss.downcast_index(cells.base_index), faiss.IndexPQFastScan)
    centroids_CE = index.quantizer.reconstruct_n(0, index.nlist)
    rows_LE = np.pad(rows_LE, ((0, 0), (0, index.d - rows_LE.shape[1])))
    distances_LC = (centroids_CE**2).sum(axis=1) - 2 * rows_LE @ centroids_CE.T
    cell_L = np.empty(LABELS, np.int64)
    for cell in range(index.nlist):
        if size := index.invlists.list_size(cell):
            cell_L[faiss.rev_swig_ptr(index.invlists.get_ids(cell), size)] = cell
    best_L = distances_LC.min(axis=1)
    assert np.mean(distances_LC[np.arange(LABELS), cell_L] <= best_L + 1e-4) > 0.95


@pytest.mark.parametrize("kind", ["ivf_sq"])
def test_given_centroids_stay(kind: str, bundle: Bundle) -> None:
    rows_LE = bundle.rows()
    plain = trained("ivf_flat", rows_LE)
    centroids_CE = plain.quantizer.reconstruct_n()
    index = trained(kind, rows_LE, centroids_CE)
    index_centroids_CE = index.quantizer.reconstruct_n()
    np.testing.assert_array_equal(index_centroids_CE[:, : centroids_CE.shape[1]], centroids_CE)


@pytest.mark.parametrize("kind", ["ivf_flat"])
def test_a_release_reaches_the_recall_of_its_build(kind: str, bundle: Bundle, tmp_path: Path) -> None:
    bundle.write(tmp_path / "bundle")
    build(tmp_path / "bundle", tmp_path / "releases", name="one", spec=IndexSpec(kind))
    release = open_releases(tmp_path / "releases").open("one")
    assert "x4fs,RFlat)" in release.manifest.factory
    assert release.searcher.index.index.quantizer.reconstruct_n().shape[0] >= 100
    built = release.bundle
    measured_recall, _ = Calibration(built, built.rows(), dial_points=all_dial_points(built)).measure(release.searcher)
    assert [at.recall for at in measured_recall] == [at.recall for at in release.manifest.recall]
    assert min(at.recall for at in measured_recall) >= 0.95
    query_D = bundle.calibration_queries[0]
    queries_BE = built.augmentation.queries(query_D[None], 1.0)
    exact_L = brute_force(bundle, query_D, 1.0)
    hidden = np.argsort(-exact_L)[:50]
    scores_BK, rows_BK = release.searcher.search(queries_BE, 20, [Filter(exclude=hidden)])
    assert not set(rows_BK[0]) & set(hidden)
    np.testing.assert_allclose(scores_BK[0], exact_L[rows_BK[0]], atol=1e-4)


def test_a_gpu_has_the_same_centroids_without_codes(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    index, moved = trained("ivf_flat", bundle.rows()), []
    before_CE = index.quantizer.reconstruct_n()

    def move(_resources: object, _device: int, index: faiss.IndexIVF) -> faiss.IndexIVF:
        cells = faiss.downcast_index(index.quantizer)
        moved.append((type(cells), cells.reconstruct_n()))
        return index

    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", move, raising=False)
    GpuIndex(index)
    assert [kind for kind, _ in moved] == [faiss.IndexFlat]
    np.testing.assert_array_equal(moved[0][1], before_CE)
    assert isinstance(faiss.downcast_index(index.quantizer), faiss.IndexRefine)
