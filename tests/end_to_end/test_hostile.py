"""The real server process against every case of its own document, valid and not: no 5xx, no hang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from longtail.index import IndexSpec, KnownQueries, build, open_releases
from longtail.serving.http.auth import OPEN_PATHS
from tests.bundles import make_bundle
from tests.end_to_end.killing import check_log, server
from tests.serving.process import ServerProcess

API_KEY, ADMIN_KEY = "fuzz-api-key-0123456789", "fuzz-admin-key-0123456789"
POSTED = (
    "/v1/retrieve", "/v1/similar", "/v1/labels", "/v1/feedback", "/v1/embed", "/v1/labels/delete", "/v1/labels/restore",
    "/v1/release/reload", "/v1/queries",
)  # fmt: skip
SEED = 4
ADMIN = {"X-API-Key": ADMIN_KEY}
KEYS = {"api_keys": API_KEY, "admin_keys": ADMIN_KEY}
EXPERIMENTS = """
[experiments.dial]
unit = "user_id"
[experiments.dial.arms.control]
share = 0.5
[experiments.dial.arms.tail]
share = 0.5
bias_removal = 0.3
"""
SECONDS = 30
"""Longer than any answer takes: who waits this long has found a hang."""
BOUNDED = settings(
    max_examples=10, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
)


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    bundle = make_bundle(label_tower=True).write(root / "bundle")
    table = pa.table({"label_id": bundle.labels.ids, "recent": np.linspace(-3, 0, len(bundle.labels.ids))})
    pq.write_table(table, root / "priors.parquet")
    pq.write_table(pa.table({"user_id": [f"u{row}" for row in range(20)], "age": range(20)}), root / "users.parquet")
    queries, priors = KnownQueries(root / "users.parquet", "user_id"), root / "priors.parquet"
    build(bundle, root / "releases", spec=IndexSpec("flat"), name="only", priors=priors, queries=queries)
    open_releases(root / "releases").publish("only")
    (root / "releases" / "experiments.toml").write_text(EXPERIMENTS)
    return root / "releases"


@contextmanager
def serving(releases: Path, directory: Path, **options: object) -> Iterator[ServerProcess]:
    """A server whose log and exit code are looked at in the end."""
    with server(releases, directory / "log", state=directory / "state", **options) as process:
        process.wait_until_ready()
        yield process
        assert process.terminate() == 0
    check_log(directory / "log", API_KEY, ADMIN_KEY)


# The document


def tightened(document: dict[str, Any]) -> dict[str, Any]:
    """The document with what only this release knows, so that half of the valid requests are answerable."""
    schemas = document["components"]["schemas"]
    known_ids: dict[str, Any] = {"enum": [f"item-{row}" for row in range(20)]}
    query_features = {
        "user_id": {"enum": ["u1", "stranger", None, 3]},
        "history": {"type": "array", "items": known_ids},
    }
    label_features = {"genres": {"type": "array", "items": {"enum": ["g1", "g9"]}}, "year": {"type": "number"}}
    label_features["year"] |= {"minimum": -10, "maximum": 10}

    def exactly(properties: dict[str, Any]) -> dict[str, Any]:
        return {"type": "object", "properties": properties, "additionalProperties": False}

    for name in ("RetrieveQuery", "SimilarRequest"):
        limits = {"k": {"type": "integer", "minimum": 1, "maximum": 60}}
        limits["bias_removal"] = {"type": "number", "minimum": -1, "maximum": 2}
        limits["priors"] = exactly({"recent": {"type": "number", "minimum": -1, "maximum": 1}})
        limits["filter"] = exactly({"title": {"enum": ["Title 9", {"not_in": ["Title 1"]}]}})
        limits["max_per"] = exactly({"title": {"type": "integer", "minimum": 1, "maximum": 9}})
        schemas[name]["properties"] |= limits | {
            field: {"type": "array", "items": known_ids} for field in ("exclude", "allow")
        }
        for field in ("explore", "pool"):  # one rules the other out, and has its limits
            del schemas[name]["properties"][field]
    for name in ("RetrieveQuery", "QueryFeatures"):
        schemas[name]["properties"]["features"] = exactly(query_features)
        schemas[name]["required"] = ["features"]
    del schemas["RetrieveQuery"]["properties"]["vector"]
    schemas["RetrieveRequest"]["properties"]["arm"] = {"enum": ["control", "tail", None]}
    schemas["LabelIdsRequest"]["properties"]["ids"] = {"type": "array", "items": known_ids, "minItems": 1}
    schemas["Event"]["properties"] |= {"features": exactly(query_features), "bias_removal": {"enum": [0, 0.5, None]}}
    schemas["LabelToAdd"]["properties"] |= {
        "features": exactly(label_features), "display": exactly({"title": {"type": "string"}}),
        "id": {"type": "string", "pattern": "^[a-z]{1,4}$"},
        "priors": exactly({"recent": {"type": "number", "minimum": -9, "maximum": 9}}),
    }  # fmt: skip
    schemas["SimilarRequest"]["properties"]["ids"] = {"type": "array", "items": known_ids, "minItems": 1}
    schemas["QueriesRequest"]["properties"] |= {
        "k": {"type": "integer", "minimum": 1, "maximum": 60}, "bias_removal": {"enum": [0, 0.5, 1, None]},
        "filter": exactly({"age": {"enum": [9, {"lt": 5}, {"not_in": [1]}]}}),
        "exclude_history": {"enum": [False, None]},
        "ids": {"type": "array", "items": known_ids, "minItems": 1}, "display": {"enum": [True, False, ["age"]]},
    }  # fmt: skip
    del schemas["QueriesRequest"]["properties"]["features"]
    of_two = [
        ("QueriesRequest", "ids", "id"),
        ("SimilarRequest", "ids", "id"),
        ("Event", "features", "answer_id"),
        ("EmbedRequest", "queries", "labels"),
    ]
    for name, left_schema, other in of_two:
        del schemas[name]["properties"][other]
        schemas[name]["required"] = [*schemas[name].get("required", []), left_schema]
    for name in ("RetrieveRequest", "SimilarRequest", "QueriesRequest", "EmbedRequest"):
        schemas[name]["properties"]["release"] = {"enum": ["only", None]}
    return document


def test_generated_requests_never_give_500(releases: Path, tmp_path: Path) -> None:
    with serving(releases, tmp_path) as service:
        document = httpx.get(f"{service.url}/openapi.json").json()
        statuses = explored(service, document, GenerationMode)
    assert {status for _, status in statuses} <= {200, 400, 404, 413, 422}


def test_requests_that_fit_the_release_are_answered(releases: Path, tmp_path: Path) -> None:
    with serving(releases, tmp_path, **KEYS) as service:
        document = tightened(httpx.get(f"{service.url}/openapi.json").json())
        statuses = explored(service, document, [GenerationMode.POSITIVE], **ADMIN)
        strangers = explored(service, document, [GenerationMode.POSITIVE])
    for path in POSTED:
        assert statuses[f"POST {path}", 200] > 0, f"no valid request for {path} was made"
    assert {status for label, status in strangers if label.split()[1] not in OPEN_PATHS} == {401}


def explored(
    service: ServerProcess, document: dict[str, Any], modes: Iterable[GenerationMode], **headers: str
) -> Counter[tuple[str, int]]:
    """What came of some cases of every operation, each checked against the document: operations and statuses."""
    statuses: Counter[tuple[str, int]] = Counter()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=service.url)
    for mode, operation in product(modes, list(schema.get_all_operations())):
        operation = operation.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # any string is an id

        @seed(SEED)
        @BOUNDED
        @given(operation.as_strategy(generation_mode=mode))
        def explore(case: Case) -> None:
            response = case.call(session=session, timeout=SECONDS)
            statuses[case.operation.label, response.status_code] += 1
            if response.status_code == 413:
                return  # the document cannot say how many bytes a body may have
            # Whether a valid request can be answered is the release's to say: the document knows none of its features.
            case.validate_response(response, excluded_checks=[positive_data_acceptance])

        with requests.Session() as session:
            session.headers.update(headers)
            explore()
    return statuses
