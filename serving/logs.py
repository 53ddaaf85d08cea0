"""Log lines: JSON for machines or text for people, with the id of the request that they are about."""

from __future__ import annotations

import json
import logging
import re
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import orjson

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_ABSENT = re.compile("0+")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True, slots=True)
class Trace:
    """Where a request stands in its caller's trace: W3C trace-context ids, lower-case hexadecimal."""

    trace_id: str
    parent_id: str

    @classmethod
    def parse(cls, traceparent: str) -> Trace | None:
        """The trace of a `traceparent` header; None for one that the recommendation calls invalid."""
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None or traceparent.startswith("ff") or (traceparent.startswith("00") and match[3]):
            return None
        return None if _ABSENT.fullmatch(match[1]) or _ABSENT.fullmatch(match[2]) else cls(match[1], match[2])


current: ContextVar[tuple[str, Trace | None] | None] = ContextVar("current request", default=None)
"""Id and trace of the request that this task answers."""


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object: at, level, logger, message; request_id,
    trace_id and parent_id; exception; and what a call logged as `extra={"fields": {…}}`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON, without the line's end."""
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = current.get()
        if request is not None:
            line["request_id"], trace = request
            if trace is not None:
                line["trace_id"], line["parent_id"] = trace.trace_id, trace.parent_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _json(line)


class TextFormatter(logging.Formatter):
    """Writes a record as a line for people, followed by what a call logged as `extra={"fields": {…}}`."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line, without an exception."""
        fields = getattr(record, "fields", {}).items()
        return " ".join([super().formatMessage(record), *(f"{name}={_json(value)}" for name, value in fields)])


def _json(value: object) -> str:
    try:
        return orjson.dumps(value, default=str).decode()
    except TypeError:  # of a client's bytes that are no UTF-8
        return json.dumps(value, default=str)


def configure(log_format: Literal["auto", "json", "text"], level: str) -> None:
    """Send every logger of the process to standard error in one format; auto is text on a terminal, else JSON."""
    if log_format == "auto":
        log_format = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
