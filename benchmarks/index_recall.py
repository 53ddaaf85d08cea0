"""Measure tuned inverted lists under filters and at larger k, at λ = ½.

    python -m benchmarks.index_recall                       # 300,000 labels
    python -m benchmarks.index_recall --spread 1            # labels further from their centres: harder to find

Data: the vectors of `benchmarks.mips`, which compares indexes without filters along λ; seed 0. Recall is measured
against exact search, over 200 queries. Queries per second are of one query at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import numpy as np
import pyarrow as pa

from benchmarks.mips import DIM, TEMPERATURE, generate
from longtail.bundle import Augmentation, Buckets, Bundle, log_frequencies
from longtail.bundle.arrays import Float32, Int64
from longtail.index import ExactRows, Filter, IndexSpec, Searcher
from longtail.index.building.tuning import tune_index
from tests.bundles import make_bundle

HISTORY_LABELS = 1_000_000
"""Largest number of rows of the query tower's table of labels, as an ONNX file has at most 2 GB."""


def main() -> None:
    """Print the table for the given number of labels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=300_000)
    parser.add_argument("--spread", type=float, default=0.6, help="length of the noise around a centre of length 1")
    arguments = parser.parse_args()
    bundle = synthetic_bundle(arguments.labels, spread=arguments.spread)
    tuned = tune_index(bundle, IndexSpec("ivf_flat", recall_floor=0), lambda _: None)
    print_filter_table(bundle, tuned.searcher(bundle))


def synthetic_bundle(labels: int, *, dim: int = DIM, spread: float = 0.6, seed: int = 0) -> Bundle:
    """Create a valid bundle of the vectors of `mips.generate`, without writing it."""
    labels_LD, counts_L, queries_QD, _ = generate(labels, dim=dim, queries=200, spread=spread, seed=seed)
    return make_plain_bundle(labels_LD, counts_L, queries_QD)


def make_plain_bundle(
    embeddings_LD: Float32, counts_L: Int64, queries_QD: Float32, log_pn_L: Float32 | None = None,
    temperature: float = TEMPERATURE,
) -> Bundle:  # fmt: skip
    """Create a valid bundle of vectors and counts, with a query tower of random weights."""
    labels, dim = embeddings_LD.shape
    log_pn_L = log_frequencies(counts_L).astype(np.float32) if log_pn_L is None else log_pn_L
    buckets = Buckets.by_quantile(counts_L)
    plain = make_bundle(labels=min(labels, HISTORY_LABELS), dim=dim)
    augmentation = Augmentation.fitted(temperature, embeddings_LD, log_pn_L, None)
    return dataclasses.replace(
        plain,
        embeddings=embeddings_LD,
        calibration_queries=queries_QD,
        labels=dataclasses.replace(
            plain.labels,
            ids=pa.array([f"item-{row}" for row in range(labels)]),
            counts=counts_L,
            log_pn=log_pn_L,
            buckets=buckets.assign(counts_L),
            display=pa.table({"title": [f"Title {row}" for row in range(labels)]}),
        ),
        manifest=plain.manifest.model_copy(
            update={"labels": labels, "temperature": temperature, "kappa": augmentation.kappa, "buckets": buckets}
        ),
    )


def print_filter_table(bundle: Bundle, searcher: Searcher) -> None:
    """Compare the tuned lists with exact search."""
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


if __name__ == "__main__":
    main()
