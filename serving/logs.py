"""Format log lines as JSON or as text."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

import orjson

_TEXT, _TIME = "%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"


current: ContextVar[str | None] = ContextVar("current request", default=None)
"""Id of the request that the current task answers."""


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object.

    Its keys are at, level, logger and message, if known request_id and exception, and those of a call's
    `extra={"fields": {…}}`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line of JSON."""
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := current.get()) is not None:
            line["request_id"] = request
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _json(line)


class TextFormatter(logging.Formatter):
    """Formats a record and its `extra={"fields": {…}}` for people."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Format the line, without an exception."""
        fields = getattr(record, "fields", {}).items()
        return " ".join([super().formatMessage(record), *(f"{name}={_word(value)}" for name, value in fields)])


def _word(value: object) -> str:
    bare = isinstance(value, str) and value.isprintable() and not {*value} & {*' "='}
    return str(value) if bare else _json(value)


def _json(value: object) -> str:
    try:
        return orjson.dumps(value, default=str).decode()
    except TypeError:  # orjson refuses strings of a client's bytes that are not UTF-8
        return json.dumps(value, default=str)


def configure(level: str) -> None:
    """Log to standard error: text on a terminal, else JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter(_TEXT, _TIME) if sys.stderr.isatty() else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
