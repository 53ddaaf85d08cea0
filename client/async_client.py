"""The client whose methods are awaited. `sync_client.py` is made from this file: `python -m tests.client.generate`."""

from asyncio import sleep
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from longtail.client.requests import (
    Call,
    Features,
    Feedback,
    Interaction,
    LabelId,
    NewLabel,
    Query,
    T,
    as_list,
    embed_json,
    ids_json,
    label_path,
    labels_path,
    options_json,
    queries_json,
    selection_json,
)
from longtail.client.responses import (
    Accepted,
    Answer,
    BucketName,
    CatalogueLabel,
    Deleted,
    Embedded,
    LabelPage,
    LabelState,
    ListedLabel,
    Readiness,
    Reloaded,
)
from longtail.client.transport import MODELS_PATH, Attempts, Outcome, Settings


class AsyncClient:
    """Asks one service over a pool of kept connections; tasks of one event loop may share it.

    Close it, or use `async with`:

    >>> import asyncio
    >>> from longtail.client import AsyncClient
    >>> async def main() -> None:
    ...     async with AsyncClient("http://localhost:8000") as longtail:
    ...         answer = await longtail.retrieve(features={"user_id": "u3"}, k=1, bias_removal=0.3)
    ...         for label in answer.results[0].labels:
    ...             print(label.id, label.score, label.bucket, label.display["title"])
    >>> asyncio.run(main())
    a 1.5 tail Alpha

    Args:
        url: of the service, such as `https://longtail.example`; may have a path for the routes to follow.
        api_key: sent as `Authorization: Bearer`; None: no key.
        timeout: seconds that one call may take, retries and waits included; see `Settings`.
        retries: further attempts after the first, at 429, 503 and lost connections.
        model: of a service of several models, the one that is asked; None: the one it answers from by default.
        transport: httpx's, for other pool limits, certificates or tests; None: httpx's default.

    Raises:
        ValueError: a value that cannot be; the message holds neither key nor URL.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout: float = 10.0,
        retries: int = 3,
        model: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = Settings(url, api_key, timeout, retries, model)
        self._http = httpx.AsyncClient(base_url=url, headers=self._settings.headers(), transport=transport)

    async def retrieve(
        self,
        queries: Query | Iterable[Query] | None = None,
        *,
        features: Features | None = None,
        k: int | None = None,
        bias_removal: float | None = None,
        popularity: float | None = None,
        exclude: Collection[LabelId] = (),
        allow: Collection[LabelId] | None = None,
        buckets: Collection[BucketName] | None = None,
        explore: Mapping[BucketName, int] | None = None,
        display: bool | Collection[str] | None = None,
        priors: Mapping[str, float] | None = None,
        filter: Mapping[str, Any] | None = None,
        max_per: Mapping[str, int] | None = None,
        mmr: float | None = None,
        pool: int | None = None,
        release: str | None = None,
        preview: bool = False,
        unit: str | None = None,
        arm: str | None = None,
    ) -> Answer:
        """The best labels for each query.

        Args:
            queries: one or several; or none, and the parts of a single one (see `Query`) in its place:
            features, k, bias_removal, popularity, priors, exclude, allow, buckets: those parts,
            filter, explore, max_per, mmr, pool, display: and these.
            release: answer from this release, if the service still has it loaded; None: from the current one.
            preview: nobody will see the answer: it counts in no exposure, drift or recall.
            unit: whom the answer is for, while an experiment runs: the same unit gets the same arm; None: the
                experiment's feature says.
            arm: answer as this arm does; None: as the unit's does.

        Raises:
            ValueError: both or neither of queries and features, or a part beside queries.
            TypeError: one string where several ids or buckets are expected.
            NotFoundError: `unknown_release`.
            LongtailError: the service refused, or did not answer.
        """
        selection = selection_json(
            k, bias_removal, popularity, exclude, allow, buckets, explore, display, priors, filter, max_per, mmr, pool
        )
        asked = queries_json(queries, features, selection)
        return await self._send(
            Call("POST", "/v1/retrieve", Answer, {"queries": asked, **options_json(release, preview, unit, arm)})
        )

    async def similar(
        self,
        ids: LabelId | Iterable[LabelId],
        *,
        k: int | None = None,
        bias_removal: float | None = None,
        popularity: float | None = None,
        exclude: Collection[LabelId] = (),
        allow: Collection[LabelId] | None = None,
        buckets: Collection[BucketName] | None = None,
        explore: Mapping[BucketName, int] | None = None,
        display: bool | Collection[str] | None = None,
        priors: Mapping[str, float] | None = None,
        filter: Mapping[str, Any] | None = None,
        max_per: Mapping[str, int] | None = None,
        mmr: float | None = None,
        pool: int | None = None,
        release: str | None = None,
        preview: bool = False,
    ) -> Answer:
        """The labels nearest to each of the given labels, itself left out.

        Args:
            ids: one label, or several.
            k, exclude, allow, buckets, explore, display, filter, max_per, mmr, pool: as in `Query`.
            bias_removal, popularity, priors: None means 0 here: nearness, not popularity.
            release, preview: as for `retrieve`.

        Raises:
            TypeError: as for `retrieve`.
            NotFoundError: `unknown_label`, `unknown_release`.
            LongtailError: the service refused, or did not answer.
        """
        asked = {"id": ids} if isinstance(ids, str | int) else {"ids": list(ids)}
        selection = selection_json(
            k, bias_removal, popularity, exclude, allow, buckets, explore, display, priors, filter, max_per, mmr, pool
        )
        return await self._send(
            Call("POST", "/v1/similar", Answer, {**asked, **selection, **options_json(release, preview)})
        )

    async def label(self, id: LabelId) -> CatalogueLabel:
        """What the release knows about one label.

        Raises:
            NotFoundError: `unknown_label`.
            LongtailError: the service did not answer.
        """
        return await self._send(Call("GET", label_path(id), CatalogueLabel))

    async def labels(
        self,
        *,
        search: str = "",
        state: LabelState | None = None,
        bucket: BucketName | None = None,
        page_size: int | None = None,
    ) -> AsyncIterator[ListedLabel]:
        """All labels, one after the other in the order of their ids: hidden ones too, and those added since.

        They are read page by page; whatever changes meanwhile, a label that is there all the while comes exactly once.

        Args:
            search: only labels with this in their id or in what is displayed, in upper case or lower.
            state: only labels of this state; None: of any.
            bucket: only labels of this frequency bucket; None: of any.
            page_size: labels asked for at a time; None: the service's default.

        Raises:
            LongtailError: the service refused, or did not answer.
        """
        cursor: str | None = None
        while True:
            page = await self._send(Call("GET", labels_path(search, state, bucket, page_size, cursor), LabelPage))
            for label in page.labels:
                yield label
            cursor = page.next_cursor
            if cursor is None:
                return

    async def embed(
        self,
        queries: Features | Iterable[Features] | None = None,
        *,
        labels: Collection[LabelId] | None = None,
        release: str | None = None,
    ) -> Embedded:
        """The vectors of queries, or of labels: u or v of the scores `u·v/T + …`.

        Args:
            queries: features of one query or of several.
            labels: or ids of labels.
            release: of this release, if the service still has it loaded; None: of the current one.

        Raises:
            ValueError: both or neither of queries and labels.
            TypeError: one string in place of labels.
            NotFoundError: `unknown_label`, `unknown_release`.
            LongtailError: the service refused, or did not answer.
        """
        return await self._send(Call("POST", "/v1/embed", Embedded, embed_json(queries, labels, release)))

    async def add_labels(self, labels: NewLabel | Iterable[NewLabel]) -> Accepted:
        """Add labels from their features; on disk and retrievable when this returns. Needs an admin key.

        Raises:
            DeniedError: no admin key.
            LongtailError: `no_label_tower` if the release cannot embed labels, or the service refused or did not
                answer.
        """
        added = [label.json() for label in as_list(labels)]
        return await self._send(Call("POST", "/v1/labels", Accepted, {"labels": added}))

    async def restore_label(self, id: LabelId) -> Accepted:
        """Bring a hidden label of the catalogue back. Needs an admin key.

        Raises:
            DeniedError, NotFoundError, LongtailError: as `delete_label`.
        """
        return await self._send(Call("POST", "/v1/labels", Accepted, {"labels": [{"id": id}]}))

    async def delete_label(self, id: LabelId) -> Deleted:
        """Take a label out of every answer: an added one is deleted, one of the catalogue hidden. Needs an admin key.

        Raises:
            DeniedError: no admin key.
            NotFoundError: `unknown_label`; also if a first attempt deleted it and only its answer was lost.
            LongtailError: the service did not answer.
        """
        return await self._send(Call("DELETE", label_path(id), Deleted))

    async def delete_labels(self, ids: Collection[LabelId]) -> Accepted:
        """Take labels out of every answer, all in one write to disk, or none. Needs an admin key.

        Raises:
            TypeError: one string in place of ids.
            DeniedError: no admin key.
            NotFoundError: `unknown_label`; names those that the service never had.
            LongtailError: the service refused, or did not answer.
        """
        return await self._send(Call("POST", "/v1/labels/delete", Accepted, ids_json(ids)))

    async def restore_labels(self, ids: Collection[LabelId]) -> Accepted:
        """Bring hidden labels of the catalogue back, all in one write to disk, or none. Needs an admin key.

        Raises:
            TypeError, DeniedError, NotFoundError, LongtailError: as `delete_labels`.
        """
        return await self._send(Call("POST", "/v1/labels/restore", Accepted, ids_json(ids)))

    async def feedback(self, events: Feedback | Iterable[Feedback]) -> Accepted:
        """Report what was chosen from answers; on disk when this returns.

        Sent again after a lost connection: the service counts what was chosen of an answer once.

        Raises:
            LongtailError: the service refused, or did not answer.
        """
        return await self._send(
            Call("POST", "/v1/feedback", Accepted, {"events": [event.json() for event in as_list(events)]})
        )

    async def interactions(self, events: Interaction | Iterable[Interaction]) -> Accepted:
        """Report what was chosen without an answer of the service; on disk when this returns.

        Sent again after a lost connection: the service knows them by their idempotency keys. Of events one of which has
        none, nothing is sent again once the service may have it.

        Raises:
            NoAnswerError: the events may or may not have been taken, unless its cause is httpx's `ConnectError`. Sent
                again, with their keys, they count once.
            LongtailError: the service refused.
        """
        sent = [event.json() for event in as_list(events)]
        repeatable = all("idempotency_key" in event for event in sent)
        return await self._send(Call("POST", "/v1/feedback", Accepted, {"events": sent}, repeatable=repeatable))

    async def release(self) -> dict[str, Any]:
        """The release being served: its model, the curve over λ and μ, the features of a query and an example.

        Raises:
            LongtailError: the service did not answer.
        """
        return await self._send(Call("GET", "/v1/release", dict[str, Any]))

    async def models(self) -> dict[str, Any]:
        """All models of the service, whichever this client asks: the release of each, and whether it is ready.

        Raises:
            NotFoundError: of a service older than several models.
            LongtailError: the service did not answer.
        """
        return await self._send(Call("GET", MODELS_PATH, dict[str, Any]))

    async def staged(self) -> dict[str, Any]:
        """How the staged release would have answered a share of live queries: overlap, exposure, shadow recall.

        Raises:
            NotFoundError: `unknown_release`: nothing is staged.
            LongtailError: the service did not answer.
        """
        return await self._send(Call("GET", "/v1/release/staged", dict[str, Any]))

    async def monitoring(self) -> dict[str, Any]:
        """What head, torso, tail and new labels got in the last minutes, hour and day, beside the baseline.

        Raises:
            LongtailError: the service did not answer.
        """
        return await self._send(Call("GET", "/v1/monitoring", dict[str, Any]))

    async def reload(self) -> Reloaded:
        """Load the published release now instead of at the next poll. Needs an admin key.

        Raises:
            DeniedError: no admin key.
            LongtailError: `release_refused` (409), or the service did not answer.
        """
        return await self._send(Call("POST", "/v1/release/reload", Reloaded))

    async def ready(self) -> bool:
        """Whether the service takes requests, for the model or for all, asked once: False if it cannot be reached.

        Raises:
            LongtailError: something else answered.
        """
        answer = await self._send(Call("GET", "/readyz", Readiness, when_busy=Readiness("unreachable")))
        return answer.status == "ready"

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"AsyncClient({self._settings})"

    async def _send(self, call: Call[T]) -> T:
        attempts = Attempts(call, self._settings)
        while True:
            outcome: Outcome
            try:
                outcome = await self._http.send(self._http.build_request(**attempts.request()))
            except httpx.RequestError as error:
                outcome = error
            wait = attempts.wait_after(outcome)
            if wait is None:
                return attempts.value(outcome)
            await sleep(wait)
