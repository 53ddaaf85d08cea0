"""Send events to a topic of Kafka through librdkafka."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from longtail.bundle.errors import describe
from longtail.extras import pip_install
from longtail.serving.errors import StorageError
from longtail.serving.events import CountDropped

_HOST = r"(?:\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::\d{1,5})?"
_ADDRESS = re.compile(rf"kafka://({_HOST}(?:,{_HOST})*)/(?!\.{{1,2}}$)([\w.-]{{1,249}})", re.ASCII)
_BROKERS = "write all brokers before the topic, kafka://HOST:PORT,HOST:PORT/TOPIC"
_ONCE = "all in-sync brokers keep an event, once; set the topic's min.insync.replicas instead"
_NO_SETTINGS = {
    **dict.fromkeys(("bootstrap.servers", "metadata.broker.list"), _BROKERS),
    **dict.fromkeys(("enable.idempotence", "acks", "request.required.acks", "transactional.id"), _ONCE),
    "delivery.report.only.error": "acknowledgements are what feedback waits for",
    "logger": "the service logs what librdkafka says",
}
_SILENT_SECONDS = 600
logger = logging.getLogger(__name__)


def parse_kafka(url: str) -> tuple[dict[str, str], str]:
    """Parse `kafka://HOST:PORT,HOST:PORT/TOPIC?SETTING=VALUE&…` into librdkafka's settings and the topic.

    Raises ValueError, whose message never shows the value of a setting.
    """
    address, _, query = url.partition("?")
    if "@" in address:
        raise ValueError("expected kafka://HOST:PORT/TOPIC, received @: write ?sasl.username=…&sasl.password=…")
    match = _ADDRESS.fullmatch(address)
    if match is None:
        public_text = re.split(r"[^\w.:/,\[\]-]", address)[0]  # a setting may follow without ?
        raise ValueError(f"expected kafka://HOST:PORT/TOPIC, received {describe(public_text)}")
    # Idempotent, so that librdkafka's own retries store no event twice.
    settings = {"bootstrap.servers": match[1], "enable.idempotence": "true", "acks": "all"}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError("expected SETTING=VALUE&… after the topic, received no =: write & in a value as %26")
        if name in _NO_SETTINGS:
            raise ValueError(f"expected no {name} after the topic: {_NO_SETTINGS[name]}")
        if name in settings:
            raise ValueError(f"expected each setting once, received {describe(name)} twice")
        settings[name] = unquote(value)
    return settings, match[2]


class KafkaEvents:
    """Sends events until all in-sync brokers have them.

    The constructor starts a thread, so create it after a fork.

    Args:
        seconds: time after which an event without acknowledgement is given up.

    Raises:
        ValueError: the URL or a setting is wrong, or the extra `kafka` is not installed.
    """

    newest = 0.0

    def __init__(self, url: str, count_dropped: CountDropped, seconds: float = 5.0) -> None:
        settings, self._topic = parse_kafka(url)
        self._log = _QuietLog()
        self._settings: dict[str, Any] = {
            "message.timeout.ms": int(1000 * seconds),
            "socket.timeout.ms": int(1000 * seconds),  # bounds the delay that silent brokers cause
            "socket.connection.setup.timeout.ms": int(1000 * seconds),
            "reconnect.backoff.max.ms": 1000,
            # Bounds memory while no broker answers.
            "queue.buffering.max.messages": 100_000,
            "queue.buffering.max.kbytes": 65_536,
            # The operator's settings win over those above.
            **settings,
            "logger": self._log,
        }
        self._count_dropped = count_dropped
        self._seconds = seconds
        try:
            from confluent_kafka import KafkaException, Producer

            self._new_producer, self._error = Producer, KafkaException
            self._producer = Producer(self._settings)
        except ModuleNotFoundError as error:
            raise ValueError(f"kafka://: no module {error.name!r}: {pip_install('kafka')}") from error
        except (KafkaException, TypeError, AttributeError) as error:  # the last two: values that are not text
            raise ValueError(f"expected settings of librdkafka after the topic: {_text(error)}") from None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="kafka-events", daemon=True)
        self._thread.start()

    def append(self, lines: Sequence[bytes]) -> Future[None]:
        """Send events; the future completes when all are acknowledged."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # a client that goes away cancels nothing
        waiting = len(lines)

        def delivered(error: Any, _: object) -> None:  # only one thread calls this at a time
            nonlocal waiting
            waiting -= error is None
            if error is not None:
                self._fail(future, f"Kafka did not acknowledge all of {len(lines)} events", error)
            elif not waiting:
                future.set_result(None)

        sent, error = self._send(lines, delivered)
        if error is not None:
            self._fail(future, f"{sent} of {len(lines)} events were sent to Kafka", error)
        elif not lines:
            future.set_result(None)
        return future

    def offer(self, lines: Sequence[bytes]) -> int:
        """Send events unacknowledged; return the number dropped."""
        return len(lines) - self._send(lines, self._offered)[0]

    def _offered(self, error: Any, _: object) -> None:
        if error is not None:
            self._log.log(logging.ERROR, "Kafka did not acknowledge an event, which is dropped: %s", _text(error))
            self._count_dropped(1)

    def _fail(self, future: Future[None], what: str, why: Any) -> None:
        self._log.log(logging.ERROR, "%s: %s", what, _text(why))
        with suppress(InvalidStateError):  # it failed before
            future.set_exception(StorageError(f"{what}: {_text(why)}; send all of them again later"))

    def _send(self, lines: Sequence[bytes], delivered: Callable[[Any, object], None]) -> tuple[int, Exception | None]:
        for sent, line in enumerate(lines):
            try:
                self._producer.produce(self._topic, line, on_delivery=delivered)
            except (BufferError, RuntimeError, self._error) as error:  # the buffer is full, closed, or a line too long
                return sent, error
        return len(lines), None

    def close(self) -> None:
        """Wait seconds for acknowledgements, then give up."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        with suppress(self._error):
            self._producer.flush(self._seconds)
        self._give_up()
        self._producer.close()

    def _poll(self) -> None:
        """Serve callbacks; replace the producer after a fatal error."""
        ended = False
        while not self._closing.is_set():
            try:
                if ended:
                    self._producer, ended = self._new_producer(self._settings), False
                self._producer.poll(0.2)
            except self._error as error:
                ended = True
                self._log.log(
                    logging.ERROR, "Kafka: events that wait are given up, a new producer follows: %s", _text(error)
                )
                self._give_up()
                self._closing.wait(1)

    def _give_up(self) -> None:
        with suppress(self._error):
            self._producer.purge(blocking=False)
            self._producer.flush(self._seconds)  # calls back with errors


class _QuietLog:
    """A logger that repeats similar lines every ten minutes."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def log(self, level: int, form: str, *values: str) -> None:
        text, now = form % values, time.monotonic()
        alike = re.sub(r"0x[0-9a-f]+|\d+", "", text)
        if now >= self._until.get(alike, 0):
            self._until[alike] = now + _SILENT_SECONDS
            logger.log(level, "%s", text)


def _text(error: Any) -> str:
    error = error.args[0] if isinstance(error, Exception) else error
    return error.str() if hasattr(error, "str") else str(error)
