"""API keys, compared in constant time: which requests pass, and which may change things."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from longtail.bundle.errors import describe
from longtail.serving.core.queue import client
from longtail.serving.errors import ForbiddenError, ServingError, UnauthenticatedError
from longtail.serving.http.responses import serving_error
from longtail.serving.settings import Settings, is_loopback

OPEN_PATHS = frozenset({"/livez", "/readyz", "/dashboard", "/docs", "/openapi.json"})
"""Paths that show nothing of the model or its traffic: probes, the page that wants a key, the documentation."""
_FINGERPRINT = 12


class Keys:
    """The keys that a service knows, held as digests, so that neither comparing nor a memory dump shows one.

    Args:
        settings: the service's.

    Raises:
        ValueError, OSError: a file of keys cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        self.replace(settings)

    def replace(self, settings: Settings) -> None:
        """Know the keys of these settings from now on; if they cannot be read, those of before stay."""
        self._digests = (
            [_digest(key) for key in settings.all_api_keys()],
            [_digest(key) for key in settings.all_admin_keys()],
        )

    def rights(self, key: str) -> tuple[bool, bool]:
        """Return whether a key may query, and whether it may change things; without any keys every request may."""
        queries, changes = self._digests
        if not (queries or changes):
            return True, True
        digest = _digest(key)
        # Compared with every key, so that the time says nothing about one.
        admin = sum([hmac.compare_digest(known, digest) for known in changes]) > 0
        return sum([hmac.compare_digest(known, digest) for known in queries]) > 0 or admin, admin

    def __bool__(self) -> bool:
        return any(self._digests)


class AuthMiddleware:
    """Lets only requests with a key pass, except to `OPEN_PATHS`.

    A key comes as `Authorization: Bearer KEY` or `X-API-Key: KEY`. Without any keys configured every request passes
    and may change things, except those of web pages of other hosts in a browser on this machine: cross-origin requests
    (Origin) and DNS rebinding (Host). Probes may have any Host.

    Args:
        app: the application.
        keys: those that may pass.
        insecure: without keys, let pages of any host pass, too.
    """

    def __init__(self, app: ASGIApp, keys: Keys, *, insecure: bool = False) -> None:
        self._app = app
        self._keys = keys
        self._insecure = insecure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await serving_error(scope["state"]["request_id"], error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ServingError | None:
        """Return why a request may not pass; record its client and rights for the routes."""
        headers, state = Headers(scope=scope), scope["state"]
        key = _key(headers)
        state["may_ask"], state["admin"] = self._keys.rights(key)
        if not self._keys:
            client.set(_client_of((scope.get("client") or ("",))[0]))
            return None if self._insecure else _foreign_page(headers, scope["path"])
        client.set(_fingerprint(key))
        if state["may_ask"] or _is_open(scope["path"]):
            return None
        return UnauthenticatedError(
            "expected a key of this service in Authorization: Bearer or X-API-Key, received "
            + ("another one" if key else "none")
        )


def require_admin(request: Request, **what: object) -> None:
    """Raise ForbiddenError unless the request came with an admin key, or no keys are configured.

    The audit log has a line about the request either way, with `what` it is about. It tells keys apart by
    12 hexadecimal digits of their SHA-256.
    """
    key = _key(request.headers)
    request.state.audited = {"key": _fingerprint(key) if key else None, **what}
    if not request.state.admin:
        raise ForbiddenError("expected an admin key for this route, received a key that may only ask")


def _foreign_page(headers: Headers, path: str) -> ForbiddenError | None:
    """Return why a request seems to come from a web page of another host, if it does."""
    origin, host = headers.get("origin"), headers.get("host")
    if origin is not None and not _is_here(origin):
        return ForbiddenError(
            f"expected keys, or a request that no page of another host makes, received one by {describe(origin)}"
        )
    if host is not None and not _is_here(f"//{host}") and not _is_open(path):
        return ForbiddenError(
            "expected keys, LONGTAIL_INSECURE behind a gateway, or a Host that is this machine, such as "
            f"localhost, received {describe(host)}"
        )
    return None


@lru_cache(maxsize=1024)
def _client_of(address: str) -> str:
    """Return the client that an address stands for: of IPv6 its /64, all of which one client has."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 4 or ip.ipv4_mapped:
        return str(ip if ip.version == 4 else ip.ipv4_mapped)
    return str(ipaddress.ip_network((int(ip) >> 64 << 64, 64)))


@lru_cache(maxsize=64)
def _is_here(url: str) -> bool:
    """Return whether the host in a URL is this machine."""
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/docs/assets/")


def _key(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    received = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    # Headers arrive as latin-1; keys are UTF-8.
    return received.encode("latin-1").decode("utf-8", "surrogateescape")


def _fingerprint(key: str) -> str:
    """Return what tells keys apart in the audit log and in the queue."""
    return _digest(key).hex()[:_FINGERPRINT]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
