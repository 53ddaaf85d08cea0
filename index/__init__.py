"""From a bundle to a published release: FAISS indexes whose recall was measured, and a pointer to the one that serves.

build_index(bundle, releases, spec=IndexSpec("auto"))      a new release, measured
Releases(releases).publish(name)                           CURRENT points at it, if it keeps the bucket promise
Releases(releases).open(name).searcher.search(queries, k)  answers
"""

from index.errors import (
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
from index.filters import Filter
from index.manifest import IndexManifest, RecallAt, ReleaseManifest
from index.merge import MergeReport, merge_labels
from index.promise import Promise, Verdict
from index.release import Release, build_index
from index.releases import Releases
from index.search import Searcher
from index.spec import IndexSpec

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
