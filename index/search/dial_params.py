"""Choose the search parameters of each query by its dials and k.

The number of lists that hold the best labels depends on how much of the score the added coordinates decide. So a build
measures the least sufficient parameters at several dial points. A query takes the maximum over the corners of the
smallest box of measured points that contains the query. Where a corner was not measured, the query takes the parameters
that suffice everywhere.

Legend: `P` dial points, `X` added coordinates of an augmented row, `B` queries, `E` coordinates of an augmented row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from functools import lru_cache, reduce

import numpy as np

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32, Int64
from longtail.index.manifests import SearchParams, SearchParamsAt

_CACHED = 4_096
"""Number of dial points whose parameters are cached."""
_FIRST = np.zeros(1, np.int64)


class DialParams:
    """Look up the search parameters of every query. Thread-safe."""

    def __init__(self, bundle: Bundle, most: SearchParams, measured: Sequence[SearchParamsAt] = ()) -> None:
        self._most = most
        self._dim = bundle.embeddings.shape[1]
        settings = bundle.priors.settings
        self._derived = [i - len(settings) for i, prior in enumerate(settings) if prior.source != "table"]
        zero = np.zeros((1, self._dim), np.float32)
        self._default = bundle.augmentation.queries(zero, 0.0, 0.0, bundle.priors.defaults)[0, self._derived]
        self._most_with_derived = reduce(SearchParams.maximum, [point.params for point in measured], most)
        self._depths = sorted({point.k for point in measured})
        self._grids = {k: _Grid(bundle, [point for point in measured if point.k == k]) for k in self._depths}
        # Most requests share a few dial points, whose corners are then looked up once.
        self._cached_params = lru_cache(_CACHED)(self._compute)

    def fix(self, params: SearchParams) -> DialParams:
        """Return a copy that gives every query the same parameters."""
        copied = copy(self)
        # Without depths no grid is read, so the copy shares the grids and their cache.
        copied._most, copied._most_with_derived, copied._depths = params, params, []
        return copied

    def get(self, query_E: Float32, k: int) -> SearchParams:
        """Get the parameters of one augmented query for k results."""
        if not self._depths:
            return self._most
        # The next larger measured depth is the safe choice; beyond the largest, the search visits more lists by itself.
        depth = self._depths[min(bisect_left(self._depths, k), len(self._depths) - 1)]
        return self._cached_params(query_E[self._dim :].tobytes(), depth)

    def group(self, queries_BE: Float32, k: int) -> list[tuple[SearchParams, Int64]]:
        """Group queries by their parameters, as positions, int64; without queries one group is empty."""
        if not self._depths or not len(queries_BE):
            return [(self._most, np.arange(len(queries_BE)))]
        if len(queries_BE) == 1:
            return [(self.get(queries_BE[0], k), _FIRST)]
        queries_of: dict[bytes, list[int]] = defaultdict(list)
        added_BX = np.ascontiguousarray(queries_BE[:, self._dim :])
        for query, added_X in enumerate(added_BX):
            queries_of[added_X.tobytes()].append(query)
        groups: dict[SearchParams, list[int]] = defaultdict(list)
        for queries in queries_of.values():
            groups[self.get(queries_BE[queries[0]], k)] += queries
        return [(params, np.asarray(queries)) for params, queries in groups.items()]

    def _compute(self, added: bytes, depth: int) -> SearchParams:
        added_X = np.frombuffer(added, np.float32)
        if (params := self._grids[depth].interpolate(added_X)) is not None:
            return params
        has_defaults = not self._derived or (added_X[self._derived] == self._default).all()
        return self._most if has_defaults else self._most_with_derived


class _Grid:
    """Measured parameters of one depth, by the added coordinates of their dial points."""

    def __init__(self, bundle: Bundle, measured: Sequence[SearchParamsAt]) -> None:
        zero = np.zeros((1, bundle.embeddings.shape[1]), np.float32)
        self._params: dict[bytes, SearchParams] = {}
        for point in measured:
            weights = list(point.priors.values())
            query_1E = bundle.augmentation.queries(zero, point.bias_removal, point.popularity, weights)
            added = query_1E[0, zero.shape[1] :].tobytes()
            # Where ν is π, one coordinate holds λ + μ: several pairs of λ and μ are the same point.
            self._params[added] = self._params.get(added, point.params).maximum(point.params)
        self._points_PX = np.array([np.frombuffer(added, np.float32) for added in self._params])
        self._values = [np.unique(values_P) for values_P in self._points_PX.T]

    def interpolate(self, added_X: Float32) -> SearchParams | None:
        """Get the maximum over the corners around a query; None if a corner was not measured."""
        inside_P, corners = np.ones(len(self._points_PX), np.bool_), 1
        for values, points_P, value in zip(self._values, self._points_PX.T, added_X, strict=True):
            above = int(np.searchsorted(values, value))
            if above == len(values) or (above == 0 and values[0] != value):
                return None  # outside the measured range
            # A coordinate that was measured exactly needs no second corner.
            lower, upper = values[above if values[above] == value else above - 1], values[above]
            inside_P &= (points_P >= lower) & (points_P <= upper)
            corners *= 1 + (lower != upper)
        if np.count_nonzero(inside_P) < corners:
            return None
        return reduce(SearchParams.maximum, [self._params[point_X.tobytes()] for point_X in self._points_PX[inside_P]])
