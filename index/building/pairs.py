"""Weigh later pairs of a log: queries, label rows, seconds since 1970 and weights.

Legend: `N` pairs, `P` pairs sorted by query, `Q` queries.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float64, Int64
from longtail.bundle.errors import describe
from longtail.bundle.events import event_weights
from longtail.bundle.histories import LogPairs, to_refusals
from longtail.bundle.ids import find_rows
from longtail.bundle.manifest import LogColumns
from longtail.index.errors import NothingNewError, PriorsError
from longtail.tables import DataError, EmptyFileError, pairs

_MOST_NAMED = 5
"""Most types of events that a line names."""


class NewPairs(NamedTuple):
    """Pairs with labels of a bundle.

    Attributes:
        queries: a number for each query, int64 [N].
        labels: label rows, int64 [N].
        times: seconds since 1970, float64 [N].
        ids: ids of the queries, string [N]; null for a query without one.
        of_types: weights by the pairs' types of events, float64 [N]; 0 where the query said no.
        weights: these times the weights of the log's own column, float64 [N].
    """

    queries: Int64
    labels: Int64
    times: Float64
    ids: pa.Array
    of_types: Float64
    weights: Float64

    @property
    def chosen(self) -> NewPairs:
        """Return the pairs in which the query did not say no."""
        chosen_N = self.of_types > 0
        return NewPairs(
            self.queries[chosen_N], self.labels[chosen_N], self.times[chosen_N], self.ids.filter(pa.array(chosen_N)),
            self.of_types[chosen_N], self.weights[chosen_N],
        )  # fmt: skip

    def by_query(self, since: float, until: float) -> tuple[LogPairs, pa.Array, LogPairs]:
        """Sort the pairs of a time by query, then time.

        Args:
            since, until: seconds since 1970; a pair at `since` is left out, one at `until` is not.

        Returns:
            The pairs, the ids of their queries, string [Q], and the earlier pairs of these queries.
        """
        # By query, then time: the last key of `lexsort` counts first.
        order_N = np.lexsort((self.times, self.queries))
        times_N, labels_N = self.times[order_N], np.where(self.of_types > 0, self.labels, to_refusals(self.labels))
        order_P = order_N[(times_N > since) & (times_N <= until)]
        numbers_Q, first_Q, queries_P = np.unique(self.queries[order_P], return_index=True, return_inverse=True)
        weights_P = self.weights[order_P].astype(np.float32)
        earlier_n = order_N[(times_N <= since) & np.isin(self.queries[order_N], numbers_Q)]
        earlier = LogPairs(np.searchsorted(numbers_Q, self.queries[earlier_n]), labels_N[earlier_n])
        return LogPairs(queries_P, labels_N[order_P], weights_P), self.ids.take(order_P[first_Q]), earlier


def read_pairs(
    source: Path | str, settings: LogColumns, progress: Callable[[str], None], *, timed: bool = True
) -> pa.Table:
    """Read pairs like `tables.pairs.read_pairs`; raises PriorsError, or NothingNewError for a log without rows."""
    try:
        return pairs.read_pairs(source, settings, progress, timed=timed)
    except EmptyFileError as error:
        raise NothingNewError(str(error)) from error
    except DataError as error:
        raise PriorsError(str(error)) from error


def weighed(rows: pa.Table, columns: LogColumns, progress: Callable[[str], None]) -> pa.Table:
    """Add columns `of_type` and `weight` to pairs of `read_pairs`; drop pairs of weight 0.

    Pairs of negative types stay, with weight 0.
    """
    of_types_N = event_weights(rows["event"].cast(pa.string()).combine_chunks(), columns.by_type)
    weights_N = of_types_N * rows["weight"].cast(pa.float64()).combine_chunks().fill_null(1.0).to_numpy()
    rows = rows.drop_columns("weight").append_column("of_type", pa.array(of_types_N))
    counts_N = np.isfinite(weights_N) & (weights_N > 0)
    counts_N |= pc.is_in(rows["event"], value_set=pa.array(columns.negative, pa.string())).to_numpy()
    if not counts_N.all():
        unknown = {*rows["event"].filter(pa.array(of_types_N == 0)).unique().to_pylist()} - {*columns.by_type}
        named = ", ".join(sorted(map(describe, unknown))[:_MOST_NAMED])
        progress(
            f"pairs: {int((~counts_N).sum()):,} of {len(rows):,} left out, of weight 0"
            + (f", or of types without a weight: {named}" if unknown else "")
        )
    return rows.append_column("weight", pa.array(weights_N)).filter(pa.array(counts_N))


def known_pairs(rows: pa.Table, bundle: Bundle, progress: Callable[[str], None]) -> NewPairs:
    """Select the rows of `weighed` whose label is in a bundle."""
    labels = find_rows(rows["label"].combine_chunks(), bundle.labels.ids)
    if labels.null_count:
        progress(f"pairs: {labels.null_count:,} of {len(rows):,} left out, of labels that the release lacks")
    rows = rows.filter(labels.is_valid())
    return NewPairs(
        np.asarray(rows["query"]),
        np.asarray(labels.drop_null()).astype(np.int64),
        np.asarray(rows["time"], np.float64),
        rows["id"].cast(pa.string()).combine_chunks(),
        *(rows[name].to_numpy() for name in ("of_type", "weight")),
    )
