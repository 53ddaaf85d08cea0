"""HTTP/1.1 connections that end when their client stalls, or sends a request head that is too long."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16
"""Bytes of request line and headers, about; uvicorn takes any number, and joins them in quadratic time."""
STALL_SECONDS = 10.0
"""How long a client may take to send the rest of a head, the first of a body, or the rest of a body that is not wanted
any more, and to read some of an answer."""


class HttpConnection(HttpToolsProtocol):
    """uvicorn's connection, ended when its client sends nothing it waits for, or takes nothing of an answer.

    uvicorn itself waits for ever for a head's end and for an answer to be read. While a request is being answered,
    the service's own limits hold (`request_seconds`).
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: start the timer for its first request."""
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._in_head, self._begun, self._head_bytes = True, False, 0
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come: parse them, and answer 400 to a head that gets too long."""
        self._begun = False
        super().data_received(data)
        # What a head began in may hold other requests as well.
        if self._in_head and not self._begun and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("Request head too long.")
        if self.transport.is_closing():
            self._start_timer()

    def on_message_begin(self) -> None:
        """A request head has begun: start the timer for the rest of it."""
        super().on_message_begin()
        self._in_head, self._begun, self._head_bytes = True, True, 0
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header was parsed: keep it, unless it is a trailer behind a chunked body."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: what follows is a body, or nothing."""
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of the body has come: stop the timer, for the service bounds the rest itself."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete: stop the timer while it is answered."""
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is written: start the timer for the next request, or for the client to read the answer."""
        super().on_response_complete()
        # uvicorn has begun to answer the next request by now, if the client did not wait.
        if self.cycle is None or self.cycle.response_complete:
            self._start_timer()

    def pause_writing(self) -> None:
        """The client does not read as fast as the service writes: start the timer for it to read some."""
        super().pause_writing()
        self._start_timer()

    def resume_writing(self) -> None:
        """The client has caught up: stop the timer while the service writes on."""
        super().resume_writing()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._unsent = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(STALL_SECONDS, self._end_if_stalled)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_if_stalled(self) -> None:
        """The time is up: close, unless some of an answer was read since; abort if an answer is unread."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent >= self._unsent:
            self.transport.abort()
        elif unsent:
            self._start_timer()
        else:
            self.transport.close()
