"""From a bundle to a published release: FAISS indexes whose recall was measured, and a pointer to the one that serves.

build(bundle, releases, spec="auto")                       a new release, measured
publish(releases, name)                                    CURRENT points at it, if it keeps its promise
open_releases(releases).open(name).searcher.search(queries, k)  answers
"""

from __future__ import annotations

from longtail.bundle.conditions import Condition
from longtail.bundle.promise import QualityPromise
from longtail.index.building.build import build
from longtail.index.building.merge import MergeReport, merge_labels
from longtail.index.building.priors import Exposure, Limits, PriorSpec, PriorTable
from longtail.index.building.queries import KnownQueries
from longtail.index.building.refresh import RefreshOptions, refresh, refresh_priors
from longtail.index.errors import (
    DeviceError,
    EngineUnavailableError,
    LongtailIndexError,
    NothingNewError,
    NotPublishableError,
    PriorsError,
    QueriesError,
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
from longtail.index.release.release import Release
from longtail.index.release.releases import PublishReport, Releases, open_releases, publish
from longtail.index.search.exact import ExactRows
from longtail.index.search.filters import Filter, FilterMask
from longtail.index.search.milvus_server import MilvusServer
from longtail.index.search.searcher import Searcher
from longtail.index.spec import IndexSpec

__all__ = [
    "Condition",
    "DeviceError",
    "EngineUnavailableError",
    "ExactRows",
    "Exposure",
    "Filter",
    "FilterMask",
    "IndexSpec",
    "KnownQueries",
    "Limits",
    "LongtailIndexError",
    "MergeReport",
    "MilvusServer",
    "NotPublishableError",
    "NothingNewError",
    "PriorSpec",
    "PriorTable",
    "PriorsError",
    "PublishReport",
    "QualityPromise",
    "QueriesError",
    "QueryError",
    "RecallAt",
    "RecallFloorError",
    "RefreshOptions",
    "Release",
    "ReleaseCorruptError",
    "ReleaseManifest",
    "ReleaseMismatchError",
    "ReleaseNameError",
    "ReleaseNotFoundError",
    "ReleaseVersionError",
    "Releases",
    "Searcher",
    "SpecError",
    "build",
    "merge_labels",
    "open_releases",
    "publish",
    "refresh",
    "refresh_priors",
]
