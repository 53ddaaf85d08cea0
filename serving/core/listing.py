"""List a service's labels by pages: the release's labels, hidden ones included, and labels added since.

Labels come in the order of their ids, and a cursor is the last id of a page. So a label that exists all the time is
listed exactly once, even if others are added or hidden, or the release is swapped, between two pages.

Legend: `L` labels of the release, `N` some rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Int64
from longtail.bundle.sets import is_in
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.overlay import Overlay
from longtail.serving.core.queries import BucketName, RequestModel
from longtail.serving.core.ranking import NO_ROWS
from longtail.serving.core.retriever import Retriever

LabelState = Literal["visible", "hidden", "added"]
"""`visible`: a label of the release. `hidden`: a label of the release that no answer has. `added`: added since."""

_CHUNK = 1 << 14


class LabelListing(RequestModel):
    """Query string of a listing: state of the labels, page size and cursor."""

    limit: int = Field(default=100, ge=1, strict=False, description="Most labels of a page; up to LONGTAIL_MAX_K.")
    cursor: str | None = Field(
        default=None, description="`next_cursor` of the page before, with the same filters; none: the first page."
    )
    state: Literal["all", "visible", "hidden", "added"] = Field(
        default="all",
        description="`visible`: labels of the release that answers may have. `hidden`: labels of the release that no "
        "answer has. `added`: labels added since.",
    )
    bucket: BucketName | None = Field(default=None, description="Only labels of this frequency bucket.")


def list_labels(retriever: Retriever, listing: LabelListing) -> dict[str, Any]:
    """Create `labels` and `next_cursor` of the HTTP API's `LabelPage`."""
    catalogue, overlay, rows = retriever.catalogue, retriever.overlay, list[int]()
    if listing.state != "added":
        rows += _first(_rows_after(catalogue, listing.cursor), catalogue, overlay, listing)
    if listing.state in ("all", "added"):
        rows += _first(_added_after(overlay, listing.cursor), catalogue, overlay, listing)
    ids = {row: catalogue.get_id(row) for row in rows}
    page = sorted(rows, key=ids.__getitem__)[: listing.limit]
    labels = catalogue.labels_json(page)
    available = retriever.view_at().available(np.array(page, np.int64)).tolist()
    for label, state, now in zip(labels, _states(overlay, page), available, strict=True):
        label |= {"state": state, "available": now}
    return {"labels": labels, "next_cursor": ids[page[-1]] if len(rows) > listing.limit else None}


def _first(
    rows_N: np.ndarray[Any, np.dtype[np.int32 | np.int64]],
    catalogue: Catalogue,
    overlay: Overlay,
    listing: LabelListing,
) -> list[int]:
    """Find the first rows of a page, and one more."""
    # One more than the page: it shows whether another page follows.
    most, first = listing.limit + 1, list[int]()
    for start in range(0, len(rows_N), _CHUNK):
        rows = overlay.find_served_rows(rows_N[start : start + _CHUNK].astype(np.int64))
        if listing.state in ("visible", "hidden"):
            rows = rows[np.isin(rows, overlay.hidden) == (listing.state == "hidden")]
        if listing.bucket is not None:
            rows = rows[catalogue.buckets(rows) == BUCKET_NAMES.index(listing.bucket)]
        first += rows[: most - len(first)].tolist()
        if len(first) == most:
            break
    return first


def _rows_after(catalogue: Catalogue, after: str | None) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Get the release's rows after an id, in order."""
    rows_L = catalogue.row_of.order
    if after is None:
        return rows_L
    return rows_L[bisect_right(range(len(rows_L)), after, key=lambda i: catalogue.get_id(int(rows_L[i]))) :]


def _added_after(overlay: Overlay, after: str | None) -> Int64:
    """Get the added rows after an id, in order."""
    rows = overlay.new_rows
    if not rows.size:
        return NO_ROWS
    ids = pa.array(overlay.added.ids, pa.string()).take(pa.array(rows - overlay.base))
    before = 0 if after is None else int(pc.sum(pc.less_equal(ids, after)).as_py())
    sorted_rows: Int64 = rows[pc.sort_indices(ids).to_numpy()[before:]]
    return sorted_rows


def _states(overlay: Overlay, rows: Sequence[int]) -> list[LabelState]:
    rows_N = np.array(rows, np.int64)
    hidden_N, new_N = is_in(rows_N, overlay.hidden).tolist(), is_in(rows_N, overlay.new_rows).tolist()
    return ["hidden" if hidden else "added" if new else "visible" for hidden, new in zip(hidden_N, new_N, strict=True)]
