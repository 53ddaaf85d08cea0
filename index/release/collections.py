"""What releases whose rows are in collections of Milvus ask of the server beside being opened: publish and drop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from longtail.index.construct.collection import abandoned, check_collection
from longtail.index.construct.spec import IndexSpec
from longtail.index.errors import LongtailIndexError
from longtail.index.release.release import Release, read_index_manifest
from longtail.index.search.collection import CollectionSearcher, drop
from longtail.index.search.milvus import MilvusServer


def publish_collection(release: Release, *, measure: bool) -> None:
    """Have the server's alias name the release's collection; nothing of a release that FAISS holds.

    Args:
        release: that is to be published.
        measure: whether its recall must reach the floor now.

    Raises:
        RecallFloorError: it does not.
        EngineUnavailableError: the server does not answer.
    """
    if isinstance(release.searcher, CollectionSearcher):
        if measure:
            check_collection(
                release.bundle, release.searcher, IndexSpec(release.index.spec, release.index.recall_floor)
            )
        release.searcher.collection.publish()


def drop_collections(
    gone: Iterable[str],
    kept: Iterable[str],
    manifests: Callable[[str], AbstractContextManager[Path]],
    server: Callable[[], MilvusServer],
) -> None:
    """Drop the collections that releases name which are to be deleted, and no other does; and what old builds left.

    Args:
        gone, kept: names of releases.
        manifests: the directory of a release's manifests.
        server: that has them; asked for where there are any.

    Raises:
        EngineUnavailableError: the server does not answer; some may be there still.
        SpecError: no server is named.
    """

    def named(releases: Iterable[str]) -> set[str]:
        found = set[str]()
        for release in releases:
            # One that cannot be read names none.
            with suppress(LongtailIndexError), manifests(release) as path:
                if (collection := read_index_manifest(path).collection) is not None:
                    found.add(collection.name)
        return found

    if old := named(gone):
        drop(server(), [*sorted(old - named(kept)), *abandoned(server())])
