"""Answers top-k labels per query over HTTP, with the head/tail dial in every request.

`process` runs servers on a port; `http` reads requests and writes answers; `core` answers them and knows no HTTP;
`monitoring` counts what was answered; `dashboard` is the operator's page. Imports go one way:
process → http → core → monitoring, and http → dashboard.

One query: process.protocol takes its bytes from the socket; http.middleware, auth and routes.retrieval have it read
(body) and checked (schemas, limits); core.service queues it in the batcher; core.retriever resolves (queries), embeds
(encoder), ranks (ranking or tree_ranking over overlay and index) and writes labels (catalogue); monitoring.outcomes
counts it; http.responses sends it.
"""

from longtail.serving.core.encoder import Encoder
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import ServingError
from longtail.serving.http.app import create_app
from longtail.serving.settings import Settings

__all__ = ["Encoder", "Retriever", "ServingError", "Settings", "create_app"]
