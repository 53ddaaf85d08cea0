"""What a training step costs as its batch grows: time beside its three matrix products alone, and memory.

    python -m benchmarks.batch_cost                                       # 1,024, 4,096, 16,384 and 65,536
    python -m benchmarks.batch_cost --batch 4096 16384 --labels 1000000

In-batch softmax, d = 64, id towers, Adagrad, uniform ids; the model is that of step_cost. `whole` computes all logits
[B, B] at once, as steps did before they took rows in blocks. The products are TensorFlow's of the same sizes, logits
and both gradients, 4,096 rows at a time: what a step cannot do without. Steps and products take turns in a process per
batch and way; medians. Memory is the most that was resident in steps beyond what was before the first.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path

import numpy as np

from benchmarks.step_cost import DIM, QUERIES, longtail_step

ROUNDS = 5
_ROWS_AT_ONCE = 4096
_WHOLE_UP_TO = 16_384


def main() -> None:
    """Print a row for each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1024, 4096, 16_384, 65_536])
    parser.add_argument("--labels", type=int, default=100_000)
    arguments = parser.parse_args()
    print("| batch | products ms | step ms | products ÷ step | examples/s | GB | whole: step ms | GB |")
    print("|---:" * 8 + "|", flush=True)
    for batch in arguments.batch:
        products, step, memory = _apart(batch, arguments.labels, whole=False)
        whole = ["–", "–"]
        if batch <= _WHOLE_UP_TO:
            _, whole_step, whole_memory = _apart(batch, arguments.labels, whole=True)
            whole = [f"{whole_step:,.1f}", f"{whole_memory:.2f}"]
        print(
            f"| {batch:,} | {products:,.1f} | {step:,.1f} | {products / step:.2f} | {1000 * batch / step:,.0f} "
            f"| {memory:.2f} | {' | '.join(whole)} |",
            flush=True,
        )


def _apart(batch: int, labels: int, *, whole: bool) -> tuple[float, float, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (batch, labels, whole))


def _measured(batch: int, labels: int, whole: bool) -> tuple[float, float, float]:
    """Median milliseconds of the products and of the step, and gigabytes."""
    import tensorflow as tf

    from longtail.trainer.losses import batch_loss

    if whole:
        batch_loss._LEAST_ROWS = batch
    step = longtail_step(labels, "adagrad", batch=batch)
    rng = np.random.default_rng(0)
    queries_BD, labels_BD = (tf.constant(rng.standard_normal((batch, DIM), np.float32)) for _ in range(2))
    some = min(batch, _ROWS_AT_ONCE)

    @tf.function(autograph=False)
    def products(rows_ND: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        logits_NB = tf.matmul(rows_ND, labels_BD, transpose_b=True)
        return tf.matmul(logits_NB, labels_BD), tf.matmul(logits_NB, rows_ND, transpose_a=True)

    before = gigabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most that was resident begins anew
    of_steps, of_products, most = [], [], 0.0
    for turn in range(ROUNDS + 1):
        ids = [rng.integers(0, size, batch).astype(np.int32) for size in (QUERIES, labels)]
        began = time.perf_counter()
        step(*ids)
        of_steps.append(1000 * (time.perf_counter() - began))
        most = max(most, gigabytes("VmHWM") - before)
        began = time.perf_counter()
        for start in range(0, batch, some):
            float(products(queries_BD[start : start + some])[0][0, 0])
        of_products.append(1000 * (time.perf_counter() - began))
        if turn == 0:
            of_steps.clear()
            of_products.clear()
    return float(np.median(of_products)), float(np.median(of_steps)), most


def gigabytes(name: str) -> float:
    """What /proc says of this process under a name, such as `VmHWM`."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024 / 1e9


if __name__ == "__main__":
    main()
