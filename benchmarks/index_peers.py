"""One index for every λ beside the libraries that search vectors: what each takes for the same recall, on one core.

    make bench-peers                                         # 100,000 labels, in an environment of its own
    python -m benchmarks.index_peers --labels 1000000
    python -m benchmarks.index_peers --bundle runs/gowalla   # the embeddings of a trained model

Data: generated as in index_recall, or a bundle's. All libraries index the same augmented rows by inner product. For
each λ and k, the cheapest setting that recalls the floor on the calibration queries is timed, one query at a time and
in batches of 32: queries per CPU second of the process, from each batch's quickest of three turns. Where no setting
recalls the floor, brackets show the best. Longtail's own indexes are as `longtail-index build` makes them, and choose
the setting of a query by themselves. Builds use all cores, and their seconds are wall-clock time; bytes are what a
library writes, for SVS the size of vectors and edges. Libraries that are not installed are left out and named.

Legend: `B` queries of a batch, `C` calibration queries, `E` coordinates of an augmented row, `K` results, `L` labels.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.index_recall import plain_index, synthetic_bundle
from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32, Int64
from longtail.index import ExactRows, IndexSpec
from longtail.index.building.tuning import tune_index
from longtail.index.search.faiss_index import pad

LAMBDAS, KS, BATCHES = (-0.5, 0.0, 0.5, 1.0, 1.5), (10, 100), (1, 32)
TIMED, TURNS = {1: 60, 32: 256}, 3
"""Timed queries by size of batch, and how often each batch is timed."""
CORES = os.cpu_count() or 1
PROBES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CANDIDATES = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Of a graph: how many are kept while it is walked."""

Search = Callable[[Float32, int], Int64]
"""Label rows of the k best of each query, int64 [B, K], for queries float32 [B, E]."""


@dataclass(frozen=True)
class Built:
    """An index of some library: a search at each of its settings, cheapest first, and the bytes that it writes."""

    at: Callable[[int], Search]
    settings: Sequence[str]
    size: int


def main() -> None:
    """Print a table for each k."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=100_000)
    parser.add_argument("--bundle", type=Path, help="in place of generated vectors")
    parser.add_argument("--floor", type=float, default=0.99, help="recall that a setting must reach")
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS))
    arguments = parser.parse_args()
    bundle = Bundle.load(arguments.bundle) if arguments.bundle else synthetic_bundle(arguments.labels)
    print(f"\n{len(bundle.embeddings):,} labels × {bundle.manifest.dim}, recall ≥ {arguments.floor}, {CORES} cores\n")
    truth = Truth(bundle)
    tables: dict[tuple[int, int], list[str]] = {(k, batch): [] for k in KS for batch in BATCHES}
    for name in arguments.only:
        try:
            started = time.perf_counter()
            built = PEERS[name](bundle, truth.rows_LE)
        except ImportError as error:
            print(f"{name} was left out: {error}", flush=True)
            continue
        begins = f"| {name} | {time.perf_counter() - started:.1f} | {built.size / len(truth.rows_LE):.0f} |"
        with threadpool_limits(1):
            faiss.omp_set_num_threads(1)
            for k in KS:
                chosen = [truth.choose(built, bias_removal, k, arguments.floor) for bias_removal in LAMBDAS]
                for batch in BATCHES:
                    cells = [
                        truth.cell(built, bias_removal, k, batch, *best)
                        for bias_removal, best in zip(LAMBDAS, chosen, strict=True)
                    ]
                    tables[k, batch].append(begins + "".join(f" {cell} |" for cell in cells))
                    print(tables[k, batch][-1], flush=True)
        faiss.omp_set_num_threads(CORES)
    for (k, batch), rows in tables.items():
        print(f"\nrecall@{k}, {batch} at a time: queries per CPU second, × flat, at which setting\n")
        print("| index | build s | bytes per label |" + "".join(f" λ = {value:g} |" for value in LAMBDAS))
        print("|---|---:|---:|" + "---:|" * len(LAMBDAS))
        print("\n".join(rows))


class Truth:
    """Exact answers to a bundle's calibration queries over its rows, and what an index makes of them."""

    def __init__(self, bundle: Bundle) -> None:
        self.rows_LE = np.ascontiguousarray(bundle.rows())
        self._exact = ExactRows(bundle)
        self._queries = {value: bundle.augmentation.queries(bundle.calibration_queries, value) for value in LAMBDAS}
        self._least: dict[tuple[float, int], Float32] = {}
        self._flat: dict[tuple[float, int, int], float] = {}
        for value, queries_CE in self._queries.items():
            scores_CK, _ = faiss.knn(queries_CE, self.rows_LE, max(KS), metric=faiss.METRIC_INNER_PRODUCT)
            for k in KS:
                self._least[value, k] = scores_CK[:, k - 1] - 1e-5 * np.abs(scores_CK).max(axis=1)

    def choose(self, built: Built, bias_removal: float, k: int, floor: float) -> tuple[int, str]:
        """Find the cheapest setting that reaches the floor; else the best, with its recall."""
        recalls = []
        for setting in range(len(built.settings)):
            recalls.append(self.recall(built.at(setting), bias_removal, k))
            if recalls[-1] >= floor:
                return setting, ""
        best = int(np.argmax(recalls))
        return best, f"{recalls[best]:.3f}"

    def cell(self, built: Built, bias_removal: float, k: int, batch: int, setting: int, too_low: str) -> str:
        """Time a setting; in brackets where its recall is too low."""
        rate = self.rate(built.at(setting), bias_removal, k, batch)
        flat = self._flat.setdefault((bias_removal, k, batch), rate)  # the first of the table
        words = f"{rate:,.0f} ({rate / flat:.1f}×, {built.settings[setting]})".replace(", )", ")")
        return f"[{too_low}: {words}]" if too_low else words

    def recall(self, search: Search, bias_removal: float, k: int) -> float:
        """Compute the share of answers that score as the k-th best or higher; ties count."""
        queries_CE = self._queries[bias_removal]
        rows_CK = np.asarray(search(queries_CE, k)).astype(np.int64)
        if rows_CK.shape[1] < k:
            rows_CK = np.pad(rows_CK, ((0, 0), (0, k - rows_CK.shape[1])), constant_values=-1)
        return float((self._exact.rescore(queries_CE, rows_CK) >= self._least[bias_removal, k][:, None]).mean())

    def rate(self, search: Search, bias_removal: float, k: int, batch: int) -> float:
        """Compute queries per CPU second in batches of one size."""
        queries_CE = self._queries[bias_removal][: TIMED[batch]]
        batches = [queries_CE[start : start + batch] for start in range(0, len(queries_CE), batch)]
        seconds = np.full(len(batches), np.inf)
        for _ in range(TURNS):
            for i, queries_BE in enumerate(batches):
                started = time.process_time()
                search(queries_BE, k)
                seconds[i] = min(seconds[i], time.process_time() - started)
        return len(queries_CE) / float(seconds.sum())


def _size(save: Callable[[str], Any], *, folder: bool = False) -> int:
    """Bytes that a library writes to a path, which is a folder's or a file's."""
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "index"
        if folder:
            path.mkdir()
        save(str(path))
        return sum(file.stat().st_size for file in Path(root).rglob("*") if file.is_file())


def of_faiss(factory: str, multiple: int = 1) -> Callable[[Bundle, Float32], Built]:
    """FAISS alone: its own string, `{cells}` about four for each square root of the labels, `{pairs}` of coordinates;
    rows are filled up with zeros to a multiple of some width."""

    def build(_: Bundle, rows_LE: Float32) -> Built:
        width = -(-rows_LE.shape[1] // multiple) * multiple
        text = factory.format(cells=round(4 * np.sqrt(len(rows_LE))), pairs=width // 2)
        index = plain_index(text, pad(rows_LE, width))
        if isinstance(index, faiss.IndexRefine):
            index.k_factor = 4
        cells = faiss.try_extract_index_ivf(index)
        graph = isinstance(index, faiss.IndexHNSW)
        settings = (
            [setting for setting in PROBES if setting <= cells.nlist] if cells else list(CANDIDATES * graph) or [0]
        )

        def search_at(setting: int) -> Search:
            if cells:
                cells.nprobe = settings[setting]
            elif graph:
                index.hnsw.efSearch = settings[setting]
            return lambda queries_BE, k: index.search(pad(queries_BE, index.d), k)[1]

        return Built(
            search_at,
            _words("probes" if cells else "ef" if graph else "", settings),
            _size(lambda path: faiss.write_index(index, path)),
        )

    return build


def of_longtail(spec: str) -> Callable[[Bundle, Float32], Built]:
    """A release's index, tuned as a build does; the effort of a query is its own."""

    def build(bundle: Bundle, _: Float32) -> Built:
        tuned = tune_index(bundle, IndexSpec(spec), lambda _: None)
        searcher = tuned.searcher(bundle)
        size = _size(lambda path: faiss.write_index(tuned.index.index, path))
        return Built(lambda _: lambda queries_BE, k: searcher.search(queries_BE, k)[1], [tuned.kind], size)

    return build


def of_hnswlib(_: Bundle, rows_LE: Float32) -> Built:
    """hnswlib: M = 32, 200 candidates while building."""
    index = importlib.import_module("hnswlib").Index(space="ip", dim=rows_LE.shape[1])
    index.init_index(max_elements=len(rows_LE), ef_construction=200, M=32)
    index.add_items(rows_LE, num_threads=CORES)
    index.set_num_threads(1)

    def search_at(setting: int) -> Search:
        def search(queries_BE: Float32, k: int) -> Int64:
            index.set_ef(max(CANDIDATES[setting], k))
            return index.knn_query(queries_BE, k)[0]

        return search

    return Built(search_at, _words("ef", CANDIDATES), _size(index.save_index))


def of_usearch(_: Bundle, rows_LE: Float32) -> Built:
    """USearch: connectivity 32, 200 candidates while building."""
    index = importlib.import_module("usearch.index").Index(
        ndim=rows_LE.shape[1], metric="ip", dtype="f32", connectivity=32, expansion_add=200
    )
    index.add(np.arange(len(rows_LE)), rows_LE, threads=CORES)

    def search_at(setting: int) -> Search:
        def search(queries_BE: Float32, k: int) -> Int64:
            index.expansion_search = max(CANDIDATES[setting], k)
            return np.reshape(index.search(queries_BE, k, threads=1).keys, (len(queries_BE), -1))

        return search

    return Built(search_at, _words("ef", CANDIDATES), _size(index.save))


def of_scann(_: Bundle, rows_LE: Float32) -> Built:
    """ScaNN: anisotropic codes of two coordinates each, about two leaves for a square root, candidates scored again."""
    scann = importlib.import_module("scann").scann_ops_pybind
    leaves = round(2 * np.sqrt(len(rows_LE)))
    index = (
        scann.builder(rows_LE, 10, "dot_product")
        .tree(num_leaves=leaves, num_leaves_to_search=leaves, training_sample_size=min(len(rows_LE), 250_000))
        .score_ah(2, anisotropic_quantization_threshold=0.2)
        .reorder(100)
        .build()
    )
    settings = [(probes, depth) for probes in PROBES if probes <= leaves for depth in (3, 10)]

    def search_at(setting: int) -> Search:
        probes, depth = settings[setting]

        def search(queries_BE: Float32, k: int) -> Int64:
            options = (k, depth * k, probes)
            if len(queries_BE) == 1:
                return index.search(queries_BE[0], *options)[0][None]
            return index.search_batched(queries_BE, *options)[0]

        return search

    words = [f"{probes} leaves, {depth} candidates a result" for probes, depth in settings]
    return Built(search_at, words, _size(index.serialize, folder=True))


def of_rabitqlib(_: Bundle, rows_LE: Float32) -> Built:
    """RaBitQ Library: lists of codes of one bit a coordinate, whose bound decides which floats are read."""
    rabitqlib = importlib.import_module("rabitqlib")
    lists, dim = round(4 * np.sqrt(len(rows_LE))), rows_LE.shape[1]
    clustering = rabitqlib.RaBitQKMeans(dim, lists, num_threads=CORES)
    clustering.train(rows_LE)
    index = rabitqlib.IvfIndex(dim, len(rows_LE), lists, nbits=32, metric="ip")
    index.build(rows_LE, clustering.centroids, clustering.assignments, num_threads=CORES)
    settings = [probes for probes in PROBES if probes <= lists]

    def search_at(setting: int) -> Search:
        return lambda queries_BE, k: index.search(queries_BE, k, settings[setting])[0].view(np.int32)

    return Built(search_at, _words("probes", settings), _size(index.save))


def of_svs(_: Bundle, rows_LE: Float32) -> Built:
    """SVS: Vamana of degree 64, float32."""
    svs = importlib.import_module("svs")
    parameters = svs.VamanaBuildParameters(graph_max_degree=64, window_size=128, alpha=0.95)
    index = svs.Vamana.build(parameters, rows_LE, svs.DistanceType.MIP, num_threads=CORES)
    index.num_threads = 1

    def search_at(setting: int) -> Search:
        def search(queries_BE: Float32, k: int) -> Int64:
            index.search_window_size = max(CANDIDATES[setting], k)
            return index.search(queries_BE, k)[0].astype(np.int64)

        return search

    return Built(search_at, _words("window", CANDIDATES), len(rows_LE) * 4 * (64 + 1 + rows_LE.shape[1]))


def _words(name: str, settings: Sequence[int]) -> list[str]:
    return [f"{name} {setting}" if name else "" for setting in settings]


PEERS: dict[str, Callable[[Bundle, Float32], Built]] = {
    "FAISS Flat": of_faiss("Flat"),
    "Longtail auto": of_longtail("auto"),
    "Longtail ivf_flat": of_longtail("ivf_flat"),
    "Longtail ivf_sq": of_longtail("ivf_sq"),
    "Longtail ivf_fastscan": of_longtail("ivf_fastscan"),
    "FAISS IVF,Flat": of_faiss("IVF{cells},Flat"),
    "FAISS IVF,SQ8": of_faiss("IVF{cells},SQ8", 16),
    "FAISS IVF,PQ4fs,RFlat": of_faiss("IVF{cells},PQ{pairs}x4fs,RFlat", 2),
    "FAISS HNSW32": of_faiss("HNSW32,Flat"),
    "hnswlib": of_hnswlib,
    "USearch": of_usearch,
    "ScaNN": of_scann,
    "rabitqlib": of_rabitqlib,
    "SVS Vamana": of_svs,
}
"""The table's rows, flat search first."""


if __name__ == "__main__":
    main()
