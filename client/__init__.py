"""Call a Longtail service from Python, synchronously or asynchronously.

    from longtail.client import Client, Feedback, Query

    features = {"user_id": "u3", "history": ["item-1", "item-2"]}
    with Client("http://localhost:8000") as longtail:
        answer = longtail.retrieve(features=features, k=5, bias_removal=0.3, exclude=["item-1", "item-2"])
        (result,) = answer.results
        for label in result.labels:
            print(label.id, label.score, label.bucket, label.display["title"])
        chosen = result.labels[0]
        longtail.feedback(Feedback(result.answer_id, [chosen.id], features))
        tail, plain = longtail.retrieve([Query(features, bias_removal=λ) for λ in (0.0, 1.0)]).results
        nearest = longtail.similar(chosen.id, buckets=["torso", "tail"]).results[0]

`AsyncClient` has the same methods to await. What goes wrong is a `LongtailError`; 429, 503 and lost connections are
tried again first.

    calls.py      what a caller sends, and the request of each method
    answers.py    what the service answers
    attempts.py   settings, attempts, waits and errors of one call; no socket and no sleep
    clients.py    the two clients
"""

from longtail.client.answers import Answer, BucketName, Label, LabelState, Result
from longtail.client.attempts import BusyError, DeniedError, LongtailError, NoAnswerError, NotFoundError
from longtail.client.calls import Features, Feedback, LabelId, NewLabel, Query
from longtail.client.clients import AsyncClient, Client

__all__ = [
    "Answer", "AsyncClient", "BucketName", "BusyError", "Client", "DeniedError", "Features", "Feedback", "Label",
    "LabelId", "LabelState", "LongtailError", "NewLabel", "NoAnswerError", "NotFoundError", "Query", "Result",
]  # fmt: skip
