"""The routes: read, ask the core, answer."""

from longtail.serving.http.routes import figures, labels, operations, retrieval

routers = [retrieval.router, labels.router, figures.router, operations.router]
"""In the order of the documentation."""

__all__ = ["routers"]
