"""Check API keys in constant time, and grant rights."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Mapping
from functools import lru_cache
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request

from longtail.bundle.errors import describe
from longtail.serving.core.queue import client
from longtail.serving.errors import ForbiddenError, ServingError, UnauthenticatedError
from longtail.serving.settings import Settings, is_loopback

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/livez", "/readyz", "/dashboard", "/docs", "/openapi.json"})
"""Paths without data of the model or its traffic: probes, first page, shell of the dashboard, documentation."""
_FINGERPRINT = 12
"""Hexadecimal digits of a key's SHA-256 that identify the key in the audit log and in the queue."""


class Keys:
    """API keys, stored as digests.

    A key comes as `Authorization: Bearer KEY` or `X-API-Key: KEY`. Without any keys configured every request passes
    and may change things, except those of web pages of other hosts in a browser on this machine: cross-origin requests
    (Origin) and DNS rebinding (Host). Probes may have any Host.

    Raises:
        ValueError, OSError: a file of keys cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._digests = self._read()
        self._reading = Lock()

    def _read(self) -> tuple[list[bytes], ...]:
        return tuple([_digest(key) for key in keys] for keys in self._settings.read_keys())

    def read_again(self) -> None:
        """Read the key files again; if a file is wrong, log the error and keep the previous keys."""
        with self._reading:
            try:
                digests = self._read()
                # A file that was emptied by mistake must not open the service to all.
                if any(self._digests) and not any(digests):
                    raise ValueError("expected at least one key, as before, found none; without keys all may do all")
            except (ValueError, OSError) as error:
                logger.error("keys were read again and refused, those of before hold: %s", error)
                return
            self._digests = digests
        logger.info("keys were read again: %d may ask, %d may change things", *map(len, digests))

    def refusal(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> ServingError | None:
        """Return the error of a refused request, otherwise None; record client and rights for routes."""
        path, state = scope["path"], scope["state"]
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        received = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        # A key may hold any bytes; its digest must not depend on their encoding.
        key = received.decode("utf-8", "surrogateescape")
        digest, (queries, changes) = _digest(key) if key else b"", self._digests
        state["key"] = digest.hex()[:_FINGERPRINT] or None
        # Always compared with every key, so that the time does not depend on which one matches.
        asks, admin = (sum([hmac.compare_digest(stored, digest) for stored in keys]) > 0 for keys in (queries, changes))
        state["admin"] = admin or not (queries or changes)
        is_open = path in OPEN_PATHS or path.startswith("/docs/assets/")
        if queries or changes:
            client.set(state["key"] or "")
            if asks or admin or is_open:
                return None
            return UnauthenticatedError(
                "expected a key of this service in Authorization: Bearer or X-API-Key, received "
                + ("another one" if key else "none")
            )
        client.set(_identify_client((scope.get("client") or ("",))[0]))
        if self._settings.insecure:
            return None
        origin, host = (headers[name].decode("latin-1") if name in headers else None for name in (b"origin", b"host"))
        # A page of another host could act here through its visitor's browser.
        if origin is not None and not _is_local(origin):
            return ForbiddenError(
                f"expected keys, or a request that no page of another host makes, received one by {describe(origin)}"
            )
        # A foreign name may resolve to this machine (DNS rebinding), and its page is then same-origin.
        if host is not None and not is_open and not _is_local(f"//{host}"):
            return ForbiddenError(
                "expected keys, LONGTAIL_INSECURE behind a gateway, or a Host that is this machine, such as "
                f"localhost, received {describe(host)}"
            )
        return None


def require_admin(request: Request) -> None:
    """Raise ForbiddenError without an admin key, unless none exist.

    The audit log gets a line about the request in both cases.
    """
    id_ = request.path_params.get("id")
    request.state.audited = {"key": request.state.key} | ({} if id_ is None else {"labels": [id_]})
    if not request.state.admin:
        raise ForbiddenError("expected an admin key for this route, received a key that may only ask")


@lru_cache(maxsize=1024)
def _identify_client(address: str) -> str:
    """Return the client of an address: for IPv6 the /64 network, which belongs to one client."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 4 or ip.ipv4_mapped:
        return str(ip if ip.version == 4 else ip.ipv4_mapped)
    return str(ipaddress.ip_network((int(ip) >> 64 << 64, 64)))


@lru_cache(maxsize=64)
def _is_local(url: str) -> bool:
    """Return whether the host in a URL is this machine."""
    try:
        parts = urlsplit(url)
        return is_loopback(parts.hostname or "") and not ("@" in url or parts.path or parts.query)
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
