"""Estimate what a request costs, and cut large ones into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.queries import MOST_POOL, QueriesFor, RetrieveQuery, SearchOptions, first_pool

LABELS_PER_QUERY = 64
"""Labels that a batch may request per query of `max_batch`; larger batches would keep other clients waiting."""
_GROWN_POOL, _OTHER_SEARCH = 512, 250
"""Estimated work, in labels searched, of a pool of `max_per`, which may grow, and of a search for slots or a floor."""
_LISTS_READ_ONCE = 8
"""Divisor of the entries of lists that one request has for many labels, which are read once."""
_ANY_POOL = 1 << 62


class Cost(NamedTuple):
    """Cost of one request, or of all waiting requests.

    Attributes:
        labels: k, or the size of the pool that max_per and mmr choose from, summed over the queries.
        bytes: estimated size of the answer as JSON.
        extra: labels whose search costs about as much as the rest, such as the entries of lists; it bounds turns alone.
    """

    queries: int = 0
    labels: int = 0
    bytes: float = 0.0
    extra: int = 0


def estimate_cost(options: SearchOptions | QueriesFor, catalogue: Catalogue) -> Cost:
    """Estimate a query's cost to a catalogue by the mean size of its labels."""
    depth, searches, filters = options.k, 0, [options.filter]
    lists: list[object] = [options.exclude, options.display]
    if isinstance(options, SearchOptions):
        lists.append(options.allow)
        if options.max_per or options.mmr is not None:
            depth = first_pool(options.pool, options.k, _ANY_POOL)
        if options.max_per or options.explore or options.at_least:
            filters += [floor.filter for floor in options.at_least]
            counts = [*options.explore.values(), *(MOST_POOL if options.max_per else f.n for f in options.at_least)]
            searches = len(options.max_per) * max(_GROWN_POOL, depth) + sum(_OTHER_SEARCH + count for count in counts)
    if isinstance(options, RetrieveQuery | QueriesFor) and options.features:
        lists += options.features.values()
    if isinstance(options, RetrieveQuery):
        lists.append(options.history)
    if any(filters):
        lists += [
            operand
            for conditions in filters
            for condition in conditions.values()
            if isinstance(condition, dict)
            for operand in condition.values()
        ]
    entries = sum([len(entries) for entries in lists if isinstance(entries, list | dict)])
    # One request for many labels has its lists once.
    if not isinstance(options, RetrieveQuery):
        entries //= _LISTS_READ_ONCE
    label_bytes = catalogue.label_bytes if options.display is True else catalogue.mean_bytes(options.display)
    return Cost(1, depth, min(options.k, catalogue.labels) * label_bytes, searches + entries)


def add_up(costs: Sequence[Cost]) -> Cost:
    """Add up some costs."""
    queries, labels, bytes_, extra = zip(*costs, strict=True)
    return Cost(sum(queries), sum(labels), sum(bytes_), sum(extra))


def cut(costs: Sequence[Cost], max_batch: int) -> list[tuple[slice, Cost]]:
    """Cut a request into pieces no larger than a batch."""
    starts, sums = [0], [costs[0]]
    for position, cost in enumerate(costs[1:], start=1):
        together = add_up([sums[-1], cost])
        if together.queries > max_batch or together.labels + together.extra > LABELS_PER_QUERY * max_batch:
            starts.append(position)
            sums.append(cost)
        else:
            sums[-1] = together
    ends = [*starts[1:], len(costs)]
    return [(slice(start, end), cost) for start, end, cost in zip(starts, ends, sums, strict=True)]
