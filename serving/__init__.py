"""Answers top-k labels per query over HTTP, with the head/tail dial in every request.

In the order a request meets them: connections, envelope, guard, routes, body, schemas, limits, service with its
batcher, retriever (selection, encoder, ranking or conditional, overlay, catalogue), edge. Beside them the follower of
releases (loading), label changes, feedback, the monitor and the live figures.
"""

from longtail.serving.core.encoder import Encoder
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import ServingError
from longtail.serving.http.app import create_app
from longtail.serving.settings import Settings

__all__ = ["Encoder", "Retriever", "ServingError", "Settings", "create_app"]
