"""Recall and speed under filters, of the index kinds as they are built, beside FAISS's own search with a selector.

    python -m benchmarks.filtered_recall                     # 80,000 labels
    python -m benchmarks.filtered_recall --labels 300000

Data: as benchmarks/index_recall.py, d = 64. Selections are those that every build measures, at λ = 0, ½ and 1
(index/construct/filtered.py). "Selector alone" gives the same bands the same effort as without a filter, and FAISS a
selector: what an engine does that filters while it searches. Recall is the lowest of recall@10 and @100, over all
labels and each bucket's; queries per second are of one batch on every thread, in the same run.
"""

from __future__ import annotations

import argparse
import time

import faiss
import numpy as np

from benchmarks.index_recall import synthetic_bundle
from longtail.bundle.arrays import Float32, Int64
from longtail.index import Filter, IndexSpec, Searcher, Selection, top_k
from longtail.index.construct.filtered import FilteredTrial
from longtail.index.construct.tuning import TunedIndex, tune_index
from longtail.index.search.eligible import IdSet

SPECS = ("ivf_flat", "ivf_sq", "ivf_fastscan", "ivf_pq", "hnsw")


class SelectorAlone(Searcher):
    """The bands at the effort of no filter, one selection ruled out by FAISS."""

    def search(self, queries_BE: Float32, k: int, filters: list[Filter | None] | None = None) -> tuple[Float32, Int64]:
        """As `Searcher.search`, of queries that share one selection."""
        selection = filters[0].selection if filters and filters[0] else None
        assert selection is not None
        scores, rows = [], []
        for band in self.bands:
            ids = IdSet.from_mask(selection.mask[band.rows_N])
            fetch = min(k * self.effort.refine, len(band.rows_N))
            padded = np.pad(queries_BE, ((0, 0), (0, band.index.d - queries_BE.shape[1])))
            scores_BC, ids_BC = band._search_cpu(padded, fetch, self.effort.probes, ids)
            rows_BC = np.where(ids_BC < 0, -1, band.rows_N[ids_BC])
            scores.append(self._exact.rescore(queries_BE, rows_BC) if band.lossy else scores_BC)
            rows.append(rows_BC)
        return top_k(scores, rows, k)


def main() -> None:
    """Print the table for the asked number of labels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=80_000)
    parser.add_argument("--specs", nargs="*", default=SPECS)
    arguments = parser.parse_args()
    bundle = synthetic_bundle(arguments.labels)
    trial = FilteredTrial(bundle, bundle.rows())
    print(f"\n{arguments.labels:,} labels, faiss {faiss.__version__}\n")
    print("| index | eligible | boost | selection | recall, selector alone | queries/s | recall | queries/s |")
    print("|---|---:|---:|---|---:|---:|---:|---:|")
    for spec in arguments.specs:
        print_rows(spec, tune_index(bundle, IndexSpec(spec), "cpu", lambda _: None), trial)


def print_rows(spec: str, built: TunedIndex, trial: FilteredTrial) -> None:
    """A row for each selection."""
    assert built.filtered is not None
    searchers = (
        SelectorAlone(trial.bundle, built.bands, built.chosen.effort),
        Searcher(trial.bundle, built.bands, built.chosen.effort, built.filtered.efforts),
    )
    for effort in built.filtered.efforts:
        for name, rows_R in trial.selections(effort.selectivity):
            figures = ""
            for searcher in searchers:
                lowest = min(at.lowest for at in trial.measure(searcher, effort.selectivity, name, rows_R))
                figures += f" {lowest:.3f} | {_rate(searcher, trial, rows_R):,.0f} |"
            boost = "exact" if effort.exact else f"{effort.boost:g}"
            print(f"| {spec} | {effort.selectivity:.1%} | {boost} | {name} |{figures}", flush=True)


def _rate(searcher: Searcher, trial: FilteredTrial, rows_R: Int64) -> float:
    mask_L = np.zeros(searcher.labels, np.bool_)
    mask_L[rows_R] = True
    filters: list[Filter | None] = [Filter(selection=Selection(mask_L))] * len(trial.queries_QE)
    searcher.search(trial.queries_QE, 100, filters)
    started = time.perf_counter()
    searcher.search(trial.queries_QE, 100, filters)
    return len(filters) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
