"""Labels that changed after a release was built: added ones are scored beside the index, hidden ones kept out.

Rows of a label are 0 … L − 1 in the catalogue and L … L + M − 1 in an overlay. A label of the catalogue that was
embedded again is answered from its overlay row; its catalogue row is out of the search.

Legend: `L` labels of the release, `M` rows of the overlay, `B` queries, `b` some of them, `C` candidates, `K` results,
`E` coordinates of an augmented row, `R` catalogue rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from longtail.bundle import Bundle, FixedLabelsError, LabelChanges, LabelRecord, Patch, Upsert
from longtail.bundle.added_labels import NEW_LABEL, AddedLabels, LabelAdder
from longtail.bundle.arrays import Float32, Int8, Int64
from longtail.index import Filter, kth_best, no_results, top_k
from longtail.serving.core.ranking import NO_ROWS, HidingSearcher, LabelSearcher
from longtail.serving.errors import InvalidRequestError, NoLabelTowerError, serving_errors

logger = logging.getLogger(__name__)

_SCORES_AT_ONCE = 1 << 22
"""Exact scores held at a time, at most: 16 MiB."""


@dataclass(frozen=True)
class Overlay:
    """A release's labels with the changes since it was built. Immutable: `with_changes` makes another one.

    Attributes:
        base: number of labels L that the release was built with; the first overlay row.
        changes: all changes so far, whether they concern this release or not.
        added: ids, embeddings, counts, log p_n, buckets, biases, priors and display columns of the M rows, in order;
            `catalogue_rows` says which of them replace a label of the catalogue.
        hidden: int64 [R], catalogue rows that are hidden, ascending.
        masked: int64 [R], catalogue rows that are not searched: hidden or replaced, ascending.
        skipped: why a change is not served with this release, by id.
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
        """Make the overlay of a release without any change.

        Args:
            max_new_labels: largest M that `check` lets come about.

        Raises:
            BundleInvariantError: a display column that JSON cannot hold.
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
        """How many labels were added that the release does not have."""
        return int(np.count_nonzero(self.added.catalogue_rows == NEW_LABEL))

    def hides(self, row: int) -> bool:
        """Whether a row of the catalogue is hidden."""
        place = int(np.searchsorted(self.hidden, row))
        return place < len(self.hidden) and int(self.hidden[place]) == row

    def load_tower(self) -> None:
        """Load the label tower, if there is one; raises UnservableReleaseError for one that does not run."""
        with serving_errors("labels"), suppress(FixedLabelsError):
            self._release.adder.load()

    def check(self, records: Sequence[Upsert]) -> None:
        """Refuse labels of one request that could not be served, before they are acknowledged.

        Raises:
            NoLabelTowerError: the release has none, or a tree p_n(y|x).
            InvalidRequestError: names the label and field that do not fit, or that there is no room.
            UnservableReleaseError: a label tower that does not run.
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
                f"expected at most {max(room, 0)} more labels beside the index, which holds "
                f"{len(self.added)} of {self._release.max_new_labels}, received {len(more)}: build a release with "
                "those added so far (longtail-index merge)",
                field="labels",
            )

    def check_patches(self, patches: Sequence[Patch]) -> None:
        """Refuse columns that could not be served, before they are acknowledged.

        Raises:
            NoLabelTowerError: the release has a tree p_n(y|x).
            InvalidRequestError: names the label and the column that does not fit, or that there is no room.
        """
        self.check([self._release.adder.of_patch(self.changes, patch) for patch in patches])

    def with_changes(self, records: Sequence[LabelRecord]) -> Overlay:
        """Return the overlay after some more changes, in the log's order. Only what they add is embedded.

        A change that this release cannot serve is skipped with a warning; it is not lost, for the log has it.

        Raises:
            UnservableReleaseError: a label tower that does not run.
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
                "%d changed labels are not served with this release, they stay in the log; the first is %r: %s",
                len(refused), id_[:100], why,
            )  # fmt: skip
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
    """The release as it was built, which all its overlays share."""

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
    """Searches an index and scores the rows of an overlay; best first, whichever they come from.

    Args:
        base: finds rows 0 … first − 1.
        first: number of labels L in the index; row of the first overlay label.
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
        """Find as `index.Searcher.search`, over the rows of both.

        Returns:
            Scores float32 [B, K], descending, and rows int64 [B, K]; −inf and −1 where too few are eligible.

        Raises:
            QueryError: names the query and the row or bucket that does not exist.
        """
        below = None if filters is None else [filter_ and self._of_base(filter_) for filter_ in filters]
        scores_BK, rows_BK = self._base.search(queries_BE, min(k, self._first), below)
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

    def _of_base(self, filter_: Filter) -> Filter | None:
        """Get the part of a filter that concerns labels of the index; None if it leaves them all in."""
        exclude, allow = (
            rows if rows is None else rows[rows < self._first] for rows in (filter_.exclude, filter_.allow)
        )
        rules_out = allow is not None or filter_.buckets is not None or filter_.selection is not None
        if not rules_out and (exclude is None or not exclude.size):
            return None
        return Filter(exclude, allow, filter_.buckets, filter_.selection)

    def _of_added(self, filter_: Filter) -> Filter:
        """Get the part of a filter that concerns labels of the overlay, its rows counted from the overlay's first."""
        exclude, allow = (
            None if rows is None else rows[rows >= self._first] - self._first
            for rows in (filter_.exclude, filter_.allow)
        )
        return Filter(exclude, allow, filter_.buckets, filter_.beyond)
