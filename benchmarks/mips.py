"""Head-biased MIPS: search by inner product where a query says how much the norms of the head count.

    python -m benchmarks.mips make data/mips-100k --labels 100000   # the files, and their sha256
    python -m benchmarks.mips run data/mips-100k                    # curves.csv: every library that is installed
    python -m benchmarks.mips run data/mips-100k --library my_index:MyIndex --only "FAISS Flat" --only MyIndex
    python -m benchmarks.mips plot data/mips-100k/curves.csv        # a picture; several files make rows

docs/benchmark.md has the files, the rules and the results. All libraries are in one process and search with one thread,
one query at a time. In every round each setting of each library has a turn; a rate is the median of its rounds, in
queries per CPU second. Libraries that are not installed are left out and named.

Legend: `L` labels, `Q` queries, `D` dimensions, `E` = D + 1 coordinates, `K` results, `S` values of λ.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

LAMBDAS, DEPTH = (0.0, 0.5, 1.0), 100
DIM, QUERIES, LABELS_PER_CENTRE, SPREAD, TEMPERATURE = 64, 1_000, 300, 0.6, 0.1
CHOICES = 10_000_000
"""Choices of the most frequent label; the r-th most frequent has this number divided by r, rounded down."""
FILES = ("base", "learn", "queries", "neighbors", "scores")
TIMED, ROUNDS, ENOUGH = 200, 7, 0.9995
"""Timed queries of a round, rounds, and the recall beyond which costlier settings are left out."""
PROBES = tuple(2**power for power in range(10))
LISTS, WIDTHS = [(probes,) for probes in PROBES], [(width,) for width in (128, 256, 512, 1024, 2048)]
"""Settings: lists that are visited, and candidates that are kept while a graph is walked."""
WIDE = 2.5
"""Scale at which the last coordinate spreads twice as far as another one, so that lists also split by it."""
CORES = os.cpu_count() or 1
Rows = NDArray[np.float32]
app = typer.Typer(help="Search by inner product with head-biased norms.", add_completion=False)


def generate(
    labels: int, *, dim: int = DIM, queries: int = QUERIES, spread: float = SPREAD, seed: int = 0
) -> tuple[Rows, NDArray[np.int64], Rows, Rows]:
    """Generate labels, their counts, and queries for tuning and for the test, the same everywhere."""
    bits = np.random.PCG64(seed)

    def gaussian(count: int) -> NDArray[np.float64]:
        """Sum the four 16-bit quarters of a word, whose variance is (2^32 − 1) / 3."""
        quarters = bits.random_raw(count * dim).view(np.uint16).reshape(count, dim, 4)
        return (quarters.sum(axis=2, dtype=np.int64) - 131070) / np.sqrt((2**32 - 1) / 3)

    def unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
        return vectors / np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))

    def draw(count: int) -> Rows:
        parts = []
        for size in [1 << 16] * (count >> 16) + [count % (1 << 16)]:
            nearest = centres[bits.random_raw(size) % np.uint64(len(centres))]
            parts.append(unit(nearest + gaussian(size) * (spread / np.sqrt(dim))).astype(np.float32))
        return np.concatenate(parts)

    centres = unit(gaussian(max(1, labels // LABELS_PER_CENTRE)))
    labels_LD, order_L = draw(labels), np.argsort(bits.random_raw(labels), kind="stable")
    return labels_LD, CHOICES // (1 + np.argsort(order_L)), draw(queries), draw(queries)


@app.command()
def make(
    folder: Path,
    labels: Annotated[int, typer.Option(help="Generated labels.")] = 100_000,
    bundle: Annotated[Path | None, typer.Option(help="A trained model, in place of generated labels.")] = None,
) -> None:
    """Write the files of a size or model with exact answers; print their sha256."""
    if bundle:
        model = import_module("longtail.bundle").Bundle.load(bundle)
        labels_LD, prior_L = model.embeddings, model.labels.log_pn * model.manifest.temperature
        learn_QD, queries_QD = model.calibration_queries[::2], model.calibration_queries[1::2]
    else:
        labels_LD, counts_L, learn_QD, queries_QD = generate(labels)
        prior_L = TEMPERATURE * np.log(counts_L)
    base_LE = np.column_stack([labels_LD, prior_L - prior_L.min()]).astype(np.float32)
    shape = len(LAMBDAS), len(queries_QD), min(DEPTH, len(base_LE))
    neighbors_SQK, scores_SQK, rows_EL = np.empty(shape, np.int32), np.empty(shape, np.float32), base_LE.T.astype(float)
    for start in range(0, len(queries_QD), 50):
        products_QL = queries_QD[start : start + 50].astype(np.float64) @ rows_EL[:-1]
        for i, bias_removal in enumerate(LAMBDAS):
            for query, scores_L in enumerate(products_QL + bias_removal * rows_EL[-1], start):
                best_K = np.argpartition(scores_L, -shape[2])[-shape[2] :]
                neighbors_SQK[i, query] = best_K = best_K[np.lexsort((best_K, -scores_L[best_K]))]
                scores_SQK[i, query] = scores_L[best_K]
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(FILES, (base_LE, learn_QD, queries_QD, neighbors_SQK, scores_SQK), strict=True):
        np.save(folder / f"{name}.npy", array)
        print(hashlib.sha256((folder / f"{name}.npy").read_bytes()).hexdigest(), f"{name}.npy")


class Library(ABC):
    """A library's index, in the form of ann-benchmarks: subclasses define `fit` and `query`.

    Attributes:
        settings: arguments of `set_query_arguments`, cheapest first.
        scale: factor of the last coordinate of the rows and divisor of the queries'; no answer depends on it.
        equal_norms: append √(M² − |x|²) to the rows and 0 to the queries, so that distances order as products do.
    """

    settings: Sequence[tuple[Any, ...]] = ((),)
    scale, equal_norms = 1.0, False

    @abstractmethod
    def fit(self, rows: Rows, learn: Rows) -> None:
        """Build the index of rows; `learn` has queries without λ that may tune it, and no later query."""

    def set_query_arguments(self, *arguments: Any) -> None:
        """Set what the next queries use; they find it in `self.arguments` unless this method is overridden."""
        self.arguments = arguments

    @abstractmethod
    def query(self, vector: Rows, k: int) -> Sequence[int]:
        """Return the row numbers of the k largest inner products with one query."""


class Dataset:
    """The files of a folder."""

    def __init__(self, folder: Path) -> None:
        arrays = [np.load(folder / f"{name}.npy") for name in FILES]
        self.base_LE, self.learn_QD, self.queries_QD, _, self.scores_SQK = arrays

    def fit(self, library: Library) -> None:
        """Build a library's index over its form of the rows."""
        rows_LE = self.base_LE.copy()
        rows_LE[:, -1] *= library.scale
        if library.equal_norms:
            squares_L = np.square(rows_LE.astype(np.float64)).sum(axis=1)
            rows_LE = np.column_stack([rows_LE, np.sqrt(squares_L.max() - squares_L)]).astype(np.float32)
        library.fit(np.ascontiguousarray(rows_LE), self.learn_QD)

    def queries(self, library: Library, bias_removal: float) -> Rows:
        """Return a library's form of the queries."""
        added = np.tile([bias_removal / library.scale] + [0.0] * library.equal_norms, (len(self.queries_QD), 1))
        return np.ascontiguousarray(np.column_stack([self.queries_QD, added]), np.float32)

    def recall(self, rows_QK: NDArray[np.int64], i: int) -> float:
        """Compute recall at the i-th λ: answers that score like the K-th best or higher."""
        rows_QK = np.sort(rows_QK, axis=1)
        rows_QK[:, 1:][rows_QK[:, 1:] == rows_QK[:, :-1]] = -1
        best_QK = self.scores_SQK[i, : len(rows_QK), : rows_QK.shape[1]].astype(np.float64)
        least_Q = best_QK[:, -1] - 1e-5 * np.abs(best_QK).max(axis=1)
        rows_QKE = self.base_LE[rows_QK].astype(np.float64)
        scores_QK = np.einsum("qkd,qd->qk", rows_QKE[..., :-1], self.queries_QD[: len(rows_QK)].astype(np.float64))
        scores_QK += LAMBDAS[i] * rows_QKE[..., -1]
        return float(((rows_QK >= 0) & (scores_QK >= least_Q[:, None])).mean())


@dataclass
class Point:
    """Hold a library's setting at the i-th λ, its recall and its rounds' rates."""

    name: str
    library: Library
    seconds: float
    i: int
    arguments: tuple[Any, ...]
    recall: float
    rates: list[float] = field(default_factory=list)


@app.command()
def run(
    folder: Path,
    library: Annotated[str | None, typer.Option(help="module:Class of a library of yours.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Name of a library; repeat for several.")] = None,
    k: Annotated[int, typer.Option(max=DEPTH, help="Results.")] = DEPTH,
    scale: Annotated[float, typer.Option(help="Scale of the libraries that have one.")] = WIDE,
    limit: Annotated[float, typer.Option(help="Seconds for the settings of a library at one λ.")] = 60,
) -> None:
    """Measure libraries in turns, write curves.csv into the folder, and print a table."""
    if library:
        module, name = library.split(":")
        LIBRARIES[name] = getattr(import_module(module), name)
    dataset, points = Dataset(folder), list[Point]()
    for name in only or LIBRARIES:
        started = time.perf_counter()
        try:
            built = LIBRARIES[name]()
            built.scale = scale if built.scale == WIDE else built.scale
            dataset.fit(built)
        except ImportError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        seconds = time.perf_counter() - started
        print(f"{name}: built in {seconds:.1f} s", flush=True)
        with threadpool_limits(1):
            points += _measure(dataset, name, built, seconds, k, limit)
    for number in range(ROUNDS):
        print(f"round {number + 1} of {ROUNDS}, load {os.getloadavg()[0]:.1f}", flush=True)
        for point in points:
            queries_QE = dataset.queries(point.library, LAMBDAS[point.i])[:TIMED]
            point.library.set_query_arguments(*point.arguments)
            with threadpool_limits(1):
                point.rates.append(_ask(point.library, queries_QE, k, 1.0)[1])
    with (folder / "curves.csv").open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["data", "k", "library", "build", "lambda", "setting", "recall", "rate", "least", "most"])
        for point in points:
            arguments = " ".join(map(str, point.arguments))
            about = folder.name, k, point.name, f"{point.seconds:.1f}", LAMBDAS[point.i], arguments
            rates = np.median(point.rates), min(point.rates), max(point.rates)
            lines.writerow([*about, f"{point.recall:.4f}", *(round(rate) for rate in rates)])
    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    print(f"\n{folder.name}, recall@{k}, queries per CPU second, one thread of {model[1] if model else 'a CPU'}\n")
    print("\n".join(table(folder / "curves.csv")))


def _measure(dataset: Dataset, name: str, library: Library, seconds: float, k: int, limit: float) -> Iterator[Point]:
    for i, bias_removal in enumerate(LAMBDAS):
        queries_QE, started = dataset.queries(library, bias_removal), time.perf_counter()
        for arguments in library.settings:
            library.set_query_arguments(*arguments)
            recall = dataset.recall(_ask(library, queries_QE, k, limit)[0], i)
            served = "" if arguments or len(library.settings) == 1 else ", as served"
            yield Point(name + served, library, seconds, i, arguments, recall)
            if arguments and (recall > ENOUGH or time.perf_counter() - started > limit):
                break


def _ask(library: Library, queries_QE: Rows, k: int, limit: float) -> tuple[NDArray[np.int64], float]:
    """Ask one query after another, up to a limit in seconds; return the answers, −1 where missing, and the rate."""
    answers, started = [], time.process_time()
    for vector_E in queries_QE:
        answers.append(library.query(vector_E, k))
        if (seconds := time.process_time() - started) > limit:
            break
    rows_QK = np.full((len(answers), k), -1)
    for row_K, answer in zip(rows_QK, answers, strict=True):
        row_K[: len(answer)] = answer
    return rows_QK, len(answers) / seconds


def table(curves: Path, floor: float = 0.99) -> Iterator[str]:
    """Yield lines: of each library and λ the fastest setting above the floor, else in brackets that of most recall."""
    points = list(csv.DictReader(curves.read_text().splitlines()))
    yield "| library | build s |" + "".join(f" λ = {value:g} |" for value in LAMBDAS)
    yield "|---|---:|" + "---:|" * len(LAMBDAS)
    for name, seconds in dict.fromkeys((point["library"], point["build"]) for point in points):
        line = f"| {name} | {seconds} |"
        for bias_removal in LAMBDAS:
            settings = [point for point in points if (point["library"], point["lambda"]) == (name, str(bias_removal))]
            best = max(settings, key=lambda point: (min(float(point["recall"]), floor), int(point["rate"])))
            rate, least, most = (f"{int(best[column]):,}" for column in ("rate", "least", "most"))
            words = f"{rate} ({least}–{most}) {best['setting']}".rstrip()
            line += f" {words} |" if float(best["recall"]) >= floor else f" [{float(best['recall']):.4f}: {words}] |"
        yield line


@app.command()
def plot(curves: list[Path], out: Path = Path("curves.png")) -> None:
    """Draw rates over recall, a row per file and a column per λ: of each library the settings that none of it beats."""
    import matplotlib.pyplot as plt

    files = [list(csv.DictReader(path.read_text().splitlines())) for path in curves]
    names = dict.fromkeys(point["library"] for points in files for point in points)
    others = [name for name in names if not name.startswith("Longtail")]
    figure, axes = plt.subplots(len(files), len(LAMBDAS), figsize=(13, 4.5 * len(files)), sharey="row", squeeze=False)
    for (i, j), axis in np.ndenumerate(axes):
        for name in dict.fromkeys(point["library"] for point in files[i]):
            settings = [point for point in files[i] if (point["library"], point["lambda"]) == (name, str(LAMBDAS[j]))]
            pairs = sorted(((float(point["recall"]), int(point["rate"])) for point in settings), reverse=True)
            best = [pair for n, pair in enumerate(pairs) if all(pair[1] > rate for _, rate in pairs[:n])]
            # The axis has as much room between .9 and .99 as between .99 and .999.
            nines = [-np.log10(max(1 - recall, 3e-4)) for recall, _ in best]
            rates, ours = [rate for _, rate in best], name not in others
            colour, size = "black" if ours else f"C{others.index(name)}", 9 if name.endswith("as served") else 4
            axis.plot(nines, rates, "o-", label=name, color=colour, markersize=size, linewidth=1 + 2 * ours)
        axis.set(xlim=(0, 3.6), yscale="log", title=f"{files[i][0]['data']}, λ = {LAMBDAS[j]:g}", xlabel="recall")
        axis.set_xticks([-np.log10(1 - tick) for tick in (0.5, 0.9, 0.99, 0.999)], [".5", ".9", ".99", ".999"])
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("queries per CPU second")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncol=6, frameon=False)
    figure.tight_layout(rect=(0, 0.12 / len(files), 1, 1))
    figure.savefig(out, dpi=110)
    print(out)


class Faiss(Library):
    """FAISS: a string of its factory, `{lists}` about four for each square root of the labels."""

    scale, equal_norms = WIDE, True

    def __init__(self, factory: str, parameters: str = "", settings: Sequence[Any] = ((),)) -> None:
        self.faiss, self.factory, self.parameters = import_module("faiss"), factory, parameters.split()
        self.settings = settings

    def fit(self, rows: Rows, learn: Rows) -> None:
        text = self.factory.format(lists=round(4 * np.sqrt(len(rows))), pairs=rows.shape[1] // 2)
        self.index = self.faiss.index_factory(rows.shape[1], text, self.faiss.METRIC_INNER_PRODUCT)
        if lists := self.faiss.try_extract_index_ivf(self.index):
            lists.cp.max_points_per_centroid = 64
        self.index.train(rows)
        self.index.add(rows)

    def set_query_arguments(self, *arguments: int) -> None:
        for name, value in zip(self.parameters, arguments, strict=True):
            self.faiss.ParameterSpace().set_index_parameter(self.index, name, value)

    def query(self, vector: Rows, k: int) -> Sequence[int]:
        return self.index.search(vector[None], k)[1][0]


class Longtail(Library):
    """The index of `longtail-index build`: what a release serves, and a curve of lists, without and with the head's."""

    settings = ((), *((probes, head) for probes in PROBES for head in (False, True)))

    def fit(self, rows: Rows, learn: Rows) -> None:
        recall, index = import_module("benchmarks.index_recall"), import_module("longtail.index.building.tuning")
        counts_L = np.exp(rows[:, -1] / TEMPERATURE).astype(np.int64)
        bundle = recall.make_plain_bundle(rows[:, :-1], counts_L, learn, log_pn_L=rows[:, -1], temperature=1.0)
        tuned = index.tune_index(bundle, index.IndexSpec("auto", recall_floor=0), lambda _: None)
        self.scale, self.release = bundle.augmentation.kappa, tuned.searcher(bundle)

    def set_query_arguments(self, *arguments: int) -> None:
        fixed = {"nprobe": arguments[0], "head": arguments[1]} if arguments else {}
        params = self.release.params.model_copy(update=fixed)
        self.searcher = self.release.with_params(params) if arguments else self.release

    def query(self, vector: Rows, k: int) -> Sequence[int]:
        return self.searcher.search(vector[None], k)[1][0]


class Hnswlib(Library):
    """hnswlib: 32 edges, 200 candidates while building."""

    settings, scale, equal_norms = WIDTHS, WIDE, True

    def fit(self, rows: Rows, learn: Rows) -> None:
        self.index = import_module("hnswlib").Index(space="ip", dim=rows.shape[1])
        self.index.init_index(max_elements=len(rows), ef_construction=200, M=32)
        self.index.add_items(rows, num_threads=CORES)
        self.index.set_num_threads(1)

    def set_query_arguments(self, *arguments: int) -> None:
        self.index.set_ef(*arguments)

    def query(self, vector: Rows, k: int) -> Sequence[int]:
        return self.index.knn_query(vector, k)[0][0]


class USearch(Library):
    """USearch: 32 edges, 200 candidates while building, float32."""

    settings, scale, equal_norms = WIDTHS, WIDE, True

    def fit(self, rows: Rows, learn: Rows) -> None:
        options = {"metric": "ip", "dtype": "f32", "connectivity": 32, "expansion_add": 200}
        self.index = import_module("usearch.index").Index(ndim=rows.shape[1], **options)
        self.index.add(np.arange(len(rows)), rows, threads=CORES)

    def set_query_arguments(self, *arguments: int) -> None:
        (self.index.expansion_search,) = arguments

    def query(self, vector: Rows, k: int) -> Sequence[int]:
        return self.index.search(vector, k, threads=1).keys


class Scann(Library):
    """ScaNN: anisotropic codes of two coordinates each, about two leaves for a square root, candidates scored again."""

    settings, scale = [(leaves, depth) for leaves in PROBES for depth in (3, 10)], WIDE

    def fit(self, rows: Rows, learn: Rows) -> None:
        leaves, sample = round(2 * np.sqrt(len(rows))), min(len(rows), 250_000)
        builder = import_module("scann").scann_ops_pybind.builder(rows, DEPTH, "dot_product")
        tree = builder.tree(num_leaves=leaves, num_leaves_to_search=leaves, training_sample_size=sample)
        self.index = tree.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(DEPTH).build()

    def query(self, vector: Rows, k: int) -> Sequence[int]:
        leaves, depth = self.arguments
        return self.index.search(vector, k, depth * k, leaves)[0]


class RabitqLib(Library):
    """RaBitQ Library: lists of codes of one bit a coordinate, whose bound decides which floats are read."""

    settings, scale = LISTS, WIDE

    def fit(self, rows: Rows, learn: Rows) -> None:
        module, (labels, dim) = import_module("rabitqlib"), rows.shape
        clustering = module.RaBitQKMeans(dim, lists := round(4 * np.sqrt(labels)), num_threads=CORES)
        clustering.train(rows)
        self.index = module.IvfIndex(dim, labels, lists, nbits=32, metric="ip")
        self.index.build(rows, clustering.centroids, clustering.assignments, num_threads=CORES)

    def query(self, vector: Rows, k: int) -> Sequence[int]:
        return self.index.search(vector[None], k, *self.arguments)[0].view(np.int32)[0]


class SvsVamana(Library):
    """SVS: Vamana of degree 64, float32."""

    settings, scale, equal_norms = WIDTHS, WIDE, True

    def fit(self, rows: Rows, learn: Rows) -> None:
        svs = import_module("svs")
        parameters = svs.VamanaBuildParameters(graph_max_degree=64, window_size=128, alpha=0.95)
        self.index = svs.Vamana.build(parameters, rows, svs.DistanceType.MIP, num_threads=CORES)
        self.index.num_threads = 1

    def set_query_arguments(self, *arguments: int) -> None:
        (self.index.search_window_size,) = arguments

    def query(self, vector: Rows, k: int) -> Sequence[int]:
        return self.index.search(vector[None], k)[0][0]


LIBRARIES: dict[str, Callable[[], Library]] = {
    "FAISS Flat": lambda: Faiss("Flat"),
    "Longtail": Longtail,
    "FAISS IVF,Flat": lambda: Faiss("IVF{lists},Flat", "nprobe", LISTS),
    "FAISS IVF,PQ4fs,RFlat": lambda: Faiss(
        "IVF{lists},PQ{pairs}x4fs,RFlat", "nprobe k_factor_rf", [(probes, k) for probes in PROBES for k in (4, 16)]
    ),
    "FAISS HNSW32": lambda: Faiss("HNSW32,Flat", "efSearch", WIDTHS),
    "hnswlib": Hnswlib,
    "USearch": USearch,
    "ScaNN": Scann,
    "rabitqlib": RabitqLib,
    "SVS Vamana": SvsVamana,
}


if __name__ == "__main__":
    app()
