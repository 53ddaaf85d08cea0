"""Keep the Milvus collections that releases need, and drop those of deleted releases.

A release holds its collection by an alias, a hash of the release's place and name. So if a release is copied to another
place, deleting one copy does not drop the collection of the other.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from longtail.bundle import BundleError
from longtail.index.errors import LongtailIndexError
from longtail.index.manifests import CollectionRecord
from longtail.index.recall import Calibration, all_dial_points, check_floor
from longtail.index.release.release import Release, read_release_manifest
from longtail.index.search.milvus_searcher import HELD_BY, Collection, MilvusSearcher, drop
from longtail.index.search.milvus_server import MilvusServer

if TYPE_CHECKING:
    from pymilvus import MilvusClient

_NAME = re.compile(r"longtail_(\d+)_[0-9a-f]{8}")
_ABANDONED_SECONDS = 86_400.0
_QUERIES_AGAIN = 50
"""Calibration queries for measuring a collection again before its release is published."""


class HeldCollections:
    """Hold and drop the collections of the releases of one place."""

    def __init__(self, place: str, server: Callable[[], MilvusServer]) -> None:
        self._place = place
        self._server = server

    def hold(self, name: str, record: CollectionRecord | None) -> None:
        """Keep the collection of a release, if it has one, until `drop_unheld`."""
        if record is not None:
            Collection(self._server(), record).point(self._alias(name))

    @contextmanager
    def held(self, name: str, record: CollectionRecord | None) -> Iterator[None]:
        """Hold the collection of a new release that the block writes; release it if the block raises."""
        self.hold(name, record)
        try:
            yield
        except BaseException:
            if record is not None:
                with suppress(LongtailIndexError):
                    self._let_go(self._server().afresh(), [name])
            raise

    def check(self, release: Release) -> None:
        """Measure the present recall of a release whose rows Milvus holds; raises RecallFloorError."""
        if isinstance(release.searcher, MilvusSearcher):
            calibration = Calibration(release.bundle, None, _QUERIES_AGAIN, all_dial_points(release.bundle))
            lowest = min(calibration.measure(release.searcher)[0], key=lambda at: at.recall)
            check_floor(lowest, release.spec, calibration, 1, "Use --spec milvus_flat")

    def named(self, names: Iterable[str], manifests: Callable[[str], AbstractContextManager[Path]]) -> dict[str, str]:
        """Map releases to the collections that they name; unreadable releases are left out."""
        found = {}
        for name in names:
            with suppress(LongtailIndexError, BundleError), manifests(name) as path:
                if (record := read_release_manifest(path).collection) is not None:
                    found[name] = record.name
        return found

    def drop_unheld(self, collections: dict[str, str]) -> None:
        """Drop the collections of deleted releases that no other release holds.

        Collections that interrupted builds left more than a day ago are dropped too.
        """
        if not collections:
            return
        server = self._server()
        self._let_go(server, collections)
        drop(server, [*sorted(set(collections.values())), *_abandoned(server)])

    def _let_go(self, server: MilvusServer, names: Iterable[str]) -> None:
        def drop_aliases(client: MilvusClient, seconds: float) -> None:
            from pymilvus.exceptions import MilvusException

            for name in names:
                try:
                    client.drop_alias(self._alias(name), timeout=seconds)
                except MilvusException as error:
                    if "alias" not in str(error.message):  # an alias that is already gone is no error
                        raise

        server.ask(drop_aliases)

    def _alias(self, name: str) -> str:
        return HELD_BY + hashlib.sha256(f"{self._place}/{name}".encode()).hexdigest()[:24]


def _abandoned(server: MilvusServer) -> list[str]:
    """List collections whose builds began more than a day ago; releases may hold some of them."""
    names = server.ask(lambda client, seconds: client.list_collections(timeout=seconds))
    old = time.time() - _ABANDONED_SECONDS
    return [name for name in names if (begun := _NAME.fullmatch(name)) and int(begun[1]) < old]
