"""Keep the Milvus collections that releases need, and drop those of deleted releases.

A release holds its collection by an alias, a hash of the release's location and name. So if a release is copied to
another location, deleting one copy does not drop the collection of the other.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, cast

from longtail.index.errors import LongtailIndexError
from longtail.index.manifests import CollectionRecord
from longtail.index.recall import Calibration, all_dial_points, check_floor
from longtail.index.release.release import Release
from longtail.index.search.milvus_searcher import ALIAS_PREFIX, Collection, MilvusSearcher, drop_collections
from longtail.index.search.milvus_server import MilvusServer

if TYPE_CHECKING:
    from pymilvus import MilvusClient

_NAME = re.compile(r"longtail_(\d+)_[0-9a-f]{8}")
_ABANDONED_SECONDS = 86_400.0
_QUERIES_AGAIN = 50
"""Calibration queries for measuring a collection again before its release is published."""


class MilvusCollections:
    """Hold and drop the collections of the releases of one location."""

    def __init__(self, location: str, server: MilvusServer) -> None:
        self._location, self._server = location, server

    def hold(self, name: str, record: CollectionRecord) -> None:
        """Keep the collection of a release until `drop_unheld`."""
        Collection(self._server, record).set_alias(self._alias(name))

    @contextmanager
    def holding(self, name: str, record: CollectionRecord) -> Iterator[None]:
        """Hold the collection of a new release that the block writes; release it if the block raises."""
        self.hold(name, record)
        try:
            yield
        except BaseException:
            with suppress(LongtailIndexError):
                self._drop_aliases(self._server.reconnected(), [name])
            raise

    def check(self, release: Release) -> None:
        """Measure the present recall of a release; raises RecallFloorError."""
        calibration = Calibration(release.bundle, None, _QUERIES_AGAIN, all_dial_points(release.bundle))
        recall, _ = calibration.measure(cast("MilvusSearcher", release.searcher))
        lowest = min(recall, key=lambda point: point.recall)
        check_floor(lowest, release.spec, calibration, 1, "Use --spec milvus_flat")

    def drop_unheld(self, collections: dict[str, str]) -> None:
        """Drop the collections of deleted releases, by release, that no other release holds.

        Collections that interrupted builds left more than a day ago are dropped too.
        """
        self._drop_aliases(self._server, collections)
        names = self._server.ask(lambda client, seconds: client.list_collections(timeout=seconds))
        # A collection's name has its time; a younger one may belong to a build that still runs.
        old = time.time() - _ABANDONED_SECONDS
        abandoned = [name for name in names if (begun := _NAME.fullmatch(name)) and int(begun[1]) < old]
        drop_collections(self._server, [*sorted(set(collections.values())), *abandoned])

    def _drop_aliases(self, server: MilvusServer, names: Iterable[str]) -> None:
        def drop(client: MilvusClient, seconds: float) -> None:
            from pymilvus.exceptions import MilvusException

            for name in names:
                try:
                    client.drop_alias(self._alias(name), timeout=seconds)
                except MilvusException as error:
                    if "alias" not in str(error.message):  # an alias that is already gone is no error
                        raise

        server.ask(drop)

    def _alias(self, name: str) -> str:
        return ALIAS_PREFIX + hashlib.sha256(f"{self._location}/{name}".encode()).hexdigest()[:24]
