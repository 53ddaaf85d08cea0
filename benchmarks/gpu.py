"""One GPU: training steps, tables and indexes, compared with the device's best possible speed and with the CPU.

    make bench-gpu                                            # on a machine with a CUDA 12 GPU; two recipes as well
    python -m benchmarks.gpu --only steps index
    python -m benchmarks.gpu --device cpu --batch 1024 --rows 100000 --labels 20000       # a test that it runs

`steps`: in-batch softmax on JAX, d = 128, id towers, Adagrad, in bfloat16 and float32: examples/s, and the time of the
three matrix products of the same sizes in bfloat16 as a share of the step. `torch` is a plain in-batch softmax of
PyTorch with sparse embeddings and SGD, in bfloat16, compiled, if PyTorch is installed. `tables`: the same step with the
given number of queries, and the memory of the device. `index`: releases built on the device and searched on it and on
the CPU, for 100 results at λ 0, ½ and 1, in batches of 1, 64 and 4,096, and with a tenth of the labels excluded:
queries/s, the share of the CPU's answers that the device also returns, and the difference of scores of the same label.
The data are those of index_recall. Figures are medians of five runs, after two runs that compile.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.step_cost import longtail_step

PARTS = ("steps", "tables", "index")
DIM, K, LAMBDAS, SEARCHED = 128, 100, (0.0, 0.5, 1.0), (1, 64, 4096)
LABELS = 100_000
SPECS = ("flat", "ivf_flat")
_PRODUCT_ROWS = 4096


def main() -> None:
    """Print the selected tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[4096, 16_384, 65_536, 131_072])
    parser.add_argument("--rows", type=int, default=100_000_000, help="queries of `tables`")
    parser.add_argument("--labels", type=int, default=1_000_000, help="of `index`")
    arguments = parser.parse_args()
    os.environ["KERAS_BACKEND"] = "jax"
    if arguments.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    if "steps" in arguments.only:
        steps(arguments.batch)
    if "tables" in arguments.only:
        tables(arguments.rows, arguments.batch[0])
    if "index" in arguments.only:
        index(arguments.labels, arguments.device)


def steps(batches: list[int]) -> None:
    """Compare steps with matrix products and with PyTorch, by batch and precision."""
    print(f"\n{_device()}; a step of a batch, d = {DIM}\n")
    print("| batch | precision | products ms | step ms | products ÷ step | examples/s | torch: examples/s | × torch |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for batch in batches:
        products, torch = _products(batch), _torch_step(batch)
        of_torch = batch / _seconds(torch) if torch else float("nan")
        for precision in ("mixed_bfloat16", "float32"):
            seconds = _seconds(_step(LABELS, batch, precision))
            rate = batch / seconds
            print(
                f"| {batch:,} | {precision} | {1e3 * products:,.2f} | {1e3 * seconds:,.2f} | {products / seconds:.2f} "
                f"| {rate:,.0f} | {of_torch:,.0f} | {rate / of_torch:.2f} |",
                flush=True,
            )


def tables(rows: int, batch: int) -> None:
    """Time a step with a table of many rows."""
    import jax

    seconds = _seconds(_step(rows, batch, "mixed_bfloat16"))
    used = (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", float("nan"))
    print(
        f"\n{rows:,} queries × {DIM}: {1e3 * seconds:,.2f} ms a step of {batch:,}, {used / 1e9:,.1f} GB on the device\n"
    )


def index(labels: int, device: Any) -> None:
    """Search releases of three kinds on the device and on the CPU."""
    from benchmarks.index_recall import synthetic_bundle
    from longtail.index import Filter, IndexSpec, build, open_releases

    print(f"\n{labels:,} labels × 64, {K} results\n")
    print("| index | build s | searched on | λ | batch | queries/s | a tenth excluded | same answers | scores apart |")
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bundle = synthetic_bundle(labels).write(Path(folder) / "bundle")
        without = Filter(exclude=np.arange(0, labels, 10))
        queries_QD = np.asarray(bundle.calibration_queries)
        for spec in SPECS:
            began = time.perf_counter()
            build(bundle, Path(folder) / "releases", spec=IndexSpec(spec, device=device), name=spec)
            built = time.perf_counter() - began
            releases = open_releases(Path(folder) / "releases")
            searchers = {name: releases.open(spec, device=name).searcher for name in ("cpu", device)}
            for value in LAMBDAS:
                queries_QE = bundle.augmentation.queries(queries_QD, value)
                expected_QK, rows_QK = searchers["cpu"].search(queries_QE, K)
                for name, searcher in searchers.items():
                    scores_QK, others_QK = searcher.search(queries_QE, K)
                    same = np.mean([len(np.intersect1d(a, b)) / K for a, b in zip(rows_QK, others_QK, strict=True)])
                    difference = float(np.abs(scores_QK - expected_QK)[rows_QK == others_QK].max(initial=0))
                    for size in SEARCHED:
                        batch_BE = np.resize(queries_QE, (size, queries_QE.shape[1]))
                        plain = size / _seconds(partial(searcher.search, batch_BE, K))
                        filtered = size / _seconds(partial(searcher.search, batch_BE, K, [without] * size))
                        cells = [spec, f"{built:,.1f}", name, f"{value:g}", f"{size:,}", f"{plain:,.0f}"]
                        cells += [f"{filtered:,.0f}", f"{same:.4f}", f"{difference:.1e}"]
                        print(f"| {' | '.join(cells)} |", flush=True)


def _seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(7):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return float(np.median(times[2:]))


def _device() -> str:
    import jax

    return str(jax.devices()[0].device_kind)


def _products(batch: int) -> float:
    """Time a step's three products in bfloat16; [B, B] may not fit, so by blocks."""
    import jax
    import jax.numpy as jnp

    labels_BD = jax.random.normal(jax.random.key(0), (batch, DIM), jnp.bfloat16)
    some = min(batch, _PRODUCT_ROWS)

    @jax.jit
    def products(labels_BD: Any) -> Any:
        def add(total_BD: Any, rows_ND: Any) -> Any:
            logits_NB = rows_ND @ labels_BD.T
            return total_BD + logits_NB.T @ rows_ND, logits_NB @ labels_BD

        return jax.lax.scan(add, jnp.zeros_like(labels_BD), labels_BD.reshape(-1, some, DIM))

    return _seconds(lambda: jax.block_until_ready(products(labels_BD)))


def _step(queries: int, batch: int, precision: str) -> Callable[[], object]:
    """Build a step on batches of uniform ids."""
    step, rng = longtail_step(LABELS, "adagrad", batch=batch, dim=DIM, queries=queries, precision=precision), _rng()
    return lambda: step(*(rng.integers(0, size, batch).astype(np.int32) for size in (queries, LABELS)))


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _torch_step(batch: int) -> Callable[[], object] | None:
    """Build a step with the same loss in plain PyTorch; None without PyTorch or memory for [B, B]."""
    try:
        import torch
    except ImportError:
        return None
    device, rng = "cuda" if torch.cuda.is_available() else "cpu", _rng()
    towers = [torch.nn.Embedding(LABELS, DIM, sparse=True, device=device) for _ in range(2)]
    optimizer = torch.optim.SGD([tower.weight for tower in towers], lr=0.01)

    def loss_of(query_BD: Any, label_BD: Any, label_B: Any) -> Any:
        normal = [torch.nn.functional.normalize(side, dim=1).bfloat16() for side in (query_BD, label_BD)]
        logits_BB = (normal[0] @ normal[1].T).float() / 0.1
        diagonal = torch.eye(len(label_B), dtype=torch.bool, device=device)
        logits_BB = logits_BB.masked_fill((label_B[:, None] == label_B[None]) & ~diagonal, -1e30)
        return torch.nn.functional.cross_entropy(logits_BB, torch.arange(len(label_B), device=device))

    compiled = torch.compile(loss_of)

    def run() -> object:
        query_B, label_B = (torch.as_tensor(rng.integers(0, LABELS, batch), device=device) for _ in range(2))
        optimizer.zero_grad()
        loss = compiled(towers[0](query_B), towers[1](label_B), label_B)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    try:
        run()
    except torch.cuda.OutOfMemoryError:
        return None
    return run


if __name__ == "__main__":
    main()
