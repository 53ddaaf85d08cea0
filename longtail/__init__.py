"""Train two-tower models, index and serve them, and turn the head/tail dial per request.

    import longtail

    model = longtail.fit(clicks, query="user_id", label="product_id", time="clicked_at", labels=products)
    model.recommend({"user_id": "u42"}, k=10, bias_removal=0.5)
    longtail.load("releases").recommend(users, k=100)

Tables are frames of pandas, Polars, Arrow or DuckDB, or paths and URLs of files. Names are loaded at their first use:
`load` needs no TensorFlow, and `import longtail` takes milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longtail.client import Client
    from longtail.index import build, publish
    from longtail.jobs import audit, fit, from_vectors, load
    from longtail.model import Model
    from longtail.trainer import evaluate

__all__ = [
    "Client", "Model", "__version__", "audit", "build", "evaluate", "fit", "from_vectors", "load", "publish",
]  # fmt: skip

__version__ = "0.1.0"

_HOMES = {
    "Client": "client", "Model": "model", "audit": "jobs", "build": "index", "evaluate": "trainer", "fit": "jobs",
    "from_vectors": "jobs", "load": "jobs", "publish": "index",
}  # fmt: skip
"""Modules of the names that are loaded at their first use."""


if not TYPE_CHECKING:  # type checkers read the imports above, and refuse any other name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
