"""What every route works with: the release being served, the threads that search it, and the counters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import faiss

from serving.errors import NotReadyError
from serving.monitoring import Monitor
from serving.retriever import Retriever
from serving.settings import Settings

Result = TypeVar("Result")


class Service:
    """The state of one application.

    Searching runs in a few threads of its own: FAISS and ONNX Runtime leave the interpreter to the event
    loop while they compute, so a long search stalls neither /livez nor the parsing of the next request.
    """

    def __init__(self, settings: Settings, monitor: Monitor) -> None:
        self.settings = settings
        self.monitor = monitor
        self.draining = False
        self._retriever: Retriever | None = None
        self._threads = ThreadPoolExecutor(
            settings.search_threads, thread_name_prefix="search", initializer=one_openmp_thread
        )
        monitor.watch_readiness(lambda: self.ready)

    @property
    def ready(self) -> bool:
        """Whether new requests should come here."""
        return self._retriever is not None and not self.draining

    def retriever(self) -> Retriever:
        """The release being served. Take it once per request: the next call may give another.

        Raises:
            NotReadyError: none is loaded yet.
        """
        if self._retriever is None:
            raise NotReadyError("expected a published release, found none loaded yet; see longtail-index publish")
        return self._retriever

    def serve(self, retriever: Retriever) -> None:
        """Answer from this release from now on; requests under way finish with the one they took."""
        self._retriever = retriever
        self.monitor.release_swapped(retriever.name)

    async def compute(self, work: Callable[[], Result]) -> Result:
        """Run blocking work in a search thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Let the search threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def one_openmp_thread() -> None:
    """Keep FAISS in the calling thread: OpenMP would start a pool for each thread that searches."""
    faiss.omp_set_num_threads(1)
