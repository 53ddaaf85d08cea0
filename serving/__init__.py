"""Answer top-k labels per query over HTTP, with the head/tail dial in every request.

`process` runs servers on a port; `http` reads requests and writes responses; `core` computes answers and imports no web
framework; `monitoring` counts answers; `dashboard` is the operator's page. Imports go one way: process → http → core →
monitoring, and http → dashboard.

The way of a query: http.middleware admits the request (auth), http.bridge reads and checks its body (schemas), and the
route calls `retrieve → enqueue → run_batch → rank`: core.searches queues it (queue, costs) and runs its batch, in which
core.retriever resolves it (resolved, dials), embeds it and ranks labels (ranking over overlay and index). core.answers
writes the JSON, and monitoring.outcomes counts the answer.

FAISS, ONNX Runtime and FastAPI are imported with the first name that needs them: `Retriever` or `create_app`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# First, because Arrow reads its choice of allocator when it is imported.
from longtail.serving import allocator  # noqa: F401
from longtail.serving.errors import ServingError
from longtail.serving.settings import Settings

if TYPE_CHECKING:
    from longtail.serving.core.retriever import Retriever
    from longtail.serving.http.app import create_app

_IMPORTED_WHEN_NEEDED = {
    "Retriever": "core.retriever",
    "create_app": "http.app",
}

__all__ = ["Retriever", "ServingError", "Settings", "create_app"]


if not TYPE_CHECKING:  # a type checker would take any name for one of this module's

    def __getattr__(name: str) -> object:
        if name not in _IMPORTED_WHEN_NEEDED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"longtail.serving.{_IMPORTED_WHEN_NEEDED[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
