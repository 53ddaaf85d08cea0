"""Who may ask, and who may change things: API keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from longtail.bundle.errors import describe
from longtail.serving.core.queue import client
from longtail.serving.errors import ForbiddenError, ServingError, UnauthenticatedError
from longtail.serving.http.head import head_of
from longtail.serving.http.responses import serving_error
from longtail.serving.settings import Settings, is_loopback

OPEN_PATHS = frozenset({"/livez", "/readyz", "/dashboard", "/docs", "/openapi.json"})
"""Paths that hold nothing of the model or its traffic: probes, the page that asks for a key, the documentation."""


_FINGERPRINT = 12


class KeySet:
    """A set of keys, held as digests: comparing tells nothing about a key, nor does a dump of this object."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def has(self, key: str) -> bool:
        """Whether this is one of them: its digest is compared with every key's, each in constant time."""
        digest = _digest(key)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found


class Keys:
    """The keys that a service knows; others can take their place while it runs.

    Args:
        settings: the service's.

    Raises:
        ValueError, OSError: as `Settings.all_api_keys`.
    """

    def __init__(self, settings: Settings) -> None:
        self._sets = self._read(settings)

    @property
    def sets(self) -> tuple[KeySet, KeySet]:
        """Keys that may ask, and keys that may also change things; always of one reading."""
        return self._sets

    def replace(self, settings: Settings) -> None:
        """Know these from now on, and no others; raises as the class, and knows what it did then."""
        self._sets = self._read(settings)

    @staticmethod
    def _read(settings: Settings) -> tuple[KeySet, KeySet]:
        return KeySet(settings.all_api_keys()), KeySet(settings.all_admin_keys())


class AuthMiddleware:
    """ASGI middleware that lets only requests with a key pass, but for those to `OPEN_PATHS`.

    A key comes as `Authorization: Bearer KEY` or `X-API-Key: KEY`. Without any keys configured everybody passes
    and may do everything, but for pages of other hosts in a browser on this machine: those that say so in Origin, and
    those whose name was made to mean this machine (DNS rebinding), which stands in Host. Probes may say any Host.

    Args:
        app: what is guarded.
        keys: those that may pass.
        insecure: without keys, let pages of any host ask, too.
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
        """Why a request may not pass; notes who asks, and whether they may, and may change things."""
        head, state = head_of(scope), scope["state"]
        api, admin = self._keys.sets
        if not (api or admin):
            state["admin"] = state["may_ask"] = True
            client.set(_client_of((scope.get("client") or ("",))[0]))
            origin, host = head.get(b"origin"), head.get(b"host")
            if self._insecure:
                return None
            if origin is not None and not _is_here(origin):
                return ForbiddenError(
                    "expected keys, or a request that no page of another host makes, received one by "
                    f"{describe(origin.decode('latin-1'))}"
                )
            if host is not None and not _is_here(b"//" + host) and not _is_open(scope["path"]):
                return ForbiddenError(
                    "expected keys, LONGTAIL_INSECURE behind a gateway, or a Host that is this machine, such as "
                    f"localhost, received {describe(host.decode('latin-1'))}"
                )
            return None
        key = _key(head)
        client.set(_fingerprint(key))
        state["admin"] = admin.has(key)
        state["may_ask"] = state["admin"] or api.has(key)
        if state["may_ask"] or _is_open(scope["path"]):
            return None
        return UnauthenticatedError(
            "expected a key of this service in Authorization: Bearer or X-API-Key, received "
            + ("another one" if key else "none")
        )


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
def _is_here(origin: bytes) -> bool:
    """Whether the host in a URL is this machine."""
    try:
        return is_loopback(urlsplit(origin.decode("latin-1")).hostname or "")
    except ValueError:
        return False


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/docs/assets/")


def require_admin(request: Request, **what: object) -> None:
    """Raise ForbiddenError unless the request came with an admin key, or no keys are configured.

    The audit log has a line about the request either way, with what it is about. It tells keys apart by
    12 hexadecimal digits of their SHA-256.
    """
    key = _key(head_of(request.scope))
    request.state.audited = {"key": _fingerprint(key) if key else None, **what}
    if not request.state.admin:
        raise ForbiddenError("expected an admin key for this route, received a key that may only ask")


def _key(head: Mapping[bytes, bytes]) -> str:
    scheme, _, key = head.get(b"authorization", b"").partition(b" ")
    received = key.strip() if scheme.lower() == b"bearer" else head.get(b"x-api-key", b"")
    return received.decode("utf-8", "surrogateescape")


def _fingerprint(key: str) -> str:
    """What tells keys apart, in the audit log and in the queue."""
    return _digest(key).hex()[:_FINGERPRINT]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
