"""Recall@100 and speed of index kinds under the dial, and build and open times of a release.

    python -m benchmarks.index_recall                       # 300,000 labels: recall, and recall under filters
    python -m benchmarks.index_recall --labels 1000000      # build and open times, and the tuned row
    python -m benchmarks.index_recall --spread 1            # labels further from their centres: harder to find

Data: unit vectors of 64 dimensions around random centres, Zipf label frequencies assigned at random, T = 0.1, queries
from the same centres; seed 0. Recall is measured against exact search, over 200 queries at each λ. Queries per second
are for k = 100, in one batch on all threads, and one query at a time. Bytes per label are the size of the FAISS index
file; codes are rescored from the file of embeddings. `index_peers` measures FAISS alone,
without filters.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa

from longtail.bundle import Augmentation, Buckets, Bundle, log_frequencies
from longtail.bundle.arrays import Float32, Int64
from longtail.bundle.manifest import dial_words
from longtail.index import ExactRows, Filter, IndexSpec, Searcher, build, open_releases
from longtail.index.building.training import bytes_per_label
from longtail.index.building.tuning import tune_index
from longtail.index.manifests import Kind, SearchParams
from longtail.index.recall import Calibration
from longtail.index.search.faiss_index import FaissIndex
from tests.bundles import make_bundle

DIM = 64
TEMPERATURE = 0.1
LABELS_PER_CENTRE = 300
HISTORY_LABELS = 1_000_000
"""Largest number of rows of the query tower's table of labels, as an ONNX file has at most 2 GB."""
SINGLE_PROBES = 16
TIMED_SINGLY = 300


def main() -> None:
    """Print the tables for the given number of labels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=300_000)
    parser.add_argument("--spread", type=float, default=0.6, help="length of the noise around a centre of length 1")
    arguments = parser.parse_args()
    labels: int = arguments.labels
    bundle = synthetic_bundle(labels, spread=arguments.spread)
    print(f"\n{labels:,} labels, {os.cpu_count()} cores, faiss {faiss.__version__}\n")
    if labels >= 1_000_000:
        print_release_times(bundle)
    else:
        print_recall_table(bundle)


def synthetic_bundle(labels: int, *, dim: int = DIM, spread: float = 0.6, seed: int = 0) -> Bundle:
    """Create a valid bundle of clustered unit vectors and Zipf frequencies, without writing it."""
    rng = np.random.default_rng(seed)
    centres = _unit(rng.standard_normal((max(1, labels // LABELS_PER_CENTRE), dim), dtype=np.float32))

    def vectors(count: int) -> np.ndarray:
        noise = rng.standard_normal((count, dim), dtype=np.float32) * np.float32(spread / np.sqrt(dim))
        return _unit(centres[rng.integers(0, len(centres), count)] + noise)

    embeddings = vectors(labels)
    counts = (1e7 / (1 + rng.permutation(labels))).astype(np.int64)
    log_pn = log_frequencies(counts).astype(np.float32)
    buckets = Buckets.by_quantile(counts)
    plain = make_bundle(labels=min(labels, HISTORY_LABELS), dim=dim)
    ids = pa.array([f"item-{row}" for row in range(labels)])
    augmentation = Augmentation.fitted(TEMPERATURE, embeddings, log_pn, None)
    return dataclasses.replace(
        plain,
        embeddings=embeddings,
        calibration_queries=vectors(200),
        labels=dataclasses.replace(
            plain.labels,
            ids=ids,
            counts=counts,
            log_pn=log_pn,
            buckets=buckets.assign(counts),
            display=pa.table({"title": [f"Title {row}" for row in range(labels)]}),
        ),
        manifest=plain.manifest.model_copy(
            update={
                "labels": labels,
                "temperature": TEMPERATURE,
                "kappa": augmentation.kappa,
                "buckets": buckets,
            }
        ),
    )


def plain_index(factory: str, rows_LE: Float32) -> Any:
    """Train and fill an index as FAISS does by itself, by inner product."""
    index = faiss.index_factory(rows_LE.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    if cells := faiss.try_extract_index_ivf(index):
        cells.cp.max_points_per_centroid = 64
    index.train(rows_LE)
    index.add(rows_LE)
    return index


def print_recall_table(bundle: Bundle) -> None:
    """Compare exact, plain approximate and tuned indexes."""
    rows = bundle.rows()
    calibration = Calibration(bundle, rows)
    head = "".join(f" {dial_words(*point[:2])} |" for point in calibration.dial_points)
    print(f"| index | setting | bytes per label | build s |{head} queries/s | one by one |")
    print("|---|---|---:|---:|" + "---:|" * (len(calibration.dial_points) + 2))

    cells = round(4 * np.sqrt(len(rows)))
    singles: list[tuple[str, Kind, str, int]] = [
        ("flat (exact)", "flat", "Flat", 1),
        (f"one IVF{cells}", "ivf_flat", f"IVF{cells},Flat", SINGLE_PROBES),
    ]
    for name, kind, factory, probes in singles:
        started = time.perf_counter()
        index = plain_index(factory, rows)
        seconds = time.perf_counter() - started
        built_index = FaissIndex(kind, factory, index)
        searcher = Searcher(bundle, built_index, SearchParams(nprobe=probes))
        _print_row(name, f"probes {probes}", bytes_per_label(built_index), seconds, calibration, searcher)
    for text in ("ivf_flat", "ivf_sq", "ivf_fastscan"):
        built = tune_index(bundle, IndexSpec(text, recall_floor=0), lambda _: None)
        params = built.chosen.params
        setting = f"probes {params.nprobe}, refine {params.k_factor}"
        searcher = built.searcher(bundle)
        _print_row(f"tuned {text}", setting, bytes_per_label(searcher.index), built.seconds, calibration, searcher)
        if text == "ivf_flat":
            tuned = searcher
    print_filter_table(bundle, tuned)


def print_filter_table(bundle: Bundle, searcher: Searcher) -> None:
    """Compare the tuned IVF, under filters and at larger k, with exact search, at λ = ½."""
    rng = np.random.default_rng(1)
    labels = searcher.labels
    queries = bundle.augmentation.queries(bundle.calibration_queries, 0.5)
    similar = np.argsort(-(bundle.embeddings @ bundle.embeddings[0]))
    everything = np.arange(labels)

    def sample(share: float) -> Int64:
        return np.sort(rng.choice(labels, int(labels * share), replace=False))

    cases: list[tuple[str, int, Filter | None, Int64]] = [("no filter", k, None, everything) for k in (10, 100, 1000)]
    for count in (20, 200, 5000):
        excluded = similar[:count]
        cases.append((f"exclude {count:,}", 100, Filter(exclude=excluded), np.setdiff1d(everything, excluded)))
    for bucket, name in enumerate(("head", "torso", "tail")):
        eligible = np.flatnonzero(bundle.labels.buckets == bucket)
        cases.append((f"bucket {name}", 100, Filter(buckets=frozenset({bucket})), eligible))
    for share in (0.01, 0.05, 0.3):
        rows = sample(share)
        cases.append((f"allow {share:.0%} at random", 100, Filter(allow=rows), rows))
    rows = np.sort(similar[: labels // 20])
    cases.append(("allow the 5% most alike", 100, Filter(allow=rows), rows))

    exact = ExactRows(bundle)
    print("\n| tuned ivf_flat | k | recall | one by one |\n|---|---:|---:|---:|")
    for name, k, filter_, eligible in cases:
        least, _ = exact.top(queries, eligible, k)
        started = time.perf_counter()
        answers = [searcher.search(queries[i : i + 1], k, [filter_])[0] for i in range(len(queries))]
        rate = len(queries) / (time.perf_counter() - started)
        recall = (np.concatenate(answers) >= least[:, -1:] - 1e-5).mean()
        print(f"| {name} | {k} | {recall:.3f} | {rate:,.0f} |", flush=True)


def print_release_times(bundle: Bundle) -> None:
    """Build a release as the command does, and open the release as a service does."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        bundle.write(root / "bundle")
        started = time.perf_counter()
        manifest = build(root / "bundle", root / "releases", spec=IndexSpec("auto"), progress=print)
        built = time.perf_counter() - started
        started = time.perf_counter()
        release = open_releases(root / "releases").open(manifest.name)
        opened = time.perf_counter() - started
        print("\nbuild and open, every checksum verified:\n\n| step | seconds |\n|---|---:|")
        print(f"| build ({manifest.kind}) | {built:.1f} |\n| open | {opened:.2f} |\n")
        calibration = Calibration(release.bundle, release.bundle.rows())
        params = release.manifest.params
        head = "".join(f" {dial_words(*point[:2])} |" for point in calibration.dial_points)
        print(f"| index | setting | bytes per label | build s |{head} queries/s | one by one |")
        print("|---|---|---:|---:|" + "---:|" * (len(calibration.dial_points) + 2))
        setting = f"probes {params.nprobe}, refine {params.k_factor}"
        size = release.manifest.bytes_per_label or 0
        _print_row(f"tuned {manifest.kind}", setting, size, built, calibration, release.searcher)
        for trial in release.manifest.kinds:
            print(trial.model_dump_json(exclude={"recall"}), f"lowest recall {trial.lowest.recall:.4f}")


def _print_row(
    name: str, setting: str, size: float, seconds: float, calibration: Calibration, searcher: Searcher
) -> None:
    recalls, rate = calibration.measure(searcher)
    queries = calibration.queries_QE[np.linspace(0, len(calibration.queries_QE) - 1, TIMED_SINGLY).astype(int)]
    singly = _singly(searcher, queries, 100)
    figures = "".join(f" {at.recall:.3f} |" for at in recalls)
    print(f"| {name} | {setting} | {size:.1f} | {seconds:.1f} |{figures} {rate:,.0f} | {singly:,.0f} |", flush=True)


def _singly(searcher: Searcher, queries_CE: np.ndarray, k: int) -> float:
    """Measure queries per second, one after another."""
    started = time.perf_counter()
    for query in range(len(queries_CE)):
        searcher.search(queries_CE[query : query + 1], k)
    return len(queries_CE) / (time.perf_counter() - started)


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


if __name__ == "__main__":
    main()
