"""Who is let in: turned away before anything is read are clients beyond a quota, and those with their share waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from longtail.serving.core.quotas import Quotas, asking
from longtail.serving.errors import QueueFullError, QuotaExceededError
from longtail.serving.monitoring import Monitoring
from longtail.serving.settings import Settings

_REFUSAL_SECONDS = 0.1


class Admission:
    """Lets requests in, or not, for the event loop's tasks, each of which knows its tenant (`asking`).

    Args:
        settings: gives the settings of now.
        monitoring: counts those turned away.
        quotas: of every tenant, over all models of the process.
        has_room: whether a tenant's least search would find room in the queue.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        monitoring: Monitoring,
        quotas: Quotas,
        has_room: Callable[[str], bool],
    ) -> None:
        self._settings = settings
        self._monitoring = monitoring
        self._has_room = has_room
        self._quotas = quotas

    async def enter(self, *, search: bool = True, labels: bool = True) -> None:
        """Let a request in. A search that is let in calls `leave` at its end.

        Args:
            search: whether it is for the queue.
            labels: whether it asks for labels, which `charge` counts.

        Raises:
            QuotaExceededError: its client has used up a quota.
            QueueFullError: there is no room for even one query of it.
        """
        tenant = asking.get()
        try:
            self._quotas.enter(tenant, search=search, labels=labels)
        except QuotaExceededError as error:
            self._monitoring.metrics.count_over_quota(error.quota)
            await asyncio.sleep(_REFUSAL_SECONDS)
            raise
        if search and not self._has_room(tenant):
            self.leave()
            limit = self._settings().queue_limit
            await self.shed(
                QueueFullError(f"expected at most {limit} queries waiting, found this client's share of them waiting")
            )

    def charge(self, labels: int) -> None:
        """The request of this task asks for so many labels, or lists them."""
        self._quotas.charge(asking.get(), labels)

    def leave(self) -> None:
        """The search of this task has ended, whatever came of it."""
        self._quotas.leave(asking.get())

    async def shed(self, error: QueueFullError) -> NoReturn:
        """Refuse, but not at once: clients that come straight back would take the time that answers need."""
        self._monitoring.count_shed()
        await asyncio.sleep(_REFUSAL_SECONDS)
        raise error
