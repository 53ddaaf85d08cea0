"""Cost of exact top-k lists at 11 λ, compared with one pass per λ.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 taskset -c 0 python -m benchmarks.evaluation_cost

Generated queries and labels of 64 dimensions around 200 centres, with Zipf frequencies. Ways take turns, and the least
CPU time counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import faiss
import numpy as np

from longtail.bundle.arrays import Float32, Int64
from longtail.trainer.evaluation.grid_ranker import GridRanker, best
from longtail.trainer.evaluation.ranking import compute_block_size

SIZES = {"Gowalla": (40_981, 1_000), "MovieLens 1M": (3_533, 3_000), "MovieLens 100K": (1_682, 940)}
K, DIM, TURNS, TEMPERATURE = 100, 64, 3, 0.05
LAMBDAS = np.linspace(0, 1, 11)


def main() -> None:
    """Print one Markdown table."""
    print("| labels, queries | grid ranker, CPU s | NumPy, product once, a partition per λ | FAISS flat per λ |")
    print("|---|---:|---:|---:|")
    for name, (labels, queries) in SIZES.items():
        ways = _ways(labels, queries)
        seconds = {way: [] for way in ways}
        for _ in range(TURNS):
            for way, run in ways.items():
                begin = time.process_time()
                run()
                seconds[way].append(time.process_time() - begin)
        ours, *others = (min(times) for times in seconds.values())
        print(f"| {name}: {labels:,}, {queries:,} | {ours:.2f} | {' | '.join(f'{it / ours:.1f} ×' for it in others)} |")


def _ways(labels: int, queries: int) -> dict[str, Callable[[], Int64]]:
    """Return the ways to compute the lists, int64 [λ, queries, K]."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(200, DIM))
    vectors = (centres[rng.integers(200, size=n)] + rng.normal(size=(n, DIM)) * 0.8 for n in (labels, queries))
    label_LD, query_ND = ((it / np.linalg.norm(it, axis=1, keepdims=True)).astype(np.float32) for it in vectors)
    log_pi_L = np.log(1 / np.arange(1, labels + 1) ** 0.9)
    gain_GL = (TEMPERATURE * LAMBDAS[:, None] * log_pi_L).astype(np.float32)
    block = compute_block_size(labels)

    def grid_ranker() -> Int64:
        ranker, nothing = GridRanker(log_pi_L[:, None], TEMPERATURE * LAMBDAS[:, None], K), np.zeros((0, 2), np.int64)
        sorted_PD, lists = label_LD[ranker.order], []
        for start in range(0, queries, block):
            query_DB = query_ND[start : start + block].T

            def write(chunk: slice, values: Float32, query_DB: Float32 = query_DB) -> None:
                np.matmul(sorted_PD[chunk], query_DB, out=values)

            lists.append(ranker.lists(ranker.values(query_DB.shape[1], write, nothing)))
        return np.concatenate(lists, axis=1)

    def plain() -> Int64:
        lists = []
        for start in range(0, queries, block):
            value_BL = query_ND[start : start + block] @ label_LD.T
            rows_BL = np.broadcast_to(np.arange(labels), value_BL.shape)
            lists.append(np.stack([best(value_BL + gain_L, rows_BL, K) for gain_L in gain_GL]))
        return np.concatenate(lists, axis=1)

    def flat() -> Int64:
        index = faiss.IndexFlatIP(DIM + 1)
        index.add(np.concatenate([label_LD, log_pi_L[:, None]], axis=1).astype(np.float32))
        faiss.cvar.distance_compute_blas_threshold = 1
        weights_GN1 = np.broadcast_to(TEMPERATURE * LAMBDAS[:, None, None], (len(LAMBDAS), queries, 1))
        return np.stack([index.search(np.concatenate([query_ND, it], axis=1, dtype=np.float32), K)[1]
                         for it in weights_GN1])  # fmt: skip

    return {"grid ranker": grid_ranker, "plain": plain, "flat": flat}


if __name__ == "__main__":
    main()
