"""Index known queries, so that a search finds the likeliest queries to choose a label.

Training by a softmax compares scores of one query: adding any c(x) to all scores of a query x changes no loss, so
scores of two queries do not compare. p(y|x) = exp(s(x, y)) / Z(x), Z(x) = Σ_y' exp(s(x, y')), has no c(x). If each of k
queries that are shown label y makes one choice, Σ p(y|x) of them choose y on average: the k largest p(y|x) are the best
k. With b, log ν, log π and the priors of one label fixed, log p(y|x) is u·v/T − log Z(x) plus a constant: the inner
product of `[v, 1]` and `[u, −T·log Z]`. Z depends on λ, so rows have a coordinate for each of some λ, and a search
weighs one of them. μ and priors have their defaults in Z; co-occurrence is left out of s and Z. Where a query makes n
choices, n·p(y|x) of them are expected to be y: a search may add log n, which the index holds instead of log ν.

An index of queries is itself a release: its rows are the queries, and −log Z at each λ are its priors.

Legend: `Q` queries, `L` labels, `M` labels of the sum, `G` values of λ, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle import BiasRemoval, Bundle, InputError, Prior, Priors, Tower, TrainingFacts, bundle_from_vectors
from longtail.bundle.arrays import Float32, Float64, Int64
from longtail.bundle.augment import fitted_scale
from longtail.bundle.ids import repeated_ids
from longtail.bundle.labels import RESERVED_COLUMNS
from longtail.bundle.one_line import one_line
from longtail.index.errors import QueriesError
from longtail.index.recall import spread_rows
from longtail.tables import DataError, find_files
from longtail.tables.database import OpenedFile, open_database
from longtail.tables.features import WRITTEN, as_written, feature_columns
from longtail.tables.table import Columns, Table, id_expression, read_table
from longtail.tables.values import is_nested

_ID = "id:"
"""Prefix of the column of ids, which may be a feature as well."""
_CHOICES = "choices"
_AT_ONCE, _CALIBRATED, _CHECKED = 4_096, 1_000, 200
_MOST_SCORES = 1 << 34
"""Most scores behind log Z of all queries, a few minutes on two cores; labels are sampled where there are more."""
_SCORES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class KnownQueries:
    """A table of known queries: ids, features by their names, and columns that requests filter by.

    Args:
        path: file, directory, glob or URL of the table.
        id: column of ids; None: the one by which the bundle remembers queries, else `query_id`.
        choices: column of n, the choices that each query is expected to make, such as its past ones; None: `choices`,
            if the table has it, else 1 each.
    """

    path: Path | str
    id: str | None = None
    choices: str | None = None

    __repr__ = one_line

    def read(self, bundle: Bundle, progress: Callable[[str], None]) -> tuple[pa.Array, Float32, Int64, pa.Table]:
        """Read ids, embeddings, float32 [Q, D], n, int64 [Q], and columns; raises QueriesError or TowerError."""
        features, term = bundle.manifest.query_features, bundle.manifest.cooccurrence
        id_column = self.id or ("query_id" if term is None else term.log.query_id)
        try:
            with open_database() as duck:
                table = read_table(duck, find_files(self.path), _columns(bundle, id_column), str(self.path))
                table.refuse_rejected()
                table.find_types([column for column in table.kinds if column != _ID])
                ids = table.ids(_ID)
                repeated = repeated_ids(ids)
                if ids.null_count or not len(ids) or repeated:
                    problem = (
                        "rows without" if ids.null_count else f"{repeated[:3]} repeated" if len(ids) else "no rows"
                    )
                    raise QueriesError(
                        f"{self.path}, column {id_column!r}: expected an id in every row, once, found {problem}"
                    )
                progress(f"index of queries: embed {len(ids):,}")
                if absent := [repr(feature.name) for feature in features if feature.name not in table.kinds]:
                    progress(f"queries: no column {', '.join(absent)}: embedded as without these features")
                vectors_QD = np.concatenate([*self._embed(table, bundle)])
                n_Q, choices = np.ones(len(ids), np.int64), self.choices or _CHOICES
                if self.choices is not None or _CHOICES in table.kinds:
                    n_Q = self._read_choices(table, choices)
                hidden = {_ID, id_column, choices, *(feature.name for feature in features if feature.kind == "history")}
                columns = [
                    column
                    for column, kind in table.kinds.items()
                    if not (column in hidden or column.startswith(WRITTEN) or is_nested(kind))
                ]
                if reserved := [column for column in columns if column in RESERVED_COLUMNS]:
                    raise QueriesError(f"{self.path}: columns {reserved} are not allowed to be shown; rename them")
                return ids, vectors_QD, n_Q, table.arrow(columns)
        except DataError as error:
            raise QueriesError(str(error)) from error

    def _read_choices(self, table: Table, name: str) -> Int64:
        try:
            column = table.arrow([name])[name].cast(pa.int64())
            if not column.null_count and pc.min(column).as_py() >= 0:
                return np.asarray(column, np.int64)
        except (ValueError, pa.ArrowInvalid, pa.ArrowNotImplementedError):  # no such column, or no whole numbers
            pass
        raise QueriesError(f"{self.path}, column {name!r}: expected whole numbers from 0 on in every row")

    def _embed(self, table: Table, bundle: Bundle) -> Iterator[Float32]:
        tower = Tower(bundle.query_model, bundle.manifest.query_features, bundle.vocabularies, bundle.manifest.dim)
        centre = np.array(bundle.manifest.centre or 0, np.float32)
        for part in table.parts:
            for start in range(0, part.rows, _AT_ONCE):
                rows = table.read_rows(part, start, min(_AT_ONCE, part.rows - start))
                columns = feature_columns(rows, tower.features, bundle.vocabularies)
                values_B = zip(*columns.values(), strict=True)
                try:
                    inputs = tower.read([dict(zip(columns, values, strict=True)) for values in values_B])
                    yield tower.embed(inputs) - centre
                except InputError as error:
                    location = f"{part.opened.file.name}: row {start + error.row}: {error.field}"
                    raise QueriesError(f"{location}: {error.message}") from error


def _columns(bundle: Bundle, id_column: str) -> Columns:
    """Return what to read of a file of queries."""
    features = bundle.manifest.query_features
    names = {feature.name for feature in features}

    def columns(opened: OpenedFile, _: int) -> dict[str, tuple[str, str]]:
        if id_column not in opened.names or not names & {*opened.names}:
            raise QueriesError(
                f"{opened.file.name}: expected a column of ids {id_column!r} and columns of the features "
                f"{', '.join(sorted(names))}, found {', '.join(opened.names)}; SELECT … AS … names them otherwise"
            )
        read = {name: opened.column(name) for name in opened.names}
        ids = {_ID: id_expression(opened, id_column, *read[id_column])}
        return read | as_written(opened, features) | ids

    return columns


def query_bundle(
    bundle: Bundle, ids: pa.Array, vectors_QD: Float32, n_Q: Int64, display: pa.Table, progress: Callable[[str], None]
) -> Bundle:
    """Create the bundle of an index of queries: rows are queries, and queries are labels.

    Its log ν is log n, up to a constant, with half a choice added to each n.

    Raises QueriesError for a bundle with a tree p_n(y|x), by which ν differs between queries.
    """
    if bundle.proposal is not None:
        raise QueriesError(
            "an index of queries is not possible with a tree p_n(y|x), because log ν(y|x) is no constant"
        )
    dial = bundle.manifest.bias_removal
    lambdas_G = sorted({dial.default} | {value for value in (0.0, 0.5, 1.0) if dial.minimum <= value <= dial.maximum})
    log_z_QG, error = log_normalisers(bundle, vectors_QD, lambdas_G)
    progress(f"queries: log Z at λ = {', '.join(f'{value:g}' for value in lambdas_G)}" + (
        f" from sampled labels, ± {error:.3f} nats" if error else ", exact"))  # fmt: skip
    labels_drawn = np.random.default_rng(0).permutation(len(bundle.embeddings))[:_CALIBRATED]
    facts = TrainingFacts(ids, n_Q, temperature=bundle.manifest.temperature, display=display)
    examples_CD = np.asarray(bundle.embeddings[np.sort(labels_drawn)])
    indexed = bundle_from_vectors(vectors_QD, facts, name="queries", queries=examples_CD)
    settings = tuple(
        Prior(name=repr(value), minimum=0, default=0, maximum=1, missing=0, alone=True,
              kappa=fitted_scale(vectors_QD, log_z_QG[:, i]))
        for i, value in enumerate(lambdas_G)
    )  # fmt: skip
    choices = BiasRemoval(default=0, minimum=0, maximum=1, noise="n", chosen_by="the index of queries")
    manifest = indexed.manifest.model_copy(update={"bias_removal": choices})
    return replace(indexed, manifest=manifest, priors=Priors(settings, -log_z_QG))


def log_normalisers(
    bundle: Bundle, vectors_QD: Float32, lambdas_G: list[float], most_scores: int = _MOST_SCORES
) -> tuple[Float32, float]:
    """Compute log Z of queries, float32 [Q, G], and its standard error if sampled, nats; 0 if exact.

    Beyond `most_scores` the sum is over labels drawn by ½ π + ½ uniform, each divided by its expected number of draws.
    """
    log_nu_L, bias_L, log_pi_L, priors_LP = bundle.columns()
    noise_L = log_nu_L.astype(np.float64)
    base_L = bundle.manifest.popularity.default * (noise_L if log_pi_L is None else log_pi_L.astype(np.float64))
    if priors_LP is not None:
        base_L = base_L + priors_LP @ bundle.priors.defaults.astype(np.float64)
    base_L = base_L if bias_L is None else base_L + bias_L
    log_weights_LG = base_L[:, None] + noise_L[:, None] * np.array(lambdas_G)
    labels, most = len(noise_L), max(_AT_ONCE, most_scores // len(vectors_QD))
    if labels <= most:
        return _log_sums(bundle, vectors_QD, slice(None), log_weights_LG), 0.0
    # Half uniform, so that no label has a tiny probability, by which its weight is divided.
    share_L = 0.5 * np.exp(bundle.labels.log_pi.astype(np.float64)) + 0.5 / labels
    share_L /= share_L.sum()
    rows_M, draws_M = np.unique(np.random.default_rng(0).choice(labels, most, p=share_L), return_counts=True)
    log_weights_MG = log_weights_LG[rows_M] + np.log(draws_M / (most * share_L[rows_M]))[:, None]
    log_z_QG = _log_sums(bundle, vectors_QD, rows_M, log_weights_MG)
    checked = spread_rows(len(vectors_QD), _CHECKED)
    exact = _log_sums(bundle, vectors_QD[checked], slice(None), log_weights_LG)
    return log_z_QG, float(np.sqrt(np.mean((log_z_QG[checked] - exact) ** 2, axis=0)).max())


def _log_sums(bundle: Bundle, vectors_QD: Float32, rows_M: slice | np.ndarray, log_weights_MG: Float64) -> Float32:
    """Compute log Σ_y exp(u·v/T + log weight), float32 [Q, G]; one exponential serves all λ."""
    vectors_DM = np.asarray(bundle.embeddings[rows_M]).T / np.float32(bundle.manifest.temperature)
    # The largest weight and the largest score stay out of the exponentials, which would overflow.
    largest_G = log_weights_MG.max(axis=0)
    weights_MG = np.exp(log_weights_MG - largest_G).astype(np.float32)
    sums_QG, step = np.empty((len(vectors_QD), len(largest_G)), np.float32), 1 + _SCORES_AT_ONCE // len(weights_MG)
    for start in range(0, len(vectors_QD), step):
        scores_BM = vectors_QD[start : start + step] @ vectors_DM
        most_B1 = scores_BM.max(axis=1, keepdims=True)
        scores_BM -= most_B1
        sums_QG[start : start + step] = np.log(np.exp(scores_BM, out=scores_BM) @ weights_MG) + most_B1 + largest_G
    return sums_QG
