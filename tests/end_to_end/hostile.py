"""Requests that nobody in their right mind sends: bytes, made from valid requests by a seeded generator."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

API_KEY, ADMIN_KEY = "fuzz-api-key-0123456789", "fuzz-admin-key-0123456789"
EVENT = {"request_id": "r-1", "query": 0, "labels": ["item-1", "item-2"]}
CHOICE = {"features": {"user_id": "u1"}, "bias_removal": 0.5, "exclude": ["item-1"], "labels": ["item-3"]}
QUERY = {
    "features": {"user_id": "u3", "history": ["item-1", 2]},
    "k": 10,
    "bias_removal": 0.25,
    "exclude": ["item-4", 5],
    "allow": None,
    "buckets": ["head", "tail"],
    "filter": {"title": {"not_in": ["Title 1", "Title 2"]}},
    "priors": {"recent": 0.5},
}
VECTOR = {"vector": [0.5, -0.5, 0.5, -0.5, 0, 0, 0, 0], "explore": {"new": 1}, "display": ["title"]}
APART = {"features": {}, "max_per": {"title": 1}, "mmr": {"weight": 0.5}, "pool": 20, "filter": {"title": "Title 9"}}
BODIES: dict[str, Any] = {
    "/v1/retrieve": {
        "queries": [QUERY, APART, VECTOR, {"features": {}}],
        "release": "only",
        "preview": False,
        "unit": "u-1",
        "arm": "tail",
    },
    "/v1/similar": {"ids": ["item-1", "item-2"], "k": 5, "exclude": ["item-3"], "allow": ["item-5", "item-6"]},
    "/v1/labels": {
        "labels": [
            {"id": "new-1", "features": {"genres": ["g1"], "year": 0.5}, "display": {"title": "New"}},
            {"id": "item-7", "features": {"genres": {"g2": 0.5}}, "priors": {"recent": 0.3}},
            {"id": "item-8"},
        ]
    },
    "/v1/feedback": {"events": [EVENT, CHOICE]},
    "/v1/embed": {"queries": [{"features": {"user_id": "u1"}}], "release": "only"},
    "/v1/labels/delete": {"ids": ["item-50", "item-51"]},
    "/v1/labels/restore": {"ids": ["item-50", "item-51"]},
    "/v1/release/reload": {},
}
"""A body that is answered with 200, by route."""

TEXTS = [
    '""', '"a"', '"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"item-1\\u0000"', '"../../../etc/passwd"',
    '"..%2f%2e%2e"', '"/proc/self/environ"', '"__proto__"', '"\\ud83d\\ude00"', '"' + "a" * 100_000 + '"',
    '"\u202e\u0000"', '"CURRENT"', '".state"', "'single'", '"{{7*7}}"', '"; DROP TABLE feedback; --"',
]  # fmt: skip
NUMBERS = [
    "0", "-0", "-1", "1.0", "1.5", "1e2", "1e-400", "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "0x10", "01",
    "+1",
    "9223372036854775807", "9223372036854775808", "-9223372036854775809", "18446744073709551616", "1" * 400, "9" * 4300,
    "9" * 4301, "-" + "9" * 4299, "1" * 50_000, "0." + "1" * 5000, "1e99999999999", "3.4028236e38", "2147483648",
]  # fmt: skip
OTHERS = [
    "null", "true", "false", "[]", "{}", "[null]", "[[]]", '{"":null}', '["head","head"]', "[" * 150 + "]" * 150,
    "[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, "[" + ",".join(["null"] * 5000) + "]", "undefined", "",
    json.dumps([f"item-{place}" for place in range(10_000)]), json.dumps(list(range(10_001))),
    json.dumps(["a"] * 60_000),
    json.dumps({f"f{place}": place for place in range(5000)}), json.dumps([QUERY] * 257), json.dumps([EVENT] * 300),
]  # fmt: skip
PATHS = [
    "/../../etc/passwd", "/v1/labels/../../../etc/passwd", "/v1/labels/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "/v1/labels/%00",
    "/v1/labels/%ff%fe", "/v1/labels/", "/v1/labels/" + "a" * 8000, "/v1/labels/item-1/", "/v1/labels/item-1%00",
    "/v1/labels/%ud800", "/v1/labels/%", "/v1/labels/item-1?x=%00", "/v1//labels/item-1", "/v1/release/../release",
    "/docs/assets/..%2f..%2f..%2f..%2fetc%2fpasswd", "/docs/assets/%00", "/docs/assets/%ff", "/docs/assets/../main.py",
    "/docs/assets/" + "a" * 5000, "/docs/assets//etc/passwd", "/docs/assets/.", "/docs", "/dashboard", "/openapi.json",
    "/metrics", "/metrics?name[]=%00", "/v1/monitoring", "/v1/release", "/livez", "/readyz", "/", "//", "/%2f",
    "/v1/labels", "/v1/labels?limit=0", "/v1/labels?limit=1e9&state=all", "/v1/labels?cursor=%00&search=%ff",
    "/v1/labels?search=" + "a" * 6000, "/v1/labels?state=hidden&bucket=mid&x=1", "/v1/labels?limit=1&limit=2",
    "/v1/release/staged",
    "/v1/labels/%F0%9F%98%80", "/v1/labels/item-59", "/\\..\\..\\windows", "/v1/retrieve/", "/.state/labels.sqlite",
    "/CURRENT",
]  # fmt: skip
JSON = b"Content-Type: application/json"
METHODS = ["GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "POST", "TRACE", "PROPFIND"]
HEADERS = [
    b"X-Request-ID: " + b"a" * 129, b"X-Request-ID: ../../etc/passwd", b"X-Request-ID: \xff\xfe", b"X-Request-ID: a b",
    b"X-Request-ID: r-1", b'X-Request-ID: "}\\u0000', b"X-Request-ID:", b"traceparent: garbage", b"traceparent: \xff",
    b"traceparent: 00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01",
    b"traceparent: ff-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01",
    b"traceparent: 00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"traceparent: " + b"0" * 5000,
    b"tracestate: " + b"=" * 600,
    b"X-API-Key: \xff\xc3\xa9", b"X-API-Key:", b"Authorization: Bearer", b"Authorization: Bearer \xe9\xff",
    b"Authorization:",
    b"Authorization: Basic Zm9vOmJhcg==", b"Authorization: bearer  x  y", b"Range: bytes=0-0,1-1", b"Range: bytes=abc",
    b"If-None-Match: *", b"Accept: \xff", b"Accept-Encoding: gzip, br;q=9", b"Cookie: " + b"a=b; " * 200, b"Host: evil",
    b"X-Forwarded-For: 127.0.0.1", b"X-HTTP-Method-Override: DELETE", b"Expect: 100-continue",
    b"Content-Encoding: gzip",
    b"Upgrade: h2c\r\nConnection: Upgrade", b"Content-Type: application/json; charset=utf-16", b"Content-Type: \xff",
    b"Content-Type:", b"Content-Type: multipart/form-data; boundary=x", b"Origin: null", b"TE: trailers",
    b"X: " + b"y" * 8000,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hostile:
    """One request.

    Attributes:
        kind: what is wrong with it.
        raw: all its bytes.
        head: whether its answer has no body.
        framed: whether its end can be told, so that another one may follow on the connection.
    """

    kind: str
    raw: bytes
    head: bool = False
    framed: bool = True


def hostile(count: int, seed: int) -> Iterator[Hostile]:
    """So many requests, the same for the same seed."""
    rng = random.Random(seed)
    makers = [
        (_bytes, 30),
        (_values, 40),
        (_shapes, 10),
        (_encodings, 6),
        (_routes, 12),
        (_headers, 12),
        (_framing, 14),
    ]
    for maker in rng.choices([maker for maker, _ in makers], [weight for _, weight in makers], k=count):
        yield maker(rng)


def request(
    method: str, path: str, body: bytes = b"", headers: Sequence[bytes] = (), *, length: str | None = None
) -> bytes:
    """A request as it goes over the wire."""
    lines = [f"{method} {path} HTTP/1.1".encode("latin-1"), b"Host: localhost", *headers]
    if length is not None or body or method == "POST":
        lines.append(b"Content-Length: " + (length or str(len(body))).encode())
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _key(rng: random.Random) -> bytes:
    return b"X-API-Key: " + rng.choice([ADMIN_KEY, ADMIN_KEY, ADMIN_KEY, ADMIN_KEY, API_KEY, "wrong"]).encode()


def _posted(kind: str, rng: random.Random, path: str, body: bytes) -> Hostile:
    return Hostile(f"{kind} {path}", request("POST", path, body, [_key(rng), JSON]))


def _valid(rng: random.Random) -> tuple[str, bytes]:
    path = rng.choice([*BODIES][:-1])
    return path, json.dumps(BODIES[path]).encode()


def _bytes(rng: random.Random) -> Hostile:
    """Bytes flipped, cut out, doubled, put in; or the end missing."""
    path, body = _valid(rng)
    changed = bytearray(body)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(changed)) if changed else 0
        match rng.randrange(5):
            case 0 if changed:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                del changed[at : at + rng.randrange(1, 20)]
            case 3:
                changed[at:at] = changed[at : at + 30]
            case _:
                changed[at:at] = rng.randbytes(rng.randrange(1, 6))
    return _posted("bytes", rng, path, bytes(changed))


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*path, key))


def _values(rng: random.Random) -> Hostile:
    """One value of the body is another, of any type and size."""
    path, body = _valid(rng)
    content = {"": json.loads(body)}
    *way, last = rng.choice([*_places(content[""], ("",))])
    inner: Any = content
    for key in way:
        inner = inner[key]
    inner[last] = "@@"
    value = rng.choice(rng.choice([TEXTS, NUMBERS, OTHERS]))
    changed = json.dumps(content[""]).replace('"@@"', value)
    return _posted("value", rng, path, changed.encode("utf-8", "surrogatepass"))


def _shapes(rng: random.Random) -> Hostile:
    """Keys that come twice, are unknown or strange; lists of lists."""
    path, body = _valid(rng)
    text = body.decode()
    key = rng.choice(TEXTS)
    changed = rng.choice(
        [
            text.replace("{", '{"k":1,"k":2,', 1),
            text.replace("{", "{" + key + ":" + rng.choice(NUMBERS + OTHERS) + ",", rng.choice([1, 2])),
            text[:-1] + "," + text[1:],
            "[" + text + "]",
            text + text,
            text.replace(":", ":{" + key + ":", 1) + "}",
            text.replace('": [', '": [[', 1).replace("]", "]]", 1),
        ]
    )
    return _posted("shape", rng, path, changed.encode("utf-8", "surrogatepass"))


def _encodings(rng: random.Random) -> Hostile:
    path, body = _valid(rng)
    text = body.decode().replace("item-1", "é\u2028😀")
    changed = rng.choice(
        [
            b"\xef\xbb\xbf" + body, text.encode("utf-16"), text.encode("utf-16-be"), text.encode("utf-32"),
            text.encode("latin-1", "replace"), text.encode("utf-7"), b"\0" * 1000, b"",
            b" " * 5000 + body, body + b"\0",
            body.replace(b"item", b"\xed\xa0\x80"), body.replace(b"item", b"\xc0\xaf"), rng.randbytes(5000),
            body.replace(b" ", b"\n\r\t "), b"\x1f\x8b\x08" + rng.randbytes(200), body.replace(b'"', b"\\u0022"),
        ]
    )  # fmt: skip
    return _posted("encoding", rng, path, changed)


def _routes(rng: random.Random) -> Hostile:
    method, path = rng.choice(METHODS), rng.choice([*PATHS, *BODIES])
    return Hostile(f"route {method}", request(method, path, headers=[_key(rng)]), head=method == "HEAD")


def _headers(rng: random.Random) -> Hostile:
    path, body = _valid(rng)
    headers = [_key(rng)] if rng.random() < 0.7 else []
    headers += [*rng.choices(HEADERS, k=rng.choice([1, 1, 3])), JSON]
    if rng.random() < 0.1:
        headers += [b"X-%d: y" % place for place in range(rng.choice([100, 1000]))]
    rng.shuffle(headers)
    # What follows an upgrade is no HTTP any more.
    return Hostile(
        "header", request("POST", path, body, headers), framed=not any(b"Upgrade" in each for each in headers)
    )


def _framing(rng: random.Random) -> Hostile:
    """Bodies of another length than said, chunks that are none, lines that are no HTTP."""
    path, body = _valid(rng)
    headers = [_key(rng), JSON]
    valid = request("POST", path, body, headers)
    longer = str(len(body) + rng.randrange(1, 10_000))
    lengths = [longer, str(rng.randrange(len(body))), "9" * 23, "1048577", "-1", "1e3", "0x10", "٣", "", " ", "1,1"]
    strange = [
        b": x",
        b"a\0b: c",
        b"a: b\0c",
        b" folded",
        b"a b: c",
        b"Content-Length: 3",
        b"Transfer-Encoding: chunked",
    ]
    chunked = valid[: -len(body)].replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
    chunks = [
        b"%x\r\n%b\r\n" % (len(body), body),
        b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, b"X: y\r\n" * rng.randrange(500)),
        b"".join(b"1;a=b\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n",
        b"5;" + b"x" * 20_000 + b"\r\nabcde\r\n",
        *(b"zz\r\n", b"-1\r\n", b"f" * 17 + b"\r\n", b"\r\n", b"0\r\n\r\n"),
    ]
    upgrade = [b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13"]
    lines = [
        valid.replace(b"HTTP/1.1", rng.choice([b"HTTP/9.9", b"HTTP/", b""])),
        valid.replace(b"\r\n", b"\n"),
        valid[: rng.randrange(20, 200)],
        request("G\0T", "/livez"),
        request("GET", "/\xff"),
        request("GET", "livez"),
        request("CONNECT", "a:1"),
        request("GET", "/livez", headers=upgrade),
        rng.randbytes(rng.randrange(1, 3000)),
        *(b"\x16\x03\x01\x02\0\1\0\1\xfc\3\3", b"\r\n" * 1000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 100),
    ]
    raw = rng.choice(
        [
            request("POST", path, body, headers, length=rng.choice(lengths)),
            request("POST", path, body, [*headers, rng.choice(strange)]),
            chunked + rng.choice(chunks),
            rng.choice(lines),
        ]
    )
    return Hostile("framing", raw, framed=False)
