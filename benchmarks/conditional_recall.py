"""How much of the exact answer the service finds under the conditional dial, and what that costs.

    longtail-train fit data/gowalla/recipe.toml --out runs/gowalla-tree \\
        --set 'query={ combine = "sum", features = [{ name = "user_id", kind = "id" },
               { name = "history", kind = "history", table = "item_id", max_length = 30 }] }' \\
        --set loss.family=logistic --set 'loss.sampler={ name = "adversarial", negatives = 16 }' \\
        --set loss.regularizer=0.001 --set training.epochs=3 --set training.refit=false
    python -m benchmarks.conditional_recall runs/gowalla-tree data/gowalla/train.parquet

Queries are 200 training users with their histories. Exact scores are f + λ·log p_n(y|x) of every label; the index
is flat, so that only the choice of candidates is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from longtail.bundle import Bundle
from longtail.index import Searcher
from longtail.index.construct.bands import train_index
from longtail.index.manifests import Effort
from longtail.index.search.band import Band
from longtail.serving import Encoder
from longtail.serving.core.ranking import Batch, IndexRanker
from longtail.serving.core.tree_ranking import TreeRanker

QUERIES, K, LAMBDAS = 200, 20, (0.25, 0.5, 1.0, 2.0)
TOLERANCE = 1e-3


def main() -> None:
    """Print recall by λ, and CPU time per request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("interactions", type=Path, help="Parquet with user_id and item_id.")
    options = parser.parse_args()
    bundle = Bundle.load(options.bundle)
    if bundle.proposal is None:
        parser.error(f"{options.bundle}: expected a bundle with a tree, found one without")
    rows = bundle.rows()
    flat = Band("all", "flat", "Flat", train_index("Flat", rows.shape[1], rows, "cpu"), np.arange(len(rows)))
    searcher = Searcher(bundle, [flat], Effort())
    index = IndexRanker(searcher, bundle.augmentation)
    union = TreeRanker(searcher, index, bundle, bundle.proposal)
    encoder = Encoder(bundle.query_model, bundle.manifest.query_features, bundle.vocabularies, bundle.manifest.dim)
    inputs = encoder.read(histories(options.interactions))
    queries = encoder.embed(inputs)
    f = queries @ bundle.embeddings.T / bundle.manifest.temperature
    if bundle.labels.bias is not None:
        f += bundle.labels.bias
    log_p_n = bundle.proposal.all_log_probabilities(bundle.proposal.project(inputs))

    print(f"{len(rows):,} labels, recall@{K} of {QUERIES} queries\n")
    print("| candidates | " + " | ".join(f"λ = {at:g}" for at in LAMBDAS) + " |\n|---|" + "---|" * len(LAMBDAS))
    exact = {at: np.sort(f + at * log_p_n, axis=1)[:, -K] for at in LAMBDAS}
    found = [union.rank(batch(queries, inputs, at))[0] for at in LAMBDAS]
    shares = [(found[at] >= exact[bias][:, None] - TOLERANCE).mean() for at, bias in enumerate(LAMBDAS)]
    print(f"| the service's union | {' | '.join(f'{share:.3f}' for share in shares)} |")
    for name, scores in (("as many by f alone", f), ("as many by p_n alone", log_p_n)):
        reach = 1000 + 10 * K
        near = np.argpartition(-scores, reach, axis=1)[:, :reach]
        shares = [
            (np.take_along_axis(f + at * log_p_n, near, axis=1) >= exact[at][:, None]).sum() / (QUERIES * K)
            for at in LAMBDAS
        ]
        print(f"| {name} | {' | '.join(f'{share:.3f}' for share in shares)} |")

    print("\n| queries in a request | index alone, CPU ms | with the tree | ratio |\n|---|---|---|---|")
    for size in (1, 32):
        some = batch(queries[:size], {name: column[:size] for name, column in inputs.items()}, 0.5)
        alone, both = (cpu_ms(lambda ranker=ranker, some=some: ranker.rank(some)) for ranker in (index, union))
        print(f"| {size} | {alone:.2f} | {both:.2f} | {both / alone:.1f} |")


def histories(path: Path) -> list[dict[str, object]]:
    """Features of some users, drawn by seed."""
    table = pq.read_table(path)
    users, items = (np.array(table[name].to_pylist()).astype(str) for name in ("user_id", "item_id"))
    chosen = np.random.default_rng(0).choice(np.unique(users), QUERIES, replace=False)
    return [{"user_id": str(user), "history": items[users == user].tolist()} for user in chosen]


def batch(queries: np.ndarray, inputs: dict[str, np.ndarray], bias_removal: float) -> Batch:
    """Queries of one λ, without filters."""
    zeros = np.zeros(len(queries), np.float32)
    return Batch(queries, inputs, zeros + np.float32(bias_removal), zeros, [None] * len(queries), K)


def cpu_ms(work: Callable[[], object]) -> float:
    """CPU time of one call on this thread, ms: the best of 5 averages over 5."""
    work()
    best = np.inf
    for _ in range(5):
        started = time.thread_time()
        for _ in range(5):
            work()
        best = min(best, (time.thread_time() - started) / 5)
    return 1000 * best


if __name__ == "__main__":
    import faiss

    faiss.omp_set_num_threads(1)
    main()
