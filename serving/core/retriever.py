"""Answer queries from one release with ranked labels.

Legend: `B` queries in the batch, `D` embedding dimensions, `K` the largest k of the batch, `N` answered labels of the
whole batch.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import accumulate, islice
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np

from longtail.bundle import (
    Bundle,
    Features,
    InputError,
    Inputs,
    LabelChanges,
    LabelRecord,
    Priors,
    Tower,
    TowerError,
    Vocabulary,
)
from longtail.bundle.arrays import Bools, Float32, Int32, Int64
from longtail.bundle.cooccurrence import REMEMBERED
from longtail.bundle.sets import with_members
from longtail.index.release.compatibility import losses, refused_features, refused_priors, refused_queries
from longtail.serving.core import lifetimes
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.dials import Dials, Weights
from longtail.serving.core.diversity import diversify_each
from longtail.serving.core.explanation import because, intervals, parts_of_scores
from longtail.serving.core.exploration import Draws, Explored, explore_each, slots_of
from longtail.serving.core.floors import Candidates, Floored, fill_each, meets
from longtail.serving.core.histories import CountedIds, Histories
from longtail.serving.core.lifetimes import Available, Lifetimes
from longtail.serving.core.overlay import Overlay
from longtail.serving.core.queries import OfLabels, Query, SearchOptions, SimilarQuery, ToEmbed
from longtail.serving.core.ranking import (
    NO_ROWS,
    Batch,
    Boost,
    BoostingRanker,
    Engine,
    HidingSearcher,
    IndexRanker,
    LabelSearcher,
    Ranker,
    UnboostedRanker,
    rank_each,
)
from longtail.serving.core.resolved import History, ResolvedQuery
from longtail.serving.core.tree_ranking import TreeRanker
from longtail.serving.errors import InvalidRequestError, NoQueriesError, UnservableReleaseError, serving_errors
from longtail.serving.monitoring import AnsweredBatch, ArmAnswer, Promises
from longtail.serving.monitoring.records import Basis

_ROUNDING = 1e-6
"""Deviation of a float32 vector's length from 1 within which it is not scaled, so that `embed` gives equal answers."""
_MOST_CHANGED = 0.02
"""Share of labels that may come or end since a release was loaded, whose answers its promises still describe."""
_LARGEST_NORM = 1e12
"""Largest norm of a query's vector; scores of longer vectors could overflow float32."""


@dataclass(kw_only=True, slots=True)
class Retrieval(AnsweredBatch):
    """Answers to a batch of queries, with the figures that monitoring counts.

    Attributes:
        results: `RetrieveResult` or `SimilarResult` of the HTTP API for every query; numbers are NumPy's.
        explanations: unfinished explanations by the query's position; each is in its result once it has ended.
        propensities_N: float32, P(shown) of the answered labels given their query; None if no query explored.
        weights_B: the weights of each query's score.
        represents_B: whether each answer represents the release: the client neither restricts nor arranges it.
        unknown: number of unknown ids in all `exclude` and in all `allow`.
        promise_holds: whether the labels available are nearly those of which the release's promises were measured.
    """

    results: list[dict[str, Any]]
    explanations: Mapping[int, Iterator[None]]
    propensities_N: Float32 | None
    weights_B: Sequence[Weights]
    represents_B: Sequence[bool]
    unknown: Mapping[str, int]
    seconds: Mapping[str, float]
    promise_holds: bool


class Retriever:
    """Answers queries from one release. Immutable and thread-safe, so a hot swap is one assignment.

    Args:
        searcher: finds rows of the bundle's augmented label table. If the bundle has a tree p_n(y|x), the tree ranks
            queries with features too: λ then multiplies the tree's conditional log p_n.
        filterable: columns that requests may filter by; None: all supported columns but strings with many values.
        queries: retriever of the index of known queries; None without one.

    Attributes:
        engine: the searcher, if it depends on an external server.
        query_index: retriever of the index of known queries; None without one.
        query_id: feature with the id of a query, by which the release remembers queries; None: it remembers none.

    Raises:
        UnservableReleaseError: the searcher does not hold the bundle's labels.
        BundleInvariantError: JSON cannot represent a display column.
    """

    _view: tuple[Available, Retriever] | None
    """The release at the time of the last request; see `at`."""
    _available: Available | None
    """The rows of a release of `at`; None: all rows in use."""
    _as_of: float | None = None
    """Time that ages of labels are of; None: now."""

    def __init__(
        self,
        *,
        name: str,
        created_at: datetime,
        bundle: Bundle,
        searcher: HidingSearcher,
        encoder: Tower,
        promises: Promises | None = None,
        max_new_labels: int = 0,
        filterable: Sequence[str] | None = None,
        queries: Retriever | None = None,
    ) -> None:
        if searcher.labels != bundle.manifest.labels:
            raise UnservableReleaseError(
                f"release {name}: expected an index of {bundle.manifest.labels} labels, found {searcher.labels}"
            )
        self.name = name
        self.created_at = created_at
        self.manifest = bundle.manifest
        self._features = {feature.name for feature in bundle.manifest.query_features}
        centre = bundle.manifest.centre
        self._centre_D = None if centre is None else np.array(centre, np.float32)
        settings = bundle.manifest.cooccurrence
        self.cooccurrence_until = None if settings is None else settings.until
        self.forecast = None if bundle.forecast is None else bundle.forecast.settings
        log = self.forecast if settings is None else settings.log
        self.negative_events = frozenset[str]() if log is None else frozenset(log.negative)
        self.promises = promises
        self.buckets_L = bundle.labels.buckets
        self.catalogue = Catalogue(bundle.labels, bundle.embeddings, filterable)
        tree = bundle.proposal is not None
        self._dials_of_queries = Dials.of_queries(bundle.manifest, bundle.priors, tree=tree)
        self._dials_of_labels = Dials.of_labels(bundle.manifest, bundle.priors, tree=tree)
        self.engine = searcher if isinstance(searcher, Engine) else None
        self.encoder = encoder
        self._histories = Histories(bundle, encoder)
        self.query_id = self._histories.query_id
        self.bundle = bundle
        lifetimes_L2 = bundle.labels.lifetimes
        self._lifetimes = None if lifetimes_L2 is None else Lifetimes(lifetimes_L2)
        self._loaded_with = None if self._lifetimes is None else self._lifetimes.at(lifetimes.now()).labels
        self._promise_holds = True
        self.query_index = queries
        self.queries_by_label = cache(self._list_queries)  # one for all copies
        self._as_built = Overlay.as_built(bundle, searcher, self.catalogue.row_of, max_new_labels=max_new_labels)
        self._use(self._as_built)

    def with_changes(self, records: Sequence[LabelRecord], changes: LabelChanges | None = None) -> Retriever:
        """Return the release after further label changes, in the log's order; see `Overlay.with_changes`."""
        if not records:
            return self
        # A shallow copy shares tower and index; running requests keep the overlay with which they began.
        changed = copy.copy(self)
        changed._use(self.overlay.with_changes(records, changes))
        return changed

    def rebuilt(self, records: Sequence[LabelRecord]) -> Retriever:
        """Return the release as built, with these label changes alone."""
        changed = copy.copy(self)
        changed._use(self._as_built.with_changes(records))
        return changed

    def at(self, at: float | None = None) -> Retriever:
        """Return the release of one request, which answers only labels available at a time; None: now.

        What this method has returned stays at its time.
        """
        if self._lifetimes is None or self._available is not None:
            return self
        at = lifetimes.now() if at is None else at
        view = self._view
        if view is None or not view[0].begin <= at < view[0].end:
            view = self._view = self._view_at(at, self._lifetimes)
        return view[1]

    def as_of(self, at: float) -> Retriever:
        """Return the release of a batch, whose lifetimes and ages of labels are those of one time."""
        view = copy.copy(self.at(at))
        view._as_of = at
        return view

    def _view_at(self, at: float, of_labels: Lifetimes) -> tuple[Available, Retriever]:
        overlay, of_added, view = self.overlay, self.overlay.added.lifetimes, copy.copy(self)
        assert of_added is not None
        assert self._loaded_with is not None
        view._available = shown = Available.at(at, of_labels.at(at), of_added, overlay.rows.in_use_M)
        view._promise_holds = shown.labels.share_unlike(self._loaded_with) <= _MOST_CHANGED
        hidden = overlay.hidden if self.bundle.proposal is None else shown.labels.rows_to_drop
        view._rank_by(overlay.searcher_within(shown.labels, shown.of_overlay_M), with_members(hidden, overlay.hidden))
        return shown, view

    def available(self, rows_N: Int64) -> Bools:
        """Compute whether each of some rows that are not hidden is available, bool [N]; of a release of `at`."""
        shown = self._available
        return np.ones(len(rows_N), np.bool_) if shown is None else shown.contains(rows_N, self.overlay.base)

    @property
    def availability(self) -> dict[str, Any]:
        """Return `ReleaseAvailability` of the HTTP API."""
        shown, overlay = self.at()._available, self.overlay
        if shown is not None:
            return {"labels": shown.count(overlay.masked), "next_change": shown.next_change}
        labels = overlay.labels - len(overlay.masked) - (len(overlay.rows) - overlay.rows.count)
        return {"labels": labels, "next_change": None}

    @property
    def vocabularies(self) -> Mapping[str, Vocabulary]:
        """Return the vocabularies of the bundle by their names, and the ids of remembered queries."""
        remembered = self.bundle.remembered
        return {**self.bundle.vocabularies, **({} if remembered is None else {REMEMBERED: remembered.queries})}

    @property
    def priors(self) -> list[str]:
        """Return the names of the release's priors, bonuses, slopes and decays."""
        return self.bundle.priors.names

    def knows(self, id_: str) -> bool:
        """Return whether a label was ever in this release, also if it is now hidden or deleted."""
        changes = self.overlay.changes
        return id_ in self.catalogue.row_of or id_ in changes.upserts or id_ in changes.hidden

    def check_options(self, options: SearchOptions) -> None:
        """Check options for queries to this release; raises InvalidRequestError."""
        ResolvedQuery.from_options(options, self._dials_of_queries.read(options), self.catalogue)

    def reads_columns(self, options: SearchOptions) -> bool:
        """Return whether an answer follows from columns of labels, which patches change."""
        if self._lifetimes is not None or options.filter or options.max_per:
            return True
        if options.slope or options.decay or any(floor.filter for floor in options.at_least):
            return True
        of_columns = [prior for prior in self.bundle.priors.settings if prior.source in ("filter", "number", "date")]
        return any(prior.default or prior.key in options.bonus for prior in of_columns)

    def check_compatible(self, before: Retriever) -> None:
        """Raise UnservableReleaseError if clients would lose features, priors or labels of `before`."""
        skipped, kept = self.overlay.skipped, self.catalogue.row_of
        dropped = {
            id_: why
            for id_, why in skipped.items()
            if id_ not in kept and (before.overlay.row_of(id_) is not None or id_ in before.catalogue.row_of)
        }
        refused = refused_features(before.manifest, self.manifest) + refused_priors(before.priors, self.priors)
        refused += refused_queries(
            *(0 if each.query_index is None else each.query_index.manifest.labels for each in (before, self))
        )
        lost = losses(refused, dropped)
        if lost:
            raise UnservableReleaseError(
                f"expected a release that does for clients of {before.name}, found that {'; '.join(lost)}; "
                "longtail-index publish --force has it served all the same"
            )

    def _use(self, overlay: Overlay) -> None:
        self.overlay = overlay
        self.catalogue = self.catalogue.with_overlay(overlay)
        self._available, self._view = None, None
        self._rank_by(overlay.searcher, overlay.hidden)

    def _rank_by(self, searcher: LabelSearcher, hidden: Int64) -> None:
        """Rank by a searcher, which does not find hidden rows, int64 [R]."""
        by_label = IndexRanker(searcher, self.bundle.augmentation, self.manifest.bias_removal.noise)
        by_query: UnboostedRanker = by_label
        if self.bundle.proposal is not None:
            by_query = TreeRanker(searcher, by_label, self.bundle, self.bundle.proposal, hidden)
        boosts = self.bundle.cooccurrence is not None
        self._by_label: Ranker = BoostingRanker(by_label) if boosts else by_label
        self._by_query: Ranker = BoostingRanker(by_query) if boosts else by_query

    def retrieve(
        self, queries: Sequence[Query], draws: Draws | None = None, *, explain_later: bool = False
    ) -> Retrieval:
        """Find the best labels of each query.

        The score is `s = u·v/T + b + λ·log ν + μ·log π + Σ w·r + ω·c` [METHODS §6, §11]. ν is p_n(y|x) if the bundle
        has a tree [BM20 eq. 5], otherwise the noise of the bundle's `log_pn`. Raises InvalidRequestError, which names
        the query and the field that this release does not support.

        Args:
            explain_later: leave explanations to the caller, who can let others search between their steps.
        """
        if (view := self.at()) is not self:
            return view.retrieve(queries, draws, explain_later=explain_later)
        started, catalogue = perf_counter(), self.catalogue
        resolved, histories, vector_of = list[ResolvedQuery](), list[History](), dict[int, Float32]()
        for position, query in enumerate(queries):
            prefix = f"queries.{position}."
            weights = self._dials_of_queries.read(query, prefix, self._as_of)
            history = self._histories.read(query, prefix, catalogue, self.overlay, counted=weights.cooccurrence != 0)
            histories.append(history)
            resolved.append(ResolvedQuery.from_options(query, weights, catalogue, prefix=prefix, history=history))
            if query.vector is not None:
                vector_of[position] = self._read_vector(query, weights.bias_removal, f"queries.{position}")
        if len(vector_of) == len(queries):
            vectors_BD, inputs = np.stack(list(vector_of.values())), dict[str, Any]()
        else:
            vectors_BD, inputs = self._embed([query.features or {} for query in queries])
            if vector_of:
                vectors_BD = vectors_BD.copy()
                vectors_BD[list(vector_of)] = list(vector_of.values())
        if self._centre_D is not None:
            vectors_BD = vectors_BD - self._centre_D
        ids = self._histories.count_ids(queries, inputs, histories, catalogue)
        bases: list[Basis] = ["model"] * len(queries)
        if ids.of_nothing and self.bundle.ranks_by_popularity:
            unknown = [position for position in ids.of_nothing if position not in vector_of]
            vectors_BD = vectors_BD.copy()
            vectors_BD[unknown] = 0
            for position in unknown:
                resolved[position], bases[position] = self._by_popularity(resolved[position])
        fixed = self.bundle.proposal is not None  # a tree needs features, so λ of a vector is 0
        named, explained = list[dict[str, Any]](), dict[int, tuple[float, float]]()
        judged_at_B = np.full(len(queries), np.nan, np.float32)
        for position, (query, of_query, basis) in enumerate(zip(queries, resolved, bases, strict=True)):
            arm = query.arm
            named.append(
                {"basis": basis}
                if arm is None
                else {"run": arm.run, "arm": arm.arm, "counted": arm.counted, "release": self.name, "basis": basis}
            )
            if query.explain:
                explained[position] = (
                    (0.0, 0.0)
                    if (fixed and position in vector_of) or basis != "model"
                    else self._dials_of_queries.reach(of_query.weights.popularity)
                )
            excludes_otherwise = query.exclude_history not in (None, self.manifest.exclude_history)
            is_plain = of_query.represents and not of_query.explore and not excludes_otherwise
            if self._promise_holds and basis == "model" and is_plain:
                judged_at_B[position] = of_query.weights.judged_at
        retrieval = self._answer(
            self._by_query, vectors_BD, inputs, resolved, named, draws, started, [query.arm for query in queries],
            explained, ids, judged_at_B, bases,
        )  # fmt: skip
        for steps in () if explain_later else retrieval.explanations.values():
            deque(steps, maxlen=0)
        return retrieval

    def judged_at(
        self, bias_removal: float, popularity: float, cooccurrence: float = 0.0, priors: Sequence[float] = ()
    ) -> float:
        """Return the λ whose promise holds for an answer at these weights; NaN if the release makes none."""
        return self._dials_of_queries.judged_at(bias_removal, popularity, cooccurrence, priors)

    def _by_popularity(self, query: ResolvedQuery) -> tuple[ResolvedQuery, Basis]:
        """Return a query that labels answer by log π, and ω·c if its history is known."""
        together = self.manifest.cooccurrence
        weights = query.weights._replace(bias_removal=0.0, popularity=1.0)
        if together is not None and self._boost(query) is not None:
            weights = weights._replace(cooccurrence=together.without_towers(weights.cooccurrence))
            return query._replace(weights=weights), "cooccurrence"
        return query._replace(weights=weights), "popularity"

    def _boost(self, query: ResolvedQuery) -> Boost | None:
        """Compute ω·c of a query; None if it adds nothing."""
        cooccurrence, weight = self.bundle.cooccurrence, query.weights.cooccurrence
        if cooccurrence is None or not weight or not query.history_H.size:
            return None
        term = cooccurrence.term(self._built(query.history_H))
        rows_C, values_C = self.overlay.served(term.rows_C), np.float32(weight) * term.values_C
        if rows_C is not term.rows_C:
            order_C = np.argsort(rows_C)
            rows_C, values_C = rows_C[order_C], values_C[order_C]
        if query.chosen_with:
            rows_C, values_C = rows_C[values_C > 0], values_C[values_C > 0]
        return Boost(rows_C, values_C, query.chosen_with) if rows_C.size or query.chosen_with else None

    def _built(self, history_H: Int64) -> Int64:
        """Get the catalogue rows of a history, without labels that the release was not built with."""
        built_H = self.overlay.built(history_H)
        return built_H if built_H is history_H else built_H[built_H >= 0]

    def embed(self, requests: Sequence[ToEmbed]) -> list[list[Float32]]:
        """Compute the vectors of each request, float32 [D]: u of queries, v of labels."""
        features_B = [query.features for request in requests for query in request.queries or ()]
        rows = [
            self.catalogue.row(id_, field=f"labels.{place}")
            for request in requests
            for place, id_ in enumerate(request.labels or ())
        ]
        queries = iter(self._embed(features_B)[0] if features_B else ())
        vectors_LD = self.catalogue.embeddings(rows) if rows else ()
        labels = iter(vectors_LD if self._centre_D is None or not rows else vectors_LD + self._centre_D)
        return [list(islice(queries if request.labels is None else labels, request.count)) for request in requests]

    def _embed(self, features_B: Sequence[Features]) -> tuple[Float32, Inputs]:
        """Compute u of every query, float32 [B, D], and return the tower's inputs too."""
        if self.query_id is not None and self.query_id not in self._features:
            features_B = [
                {name: value for name, value in features.items() if name != self.query_id} for features in features_B
            ]
        try:
            inputs = self.encoder.read(features_B)
            return self.encoder.embed(inputs), inputs
        except (InputError, TowerError):
            with serving_errors("queries"):
                raise

    def check_features(self, features: Features, items: str) -> None:
        """Check the features that this release reads; raises InvalidRequestError about the first of `items`."""
        read = {feature.name for feature in self.encoder.features}
        with serving_errors(items):
            self.encoder.read([{name: value for name, value in features.items() if name in read}])

    def _read_vector(self, query: Query, bias_removal: float, where: str) -> Float32:
        """Read a query's vector, float32 [D], of length 1 if the release compares by cosine.

        Raises InvalidRequestError if this release cannot score it.
        """
        numbers, dim = query.vector or [], self.manifest.dim
        norm = math.hypot(*numbers)
        if self.bundle.proposal is not None and bias_removal != 0:
            default = ", this release's default" if query.bias_removal is None else ""
            raise InvalidRequestError(
                "expected bias_removal 0 beside a vector: the tree p_n(y|x) of this release looks at a query's "
                f"features, which a vector has not; received {bias_removal}{default}",
                field=f"{where}.bias_removal",
            )
        if len(numbers) != dim:
            raise InvalidRequestError(
                f"expected the {dim} numbers of a vector of this release, received {len(numbers)}",
                field=f"{where}.vector",
            )
        if not norm <= _LARGEST_NORM:  # `norm > …` would accept NaN
            raise InvalidRequestError(
                f"expected a vector of norm <= {_LARGEST_NORM:g}, whose scores float32 can hold, received one of "
                f"{norm:g}",
                field=f"{where}.vector",
            )
        scaled = self.manifest.similarity == "cosine" and norm > 0 and abs(norm - 1) > _ROUNDING
        return (np.array(numbers) / (norm if scaled else 1.0)).astype(np.float32)

    def similar(self, requests: Sequence[SimilarQuery], draws: Draws | None = None) -> Retrieval:
        """Find the labels nearest to each given label, without the label itself.

        The score is `s = v·v'/T + b' + λ·log ν' + μ·log π' + ω·W[label, label']`. All weights default to 0, because
        similarity is wanted, not popularity. If the bundle has a tree p_n(y|x), ν is π here, as a label has no query
        features. By `cooccurrence` the score is W alone, of labels that have any. Raises InvalidRequestError or
        UnknownLabelError.
        """
        if (view := self.at()) is not self:
            return view.similar(requests, draws)
        started = perf_counter()
        rows: list[int] = []
        resolved: list[ResolvedQuery] = []
        for request in requests:
            of_request = self.rows_of(request)
            weights = self._dials_of_labels.read(request, at=self._as_of)
            of_labels = ResolvedQuery.from_options(request, weights, self.catalogue)
            alone = request.by == "cooccurrence"
            if alone and self.bundle.cooccurrence is None:
                raise InvalidRequestError(
                    "expected by: embedding, as this release knows nothing of what was chosen together, received "
                    "cooccurrence",
                    field="by",
                )
            resolved += [of_labels.like(row, alone=alone) for row in of_request]
            rows += of_request
        named = [{"id": str(id_)} for request in requests for id_ in request.labels]
        return self._answer(self._by_label, self.catalogue.embeddings(rows), {}, resolved, named, draws, started)

    def rows_of(self, request: OfLabels) -> list[int]:
        """Look up the labels of a request; raises UnknownLabelError."""
        fields = ["id"] if request.ids is None else [f"ids.{place}" for place in range(len(request.ids))]
        return [self.catalogue.row(id_, field=field) for id_, field in zip(request.labels, fields, strict=True)]

    def near(self, vectors_BD: Float32, searches: Sequence[tuple[SearchOptions, Sequence[Int64]]]) -> Retrieval:
        """Find the labels nearest to vectors, with the defaults of `similar`; raises InvalidRequestError.

        Args:
            searches: options of consecutive vectors, and for each vector the rows that are left out, int64, ascending.
        """
        started, resolved = perf_counter(), list[ResolvedQuery]()
        for options, left_out in searches:
            query = ResolvedQuery.from_options(options, self._dials_of_labels.read(options), self.catalogue)
            resolved += [query.leaving_out(rows_R) for rows_R in left_out]
        return self._answer(self._by_label, vectors_BD, {}, resolved, [{}] * len(resolved), None, started)

    @property
    def proposal(self) -> str:
        """Name ν, the noise that λ weighs."""
        return self._by_query.proposal

    @property
    def example(self) -> dict[str, Any]:
        """Return features of a query, with the id of one that the release remembers, if any."""
        example, remembered = self.encoder.example(), self.bundle.remembered
        if remembered is None or self.query_id is None:
            return example
        return {self.query_id: remembered.queries.ids[0].as_py()} | example

    def _list_queries(self, *, refused: bool) -> tuple[Int32, Int32]:
        """List the rows of the queries that remember each label: see `Remembered.by_label`."""
        assert self.bundle.remembered is not None
        ids_Q = self.queries.bundle.labels.ids
        return self.bundle.remembered.by_label(ids_Q, self.manifest.labels, refused=refused)

    @property
    def queries(self) -> Retriever:
        """Get the retriever of the index of known queries, whose labels are queries; raises NoQueriesError."""
        if self.query_index is None:
            raise NoQueriesError(
                f"expected a release with an index of queries, found {self.name}, which has none; build one by "
                "`longtail-index build --queries TABLE`"
            )
        return self.query_index

    def _explain(
        self,
        ranker: Ranker,
        batch: Batch,
        query: ResolvedQuery,
        rows_K: Int64,
        scores_K: Float32,
        limits: tuple[float, float],
        labels: Sequence[dict[str, Any]],
        prices_K: Sequence[dict[str, Any] | None] | None,
    ) -> Iterator[None]:
        """Put `Explanation` of the HTTP API into each label of a batch of one; yields after every search."""
        temperature = self.manifest.temperature
        tree = self.bundle.proposal is not None
        parts = parts_of_scores(
            self.catalogue,
            self.bundle.priors,
            batch,
            temperature,
            rows_K,
            scores_K,
            shift=query.weights.shift,
            tree=tree,
        )
        among = yield from intervals(ranker, batch, rows_K, limits)
        if (cooccurrence := self.bundle.cooccurrence) is not None:
            history_H = self._built(query.history_H if query.weights.cooccurrence else NO_ROWS)
            parts_KH = [cooccurrence.parts(history_H, row) for row in self.overlay.built(rows_K).tolist()]
            entries_H = self.catalogue.ids_of(history_H).to_pylist()
            parts = [
                {**part, "because": because(entries_H, parts_H)} for part, parts_H in zip(parts, parts_KH, strict=True)
            ]
        if prices_K is not None:
            parts = [{**part, "floor": price} for part, price in zip(parts, prices_K, strict=True)]
        for label, part, ends in zip(labels, parts, among, strict=True):
            label["explanation"] = {**part, "bias_removal": ends}

    def label(self, id_: str) -> dict[str, Any]:
        """Return all data of one label; raises UnknownLabelError."""
        row = self.catalogue.row(id_)
        return {**self.catalogue.labels_json([row])[0], "available": bool(self.at().available(np.array([row]))[0])}

    def _answer(
        self,
        ranker: Ranker,
        vectors_BD: Float32,
        inputs: Inputs,
        resolved: Sequence[ResolvedQuery],
        named: Sequence[Mapping[str, Any]],
        draws: Draws | None,
        started: float,
        arms_B: Sequence[ArmAnswer | None] = (),
        explained: Mapping[int, tuple[float, float]] = MappingProxyType({}),
        ids: CountedIds | None = None,
        judged_at_B: Float32 | None = None,
        bases: Sequence[Basis] = (),
    ) -> Retrieval:
        """Rank labels for embedded queries; `named` has the first fields of each result."""
        encoded = perf_counter()
        weights_B = [query.weights for query in resolved]
        bias_removal_B, popularity_B, cooccurrence_B = np.array([weights[:3] for weights in weights_B], np.float32).T
        filters = [query.filter for query in resolved]
        weighed = any(weights.weighed for weights in weights_B)
        priors_BP = np.stack([weights.priors_P for weights in weights_B]) if weighed else None
        boosts_B = None if self.bundle.cooccurrence is None else [self._boost(query) for query in resolved]
        if boosts_B is not None and boosts_B.count(None) == len(boosts_B):
            boosts_B = None
        bias_B = None
        if bases and bases.count("model") < len(bases):
            bias_B = np.array([basis == "model" for basis in bases], np.float32)
        batch = Batch(vectors_BD, inputs, bias_removal_B, popularity_B, filters, 0, priors_BP, boosts_B, bias_B)
        depths = [query.k if query.diversity is None else query.diversity.pool for query in resolved]
        rows_B, scores_B = rank_each(ranker, batch, depths)
        pools, explored_B = dict[int, int](), dict[int, Explored]()
        if any(query.diversity is not None for query in resolved):
            pools = diversify_each(ranker, batch, resolved, (rows_B, scores_B), self.catalogue)
        floored, exploring = dict[int, Floored](), dict[int, Candidates]()
        if any(query.floors for query in resolved):
            floored, exploring = fill_each(ranker, batch, resolved, (rows_B, scores_B), pools, self.catalogue)
        if any(query.explore for query in resolved):
            draws = draws or Draws()
            explored_B = explore_each(
                ranker, batch, resolved, (rows_B, scores_B), self.catalogue.buckets, draws, exploring
            )
            for place, candidates in exploring.items():
                certain = len(rows_B[place]) - sum(explored_B[place].slots.values())
                floored[place] = Floored.of(candidates.pool(certain), candidates.best(certain))
        searched = perf_counter()
        ends_B, raw_B = list(accumulate(map(len, rows_B))), list(scores_B)
        for position, weights in enumerate(weights_B):
            if weights.shift:
                scores_B[position] = scores_B[position] + np.float32(weights.shift)
        rows_N, scores_N = np.concatenate(rows_B), np.concatenate(scores_B)
        if not np.isfinite(scores_N).all():
            place = int(np.searchsorted(ends_B, np.isfinite(scores_N).argmin(), side="right"))
            raise InvalidRequestError(
                "expected a query whose scores float32 can hold, received one that overflows", field=f"queries.{place}"
            )
        propensities_N = np.ones(len(rows_N), np.float32) if explored_B else None
        labels_N = [
            {**shown, "score": score} for shown, score in zip(self.catalogue.shown(rows_N), scores_N, strict=True)
        ]
        results, explanations, unmet = [], dict[int, Iterator[None]](), 0
        for place, (query, end) in enumerate(zip(resolved, ends_B, strict=True)):
            start = end - len(rows_B[place])
            labels = labels_N[start:end]
            if query.display is not None:
                for label in labels:
                    label["display"] = {name: of for name, of in label["display"].items() if name in query.display}
            weights, result = query.weights, {**named[place], "labels": labels}
            result["bias_removal"], result["popularity"] = weights.bias_removal, weights.popularity
            if self.bundle.cooccurrence is not None:
                result["cooccurrence"] = weights.cooccurrence
            if weights.weighed or self.bundle.priors.of_table:
                result |= _weights_json(self.bundle.priors, query)
            if propensities_N is not None and draws is not None and place in explored_B:
                propensities_N[start:end] = explored_B[place].propensities_K
                for label, propensity in zip(labels, propensities_N[start:end], strict=True):
                    label["propensity"] = propensity
                result["exploration"] = explored_B[place].json(draws.lottery)
            prices_K = None
            if place in floored:
                met_FK = meets(query, rows_B[place], self.catalogue)
                prices_K = floored[place].prices(rows_B[place], met_FK)
                result |= floored[place].json(query, met_FK)
                unmet += any(floor["met"] < floor["n"] for floor in result["floors"])
            if place in explained:
                explanations[place] = self._explain(
                    ranker, batch.subset(np.array([place]))._replace(k=query.k), query, rows_B[place], raw_B[place],
                    explained[place], labels, prices_K,
                )  # fmt: skip
            if place in pools:
                result["pool"] = pools[place]
            result["unknown"] = {
                "query": 0 if ids is None else ids.query[place][1],
                "history": 0 if ids is None else ids.history[place][1],
                "exclude": query.unknown_exclude, "allow": query.unknown_allow,
            }  # fmt: skip
            results.append(result)
        # From here on for counting: labels that were embedded again count by their rows in the release.
        rows_N, buckets_N, counts_N = self.catalogue.recorded(rows_N)
        restrictions_B = [query.restrictions for query in resolved]
        return Retrieval(
            release=self.name,
            results=results,
            explanations=explanations,
            bias_removal_B=bias_removal_B,
            popularity_B=popularity_B,
            cooccurrence_B=cooccurrence_B,
            judged_at_B=np.full(len(resolved), np.nan, np.float32) if judged_at_B is None else judged_at_B,
            rows_N=rows_N,
            scores_N=scores_N,
            ends_B=ends_B,
            buckets_N=buckets_N,
            counts_N=counts_N,
            arms_B=arms_B if any(arms_B) else None,
            restrictions_B=restrictions_B if any(restrictions_B) else None,
            propensities_N=propensities_N,
            explored=slots_of(explored_B.values()) if explored_B else {},
            floored=(len(floored), unmet),
            weights_B=weights_B,
            represents_B=[query.represents for query in resolved],
            unknown={
                "exclude": sum([query.unknown_exclude for query in resolved]),
                "allow": sum([query.unknown_allow for query in resolved]),
            },
            ids={} if ids is None else ids.sums,
            bases={basis: bases.count(basis) for basis in {*bases}},
            promise_holds=self._promise_holds,
            seconds={"encode": encoded - started, "search": searched - encoded, "answer": perf_counter() - searched},
        )


def _weights_json(priors: Priors, query: ResolvedQuery) -> dict[str, Any]:
    """Return the weights of an answer: of all priors of the table, and of the others that are not 0."""
    shown: dict[str, Any] = {} if query.decay is None else {"decay": query.decay.model_dump()}
    for prior, weight in zip(priors.settings, query.weights.priors_P, strict=True):
        if prior.source == "table" or (weight and prior.source != "date"):
            shown.setdefault(prior.group, {})[prior.key] = weight
    return shown
