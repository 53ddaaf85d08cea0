"""From a bundle to a published release: FAISS indexes whose recall was measured, and a pointer to the one that serves.

build_index(bundle, releases, spec=IndexSpec("auto"))      a new release, measured
Releases(releases).publish(name)                           CURRENT points at it, if it keeps the bucket promise
Releases(releases).open(name).searcher.search(queries, k)  answers
"""

from longtail.index.construct.spec import IndexSpec
from longtail.index.errors import (
    DeviceError,
    IndexRoomError,
    PromiseBrokenError,
    PromiseError,
    QueryError,
    RecallFloorError,
    ReleaseCorruptError,
    ReleaseMismatchError,
    ReleaseNameError,
    ReleaseNotFoundError,
    ReleaseVersionError,
    SpecError,
)
from longtail.index.manifest import IndexManifest, RecallAt, ReleaseManifest
from longtail.index.release.bucket_floors import Promise, Verdict
from longtail.index.release.merge import MergeReport, merge_labels
from longtail.index.release.release import Release, build_index
from longtail.index.release.releases import Releases
from longtail.index.search.filters import Filter
from longtail.index.search.searcher import Searcher

__all__ = [
    "DeviceError",
    "Filter",
    "IndexManifest",
    "IndexRoomError",
    "IndexSpec",
    "MergeReport",
    "Promise",
    "PromiseBrokenError",
    "PromiseError",
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
    "Searcher",
    "SpecError",
    "Verdict",
    "build_index",
    "merge_labels",
]
