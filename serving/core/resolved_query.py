"""What one query asks for, checked against one release and in its rows instead of ids."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from longtail.bundle import BUCKET_NAMES, Manifest
from longtail.bundle.errors import describe
from longtail.index import Filter
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.errors import InvalidRequestError
from longtail.serving.http.schemas import Selection


@dataclass(frozen=True, slots=True)
class Wanted:
    """One query's share of a search.

    Attributes:
        k: labels wanted.
        bias_removal: λ.
        filter: which label rows are eligible; None if all are.
        unknown_exclude: ids of `exclude` that the release does not have.
        unknown_allow: ids of `allow` that it does not have.
    """

    k: int
    bias_removal: float
    filter: Filter | None
    unknown_exclude: int
    unknown_allow: int

    @classmethod
    def from_selection(
        cls, selection: Selection, manifest: Manifest, catalogue: Catalogue, *, default: float, prefix: str = ""
    ) -> Wanted:
        """Check a selection against a release and look its ids up.

        Args:
            selection: as the client sent it.
            manifest: the release's.
            catalogue: the release's.
            default: λ where the selection names none.
            prefix: leads the fields of errors, such as `queries.0.`.

        Raises:
            InvalidRequestError: more labels than there are, or a λ outside the release's range.
        """
        k = selection.k if "k" in selection.model_fields_set else min(selection.k, len(catalogue))
        if k > len(catalogue):
            raise InvalidRequestError(
                f"expected k <= {len(catalogue)}, the labels of this release, received {describe(k)}",
                field=f"{prefix}k",
            )
        dial = manifest.bias_removal
        bias_removal = default if selection.bias_removal is None else selection.bias_removal
        if not dial.minimum <= bias_removal <= dial.maximum:
            raise InvalidRequestError(
                f"expected {dial.minimum} <= bias_removal <= {dial.maximum}, received {describe(bias_removal)}",
                field=f"{prefix}bias_removal",
            )
        exclude, unknown_exclude = catalogue.rows(selection.exclude)
        allow, unknown_allow = catalogue.rows(selection.allow or ())
        filters = bool(selection.exclude) or selection.allow is not None or selection.buckets is not None
        filter_ = Filter(
            exclude=exclude if selection.exclude else None,
            allow=None if selection.allow is None else allow,
            buckets=None if selection.buckets is None else frozenset(map(BUCKET_NAMES.index, selection.buckets)),
        )
        return cls(k, bias_removal, filter_ if filters else None, unknown_exclude, unknown_allow)

    def without(self, row: int) -> Wanted:
        """The same with one more label row left out."""
        before = self.filter or Filter()
        exclude = np.union1d([] if before.exclude is None else before.exclude, [row]).astype(np.int64)
        return replace(self, filter=replace(before, exclude=exclude))
