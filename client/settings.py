"""What both clients are made with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import httpx


@dataclass(frozen=True)
class Settings:
    """Where the service is and how patiently it is asked; its repr has no key.

    Args:
        url: of the service, such as `https://longtail.example`; may have a path for the routes to follow.
        api_key: sent as `Authorization: Bearer`.
        timeout: seconds that one call may take, its retries and the waits between them included. One read of a
            socket waits for as long as is left, so an answer that trickles in can take longer.
        retries: further attempts after the first.

    Raises:
        ValueError: one of them cannot be; the message holds neither key nor URL.
    """

    url: str
    api_key: str | None = field(repr=False)
    timeout: float
    retries: int

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ValueError(f"url: expected http(s)://HOST…, received none: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"url: expected http(s)://HOST…, received one of scheme {url.scheme!r}")
        if url.userinfo or url.query or url.fragment:
            raise ValueError("url: expected scheme, host, port and path, received a password, query or fragment, too")
        # Checked here because httpx and h11 quote a header that they refuse.
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("api_key: expected printable ASCII, received other characters")
        if self.api_key is not None and (not self.api_key or " " in self.api_key):
            raise ValueError("api_key: expected a key or None, received one that is empty or has a space")
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ValueError(f"timeout: expected seconds > 0, received {self.timeout}")
        if self.retries < 0:
            raise ValueError(f"retries: expected at least 0, received {self.retries}")

    def headers(self) -> dict[str, str]:
        """Sent with every request."""
        authorization = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Accept": "application/json", **authorization}
