"""What labels that came after a release cost a search, scored one by one and in an index of their own.

    python -m benchmarks.added_labels                    # beside a release of 300,000
    python -m benchmarks.added_labels --labels 1000000

Data: as of index_recall; added labels lie near the release's and are as rare as its rarest. One query at a time on one
thread, 100 results, λ 0, ½ and 1 in turn; seconds are of the thread. The index in memory is made on one
thread, too; its labels have one ν, as new ones do.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import faiss
import numpy as np
import pyarrow as pa
from threadpoolctl import threadpool_limits

from benchmarks.index_recall import synthetic_bundle
from longtail.bundle import Bundle
from longtail.index import IndexSpec, Searcher, index_in_memory
from longtail.index.construct.tuning import tune_index
from longtail.serving.core.overlaid import IndexedRows, OverlaidSearcher

SPEC, K, ROUNDS = "ivf_flat", 100, 3


def main() -> None:
    """Print a row for each number of added labels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=300_000)
    parser.add_argument("--added", type=int, nargs="+", default=[1_000, 10_000, 30_000, 100_000])
    arguments = parser.parse_args()
    bundle = synthetic_bundle(arguments.labels)
    base = tune_index(bundle, IndexSpec(SPEC), "cpu", lambda _: None).searcher(bundle)
    faiss.omp_set_num_threads(1)
    print(f"\n{arguments.labels:,} labels, {SPEC}\n")
    print("| added | µs alone | with a scan | with an index | times | recall@100 of it | made in s |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    with threadpool_limits(1):
        for added in arguments.added:
            print(row(bundle, base, added), flush=True)


def row(bundle: Bundle, base: Searcher, added: int) -> str:
    """Search with the release alone, with its added labels scanned, and with them indexed."""
    more = alike(bundle, added)
    started = time.thread_time()
    indexed = IndexedRows.of(index_in_memory(more))
    made = time.thread_time() - started
    overlay = base.labels, more.rows(), more.labels.buckets
    scanned, quick = OverlaidSearcher(base, *overlay), OverlaidSearcher(base, *overlay, indexed)
    dials = np.resize(np.float32([0, 0.5, 1]), len(bundle.calibration_queries))
    queries = bundle.augmentation.queries(bundle.calibration_queries, dials)
    alone, with_scan, with_index = (seconds(searcher, queries) * 1e6 for searcher in (base, scanned, quick))
    found, best = (searcher.search(queries, K)[0] for searcher in (quick, scanned))
    recall = np.mean(found >= best[:, -1:] - 1e-5)
    return (
        f"| {added:,} | {alone:.0f} | {with_scan:.0f} | {with_index:.0f} | {with_scan / with_index:.1f} | "
        f"{recall:.4f} | {made:.2f} |"
    )


def alike(bundle: Bundle, added: int) -> Bundle:
    """As many labels of the same model, near those that it has."""
    rng = np.random.default_rng(1)
    near = rng.integers(0, len(bundle.embeddings), added)
    embeddings = bundle.embeddings[near] + rng.standard_normal((added, bundle.manifest.dim), np.float32) * 0.05
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    labels = bundle.labels
    rarest = np.full(added, labels.counts.argmin())
    table = replace(
        labels,
        ids=pa.array([f"new-{place}" for place in range(added)]),
        counts=labels.counts[rarest],
        log_pn=labels.log_pn[rarest],
        buckets=labels.buckets[rarest],
        bias=None if labels.bias is None else labels.bias[rarest],
        log_popularity=None if labels.log_popularity is None else labels.log_popularity[rarest],
        display=labels.display.take(pa.array(rarest)),
    )
    return replace(bundle, labels=table, embeddings=embeddings.astype(np.float32))


def seconds(searcher: Searcher | OverlaidSearcher, queries: np.ndarray) -> float:
    """Of a query, the least of the rounds' means."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        for query in queries:
            searcher.search(query[None], K)
        rounds.append((time.thread_time() - started) / len(queries))
    return min(rounds)


if __name__ == "__main__":
    main()
