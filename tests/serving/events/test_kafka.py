"""Events in Kafka, against brokers of librdkafka's mock cluster that are down, slow, refuse, and come back."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

import pytest
from confluent_kafka import KafkaError

from longtail.serving.errors import StorageError
from longtail.serving.events.kafka import KafkaEvents, parse_kafka
from longtail.serving.events.schema import event_json
from tests.kafka import MockKafka

SECONDS = 3.0
"""After which events are given up; calls that return much earlier have not waited."""
LONG = 30


@pytest.fixture
def kafka() -> Iterator[MockKafka]:
    kafka = MockKafka()
    yield kafka
    kafka.stop()


@pytest.fixture
def dropped() -> list[int]:
    return []


@pytest.fixture
def sink(kafka: MockKafka, dropped: list[int]) -> Iterator[Callable[..., KafkaEvents]]:
    sinks: list[KafkaEvents] = []

    def make(query: str = "", seconds: float = SECONDS) -> KafkaEvents:
        sinks.append(KafkaEvents(f"kafka://{kafka.brokers}/events{query}", dropped.append, seconds))
        return sinks[-1]

    yield make
    for record in sinks:
        record.close()


def events(count: int, first: int = 0) -> list[bytes]:
    return [event_json(kind="choice", time=(first + i) / 8, labels=[f"ü{first + i}"]) for i in range(count)]


def not_kept(future: Future[None]) -> str:
    with pytest.raises(StorageError) as caught:
        future.result(LONG)
    return caught.value.message


def until_kept(some: KafkaEvents, lines: list[bytes]) -> None:
    deadline = time.monotonic() + LONG
    while some.append(lines).exception(LONG) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_acknowledged_events_arrive_once(kafka: MockKafka, sink: Callable[..., KafkaEvents]) -> None:
    events_of, passing = sink(), (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.NOT_ENOUGH_REPLICAS)
    kafka.refuse(*passing * 3)
    futures = [events_of.append(events(50, 50 * i)) for i in range(20)]
    assert events_of.append([]).result(0) is None
    assert not wait(futures, LONG).not_done
    assert [future.exception() for future in futures] == [None] * 20
    read = kafka.messages("events")
    assert read == Counter(events(1000))
    assert json.loads(read.most_common(1)[0][0]).keys() == {"version", "kind", "time", "labels"}


def test_offered_events_arrive(kafka: MockKafka, sink: Callable[..., KafkaEvents], dropped: list[int]) -> None:
    some = sink()
    assert some.offer(events(10)) == 0
    some.close()
    assert kafka.messages("events") == Counter(events(10))
    assert some.offer(events(2)) == 2  # closed
    assert "0 of 2 events were sent" in not_kept(some.append(events(2)))
    assert dropped == []


def test_producer_recovers_after_broker_outage(
    kafka: MockKafka, sink: Callable[..., KafkaEvents], dropped: list[int]
) -> None:
    some = sink()
    some.append(events(1)).result(LONG)
    kafka.take_down()
    start = time.monotonic()
    offered = some.offer(events(5, 100))
    futures = [some.append(events(3, 10 * i)) for i in range(100)]
    assert not any(future.done() for future in futures)  # and so none of the calls waited
    assert time.monotonic() - start < SECONDS
    messages = {not_kept(future) for future in futures}
    assert messages == {
        "Kafka did not acknowledge all of 3 events: Local: Message timed out; send all of them again later"
    }
    assert time.monotonic() - start < SECONDS + 10
    assert (offered, sum(dropped)) == (0, 5)
    kafka.bring_up()
    some.append(events(1, 7)).result(LONG)
    assert kafka.messages("events") == Counter(events(1) + events(1, 7))


def test_full_buffer_is_refused_at_once(kafka: MockKafka, sink: Callable[..., KafkaEvents], dropped: list[int]) -> None:
    some = sink("?queue.buffering.max.messages=10")
    kafka.take_down()
    first, second = some.append(events(8)), some.append(events(5, 8))
    assert second.done()
    assert not_kept(second) == ("2 of 5 events were sent to Kafka: Local: Queue full; send all of them again later")
    assert some.offer(events(4)) == 4
    assert not first.done()
    kafka.bring_up()
    assert first.result(LONG) is None
    some.append(events(5, 8)).result(LONG)
    assert kafka.messages("events") - Counter(events(2, 8)) == Counter(events(13))
    assert dropped == []


def test_slow_brokers_time_out(kafka: MockKafka, sink: Callable[..., KafkaEvents]) -> None:
    some, patient = sink(), sink(seconds=LONG)  # patient, because a busy machine adds seconds to the brokers' own
    for producer in (some, patient):
        producer.append(events(1)).result(LONG)
    kafka.answer_after(1)
    slow = patient.append(events(1, 1))
    assert not slow.done()
    slow.result(LONG)
    kafka.answer_after(3 * SECONDS)
    assert "timed out" in not_kept(some.append(events(1, 2)))
    kafka.answer_after(0)
    until_kept(some, events(1, 3))


def test_fatal_producer_is_replaced(
    kafka: MockKafka, sink: Callable[..., KafkaEvents], caplog: pytest.LogCaptureFixture
) -> None:
    some = sink()
    some.append(events(1)).result(LONG)
    kafka.refuse(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER)
    assert "did not acknowledge" in not_kept(some.append(events(1, 1)))
    until_kept(some, events(1, 2))
    assert "a new producer follows" in caplog.text
    assert kafka.messages("events") == Counter(events(1) + events(1, 2))


def test_refused_messages_fail_their_request(kafka: MockKafka, sink: Callable[..., KafkaEvents]) -> None:
    some = sink("?message.max.bytes=1000")
    some.append(events(1)).result(LONG)
    too_long = some.append([*events(1, 1), b"x" * 5000])
    assert too_long.done()
    assert "1 of 2 events were sent to Kafka: " in not_kept(too_long)
    for error in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.PRODUCER_FENCED, KafkaError.TOPIC_AUTHORIZATION_FAILED):
        kafka.refuse(error)
        assert "did not acknowledge all of 1 events: Broker: " in not_kept(some.append(events(1, 2)))
    until_kept(some, events(1, 3))


def test_close_gives_up_unsent_events(kafka: MockKafka, sink: Callable[..., KafkaEvents]) -> None:
    some = sink("?message.timeout.ms=600000")
    kafka.take_down()
    future = some.append(events(3))
    some.close()
    assert "purged" in not_kept(future).lower()


def test_errors_are_logged_once_without_password(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    url = "kafka://127.0.0.1:1/events?security.protocol=SASL_PLAINTEXT&sasl.mechanism=PLAIN&debug=all"
    some = KafkaEvents(f"{url}&sasl.username=shop&sasl.password=hush%2Bhush", [].append, SECONDS)
    for future in [some.append(events(1)), some.append(events(20))]:
        not_kept(future)
    some.close()
    refused, timed_out = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "Connection refused" in refused
    assert timed_out == "Kafka did not acknowledge all of 1 events: Local: Message timed out"
    assert "hush" not in caplog.text + repr(some)


def test_urls() -> None:
    required = {"enable.idempotence": "true", "acks": "all"}
    url = "kafka://one:9092,[::1]:9093,three/shop.events-1?sasl.password=a+b%26c=d&linger.ms=20"
    settings = {"bootstrap.servers": "one:9092,[::1]:9093,three", "sasl.password": "a+b&c=d", "linger.ms": "20"}
    assert parse_kafka(url) == (settings | required, "shop.events-1")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("kafka://", 'expected kafka://HOST:PORT/TOPIC, received "kafka://"'),
        ("kafka://one:9092", 'HOST:PORT/TOPIC, received "kafka://one:9092"'),
        ("kafka://one:port/events", "HOST:PORT/TOPIC, received"),
        ("kafka://one:9092/a/b", "HOST:PORT/TOPIC, received"),
        ("kafka://one:9092/..", "HOST:PORT/TOPIC, received"),
        ("redis://one:9092/events", 'HOST:PORT/TOPIC, received "redis://one:9092/events"'),
        ("kafka://shop:hush@one:9092/events", "received @: write ?sasl.username=…&sasl.password=…"),
        ("kafka://shop:1/hush@one:9092/events", "received @: write"),
        ("kafka://one:9092/events&sasl.password=hush", "HOST:PORT/TOPIC, received"),
        ("kafka://one:9092/events?sasl.password=a&hush", "received no =: write & in a value as %26"),
        ("kafka://one:9092/events?enable.idempotence=false", "once; set the topic's min.insync.replicas instead"),
        ("kafka://one:9092/events?acks=1", "expected no acks after the topic: all in-sync brokers keep"),
        ("kafka://one:9092/events?transactional.id=a", "expected no transactional.id"),
        ("kafka://one:9092/events?bootstrap.servers=two", "topic: write all brokers before the topic, kafka://"),
        ("kafka://one:9092/events?linger.ms=1&linger.ms=2", 'once, received "linger.ms" twice'),
    ],
)
def test_malformed_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        parse_kafka(url)
    assert message in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("linger=5", 'expected settings of librdkafka after the topic: No such configuration property: "linger"'),
        ("linger.ms=soon", "Invalid value for configuration property"),
        ("linger.ms=8000", "`message.timeout.ms` must be greater than `linger.ms`"),
        ("on_delivery=print", "on_delivery"),
        ("sasl.passwort=hush", 'No such configuration property: "sasl.passwort"'),
        ("logger=print", "expected no logger after the topic"),
        ("security.protocol=SASL_SSL&sasl.mechanism=PLAIN&sasl.password=hush", "sasl.username and sasl.password"),
    ],
)
def test_forbidden_settings_are_refused(query: str, message: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        KafkaEvents(f"kafka://127.0.0.1:1/events?{query}", [].append)
    assert message in str(caught.value)
    assert "hush" not in str(caught.value)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "confluent_kafka", None)
    with pytest.raises(ValueError, match=r"pip install '.*\[kafka\]'"):
        KafkaEvents("kafka://127.0.0.1:1/events", [].append)
