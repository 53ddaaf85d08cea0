"""A Milvus server or cluster: asked with a deadline, a budget of retries and a circuit breaker, its errors ours.

Nothing of a cluster is told here: `LONGTAIL_MILVUS` names its proxy. The calls are those that versions 2.3 to 2.6 have
in common.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from longtail.index.errors import EngineUnavailableError, LongtailIndexError, SpecError
from longtail.index.search.circuit import Circuit

if TYPE_CHECKING:
    from pymilvus import MilvusClient

VARIABLE, TOKEN_VARIABLE = "LONGTAIL_MILVUS", "LONGTAIL_MILVUS_TOKEN"
_PATIENT_SECONDS = 60.0
"""Of commands that nobody waits for online."""
_BACK_OFF_SECONDS, _LEAST_SECONDS = 0.05, 0.01
_LONGEST_PAUSE_SECONDS = 1.0
_NOT_FOUND, _NOT_LOADED = 100, 101
"""Milvus's codes of a collection that is not there, or not in memory."""
_REFUSED = ("cannot parse expression", "invalid parameter", "is invalid")

Answer = TypeVar("Answer")


class MilvusServer:
    """A Milvus server, which is connected to when it is first asked. Thread-safe.

    Args:
        uri: `http://HOST:PORT/DATABASE`, or https://; without a database the default one.
        token: `USER:PASSWORD` or a key; empty for a server without authentication.
        seconds: the longest that one request may take, retries among them.
        circuit: decides when it is asked.

    Raises:
        SpecError: no such address.
    """

    def __init__(
        self, uri: str, token: str = "", seconds: float = _PATIENT_SECONDS, circuit: Circuit | None = None
    ) -> None:
        parts = urlsplit(uri)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SpecError(
                f"{VARIABLE}: expected http://HOST:PORT or http://HOST:PORT/DATABASE, received {_bare(uri)!r}"
            )
        self._uri = f"{parts.scheme}://{parts.netloc}"
        self._database = parts.path.strip("/")
        self._token = token
        self.seconds = seconds
        self._circuit = circuit or Circuit()
        self._client: MilvusClient | None = None
        self._last = ""
        self._lacks: str | None = None

    @classmethod
    def named(cls, uri: str | None = None, token: str | None = None, seconds: float = _PATIENT_SECONDS) -> MilvusServer:
        """The server of an address, or of the environment.

        Args:
            uri, token: as of the class; None: what `LONGTAIL_MILVUS` and `LONGTAIL_MILVUS_TOKEN` say.
            seconds: as of the class.

        Raises:
            SpecError: no address, or none such.
        """
        uri = uri or os.environ.get(VARIABLE)
        if not uri:
            raise SpecError(
                f"expected the address of a Milvus server in {VARIABLE}, such as http://127.0.0.1:19530, received none"
            )
        return cls(uri, token or os.environ.get(TOKEN_VARIABLE, ""), seconds)

    def __str__(self) -> str:
        """Its address, without what it may hold of a password."""
        return f"Milvus at {_bare(self._uri)}" + (f", database {self._database}" if self._database else "")

    @property
    def problem(self) -> str | None:
        """What it said last, if it is not asked now for that, or lacks what it was asked for; None: it answers."""
        return self._last if self._circuit.open else self._lacks

    def ask(
        self, work: Callable[[MilvusClient, float], Answer], *, about: str = "", seconds: float | None = None
    ) -> Answer:
        """What the server answers.

        Args:
            work: asks by a client, within so many seconds; may be called again.
            about: what is asked about, for the errors, such as `collection NAME`.
            seconds: for it all; None: the server's.

        Raises:
            EngineUnavailableError: it does not answer in time, or has not lately, or lacks the collection.
            LongtailIndexError: it does not understand.
        """
        seconds, where = seconds or self.seconds, ", ".join(filter(None, [str(self), about]))
        began, back_off = monotonic(), _BACK_OFF_SECONDS
        if (wait := self._circuit.admit(seconds)) > 0:
            raise EngineUnavailableError(
                f"{self}: expected a server that answers, found one that has not lately ({self._last}); it is asked "
                f"again in {wait:.1f} s",
                seconds=wait,
            )
        while True:
            try:
                answer = work(self._connected(seconds), seconds - (monotonic() - began))
            except Exception as error:
                code, said = _told(error)
                if code is None:
                    raise
                if code in (_NOT_FOUND, _NOT_LOADED):
                    self._circuit.succeeded()
                    self._lacks = said
                    raise EngineUnavailableError(f"{where}: {said}") from error
                if any(words in said for words in _REFUSED):
                    self._circuit.succeeded()
                    raise LongtailIndexError(f"{where}: {said}") from error
                self._last = said
                self._circuit.failed()
                left = seconds - (monotonic() - began) - back_off
                if left < _LEAST_SECONDS or not self._circuit.may_retry():
                    raise EngineUnavailableError(
                        f"{where}: expected an answer within {seconds:g} s, found that it does not: {said}"
                    ) from error
                sleep(back_off)
                back_off *= 2
            else:
                self._circuit.succeeded()
                self._lacks = None
                return answer

    def wait_until(self, done: Callable[[MilvusClient, float], bool], seconds: float, about: str) -> None:
        """Ask until something is done that takes the server long.

        Args:
            done: asks, as of `ask`, whether it is.
            seconds: the longest that it may take.
            about: as of `ask`.

        Raises:
            EngineUnavailableError: it is not done by then; or as `ask`.
            LongtailIndexError: as `ask`.
        """
        until, pause = monotonic() + seconds, _BACK_OFF_SECONDS
        while not self.ask(done, about=about):
            if monotonic() > until:
                raise EngineUnavailableError(
                    f"{self}, {about}: expected what was begun to be done within {seconds:g} s"
                )
            sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def version(self) -> str:
        """The server's version; raises as `ask`."""
        return str(self.ask(lambda client, _: client.get_server_version()))

    def _connected(self, seconds: float) -> MilvusClient:
        client = self._client
        if client is None:
            try:
                from pymilvus import MilvusClient
            except ModuleNotFoundError as error:
                raise SpecError("expected pymilvus for Milvus, found none: pip install 'longtail[milvus]'") from error
            # What it says of an error is in the error.
            logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
            given: dict[str, Any] = {"db_name": self._database} if self._database else {}
            client = self._client = MilvusClient(uri=self._uri, token=self._token, timeout=seconds, **given)
        return client


def _told(error: Exception) -> tuple[int | None, str]:
    """The code of an error of Milvus or the way to it, and what it says; None of any other error."""
    import grpc
    from pymilvus.exceptions import MilvusException

    cause = error if isinstance(error, grpc.RpcError) else error.__cause__
    if isinstance(cause, grpc.RpcError) and isinstance(cause, grpc.Call):
        return -1, f"{cause.code().name}: {cause.details()}"
    if isinstance(error, MilvusException):
        return error.code, " ".join(str(error.message).split())[:500]
    return (-1, str(error)) if isinstance(error, grpc.FutureTimeoutError) else (None, "")


def _bare(uri: str) -> str:
    """An address without a user and password."""
    scheme, _, rest = uri.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if rest else uri
