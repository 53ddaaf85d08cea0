"""Collect all routes."""

from fastapi.routing import APIRoute

from longtail.serving.http.routes import labels, monitoring, operations, retrieval

routes = [
    route
    for room in (retrieval, labels, monitoring, operations)
    for route in room.router.routes
    if isinstance(route, APIRoute)
]
"""All routes, in the order of the documentation."""

__all__ = ["routes"]
