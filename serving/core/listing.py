"""Pages over the labels that a service has: those of the release, hidden ones among them, and those added since.

They come in the order of their ids, and a cursor is the id that a page ends with: whatever is added, hidden or swapped
between two pages, a label that is there all the while comes exactly once.

Legend: `L` labels of the release, `N` some rows.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.added_labels import NEW_LABEL
from longtail.bundle.arrays import Int64
from longtail.bundle.errors import describe
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.overlay import Overlay
from longtail.serving.core.queries import BucketName, RequestModel
from longtail.serving.core.ranking import NO_ROWS
from longtail.serving.errors import InvalidRequestError

LabelState = Literal["visible", "hidden", "added"]
"""`visible`: of the release, in answers. `hidden`: of the release, in none. `added`: in answers, not of the release."""

_CHUNK = 1 << 14
_MOST_SEARCHED = 1 << 17
"""Labels whose texts are looked through for one page, at most."""
_LONGEST_SEARCH = 128
_CURSOR_VERSION = "1"


class LabelListing(RequestModel):
    """Which labels are wanted, and how many at a time."""

    limit: int = Field(
        default=100, ge=1, strict=False, description="Labels of one page, at most; up to LONGTAIL_MAX_K."
    )
    cursor: str | None = Field(
        default=None, description="`next_cursor` of the page before; none: the first page. With the same filters."
    )
    search: str = Field(
        default="",
        max_length=_LONGEST_SEARCH,
        description="Only labels with this in their id, or in a display column of text, lists of text or whole "
        "numbers; in upper case or lower.",
    )
    state: Literal["all", "visible", "hidden", "added"] = Field(
        default="all",
        description="`visible`: of the release, in answers. `hidden`: of the release, in none. `added`: in answers, "
        "not of the release.",
    )
    bucket: BucketName | None = Field(default=None, description="Only labels of this frequency bucket.")


@dataclass(frozen=True, slots=True)
class Page:
    """One page of labels by id, each a `LabelAnswer` of the HTTP API."""

    labels: list[dict[str, Any]]
    next_cursor: str | None
    """Where the next page begins; None after the last. A search may end a page early, even an empty one."""


def list_labels(catalogue: Catalogue, overlay: Overlay, asked: LabelListing) -> Page:
    """Get one page of labels. What it costs is bounded, and most of it leaves the interpreter to others.

    Raises:
        InvalidRequestError: a cursor that no page ended with.
    """
    after = _read_cursor(asked.cursor)
    walks = []
    if asked.state != "added":
        walks.append(_walk(_rows_after(catalogue, after), catalogue, overlay, asked))
    if asked.state in ("all", "added"):
        walks.append(_walk(_added_after(overlay, after), catalogue, overlay, asked))
    ids = {row: catalogue.id_of(row) for rows, _ in walks for row in rows}
    until = min((until for _, until in walks if until is not None), default=None)
    rows = sorted((row for row in ids if until is None or ids[row] <= until), key=ids.__getitem__)
    shown = rows[: asked.limit]
    end = ids[shown[-1]] if len(rows) > asked.limit else until
    labels = catalogue.labels_json(shown)
    for label, state in zip(labels, _states(overlay, shown), strict=True):
        label["state"] = state
    return Page(labels, None if end is None else _cursor(end))


def _walk(
    rows_N: np.ndarray[Any, np.dtype[np.int32 | np.int64]], catalogue: Catalogue, overlay: Overlay, asked: LabelListing
) -> tuple[list[int], str | None]:
    """Find the first of these rows that are wanted, one more than a page holds.

    Returns:
        The rows as they are answered, and the id up to which it has looked; None: as far as it matters.
    """
    replaced = np.flatnonzero(overlay.added.catalogue_rows != NEW_LABEL)
    replacing = dict(
        zip(overlay.added.catalogue_rows[replaced].tolist(), (overlay.base + replaced).tolist(), strict=True)
    )
    wanted, found, searched = asked.limit + 1, list[int](), 0
    for start in range(0, len(rows_N), _CHUNK):
        rows = rows_N[start : start + _CHUNK].astype(np.int64)
        # Labels that were embedded anew are answered by the overlay's rows.
        for place in np.flatnonzero(np.isin(rows, [*replacing])):
            rows[place] = replacing[int(rows[place])]
        last = int(rows[-1])
        if asked.state in ("visible", "hidden"):
            rows = rows[np.isin(rows, overlay.hidden) == (asked.state == "hidden")]
        if asked.bucket is not None:
            rows = rows[catalogue.buckets(rows) == BUCKET_NAMES.index(asked.bucket)]
        if asked.search and rows.size:
            searched += rows.size
            rows = rows[catalogue.containing(asked.search, rows)]
        found += rows[: wanted - len(found)].tolist()
        if len(found) == wanted:
            break
        if searched > _MOST_SEARCHED - _CHUNK and start + _CHUNK < len(rows_N):
            return found, catalogue.id_of(last)
    return found, None


def _rows_after(catalogue: Catalogue, after: str | None) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Rows of the release whose ids come after one, by id."""
    rows_L = catalogue.rows_by_id
    if after is None:
        return rows_L
    return rows_L[bisect_right(range(len(rows_L)), after, key=lambda place: catalogue.id_of(int(rows_L[place]))) :]


def _added_after(overlay: Overlay, after: str | None) -> Int64:
    """Rows of the labels that the release has not, whose ids come after one, by id."""
    new = np.flatnonzero(overlay.added.catalogue_rows == NEW_LABEL)
    if not new.size:
        return NO_ROWS
    ids = pa.array([overlay.added.ids[place] for place in new], pa.string())
    order = pc.sort_indices(ids).to_numpy()
    rows: Int64 = overlay.base + new[order]
    return rows if after is None else rows[int(pc.sum(pc.less_equal(ids, after)).as_py()) :]


def _states(overlay: Overlay, rows: Sequence[int]) -> list[LabelState]:
    new = set((overlay.base + np.flatnonzero(overlay.added.catalogue_rows == NEW_LABEL)).tolist())
    hidden_N = np.isin(np.array(rows, np.int64), overlay.hidden)
    return [
        "hidden" if hidden else "added" if row in new else "visible" for row, hidden in zip(rows, hidden_N, strict=True)
    ]


def _cursor(id_: str) -> str:
    return base64.urlsafe_b64encode(f"{_CURSOR_VERSION}{id_}".encode()).decode().rstrip("=")


def _read_cursor(cursor: str | None) -> str | None:
    """The id that a page ended with; raises InvalidRequestError."""
    if cursor is None:
        return None
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        read = base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (UnicodeError, binascii.Error):
        read = ""
    if not read.startswith(_CURSOR_VERSION):
        raise InvalidRequestError(
            f"expected next_cursor of an earlier page, received {describe(cursor)}", field="cursor"
        )
    return read.removeprefix(_CURSOR_VERSION)
