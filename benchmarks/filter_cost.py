"""What filters and hidden labels cost: queries per second of an IVF release, and the ratio to no filter.

    python -m benchmarks.filter_cost                     # 200,000 labels
    python -m benchmarks.filter_cost --labels 1000000

Data: as benchmarks/index_recall.py, d = 64; λ = ½, k = 20, one OpenMP thread. Every query has a list of its own:
what it excludes are the labels that it would be answered with, what it allows is drawn at random. The best of three
passes counts, cases in turn.
"""

from __future__ import annotations

import argparse
import time

import faiss
import numpy as np

from benchmarks.index_recall import synthetic_bundle
from longtail.bundle import Bundle
from longtail.index import Filter, IndexSpec, Searcher
from longtail.index.construct.tuning import tune_index

K = 20
QUERIES = 64
HIDDEN = 1_000
BATCHES = (1, 32)
PASSES = 3


def main() -> None:
    """Print the table for the asked number of labels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=200_000)
    bundle = synthetic_bundle(parser.parse_args().labels)
    built = tune_index(bundle, IndexSpec("ivf_flat"), "cpu", lambda _: None)
    searcher = Searcher(bundle, built.bands, built.chosen.effort)
    faiss.omp_set_num_threads(1)
    queries = bundle.augmentation.queries(bundle.calibration_queries[:QUERIES], 0.5)
    cases = filter_cases(bundle, searcher, queries)
    seconds = {(name, batch): np.inf for name in cases for batch in BATCHES}
    for _ in range(PASSES):
        for name, (asked, filters) in cases.items():
            for batch in BATCHES:
                seconds[name, batch] = min(seconds[name, batch], timed(asked, queries, filters, batch))
    setting = f"head {built.chosen.head:,}, probes {searcher.effort.probes}"
    print(f"\n{searcher.labels:,} labels, {setting}, faiss {faiss.__version__}\n")
    print("| filter |" + "".join(f" queries/s, batch {batch} | ratio |" for batch in BATCHES))
    print("|---|" + "---:|---:|" * len(BATCHES))
    for name in cases:
        figures = (
            f" {QUERIES / seconds[name, batch]:,.0f} | {seconds['none', batch] / seconds[name, batch]:.2f} |"
            for batch in BATCHES
        )
        print(f"| {name} |{''.join(figures)}")


def filter_cases(
    bundle: Bundle, searcher: Searcher, queries: np.ndarray
) -> dict[str, tuple[Searcher, list[Filter] | None]]:
    """A searcher and one filter per query, by name."""
    rng = np.random.default_rng(1)
    labels = searcher.labels
    best_QR = np.argsort(-(queries @ bundle.rows().T), axis=1)[:, :10_000]

    def allowed(count: int) -> list[Filter]:
        return [Filter(allow=rng.choice(labels, count, replace=False)) for _ in queries]

    hidden = searcher.without(rng.choice(labels, HIDDEN, replace=False))
    cases: dict[str, tuple[Searcher, list[Filter] | None]] = {"none": (searcher, None)}
    for count in (10, 100, 1_000, 10_000):
        cases[f"exclude {count:,}"] = (searcher, [Filter(exclude=best_R[:count]) for best_R in best_QR])
    for count in (100, 10_000, labels // 2):
        cases[f"allow {count:,}"] = (searcher, allowed(count))
    for bucket, name in enumerate(("head", "torso", "tail")):
        count = int((bundle.labels.buckets == bucket).sum())
        cases[f"bucket {name} ({count:,})"] = (searcher, [Filter(buckets=frozenset({bucket}))] * len(queries))
    cases[f"{HIDDEN:,} hidden labels"] = (hidden, None)
    cases[f"{HIDDEN:,} hidden, exclude 100"] = (hidden, cases["exclude 100"][1])
    return cases


def timed(searcher: Searcher, queries: np.ndarray, filters: list[Filter] | None, batch: int) -> float:
    """Seconds for all queries, in batches."""
    started = time.perf_counter()
    for start in range(0, len(queries), batch):
        stop = start + batch
        searcher.search(queries[start:stop], K, None if filters is None else filters[start:stop])
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
