"""The routes: read, ask the core, answer."""

from longtail.serving.http.routes import embedding, labels, monitoring, operations, retrieval

routers = [retrieval.router, embedding.router, labels.router, monitoring.router, operations.router]
"""In the order of the documentation."""

__all__ = ["routers"]
