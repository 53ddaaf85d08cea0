"""What a release's own evaluation says of it, which its recall among users is held against."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from longtail.bundle import BUCKET_NAMES, Manifest

ALL = "all"
_RECALL = re.compile(rf"recall@(\d+)(?:/({'|'.join(BUCKET_NAMES)}))?")
_NEAR = 1e-6


class OfflineRecall(NamedTuple):
    """Recall of held-out queries, with its 95 % interval where it has one."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class OfflineFigures:
    """Of one release.

    Attributes:
        recall: at the default λ and μ, by k, then by bucket and `all`; empty of a model that was not evaluated.
        data_until: when its training data was read, seconds since 1970; None: not known.
    """

    recall: Mapping[int, Mapping[str, OfflineRecall]] = field(default_factory=dict)
    data_until: float | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """What a bundle's manifest says."""
        wanted = manifest.bias_removal.default, manifest.popularity.default
        recall: dict[int, dict[str, OfflineRecall]] = {}
        for point in manifest.bias_removal.curve:
            if max(abs(point.bias_removal - wanted[0]), abs(point.popularity - wanted[1])) > _NEAR:
                continue
            for name, found in point.metrics.items():
                if named := _RECALL.fullmatch(name):
                    of_k = recall.setdefault(int(named[1]), {})
                    of_k[named[2] or ALL] = OfflineRecall(found.value, found.low, found.high)
        return cls(recall, manifest.data_until.timestamp())

    def recall_within(self, k: float) -> tuple[int, Mapping[str, OfflineRecall]] | None:
        """Recall@k at the largest k measured that is no larger than this one: answers of more labels hold no less."""
        measured = [cutoff for cutoff in self.recall if cutoff <= k]
        return (max(measured), self.recall[max(measured)]) if measured else None
