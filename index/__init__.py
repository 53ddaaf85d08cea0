"""From a bundle to a published release: FAISS indexes whose recall was measured, and a pointer to the one that serves.

    build(bundle, releases, spec="auto")                       a new release, measured
    publish(releases, name)                                    CURRENT points at it, if it meets the bucket floors
    Releases(releases).open(name).searcher.search(queries, k)  answers

FAISS is imported with the first name that needs it: `build`, `publish`, `Release`, `Releases` or `Searcher`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from longtail.index.construct.priors import Limits, PriorTable
from longtail.index.construct.spec import IndexSpec
from longtail.index.errors import (
    CollectionMismatchError,
    DeviceError,
    EngineUnavailableError,
    FloorsError,
    LongtailIndexError,
    MergeError,
    NotPublishableError,
    PriorsError,
    QueryError,
    RecallFloorError,
    ReleaseCorruptError,
    ReleaseMismatchError,
    ReleaseNameError,
    ReleaseNotFoundError,
    ReleaseVersionError,
    SpecError,
)
from longtail.index.manifests import RecallAt, ReleaseManifest
from longtail.index.release.bucket_floors import BucketFloors, Report
from longtail.index.release.compatibility import losses, refused_features, refused_priors
from longtail.index.release.merge import MergeReport, merge_labels
from longtail.index.search.candidates import NO_ROW, kth_best, no_results, top_k
from longtail.index.search.exact import ExactRows
from longtail.index.search.filters import Condition, Filter, Selection, without_rows
from longtail.index.search.milvus import MilvusServer

if TYPE_CHECKING:
    from longtail.index.release.building import build, refresh_priors
    from longtail.index.release.release import Release
    from longtail.index.release.releases import Releases, publish
    from longtail.index.search.searcher import Searcher

_NEED_FAISS = {
    "Release": "release.release",
    "Releases": "release.releases",
    "Searcher": "search.searcher",
    "build": "release.building",
    "publish": "release.releases",
    "refresh_priors": "release.building",
}

__all__ = [
    "NO_ROW",
    "BucketFloors",
    "CollectionMismatchError",
    "Condition",
    "DeviceError",
    "EngineUnavailableError",
    "ExactRows",
    "Filter",
    "FloorsError",
    "IndexSpec",
    "Limits",
    "LongtailIndexError",
    "MergeError",
    "MergeReport",
    "MilvusServer",
    "NotPublishableError",
    "PriorTable",
    "PriorsError",
    "QueryError",
    "RecallAt",
    "RecallFloorError",
    "Release",
    "ReleaseCorruptError",
    "ReleaseManifest",
    "ReleaseMismatchError",
    "ReleaseNameError",
    "ReleaseNotFoundError",
    "ReleaseVersionError",
    "Releases",
    "Report",
    "Searcher",
    "Selection",
    "SpecError",
    "build",
    "kth_best",
    "losses",
    "merge_labels",
    "no_results",
    "publish",
    "refresh_priors",
    "refused_features",
    "refused_priors",
    "top_k",
    "without_rows",
]


if not TYPE_CHECKING:  # a type checker would take any name for one of this module's

    def __getattr__(name: str) -> object:
        if name not in _NEED_FAISS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"longtail.index.{_NEED_FAISS[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
