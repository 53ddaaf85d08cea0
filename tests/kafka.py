"""Brokers of librdkafka's mock cluster on loopback, in threads of the tests, that can be slow, fail and go away."""

from __future__ import annotations

import ctypes
from collections import Counter
from pathlib import Path

import confluent_kafka
from confluent_kafka import Consumer, KafkaError, TopicPartition

PRODUCE = 0
"""Number of the request that writes events [Kafka protocol, API keys]."""
_ALL = -1


class MockKafka:
    """A cluster of two brokers; topics come up when first used.

    Attributes:
        brokers: addresses, for clients of this and other processes.
    """

    def __init__(self) -> None:
        packages = Path(confluent_kafka.__file__).parents[1]
        self._library = ctypes.CDLL(str(next(packages.glob("confluent_kafka*/**/librdkafka*"))))
        for name in ("conf_new", "new", "mock_cluster_new"):
            getattr(self._library, f"rd_kafka_{name}").restype = ctypes.c_void_p
        self._library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        conf = ctypes.c_void_p(self._library.rd_kafka_conf_new())
        text = ctypes.create_string_buffer(512)
        for name, value in ((b"bootstrap.servers", b"none:1"), (b"log_level", b"0")):
            self._library.rd_kafka_conf_set(conf, name, value, text, len(text))
        self._client = ctypes.c_void_p(self._library.rd_kafka_new(0, conf, text, len(text)))
        assert self._client, text.value
        self._cluster = ctypes.c_void_p(self._library.rd_kafka_mock_cluster_new(self._client, 2))
        self.brokers: str = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def stop(self) -> None:
        """End for good."""
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)

    def take_down(self) -> None:
        """Close all connections and accept no more."""
        assert self._library.rd_kafka_mock_broker_set_down(self._cluster, _ALL) == 0

    def bring_up(self) -> None:
        """Accept connections again."""
        assert self._library.rd_kafka_mock_broker_set_up(self._cluster, _ALL) == 0

    def answer_after(self, seconds: float) -> None:
        """Answer later than asked from now on."""
        assert self._library.rd_kafka_mock_broker_set_rtt(self._cluster, _ALL, int(1000 * seconds)) == 0

    def refuse(self, *errors: int) -> None:
        """Answer the next requests that write with errors, of KafkaError's numbers."""
        self._library.rd_kafka_mock_push_request_errors(
            self._cluster, ctypes.c_int16(PRODUCE), ctypes.c_size_t(len(errors)), *map(ctypes.c_int, errors)
        )

    def messages(self, topic: str) -> Counter[bytes]:
        """Read a topic from its beginning to its end."""
        consumer = Consumer({"bootstrap.servers": self.brokers, "group.id": "tests", "enable.partition.eof": True})
        partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        read, ended = Counter[bytes](), set[int]()
        while len(ended) < len(partitions):
            message = consumer.poll(10)
            assert message is not None
            if message.error() is None:
                read[message.value()] += 1
            else:
                assert message.error().code() == KafkaError._PARTITION_EOF
                ended.add(message.partition())
        consumer.close()
        return read
