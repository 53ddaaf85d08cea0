"""Call a Milvus server with a deadline, retries and a circuit breaker; translate its errors.

`LONGTAIL_MILVUS` names the server, or the proxy of a cluster. Only calls common to versions 2.3 to 2.6 are used.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from longtail.extras import pip_install
from longtail.index.errors import EngineUnavailableError, LongtailIndexError, SpecError

if TYPE_CHECKING:
    from pymilvus import MilvusClient

_FAILURES = 3
"""Consecutive failures after which the circuit opens."""
_FIRST_SECONDS, _LONGEST_SECONDS = 0.5, 5.0
"""Shortest and longest time that the circuit stays open; it doubles after every failed trial request."""


class Circuit:
    """A circuit breaker. Thread-safe.

    After some consecutive failures the circuit opens, and no request is sent for a while. Then one trial request goes
    through, and the circuit closes if it succeeds. Failed requests are retried only while the circuit is closed, so
    that retries never add to an overload.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._opened_at = self._open_until = -inf
        self._open_seconds = _FIRST_SECONDS

    def admit(self, seconds: float) -> tuple[float, float]:
        """Begin a request of `seconds` at most, if the circuit allows one.

        Returns the seconds to wait before the next trial, 0 if the request may be sent, and the time when the request
        began, for `failed`.
        """
        with self._lock:
            now = self._clock()
            wait = max(0.0, self._open_until - now)
            # This request is the trial: others wait as long as it may take.
            if self._failures >= _FAILURES and not wait:
                self._open_until = now + seconds
            return wait, now

    def succeeded(self) -> None:
        """Close the circuit after an answer."""
        with self._lock:
            self._failures, self._open_seconds, self._open_until = 0, _FIRST_SECONDS, -inf

    def failed(self, began: float) -> None:
        """Count a failed request, unless the request `began` before the circuit opened."""
        with self._lock:
            # An older request says nothing about the server since, so it must not lengthen the pause.
            if self._failures >= _FAILURES and began <= self._opened_at:
                return
            self._failures += 1
            if self._failures >= _FAILURES:
                self._opened_at = self._clock()
                self._open_until = self._opened_at + self._open_seconds
                self._open_seconds = min(2 * self._open_seconds, _LONGEST_SECONDS)

    @property
    def open(self) -> bool:
        """Return whether the circuit is open: no request is sent, except a trial."""
        with self._lock:
            return self._failures >= _FAILURES


VARIABLE, TOKEN_VARIABLE = "LONGTAIL_MILVUS", "LONGTAIL_MILVUS_TOKEN"
_PATIENT_SECONDS, _PATIENT_LOADING_SECONDS = 60.0, 3_600.0
"""Limits of commands that no client waits for."""
_BACK_OFF_SECONDS, _LONGEST_BACK_OFF_SECONDS, _LEAST_SECONDS = 0.05, 1.0, 0.01
_TRANSPORT, _NOT_FOUND, _NOT_LOADED = -1, 100, 101
"""Our code of a transport error, and Milvus's codes of a collection that does not exist or is not loaded."""
_REFUSED = (
    "cannot parse expression", "invalid parameter", "is invalid", "duplicated", "message larger than max",
    "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", "auth check failure",
)  # fmt: skip
"""Parts of the answers that refuse a request for good: a retry would fail as well."""

Answer = TypeVar("Answer")
_until: ContextVar[float | None] = ContextVar("until", default=None)


class MilvusServer:
    """A Milvus server; the first request connects to it. Thread-safe.

    Args:
        uri: `http://HOST:PORT/DATABASE`, or https://; without a database the default one.
        token: `USER:PASSWORD` or a key; empty for a server without authentication.
        seconds: longest duration of one request, retries included.
        loading_seconds: longest wait for a collection to be loaded.
    """

    def __init__(
        self,
        uri: str,
        token: str = "",
        seconds: float = _PATIENT_SECONDS,
        loading_seconds: float = _PATIENT_LOADING_SECONDS,
    ) -> None:
        try:
            parts = urlsplit(uri)
            is_valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True) and "@" not in uri
        except ValueError:
            is_valid = False
        if not is_valid:
            received = "one with a user, which is for LONGTAIL_MILVUS_TOKEN" if "@" in uri else repr(uri)
            raise SpecError(f"{VARIABLE}: expected http://HOST:PORT or http://HOST:PORT/DATABASE, received {received}")
        self._uri = f"{parts.scheme}://{parts.netloc}"
        self._database = parts.path.strip("/")
        self._token = token
        self.seconds, self.loading_seconds = seconds, loading_seconds
        self._circuit = Circuit()
        self._client: MilvusClient | None = None
        self._connecting = threading.Lock()
        self._last = ""
        self._lacks: dict[str, str] = {}

    @classmethod
    def named(cls) -> MilvusServer:
        """Create the server that `LONGTAIL_MILVUS` and `LONGTAIL_MILVUS_TOKEN` name; raises SpecError."""
        uri = os.environ.get(VARIABLE)
        if not uri:
            raise SpecError(
                f"expected the address of a Milvus server in {VARIABLE}, such as http://127.0.0.1:19530, received none"
            )
        return cls(uri, os.environ.get(TOKEN_VARIABLE, ""))

    def __str__(self) -> str:
        """Return the server's address, without the token."""
        return f"Milvus at {self._uri}" + (f", database {self._database}" if self._database else "")

    def problem(self, about: str) -> str | None:
        """Get the last failure while the circuit is open or a collection is missing; None otherwise."""
        return self._last if self._circuit.open else self._lacks.get(about)

    def reconnected(self) -> MilvusServer:
        """Create a client of the same server with a closed circuit and no remembered failures."""
        return MilvusServer(f"{self._uri}/{self._database}", self._token, self.seconds, self.loading_seconds)

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """Enter a context whose requests share one limit of seconds, instead of `self.seconds` each.

        Threads that run in a copy of this context share the limit. Inside another such context the outer limit holds.
        """
        if _until.get() is not None:
            yield
            return
        token = _until.set(monotonic() + seconds)
        try:
            yield
        finally:
            _until.reset(token)

    def ask(
        self, work: Callable[[MilvusClient, float], Answer], *, about: str = "", seconds: float | None = None
    ) -> Answer:
        """Send a request, with retries, and return the server's answer.

        Args:
            work: sends the request by a client within the given seconds; retries call it again.
            about: subject of the request for error messages, such as `collection NAME`.
            seconds: limit for all attempts together; None: the server's.

        Raises:
            EngineUnavailableError: the server does not answer in time, the circuit is open, or the server lacks the
                collection.
            LongtailIndexError: the server refuses the request.
        """
        began = monotonic()
        until = began + (seconds or self.seconds)
        if (shared := _until.get()) is not None:
            until = shared
        allowed, back_off = until - began, _BACK_OFF_SECONDS
        subject = ", ".join(filter(None, [str(self), about]))
        if allowed < _LEAST_SECONDS:
            raise EngineUnavailableError(f"{subject}: the time limit has passed before this request could be sent")
        wait, admitted = self._circuit.admit(allowed)
        if wait > 0:
            raise EngineUnavailableError(
                f"{subject}: the server did not answer the last requests ({self._last}); the next trial is in "
                f"{wait:.1f} s",
                seconds=wait,
            )
        while True:
            try:
                answer = work(self._connected(until), until - monotonic())
            except EngineUnavailableError as error:
                # The server answered, so the circuit closes: only this collection is not ready.
                self._lacks[about] = str(error)
                self._circuit.succeeded()
                raise
            except Exception as error:
                code, message = _parse_error(error)
                if code is None:
                    raise
                if code in (_NOT_FOUND, _NOT_LOADED):
                    self._circuit.succeeded()
                    self._lacks[about] = message
                    raise EngineUnavailableError(f"{subject}: {message}") from error
                if any(words in message for words in _REFUSED):
                    self._circuit.succeeded()
                    raise LongtailIndexError(f"{subject}: {message}") from error
                self._last = message
                self._circuit.failed(admitted)
                if until - monotonic() < back_off + _LEAST_SECONDS or self._circuit.open:
                    raise EngineUnavailableError(f"{subject}: the server did not answer: {message}") from error
                sleep(back_off)
                back_off *= 2
            else:
                self._circuit.succeeded()
                self._lacks.pop(about, None)
                return answer

    def wait_until(self, done: Callable[[MilvusClient, float], bool], seconds: float, about: str) -> None:
        """Poll the server until a long operation is done; raises EngineUnavailableError after `seconds`."""
        until, pause = monotonic() + seconds, _BACK_OFF_SECONDS
        while not self.ask(done, about=about):
            if monotonic() > until:
                raise EngineUnavailableError(
                    f"{self}, {about}: expected the operation to end within {seconds:g} s, but it is still running"
                )
            sleep(pause)
            pause = min(2 * pause, _LONGEST_BACK_OFF_SECONDS)

    def version(self) -> str:
        """Get the server's version."""
        return str(self.ask(lambda client, _: client.get_server_version()))

    def _connected(self, until: float) -> MilvusClient:
        if self._client is not None:
            return self._client
        # One thread connects; the others wait, but only as long as their own request may take.
        if not self._connecting.acquire(timeout=max(0.0, until - monotonic())):
            raise TimeoutError("another request connects")
        try:
            if self._client is None:
                self._client = self._connect(max(_LEAST_SECONDS, until - monotonic()))
            return self._client
        finally:
            self._connecting.release()

    def _connect(self, seconds: float) -> MilvusClient:
        try:
            from pymilvus import MilvusClient
        except ModuleNotFoundError as error:
            raise SpecError(f"expected pymilvus for Milvus, found none: {pip_install('milvus')}") from error
        # pymilvus logs every failure, although the exception says the same.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        options: dict[str, Any] = {"db_name": self._database} if self._database else {}
        return MilvusClient(uri=self._uri, token=self._token, timeout=seconds, **options)


def _parse_error(error: Exception) -> tuple[int | None, str]:
    """Return the code and message of a Milvus or transport error; code None for any other error."""
    import grpc
    from pymilvus.exceptions import MilvusException

    cause = error if isinstance(error, grpc.RpcError) else error.__cause__
    if isinstance(cause, grpc.RpcError) and isinstance(cause, grpc.Call):
        return _TRANSPORT, f"{cause.code().name}: {cause.details()}"
    if isinstance(error, MilvusException):
        return error.code, " ".join(str(error.message).split())[:500]
    return (_TRANSPORT, str(error)) if isinstance(error, grpc.FutureTimeoutError | TimeoutError) else (None, "")
