"""A catalogue with columns of every kind that can be filtered by, and filters told label by label."""

from __future__ import annotations

import datetime
import decimal
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from longtail.bundle import Bundle
from tests.bundles import make_bundle

LABELS = 400
DAY = datetime.date(2026, 1, 1)
DATED = datetime.datetime(2026, 6, 1, tzinfo=datetime.UTC)
"""Lifetimes begin and end within a hundred seconds of this time."""
KINDS = {
    "title": "string",
    "brand": "string",
    "colour": "string",
    "price": "number",
    "stock": "number",
    "money": "number",
    "open": "boolean",
    "since": "date",
    "at": "date",
    "tags": "strings",
}


def shop_columns(labels: int = LABELS, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)

    def some(values: list[Any]) -> list[Any]:
        return [None if missing else value for value, missing in zip(values, rng.random(labels) < 0.15, strict=True)]

    numbers = rng.integers(0, 40, labels)
    return pa.table(
        {
            "title": pa.array([f"Title {row}" for row in range(labels)]),
            "brand": pa.array(some([f"brand-{n % 7}" for n in numbers])),
            "colour": pa.array(some([["red", "blé", ""][n % 3] for n in numbers])).dictionary_encode(),
            "price": pa.array(some([float(n) / 10 for n in numbers]), pa.float32()),
            "stock": pa.array(some([int(n) - 20 + 2**60 * int(n > 30) for n in numbers]), pa.int64()),
            "money": pa.array(some([decimal.Decimal(int(n)) / 10 for n in numbers]), pa.decimal128(9, 2)),
            "open": pa.array(some([bool(n % 2) for n in numbers])),
            "since": pa.array(some([DAY + datetime.timedelta(int(n)) for n in numbers])),
            "at": pa.array(some([1_000_000_000 * 3600 * int(n) for n in numbers]), pa.timestamp("ns")),
            "tags": pa.array(some([[f"t{n % 5}", "all", None, f"t{n % 3}"][: n % 5] for n in numbers])),
            "box": pa.array([{"wide": 1}] * labels),
        }
    )


def shop_bundle(labels: int = LABELS, **options: Any) -> Bundle:
    bundle = make_bundle(labels=labels, label_tower=True, **options)
    columns = shop_columns(labels)
    return replace(
        bundle,
        labels=replace(bundle.labels, display=columns),
        manifest=bundle.manifest.model_copy(update={"display": columns.column_names}),
    )


def dated(bundle: Bundle, seed: int = 0) -> Bundle:
    """Give three quarters of the labels a beginning, as times, and an end, as texts."""
    rng, labels = np.random.default_rng(seed), bundle.manifest.labels
    begins, lasts, limits = rng.integers(-80, 60, labels), rng.integers(1, 80, labels), rng.random((labels, 2)) < 0.75
    begin = [
        DATED + datetime.timedelta(seconds=int(n)) if limited else None
        for n, limited in zip(begins, limits[:, 0], strict=True)
    ]
    until = [
        f"{DATED + datetime.timedelta(seconds=int(n)):%Y-%m-%d %H:%M:%S}" if limited else ("" if n % 2 else None)
        for n, limited in zip(begins + lasts, limits[:, 1], strict=True)
    ]
    display = bundle.labels.display.append_column("available_from", pa.array(begin, pa.timestamp("us", "UTC")))
    display = display.append_column("available_until", pa.array(until, pa.string()))
    manifest = bundle.manifest.model_copy(update={"display": display.column_names})
    return replace(bundle, labels=replace(bundle.labels, display=display), manifest=manifest)


def meets(answer: dict[str, Any], filter_: dict[str, Any]) -> bool:
    """Whether a label that is shown so passes, one condition after the other."""
    return all(
        _holds(name, answer[name], operator, expected)
        for name, query in filter_.items()
        for operator, expected in (query if isinstance(query, dict) else {"eq": query}).items()
    )


def _comparable(name: str, value: Any) -> Any:
    if KINDS[name] == "date":
        at = datetime.datetime.fromisoformat(value)
        return at if at.tzinfo else at.replace(tzinfo=datetime.UTC)
    if name == "price":
        return np.float32(value) if abs(value) < 3e38 else np.float32(np.inf if value > 0 else -np.inf)
    return float(value) if name == "money" and isinstance(value, str) else value


def _holds(name: str, value: Any, operator: str, expected: Any) -> bool:
    values = [] if value is None else value if name == "tags" else [value]
    have = [_comparable(name, first) for first in values if first is not None]
    if operator == "exists":
        return bool(have) == expected
    query = [_comparable(name, first) for first in (expected if isinstance(expected, list) else [expected])]
    match operator:
        case "eq" | "in":
            return any(first in query for first in have)
        case "ne" | "not_in":
            return not any(first in query for first in have)
        case "lt":
            return any(first < query[0] for first in have)
        case "le":
            return any(first <= query[0] for first in have)
        case "gt":
            return any(first > query[0] for first in have)
    return any(first >= query[0] for first in have)


def draw_filter(rng: np.random.Generator) -> dict[str, Any]:
    """Up to three columns, with a value or up to two operators each."""
    number = int(rng.integers(0, 42))
    values: dict[str, list[Any]] = {
        "title": [f"Title {number}", "nothing", "Title 7", "x" * 99],
        "brand": [f"brand-{number % 8}", "brand-1", "BRAND-1"],
        "colour": ["red", "blé", "", "no"],
        "price": [number / 10, 2, 1.5, 1e300, -(10**400)],
        "stock": [number - 20, 2**60 + 11, 0.5, 2**60 + 10.5, 10**30, -1e308],
        "money": [number / 10, 1, 3.3],
        "open": [True, False],
        "since": [f"2026-01-{1 + number % 31:02d}", "2026-01-20T12:00:00Z", "1999-01-01"],
        "at": [f"1970-01-01T{number % 24:02d}:00:00", "1970-01-02", "1970-01-01T05:00:00+02:00"],
        "tags": ["t1", "all", "t4", "none"],
    }
    filter_: dict[str, Any] = {}
    for name in rng.choice(list(values), rng.integers(1, 4), replace=False).tolist():
        some = [values[name][i] for i in rng.integers(0, len(values[name]), 3)]
        ordered = ["lt", "le", "gt", "ge"] if KINDS[name] in ("number", "date") else []
        operators: dict[str, Any] = {}
        for operator in rng.choice(["eq", "ne", "in", "not_in", "exists", *ordered], rng.integers(1, 3)).tolist():
            several = operator in ("in", "not_in")
            operators[operator] = bool(number % 2) if operator == "exists" else some if several else some[0]
        filter_[name] = some[0] if rng.random() < 0.2 else operators
    return filter_
