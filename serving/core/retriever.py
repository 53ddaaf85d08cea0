"""Answer queries from one release with ranked labels.

Legend: `B` queries in the batch, `D` embedding dimensions, `K` the largest k of the batch, `N` answered labels of the
whole batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np

from longtail.bundle import (
    Bundle,
    Features,
    InputError,
    Inputs,
    LabelChanges,
    LabelRecord,
    Tower,
    TowerError,
    Vocabulary,
)
from longtail.bundle.arrays import Bools, Float32, Int32, Int64
from longtail.bundle.histories import REMEMBERED
from longtail.bundle.sets import with_members
from longtail.index.release.compatibility import ClientInputs, breaking_changes
from longtail.index.search.faiss_index import NEARLY_WHOLE
from longtail.serving.core import lifetimes
from longtail.serving.core.answers import Retrieval
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.dials import Dials
from longtail.serving.core.diversity import diversify_each
from longtail.serving.core.explanation import because, intervals, parts_of_scores
from longtail.serving.core.exploration import Draws, Explored, add_up_slots, explore_each
from longtail.serving.core.floors import Candidates, Floored, fill_each, meets
from longtail.serving.core.overlay import Overlay
from longtail.serving.core.queries import LabelId, OfLabels, QueryFeatures, RetrieveQuery, SearchOptions, SimilarQuery
from longtail.serving.core.ranking import NO_ROWS, Batch, Boost, Engine, HidingSearcher, LabelSearcher, Ranker
from longtail.serving.core.resolved import NO_HISTORY, Histories, History, ResolvedQuery
from longtail.serving.core.tree_ranking import TreeRanker
from longtail.serving.errors import InvalidRequestError, NoQueriesError, UnservableReleaseError, serving_errors
from longtail.serving.monitoring import ArmAnswer, Basis, Promises

_ROUNDING = 1e-6
"""Deviation of a float32 vector's length from 1 within which it is not scaled, so that `embed` gives equal answers."""
_MOST_CHANGED = 0.02
"""Share of labels that may come or end since a release was loaded, whose answers its promises still describe."""
_LARGEST_NORM = 1e12
"""Largest norm of a query's vector; scores of longer vectors could overflow float32."""


class Retriever:
    """Answers queries from one release. Immutable and thread-safe, so a hot swap is one assignment.

    Args:
        searcher: finds rows of the bundle's augmented label table. If the bundle has a tree p_n(y|x), the tree ranks
            queries with features too: λ then multiplies the tree's conditional log p_n.
        filterable: columns that requests may filter by; None: all supported columns but strings with many values.

    Attributes:
        engine: the searcher, if it depends on an external server.
        query_index: retriever of the index of known queries, set by the loader; None without one.
        promises: what the release promises, set by the loader; None: nothing.
        label_ranker: ranks without the features of queries.
        query_id: feature with the id of a query, by which the release remembers queries; None: it remembers none.
        serves_nearly_all: nearly all labels of the index are available at the time of this view; see `view_at`.

    Raises:
        UnservableReleaseError: the searcher does not hold the bundle's labels.
        BundleInvariantError: JSON cannot represent a display column.
    """

    _view: tuple[lifetimes.Available, Retriever] | None = None
    """The release at the time of the last request; see `view_at`."""
    _available: lifetimes.Available | None = None
    """The rows of a release of `view_at`; None: all rows in use."""
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
        max_new_labels: int = 0,
        filterable: Sequence[str] | None = None,
    ) -> None:
        if searcher.labels != bundle.manifest.labels:
            raise UnservableReleaseError(
                f"release {name}: expected an index of {bundle.manifest.labels} labels, found {searcher.labels}"
            )
        self.name = name
        self.created_at = created_at
        self.manifest = bundle.manifest
        centre = bundle.manifest.centre
        self._centre_D = None if centre is None else np.array(centre, np.float32)
        settings = bundle.manifest.cooccurrence
        self.cooccurrence_until = None if settings is None else settings.until
        self.forecast = None if bundle.forecast is None else bundle.forecast.settings
        log = self.forecast if settings is None else settings.log
        self.negative_events = frozenset[str]() if log is None else frozenset(log.negative)
        self.promises: Promises | None = None
        self.buckets_L = bundle.labels.buckets
        self.catalogue = Catalogue(bundle.labels, bundle.embeddings, filterable)
        tree = bundle.proposal is not None
        self._dials_of_queries = Dials.create_for_queries(bundle.manifest, bundle.priors, tree=tree)
        self._dials_of_labels = Dials.create_for_labels(bundle.manifest, bundle.priors, tree=tree)
        self.engine = searcher if isinstance(searcher, Engine) else None
        self.encoder = encoder
        self._histories = Histories(bundle, encoder)
        self.query_id = self._histories.query_id
        self.bundle = bundle
        lifetimes_L2 = bundle.labels.lifetimes
        self._lifetimes = None if lifetimes_L2 is None else lifetimes.Lifetimes(lifetimes_L2)
        self.has_lifetimes = lifetimes_L2 is not None
        self._loaded_with = None if self._lifetimes is None else self._lifetimes.find_span(lifetimes.now()).labels
        self._promise_holds = self.serves_nearly_all = True
        self.query_index: Retriever | None = None
        self.queries_by_label = cache(self._list_queries)  # one for all copies
        # Kept without changes, for a log of label changes that was replaced.
        self.overlay = self._as_built = Overlay.as_built(
            bundle, searcher, self.catalogue.row_of, max_new_labels=max_new_labels
        )
        self._set_rankers(searcher, NO_ROWS)

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

    def view_at(self, at: float | None = None) -> Retriever:
        """Get the release with the labels available at a time; None: now.

        What this method has returned stays at its time.
        """
        if self._lifetimes is None or self._available is not None:
            return self
        at = lifetimes.now() if at is None else at
        view = self._view
        # Two threads may create the same view; both are equal, and the last one stays.
        if view is None or not view[0].begin <= at < view[0].end:
            view = self._view = self._create_view(at, self._lifetimes)
        return view[1]

    def view_all_at(self, at: float) -> Retriever:
        """Get the release at one time, ages of labels included."""
        view = copy.copy(self.view_at(at))
        view._as_of = at
        return view

    def _create_view(self, at: float, of_labels: lifetimes.Lifetimes) -> tuple[lifetimes.Available, Retriever]:
        overlay, of_added, view = self.overlay, self.overlay.added.lifetimes, copy.copy(self)
        assert of_added is not None
        assert self._loaded_with is not None
        view._available = available = lifetimes.Available.narrow(
            at, of_labels.find_span(at), of_added, overlay.rows.in_use_M
        )
        view.serves_nearly_all = available.labels.share >= NEARLY_WHOLE
        view._promise_holds = available.labels.share_unlike(self._loaded_with) <= _MOST_CHANGED
        # A tree ranks every label, so it needs the unavailable rows; a searcher leaves them out.
        hidden = overlay.hidden if self.bundle.proposal is None else available.labels.excluded_rows
        view._set_rankers(
            overlay.searcher_within(available.labels, available.of_overlay_M), with_members(hidden, overlay.hidden)
        )
        return available, view

    def available(self, rows_N: Int64) -> Bools:
        """Compute whether rows are available, bool [N]; of a release of `view_at`."""
        available = self._available
        return np.ones(len(rows_N), np.bool_) if available is None else available.contains(rows_N, self.overlay.base)

    @property
    def availability(self) -> dict[str, Any]:
        """Return `ReleaseAvailability` of the HTTP API."""
        available, overlay = self.view_at()._available, self.overlay
        if available is not None:
            return {"labels": available.count(overlay.masked), "next_change": available.next_change}
        labels = overlay.labels - len(overlay.masked) - (len(overlay.rows) - overlay.rows.count)
        return {"labels": labels, "next_change": None}

    @property
    def vocabularies(self) -> Mapping[str, Vocabulary]:
        """Get the vocabularies by name, with remembered queries."""
        remembered = self.bundle.remembered
        return {**self.bundle.vocabularies, **({} if remembered is None else {REMEMBERED: remembered.queries})}

    @property
    def priors(self) -> list[str]:
        """Return the names of the release's priors, bonuses, slopes and decays."""
        return self.bundle.priors.names

    def knows(self, id_: str) -> bool:
        """Check whether a label was ever in this release."""
        changes = self.overlay.changes
        return id_ in self.catalogue.row_of or id_ in changes.upserts or id_ in changes.hidden

    def check_options(self, options: SearchOptions) -> None:
        """Check options for queries to this release; raises InvalidRequestError."""
        ResolvedQuery.from_options(options, self._dials_of_queries.read(options), self.catalogue)

    def reads_columns(self, options: SearchOptions) -> bool:
        """Check whether an answer depends on patchable columns."""
        if self._lifetimes is not None or options.filter or options.max_per:
            return True
        if options.slope or options.decay or any(floor.filter for floor in options.at_least):
            return True
        of_columns = [prior for prior in self.bundle.priors.settings if prior.source in ("filter", "number", "date")]
        return any(prior.default or prior.key in options.bonus for prior in of_columns)

    @property
    def client_inputs(self) -> ClientInputs:
        """Return what clients may send."""
        return ClientInputs(self.manifest, self.priors, self.query_index is not None)

    def check_compatible(self, before: Retriever) -> None:
        """Raise UnservableReleaseError if clients of `before` would lose something."""
        skipped, row_of = self.overlay.skipped, self.catalogue.row_of
        # A label that the new release was built with is not lost, even if its change is skipped.
        dropped = {
            id_: why
            for id_, why in skipped.items()
            if id_ not in row_of and (before.overlay.find_row(id_) is not None or id_ in before.catalogue.row_of)
        }
        lost = breaking_changes(before.client_inputs, self.client_inputs, dropped)
        if lost:
            raise UnservableReleaseError(
                f"expected a release that does for clients of {before.name}, found that {'; '.join(lost)}; "
                "longtail-index publish --force has it served all the same"
            )

    def _use(self, overlay: Overlay) -> None:
        self.overlay = overlay
        self.catalogue = self.catalogue.with_overlay(overlay)
        # The earlier view lacks the changes.
        self._available, self._view = None, None
        self._set_rankers(overlay.searcher, overlay.hidden)

    def _set_rankers(self, searcher: LabelSearcher, hidden: Int64) -> None:
        """Rank by a searcher without hidden rows, int64 [R]."""
        self.label_ranker = self._by_query = Ranker(
            searcher, self.bundle.augmentation, self.manifest.bias_removal.noise
        )
        if self.bundle.proposal is not None:
            self._by_query = TreeRanker(searcher, self.bundle, self.bundle.proposal, hidden)

    def retrieve(
        self,
        queries: Sequence[RetrieveQuery],
        draws: Draws | None = None,
        arms_B: Sequence[ArmAnswer | None] | None = None,
    ) -> Retrieval:
        """Find the best labels of each query.

        The score is `s = u·v/T + b + λ·log ν + μ·log π + Σ w·r + ω·c` [METHODS §6, §11]. ν is p_n(y|x) if the bundle
        has a tree [BM20 eq. 5], otherwise the noise of the bundle's `log_pn`. Raises InvalidRequestError, which names
        the query and the field that this release does not support.

        Args:
            arms_B: the arm of an experiment that each query is in; None: no experiment runs.
        """
        # One view for the whole batch, so that no label comes or ends in between.
        if self.has_lifetimes and self._available is None:
            return self.view_at().retrieve(queries, draws, arms_B)
        started, catalogue = perf_counter(), self.catalogue
        resolved, histories, vector_of = list[ResolvedQuery](), list[History](), dict[int, Float32]()
        for i, query in enumerate(queries):
            prefix = f"queries.{i}."
            if (query.features is None) == (query.vector is None):
                received = "neither" if query.features is None else "both"
                raise InvalidRequestError(
                    f"expected either features or vector, received {received}", field=f"queries.{i}"
                )
            weights = self._dials_of_queries.read(query, prefix, self._as_of)
            history = NO_HISTORY
            excludes = self.manifest.exclude_history if query.exclude_history is None else query.exclude_history
            if excludes or weights.cooccurrence or query.history is not None or self.negative_events:
                counted = weights.cooccurrence != 0
                history = self._histories.read(query, prefix, catalogue, self.overlay, counted=counted)
            histories.append(history)
            resolved.append(ResolvedQuery.from_options(query, weights, catalogue, prefix=prefix, history=history))
            if query.vector is not None:
                vector_of[i] = self._read_vector(query, weights.bias_removal, f"queries.{i}")
        if len(vector_of) == len(queries):
            vectors_BD, inputs = np.stack(list(vector_of.values())), dict[str, Any]()
        else:
            vectors_BD, inputs = self._embed([query.features or {} for query in queries])
            # The tower has embedded no features at all in the rows of vectors.
            if vector_of:
                vectors_BD = vectors_BD.copy()
                vectors_BD[list(vector_of)] = list(vector_of.values())
        # Labels were moved by the same vector before the index was built.
        if self._centre_D is not None:
            vectors_BD = vectors_BD - self._centre_D
        ids = self._histories.count_ids(queries, inputs, histories, catalogue)
        bases: list[Basis] = ["model"] * len(queries)
        bias_B: Float32 | float = 1.0
        if ids.of_nothing and self.bundle.ranks_by_popularity:
            unknown = [i for i in ids.of_nothing if i not in vector_of]
            vectors_BD, bias_B = vectors_BD.copy(), np.ones(len(queries), np.float32)
            # At the vector 0 and without b all labels tie, so that popularity alone decides.
            vectors_BD[unknown] = bias_B[unknown] = 0
            for i in unknown:
                resolved[i], bases[i] = self._by_popularity(resolved[i])
        retrieval = self._rank(self._by_query, resolved, vectors_BD, inputs, draws, started, bias_B)
        # The promise holds for answers that leave out what the evaluation left out.
        default = None, self.manifest.exclude_history
        for i, (query, of_query, basis) in enumerate(zip(queries, resolved, bases, strict=True)):
            is_plain = of_query.represents and not of_query.explore and query.exclude_history in default
            if self._promise_holds and basis == "model" and is_plain:
                retrieval.judged_at_B[i] = of_query.weights.judged_at
            if query.explain:
                limits = self._dials_of_queries.reach(of_query.weights.popularity)
                # A tree needs features, so λ of a vector is 0; popularity alone has no λ.
                if basis != "model" or (self.bundle.proposal is not None and i in vector_of):
                    limits = 0.0, 0.0
                retrieval.explanations[i] = self._explain(retrieval, i, limits)
        retrieval.heads_B = [{"basis": basis} for basis in bases]
        retrieval.bases = {basis: bases.count(basis) for basis in {*bases}}
        retrieval.ids, retrieval.unknown_B = ids.sums, ids.unknown_B
        if arms_B is not None:
            retrieval.arms_B = arms_B
            retrieval.heads_B = [
                {"run": arm.run, "arm": arm.arm, "counted": arm.counted, "release": self.name, **head} if arm else head
                for arm, head in zip(arms_B, retrieval.heads_B, strict=True)
            ]
        return retrieval

    def find_judged_dial(
        self, bias_removal: float, popularity: float, cooccurrence: float = 0.0, priors: Sequence[float] = ()
    ) -> float:
        """Get the λ whose promise holds at these weights; NaN if the release makes none."""
        return self._dials_of_queries.find_judged_dial(bias_removal, popularity, cooccurrence, priors)

    def _by_popularity(self, query: ResolvedQuery) -> tuple[ResolvedQuery, Basis]:
        """Rank a query by log π, and ω·c if possible."""
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
        term = cooccurrence.term(self._find_built_rows(query.history_H))
        rows_C, values_C = self.overlay.find_served_rows(term.rows_C), np.float32(weight) * term.values_C
        if rows_C is not term.rows_C:
            # Overlay rows are the largest, so replacing some breaks the order.
            order_C = np.argsort(rows_C)
            rows_C, values_C = rows_C[order_C], values_C[order_C]
        if query.chosen_with:
            rows_C, values_C = rows_C[values_C > 0], values_C[values_C > 0]
        return Boost(rows_C, values_C, query.chosen_with) if rows_C.size or query.chosen_with else None

    def _find_built_rows(self, history_H: Int64) -> Int64:
        """Get a history's catalogue rows, without added labels."""
        built_H = self.overlay.find_built_rows(history_H)
        return built_H if built_H is history_H else built_H[built_H >= 0]

    def embed(self, items: Sequence[QueryFeatures | LabelId]) -> Sequence[Float32]:
        """Compute vectors of queries or labels, float32 [D] each."""
        features_B = [item.features for item in items if isinstance(item, QueryFeatures)]
        if features_B:
            return [*self._embed(features_B)[0]]
        rows = [self.catalogue.row(str(id_), field=f"labels.{i}") for i, id_ in enumerate(items)]
        vectors_LD = self.catalogue.embeddings(rows)
        # The table holds moved vectors; clients get the vectors of the model.
        return [*(vectors_LD if self._centre_D is None else vectors_LD + self._centre_D)]

    def _embed(self, features_B: Sequence[Features]) -> tuple[Float32, Inputs]:
        """Compute u of every query, float32 [B, D], and the inputs."""
        if (extra_id := self._histories.extra_id) is not None:
            features_B = [
                {name: value for name, value in features.items() if name != extra_id} for features in features_B
            ]
        try:
            inputs = self.encoder.read(features_B)
            return self.encoder.embed(inputs), inputs
        except (InputError, TowerError):
            with serving_errors("queries"):
                raise

    def check_features(self, features: Features, items: str) -> None:
        """Check the features that this release reads; raises InvalidRequestError about the first of `items`."""
        # Other features are recorded for training, so they are no error here.
        read = {feature.name for feature in self.encoder.features}
        with serving_errors(items):
            self.encoder.read([{name: value for name, value in features.items() if name in read}])

    def _read_vector(self, query: RetrieveQuery, bias_removal: float, field: str) -> Float32:
        """Read a query's vector, float32 [D], scaled for cosine.

        Raises InvalidRequestError if this release cannot score it.
        """
        numbers, dim = query.vector or [], self.manifest.dim
        norm = math.hypot(*numbers)
        if self.bundle.proposal is not None and bias_removal != 0:
            default = ", this release's default" if query.bias_removal is None else ""
            raise InvalidRequestError(
                "expected bias_removal 0 with a vector: the tree p_n(y|x) of this release looks at a query's "
                f"features, which a vector has not; received {bias_removal}{default}",
                field=f"{field}.bias_removal",
            )
        if len(numbers) != dim:
            raise InvalidRequestError(
                f"expected the {dim} numbers of a vector of this release, received {len(numbers)}",
                field=f"{field}.vector",
            )
        if not norm <= _LARGEST_NORM:  # `norm > …` would accept NaN
            raise InvalidRequestError(
                f"expected a vector of norm <= {_LARGEST_NORM:g}, whose scores float32 can hold, received one of "
                f"{norm:g}",
                field=f"{field}.vector",
            )
        scaled = self.manifest.similarity == "cosine" and norm > 0 and abs(norm - 1) > _ROUNDING
        return (np.array(numbers) / (norm if scaled else 1.0)).astype(np.float32)

    def similar(self, requests: Sequence[SimilarQuery], draws: Draws | None = None) -> Retrieval:
        """Find the labels nearest to each given one.

        The score is `s = v·v'/T + b' + λ·log ν' + μ·log π' + ω·W[label, label']`. All weights default to 0, because
        similarity is wanted, not popularity. If the bundle has a tree p_n(y|x), ν is π here, as a label has no query
        features. By `cooccurrence` the score is W alone, of labels that have any. Raises InvalidRequestError or
        UnknownLabelError.
        """
        if self.has_lifetimes and self._available is None:
            return self.view_at().similar(requests, draws)
        started = perf_counter()
        rows: list[int] = []
        resolved: list[ResolvedQuery] = []
        for request in requests:
            request_rows = self.find_rows(request)
            weights = self._dials_of_labels.read(request, at=self._as_of)
            of_labels = ResolvedQuery.from_options(request, weights, self.catalogue)
            alone = request.by == "cooccurrence"
            if alone and self.bundle.cooccurrence is None:
                raise InvalidRequestError(
                    "expected by: embedding, as this release knows nothing of what was chosen together, received "
                    "cooccurrence",
                    field="by",
                )
            resolved += [of_labels.like(row, alone=alone) for row in request_rows]
            rows += request_rows
        retrieval = self._rank(self.label_ranker, resolved, self.catalogue.embeddings(rows), {}, draws, started)
        retrieval.heads_B = [{"id": str(id_)} for request in requests for id_ in request.labels]
        return retrieval

    def find_rows(self, request: OfLabels) -> list[int]:
        """Look up the labels of a request; raises UnknownLabelError."""
        fields = ["id"] if request.ids is None else [f"ids.{i}" for i in range(len(request.ids))]
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
        return self._rank(self.label_ranker, resolved, vectors_BD, {}, None, started)

    @property
    def proposal(self) -> str:
        """Name ν, the noise that λ weighs."""
        return self._by_query.proposal

    @property
    def example(self) -> dict[str, Any]:
        """Get features of a query, with a remembered id."""
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
        """Get the retriever of known queries; raises NoQueriesError."""
        if self.query_index is None:
            raise NoQueriesError(
                f"expected a release with an index of queries, found {self.name}, which has none; build one by "
                "`longtail-index build --queries TABLE`"
            )
        return self.query_index

    def _explain(self, retrieval: Retrieval, i: int, limits: tuple[float, float]) -> Iterator[None]:
        """Put `Explanation` into each label of one query; yields after every search."""
        query, end = retrieval.queries[i], retrieval.ends_B[i]
        scores_K = retrieval.unshifted_B[i]
        rows_K = retrieval.answered_rows_N[end - len(scores_K) : end]
        # The batch has k = 0, as every query has its own.
        batch = retrieval.batch.subset(np.array([i]))._replace(k=query.k)
        parts = parts_of_scores(
            self.catalogue,
            self.bundle.priors,
            batch,
            self.manifest.temperature,
            rows_K,
            scores_K,
            shift=query.weights.shift,
            tree=self.bundle.proposal is not None,
        )
        intervals_K = yield from intervals(self._by_query, batch, rows_K, limits)
        if (cooccurrence := self.bundle.cooccurrence) is not None:
            history_H = self._find_built_rows(query.history_H if query.weights.cooccurrence else NO_ROWS)
            parts_KH = [cooccurrence.parts(history_H, row) for row in self.overlay.find_built_rows(rows_K).tolist()]
            entries_H = self.catalogue.get_ids(history_H).to_pylist()
            parts = [
                {**part, "because": because(entries_H, parts_H)} for part, parts_H in zip(parts, parts_KH, strict=True)
            ]
        if i in retrieval.prices:
            parts = [{**part, "floor": price} for part, price in zip(parts, retrieval.prices[i], strict=True)]
        for label, part, interval in zip(retrieval.results[i]["labels"], parts, intervals_K, strict=True):
            label["explanation"] = {**part, "bias_removal": interval}

    def label(self, id_: str) -> dict[str, Any]:
        """Return all data of one label; raises UnknownLabelError."""
        row = self.catalogue.row(id_)
        return {**self.catalogue.labels_json([row])[0], "available": bool(self.view_at().available(np.array([row]))[0])}

    def _rank(
        self,
        ranker: Ranker,
        queries: Sequence[ResolvedQuery],
        vectors_BD: Float32,
        inputs: Inputs,
        draws: Draws | None,
        started: float,
        bias_B: Float32 | float = 1.0,
    ) -> Retrieval:
        """Rank labels for embedded queries.

        Args:
            started: `perf_counter()` at the begin of the search.
            bias_B: weight of the labels' bias b in each query.
        """
        encoded = perf_counter()
        bias_removal_B, popularity_B, cooccurrence_B = np.array([query.weights[:3] for query in queries], np.float32).T
        weighed = any(query.weights.weighed for query in queries)
        priors_BP = np.stack([query.weights.priors_P for query in queries]) if weighed else None
        boosts_B = [self._boost(query) for query in queries] if self.bundle.cooccurrence is not None else []
        batch = Batch(
            vectors_BD, inputs, bias_removal_B, popularity_B, [query.filter for query in queries], 0, priors_BP,
            boosts_B if any(boost is not None for boost in boosts_B) else None, bias_B,
        )  # fmt: skip
        # Diversity chooses from a pool, which is larger than the answer.
        depths = [query.k if query.diversity is None else query.diversity.pool for query in queries]
        rows_B, scores_B = ranker.rank_each(batch, depths)
        pools, explored_B = dict[int, int](), dict[int, Explored]()
        floored, exploring = dict[int, Floored](), dict[int, Candidates]()
        if any(query.diversity is not None for query in queries):
            pools = diversify_each(ranker, batch, queries, (rows_B, scores_B), self.catalogue)
        if any(query.floors for query in queries):
            floored, exploring = fill_each(ranker, batch, queries, (rows_B, scores_B), pools, self.catalogue)
        tails = dict[int, dict[str, Any]]()
        if any(query.explore for query in queries):
            draws = draws or Draws()
            explored_B = explore_each(
                ranker, batch, queries, (rows_B, scores_B), self.catalogue.buckets, draws, exploring
            )
            for i, candidates in exploring.items():
                certain = len(rows_B[i]) - sum(explored_B[i].slots.values())
                floored[i] = Floored.compare(candidates.pool(certain), candidates.best(certain))
            for i, explored in explored_B.items():
                tails[i] = {"exploration": explored.json(draws.lottery)}
        unmet, prices = 0, dict[int, list[dict[str, Any] | None]]()
        for i, costs in floored.items():
            met_FK = meets(queries[i], rows_B[i], self.catalogue)
            tails[i] = tails.get(i, {}) | costs.json(queries[i], met_FK)
            prices[i] = costs.prices(rows_B[i], met_FK)
            unmet += any(floor["met"] < floor["n"] for floor in tails[i]["floors"])
        for i, pool in pools.items():
            tails[i] = tails.get(i, {}) | {"pool": pool}
        searched = perf_counter()
        ends_B, unshifted_B = list[int](), list(scores_B)
        for i, query in enumerate(queries):
            ends_B.append(len(rows_B[i]) + (ends_B[-1] if i else 0))  # NumPy's sum takes ten times as long
            if query.weights.shift:
                scores_B[i] = scores_B[i] + np.float32(query.weights.shift)
        rows_N, scores_N = np.concatenate(rows_B), np.concatenate(scores_B)
        if not np.isfinite(scores_N).all():
            i = int(np.searchsorted(ends_B, np.isfinite(scores_N).argmin(), side="right"))
            raise InvalidRequestError(
                "expected a query whose scores float32 can hold, received one that overflows", field=f"queries.{i}"
            )
        propensities_N = None
        if explored_B:
            propensities_N = np.ones(len(rows_N), np.float32)
            for i, explored in explored_B.items():
                propensities_N[ends_B[i] - len(rows_B[i]) : ends_B[i]] = explored.propensities_K
        labels = self.catalogue.answered(rows_N)
        restrictions_B = [query.restrictions for query in queries]
        return Retrieval(
            release=self.name,
            queries=queries,
            batch=batch,
            labels_N=labels.json_N,
            answered_rows_N=rows_N,
            tails=tails,
            unshifted_B=unshifted_B,
            prices=prices,
            priors=self.bundle.priors,
            has_cooccurrence=self.bundle.cooccurrence is not None,
            bias_removal_B=bias_removal_B,
            popularity_B=popularity_B,
            cooccurrence_B=cooccurrence_B,
            # Set by `retrieve`; nothing is promised for similar labels.
            judged_at_B=np.full(len(queries), np.nan, np.float32),
            rows_N=labels.rows_N,
            scores_N=scores_N,
            ends_B=ends_B,
            buckets_N=labels.buckets_N,
            counts_N=labels.counts_N,
            restrictions_B=restrictions_B if any(restrictions_B) else None,
            propensities_N=propensities_N,
            explored=add_up_slots(explored_B.values()) if explored_B else {},
            floored=(len(floored), unmet),
            unknown={
                "exclude": sum([query.unknown_exclude for query in queries]),
                "allow": sum([query.unknown_allow for query in queries]),
            },
            promise_holds=self._promise_holds,
            seconds={"encode": encoded - started, "search": searched - encoded, "answer": perf_counter() - searched},
        )
