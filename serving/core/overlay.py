"""Apply label changes since a release's build: score added labels in addition to the index, and hide others.

Rows 0 … L − 1 are labels of the catalogue, rows L … L + M − 1 labels of an overlay. If a label of the catalogue was
embedded again, its overlay row is answered, and its catalogue row is excluded from searches. A change of one label
costs one label, and copies of a few arrays of L / 8 or M numbers. A label that changes again gets a new row, and its
earlier row is retired. No row is written twice, so an overlay of a running request keeps its rows while later overlays
append to the same arrays.

Legend: `L` labels of the release, `M` rows of the overlay, `B` queries, `b` some of them, `C` candidates, `K` results,
`E` coordinates of an augmented row, `R` catalogue rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from longtail.bundle import Bundle, Features, FixedLabelsError, InputError, LabelChanges, LabelRecord, Patch, Upsert
from longtail.bundle.added_labels import NEW_LABEL, AddedLabels, LabelAdder
from longtail.bundle.arrays import Bools, Float32, Int8, Int64
from longtail.bundle.sets import is_in, with_members, without_members
from longtail.index import Filter
from longtail.index.search.candidates import kth_best, no_results, top_k
from longtail.index.search.eligible import Eligible
from longtail.serving.core.ranking import NO_ROWS, HidingSearcher, LabelSearcher
from longtail.serving.errors import InvalidRequestError, NoLabelTowerError, serving_errors

logger = logging.getLogger(__name__)

_SCORES_AT_ONCE = 1 << 22
"""Largest number of exact scores held at once: 16 MiB."""
_MOST_RETIRED = 256
"""Retired rows that searches score in vain; beyond, at most one in four of the rows in use."""
_AUGMENTED = "augmented"
_Columns = dict[str, npt.NDArray[Any]]


class _Arrays:
    """Growing columns, and the rows of each label."""

    def __init__(self, columns: _Columns, length: int) -> None:
        self.length = length
        self.columns = columns
        self.newest: dict[str, int] = {id_: row for row, id_ in enumerate(columns["ids"][:length])}
        self.older: dict[int, int] = {}
        """Row of the same label before a row, where there is one."""

    def append(self, more: _Columns) -> None:
        """Append rows behind the last; earlier views stay valid."""
        begin, self.length = self.length, self.length + len(more["ids"])
        if self.length > len(self.columns["ids"]):
            # Twice the size, so that adding labels one by one copies each row a few times at most.
            room = (2 * self.length,)
            self.columns = {name: _resized(column, begin, *room) for name, column in self.columns.items()}
        for name, column in self.columns.items():
            column[begin : self.length] = more[name]
        for row, id_ in enumerate(more["ids"], start=begin):
            if id_ in self.newest:
                self.older[row] = self.newest[id_]
            self.newest[id_] = row


@dataclass(frozen=True)
class OverlayRows:
    """Rows of changed labels, retired ones included. Immutable.

    Attributes:
        added: ids, embeddings, counts, log p_n, buckets, biases, priors and display columns, M rows.
        augmented_ME: augmented rows, float32.
        in_use_M: bool, false for retired rows.
        count: number of rows in use.
        origin: the same object for rows that continue each other.
    """

    added: AddedLabels
    augmented_ME: Float32
    in_use_M: Bools
    count: int
    origin: _Arrays

    @classmethod
    def create(cls, added: AddedLabels, augmented_ME: Float32) -> OverlayRows:
        """Create rows that are all in use."""
        return cls._create_views(
            _Arrays(_collect_columns(added, augmented_ME), len(added)), np.ones(len(added), np.bool_)
        )

    @classmethod
    def _create_views(cls, arrays: _Arrays, in_use_M: Bools) -> OverlayRows:
        """Create views of all rows that arrays hold now."""
        columns = {name: column[: arrays.length] for name, column in arrays.columns.items()}
        augmented_ME = columns.pop(_AUGMENTED)
        added: Any = {field.name: columns.get(field.name) for field in fields(AddedLabels)}
        return cls(AddedLabels(**added), augmented_ME, in_use_M, int(np.count_nonzero(in_use_M)), arrays)

    def __len__(self) -> int:
        return len(self.in_use_M)

    def find_row(self, id_: str) -> int | None:
        """Get the row in use of a label, 0 .. M − 1; None without one."""
        row = self.origin.newest.get(id_)
        while row is not None and row >= len(self):  # appended since
            row = self.origin.older.get(row)
        return None if row is None or not self.in_use_M[row] else row

    def changed(self, retired: Sequence[int], more: AddedLabels, augmented_BE: Float32) -> OverlayRows:
        """Append rows, and retire others by their numbers."""
        if not len(self):  # `NO_OVERLAY_ROWS` lacks the columns of this release
            return OverlayRows.create(more, augmented_BE)
        arrays, columns = self.origin, _collect_columns(more, augmented_BE)
        # A copy, because running requests still read the old overlay's.
        in_use_M = np.append(self.in_use_M, np.ones(len(more), np.bool_))
        in_use_M[np.array(retired, np.int64)] = False
        count = self.count - len(retired) + len(more)
        if len(self) != arrays.length:  # another overlay continued these rows
            arrays = self._copy(np.arange(len(self)))
        arrays.append(columns)
        rows = OverlayRows._create_views(arrays, in_use_M)
        if len(rows) - count <= max(_MOST_RETIRED, count // 4):
            return rows
        return OverlayRows._create_views(rows._copy(np.flatnonzero(in_use_M)), np.ones(count, np.bool_))

    def _copy(self, rows_B: Int64) -> _Arrays:
        """Copy some rows to arrays of their own."""
        return _Arrays({name: column[rows_B] for name, column in self.origin.columns.items()}, len(rows_B))


def _collect_columns(added: AddedLabels, augmented_ME: Float32) -> _Columns:
    columns: _Columns = {_AUGMENTED: augmented_ME}
    for name, column in vars(added).items():
        if isinstance(column, list):
            columns[name] = np.empty(len(column), np.object_)
            columns[name][:] = column
        elif column is not None:
            columns[name] = column
    return columns


NO_OVERLAY_ROWS = OverlayRows(
    AddedLabels(
        [], NO_ROWS, np.empty((0, 0), np.float32), NO_ROWS, np.empty(0, np.float32), None, np.empty(0, np.int8), None,
        [], np.empty((0, 0), np.float32), np.empty((0, 2), np.int64),
    ),
    np.empty((0, 0), np.float32), np.empty(0, np.bool_), 0, _Arrays({"ids": np.empty(0, np.object_)}, 0),
)  # fmt: skip
"""Rows of a release without changes. Most releases stay so, so that none has rows of its own before the first."""


def _resized(column: npt.NDArray[Any], length: int, room: int) -> npt.NDArray[Any]:
    """Copy the first rows of a column into a longer one."""
    longer = np.empty((room, *column.shape[1:]), column.dtype)
    longer[:length] = column[:length]
    return longer


@dataclass(frozen=True)
class Overlay:
    """A release's labels with the changes since its build. Immutable: `with_changes` returns a new one.

    Attributes:
        base: number of labels L that the release was built with; the first overlay row.
        changes: all changes so far, including changes that do not concern this release.
        rows: the M rows, retired ones included; `rows.added.catalogue_rows` has the catalogue row that each replaces.
        hidden: int64 [R], hidden catalogue rows, ascending.
        replaced: int64 [R], catalogue rows whose labels have an overlay row, ascending.
        replacing: int64 [R], the overlay row of each.
        masked: int64 [R], catalogue rows excluded from searches: hidden or replaced, ascending.
        skipped: reason why a change is not served with this release, by label id.
        searcher: finds labels of the catalogue and of the overlay.
    """

    base: int
    changes: LabelChanges
    rows: OverlayRows
    hidden: Int64
    replaced: Int64
    replacing: Int64
    masked: Int64
    skipped: Mapping[str, str]
    searcher: LabelSearcher
    _visible: HidingSearcher
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
        return cls(
            base=bundle.manifest.labels,
            changes=LabelChanges(),
            rows=NO_OVERLAY_ROWS,
            hidden=NO_ROWS,
            replaced=NO_ROWS,
            replacing=NO_ROWS,
            masked=NO_ROWS,
            skipped={},
            searcher=searcher,
            _visible=searcher,
            _release=_BuiltRelease(rows, bundle, searcher, max_new_labels),
        )

    @property
    def labels(self) -> int:
        """Return the number of all rows, L + M."""
        return self.base + len(self.rows)

    @property
    def added(self) -> AddedLabels:
        """Return the columns of the M rows."""
        return self.rows.added

    @property
    def new_labels(self) -> int:
        """Count the added labels that the release was not built with."""
        return self.rows.count - len(self.replaced)

    @property
    def new_rows(self) -> Int64:
        """List the rows of labels that are new, int64 [N], ascending."""
        return self.base + np.flatnonzero(self.rows.in_use_M & (self.added.catalogue_rows == NEW_LABEL))

    def find_row(self, id_: str) -> int | None:
        """Get a label's overlay row, from L on; None without one."""
        row = self.rows.find_row(id_)
        return None if row is None else self.base + row

    def searcher_within(self, labels: Eligible, in_use_M: Bools) -> LabelSearcher:
        """Create a searcher of some labels and overlay rows, bool [M]."""
        visible = self._visible.restrict(labels)
        if not self.rows.count:
            return visible
        rows = replace(self.rows, in_use_M=in_use_M, count=int(np.count_nonzero(in_use_M)))
        return OverlaySearcher(visible, self.base, rows)

    def hides(self, row: int) -> bool:
        """Return whether a row of the catalogue is hidden."""
        position = int(np.searchsorted(self.hidden, row))
        return position < len(self.hidden) and int(self.hidden[position]) == row

    def find_served_rows(self, rows_N: Int64) -> Int64:
        """Replace embedded-again catalogue rows by overlay rows, int64 [N]."""
        if not self.replaced.size:
            return rows_N
        positions_N = np.minimum(np.searchsorted(self.replaced, rows_N), len(self.replaced) - 1)
        return np.where(self.replaced[positions_N] == rows_N, self.replacing[positions_N], rows_N)

    def find_built_rows(self, rows_N: Int64) -> Int64:
        """Get the catalogue rows of rows, int64 [N]; −1 for labels that the release was not built with."""
        above_N = rows_N >= self.base
        if not above_N.any():
            return rows_N
        built_N = rows_N.copy()
        built_N[above_N] = self.added.catalogue_rows[rows_N[above_N] - self.base]
        return built_N

    def complete(self, upsert: Upsert) -> Upsert:
        """Complete an upsert by what earlier changes have set."""
        return self._release.adder.complete(self.changes, upsert)

    def load_tower(self) -> None:
        """Load the label tower; raises UnservableReleaseError if it does not run."""
        with serving_errors("labels"):
            self._release.adder.load()

    def check(self, records: Sequence[Upsert]) -> None:
        """Refuse labels that could not be served.

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
        room = self._release.max_new_labels - self.rows.count
        more = {record.id for record in records if self.find_row(record.id) is None}
        if more and len(more) > room:
            raise InvalidRequestError(
                f"expected at most {max(room, 0)} more labels, as {self.rows.count} of "
                f"{self._release.max_new_labels} are added already, received {len(more)}; build a release with "
                "the added labels (longtail-index merge)",
                field="labels",
            )

    def augmented(self, rows_N: Int64) -> Float32:
        """Get the augmented rows of labels, float32 [N, E]."""
        above_N = rows_N >= self.base
        rows_NE = self._release.bundle.rows(np.where(above_N, 0, rows_N))
        if above_N.any():  # `NO_OVERLAY_ROWS` has rows of another width
            rows_NE[above_N] = self.rows.augmented_ME[rows_N[above_N] - self.base]
        return rows_NE

    def embed(self, features: Features) -> Float32:
        """Compute a label's augmented row, float32 [1, E]; raises like `check`."""
        adder, upsert = self._release.adder, Upsert(id="", at=datetime.now(UTC), features=dict(features))
        with serving_errors("labels"):
            try:
                adder.check([upsert])
            except InputError as error:
                raise InvalidRequestError(error.message, field=error.field) from error
            except FixedLabelsError as error:
                raise NoLabelTowerError(str(error), field="features") from error
        return self._release.augmented(adder.add([upsert])[0])

    def check_patches(self, patches: Sequence[Patch]) -> None:
        """Refuse columns that could not be served.

        Raises:
            NoLabelTowerError: the release has a tree p_n(y|x).
            InvalidRequestError: a column of a label is wrong, or there is no room; the error names it.
        """
        changes, upserts = self.changes, list[Upsert]()
        for patch in patches:  # a column may fit only after earlier patches
            upserts.append(
                self._release.adder.complete(changes, self._release.adder.patch_to_upsert(self.changes, patch))
            )
            changes = changes.apply([patch])
        self.check(upserts)

    def undone_patches(self, before: Overlay) -> list[str]:
        """List patched labels that a newer table overrides."""
        ours, theirs = self._release.adder, before._release.adder
        return [
            id_
            for id_, patches in sorted(self.changes.patches.items())
            if any(ours.supersedes(id_, patch.at) and not theirs.supersedes(id_, patch.at) for patch in patches)
        ]

    def with_changes(self, records: Sequence[LabelRecord], changes: LabelChanges | None = None) -> Overlay:
        """Return the overlay after further changes, in the log's order; only new labels are embedded.

        A change that this release cannot serve is skipped with a warning, and stays in the log for later releases.

        Args:
            changes: all changes, with these; None: computed here.

        Raises:
            UnservableReleaseError: the label tower does not run.
        """
        if not records:
            return self
        release = self._release
        changes = self.changes.apply(records) if changes is None else changes
        touched = dict.fromkeys(record.id for record in records)
        upserts = [upsert for id_ in touched if (upsert := release.adder.find_change(changes, id_)) is not None]
        with serving_errors("labels"):
            more, refused = release.adder.add(upserts)
        if refused:
            id_, why = next(iter(refused.items()))
            logger.warning(
                "%d changed labels are not served with this release, but stay in the log; the first is %r: %s",
                len(refused), id_[:100], why,
            )  # fmt: skip
        retired = [row for id_ in touched if (row := self.rows.find_row(id_)) is not None]
        rows = self.rows.changed(retired, more, release.augmented(more))
        touched_R = release.catalogue_rows(touched)
        hidden = without_members(self.hidden, touched_R)
        hidden = with_members(hidden, release.catalogue_rows(id_ for id_ in touched if id_ in changes.hidden))
        replaced, replacing = self._replaced_after(rows, touched_R)
        masked_R = touched_R[is_in(touched_R, hidden) | is_in(touched_R, replaced)]
        masked = with_members(without_members(self.masked, without_members(touched_R, masked_R)), masked_R)
        # A new masked searcher loses its caches: only if the mask has changed.
        visible = self._visible
        if is_in(without_members(touched_R, masked_R), self.masked).any():
            # A label is visible again, but `without` can only hide: begin with the built searcher.
            visible = release.searcher.without(masked) if masked.size else release.searcher
        elif len(masked) > len(self.masked):
            visible = visible.without(without_members(masked_R, self.masked))
        skipped = self.skipped
        if refused or not skipped.keys().isdisjoint(touched):
            skipped = {id_: why for id_, why in skipped.items() if id_ not in touched} | refused
        return replace(
            self,
            changes=changes,
            rows=rows,
            hidden=hidden,
            replaced=replaced,
            replacing=replacing,
            masked=masked,
            skipped=skipped,
            searcher=OverlaySearcher(visible, self.base, rows) if rows.count else visible,
            _visible=visible,
        )

    def _replaced_after(self, rows: OverlayRows, touched_R: Int64) -> tuple[Int64, Int64]:
        """Update `replaced` and `replacing` after changes, ascending."""
        begin, replaced, replacing = len(self.rows), self.replaced, self.replacing.copy()
        if rows.origin is not self.rows.origin:  # all rows have other numbers
            begin, replaced, replacing = 0, NO_ROWS, NO_ROWS
        appended_R = begin + np.flatnonzero(rows.in_use_M[begin:] & (rows.added.catalogue_rows[begin:] != NEW_LABEL))
        appended_R = appended_R[np.argsort(rows.added.catalogue_rows[appended_R])]
        now_R = rows.added.catalogue_rows[appended_R]
        gone_R = touched_R[is_in(touched_R, replaced) & ~is_in(touched_R, now_R)]
        new_R = now_R[~is_in(now_R, replaced)]
        if gone_R.size:
            replacing, replaced = (np.delete(part, np.searchsorted(replaced, gone_R)) for part in (replacing, replaced))
        if new_R.size:
            replacing = np.insert(replacing, np.searchsorted(replaced, new_R), 0)
            replaced = with_members(replaced, new_R)
        replacing[np.searchsorted(replaced, now_R)] = self.base + appended_R
        return replaced, replacing


@dataclass(frozen=True)
class _BuiltRelease:
    """Parts of a release that all its overlays share."""

    rows: Mapping[str, int]
    bundle: Bundle
    searcher: HidingSearcher
    max_new_labels: int

    @cached_property
    def adder(self) -> LabelAdder:
        """Get what embeds labels; only a label tower or a change needs it."""
        return LabelAdder(self.bundle)

    def augmented(self, added: AddedLabels) -> Float32:
        """Compute augmented rows, float32 [M, E]."""
        rows = self.bundle.augmentation.rows
        return rows(added.embeddings, added.log_pn, added.bias, added.log_popularity, added.priors)

    def catalogue_rows(self, ids: Iterable[str]) -> Int64:
        """Get the catalogue's rows of ids, int64, ascending."""
        return np.sort(np.array([self.rows[id_] for id_ in ids if id_ in self.rows], np.int64))


class OverlaySearcher:
    """Searches an index and all rows of an overlay.

    Args:
        base: searches the rows 0 … first − 1.
        first: number of labels L in the index, which is the row of the first overlay label.
    """

    def __init__(self, base: LabelSearcher, first: int, rows: OverlayRows) -> None:
        self.labels = first + len(rows)
        self._base = base
        self._first = first
        self._rows_ME = rows.augmented_ME
        self._buckets_M: Int8 = rows.added.buckets
        # Usually no row is retired, and searches then skip the mask.
        self._in_use_M: Bools | None = None if rows.count == len(rows) else rows.in_use_M

    def search(
        self, queries_BE: Float32, k: int, filters: Sequence[Filter | None] | None = None
    ) -> tuple[Float32, Int64]:
        """Find the k best eligible rows of index and overlay.

        Returns:
            Scores float32 [B, K], descending, and rows int64 [B, K]; −inf and −1 where too few are eligible.

        Raises:
            QueryError: a row or bucket does not exist; the error names the query.
        """
        below = None if filters is None else [filter_ and self._narrow_to_base(filter_) for filter_ in filters]
        scores_BK, rows_BK = self._base.search(queries_BE, min(k, self._first), below)
        # Overlay rows below the index's k-th best cannot be in the answer.
        least_B, candidates = kth_best(scores_BK, k), []
        step = max(1, _SCORES_AT_ONCE // len(self._rows_ME))
        for start in range(0, len(queries_BE), step):
            scores_bM = queries_BE[start : start + step] @ self._rows_ME.T
            for query, scores_M in enumerate(scores_bM, start=start):
                rows_C = np.flatnonzero(scores_M >= least_B[query])
                if self._in_use_M is not None:
                    rows_C = rows_C[self._in_use_M[rows_C]]
                if filters is not None and (filter_ := filters[query]) is not None:
                    rows_C = rows_C[self._narrow_to_overlay(filter_).mask(self._buckets_M)[rows_C]]
                candidates.append((scores_M[rows_C], rows_C + self._first))
        own_BC, own_rows_BC = no_results(len(queries_BE), max((len(rows_C) for _, rows_C in candidates), default=0))
        for query, (scores_C, rows_C) in enumerate(candidates):
            own_BC[query, : len(rows_C)], own_rows_BC[query, : len(rows_C)] = scores_C, rows_C
        return top_k([scores_BK, own_BC], [rows_BK, own_rows_BC], k)

    def scores(self, query_E: Float32, rows_R: Int64, filter_: Filter | None = None) -> Float32:
        """Score some rows of index and overlay exactly, like `index.Searcher.scores`."""
        split = int(np.searchsorted(rows_R, self._first))
        below_R = self._base.scores(query_E, rows_R[:split], filter_ and self._narrow_to_base(filter_))
        if split == len(rows_R):
            return below_R
        rows_M = rows_R[split:] - self._first
        above_R = self._rows_ME[rows_M] @ query_E
        if self._in_use_M is not None:
            above_R[~self._in_use_M[rows_M]] = -np.inf
        if filter_ is not None:
            above_R[~self._narrow_to_overlay(filter_).mask(self._buckets_M)[rows_M]] = -np.inf
        return np.concatenate([below_R, above_R])

    def all_scores(self, queries_BE: Float32, filters: Sequence[Filter | None]) -> Float32 | None:
        """Score all rows of index and overlay, like `index.Searcher.all_scores`."""
        below_BL = self._base.all_scores(queries_BE, [filter_ and self._narrow_to_base(filter_) for filter_ in filters])
        if below_BL is None:
            return None
        above_BM = queries_BE @ self._rows_ME.T
        if self._in_use_M is not None:
            above_BM[:, ~self._in_use_M] = -np.inf
        for above_M, filter_ in zip(above_BM, filters, strict=True):
            if filter_ is not None:
                above_M[~self._narrow_to_overlay(filter_).mask(self._buckets_M)] = -np.inf
        return np.concatenate([below_BL, above_BM], axis=1)

    def _narrow_to_base(self, filter_: Filter) -> Filter | None:
        """Get the part of a filter for labels of the index; None if all of them pass."""
        exclude, allow = (
            rows if rows is None else rows[rows < self._first] for rows in (filter_.exclude, filter_.allow)
        )
        rules_out = allow is not None or filter_.buckets is not None or filter_.selection is not None
        if not rules_out and (exclude is None or not exclude.size):
            return None
        return Filter(exclude, allow, filter_.buckets, filter_.selection)

    def _narrow_to_overlay(self, filter_: Filter) -> Filter:
        """Get a filter's part for the overlay."""
        exclude, allow = (
            None if rows is None else rows[rows >= self._first] - self._first
            for rows in (filter_.exclude, filter_.allow)
        )
        return Filter(exclude, allow, filter_.buckets, filter_.beyond)
