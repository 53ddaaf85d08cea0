"""The routes: read the request, call the core, answer."""

from fastapi.routing import APIRoute

from longtail.serving.http.routes import labels, monitoring, operations, retrieval

routes = [
    route
    for room in (retrieval, labels, monitoring, operations)
    for route in room.router.routes
    if isinstance(route, APIRoute)
]
"""In the order of the documentation."""

__all__ = ["routes"]
