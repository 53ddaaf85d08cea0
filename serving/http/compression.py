"""Answers compressed for clients that accept it: with zstd, which costs a fifth of gzip's time, else with gzip."""

from __future__ import annotations

import zlib

import pyarrow as pa
from starlette.types import Message

from longtail.serving.core.service import Service

_LONGEST_ACCEPT = 256
_OFF_LOOP_BYTES = 1 << 15
"""Longer ones are compressed in a thread of their own; this much takes less than a millisecond."""
_GZIP = 31
"""zlib's number for a window of 32 KB and gzip's head."""
_TYPES = (b"application/json", b"application/problem+json", b"text/")
_LENGTH, _TYPE, _ENCODING = b"content-length", b"content-type", b"content-encoding"


def accepted(accept_encoding: bytes | None) -> str | None:
    """The better of the codings that an Accept-Encoding allows and this service has; None: it must not compress."""
    if not accept_encoding:
        return None
    allowed = set()
    for choice in accept_encoding[:_LONGEST_ACCEPT].lower().split(b","):
        coding, _, parameters = choice.partition(b";")
        name, _, weight = parameters.strip().partition(b"=")
        if not (name.strip() == b"q" and _is_zero(weight)):
            allowed.add(coding.strip())
    return "zstd" if b"zstd" in allowed else "gzip" if b"gzip" in allowed else None


def _is_zero(weight: bytes) -> bool:
    try:
        return not float(weight) > 0
    except ValueError:
        return True


def compress(content: bytes, coding: str) -> bytes:
    """Bytes in a coding of `accepted`."""
    if coding == "zstd":
        return bytes(pa.Codec("zstd", compression_level=1).compress(content, asbytes=True))
    packer = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
    return packer.compress(content) + packer.flush()


async def pack(start: Message, body: Message, accept_encoding: bytes | None, service: Service) -> None:
    """Compress a whole answer, if its client accepts that and it is worth it.

    Args:
        start: the ASGI message of its head; says afterwards what was done, and that others may get it otherwise.
        body: the message of all its body.
        accept_encoding: the client's.
        service: its settings say what is worth it; it has a thread for what takes long.
    """
    content, least = body.get("body", b""), service.settings.compress_bytes
    if least is None or len(content) < max(1, least) or body.get("more_body", False):
        return
    headers = dict(start["headers"])
    # A file's parts, and the name of its version, are of its bytes as they are.
    if _ENCODING in headers or b"etag" in headers or not headers.get(_TYPE, b"").startswith(_TYPES):
        return
    start["headers"].append((b"vary", b"accept-encoding"))
    if (coding := accepted(accept_encoding)) is None:
        return
    if len(content) < _OFF_LOOP_BYTES:
        packed: bytes | None = compress(content, coding)
    else:
        packed = await service.read(lambda: compress(content, coding))
    if packed is not None and len(packed) < len(content):
        body["body"] = packed
        start["headers"] = [(name, value) for name, value in start["headers"] if name != _LENGTH]
        start["headers"] += [(_LENGTH, b"%d" % len(packed)), (_ENCODING, coding.encode())]
