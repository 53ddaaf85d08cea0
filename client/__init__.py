"""A typed client of a Longtail service, synchronous and asynchronous, on httpx and pydantic.

    from longtail.client import Client, Feedback, Query

    features = {"user_id": "u3", "history": ["item-1", "item-2"]}
    with Client("http://localhost:8000") as longtail:
        answer = longtail.retrieve(features=features, k=5, bias_removal=0.3, exclude=["item-1", "item-2"])
        for label in answer.results[0].labels:
            print(label.id, label.score, label.bucket, label.display["title"])
        chosen = answer.results[0].labels[0]
        longtail.feedback(Feedback(answer_id=answer.answer_id, labels=[chosen.id]))
        tail, plain = longtail.retrieve([Query(features, bias_removal=λ) for λ in (0.0, 1.0)]).results
        nearest = longtail.similar(chosen.id, buckets=["torso", "tail"]).results[0]

`AsyncClient` has the same methods to await. What goes wrong is a `LongtailError`; 429, 503 and lost connections are
tried again first.

    requests.py      what a caller sends, and the request of each method
    transport.py     settings, attempts and waits of one call
    responses.py     what the service answers
    errors.py        what goes wrong
    async_client.py  the methods; sync_client.py is generated from it
"""

from longtail.client.async_client import AsyncClient
from longtail.client.errors import BusyError, DeniedError, LongtailError, NoAnswerError, NotFoundError
from longtail.client.requests import Features, Feedback, Interaction, LabelId, NewLabel, Query
from longtail.client.responses import (
    Accepted,
    Answer,
    BucketName,
    CatalogueLabel,
    Deleted,
    Embedded,
    Exploration,
    Label,
    LabelState,
    ListedLabel,
    Reloaded,
    Result,
    Unknown,
)
from longtail.client.sync_client import Client

__all__ = [
    "Accepted",
    "Answer",
    "AsyncClient",
    "BucketName",
    "BusyError",
    "CatalogueLabel",
    "Client",
    "Deleted",
    "DeniedError",
    "Embedded",
    "Exploration",
    "Features",
    "Feedback",
    "Interaction",
    "Label",
    "LabelId",
    "LabelState",
    "ListedLabel",
    "LongtailError",
    "NewLabel",
    "NoAnswerError",
    "NotFoundError",
    "Query",
    "Reloaded",
    "Result",
    "Unknown",
]
