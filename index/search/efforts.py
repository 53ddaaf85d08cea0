"""Choose the search effort of each query by its λ, μ, weights of priors, and k.

The number of lists that hold the best labels depends on how much of the score the added coordinates decide. So a build
measures the least sufficient effort at several places on the dials. A query takes the hardest effort of the measured
places around it: the corners of the smallest box of measured places that contains the query. Where a corner was not
measured, the query takes the effort that suffices everywhere.

Legend: `P` places on the dials, `X` added coordinates of an augmented row, `B` queries, `E` coordinates of an augmented
row.
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
from longtail.index.manifests import Effort, EffortAt

_REMEMBERED = 4_096
"""Number of places on the dials whose looked-up efforts are cached."""
_FIRST = np.zeros(1, np.int64)


class DialEfforts:
    """Look up the search effort of every query. Thread-safe."""

    def __init__(self, bundle: Bundle, hardest: Effort, measured: Sequence[EffortAt] = ()) -> None:
        self._hardest = hardest
        self._dim = bundle.embeddings.shape[1]
        settings = bundle.priors.settings
        self._derived = [at - len(settings) for at, prior in enumerate(settings) if prior.source != "table"]
        nowhere = np.zeros((1, self._dim), np.float32)
        self._default = bundle.augmentation.queries(nowhere, 0.0, 0.0, bundle.priors.defaults)[0, self._derived]
        self._hardest_with_derived = reduce(Effort.harder, [at.effort for at in measured], hardest)
        self._depths = sorted({at.k for at in measured})
        self._of_depth = {depth: _Places(bundle, [at for at in measured if at.k == depth]) for depth in self._depths}
        self._at = lru_cache(_REMEMBERED)(self._look_up)

    def all_at(self, effort: Effort) -> DialEfforts:
        """Return a copy that gives every query the same effort."""
        efforts = copy(self)
        efforts._hardest, efforts._hardest_with_derived, efforts._depths = effort, effort, []
        return efforts

    def hardest(self, queries_BE: Float32) -> Effort:
        """Return the effort that suffices everywhere, or for queries without bonus, slope and decay."""
        usual = not self._derived or (queries_BE[:, self._derived] == self._default).all()
        return self._hardest if usual else self._hardest_with_derived

    def of(self, query_E: Float32, k: int) -> Effort:
        """Look up the effort of one augmented query for k results."""
        if not self._depths:
            return self._hardest
        # The next larger measured depth is the safe choice; beyond the largest, the search adds probes by itself.
        depth = self._depths[min(bisect_left(self._depths, k), len(self._depths) - 1)]
        return self._at(query_E[self._dim :].tobytes(), depth)

    def groups(self, queries_BE: Float32, k: int) -> list[tuple[Effort, Int64]]:
        """Group the queries by effort: each effort with the positions of its queries, int64.

        Without queries there is one empty group.
        """
        if not self._depths or not len(queries_BE):
            return [(self._hardest, np.arange(len(queries_BE)))]
        if len(queries_BE) == 1:
            return [(self.of(queries_BE[0], k), _FIRST)]
        queries_of: dict[bytes, list[int]] = defaultdict(list)
        added_BX = np.ascontiguousarray(queries_BE[:, self._dim :])
        for query, added_X in enumerate(added_BX):
            queries_of[added_X.tobytes()].append(query)
        groups: dict[Effort, list[int]] = defaultdict(list)
        for queries in queries_of.values():
            groups[self.of(queries_BE[queries[0]], k)] += queries
        return [(effort, np.asarray(queries)) for effort, queries in groups.items()]

    def _look_up(self, added: bytes, depth: int) -> Effort:
        added_X = np.frombuffer(added, np.float32)
        return self._of_depth[depth].around(added_X) or self.hardest(added_X[None])


class _Places:
    """The efforts of one depth, by the added coordinates of their places."""

    def __init__(self, bundle: Bundle, measured: Sequence[EffortAt]) -> None:
        nowhere = np.zeros((1, bundle.embeddings.shape[1]), np.float32)
        self._efforts: dict[bytes, Effort] = {}
        for at in measured:
            place_1E = bundle.augmentation.queries(nowhere, at.bias_removal, at.popularity, list(at.priors.values()))
            place = place_1E[0, nowhere.shape[1] :].tobytes()
            # Where ν is π, one coordinate holds λ + μ: several pairs of λ and μ are the same place.
            self._efforts[place] = self._efforts.get(place, at.effort).harder(at.effort)
        self._places_PX = np.array([np.frombuffer(place, np.float32) for place in self._efforts])
        self._values = [np.unique(values_P) for values_P in self._places_PX.T]

    def around(self, added_X: Float32) -> Effort | None:
        """Find the hardest effort of the corners around a query; None if a corner was not measured."""
        inside_P, corners = np.ones(len(self._places_PX), np.bool_), 1
        for values, places_P, value in zip(self._values, self._places_PX.T, added_X, strict=True):
            above = int(np.searchsorted(values, value))
            if above == len(values) or (above == 0 and values[0] != value):
                return None  # outside the measured range
            # A coordinate that was measured exactly needs no second corner.
            least, most = values[above if values[above] == value else above - 1], values[above]
            inside_P &= (places_P >= least) & (places_P <= most)
            corners *= 1 + (least != most)
        if np.count_nonzero(inside_P) < corners:
            return None
        return reduce(Effort.harder, [self._efforts[place_X.tobytes()] for place_X in self._places_PX[inside_P]])
