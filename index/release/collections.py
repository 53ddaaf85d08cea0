"""What releases whose rows are in collections of Milvus ask of the server, beside being opened.

A release holds its collection by an alias of its own, made of its place and name, so that no other place, to which it
was copied, takes it away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from longtail.bundle import BundleError
from longtail.index.construct.collection import abandoned, check_collection
from longtail.index.errors import LongtailIndexError
from longtail.index.manifests import CollectionRecord
from longtail.index.release.release import Release, read_release_manifest
from longtail.index.search.collection import HELD_BY, Collection, CollectionSearcher, drop
from longtail.index.search.milvus import MilvusServer

if TYPE_CHECKING:
    from pymilvus import MilvusClient


class HeldCollections:
    """The collections of the releases of one place."""

    def __init__(self, place: str, server: Callable[[], MilvusServer]) -> None:
        self._place = place
        self._server = server

    def hold(self, name: str, record: CollectionRecord | None) -> None:
        """Keep the collection of a release, if it has one, until `drop_unheld` of it."""
        if record is not None:
            Collection(self._server(), record).point(self._alias(name))

    @contextmanager
    def held(self, name: str, record: CollectionRecord | None) -> Iterator[None]:
        """`hold` for a release that is new, and is written in here: unless it is, nothing is held."""
        self.hold(name, record)
        try:
            yield
        except BaseException:
            if record is not None:
                with suppress(LongtailIndexError):
                    self._let_go(self._server().afresh(), [name])
            raise

    def check(self, release: Release) -> None:
        """Measure the recall of a release as its collection is now."""
        if isinstance(release.searcher, CollectionSearcher):
            check_collection(release.bundle, release.searcher, release.spec)

    def named(self, names: Iterable[str], manifests: Callable[[str], AbstractContextManager[Path]]) -> dict[str, str]:
        """The collections that releases name, by release; of one that cannot be read none is known."""
        found = {}
        for name in names:
            with suppress(LongtailIndexError, BundleError), manifests(name) as path:
                if (record := read_release_manifest(path).collection) is not None:
                    found[name] = record.name
        return found

    def drop_unheld(self, collections: dict[str, str]) -> None:
        """Let go of the collections of releases that are deleted, drop those that no other release holds, and what
        builds of more than a day ago left.
        """
        if not collections:
            return
        server = self._server()
        self._let_go(server, collections)
        drop(server, [*sorted(set(collections.values())), *abandoned(server)])

    def _let_go(self, server: MilvusServer, names: Iterable[str]) -> None:
        def drop_aliases(client: MilvusClient, seconds: float) -> None:
            from pymilvus.exceptions import MilvusException

            for name in names:
                try:
                    client.drop_alias(self._alias(name), timeout=seconds)
                except MilvusException as error:
                    if "alias" not in str(error.message):  # of one that is gone
                        raise

        server.ask(drop_aliases)

    def _alias(self, name: str) -> str:
        return HELD_BY + hashlib.sha256(f"{self._place}/{name}".encode()).hexdigest()[:24]
