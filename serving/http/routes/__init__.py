"""The routes: read the request, call the core, answer."""

from longtail.serving.http.routes import labels, monitoring, operations, retrieval

routers = [retrieval.router, labels.router, monitoring.router, operations.router]
"""In the order of the documentation."""

__all__ = ["routers"]
