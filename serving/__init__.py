"""Answers top-k labels per query over HTTP, with the head/tail dial in every request.

In the order a request meets them: envelope, routes, body, schemas, limits, retriever (selection,
features, encoder, ranking or conditional, catalogue), edge. Beside them the follower of releases and the monitor.
"""

from serving.app import create_app
from serving.encoder import Encoder
from serving.errors import ServingError
from serving.retriever import Retriever
from serving.settings import Settings

__all__ = ["Encoder", "Retriever", "ServingError", "Settings", "create_app"]
