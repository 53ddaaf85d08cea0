"""What the models of one process share: the threads that search, their queue, the quotas, a thread that packs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from longtail.serving.core.batcher import Batcher
from longtail.serving.core.embedding import ToEmbed
from longtail.serving.core.executor import BoundedExecutor, one_openmp_thread
from longtail.serving.core.fair_queue import Lane
from longtail.serving.core.quotas import Quotas
from longtail.serving.core.retriever import Retriever
from longtail.serving.core.search_runner import SearchRunner
from longtail.serving.core.searches import BatchKey, PartAnswer, Search, divide
from longtail.serving.errors import QueueFullError, TimedOutError
from longtail.serving.settings import Settings

_MAX_PENDING_PACKS = 16

Result = TypeVar("Result")


class _Key(NamedTuple):
    """What works of a batch have in common: a model, and its release."""

    runner: SearchRunner
    of: BatchKey | Retriever


class SearchPool:
    """`search_threads` threads, one core each, and `queue_limit` queries that wait, over all models of the process.

    A client has one share of both, whatever number of models it asks, and each model that it asks one of that.

    Args:
        settings: gives the settings of now, of which those of quotas may change.
        tell_depth: is told of how many queries wait, with every batch.
    """

    def __init__(self, settings: Callable[[], Settings], tell_depth: Callable[[int], None]) -> None:
        now = settings()
        self.quotas = Quotas(settings)
        self.packer = BoundedExecutor("pack", max_pending=_MAX_PENDING_PACKS, timeout=now.request_seconds)
        self.batcher: Batcher[Search | ToEmbed, list[bytes] | PartAnswer] = Batcher(
            self._run,
            threads=1 if now.device == "gpu" else now.search_threads,
            window=now.batch_window_ms / 1e3,
            max_batch=now.max_batch,
            max_pending=now.queue_limit,
            timeout=now.request_seconds,
            divide=divide,
            join=self._join,
            initializer=one_openmp_thread,
        )
        self._tell_depth = tell_depth

    def submit(
        self, runner: SearchRunner, of: BatchKey | Retriever, work: Search | ToEmbed, client: str | Lane
    ) -> asyncio.Future[list[bytes] | PartAnswer]:
        """Queue a request; as `Batcher.submit`.

        Args:
            runner: of its model.
            of: what it may share a batch by.
            work: what is asked.
            client: who asks; of a further model, its lane.
        """
        size = work.queries if isinstance(work, Search) else work.count
        return self.batcher.submit(_Key(runner, of), work, size, tenant=client, cost=work.cost)

    async def pack(self, work: Callable[[], Result]) -> Result | None:
        """Compress an answer, in a thread of its own; None if it has too much to do for that."""
        with suppress(QueueFullError, TimedOutError):
            return await self.packer.run(work)
        return None

    def close(self) -> None:
        """End the threads when nothing waits any more."""
        self.batcher.close()
        self.packer.close()

    def _run(
        self, key: Hashable, works: Sequence[Search | ToEmbed], waited: Sequence[float]
    ) -> Sequence[list[bytes] | PartAnswer | Exception]:
        assert isinstance(key, _Key)
        answers = key.runner(key.of, works, waited)
        self._tell_depth(self.batcher.depth)
        return answers

    def _join(self, key: Hashable, parts: Sequence[list[bytes] | PartAnswer]) -> list[bytes]:
        assert isinstance(key, _Key)
        return key.runner.join(parts)
