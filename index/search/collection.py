"""A collection of a Milvus server: opened, searched, counted, named by aliases and dropped.

Legend: `L` labels, `B` queries, `b` some of them, `C` candidates, `K` results, `R` label rows, `E` coordinates of an
augmented row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from longtail.bundle.arrays import Float32, Int64
from longtail.index.errors import EngineUnavailableError, ReleaseMismatchError
from longtail.index.manifests import CollectionRecord
from longtail.index.search.candidates import no_results, top_k
from longtail.index.search.milvus import Answer, MilvusServer

if TYPE_CHECKING:
    from pymilvus import MilvusClient

VECTOR = "vector"
HEAD, TAIL = "head", "tail"
"""Partitions."""
HELD_BY = "longtail_release_"
"""How an alias begins that holds a collection for a release."""
MOST_RESULTS = 16_384
"""That Milvus gives a query."""
AT_ONCE = 256
"""Queries of one request."""
_AT_A_TIME = 16
"""Requests of one release under way for batches of several filters."""
WHOLE = 1 << 16
"""Cells to visit for every cell: the most that Milvus takes, and more than a segment has."""


class Collection:
    """The rows of a release in a collection, which never change. Thread-safe.

    Args:
        server: that has it.
        record: of the release.

    Attributes:
        server, record: as given.
        columns: that labels are filtered by, by name.
        pool: threads for searches of one batch that have nothing in common.
    """

    def __init__(self, server: MilvusServer, record: CollectionRecord) -> None:
        self.server, self.record = server, record
        self.columns = {column.name: column for column in record.columns}
        self._about = f"collection {record.name}"
        self.pool = ThreadPoolExecutor(_AT_A_TIME, "milvus")

    def open(self, labels: int, dim: int) -> None:
        """Have it loaded, and see that it is what the release says.

        Args:
            labels: L.
            dim: E.

        Raises:
            EngineUnavailableError: the server does not answer, has no such collection, or has not loaded it in time.
            ReleaseMismatchError: it holds other rows.
        """
        name = self.record.name
        described = self._ask(lambda client, seconds: client.describe_collection(name, timeout=seconds))
        self.server.wait_until(self._is_loaded, self.server.loading_seconds, self._about)
        found = next(field for field in described["fields"] if field["name"] == VECTOR)["params"]["dim"]
        if (count := self._count()) != labels or int(found) != dim:
            raise ReleaseMismatchError(
                f"{self.server}, collection {name}: expected {labels} rows of {dim} coordinates, found {count} of "
                f"{found}; drop it and build the release again"
            )

    def search(self, queries_bE: Float32, k: int, probes: int, expression: str) -> tuple[Float32, Int64]:
        """The k best rows that meet an expression: scores float32 [b, k], descending, and rows int64 [b, k].

        Args:
            queries_bE: float32, augmented queries.
            k: results of each, up to 16,384.
            probes: cells to visit of every segment of the tail.
            expression: of Milvus; empty: all rows.

        Returns:
            −inf and −1 where fewer are found.

        Raises:
            EngineUnavailableError: as `MilvusServer.ask`.
        """
        found = [
            self._ask(lambda client, seconds: self._asked(client, seconds, part_bE, k, probes, expression))  # noqa: B023
            for part_bE in np.split(queries_bE, range(AT_ONCE, len(queries_bE), AT_ONCE))
        ]
        scores, rows = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return scores, rows

    @property
    def problem(self) -> str | None:
        """Why it is not answered from now, as the server said last; None: it is."""
        return self.server.problem(self._about)

    def probe(self) -> None:
        """Ask the server whether it has it in memory, which it will, where it has let go of it.

        Raises:
            EngineUnavailableError: it has not yet; or as `MilvusServer.ask`.
        """

        def look(client: MilvusClient, seconds: float) -> None:
            if not self._is_loaded(client, seconds):
                raise EngineUnavailableError(
                    f"{self.server}, {self._about}: expected it in memory, found it being loaded"
                )

        self._ask(look)

    def point(self, alias: str) -> None:
        """Have an alias name it, whatever it named before; raises as `MilvusServer.ask`."""

        def flip(client: MilvusClient, seconds: float) -> None:
            from pymilvus.exceptions import MilvusException

            try:
                client.alter_alias(self.record.name, alias, timeout=seconds)
            except MilvusException as error:
                if "alias" not in str(error.message):
                    raise
                client.create_alias(self.record.name, alias, timeout=seconds)

        self._ask(flip)

    def _is_loaded(self, client: MilvusClient, seconds: float) -> bool:
        """Whether it is in memory; it will be, where it is not."""
        from pymilvus.client.types import LoadState

        state = client.get_load_state(self.record.name, timeout=seconds)["state"]
        if state in (LoadState.NotLoad, LoadState.NotExist):
            client.load_collection(self.record.name, timeout=seconds, _async=True)
        return bool(state == LoadState.Loaded)

    def _asked(
        self, client: MilvusClient, seconds: float, queries_bE: Float32, k: int, probes: int, expression: str
    ) -> tuple[Float32, Int64]:
        """Both partitions at once, each as hard as it takes."""
        cells = self.record.cells
        asked: list[tuple[list[str] | None, int]] = [(None, min(probes, WHOLE))]
        if self.record.head and probes < cells:
            asked = [([HEAD], WHOLE), ([TAIL], probes)]
        futures = [
            client.search(
                self.record.name,
                queries_bE,
                filter=expression,
                limit=k,
                output_fields=[],
                search_params={"metric_type": "IP", "params": {"nprobe": nprobe} if cells else {}},
                timeout=seconds,
                partition_names=partitions,
                anns_field=VECTOR,
                _async=True,
            )
            for partitions, nprobe in asked
        ]
        scores, rows = [], []
        for future in futures:
            scores_bK, rows_bK = no_results(len(queries_bE), k)
            for query, hits in enumerate(future.result()):
                scores_bK[query, : len(hits.ids)], rows_bK[query, : len(hits.ids)] = hits.distances, hits.ids
            scores.append(scores_bK)
            rows.append(rows_bK)
        return (scores[0], rows[0]) if len(scores) == 1 else top_k(scores, rows, k)

    def _ask(self, work: Callable[[MilvusClient, float], Answer]) -> Answer:
        return self.server.ask(work, about=self._about)

    def _count(self) -> int:
        answer = self._ask(
            lambda client, seconds: client.query(
                self.record.name, filter="", output_fields=["count(*)"], timeout=seconds
            )
        )
        return int(answer[0]["count(*)"])


def drop(server: MilvusServer, names: Sequence[str]) -> None:
    """Drop collections, those that are there and that no release holds any more; raises as `MilvusServer.ask`."""

    def forget(client: MilvusClient, seconds: float) -> None:
        for name in names:
            if client.has_collection(name, timeout=seconds):
                aliases = client.list_aliases(name, timeout=seconds)["aliases"]
                if not any(alias.startswith(HELD_BY) for alias in aliases):
                    for alias in aliases:
                        client.drop_alias(alias, timeout=seconds)
                    client.drop_collection(name, timeout=seconds)

    if names:
        server.ask(forget)
