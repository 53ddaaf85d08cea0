"""Measure what a vector store loses that scores again only what it has fetched.

    python -m benchmarks.boost --plot docs/images/boost.png

Sets that are not in `data/` are downloaded, models that are not in `runs/boost-NAME` trained, without refit. 1,000
queries of the test split, seen labels filtered out, k = 20. A wanted score is taste u·v/T plus weight × boost; boosts
are log popularity (the weight is λ), a decay that halves in 5 years of a film's age (other sets have no dates: ages are
drawn), and the term of co-occurrence. Patterns are those of docs/boost.md; a weight of a pattern's own is the best of
several for these very queries. Graphs are FAISS's HNSW (32 edges, ef 200) over rows with the boosts as coordinates, by
inner product, or by distance after one more coordinate has given all the same length [Bachrach et al. 2014].

Legend: `B` queries, `L` labels, `D` dimensions, `E` with boosts as coordinates, `K` results, `R` entries of a history.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from matplotlib.figure import Figure

import longtail
from benchmarks.baselines import Trial
from longtail.bundle import BUCKET_NAMES, Bundle
from longtail.bundle.arrays import Float32, Int32, Int64
from longtail.bundle.page import AMBER, BLUE, GREEN, INK, SOFT, style
from longtail.bundle.tower import onnx_session
from longtail.index.search.candidates import best_columns
from longtail.model import Model
from longtail.trainer import load_recipe
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.data.sources import prepare
from longtail.trainer.evaluation.cooccurrence import HistoryEntries, HistoryTerm

K, QUERIES, DIALS = 20, 1_000, (-0.5, 0.5, 1.0, 1.5)
OVERRIDES = {
    "movielens-100k": [],
    "amazon-beauty": [
        'query.features=[{name="history",kind="history",table="item_id",max_length=50}]', "training.epochs=15",
        'loss={sampler="in_batch",weight="unit"}', "model.similarity=cosine", "model.temperature=auto",
    ],
    "gowalla": ["training.epochs=10"],
}  # fmt: skip
GRAPHS = ("as they are", "centred", "equal lengths")
DRAWN = {
    "fetch 100, add": SOFT, "fetch 1,000, add": INK, "fetch 100, min–max": AMBER, "two lists of 100, RRF": GREEN,
    "Longtail": BLUE,
}  # fmt: skip


class Goal(NamedTuple):
    """A wanted score: weight × boost, float32 [L], or [B, L] if every query has its own, and Longtail's options."""

    name: str
    boost: Float32
    options: dict[str, Any]


Pattern = Callable[[Float32, Goal], Iterator[Int64]]
"""Lists [B, K] by taste [B, L], −inf where seen: more than one if a weight is free, none if it cannot say the goal."""


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Sets; all three by default.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw recall by goal, a panel a set.")] = None,
) -> None:
    """Print two tables for each set."""
    panels = dict(print_tables(name) for name in names or OVERRIDES)
    if plot is not None:
        draw(panels, plot)


def print_tables(name: str) -> tuple[str, dict[str, list[float]]]:
    """Print what each pattern finds; returns a title and recalls of the exact lists, nan if it cannot say a goal."""
    data, run = Path("data", name), Path(f"runs/boost-{name}")
    overrides = [*OVERRIDES[name], "training.refit=false", "evaluation.baselines=[]"]
    if not data.exists():
        prepare(name, data, None, say=print)
    if not run.exists():
        longtail.fit(str(data / "recipe.toml"), out=run, overrides=overrides)
    bundle, recipe = Bundle.load(run), load_recipe(data / "recipe.toml", overrides)
    trial = Trial(recipe, dataset := read_dataset(recipe))
    task = trial.task.select_rows(np.random.default_rng(0).permutation(len(trial.task.rows_N)) < QUERIES)
    encoding = Encoding.fit(recipe, dataset, dict(bundle.vocabularies), bundle.manifest.query_features)
    features, tower = encoding.query.with_history(task.past), onnx_session(bundle.query_model, "query_tower.onnx")
    blocks = np.array_split(task.rows_N, 1 + len(task.rows_N) // 256)
    queries_BD = np.concatenate([tower.run(None, features.query_inputs(rows_B))[0] for rows_B in blocks])
    taste_BL = queries_BD @ bundle.embeddings.T / np.float32(bundle.manifest.temperature)
    seen_n2, entries = task.past.seen_labels(task.rows_N), HistoryEntries(task.past, recipe.history_events)
    taste_BL[seen_n2[:, 0], seen_n2[:, 1]] = -np.inf
    assert bundle.cooccurrence is not None
    decay_L, term = decays(bundle), HistoryTerm(bundle.cooccurrence, entries)
    goals = [
        *(Goal(f"λ = {dial:g}", np.float32(dial) * bundle.labels.log_pn, {"bias_removal": dial}) for dial in DIALS),
        Goal("3 × decay", 3 * decay_L, {"bias_removal": 0, "priors": {"decay": 3}}),
        Goal("ω = ½", term(task.rows_N).toarray() / 2, {"bias_removal": 0, "cooccurrence": 0.5}),
    ]
    exact = [best(taste_BL + goal.boost) for goal in goals]
    is_tail_L = bundle.labels.buckets == BUCKET_NAMES.index("tail")
    keys_B1 = task.positives.labels * np.arange(len(taste_BL))[:, None]

    def measure(rows_BK: Int64, exact_BK: Int64) -> tuple[float, float, float]:
        hits_B = np.isin(keys_B1 + rows_BK, task.positives.keys).sum(axis=1)
        is_found_BK = (exact_BK[:, :, None] == rows_BK[:, None, :]).any(axis=2)
        return is_found_BK.mean(), (hits_B / task.positives.per_query).mean(), is_tail_L[rows_BK].mean()

    title = f"{name}, {len(decay_L):,} labels"
    print(f"\n{title}, {len(taste_BL):,} queries")
    figures = {"exact": [measure(rows_BK, rows_BK) for rows_BK in exact]}
    with TemporaryDirectory() as folder:
        pq.write_table(pa.table({"label_id": bundle.labels.ids, "decay": decay_L}), f"{folder}/priors.parquet")
        release = longtail.build(bundle, f"{folder}/releases", priors=f"{folder}/priors.parquet").name
        model, histories_BR = longtail.load(f"{folder}/releases", release), entries.padded(task.rows_N, 50)
        graphs = {f"coordinates, HNSW, {kind}": graph(model.bundle, queries_BD, kind) for kind in GRAPHS}
        for pattern, lists in {**PATTERNS, **graphs, "Longtail": served(model, queries_BD, histories_BR)}.items():
            figures[pattern] = [
                max((measure(rows_BK, exact_BK) for rows_BK in lists(taste_BL, goal)), default=(np.nan,) * 3)
                for goal, exact_BK in zip(goals, exact, strict=True)
            ]
    recalls = {pattern: [f"{cell[0]:.3f}" for cell in row] for pattern, row in figures.items()}
    recalls["depth for .99"] = [f"{depth_for(taste_BL, exact_BK, 0.99):,}" for exact_BK in exact]
    nearest_BN = fetch(taste_BL, 100)
    recalls["w of min–max, 100 fetched"] = [
        "–".join(f"{w:.2f}" for w in np.quantile(scale(taste_BL, goal, nearest_BN)[2], [0.05, 0.95]))
        for goal in goals[:-1]
    ]
    uses = {pattern: [f"{cell[1]:.3f}, {cell[2]:.3f}" for cell in row] for pattern, row in figures.items()}
    for heading, rows in {"recall of the exact 20": recalls, "held-out recall, the tail's share": uses}.items():
        print(f"\n| {heading} | {' | '.join(goal.name for goal in goals)} |\n|{'---|' * 7}")
        for pattern, cells in rows.items():
            print(f"| {pattern} | {' | '.join(cells)} |".replace("nan, nan", "–").replace("nan", "–"), flush=True)
    return title, {pattern: [cell[0] for cell in row] for pattern, row in figures.items()}


def add(taste_BL: Float32, goal: Goal, depth: int) -> Iterator[Int64]:
    """Add the boost to the tastes of what was fetched: formulas, second phases, boost rankers in sum mode."""
    rows_BN = fetch(taste_BL, depth)
    yield best(pick(taste_BL, rows_BN) + pick(goal.boost, rows_BN), rows_BN)


def min_max(taste_BL: Float32, goal: Goal, depth: int) -> Iterator[Int64]:
    """Blend taste and boost, scaled to 0 … 1, by several weights."""
    if goal.boost.ndim == 1:  # conditions read properties of labels, and have none of a query's own terms
        rows_BN = fetch(taste_BL, depth)
        taste_BN, boost_BN, same_B1 = scale(taste_BL, goal, rows_BN)
        for w in np.quantile(same_B1, [0.1, 0.3, 0.5, 0.7, 0.9]).astype(np.float32):
            yield best((1 - w) * taste_BN + w * boost_BN, rows_BN)


def scale(taste_BL: Float32, goal: Goal, rows_BN: Int64) -> tuple[Float32, Float32, Float32]:
    """Scale fetched tastes and boosts to 0 … 1.

    Returns:
        Tastes and boosts [B, N], and the weight that they have in the goal, [B, 1].
    """
    scaled, ranges, taste_BN = [], [], pick(taste_BL, rows_BN)
    for values_BN in (taste_BN, pick(goal.boost, rows_BN)):
        low_B1 = np.where(taste_BN > -np.inf, values_BN, np.float32(np.inf)).min(axis=1, keepdims=True)
        high_B1 = np.where(taste_BN > -np.inf, values_BN, np.float32(-np.inf)).max(axis=1, keepdims=True)
        ranges.append(high_B1 - low_B1)
        scaled.append((values_BN - low_B1) / ranges[-1])
    return scaled[0], scaled[1], ranges[1] / (ranges[0] + ranges[1])


def fuse(taste_BL: Float32, goal: Goal, depth: int) -> Iterator[Int64]:
    """Add reciprocal ranks of two lists, by taste and by boost."""
    first_BL, second_BL = np.zeros_like(taste_BL), np.zeros_like(taste_BL)
    for scores_BL, shares_BL in ((taste_BL, first_BL), (boosted(taste_BL, goal), second_BL)):
        rows_BN = fetch(scores_BL, depth)
        ranks_BN = np.argsort(np.argsort(-pick(scores_BL, rows_BN), axis=1), axis=1)
        np.put_along_axis(shares_BL, rows_BN, (1 / (61 + ranks_BN)).astype(np.float32), axis=1)
    for weight in (0.1, 0.3, 1, 3):
        yield best(first_BL + np.float32(weight) * second_BL)


def unite(taste_BL: Float32, goal: Goal, depth: int, complete: bool) -> Iterator[Int64]:
    """Add the scores of two lists; a score that only the other list has is 0, or complete."""
    first_BL, second_BL = np.zeros_like(taste_BL, np.bool_), np.zeros_like(taste_BL, np.bool_)
    np.put_along_axis(first_BL, fetch(taste_BL, depth), True, axis=1)
    np.put_along_axis(second_BL, fetch(boosted(taste_BL, goal), depth), True, axis=1)
    knows_boost_BL = second_BL | (complete or goal.boost.ndim == 1)  # a property is read of every label
    scores_BL = np.where(first_BL | complete, taste_BL, 0) + np.where(knows_boost_BL, goal.boost, 0)
    yield best(np.where((first_BL | second_BL) & (taste_BL > -np.inf), scores_BL, -np.inf).astype(np.float32))


PATTERNS: dict[str, Pattern] = {
    **{f"fetch {depth:,}, add": partial(add, depth=depth) for depth in (100, 1_000, 10_000)},
    **{f"fetch {depth:,}, min–max": partial(min_max, depth=depth) for depth in (100, 1_000, 10_000)},
    "two lists of 100, RRF": partial(fuse, depth=100),
    "two lists of 1,000, missing 0": partial(unite, depth=1_000, complete=False),
    "two lists of 1,000, both scores": partial(unite, depth=1_000, complete=True),
}


def graph(bundle: Bundle, queries_BD: Float32, kind: str) -> Pattern:
    """Search a graph over rows with the boosts as coordinates."""
    dim, equal = bundle.manifest.dim, kind == "equal lengths"
    used = slice(dim + 2)  # without the bonuses of buckets, which come last
    rows_LE = np.ascontiguousarray(bundle.rows()[:, used])
    if kind != "as they are":
        rows_LE[:, dim:] -= rows_LE[:, dim:].mean(axis=0)  # changes no order
    if equal:
        squares_L1 = (rows_LE**2).sum(axis=1, keepdims=True)
        rows_LE = np.append(rows_LE, np.sqrt(squares_L1.max() - squares_L1), axis=1)
    index = faiss.IndexHNSWFlat(rows_LE.shape[1], 32, faiss.METRIC_L2 if equal else faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 200
    index.add(rows_LE)

    def search(taste_BL: Float32, goal: Goal) -> Iterator[Int64]:
        if goal.boost.ndim == 1:
            weights = [goal.options.get("priors", {}).get(prior.name, 0) for prior in bundle.priors.settings]
            queries_BE = bundle.augmentation.queries(queries_BD, goal.options["bias_removal"], priors=weights)
            queries_BE, lists = np.pad(queries_BE[:, used], [(0, 0), (0, int(equal))]), []
            for query_E, taste_L in zip(queries_BE, taste_BL, strict=True):
                unseen = faiss.IDSelectorNot(faiss.IDSelectorBatch(np.flatnonzero(np.isneginf(taste_L))))
                parameters = faiss.SearchParametersHNSW(sel=unseen, efSearch=200)
                lists.append(index.search(query_E[None], K, params=parameters)[1])
            yield np.concatenate(lists)

    return search


def served(model: Model, queries_BD: Float32, histories_BR: Int32) -> Pattern:
    """Ask a release as its service would."""
    ids = model.bundle.labels.ids
    row_of = {id_: row for row, id_ in enumerate(ids.to_pylist())}

    def search(taste_BL: Float32, goal: Goal) -> Iterator[Int64]:
        options, lists = {"k": K, "popularity": 0, "cooccurrence": 0, **goal.options}, []
        for query_D, history_R, taste_L in zip(queries_BD, histories_BR, taste_BL, strict=True):
            seen_ids, history = ids.take(np.flatnonzero(np.isneginf(taste_L))), ids.take(history_R[history_R >= 0])
            answer = model.recommend(
                vector=query_D, exclude=seen_ids.to_pylist(), history=history.to_pylist(), **options
            )
            lists.append([row_of[id_] for id_ in answer[model.label_id]])
        yield np.array(lists)

    return search


def decays(bundle: Bundle) -> Float32:
    """Return ½ to the age of every label, a film's in fives of years."""
    display, rng = bundle.labels.display, np.random.default_rng(0)
    ages_L = rng.uniform(0, 5, len(display)).astype(np.float32)
    if "title" in display.column_names:
        endings = [title.strip()[-5:-1] for title in display["title"].to_pylist()]
        years_L = np.array([int(ending) if ending.isdecimal() else 1990 for ending in endings], np.float32)
        ages_L = (years_L.max() - years_L) / 5
    return np.exp2(-ages_L)


def boosted(taste_BL: Float32, goal: Goal) -> Float32:
    """Score labels that have a taste by the boost alone."""
    return np.where(taste_BL > -np.inf, goal.boost, np.float32(-np.inf))


def fetch(scores_BL: Float32, depth: int) -> Int64:
    """Find the `depth` best labels of every query, in the order of the catalogue."""
    depth = min(depth, scores_BL.shape[1])
    return np.sort(np.argpartition(-scores_BL, depth - 1, axis=1)[:, :depth], axis=1)


def pick(values: Float32, rows_BN: Int64) -> Float32:
    """Take values [L] or [B, L] of rows."""
    return values[rows_BN] if values.ndim == 1 else np.take_along_axis(values, rows_BN, axis=1)


def best(scores_BN: Float32, rows_BN: Int64 | None = None) -> Int64:
    """Find the k best labels of every query, of all or of some rows; −1 after the last."""
    columns_BK = best_columns(scores_BN, K)[1]
    return (
        columns_BK if rows_BN is None else np.where(columns_BK < 0, -1, np.take_along_axis(rows_BN, columns_BK, axis=1))
    )


def depth_for(taste_BL: Float32, exact_BK: Int64, share: float) -> int:
    """Find the depth by taste at which this share of exact lists is fetched."""
    tastes_BK = np.take_along_axis(taste_BL, exact_BK, axis=1)
    ranks = [(taste_BL >= tastes_BK[:, [k]]).sum(axis=1) for k in range(K)]
    return int(np.quantile(ranks, share, method="higher"))


def draw(panels: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw the recall of some patterns by goal, a panel a set."""
    with style():
        figure = Figure(figsize=(3.5 * len(panels), 3.6), layout="constrained")
        plots = np.ravel(figure.subplots(1, len(panels), sharey=True))
        for axes, (title, recalls) in zip(plots, panels.items(), strict=True):
            for pattern, colour in DRAWN.items():
                width = 3 if pattern == "Longtail" else 1.8
                axes.plot(range(4), recalls[pattern][:4], marker="o", color=colour, linewidth=width, label=pattern)
                axes.plot([4, 5], recalls[pattern][4:], marker="o", linestyle="", color=colour)
            axes.set(title=title, xlim=(-0.4, 5.4), ylim=(0, 1.04))
            axes.set_xticks(range(6), ["λ = −½", "½", "1", "1½", "decay", "ω = ½"])
        plots[0].set_ylabel("found of the exact best 20")
        figure.legend(*plots[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
        figure.savefig(path, dpi=120)


if __name__ == "__main__":
    typer.run(main)
