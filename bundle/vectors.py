"""Create a bundle from the label vectors of any two-tower model.

Legend: `L` labels, `C` calibration queries, `D` dimensions, `P` pairs, `Q` queries of pairs, `H` entries of a history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Array, Bools, Float32, Float64, Int64
from longtail.bundle.bundle import Bundle
from longtail.bundle.cooccurrence import Cooccurrence
from longtail.bundle.errors import BundleInvariantError, TowerError, require
from longtail.bundle.frequency import Buckets, log_frequencies
from longtail.bundle.histories import LogPairs, Remembered, remember
from longtail.bundle.ids import is_text, repeated_ids
from longtail.bundle.labels import Labels
from longtail.bundle.manifest import BiasRemoval, CooccurrenceSettings, Feature, LogColumns, Loss
from longtail.bundle.neighbours import cooccurrences
from longtail.bundle.one_line import one_line
from longtail.bundle.tower import OnnxTower, onnx_session
from longtail.bundle.vocabulary import Vocabulary

Similarity = Literal["dot", "cosine", "l2"]
SIMILARITIES: tuple[Similarity, ...] = get_args(Similarity)
_QUERIES, _EXAMPLES = 1000, 5
"""Number of label vectors that replace missing queries."""
_MOST = 2**53
"""Bound below which floats represent all integers."""
_FAR = 100.0
"""Squared distance of the labels' mean from 0, in variances of their vectors, from which they are centred."""
_TOWERS = "towers"
_LAST, _DECAY = 20, 0.9
_POWER = 0.5
_WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""ω among which held-out pairs choose."""
_DEVIATION = 0.5
"""Standard deviation of ω · c over labels at ω = 1, in nats."""
_K = 20


class ChosenTogether(NamedTuple):
    """Pairs of queries and labels, from which co-occurrence is made.

    Attributes:
        table: `query_id` and `label_id`, strings, and `time` in seconds since 1970; without `time`, in order of time.
        columns: names of the columns in later logs; `query_id` is the feature by which a request names its query.
        remembered: last labels of each query to keep; 0 keeps none, and requests give their history.
        query_ids: ids of the calibration queries, strings [C], by which ω is chosen; null for an unknown one.
    """

    table: pa.Table
    columns: LogColumns = LogColumns()
    remembered: int = 50
    query_ids: pa.Array | None = None

    def __repr__(self) -> str:
        return one_line(self)


@dataclass(frozen=True)
class TrainingFacts:
    """Facts of labels, and of the training of their vectors.

    Attributes:
        ids: strings [L], distinct.
        counts: int64 [L], training pairs of every label, which give π and the buckets.
        similarity: `dot`, `cosine` (vectors are scaled to length 1) or `l2`.
        temperature: T, the divisor of scores in training.
        noise: the noise ν of training, numbers above 0 [L]; None: ν is π [METHODS §9].
        display: columns to show in answers, L rows.
        pairs: who chose what, for the term of co-occurrence [METHODS §11].
    """

    ids: pa.Array
    counts: Int64
    similarity: Similarity = "dot"
    temperature: float = 1.0
    noise: Float64 | None = None
    display: pa.Table | None = None
    pairs: ChosenTogether | None = None

    __repr__ = one_line

    def check(self, vectors_LD: Float32) -> None:
        """Check the facts and the labels' vectors; raises BundleInvariantError."""
        ids, counts_L = self.ids, np.asarray(self.counts)
        columns = {"counts": counts_L, "noise": self.noise, "display": self.display, "vectors": vectors_LD}
        rows = {name: len(column) for name, column in columns.items() if column is not None}
        fits = vectors_LD.ndim == 2 and vectors_LD.size > 0 and set(rows.values()) == {len(ids)}
        require("every label has an id, a vector and a count", fits, f"{len(ids)} rows of each, 1 or more", rows)
        require("similarity is known", self.similarity in SIMILARITIES, SIMILARITIES, self.similarity)
        texts = is_text(ids.type) and not ids.null_count
        require("ids are strings", texts, "strings without nulls", f"{ids.type}, {ids.null_count} nulls")
        _require_ids(ids)
        is_count_L = (counts_L >= 0) & (counts_L <= _MOST) & (counts_L % 1 == 0)
        _require("counts", "a count is a whole number from 0 to 2⁵³", is_count_L, counts_L, ids)
        _require("labels", "a vector is finite", _finite(vectors_LD), vectors_LD, ids)


def bundle_from_vectors(
    vectors: Float32,
    facts: TrainingFacts,
    *,
    name: str,
    queries: Float32 | None = None,
    query_tower: bytes | OnnxTower | None = None,
    label_tower: bytes | OnnxTower | None = None,
) -> Bundle:
    """Create a bundle from label vectors that another library trained.

    Scores at λ = 0 are those of the vectors: u·v / T, the cosine / T, or −|u − v|² / T up to a constant per query.

    Args:
        vectors: float32 [L, D].
        queries: float32 [C, D], query vectors on which index builds measure recall; None: 1,000 label vectors drawn by
            popularity, which do not represent queries in other regions.
        query_tower: ONNX model of float inputs [B] or [B, n], with output float32 [B, D]; or an `OnnxTower`, which
            names its features and their ids. None: requests give vectors.
        label_tower: the same for labels that are added while serving.

    Raises:
        BundleInvariantError: numbers of rows differ, a vector has length 0 with cosine, or a tower has other inputs.

    Example:
        >>> import numpy as np, pyarrow as pa
        >>> facts = TrainingFacts(pa.array(["a", "b", "c"]), np.array([7, 2, 0]))
        >>> bundle = bundle_from_vectors(np.eye(3, dtype=np.float32), facts, name="three")
        >>> bundle.manifest.labels, bundle.labels.buckets.tolist()
        (3, [0, 2, 3])
    """
    vectors_LD, ids = np.ascontiguousarray(vectors, np.float32), facts.ids
    facts.check(vectors_LD)
    counts_L, temperature = np.asarray(facts.counts).astype(np.int64), facts.temperature
    if label_tower is not None and facts.similarity == "l2":
        raise BundleInvariantError(
            "a label tower's vectors are scored by dot product or cosine",
            expected="similarity dot or cosine",
            actual="l2",
        )
    queries_CD = _draw_queries(vectors_LD, counts_L) if queries is None else np.asarray(queries, np.float32)
    _require("queries", "a vector is finite", _finite(queries_CD), queries_CD)
    bias_L, centre_D = None, None
    if facts.similarity == "l2":
        centre_D = _far_centre(vectors_LD)
        if centre_D is not None:
            vectors_LD, queries_CD = vectors_LD - centre_D, queries_CD - centre_D
        # −|u − v|² / T is u·v / (T/2) − |v|² / T − |u|² / T, and the last term is the same for every label.
        bias_L = (-np.einsum("ij,ij->i", vectors_LD, vectors_LD) / temperature).astype(np.float32)
        temperature /= 2
    if unit := facts.similarity == "cosine":
        vectors_LD, queries_CD = _unit(vectors_LD, "labels", ids), _unit(queries_CD, "queries")
    dim = vectors_LD.shape[1]
    query, label = _identity_tower(dim, unit=unit) if query_tower is None else query_tower, label_tower
    if isinstance(query, bytes):
        query = read_tower(query, dim, "query_tower.onnx", unit=unit)
    if isinstance(label, bytes):
        label = read_tower(label, dim, "label_tower.onnx", unit=unit)
    term, remembered = None, None
    if facts.pairs is not None:
        named = facts.pairs.query_ids is None or (queries is not None and len(facts.pairs.query_ids) == len(queries_CD))
        require("every query has an id", named, f"{len(queries_CD)} ids, and queries", "others")

        def score_labels(row: int) -> Float32:
            scores_L: Float32 = vectors_LD @ queries_CD[row] / np.float32(temperature)
            return scores_L if bias_L is None else scores_L + bias_L

        term, remembered = _chosen_together(facts.pairs, ids, score_labels)
    log_pi_L, buckets = log_frequencies(counts_L).astype(np.float32), Buckets.by_quantile(counts_L)
    noise = "π" if facts.noise is None else "a given column"
    labels = Labels(
        ids, counts_L, log_pi_L if facts.noise is None else _log_shares(facts.noise, ids), buckets.assign(counts_L),
        bias_L, pa.table({}) if facts.display is None else facts.display, None if facts.noise is None else log_pi_L,
    )  # fmt: skip
    about = {
        "name": name, "similarity": "cosine" if unit else "dot", "temperature": temperature, "buckets": buckets,
        "centre": None if centre_D is None else centre_D.tolist(),
        "loss": Loss(family="unknown", sampler="unknown", weight="unknown"),
        "bias_removal": BiasRemoval(default=0.0, noise=noise, chosen_by="the vectors, as they were given"),
        "training_data": {"pairs": int(counts_L.sum())},
    }  # fmt: skip
    return Bundle.assemble(
        labels, vectors_LD, queries_CD, query, label, about, cooccurrence=term, remembered=remembered
    )


def _chosen_together(
    pairs: ChosenTogether, ids: pa.Array, score_labels: Callable[[int], Float32]
) -> tuple[Cooccurrence, Remembered | None]:
    """Make W of pairs, by a walk, and what is remembered of their queries.

    W is scaled so that c of a query has a standard deviation of ½ over labels. ω is 0, or what the last pairs of
    calibration queries choose.

    Args:
        score_labels: scores of the labels for a calibration query without the term, float32 [L].
    """
    rows = pc.index_in(pairs.table["label_id"].cast(ids.type).combine_chunks(), ids)
    is_known = pc.and_(rows.is_valid(), pairs.table["query_id"].combine_chunks().is_valid())
    require("pairs name labels", bool(pc.any(is_known).as_py()), "a label of the bundle in one pair or more", "others")
    table, rows_P = pairs.table.filter(is_known), np.asarray(rows.filter(is_known)).astype(np.int64)
    queries = table["query_id"].cast(pa.string()).combine_chunks().dictionary_encode()
    number_P, names_Q = np.asarray(queries.indices).astype(np.int64), queries.dictionary
    times_P = np.asarray(table["time"], np.float64) if "time" in table.column_names else None
    order_P = np.lexsort((np.arange(len(rows_P)) if times_P is None else times_P, number_P))
    log = LogPairs(number_P[order_P], rows_P[order_P])
    settings = CooccurrenceSettings(
        default=0.0,
        maximum=_WEIGHTS[-1],
        kind="walk",
        power=_POWER,
        last=_LAST,
        decay=1.0 if times_P is None else _DECAY,
        until=None if times_P is None else float(times_P.max()),
        log=pairs.columns,
    )
    (term,) = cooccurrences(log, len(ids), [settings])
    histories_Q = np.split(log.labels, np.searchsorted(log.queries, np.arange(1, len(names_Q))))
    drawn = np.random.default_rng(0).permutation(len(histories_Q))[:_QUERIES]
    deviation = term.deviation(histories_Q[query] for query in drawn)
    term = term.scaled(_DEVIATION / deviation if deviation > 0 else 1.0)
    if pairs.query_ids is not None:
        numbers = pc.index_in(pairs.query_ids.cast(pa.string()), names_Q).fill_null(-1)
        weight = _weight_of_last_pairs(
            log, histories_Q, np.asarray(numbers).astype(np.int64), term.settings, score_labels
        )
        term = term.scaled(1.0, default=weight)
    if not pairs.remembered:
        return term, None
    return term, remember(log, Vocabulary(names_Q), np.arange(1, len(names_Q) + 1, dtype=np.int32), pairs.remembered)


def _weight_of_last_pairs(
    log: LogPairs,
    histories_Q: Sequence[Int64],
    numbers_C: Int64,
    settings: CooccurrenceSettings,
    score_labels: Callable[[int], Float32],
) -> float:
    """Choose ω by recall@20 of calibration queries' last pairs, which W does not know; the least of equals.

    Args:
        numbers_C: query of the log, int64 [C]; −1 for a query without pairs.
    """
    rows = [row for row, query in enumerate(numbers_C) if query >= 0 and len(histories_Q[query]) > 1][:_QUERIES]
    last_P = np.append(log.queries[1:] != log.queries[:-1], True) & np.isin(log.queries, numbers_C[rows])
    others = LogPairs(log.queries[~last_P], log.labels[~last_P])
    labels = len(score_labels(0))
    term = cooccurrences(others, labels, [settings])[0].scaled(settings.scale)
    hits_W = np.zeros(len(_WEIGHTS), np.int64)
    for row in rows:
        history_H = histories_Q[numbers_C[row]]
        earlier_H, target = history_H[:-1], history_H[-1]
        scores_L = score_labels(row)
        scores_L[earlier_H[earlier_H != target]] = -np.inf
        rows_C, values_C = term.term(earlier_H)
        for w, weight in enumerate(_WEIGHTS):
            with_term_L = scores_L.copy()
            with_term_L[rows_C] += np.float32(weight) * values_C
            hits_W[w] += np.count_nonzero(with_term_L > with_term_L[target]) < _K
    return _WEIGHTS[int(hits_W.argmax())]


def read_tower(model: bytes, dim: int, file: str, *, unit: bool) -> OnnxTower:
    """Read the features of an ONNX model: an input [B] is a number, an input [B, n] a vector.

    Args:
        unit: whether the model's vectors must have length 1.

    Raises:
        BundleInvariantError: an input is of another type, such as text or ids, or the output is not [B, dim].
        TowerError: the model does not run for batches of any size, or `onnx` is not installed.
    """
    session = onnx_session(model, file)
    inputs = {node.name: node for node in session.get_inputs()}
    features, missing_inputs = list[Feature](), list[str]()
    for name, node in inputs.items():
        if name.removesuffix("__missing") in inputs and name.endswith("__missing"):
            continue
        width = node.shape[1] if len(node.shape) == 2 else None
        floats = node.type == "tensor(float)" and len(node.shape) in (1, 2) and isinstance(width, int | None)
        require(
            f"{file} reads numbers and vectors, by names of letters, digits and _",
            floats and name.isidentifier() and name.isascii() and not name.startswith("_"),
            "inputs float32 [B] or [B, n] of a known n",
            f"{name!r}, {node.type} {node.shape}; where a model looks up ids, use its library's export",
        )
        if width is None:
            features.append(Feature(name=name, kind="number"))
        else:
            features.append(Feature(name=name, kind="vector", dims=width, missing=None))
            missing_inputs += [f"{name}__missing"] if f"{name}__missing" not in inputs else []
    rng, outputs = np.random.default_rng(0), session.get_outputs()
    # Two sizes, because a model with a fixed batch runs at one size alone.
    for rows in (3, 2):
        drawn = {name: rng.standard_normal((rows, *node.shape[1:]), dtype=np.float32) for name, node in inputs.items()}
        try:
            vectors = session.run(None, drawn)[0]
        except Exception as error:  # ONNX Runtime's own exceptions share no base but Exception
            raise TowerError(
                f"{file}: expected a model of batches of any size, found one that fails: {error}"
            ) from error
        fits = len(outputs) == 1 and vectors.shape == (rows, dim)
        require(
            f"{file} computes one vector", fits, f"one output [B, {dim}]", f"{[output.shape for output in outputs]}"
        )
    norms = np.linalg.norm(vectors, axis=1)
    require(
        f"{file} gives vectors of length 1 where similarity is cosine",
        not unit or bool(np.allclose(norms, 1, atol=1e-3)), "length 1: end the model in a normalisation", norms,
    )  # fmt: skip
    return OnnxTower(_with_inputs(model, missing_inputs, file) if missing_inputs else model, features)


def _with_inputs(model: bytes, names: list[str], file: str) -> bytes:
    """Add unused inputs [B] that flag missing vectors, as the service passes them."""
    try:
        import onnx
    except ImportError as error:
        raise TowerError(f"{file}: expected inputs {names}, or `onnx` to add them with: pip install onnx") from error
    graph = onnx.load_from_string(model)
    graph.graph.input.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["B"]) for name in names)
    return bytes(graph.SerializeToString())


def _identity_tower(dim: int, *, unit: bool) -> OnnxTower:
    """Create the identity tower: the feature `vector` of a query is its embedding."""
    file = "unit_vector.onnx" if unit else "vector.onnx"
    onnx = files("longtail.bundle").joinpath(_TOWERS, file).read_bytes()
    return OnnxTower(onnx, [Feature(name="vector", kind="vector", dims=dim, missing=None)])


def _draw_queries(vectors_LD: Float32, counts_L: Int64) -> Float32:
    """Draw label vectors by popularity, without replacement, float32 [C, D]."""
    shares_L = np.exp(log_frequencies(counts_L))
    # Seeded, so that the same vectors give the same bundle.
    rng, most = np.random.default_rng(0), min(_QUERIES, len(vectors_LD))
    return vectors_LD[np.sort(rng.choice(len(vectors_LD), most, replace=False, p=shares_L / shares_L.sum()))]


def _far_centre(vectors_LD: Float32) -> Float32 | None:
    """Return the labels' mean, float32 [D], if float32 would lose distances without centring; None otherwise."""
    centre_D = vectors_LD.mean(axis=0, dtype=np.float64).astype(np.float32)
    spread = np.mean(np.square(vectors_LD - centre_D), dtype=np.float64)
    return centre_D if np.mean(np.square(centre_D), dtype=np.float64) > _FAR * spread else None


def _finite(vectors_XD: Float32) -> Bools:
    finite_X: Bools = np.isfinite(vectors_XD.sum(axis=1))
    return finite_X


def _unit(vectors_XD: Float32, vectors_name: str, ids: pa.Array | None = None) -> Float32:
    norms_X = np.linalg.norm(vectors_XD, axis=1, keepdims=True)
    _require(vectors_name, "a vector has a direction", norms_X[:, 0] > 0, vectors_XD, ids)
    unit_XD: Float32 = vectors_XD / norms_X
    return unit_XD


def _log_shares(noise_L: Float64, ids: pa.Array) -> Float32:
    noise_L = np.asarray(noise_L, np.float64)
    _require("labels", "ν is above 0 and finite", np.isfinite(noise_L) & (noise_L > 0), noise_L, ids)
    log_L: Float32 = (np.log(noise_L) - np.log(noise_L.sum())).astype(np.float32)
    return log_L


def _require_ids(ids: pa.Array) -> None:
    """Refuse empty ids, and ids that occur twice; the first ones are named."""
    if repeated := repeated_ids(ids):
        ending = f" and {len(repeated) - _EXAMPLES:,} more" if len(repeated) > _EXAMPLES else ""
        examples = ", ".join(map(repr, repeated[:_EXAMPLES]))
        raise BundleInvariantError(
            "ids are distinct", expected="every id once", actual=f"{examples}{ending} more often"
        )
    if (row := pc.index(ids, "").as_py()) >= 0:
        raise BundleInvariantError(
            "ids are not empty", expected="an id in every row", actual=f"an empty one in row {row}"
        )


def _require(subject: str, invariant: str, holds_X: Bools, values: Array, ids: pa.Array | None = None) -> None:
    """Refuse rows for which a condition does not hold; the first one's id and value are named."""
    if holds_X.all():
        return
    row = int(np.argmin(holds_X))
    value, id_text = values[row], "" if ids is None else f", id {ids[row].as_py()!r}"
    if np.ndim(value):
        wrong = np.flatnonzero(~np.isfinite(value))
        value = (
            f"{value[wrong[0]]} at position {wrong[0]}"
            if len(wrong)
            else "too large numbers"
            if value.any()
            else "zeros"
        )
    further_rows = int((~holds_X).sum()) - 1
    ending = f", and in {further_rows:,} more" if further_rows else ""
    raise BundleInvariantError(
        f"{subject}: {invariant}", expected="so in every row", actual=f"{value} in row {row}{id_text}{ending}"
    )
