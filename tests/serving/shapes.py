"""Legal requests at their limits, of every route that takes a body: what one client can make the service do at once."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from longtail.index import IndexSpec, build, open_releases
from tests.serving.core.shop import shop_bundle

MOST_BYTES, MOST_VALUES = 1 << 20, 1 << 17


class Shape(NamedTuple):
    method: str
    path: str
    body: bytes


def shop_releases(root: Path, labels: int) -> Path:
    """Releases with everything that costs time: columns of all kinds, a label tower, W, a prior and λ beside μ."""
    if open_releases(root / "releases").current() is None:
        bundle = shop_bundle(labels, cooccurrence=True, popularity=True).write(root / "bundle")
        table = pa.table({"label_id": bundle.labels.ids, "recent": np.linspace(-3, 0, labels)})
        pq.write_table(table, root / "priors.parquet")
        build(root / "bundle", root / "releases", spec=IndexSpec("flat"), name="shop", priors=root / "priors.parquet")
        open_releases(root / "releases").publish("shop")
    return root / "releases"


def shape(path: str, body: Mapping[str, Any], method: str = "POST") -> Shape:
    return Shape(method, path, json.dumps(body, separators=(",", ":")).encode())


def worst_shapes(labels: int, answer_ids: Sequence[str]) -> dict[str, Shape]:
    """Shapes that were found to cost most, by name.

    Args:
        labels: number of labels of the release, `item-0` and so on.
        answer_ids: 256 ids of answers, for feedback.
    """
    rng, user = random.Random(0), {"user_id": "u1"}
    ids, numbers = [f"item-{row}" for row in range(labels)], list(range(10_000))
    long = [ids[i % labels] for i in range(10_000)]

    def retrieve(count: int, **options: Any) -> Shape:
        return shape("/v1/retrieve", {"queries": [{"features": user, **options}] * count})

    def retrieve_varied(count: int, options: Any) -> Shape:
        return shape("/v1/retrieve", {"queries": [{"features": user, **options(i)} for i in range(count)]})

    def some(count: int) -> list[str]:
        return rng.sample(ids, min(count, labels))

    def similar(**options: Any) -> Shape:
        return shape("/v1/similar", {"ids": ids[:256], "k": 100, **options})

    def events(count: int, **fields: Any) -> Shape:
        of = [{"answer_id": answer_ids[i], "labels": ["item-1"], **fields} for i in range(count)]
        return shape("/v1/feedback", {"events": of})

    def new_labels(count: int, features: Mapping[str, Any], **display: Any) -> Shape:
        features = {"genres": ["g1"], "year": 1, **features}
        new = [{"id": f"n{i}", "features": features, "display": display} for i in range(count)]
        return shape("/v1/labels", {"labels": new})

    dates = [f"{1900 + day % 200}-01-{1 + day // 200 % 28:02d}" for day in range(1_000)]
    four = {"brand": 900, "title": 900, "tags": 900, "colour": 900}
    floors = [{"filter": {"brand": f"brand-{of}", "price": {"lt": 2}}, "n": 12} for of in range(8)]
    mixed = {"cooccurrence": 1.5, "priors": {"recent": 0.1}, "history": long[:5]}
    return {
        "256 queries, k = 100": retrieve(256, k=100),
        "25 queries, k = 1,000": retrieve(25, k=1_000),
        "explain, k = 50": retrieve(1, k=50, explain=True),
        "explain, k = 50, exclude of 10,000": retrieve(1, k=50, explain=True, exclude=long),
        "12 histories of 10,000": retrieve(12, history=numbers),
        "12 features of 10,000": shape("/v1/retrieve", {"queries": [{"features": {"history": numbers}}] * 12}),
        "250 features of 500": shape("/v1/retrieve", {"queries": [{"features": {"history": numbers[:500]}}] * 250}),
        "12 excludes of 10,000": retrieve(12, exclude=numbers),
        "250 excludes of 500": retrieve_varied(250, lambda _: {"exclude": [rng.randrange(1_000) for _ in range(500)]}),
        "7 allows of 10,000": retrieve_varied(7, lambda _: {"allow": some(10_000)}),
        "250 allows of 250": retrieve_varied(250, lambda _: {"allow": some(250)}),
        "all lists, 4 times 10,000": retrieve(4, exclude=numbers, allow=numbers, history=numbers),
        "256 dials, k = 100": retrieve_varied(256, lambda i: {"k": 100, "bias_removal": i / 256, **mixed}),
        "6 pools of 4,096, mmr": retrieve(6, k=512, mmr=0.5, pool=4_096),
        "6 pools of 4,096, four columns": retrieve(6, k=500, max_per=four, mmr=0.5, pool=4_096),
        "256 pools of 100": retrieve(256, k=25, mmr=0.5, pool=100),
        "256 pools that grow": retrieve(256, k=100, max_per={"brand": 1}, pool=100),
        "64 pools that grow in vain": retrieve(64, k=2, max_per={"brand": 1, "open": 1}, filter={"brand": "brand-1"}),
        "60 filters of 1,000 days": retrieve_varied(
            60, lambda i: {"filter": {"since": {"in": dates[i:] + dates[:i]}}}
        ),
        "12 filters of 10,000 numbers": retrieve_varied(
            12, lambda _: {"filter": {"stock": {"not_in": rng.sample(numbers, 10_000)}}}
        ),
        "256 ranges": retrieve_varied(256, lambda i: {"filter": {"price": {"ge": i / 100, "lt": i / 50}}}),
        "256 explore": retrieve(256, k=100, explore={"tail": 50, "new": 50}),
        "256 similar, eight floors": similar(at_least=floors),
        "64 of eight floors": retrieve(64, k=100, at_least=floors),
        "64 of eight floors, full brands": retrieve(64, k=100, max_per={"brand": 1}, at_least=floors),
        "256 displays of 400": retrieve(256, display=["title"] * 400),
        "nested lists": Shape(
            "POST", "/v1/retrieve",
            b'{"queries":[{"features":{"history":[' + b",".join([b"[" * 150 + b"]" * 150] * 109) + b"]}}]}",
        ),
        "60,000 unknown keys": Shape(
            "POST", "/v1/retrieve",
            b'{"queries":[{"features":{},' + b",".join(b'"k%d":1' % i for i in range(60_000)) + b"}]}",
        ),
        "256 similar": similar(),
        "256 similar, exclude of 10,000": similar(exclude=long),
        "256 similar, filter of 10,000": similar(filter={"title": {"in": [f"Title {i}" for i in numbers]}}),
        "250 embedded features of 500": shape(
            "/v1/embed", {"queries": [{"features": {"history": numbers[:500]}}] * 250}
        ),
        "12 embedded features of 10,000": shape("/v1/embed", {"queries": [{"features": {"history": numbers}}] * 12}),
        "feedback of 256 events": events(256, features={"history": numbers[:200]}),
        "feedback of 256 times 400 labels": events(256, labels=numbers[:400]),
        "feedback of 12 times 10,000 labels": events(12, labels=numbers),
        "feedback of 256 organic events": shape("/v1/feedback", {"events": [{"labels": [1], "features": user}] * 256}),
        "delete of 10,000": shape("/v1/labels/delete", {"ids": ids[256:10_256]}),
        "restore of 10,000": shape("/v1/labels/restore", {"ids": ids[256:10_256]}),
        "256 new labels": new_labels(256, {"genres": ["g1"] * 400}),
        "256 long titles": new_labels(256, {}, title="x" * 3_900),
        "256 patches": shape(
            "/v1/labels", {"labels": [{"id": id_, "display": {"tags": ["a"] * 400}} for id_ in ids[:256]]}, "PATCH"
        ),
    }  # fmt: skip


def random_shape(rng: random.Random, labels: int) -> Shape:
    """A legal request whose queries have random options, as many and as long as the limits let."""
    queries = rng.choice([1, 4, 12, 60, 256])
    long = min(10_000, (MOST_VALUES - 2_000) // queries // 3)

    def ids(count: int) -> list[Any]:
        named = rng.random() < 0.5
        return [f"item-{rng.randrange(labels)}" if named else rng.randrange(labels) for _ in range(count)]

    kinds: list[Any] = [
        lambda: {"k": rng.choice([1, 10, 25_600 // 256])},
        lambda: {"exclude": ids(rng.choice([1, long]))},
        lambda: {"allow": ids(rng.choice([1, long]))},
        lambda: {"buckets": rng.sample(["head", "torso", "tail", "new"], 2)},
        lambda: {"filter": {"brand": f"brand-{rng.randrange(9)}", "price": {"ge": rng.random()}}},
        lambda: {"filter": {"title": {"not_in": [f"Title {row}" for row in range(long)]}}},
        lambda: {"bias_removal": rng.random(), "popularity": rng.random(), "priors": {"recent": rng.random()}},
        lambda: {"cooccurrence": 2 * rng.random()},
        lambda: {"exclude_history": rng.random() < 0.5},
        lambda: {"display": rng.choice([True, False, ["title", "tags"]])},
        lambda: {"max_per": {rng.choice(["brand", "colour", "open", "tags"]): rng.randrange(1, 4)}},
        lambda: {"mmr": rng.random(), "pool": rng.choice([100, 25_600 // max(queries, 25)])},
    ]

    def query() -> dict[str, Any]:
        options: dict[str, Any] = {}
        for kind in rng.sample(kinds, rng.randrange(1, 5)):
            options |= kind()
        if "pool" in options:
            options["k"] = min(options.get("k", 10), options["pool"])
        history = {"history": ids(rng.choice([0, 10, long]))}
        return {"features": {"user_id": f"u{rng.randrange(30)}", **history}, **options}

    created = shape("/v1/retrieve", {"queries": [query() for _ in range(queries)]})
    values = sum(map(created.body.count, (b",", b":", b"[", b"{")))
    return created if len(created.body) <= MOST_BYTES and values <= MOST_VALUES else random_shape(rng, labels)
