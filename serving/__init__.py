"""Answers top-k labels per query over HTTP, with the head/tail dial in every request.

`process` runs servers on a port; `http` reads requests and writes answers; `core` answers them and imports no web
framework; `monitoring` counts what was answered; `dashboard` is the operator's page. Imports go one way:
process → http → core → monitoring, and http → dashboard.

One query: http.middleware lets it in (auth), routes.retrieval reads and checks it (requests, schemas);
core.service queues it (queue); core.retriever resolves (queries), embeds, ranks (ranking or tree_ranking
over overlay and index) and writes labels (catalogue); monitoring.live_figures counts it.

FAISS, ONNX Runtime and FastAPI are imported with the first name that needs them: `Retriever` or
`create_app`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# First, for it says which memory Arrow takes.
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
