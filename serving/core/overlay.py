"""Apply label changes since a release's build: score added labels in addition to the index, and hide others.

Rows 0 … L − 1 are labels of the catalogue, rows L … L + M − 1 labels of an overlay. If a label of the catalogue was
embedded again, its overlay row is answered, and its catalogue row is excluded from searches.

Legend: `L` labels of the release, `M` rows of the overlay, `B` queries, `b` some of them, `C` candidates, `K` results,
`E` coordinates of an augmented row, `R` catalogue rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from longtail.bundle import Bundle, FixedLabelsError, LabelChanges, LabelRecord, Patch, Upsert
from longtail.bundle.added_labels import NEW_LABEL, AddedLabels, LabelAdder
from longtail.bundle.arrays import Float32, Int8, Int64
from longtail.index import Filter, kth_best, no_results, top_k
from longtail.serving.core.ranking import NO_ROWS, HidingSearcher, LabelSearcher
from longtail.serving.errors import InvalidRequestError, NoLabelTowerError, serving_errors

logger = logging.getLogger(__name__)

_SCORES_AT_ONCE = 1 << 22
"""Largest number of exact scores held at once: 16 MiB."""


@dataclass(frozen=True)
class Overlay:
    """A release's labels with the changes since its build. Immutable: `with_changes` returns a new one.

    Attributes:
        base: number of labels L that the release was built with; the first overlay row.
        labels: number of all rows, L + M.
        changes: all changes so far, also those that do not concern this release.
        added: ids, embeddings, counts, log p_n, buckets, biases, priors and display columns of the M rows, in order;
            `catalogue_rows` has the catalogue row that each replaces.
        rows_ME: augmented rows of the overlay, float32.
        row_of: overlay row by label id.
        hidden: int64 [R], hidden catalogue rows, ascending.
        masked: int64 [R], catalogue rows excluded from searches: hidden or replaced, ascending.
        skipped: reason why a change is not served with this release, by label id.
        searcher: finds labels of the catalogue and of the overlay.
    """

    base: int
    labels: int
    changes: LabelChanges
    added: AddedLabels
    rows_ME: Float32
    row_of: Mapping[str, int]
    hidden: Int64
    masked: Int64
    skipped: Mapping[str, str]
    searcher: LabelSearcher
    _visible: LabelSearcher
    _release: _BuiltRelease

    @classmethod
    def as_built(
        cls, bundle: Bundle, searcher: HidingSearcher, rows: Mapping[str, int], *, max_new_labels: int
    ) -> Overlay:
        """Create the overlay of a release without changes.

        Args:
            rows: catalogue row by label id.
            max_new_labels: largest M that `check` allows.

        Raises:
            BundleInvariantError: JSON cannot represent a display column.
        """
        adder = LabelAdder(bundle)
        release = _BuiltRelease(adder, rows, bundle, searcher, max_new_labels)
        added, _ = adder.add([])
        return cls(
            base=bundle.manifest.labels,
            labels=bundle.manifest.labels,
            changes=LabelChanges(),
            added=added,
            rows_ME=release.augmented(added),
            row_of={},
            hidden=NO_ROWS,
            masked=NO_ROWS,
            skipped={},
            searcher=searcher,
            _visible=searcher,
            _release=release,
        )

    @property
    def new_labels(self) -> int:
        """Count the added labels that the release was not built with."""
        return int(np.count_nonzero(self.added.catalogue_rows == NEW_LABEL))

    def hides(self, row: int) -> bool:
        """Return whether a row of the catalogue is hidden."""
        place = int(np.searchsorted(self.hidden, row))
        return place < len(self.hidden) and int(self.hidden[place]) == row

    def served(self, rows_N: Int64) -> Int64:
        """Replace the rows of catalogue labels that were embedded again by their overlay rows, int64 [N]."""
        replaced_R, replacing_R = self._replaced
        if not replaced_R.size:
            return rows_N
        places_N = np.minimum(np.searchsorted(replaced_R, rows_N), len(replaced_R) - 1)
        return np.where(replaced_R[places_N] == rows_N, replacing_R[places_N], rows_N)

    def built(self, rows_N: Int64) -> Int64:
        """Get the catalogue rows of rows, int64 [N]; −1 for labels that the release was not built with."""
        above_N = rows_N >= self.base
        if not above_N.any():
            return rows_N
        built_N = rows_N.copy()
        built_N[above_N] = self.added.catalogue_rows[rows_N[above_N] - self.base]
        return built_N

    @cached_property
    def _replaced(self) -> tuple[Int64, Int64]:
        """Return the catalogue rows that the overlay replaces, ascending, and the overlay row of each."""
        places_R = np.flatnonzero(self.added.catalogue_rows != NEW_LABEL)
        places_R = places_R[np.argsort(self.added.catalogue_rows[places_R])]
        return self.added.catalogue_rows[places_R], places_R + self.base

    def after(self, upsert: Upsert) -> Upsert:
        """Complete an upsert by the columns and priors that earlier changes of its label have set."""
        return self._release.adder.after(self.changes, upsert)

    def load_tower(self) -> None:
        """Load the label tower, if there is one; raises UnservableReleaseError if it does not run."""
        with serving_errors("labels"), suppress(FixedLabelsError):
            self._release.adder.load()

    def check(self, records: Sequence[Upsert]) -> None:
        """Refuse the labels of a request that could not be served, before they are acknowledged.

        Raises:
            NoLabelTowerError: the release has no label tower, or has a tree p_n(y|x).
            InvalidRequestError: a field of a label is wrong, or there is no room; the error names it.
            UnservableReleaseError: the label tower does not run.
        """
        with serving_errors("labels"):
            try:
                self._release.adder.check(records)
            except FixedLabelsError as error:
                raise NoLabelTowerError(str(error), field="labels") from error
        room = self._release.max_new_labels - len(self.added)
        more = {record.id for record in records if record.id not in self.row_of}
        if more and len(more) > room:
            raise InvalidRequestError(
                f"expected at most {max(room, 0)} more labels, as {len(self.added)} of "
                f"{self._release.max_new_labels} are added already, received {len(more)}; build a release with "
                "the added labels (longtail-index merge)",
                field="labels",
            )

    def check_patches(self, patches: Sequence[Patch]) -> None:
        """Refuse the columns of a request that could not be served, before they are acknowledged.

        Raises:
            NoLabelTowerError: the release has a tree p_n(y|x).
            InvalidRequestError: a column of a label is wrong, or there is no room; the error names it.
        """
        self.check([self._release.adder.of_patch(self.changes, patch) for patch in patches])

    def undone_patches(self, before: Overlay) -> list[str]:
        """Return ids of labels with patches that `before` applies, and that are older than this release's table."""
        ours, theirs = self._release.adder, before._release.adder
        return [
            id_
            for id_, patches in self.changes.patches.items()
            if any(ours.supersedes(id_, patch.at) and not theirs.supersedes(id_, patch.at) for patch in patches)
        ]

    def with_changes(self, records: Sequence[LabelRecord]) -> Overlay:
        """Return the overlay after further changes, in the log's order; only new labels are embedded.

        A change that this release cannot serve is skipped with a warning, and stays in the log for later releases.

        Raises:
            UnservableReleaseError: the label tower does not run.
        """
        if not records:
            return self
        release, changes = self._release, self.changes.after(records)
        touched = dict.fromkeys(record.id for record in records)
        upserts = [one for id_ in touched if (one := release.adder.change_of(changes, id_)) is not None]
        with serving_errors("labels"):
            more, refused = release.adder.add(upserts)
        if refused:
            id_, why = next(iter(refused.items()))
            logger.warning(
                "%d changed labels are not served with this release, but stay in the log; the first is %r: %s",
                len(refused), id_[:100], why,
            )  # fmt: skip
        # A label that changes again gets a new row at the end, so its old row goes.
        gone = [self.row_of[id_] - self.base for id_ in touched if id_ in self.row_of]
        kept = np.delete(np.arange(len(self.added)), gone)
        added = (self.added.take(kept) if gone else self.added).followed_by(more)
        ids = added.ids if gone else more.ids
        places = range(self.base + len(added) - len(ids), self.base + len(added))
        row_of = ({} if gone else dict(self.row_of)) | dict(zip(ids, places, strict=True))
        rows_ME = np.concatenate([self.rows_ME[kept] if gone else self.rows_ME, release.augmented(more)])
        hidden = np.union1d(
            np.setdiff1d(self.hidden, release.catalogue_rows(touched)),
            release.catalogue_rows(id_ for id_ in touched if id_ in changes.hidden),
        )
        masked = np.union1d(hidden, added.catalogue_rows[added.catalogue_rows != NEW_LABEL])
        # A new masked searcher costs milliseconds and loses its caches: only if the mask has changed.
        visible = self._visible
        if not np.array_equal(masked, self.masked):
            visible = release.searcher.without(masked) if masked.size else release.searcher
        return replace(
            self,
            labels=self.base + len(added),
            changes=changes,
            added=added,
            rows_ME=rows_ME,
            row_of=row_of,
            hidden=hidden,
            masked=masked,
            skipped={id_: why for id_, why in self.skipped.items() if id_ not in touched} | refused,
            searcher=OverlaySearcher(visible, self.base, rows_ME, added.buckets) if len(added) else visible,
            _visible=visible,
        )


@dataclass(frozen=True)
class _BuiltRelease:
    """The parts of a release as built, which all its overlays share."""

    adder: LabelAdder
    rows: Mapping[str, int]
    bundle: Bundle
    searcher: HidingSearcher
    max_new_labels: int

    def augmented(self, added: AddedLabels) -> Float32:
        """Compute augmented rows, float32 [M, E]."""
        rows = self.bundle.augmentation.rows
        return rows(added.embeddings, added.log_pn, added.bias, added.log_popularity, added.priors)

    def catalogue_rows(self, ids: Iterable[str]) -> Int64:
        """Get the rows of those ids that the catalogue has, int64."""
        return np.array([self.rows[id_] for id_ in ids if id_ in self.rows], np.int64)


class OverlaySearcher:
    """Searches an index, scores all rows of an overlay, and merges both.

    Args:
        base: searches the rows 0 … first − 1.
        first: number of labels L in the index, which is the row of the first overlay label.
        rows_ME: float32, augmented rows of the labels first, first + 1, …
    """

    def __init__(self, base: LabelSearcher, first: int, rows_ME: Float32, buckets_M: Int8) -> None:
        self.labels = first + len(rows_ME)
        self._base = base
        self._first = first
        self._rows_ME = rows_ME
        self._buckets_M = buckets_M

    def search(
        self, queries_BE: Float32, k: int, filters: Sequence[Filter | None] | None = None
    ) -> tuple[Float32, Int64]:
        """Find the k best eligible rows of index and overlay, like `index.Searcher.search`.

        Returns:
            Scores float32 [B, K], descending, and rows int64 [B, K]; −inf and −1 where too few are eligible.

        Raises:
            QueryError: a row or bucket does not exist; the error names the query.
        """
        below = None if filters is None else [filter_ and self._of_base(filter_) for filter_ in filters]
        scores_BK, rows_BK = self._base.search(queries_BE, min(k, self._first), below)
        # Overlay rows below the index's k-th best cannot be in the answer.
        least_B, found = kth_best(scores_BK, k), []
        step = max(1, _SCORES_AT_ONCE // len(self._rows_ME))
        for start in range(0, len(queries_BE), step):
            scores_bM = queries_BE[start : start + step] @ self._rows_ME.T
            for query, scores_M in enumerate(scores_bM, start=start):
                places_C = np.flatnonzero(scores_M >= least_B[query])
                if filters is not None and (filter_ := filters[query]) is not None:
                    places_C = places_C[self._of_added(filter_).mask(self._buckets_M)[places_C]]
                found.append((scores_M[places_C], places_C + self._first))
        own_BC, own_rows_BC = no_results(len(queries_BE), max((len(rows_C) for _, rows_C in found), default=0))
        for query, (scores_C, rows_C) in enumerate(found):
            own_BC[query, : len(rows_C)], own_rows_BC[query, : len(rows_C)] = scores_C, rows_C
        return top_k([scores_BK, own_BC], [rows_BK, own_rows_BC], k)

    def scores(self, query_E: Float32, rows_R: Int64, filter_: Filter | None = None) -> Float32:
        """Score some rows of index and overlay exactly, like `index.Searcher.scores`."""
        split = int(np.searchsorted(rows_R, self._first))
        below_R = self._base.scores(query_E, rows_R[:split], filter_ and self._of_base(filter_))
        if split == len(rows_R):
            return below_R
        places_R = rows_R[split:] - self._first
        above_R = self._rows_ME[places_R] @ query_E
        if filter_ is not None:
            above_R[~self._of_added(filter_).mask(self._buckets_M)[places_R]] = -np.inf
        return np.concatenate([below_R, above_R])

    def _of_base(self, filter_: Filter) -> Filter | None:
        """Get the part of a filter for labels of the index; None if all of them pass."""
        exclude, allow = (
            rows if rows is None else rows[rows < self._first] for rows in (filter_.exclude, filter_.allow)
        )
        rules_out = allow is not None or filter_.buckets is not None or filter_.selection is not None
        if not rules_out and (exclude is None or not exclude.size):
            return None
        return Filter(exclude, allow, filter_.buckets, filter_.selection)

    def _of_added(self, filter_: Filter) -> Filter:
        """Get the part of a filter for the overlay, with rows counted from its first."""
        exclude, allow = (
            None if rows is None else rows[rows >= self._first] - self._first
            for rows in (filter_.exclude, filter_.allow)
        )
        return Filter(exclude, allow, filter_.buckets, filter_.beyond)
