"""HTTP/1.1 connections that end when their client stalls or is silent, sends too long a request head, or all must."""

from __future__ import annotations

import asyncio
import logging
import select
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from longtail.bundle.errors import describe
from longtail.serving.http.direct import SEARCHING
from longtail.serving.http.ids import new_id
from longtail.serving.http.middleware import HEADERS
from longtail.serving.http.responses import PROBLEM, problem

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 1 << 16
"""Bytes of request line and headers, about; uvicorn takes any number, and joins them in quadratic time."""
STALL_SECONDS = 10.0
"""How long a client may take to send the rest of a head, the first of a body, or the rest of a body that is not wanted
any more, and to read some of an answer."""
_LOOK_AGAIN_SECONDS = 0.01
_NOT_AT_ONCE = frozenset({b"connection", b"transfer-encoding"})


@dataclass
class Keeping:
    """How long the connections of a server are kept.

    Attributes:
        seconds: how long one stays open after an answer, for its client to send the next request.
        last: every answer from now on is the last of its connection, and says so.
    """

    seconds: float = 5.0
    last: bool = False


class HttpConnection(HttpToolsProtocol):
    """uvicorn's connection, ended when its client sends nothing it waits for, or takes nothing of an answer.

    uvicorn itself waits for ever for a head's end and for an answer to be read. While a request is being answered,
    the service's own limits hold (`request_seconds`). A request that has arrived is always answered: before a silent
    connection is closed, the system is asked whether something has come that the event loop has not read yet.

    Args:
        keeping: shared by the connections of a server.
        uvicorn: as of HttpToolsProtocol.
    """

    def __init__(self, *, keeping: Keeping | None = None, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._keeping = keeping or Keeping()
        self._last: RequestResponseCycle | None = None

    @property
    def answering(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def end_with_answer(self) -> None:
        """Close behind the answer to the request under way, if there is one; it says so, unless it has begun."""
        if self.cycle is not None and self.cycle.keep_alive and not self.cycle.response_started:
            self.cycle.keep_alive, self._last = False, self.cycle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: start the timer for its first request."""
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None
        self._unsent = 0
        self._in_head, self._begun, self._head_bytes = True, False, 0
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: stop the timer, and the search that it waits for."""
        self._stop_timer()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.answering and (task := self.cycle.scope["state"].pop(SEARCHING, None)) is not None:
            task.cancel()
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
        # In time: uvicorn has made a task for the answer, which begins in the next turn of the event loop.
        self.cycle.send = _Sender(self.cycle)  # type: ignore[method-assign, assignment]
        if self._keeping.last:
            # Of several requests that the client has not waited for, the newest one's answer is the last.
            if self._last is not None and not self._last.response_started:
                self._last.keep_alive = True
            self.end_with_answer()

    def on_body(self, body: bytes) -> None:
        """Some of the body has come: stop the timer, for the service bounds the rest itself."""
        if self.answering:
            self._stop_timer()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete: stop the timer while it is answered."""
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is written: start the timers for the next request, and for the client to read the answer."""
        self.timeout_keep_alive = self._keeping.seconds  # type: ignore[assignment]
        super().on_response_complete()
        # uvicorn has begun to answer the next request by now, if the client did not wait.
        if not self.answering:
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the shape of every error, and close."""
        id_ = new_id()
        body = problem(id_, HTTPStatus.BAD_REQUEST, "malformed_request", msg)
        own = {"content-type": PROBLEM, "content-length": len(body), "connection": "close", "x-request-id": id_}
        lines = [b"HTTP/1.1 400 Bad Request", *(f"{name}: {value}".encode() for name, value in own.items())]
        lines += [name + b": " + value for name, value in HEADERS]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Say that a client's wish for another protocol is not met: its request is answered as HTTP."""
        logger.info("upgrade to %s not taken", describe((self._get_upgrade() or b"").decode("latin-1")))

    def timeout_keep_alive_handler(self) -> None:
        """The client has been silent since the last answer: close."""
        if self._has_unread():
            self.timeout_keep_alive_task = self.loop.call_later(_LOOK_AGAIN_SECONDS, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        """The client does not read as fast as the service writes: start the timer for it to read some."""
        super().pause_writing()
        self._start_timer()

    def resume_writing(self) -> None:
        """The client has caught up: stop the timer while the service writes on."""
        super().resume_writing()
        if self.answering:
            self._stop_timer()

    def _has_unread(self) -> bool:
        """Whether bytes or the client's end have arrived on an open connection that were not read yet."""
        file = self.transport.get_extra_info("socket").fileno()
        if self.transport.is_closing() or file < 0:
            return False
        poll = select.poll()
        poll.register(file, select.POLLIN)
        return bool(poll.poll(0))

    def _start_timer(self, seconds: float | None = None) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._due = self.loop.time() + (STALL_SECONDS if seconds is None else seconds)
        # One that rings before stays: it is looked at then what is due. Requests come faster than timers are made.
        if self._timer is None or self._timer.when() > self._due:
            self._ring_at(self._due)

    def _stop_timer(self) -> None:
        self._due = None

    def _ring_at(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._due is None:
            return
        if self._due > self.loop.time():
            self._ring_at(self._due)
        else:
            self._due = None
            self._end_if_stalled()

    def _end_if_stalled(self) -> None:
        """The time is up: close, unless some of an answer was read since; abort if an answer is unread."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent >= self._unsent:
            self.transport.abort()
        elif unsent:
            self._start_timer()
        elif self.timeout_keep_alive_task is not None:
            # Answered, and read: how long the connection stays open now is not this timer's to say.
            pass
        elif self._in_head and not self._head_bytes and self._has_unread():
            self._start_timer(_LOOK_AGAIN_SECONDS)
        else:
            self.transport.close()


class _Sender:
    """What an application sends an answer by: a whole answer of known length is written all at once.

    uvicorn's own `send` writes head and body by a system call each, and looks through every header twice.

    Args:
        cycle: whose `send` this takes the place of.
    """

    __slots__ = ("_cycle", "_start")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        """Send a message of ASGI, the first of an answer with the second; raises as `RequestResponseCycle.send`."""
        if message["type"] == "http.response.start" and not self._cycle.response_started:
            self._start = message
            return
        start, self._start = self._start, None
        if start is not None:
            if self._write_whole(start, message):
                return
            await RequestResponseCycle.send(self._cycle, start)  # type: ignore[arg-type]
        await RequestResponseCycle.send(self._cycle, message)  # type: ignore[arg-type]

    def _write_whole(self, start: Message, message: Message) -> bool:
        """Write an answer, unless it is not whole, or there is more to see to than its length."""
        cycle, headers, body = self._cycle, start.get("headers", ()), message.get("body", b"")
        named = dict(headers)
        if (
            message.get("more_body", False)
            or named.get(b"content-length") != b"%d" % len(body)
            or not named.keys().isdisjoint(_NOT_AT_ONCE)
            or cycle.scope["method"] == "HEAD"
            or cycle.flow.write_paused
            or cycle.disconnected
        ):
            return False
        lines = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines) or b"\0" in head:
            return False
        cycle.waiting_for_100_continue = False
        cycle.response_started = cycle.response_complete = True
        cycle.transport.writelines([STATUS_LINE[start["status"]] + head + b"\r\n", body])
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True
