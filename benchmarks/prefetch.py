"""Loss of a vector store that fetches the nearest N labels and adds the prior afterwards, against exact search.

    python -m benchmarks.prefetch runs/movielens-1m runs/amazon-beauty runs/gowalla --plot prefetch.png

The truth is the best k = 20 by s = u·v/T + λ·log ν, for the calibration queries of a bundle. A prefetch takes the exact
N best by u·v/T and sorts them by s. The graph is FAISS's HNSW over the rows of Longtail's index, with the prior as a
coordinate, by inner product, or by distance after one more coordinate has given all rows the same norm [Bachrach et al.
2014]. Longtail's rows are the default of `longtail-index build`, and ivf_flat for larger catalogues. Milliseconds are
per query, one at a time on one thread. Recall of the tail counts the true labels that are in the tail.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import faiss
import matplotlib
import numpy as np
import typer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from longtail.bundle import BUCKET_NAMES, Bundle
from longtail.bundle.arrays import Float32, Int64
from longtail.index import IndexSpec
from longtail.index.building.tuning import tune_index

_K, _QUERIES, _TIMED = 20, 500, 200
_LAMBDAS = (-0.5, 0.0, 0.5, 1.0, 1.5)
_TAIL = BUCKET_NAMES.index("tail")
_DRAWN = {
    "re-sort of 20": ("#cbd5e1", 1.6), "re-sort of 100": ("#94a3b8", 1.6), "re-sort of 1,000": ("#64748b", 1.6),
    "HNSW, inner product": ("#b4500a", 1.6), "Longtail": ("#2447a8", 3.2),
}  # fmt: skip
"""Colour and width of the lines of the plot; what lies on another line is in the tables alone."""
Search = Callable[[Float32, float], Int64]
"""A function of vectors [B, D] and λ to rows [B, k]."""


def main(
    bundles: list[Path],
    plot: Annotated[Path | None, typer.Option(help="Draw recall along λ, a panel a bundle.")] = None,
) -> None:
    """Print a table for each bundle."""
    faiss.omp_set_num_threads(1)
    panels = dict[str, dict[str, list[float]]]()
    for path in bundles:
        bundle = Bundle.load(path)
        panels[f"{path.name}, {bundle.manifest.labels:,} labels"] = _table(path.name, bundle)
    if plot is not None:
        _draw(panels, plot)


def _table(name: str, bundle: Bundle) -> dict[str, list[float]]:
    rng, given = np.random.default_rng(0), bundle.calibration_queries
    queries_BD = given[np.sort(rng.choice(len(given), min(_QUERIES, len(given)), replace=False))]
    rows_LE, buckets_L, recalls = bundle.rows(), bundle.labels.buckets, dict[str, list[float]]()
    wanted = [_best(queries_BD, bundle, rows_LE, at, _K) for at in _LAMBDAS]
    print(f"\n{name}: {bundle.manifest.labels:,} labels, recall@{_K} of all, of the tail\n")
    print(f"| search | {' | '.join(f'λ = {at:g}' for at in _LAMBDAS)} | ms |\n|---|{'---|' * (len(_LAMBDAS) + 1)}")
    for method, search in _searches(bundle, rows_LE).items():
        cells = []
        for at, wanted_BK in zip(_LAMBDAS, wanted, strict=True):
            found_BK = search(queries_BD, at)
            hits_BK = (wanted_BK[:, :, None] == found_BK[:, None, :]).any(axis=2)
            tail_BK = buckets_L[wanted_BK] == _TAIL
            recalls.setdefault(method, []).append(float(hits_BK.mean()))
            cells.append(
                f"{hits_BK.mean():.3f}, {hits_BK[tail_BK].mean():.3f}" if tail_BK.any() else f"{hits_BK.mean():.3f}, –"
            )
        began = time.perf_counter()
        for query in queries_BD[:_TIMED]:
            search(query[None], 1.0)
        milliseconds = 1e3 * (time.perf_counter() - began) / len(queries_BD[:_TIMED])
        print(f"| {method} | {' | '.join(cells)} | {milliseconds:.2f} |", flush=True)
    return recalls


def _searches(bundle: Bundle, rows_LE: Float32) -> dict[str, Search]:
    """Build every method of search, by name."""
    dim, augmentation = bundle.manifest.dim, bundle.augmentation
    norms_L = np.linalg.norm(rows_LE, axis=1)
    beyond_L = np.sqrt(norms_L.max() ** 2 - norms_L**2)
    by_product = _graph(rows_LE, faiss.METRIC_INNER_PRODUCT)
    by_distance = _graph(np.concatenate([rows_LE, beyond_L[:, None]], axis=1, dtype=np.float32), faiss.METRIC_L2)
    plain = faiss.IndexFlatIP(dim)
    plain.add(np.ascontiguousarray(rows_LE[:, :dim]))

    def prefetch(most: int) -> Search:
        def search(queries_BD: Float32, at: float) -> Int64:
            _, rows_BN = plain.search(queries_BD, min(most, bundle.manifest.labels))
            queries_BE = augmentation.queries(queries_BD, at)
            scores_BN = np.einsum("be,bne->bn", queries_BE, rows_LE[rows_BN])
            places_BK = np.argsort(-scores_BN, axis=1, kind="stable")[:, :_K]
            found: Int64 = np.take_along_axis(rows_BN, places_BK, axis=1)
            return found

        return search

    def ours(spec: str) -> Search:
        searcher = tune_index(bundle, IndexSpec(spec), "cpu", lambda _: None).searcher(bundle)
        return lambda queries_BD, at: searcher.search(augmentation.queries(queries_BD, at), _K)[1]

    return {
        **{f"re-sort of {most:,}": prefetch(most) for most in (_K, 5 * _K, 50 * _K)},
        "HNSW, inner product": lambda queries_BD, at: by_product.search(augmentation.queries(queries_BD, at), _K)[1],
        "HNSW, distances": lambda queries_BD, at: by_distance.search(
            np.pad(augmentation.queries(queries_BD, at), [(0, 0), (0, 1)]), _K
        )[1],
        "Longtail": ours("auto"),
        "Longtail, ivf_flat": ours("ivf_flat"),
    }


def _graph(rows_LE: Float32, metric: int) -> faiss.IndexHNSWFlat:
    graph = faiss.IndexHNSWFlat(rows_LE.shape[1], 32, metric)
    graph.hnsw.efConstruction, graph.hnsw.efSearch = 200, 200
    graph.add(rows_LE)
    return graph


def _best(queries_BD: Float32, bundle: Bundle, rows_LE: Float32, at: float, k: int) -> Int64:
    """Find the exact k best rows, int64 [B, k]."""
    scores_BL = bundle.augmentation.queries(queries_BD, at).astype(np.float64) @ rows_LE.T.astype(np.float64)
    best: Int64 = np.argsort(-scores_BL, axis=1, kind="stable")[:, :k]
    return best


def _draw(panels: dict[str, dict[str, list[float]]], path: Path) -> None:
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4 * len(panels), 3.8), sharey=True, layout="constrained", squeeze=False
    )
    for (title, lines), each in zip(panels.items(), axes[0], strict=True):
        for name, (colour, width) in _DRAWN.items():
            each.plot(_LAMBDAS, lines[name], marker="o", markersize=3.5, label=name, color=colour, linewidth=width)
        each.set(title=title, xlabel="λ", ylim=(0, 1.03))
    axes[0, 0].set_ylabel(f"recall@{_K} of exact search")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    typer.run(main)
