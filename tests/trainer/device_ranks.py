"""What `test_devices` runs in two processes: `device_ranks FOLDER COORDINATOR PROCESS` writes FOLDER/PROCESS.npz."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from longtail.bundle import Buckets
from longtail.bundle.arrays import Float32, Float64, Int32
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.evaluation import ranking
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.metrics import Positives

QUERIES, LABELS, DIM = 5, 30, 4


def ranked() -> tuple[Int32, list[Float64], list[int]]:
    """Lists and likelihoods of five queries at two settings beside a conditional p_n, and the queries ranked here."""
    rng, ranked_rows = np.random.default_rng(0), list[int]()
    queries_ND, labels_LD = (rng.normal(size=(size, DIM)).astype(np.float32) for size in (QUERIES, LABELS))
    noise_NL = np.log(rng.dirichlet(np.ones(LABELS), QUERIES)).astype(np.float32)
    counts_L = np.arange(LABELS, 0, -1)
    side = ranking.LabelSide.build(
        labels_LD, None, counts_L, training_queries=9, temperature=0.5,
        log_pn=np.log(counts_L / counts_L.sum()).astype(np.float32), buckets=Buckets.by_count(),
    )  # fmt: skip

    def log_proposal(rows_B: Int32) -> Float32:
        ranked_rows.extend(rows_B.tolist())
        return noise_NL[rows_B]

    rows_N = np.arange(QUERIES, dtype=np.int32)
    likely = Positives.collect(rows_N, np.arange(3, 3 + QUERIES), queries=QUERIES, labels=LABELS)
    settings = [Setting(0.0), Setting(0.5)]
    past = Past.fixed(Pairs(rows_N, np.full(QUERIES, 2, np.int32)), queries=QUERIES)
    top_GNK, (_, log_p_N) = ranking.rank(
        rows_N, ranking.RankedModel(lambda rows_B: queries_ND[rows_B], side, log_proposal), past, settings, k=4,
        likelihood=ranking.Likelihood(likely, settings[1:]),
    )  # fmt: skip
    assert log_p_N is not None
    return top_GNK, [log_p_N], ranked_rows


def main(folder: Path, coordinator: str, process: int) -> None:
    """As the head of this file says, two queries at a time, of shares of three and two."""
    from longtail.trainer import devices

    devices.join(coordinator, 2, process)
    ranking._BLOCK_BYTES = 2 * 4 * 4 * LABELS
    top_GNK, (log_p_N,), ranked_rows = ranked()
    np.savez(folder / f"{process}.npz", top=top_GNK, log_p=log_p_N, rows=ranked_rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
