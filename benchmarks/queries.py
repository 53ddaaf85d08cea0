"""Users for an item: recall@100 of held-out users, by p(y|x), by the raw score, and by the activity of users.

    longtail-train data movielens-1m --out data/movielens-1m
    longtail-train data amazon-beauty --out data/amazon-beauty
    python -m benchmarks.queries data/movielens-1m data/amazon-beauty --speed

For each folder the recipe is fitted for some epochs, without refit, and without the pairs of `--new` labels that have a
genre; a release with an index of queries is built from users and their training histories. For each of 500 random
labels with test pairs, and the new ones, all users but those with the label in training are ranked. Recall is the share
of test users among the first 100, a mean over labels. `n` is the number of training pairs of a user.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from longtail.bundle import BUCKET_NAMES, TrainingFacts, bundle_from_vectors
from longtail.index import IndexSpec, QueryTable, Release, Releases, build
from longtail.index.building.queries import query_bundle
from longtail.index.building.tuning import tune_index
from longtail.serving.core.known_queries import queries_for
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import QueriesFor
from longtail.trainer import fit, load_recipe

_PAIRS = pa.schema({"user_id": pa.string(), "item_id": pa.string()})
_K, _LABELS, _HISTORY = 100, 500, 50
_GENRES = 'label={combine="sum", features=[{name="item_id",kind="id"},{name="genres",kind="bag",separator="|"}]}'


def main(
    folders: Annotated[list[Path] | None, typer.Argument(help="Folders of data sets with their recipes.")] = None,
    out: Path = Path("runs/queries"),
    epochs: Annotated[int, typer.Option(help="Epochs of each fit.")] = 6,
    new: Annotated[int, typer.Option(help="Labels left out of training, if labels have genres.")] = 150,
    spec: Annotated[str, typer.Option(help="Kind of the index of a million queries.")] = "auto",
    speed: Annotated[bool, typer.Option(help="Time a million synthetic queries.")] = False,
) -> None:
    """Print recall@100 of held-out users for each folder."""
    for folder in folders or []:
        train, test, unseen = _pairs(folder, new)
        target = out / folder.name
        if not (target / "bundle").exists():
            _fit(folder, target, train, epochs, genres=len(unseen) > 0)
        _measure(target, train, test, unseen)
    if speed:
        _time(spec)


def _pairs(folder: Path, new: int) -> tuple[pa.Table, pa.Table, list[str]]:
    """Read training and test pairs as text, in order, and the ids of labels left out of training."""
    if (folder / "train.parquet").exists():
        tables = [pq.read_table(folder / f"{name}.parquet") for name in ("train", "test")]
    else:
        table = pq.read_table(folder / "interactions.parquet")
        table = table.sort_by([(name, "ascending") for name in ("user_id", table.column_names[-1])])
        users = table["user_id"].to_numpy(zero_copy_only=False)
        last = np.append(users[1:] != users[:-1], True)
        tables = [table.filter(pa.array(~last)), table.filter(pa.array(last))]
    labels, counts = np.unique(np.concatenate([table["item_id"].to_numpy() for table in tables]), return_counts=True)
    train, test = (table.select(["user_id", "item_id"]).cast(_PAIRS) for table in tables)
    if not new or not (folder / "items.parquet").exists():
        return train, test, []
    unseen = [str(label) for label in np.random.default_rng(0).choice(labels[counts >= 20], new, replace=False)]
    seen = pc.invert(pc.is_in(train["item_id"], pa.array(unseen)))
    both = pa.concat_tables([test, train.filter(pc.invert(seen))])
    return train.filter(seen), both, unseen


def _fit(folder: Path, target: Path, train: pa.Table, epochs: int, *, genres: bool) -> None:
    overrides = [f"training.epochs={epochs}", "training.refit=false", "evaluation.baselines=[]"]
    if genres:
        target.mkdir(parents=True)
        columns = pq.read_schema(folder / "train.parquet")
        cast = [train[name].cast(columns.field(name).type) for name in train.column_names]
        pq.write_table(pa.table(cast, names=train.column_names), target / "train.parquet")
        overrides += [f'data.train="{(target / "train.parquet").resolve()}"', _GENRES]
    fit(load_recipe(folder / "recipe.toml", overrides), target / "bundle")


def _measure(target: Path, train: pa.Table, test: pa.Table, unseen: list[str]) -> None:
    users = train["user_id"].unique()
    by_user = train.group_by("user_id", use_threads=False).aggregate([("item_id", "list")])
    histories = dict(zip(by_user["user_id"].to_pylist(), by_user["item_id_list"].to_pylist(), strict=True))
    table = pa.table({
        "user_id": users, "history": [histories[user][-_HISTORY:] for user in users.to_pylist()],
        "n": [len(histories[user]) for user in users.to_pylist()],
    })  # fmt: skip
    pq.write_table(table, target / "users.parquet")
    name = f"queries-{perf_counter():.0f}"
    started = perf_counter()
    source = QueryTable(target / "users.parquet", "user_id", "n")
    build(target / "bundle", target / "releases", name=name, queries=source,
          progress=lambda line: print(f"  {line}") if line.startswith("queries:") else None)  # fmt: skip
    print(f"{target.name}: {len(users):,} users, built in {perf_counter() - started:.0f} s")
    release = Releases(target / "releases").open(name)
    scorer = _Scorer(release, users, histories)
    rows_of = release.bundle.labels.row_of
    held_out = test.group_by("item_id").aggregate([("user_id", "list")])
    truths = dict(zip(held_out["item_id"].to_pylist(), held_out["user_id_list"].to_pylist(), strict=True))
    known_labels = sorted(label for label in truths if label in rows_of and label not in unseen)
    drawn = np.random.default_rng(1).permutation(len(known_labels))[:_LABELS]
    sets = {"500 labels": [known_labels[position] for position in drawn], "new labels": unseen}
    buckets = release.bundle.labels.buckets
    for bucket in range(3):
        labels = [label for label in sets["500 labels"] if buckets[rows_of[label]] == bucket]
        sets[f"of them {BUCKET_NAMES[bucket]}"] = labels
    print(f"\n| {target.name}, recall@{_K} | labels | {' | '.join(scorer.methods)} |")
    print("|---" * (len(scorer.methods) + 2) + "|")
    retriever = load_release(Releases(target / "releases"), name)
    errors = list[str]()
    for title, labels in sets.items():
        recalls = [
            scorer.recalls(label, truths[label], _vector(release, retriever, label, label in unseen))
            for label in labels
        ]
        gains = [recall[scorer.methods.index("log p, λ = 1")] - recall[1] for recall in recalls]
        if recalls:
            errors.append(f"{title}: {np.mean(gains):+.4f} ± {2 * np.std(gains) / len(gains) ** 0.5:.4f}")
            print(f"| {title} | {len(labels)} | {' | '.join(f'{value:.4f}' for value in np.mean(recalls, axis=0))} |")
    print(f"log p at λ = 1 less the raw score, ± two standard errors: {'; '.join(errors)}")
    label = sets["500 labels"][0]
    excluded = [user for user in users.to_pylist() if label in histories[user]]
    (answer,) = queries_for(retriever, [QueriesFor.model_construct(
        **{**QueriesFor(id=label, k=_K, bias_removal=1.0, exclude_history=False).__dict__, "exclude": excluded}
    )])  # fmt: skip
    best = scorer.best(scorer.scores(release.bundle.embeddings[rows_of[label]])["log p, λ = 1"], label)
    print(
        f"queries_for agrees: {[query['id'] for query in answer['queries']] == users.take(pa.array(best)).to_pylist()}"
    )


def _vector(release: Release, retriever: object, label: str, new: bool) -> np.ndarray:
    """Return the vector of a label: of a new one from its genres alone."""
    if not new:
        return np.asarray(release.bundle.embeddings[release.bundle.labels.row_of[label]])
    genres = release.bundle.labels.display["genres"][release.bundle.labels.row_of[label]].as_py()
    return retriever.overlay.embed({"genres": genres})[0, : release.bundle.manifest.dim]  # type: ignore[attr-defined]


class _Scorer:
    """Scores all users for a label by several methods."""

    def __init__(self, release: Release, users: pa.Array, histories: dict[str, list[str]]) -> None:
        assert release.queries is not None
        self._bundle, self._temperature = release.queries.bundle, np.float32(release.bundle.manifest.temperature)
        assert self._bundle.priors is not None
        self._row = {user: row for row, user in enumerate(users.to_pylist())}
        self._activity = np.log([float(len(histories[user])) for user in users.to_pylist()])
        self._having: dict[str, list[int]] = {}
        for user, labels in histories.items():
            for label in labels:
                self._having.setdefault(label, []).append(self._row[user])
        self.methods = [*self.scores(np.zeros(release.bundle.manifest.dim, np.float32))]

    def scores(self, vector_D: np.ndarray) -> dict[str, np.ndarray]:
        """Score every user by every method, [Q] each."""
        priors = self._bundle.priors
        assert priors is not None
        taste = self._bundle.embeddings @ vector_D / self._temperature
        scores = {"activity": self._activity, "raw score": taste}
        for column, name in enumerate(priors.names):
            scores[f"log p, λ = {float(name):g}"] = taste + priors.values_LP[:, column]
        for column, name in enumerate(priors.names):
            scores[f"log n·p, λ = {float(name):g}"] = taste + priors.values_LP[:, column] + self._activity
        return scores

    def best(self, scores_Q: np.ndarray, label: str) -> np.ndarray:
        scores_Q = scores_Q.copy()
        scores_Q[self._having.get(label, [])] = -np.inf
        return np.argsort(-scores_Q, kind="stable")[:_K]

    def recalls(self, label: str, users: list[str], vector_D: np.ndarray) -> list[float]:
        truth = [self._row[user] for user in users if user in self._row]
        return [
            len(np.intersect1d(self.best(scores, label), truth)) / max(1, len(truth))
            for scores in self.scores(vector_D).values()
        ]


def _time(spec: str) -> None:
    """Build an index of a million synthetic queries of 64 dimensions, and time requests for one label."""
    queries, labels, dim = 1_000_000, 1_000, 64
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((500, dim), dtype=np.float32)

    def vectors(count: int) -> np.ndarray:
        found = centres[rng.integers(0, 500, count)] + 0.7 * rng.standard_normal((count, dim), dtype=np.float32)
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    ids = pa.array([f"l{row}" for row in range(labels)])
    label_vectors = vectors(labels)
    facts = TrainingFacts(ids, rng.zipf(1.5, labels).clip(0, 10**6), temperature=0.1)
    bundle = bundle_from_vectors(label_vectors, facts, name="million")
    vectors_QD = vectors(queries)
    query_ids = pa.array([f"u{row}" for row in range(queries)])
    started = perf_counter()
    columns = pa.table({"age": rng.integers(0, 99, queries)})
    index = query_bundle(bundle, query_ids, vectors_QD, rng.integers(1, 99, queries), columns, print)
    print(f"log Z: {perf_counter() - started:.0f} s")
    tuned = tune_index(index, IndexSpec(spec), "cpu", lambda _: None)
    print(
        f"{tuned.kind}, {perf_counter() - started:.0f} s in all, {tuned.bytes_per_label:.0f} bytes a query; recall@100"
    )
    print(f"{tuned.chosen.lowest.recall:.3f} or more")
    searcher = tuned.searcher(index)
    wall, cpu = [], []
    for vector in bundle.embeddings[:200]:
        query = index.augmentation.queries(vector[None], 0.0, 0.0, [1.0] + [0.0] * (len(index.priors.names) - 1))
        started = perf_counter(), process_time()
        searcher.search(query, _K)
        wall.append(1e3 * (perf_counter() - started[0]))
        cpu.append(1e3 * (process_time() - started[1]))
    print(f"1,000,000 queries × 1 label, k = {_K}: median {np.median(wall):.1f} ms, {np.median(cpu):.1f} ms of CPU; "
          f"95 % within {np.percentile(wall, 95):.1f} ms")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
