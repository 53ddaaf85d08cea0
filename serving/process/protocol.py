"""Bound the heads of requests in size and time."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Any

from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from longtail.serving.http.middleware import HEADERS, MOST_HEADERS, NO_CONTENT, random_bits
from longtail.serving.http.responses import error_response

_MOST_HEAD_BYTES = 1 << 16
_MOST_PIPELINED = 100
_OFFER = re.compile(rb"\n[Uu][Pp][Gg][Rr][Aa][Dd][Ee]")
"""The header `Upgrade`, or what begins like it; JSON in a body has no such line."""


class BoundedHeadProtocol(HttpToolsProtocol):
    """Bounds heads in bytes, fields and time; ignores offers to upgrade.

    uvicorn takes a head of any length, joins its parts in quadratic time and waits for its end without a limit, all
    before a key is checked. Here a head of more than 64 KiB, or an incomplete one of more than 100 fields, gets 431,
    and one that is incomplete after `head_seconds` 408. A connection that sends nothing for so long is closed, and one
    that sends the rest of an answered request for longer. Trailers and the framing of chunks count like a head's bytes.
    A connection with more than 100 requests that wait for the answers to earlier ones is closed: one read of a socket
    brings thousands, which uvicorn would parse at once.

    httptools ends a request with an `Upgrade` after its head, so its body would be lost. A server may ignore the offer
    [RFC 9110, 7.8], and here the header is renamed before it is parsed.

    Args:
        head_seconds: time for the head of a request.
        uvicorn: arguments of HttpToolsProtocol.
    """

    def __init__(self, *, head_seconds: float, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._head_seconds = head_seconds
        self._head_timer: asyncio.TimerHandle | None = None
        self._end = b""
        """Last bytes received, in which an offer may have begun."""
        self._head_bytes = 0
        """Bytes since the last end of a head or part of a body."""
        self._head_complete = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first head."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes; refuse an incomplete head that is too large."""
        self._head_bytes += len(data)
        joined = self._end + data
        if _OFFER.search(joined):
            data = _OFFER.sub(lambda offer: offer[0][:-1] + b"_", joined)[len(self._end) :]
        # One byte less than the pattern, which two reads may cut.
        self._end = joined[-7:]
        super().data_received(data)
        if self._head_bytes > _MOST_HEAD_BYTES:
            self._refuse_size(f"{_MOST_HEAD_BYTES} bytes of head")
        elif self._answering:
            return
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field, unless the head has too many."""
        super().on_header(name, value)
        if len(self.headers) > MOST_HEADERS and not self._head_complete:
            self._refuse_size(f"{MOST_HEADERS} headers")
            raise HttpParserError  # ends the parsing of these bytes

    def on_headers_complete(self) -> None:
        """Start to answer, unless the head is too large."""
        if len(self.pipeline) >= _MOST_PIPELINED:
            self.transport.close()
            raise HttpParserError  # ends the parsing of these bytes
        if self._head_bytes > _MOST_HEAD_BYTES:  # with the bytes behind it
            fields = sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)
            if len(self.url) + fields > _MOST_HEAD_BYTES:
                self._refuse_size(f"{_MOST_HEAD_BYTES} bytes of head")
                raise HttpParserError  # ends the parsing of these bytes
        self._head_bytes, self._head_complete = 0, True
        self._stop_timer()
        super().on_headers_complete()

    def on_message_begin(self) -> None:
        """Begin to read a request."""
        self._head_complete = False
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        # The framing between two parts of a body counts, the parts do not.
        self._head_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, and close."""
        self._refuse(HTTPStatus.BAD_REQUEST, "malformed_request", msg)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._head_seconds, self._time_out)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_out(self) -> None:
        self._head_timer = None
        if self._head_bytes:
            message = f"expected the whole head within {self._head_seconds:g} s, received a part of it"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "slow_head", message)
        else:
            self.transport.close()

    def _refuse_size(self, limit: str) -> None:
        message = f"expected at most {limit}, received more"
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", message)

    def _refuse(self, status: HTTPStatus, kind: str, message: str) -> None:
        """Close, with an error unless an answer is under way."""
        if not self._answering and not self.transport.is_closing():
            id_ = f"{random_bits(128):032x}"
            # Written by hand below, because uvicorn answers only requests that it has parsed.
            response = error_response(id_, status, kind, message)
            headers = [*response.raw_headers, *HEADERS, NO_CONTENT, (b"x-request-id", id_.encode())]
            fields = b"".join(b"%b: %b\r\n" % field for field in [*headers, (b"connection", b"close")])
            self.transport.write(STATUS_LINE[status] + fields + b"\r\n" + bytes(response.body))
        self.transport.close()
