"""A connection that a client cannot hold for nothing: bounds on the head of a request, and on waiting for a client."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LONGEST_HEAD = 1 << 16
"""Bytes of request line and headers, about; uvicorn takes any number, and joins them in quadratic time."""
SECONDS = 10.0
"""For the rest of a head, for the first of a body, for the rest of one that is not wanted any more, and for any of an
answer to be taken."""


class Connection(HttpToolsProtocol):
    """uvicorn's, but it ends when its client does not go on.

    uvicorn itself waits for ever for a head's end and for an answer to be read. While a request is being answered,
    the service's own limits hold (`request_seconds`).
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._in_head, self._begun, self._head_bytes = True, False, 0
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take some bytes, unless the head gets too long."""
        self._begun = False
        super().data_received(data)
        # What a head began in may hold other requests as well.
        if self._in_head and not self._begun and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > LONGEST_HEAD:
                self.send_400_response("Request head too long.")
        if self.transport.is_closing():
            self._wait()

    def on_message_begin(self) -> None:
        """A head has begun."""
        super().on_message_begin()
        self._in_head, self._begun, self._head_bytes = True, True, 0
        self._wait()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; of trailers, nothing is wanted."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """What is left is a body, or nothing."""
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of the body has come: the service waits for the rest itself."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of the request is there."""
        self._stop()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the client to take what is unsent."""
        super().on_response_complete()
        # uvicorn has begun to answer the next request by now, if the client did not wait.
        if self.cycle is None or self.cycle.response_complete:
            self._wait()

    def pause_writing(self) -> None:
        """The client does not keep up."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()

    def _wait(self) -> None:
        self._stop()
        self._unsent = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(SECONDS, self._look)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Nothing has come for a while: go on only if some of an answer was taken."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent >= self._unsent:
            self.transport.abort()
        elif unsent:
            self._wait()
        else:
            self.transport.close()
