"""How queries are requests: the distinct contexts of interactions, and the attributes of a query as of a time.

Legend: `N` pairs, `Q` queries, `L` labels, `R` rows of a table, `V` versions of queries' attributes,
`A` queries as they are requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Float64, Int32, Int64
from longtail.trainer.config import DataConfig
from longtail.trainer.config.rows import shown as named
from longtail.trainer.data.columns import Bags
from longtail.trainer.data.files import joined
from longtail.trainer.data.interactions import TIMESTAMPS
from longtail.trainer.data.pairs import Pairs, Requests
from longtail.trainer.data.tables import IdTable
from longtail.trainer.data.times import are_dates, as_times
from longtail.trainer.errors import DataError

MOST_SHOWN = 32
"""Impressions of an interaction that are read, the first of them."""


class Versions(NamedTuple):
    """Attributes of queries as they changed, sorted by query, then time.

    Attributes:
        queries: int32 [V], rows of the query ids.
        since: float64 [V], from when each holds.
    """

    queries: Int32
    since: Float64

    def as_of(self, queries_N: Int32, times_N: Float64) -> Int32:
        """Return the last version of every query that is not later than a time, int32 [N]; V where there is none."""
        rank = np.unique(np.concatenate([self.since, times_N]), return_inverse=True)[1]
        size, versions = int(rank.max()) + 1, len(self.since)
        keys_V = self.queries.astype(np.int64) * size + rank[:versions]
        at_N = np.searchsorted(keys_V, queries_N.astype(np.int64) * size + rank[versions:], side="right") - 1
        found_N = (at_N >= 0) & (self.queries[at_N] == queries_N)
        return np.where(found_N, at_N, versions).astype(np.int32)


def versions_of(
    data: DataConfig, read: IdTable, query_ids: pa.Array, interactions: Sequence[pa.Table]
) -> tuple[pa.Table, Versions]:
    """Return attributes sorted by query, then time, with a last row without values; and when each holds.

    Args:
        data: names the table and its column `valid_from`.
        query_ids: strings [Q], every query.
        interactions: as `read_interactions` gives them, whose metadata says what their times are.
    """
    places, name = data.queries, data.valid_from
    if places is None or name is None:
        raise DataError("data.valid_from: expected data.queries with it, received none")
    path, column = named(places), read.table[name]
    since = as_times(column)
    if since is None:
        raise DataError(f"{path}: column {name!r}: expected numbers or timestamps, found {column.type}")
    kinds = ["numbers", "timestamps"]
    own = kinds[are_dates(column)]
    for split in interactions:
        if (found := kinds[TIMESTAMPS in (split.schema.metadata or {})]) != own:
            raise DataError(
                f"{path}: column {name!r}: expected {found} as in column {data.timestamp!r} of the interactions, "
                f"found {own}"
            )
    queries = np.asarray(pc.index_in(read.ids, value_set=query_ids), np.int32)
    order = np.lexsort((since, queries))
    queries, since = queries[order], since[order]
    same = (np.diff(queries) == 0) & (np.diff(since) == 0)
    if same.any():
        row = int(order[int(same.argmax()) + 1])
        raise DataError(
            f"{path}: column {name!r}: expected one row of a query at a time, "
            f"found a second of {read.ids[row].as_py()!r} in row {row}"
        )
    values = read.table.combine_chunks()
    return values.take(pa.array([*order.tolist(), None], pa.int64())), Versions(queries, since)


def distinct_rows(table: pa.Table) -> tuple[pa.Table, Int32]:
    """Return the distinct rows of a table, and which of them each row is, int32 [R].

    A table with a column of lists, maps or structs is not compared: each of its rows is distinct.
    """
    codes_R = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        plain = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
        if pa.types.is_nested(plain.type):
            return table, np.arange(table.num_rows, dtype=np.int32)
        encoded = plain.combine_chunks().dictionary_encode(null_encoding="encode")
        codes_R = _combined(codes_R, encoded.indices.to_numpy())
    _, first, codes_R = np.unique(codes_R, return_index=True, return_inverse=True)
    return table.take(pa.array(first)), codes_R.astype(np.int32)


def number_requests(
    pairs: Mapping[str, Pairs], contexts: Mapping[str, pa.Table], versions: Versions | None
) -> tuple[dict[str, Pairs], Requests | None, pa.Table | None]:
    """Return pairs with the way in which each query was requests, the distinct ways, and the distinct contexts.

    Args:
        contexts: columns of what came with them, row by row, by split; without columns nothing did.
        versions: attributes that change; None where a query has one row of them.
    """
    if versions is None and not any(part.num_columns for part in contexts.values()):
        return dict(pairs), None, None
    queries_N = np.concatenate([part.queries for part in pairs.values()])
    codes_N = queries_N.astype(np.int64)
    table, contexts_N, attributes_N = None, None, None
    if any(part.num_columns for part in contexts.values()):
        table, contexts_N = distinct_rows(joined([contexts[name] for name in pairs], "data"))
        codes_N = _combined(codes_N, contexts_N)
    if versions is not None:
        attributes_N = np.concatenate([versions.as_of(part.queries, _times(part)) for part in pairs.values()])
        codes_N = _combined(codes_N, attributes_N)
    _, first, requests_N = np.unique(codes_N, return_index=True, return_inverse=True)
    requests = Requests(
        queries_N[first],
        None if contexts_N is None else contexts_N[first],
        None if attributes_N is None else attributes_N[first],
    )
    ends = np.cumsum([len(part) for part in pairs.values()])
    parts = np.split(requests_N.astype(np.int32), ends[:-1])
    made = {name: replace(part, requests=own) for (name, part), own in zip(pairs.items(), parts, strict=True)}
    return made, requests, table


def impressions_of(lists: pa.ChunkedArray, label_ids: pa.Array) -> Bags:
    """Return the labels of every interaction's impressions, the first `MOST_SHOWN`; those that no label has are left
    out.

    Args:
        lists: lists of label ids, strings [R], one per interaction.
        label_ids: the catalogue, strings [L].
    """
    column = lists.combine_chunks()
    lengths_R = np.asarray(pc.fill_null(pc.list_value_length(column), 0))
    keys = pc.list_flatten(column).dictionary_encode()
    rows = np.asarray(pc.fill_null(pc.index_in(keys.dictionary, value_set=label_ids), -1), np.int32)
    labels = np.append(rows, np.int32(-1))[pc.fill_null(keys.indices, len(rows)).to_numpy()]
    owners = np.repeat(np.arange(len(lengths_R)), lengths_R)
    places = np.arange(len(labels)) - np.repeat(np.cumsum(lengths_R) - lengths_R, lengths_R)
    kept = (labels >= 0) & (places < MOST_SHOWN)
    counts_R = np.bincount(owners[kept], minlength=len(lengths_R))
    offsets = np.concatenate([[0], np.cumsum(counts_R)]).astype(np.int64)
    return Bags(offsets, labels[kept], np.ones(int(kept.sum()), np.float32))


def _combined(codes_N: Int64, more_N: Int32) -> Int64:
    """Return one code for each distinct pair of codes, in their order."""
    joint_N: Int64 = np.unique(codes_N * (int(more_N.max(initial=0)) + 1) + more_N, return_inverse=True)[1]
    return joint_N.astype(np.int64)


def _times(pairs: Pairs) -> Float64:
    return np.zeros(len(pairs)) if pairs.times is None else pairs.times
