"""What ranking a catalogue at 11 λ costs, beside one λ after another and beside one flat pass of FAISS.

    python -m benchmarks.evaluation_cost                       # 10,000 queries, 100,000 labels
    python -m benchmarks.evaluation_cost --labels 1000000

d = 64, T = 0.1, log ν of a catalogue whose label of rank r is drawn in proportion to 1 / r, 20 seen labels a query.
Embeddings are unit vectors, at random or around 200 directions, with a cosine of about .8 between those of one. One λ
after another is a matrix product and a `top_k` of Keras for each. FAISS searches the same rows at λ = ½ alone, in an
`IndexFlatIP`, and leaves no seen label out: as it comes, and by matrix products however few the queries are
(`distance_compute_blas_threshold`). Ways take turns, and the best of three counts. Run it on one core
(`taskset -c 0`), where all have one thread. Rates are queries/s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import faiss
import numpy as np
from keras import ops

from longtail.bundle import Buckets
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.ranking import LabelSide, rank
from longtail.trainer.evaluation.task import seen_by

DIM, TEMPERATURE, SEEN, DIRECTIONS = 64, 0.1, 20, 200
SETTINGS = [Setting(at / 10) for at in range(11)]
ONE_BY_ONE = 500
"""Queries that are ranked at one λ after another."""
TURNS = 3


class Work:
    """Queries, labels, and what queries have seen; embeddings are around `directions`, or at random."""

    def __init__(self, queries: int, labels: int, *, directions: bool) -> None:
        rng = np.random.default_rng(0)
        share_L = rng.permutation(1 / np.arange(1, labels + 1))
        users, items = rng.standard_normal((queries, DIM)), rng.standard_normal((labels, DIM))
        if directions:
            centres = 2 * rng.standard_normal((DIRECTIONS, DIM))
            users += centres[rng.integers(0, DIRECTIONS, queries)]
            items += centres[rng.integers(0, DIRECTIONS, labels)]
        self.users, items = (
            np.float32(vectors / np.linalg.norm(vectors, axis=1, keepdims=True)) for vectors in (users, items)
        )
        self.side = LabelSide.of(
            items, None, np.ones(labels, np.int64), training_queries=queries, temperature=TEMPERATURE,
            log_pn=np.float32(np.log(share_L / share_L.sum())), buckets=Buckets.by_count(),
        )  # fmt: skip
        seen = rng.integers(0, labels, (queries, SEEN)) + labels * np.arange(queries)[:, None]
        self.seen_keys, self.labels = np.unique(seen), labels

    def in_one_pass(self, k: int) -> np.ndarray:
        """`rank` of all queries, int32 [G, N, K]."""
        rows = np.arange(len(self.users), dtype=np.int32)
        return rank(rows, self.users.__getitem__, self.side, self.seen_keys, SETTINGS, k=k)[0]

    def one_by_one(self, k: int) -> np.ndarray:
        """The first queries, ranked anew for every setting, int32 [G, n, K]."""
        rows = np.arange(min(ONE_BY_ONE, len(self.users)), dtype=np.int32)
        labels_EL = ops.convert_to_tensor(self.side.rows().T.copy())
        places = seen_by(self.seen_keys, rows, labels=self.labels)
        nothing = np.full(len(places), -np.inf, np.float32)
        tops = []
        for setting in SETTINGS:
            scores = ops.matmul(self.side.augmentation.queries(self.users[rows], *setting), labels_EL)
            tops.append(ops.convert_to_numpy(ops.top_k(ops.scatter_update(scores, places, nothing), k)[1]))
        return np.stack(tops)

    def faiss_index(self) -> faiss.IndexFlatIP:
        """The rows."""
        index = faiss.IndexFlatIP(DIM + 1)
        index.add(self.side.rows())
        return index


def main() -> None:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--labels", type=int, default=100_000)
    options = parser.parse_args()
    print(f"{options.queries:,} queries, {options.labels:,} labels, {len(SETTINGS)} λ, faiss {faiss.__version__}\n")
    print(
        "| embeddings | k | one by one | one pass | FAISS, one λ, as it comes | by products | one pass ÷ one by one "
        "| one pass ÷ FAISS by products | lists that differ |"
    )
    print("|---|" + "---:|" * 8, flush=True)
    for directions in (False, True):
        work = Work(options.queries, options.labels, directions=directions)
        for k in (20, 100):
            rates, differ = measured(work, k)
            print(
                f"| {'around directions' if directions else 'random'} | {k} | "
                + " | ".join(f"{rate:,.0f}" for rate in rates)
                + f" | {rates[1] / rates[0]:.1f} | {rates[1] / rates[3]:.2f} | {differ} |",
                flush=True,
            )


def measured(work: Work, k: int) -> tuple[list[float], str]:
    """Queries per second of every way, and how many lists of two ways differ."""
    index, asked = work.faiss_index(), work.side.augmentation.queries(work.users, 0.5)
    as_it_comes = faiss.cvar.distance_compute_blas_threshold

    def searched(threshold: int) -> np.ndarray:
        faiss.cvar.distance_compute_blas_threshold = threshold
        try:
            return index.search(asked, k)[1][None]
        finally:
            faiss.cvar.distance_compute_blas_threshold = as_it_comes

    ways: list[Callable[[], np.ndarray]] = [
        lambda: work.one_by_one(k), lambda: work.in_one_pass(k), lambda: searched(as_it_comes), lambda: searched(1)
    ]  # fmt: skip
    rates, tops = [0.0] * len(ways), [np.empty(0)] * len(ways)
    for _ in range(TURNS):
        for at, way in enumerate(ways):
            began = time.perf_counter()
            tops[at] = way()
            rates[at] = max(rates[at], tops[at].shape[1] / (time.perf_counter() - began))
    differ = (tops[0] != tops[1][:, : tops[0].shape[1]]).any(axis=2)
    return rates, f"{differ.sum()} of {differ.size:,}"


if __name__ == "__main__":
    main()
