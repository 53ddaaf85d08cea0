"""What the tree p_n(y|x) of adversarial negatives costs: to project, to fit, to draw from and to evaluate.

    python -m benchmarks.tree_fit [--labels 200000] [--pairs 500000] [--dims 16]

Data: Zipf label frequencies; every label belongs to one of labels/50 random centres, and a pair's z lies around
its label's centre with falling variances as a PCA gives them; seed 0. The projection is fitted to 200,000 bags
of 20 ids out of 50,000. Throughput is NumPy's on one thread, for batches of 4,096 queries, median of 5.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from longtail.bundle import Proposal
from longtail.trainer.config import FeatureConfig
from longtail.trainer.sampling.projection import fit_projection
from longtail.trainer.sampling.tree_fit import fit_tree

T = TypeVar("T")
BAG = FeatureConfig(name="bag", kind="bag")
LABELS_PER_CENTRE = 50
NOISE = 0.5
BATCH, DRAWS, BEAM, ROUNDS = 4096, 8, 100, 5
BAGS, BAG_IDS, BAG_LENGTH, BLOCK = 200_000, 50_000, 20, 10_000


def main() -> None:
    """Print one table of times and one of throughput."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=200_000)
    parser.add_argument("--pairs", type=int, default=500_000)
    parser.add_argument("--dims", type=int, default=16)
    options = parser.parse_args()
    labels, dims = options.labels, options.dims
    z_NK, labels_N = pairs(labels, options.pairs + options.pairs // 10, dims)
    train, test = slice(0, options.pairs), slice(options.pairs, None)

    print(f"\n{labels:,} labels, {options.pairs:,} pairs, {dims} dimensions, {os.cpu_count()} cores\n")
    print("| step | seconds | CPU seconds | peak memory so far |\n|---|---:|---:|---:|")
    blocks = bags()
    seconds, _ = clocked(lambda: fit_projection([BAG], blocks, {BAG.name: BAG_IDS}, dims))
    print(f"| projection of {BAGS:,} bags of {BAG_LENGTH} out of {BAG_IDS:,} ids | {seconds} | {peak()} |", flush=True)
    seconds, (weights, biases, leaf_labels) = clocked(lambda: fit_tree(z_NK[train], labels_N[train], labels=labels))
    print(f"| tree | {seconds} | {peak()} |", flush=True)
    projection = {"z": np.zeros((1, dims), np.float32)}
    tree = Proposal(projection, np.zeros(dims, np.float32), weights, biases, leaf_labels)
    tree.validate(labels)

    counts = np.bincount(labels_N[train], minlength=labels) + 0.5
    by_frequency = np.log(counts / counts.sum())
    print("\n| mean log p, nats | training pairs | held-out pairs |\n|---|---:|---:|")
    print(f"| frequencies | {by_frequency[labels_N[train]].mean():.3f} | {by_frequency[labels_N[test]].mean():.3f} |")
    train_log_p, test_log_p = (tree.log_probabilities(z_NK[s], labels_N[s, None]).mean() for s in (train, test))
    print(f"| tree | {train_log_p:.3f} | {test_log_p:.3f} |")

    z_BK, rng = z_NK[test][:BATCH], np.random.default_rng(1)
    given_BM = rng.integers(0, labels, (len(z_BK), DRAWS))
    few = max(1, 2**22 // labels)
    works: list[tuple[str, int, Callable[[], object]]] = [
        (f"draws, {DRAWS} a query", given_BM.size, lambda: tree.sample(z_BK, DRAWS, rng)),
        (f"log p of given labels, {DRAWS} a query", given_BM.size, lambda: tree.log_probabilities(z_BK, given_BM)),
        ("log p of every label", few * labels, lambda: tree.all_log_probabilities(z_BK[:few])),
        (f"queries of a beam of {BEAM}", len(z_BK), lambda: tree.beam(z_BK, BEAM)),
    ]
    print("\n| work | a second |\n|---|---:|")
    for name, amount, work in works:
        print(f"| {name} | {amount / np.median([timed(work)[0] for _ in range(ROUNDS)]):,.0f} |", flush=True)


def pairs(labels: int, count: int, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """z float32 [count, dims] and label rows int32 [count]."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((max(1, labels // LABELS_PER_CENTRE), dims)) / np.sqrt(1 + np.arange(dims))
    centre_of = rng.integers(0, len(centres), labels)
    share = 1 / (1 + rng.permutation(labels))
    labels_N = rng.choice(labels, count, p=share / share.sum()).astype(np.int32)
    z_NK = centres[centre_of[labels_N]] + NOISE * rng.standard_normal((count, dims))
    return z_NK.astype(np.float32), labels_N


def bags() -> list[dict[str, np.ndarray]]:
    """Encoded bags whose ids come from one of a hundred topics."""
    rng = np.random.default_rng(0)
    blocks = []
    for _ in range(BAGS // BLOCK):
        topic = rng.integers(0, 100, (BLOCK, 1))
        ids = (topic * (BAG_IDS // 100) + rng.zipf(1.5, (BLOCK, BAG_LENGTH))) % BAG_IDS
        blocks.append({"bag": ids.astype(np.int32), "bag__weight": np.ones(ids.shape, np.float32)})
    return blocks


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds a call takes, and what it returns."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def clocked(work: Callable[[], T]) -> tuple[str, T]:
    """Seconds on the clock and of all cores, as two cells, and what the call returns."""
    started = time.process_time()
    seconds, result = timed(work)
    return f"{seconds:.1f} | {time.process_time() - started:.1f}", result


def peak() -> str:
    """The process' largest resident size."""
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"


if __name__ == "__main__":
    main()
