"""A gateway in front of a service: connections that are kept, requests that are never sent twice, and a ledger."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from random import Random
from select import select
from urllib.parse import urlsplit

BODY = json.dumps({"queries": [{"features": {"user_id": "u1"}, "k": 5}]})
HEADERS = {"Content-Type": "application/json"}
SECONDS = 10
"""A connection or an answer that takes longer hangs."""


@dataclass
class Gateway:
    """What was asked through it, and what became of it.

    It asks whether the service is ready only on the way up. An answer with `Connection: close` is the sign to open no
    more connections, as a balancer looks away from a service that is not ready. A connection that the service has
    closed is seen before it is used again, as any pool of connections does; where that comes too late the request is
    lost, for nothing is sent twice.

    Attributes:
        url: of the service.
        looks_away: open no more connections after an answer with `Connection: close`, until `up` is set again.
        answered: requests by status, "last" those whose answer said `Connection: close`, and "closed" kept connections
            found closed before anything was sent.
        lost: what became of requests without an answer, and of connections that hung.
    """

    url: str
    looks_away: bool = True
    answered: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    up: threading.Event = field(default_factory=threading.Event)
    _done: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def sending(self, think_seconds: Sequence[float], fresh: int = 0) -> Iterator[None]:
        """Send while this lasts.

        Args:
            think_seconds: of every kept connection, the mean pause between an answer and the next request.
            fresh: how many clients more make a connection for every request.
        """
        threads = [threading.Thread(target=self._keep, args=(think, seed)) for seed, think in enumerate(think_seconds)]
        threads = threads + [threading.Thread(target=self._connect_anew) for _ in range(fresh)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._done.set()
            self.up.set()
            for thread in threads:
                thread.join()

    def _keep(self, think: float, seed: int) -> None:
        random, connection = Random(seed), None
        while not self._done.is_set():
            if connection is None:
                self.up.wait()
                if self._done.is_set() or (connection := self._connected()) is None:
                    continue
            if not self._ask(connection):
                connection = None
            self._done.wait(random.expovariate(1 / think) if think else 0)
            if connection is not None and connection.sock is None:
                connection = None
            elif connection is not None and select([connection.sock], (), (), 0)[0]:
                self._count("closed")
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    def _connect_anew(self) -> None:
        while not self._done.is_set():
            self.up.wait()
            if not self._done.is_set() and (connection := self._connected()) is not None:
                self._ask(connection)
                connection.close()
            self._done.wait(0.01)

    def _connected(self) -> HTTPConnection | None:
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=SECONDS)
        try:
            connection.connect()
        except OSError as error:
            self._lose("connect", error, connection)
            return None
        return connection

    def _ask(self, connection: HTTPConnection) -> bool:
        """Whether the connection may be used again."""
        try:
            connection.request("POST", "/v1/retrieve", BODY, HEADERS)
            response = connection.getresponse()
            response.read()
        except Exception as error:
            self._lose("request", error, connection)
            return False
        last = response.headers["connection"] == "close"
        if last and self.looks_away:
            self.up.clear()
        self._count(str(response.status), *(["last"] if last else []))
        return True

    def _count(self, *what: str) -> None:
        with self._lock:
            self.answered.update(what)

    def _lose(self, what: str, error: Exception, connection: HTTPConnection) -> None:
        with suppress(OSError):
            connection.close()
        with self._lock:
            self.lost.append(f"{what}: {type(error).__name__}: {error} at {time.monotonic():.3f}")
