"""What one tenant may take: requests and labels a second, and requests under way, counted by every process of its own.

A tenant is a key, or without keys a client's address. What a second allows may be saved up for some seconds. A request
is let in while its tenant owes nothing, and pays for its labels when they are known: one that asks for more than is
left is answered, and the next one waits until that is paid.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from time import monotonic

from longtail.serving.errors import QuotaExceededError
from longtail.serving.settings import Settings

asking: ContextVar[str] = ContextVar("tenant of the request", default="")
"""Who the request that this task answers is from."""

MOST_TENANTS = 4096
"""Tenants whose accounts are kept; of more, those are forgotten that have not asked for longest and have nothing under
way."""
_SUBNET = 64


@lru_cache(maxsize=1024)
def tenant_of_address(address: str) -> str:
    """The tenant that an address stands for; of IPv6 its /64, all of which one client has."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 6 and not ip.ipv4_mapped:
        return str(ipaddress.ip_network((int(ip) >> _SUBNET << _SUBNET, _SUBNET)))
    return str(ip.ipv4_mapped or ip) if ip.version == 6 else str(ip)


class _Account:
    __slots__ = ("at", "labels", "requests", "under_way")

    def __init__(self, at: float, requests: float, labels: float) -> None:
        self.at = at
        self.requests = requests
        self.labels = labels
        self.under_way = 0


class Quotas:
    """Accounts of tenants. For one thread, the event loop's.

    Args:
        settings: gives the settings of now, which may change.
        clock: seconds.
    """

    def __init__(self, settings: Callable[[], Settings], clock: Callable[[], float] = monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def enter(self, tenant: str, *, search: bool, labels: bool) -> None:
        """Let a request in, or not.

        Args:
            tenant: whose it is.
            search: whether it is under way until `leave`.
            labels: whether it asks for labels, which `charge` counts.

        Raises:
            QuotaExceededError: which of the tenant's quotas is used up, and for how long.
        """
        settings = self._settings()
        rate, most, searches = settings.quota_requests, settings.quota_labels, settings.quota_searches
        if rate is None and most is None and searches is None:
            return
        account = self._account(tenant, settings)
        if search and searches is not None and account.under_way >= searches:
            raise QuotaExceededError(
                f"expected at most {searches} searches of a client at a time (LONGTAIL_QUOTA_SEARCHES), found as many",
                quota="quota_searches", seconds=1.0,
            )  # fmt: skip
        if labels and most is not None and account.labels <= 0:
            raise QuotaExceededError(
                f"expected at most {most:g} labels a second asked for by one client (LONGTAIL_QUOTA_LABELS), "
                f"found {-account.labels:.0f} more than that asked for",
                quota="quota_labels", seconds=-account.labels / most,
            )  # fmt: skip
        if rate is not None:
            if account.requests < 1:
                raise QuotaExceededError(
                    f"expected at most {rate:g} requests a second of one client (LONGTAIL_QUOTA_REQUESTS), found more",
                    quota="quota_requests", seconds=(1 - account.requests) / rate,
                )  # fmt: skip
            account.requests -= 1
        account.under_way += search

    def charge(self, tenant: str, labels: int) -> None:
        """A request that was let in asks for so many labels."""
        if (account := self._accounts.get(tenant)) is not None:
            account.labels -= labels

    def leave(self, tenant: str) -> None:
        """A search that was let in has ended."""
        account = self._accounts.get(tenant)
        if account is not None and account.under_way:
            account.under_way -= 1

    def _account(self, tenant: str, settings: Settings) -> _Account:
        """The tenant's account, with what it has earned since it was looked at last."""
        now = self._clock()
        seconds = settings.quota_burst_seconds
        # So that a rate below one request in that time lets one in at all.
        most_requests = max(1.0, (settings.quota_requests or 0) * seconds)
        most_labels = (settings.quota_labels or 0) * seconds
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(now, most_requests, most_labels)
            if len(self._accounts) > MOST_TENANTS:
                self._forget_one(tenant)
        else:
            self._accounts.move_to_end(tenant)
            passed, account.at = now - account.at, now
            account.requests = min(most_requests, account.requests + passed * (settings.quota_requests or 0))
            account.labels = min(most_labels, account.labels + passed * (settings.quota_labels or 0))
        return account

    def _forget_one(self, but: str) -> None:
        gone = next((name for name, account in self._accounts.items() if not account.under_way and name != but), None)
        if gone is not None:
            del self._accounts[gone]
