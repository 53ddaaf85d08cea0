"""Everything a client can get wrong: a status below 500, expected and received, and the field at fault."""

import json
from collections.abc import Iterator
from http import HTTPStatus

import httpx2 as httpx
import pytest

from longtail.serving import create_app
from longtail.serving.http.schemas.operations import ErrorAnswer
from tests.serving.client import open_client
from tests.serving.plane import plane_retriever, plane_settings

Case = tuple[object, str | None, str]


def one_query(**changes: object) -> dict:
    return {"queries": [{"features": {}, "k": 1, **changes}]}


def in_query(field: str, message: str, **changes: object) -> Case:
    return one_query(**changes), f"queries.0.{field}", message


def in_feature(name: str, value: object, message: str, within: str = "") -> Case:
    return one_query(features={name: value}), f"queries.0.features.{name}{within}", message


def in_vector(vector: object, message: str, within: str = "") -> Case:
    return {"queries": [{"vector": vector, "k": 1}]}, f"queries.0.vector{within}", message


A_FEATURE_ID = "expected an id (a string, number or boolean), received "
AN_ID = "expected an id (a string or a whole number), received "
IDS = "expected a list of ids (strings, numbers or booleans), oldest first, received "
FLOAT32 = "expected a finite number that float32 can hold, received "
EITHER = "expected either queries or labels, received "
DIAL = "expected -1.0 <= bias_removal <= 2.0, received "
PRIOR = "expected -1.0 <= popularity <= 2.0, received "
BOTH = "expected -1.0 <= bias_removal + popularity <= 2.0, received "
ONE_LOG = "; this release has one log p_n for both, the label frequency"
QUERY_KEYS = (
    "['k', 'bias_removal', 'popularity', 'cooccurrence', 'priors', 'bonus', 'slope', 'decay', 'exclude', 'allow', "
    "'buckets', 'filter', 'explore', 'at_least', 'max_per', 'mmr', 'pool', 'display', 'features', 'vector', "
    "'exclude_history', 'history', 'explain']"
)
A_YEAR = "expected a finite number, as the column is of kind number, received "

INVALID: dict[str, Case] = {
    "k of 0": in_query("k", "expected greater than or equal to 1, received 0", k=0),
    "k above the limit": in_query("k", "expected k <= 1000, received 1001", k=1001),
    "huge k": in_query("k", "expected k <= 1000, received an integer of 401 digits", k=10**400),
    "k as a string": in_query("k", 'expected a valid integer, received "10"', k="10"),
    "dial too low": in_query("bias_removal", f"{DIAL}-1.01", bias_removal=-1.01),
    "dial too high": in_query("bias_removal", f"{DIAL}3.0", bias_removal=3),
    "dial as a string": in_query("bias_removal", 'expected a valid number, received "1"', bias_removal="1"),
    "prior too high": in_query("popularity", f"{PRIOR}2.5", popularity=2.5),
    "dials too high together": in_query("popularity", f"{BOTH}1.5 + 1.0{ONE_LOG}", bias_removal=1.5, popularity=1),
    "dials too low together": in_query(
        "popularity", f"{BOTH}-0.5 + -0.75{ONE_LOG}", bias_removal=-0.5, popularity=-0.75
    ),
    "prior too high beside the default": in_query("popularity", f"{BOTH}0.5 + 2.0{ONE_LOG}", popularity=2),
    "a filter on nothing known": in_query(
        "filter.wide",
        "expected columns that this release can be filtered by, ['title', 'year'], received \"wide\"; data.display of "
        "the recipe and longtail-index build --filterable choose them",
        filter={"year": 1999, "wide": 3},
    ),
    "a filter of another type": in_query("filter.year.lt", A_YEAR + '"2000"', filter={"year": {"lt": "2000"}}),
    "a filter in a list": in_query("filter.year.in.1", A_YEAR + "null", filter={"year": {"in": [1, None]}}),
    "a filter deep down": in_query("filter.year", A_YEAR + "a list of 1", filter={"year": [[[[[1]]]]]}),
    "a filter of none": in_query(
        "filter.title.in", "expected a list of at least one value, received a list of 0", filter={"title": {"in": []}}
    ),
    "a filter of too many": in_query(
        "filter.title.not_in",
        "expected at most 10000 entries, received 10001",
        filter={"title": {"not_in": [1] * 10_001}},
    ),
    "max_per of nothing": in_query(
        "max_per.year", "expected greater than or equal to 1, received 0", max_per={"year": 0}
    ),
    "max_per of no column": in_query(
        "max_per.brand",
        "expected columns that this release can be filtered by, ['title', 'year'], received \"brand\"; data.display of "
        "the recipe and longtail-index build --filterable choose them",
        max_per={"brand": 10**400},
    ),
    "a history of too many": in_query(
        "history", "expected at most 10000 of them, received 10001", history=[1] * 10_001
    ),
    "a history of no ids": in_query("history.1", f"{AN_ID}null", history=["a", None]),
    "a history as a string": in_query("history", 'expected a list, such as ["a"], received "a"', history="a"),
    "co-occurrence of a release without": in_query(
        "cooccurrence",
        "expected cooccurrence 0 or none, as this release knows nothing of what was chosen together, received 0.5",
        cooccurrence=0.5,
    ),
    "co-occurrence as a string": in_query("cooccurrence", 'expected a valid number, received "1"', cooccurrence="1"),
    "a feature of too many": (
        {"queries": [{"features": {"seen": [1] * 10_001}, "k": 1}]},
        "queries.0.features.seen",
        "expected at most 10000 entries, received 10001",
    ),
    "a pool for nothing": in_query("pool", "expected max_per or mmr with pool, received neither", pool=5),
    "a pool too large": in_query(
        "pool",
        "expected 1 <= pool <= 4096, from k on, received an integer of 401 digits",
        pool=10**400,
        max_per={"year": 1},
    ),
    "kept apart and drawn": in_query(
        "explore",
        "expected explore or max_per, received both: what is drawn at random is not kept apart",
        max_per={"year": 1},
        explore={"tail": 1},
    ),
    "columns there are not": in_query(
        "display.1",
        "expected display columns of this release, ['title', 'year'], received \"titel\"",
        display=["title", "titel"],
    ),
    "columns as a string": in_query(
        "display", 'expected true, false or a list of columns, received "title"', display="title"
    ),
    "more to explore than slots": in_query(
        "explore", "expected at most k = 2 slots to explore together, received 3", k=2, explore={"tail": 2, "new": 1}
    ),
    "a bucket to explore that is filtered out": in_query(
        "explore.new",
        "expected buckets to explore that may be answered, ['head'], received 'new'",
        buckets=["head"],
        explore={"new": 1},
    ),
    "no features": ({"queries": [{"k": 1}]}, "queries.0", "expected either features or vector, received neither"),
    "features and a vector": (
        one_query(vector=[0, 1]),
        "queries.0",
        "expected either features or vector, received both",
    ),
    "long vector": in_vector([0.5] * 3, "expected the 2 numbers of a vector of this release, received 3"),
    "string in a vector": in_vector([0, "1"], 'expected a valid number, received "1"', ".1"),
    "vector beyond float32": in_vector(
        [1e308, -1e308],
        "expected a vector of norm <= 1e+12, whose scores float32 can hold, received one of 1.41421e+308",
    ),
    "unknown feature": (
        {"queries": [{"features": {}}, {"features": {"usr": "u"}}]},
        "queries.1.features.usr",
        "expected one of the features ['user', 'seen', 'tags', 'words', 'age'], received \"usr\": did you mean 'user'?",
    ),
    "id as a list": in_feature("user", ["u"], f"{A_FEATURE_ID}a list of 1"),
    "history as a string": in_feature("seen", "u", f'{IDS}"u"'),
    "null in a history": in_feature("seen", ["u", None], f"{A_FEATURE_ID}null", within=".1"),
    "weight as a string": in_feature("tags", {"u": "1"}, 'expected a finite number, received "1"', within=".u"),
    "text as a list": in_feature("words", ["a"], "expected a string, received a list of 1"),
    "number as a word": in_feature("age", "old", 'expected a finite number, received "old"'),
    "number beyond float32": in_feature("age", 1e39, f"{FLOAT32}1e+39"),
    "huge integer": in_feature("age", 10**400, f"{FLOAT32}an integer of 401 digits"),
    "fraction in exclude": in_query("exclude.1", f"{AN_ID}1.5", exclude=["a", 1.5]),
    "null in allow": in_query("allow.0", f"{AN_ID}null", allow=[None]),
    "long exclude": in_query("exclude", "expected at most 10000 of them, received 10001", exclude=[1] * 10_001),
    "unknown bucket": in_query(
        "buckets.0", "expected 'head', 'torso', 'tail' or 'new', received \"mid\"", buckets=["mid"]
    ),
    "λ by its paper's name": in_query(
        "lambda",
        f"expected one of the keys {QUERY_KEYS}, received \"lambda\": did you mean 'bias_removal'?",
        **{"lambda": 1},
    ),
    "top_k": in_query(
        "top_k", f"expected one of the keys {QUERY_KEYS}, received \"top_k\": did you mean 'k'?", top_k=1
    ),
    "unknown key of a query": in_query(
        "K", f"expected one of the keys {QUERY_KEYS}, received \"K\": did you mean 'k'?", K=1
    ),
    "no queries": ({}, "queries", "expected a value for queries, received none; /docs has examples"),
    "buckets as a string": in_query("buckets", 'expected a list, such as ["tail"], received "tail"', buckets="tail"),
    "no buckets": in_query("buckets", "expected a list of at least 1, received an empty one", buckets=[]),
    "empty batch": ({"queries": []}, "queries", "expected a list of at least 1, received an empty one"),
    "long batch": ({"queries": [{"features": {}}] * 6}, "queries", "expected at most 5 queries, received 6"),
    "a list": ([], None, "expected an object, received a list of 0"),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """One for all: nothing that is refused changes the service."""
    app = create_app(plane_settings(tmp_path_factory.mktemp("state")), retriever=plane_retriever())
    with open_client(app) as client:
        yield client


def post(client: httpx.Client, path: str, body: object) -> httpx.Response:
    return client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


def check(response: httpx.Response, status: int, kind: str) -> dict:
    assert response.status_code == status, response.text
    answer = ErrorAnswer.model_validate_json(response.content, strict=True)
    assert response.headers["content-type"] == "application/problem+json"
    assert answer.request_id == response.headers["x-request-id"]
    assert answer.error.type == kind
    problem = (f"urn:longtail:{kind}", HTTPStatus(status).phrase, status, answer.error.message)
    assert (answer.type, answer.title, answer.status, answer.detail) == problem
    return response.json()["error"]


@pytest.mark.parametrize("case", INVALID)
def test_json_that_cannot_be_answered(client: httpx.Client, case: str) -> None:
    body, field, message = INVALID[case]
    error = check(post(client, "/v1/retrieve", body), 422, "invalid_request")
    assert error == {"type": "invalid_request", "message": message} | ({} if field is None else {"field": field})


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/retrieve", {"features": {"user": "u"}, "k": 3, "nonsense": 1},
            'expected a value for queries, received none: did you mean {"queries": [{"features": …, "k": …}]}?',
        ),
        (
            "/v1/feedback", {"answer_id": "a", "labels": ["b"]},
            'expected a value for events, received none: did you mean {"events": [{"answer_id": …, "labels": …}]}?',
        ),
        ("/v1/retrieve", {"nonsense": 1}, "expected a value for queries, received none; /docs has examples"),
        ("/v1/labels/delete", {"id": "a"}, "expected a value for ids, received none; /docs has examples"),
    ],
)  # fmt: skip
def test_an_entry_without_its_list_gets_a_hint(client: httpx.Client, path: str, body: dict, message: str) -> None:
    error = check(post(client, path, body), 422, "invalid_request")
    assert error == {"type": "invalid_request", "field": message.split()[4].rstrip(","), "message": message}


def test_a_feature_outside_features_gets_a_hint(client: httpx.Client) -> None:
    error = check(post(client, "/v1/retrieve", {"queries": [{"user_id": "u42"}]}), 422, "invalid_request")
    assert error["field"] == "queries.0.user_id"
    assert error["message"].endswith(
        'received "user_id": features go into "features", did you mean {"features": {"user_id": …}}?'
    )


NOT_JSON = {
    "nothing": b"",
    "half": b'{"queries": [',
    "single quotes": b"{'queries': []}",
    "latin-1": '{"queries":[{"features":{"user":"é"}}]}'.encode("latin-1"),
    "utf-16": '{"queries":[]}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"queries":[]}',
    "lone surrogate": b'{"queries":[{"features":{"user":"\\ud800"}}]}',
    "lone surrogate as a key": b'{"queries":[{"features":{"\\udfff":1}}]}',
    "deep": b'{"queries":[{"features":{"user":' + b"[" * 9000 + b"]" * 9000 + b"}}]}",
    "5,000 digits": b'{"queries":[{"features":{},"k":' + b"1" * 5000 + b"}]}",
    "5,000 digits in a filter": b'{"queries":[{"features":{},"filter":{"year":' + b"1" * 5000 + b"}}]}",
    "zero bytes": b"\0" * 100,
}


@pytest.mark.parametrize("case", NOT_JSON)
def test_bodies_that_are_not_json(client: httpx.Client, case: str) -> None:
    response = client.post("/v1/retrieve", content=NOT_JSON[case], headers={"content-type": "application/json"})
    error = check(response, 400, "malformed_body")
    assert error["message"].startswith("expected a JSON object in UTF-8, received a body that is not: ")


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize(
    ("template", "field"),
    [
        (b'"features":{},"bias_removal":%s', "queries.0.bias_removal"),
        (b'"features":{},"popularity":%s', "queries.0.popularity"),
        (b'"features":{"age":%s}', "queries.0.features.age"),
        (b'"features":{"tags":{"u":%s}}', "queries.0.features.tags.u"),
        (b'"features":{"user":%s}', "queries.0.features.user"),
        (b'"vector":[0,%s]', "queries.0.vector.1"),
        (b'"features":{},"filter":{"year":{"ge":%s}}', "queries.0.filter.year.ge"),
        (b'"features":{},"mmr":%s', "queries.0.mmr"),
    ],
)
def test_numbers_that_are_not_finite(client: httpx.Client, template: bytes, field: str, value: bytes) -> None:
    body = b'{"queries":[{' + template % value + b"}]}"
    response = client.post("/v1/retrieve", content=body, headers={"content-type": "application/json"})
    assert check(response, 422, "invalid_request")["field"] == field


@pytest.mark.parametrize("depth", [50, 150])
def test_nested_values_are_refused_by_their_type(client: httpx.Client, depth: int) -> None:
    body = b'{"queries":[{"features":{"user":' + b"[" * depth + b"]" * depth + b"}}]}"
    response = client.post("/v1/retrieve", content=body, headers={"content-type": "application/json"})
    assert check(response, 422, "invalid_request")["message"].endswith("received a list of 1")


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", None])
def test_other_content_types(client: httpx.Client, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = client.post("/v1/retrieve", content=json.dumps(one_query()).encode(), headers=headers)
    error = check(response, 415, "unsupported_content_type")
    assert error["message"] == f"expected Content-Type application/json, received {content_type or 'none'}"


@pytest.mark.parametrize("encoding", ["gzip", "br", "xchunked", "identity, gzip"])
def test_other_content_encodings(client: httpx.Client, encoding: str) -> None:
    response = client.post("/v1/retrieve", json=one_query(), headers={"content-encoding": encoding})
    error = check(response, 415, "unsupported_content_type")
    assert error["message"] == f"expected a body without Content-Encoding, received {encoding}"
    assert client.post("/v1/retrieve", json=one_query(), headers={"content-encoding": "identity"}).status_code == 200


def test_a_body_announced_too_long(client: httpx.Client) -> None:
    response = client.post("/v1/retrieve", content=b" " * 50_001, headers={"content-type": "application/json"})
    error = check(response, 413, "body_too_large")
    assert error["message"] == "expected a body of at most 50000 bytes, received more"


def test_a_body_that_turns_out_too_long(client: httpx.Client) -> None:
    sent = []

    def chunks() -> Iterator[bytes]:
        for _ in range(1000):
            sent.append(1)
            yield b" " * 10_000

    response = client.post("/v1/retrieve", content=chunks(), headers={"content-type": "application/json"})
    error = check(response, 413, "body_too_large")
    assert error["message"] == "expected a body of at most 50000 bytes, received more"


def test_unknown_routes_and_methods(client: httpx.Client) -> None:
    error = check(client.get("/v1/retreive"), 404, "unknown_route")
    assert error["message"] == 'expected one of the routes that /docs lists, received "/v1/retreive"'
    response = client.get("/v1/retrieve")
    error = check(response, 405, "wrong_method")
    assert error["message"] == 'expected POST for "/v1/retrieve", received GET'
    assert response.headers["allow"] == "POST"
    response = client.post("/v1/release")
    error = check(response, 405, "wrong_method")
    assert error["message"] == 'expected GET, HEAD for "/v1/release", received POST'
    assert response.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("body", "status", "field", "message"),
    [
        ({}, 422, None, "expected either id or ids, received neither"),
        ({"id": "a", "ids": ["b"]}, 422, None, "expected either id or ids, received both"),
        ({"ids": []}, 422, "ids", "expected a list of at least 1, received an empty one"),
        ({"ids": list("abcabc")}, 422, "ids", "expected at most 5 ids, received 6"),
        ({"id": "zz"}, 404, "id", 'expected the id of a label of this release, received "zz"'),
        ({"ids": ["a", 17]}, 404, "ids.1", "expected the id of a label of this release, received 17"),
        ({"id": 1.5}, 422, "id", "expected an id (a string or a whole number), received 1.5"),
        ({"id": "a", "k": 0}, 422, "k", "expected greater than or equal to 1, received 0"),
        ({"id": "a", "k": 1, "bias_removal": 9}, 422, "bias_removal", f"{DIAL}9.0"),
        ({"id": "a", "features": {}}, 422, "features", None),
    ],
)  # fmt: skip
def test_similar(client: httpx.Client, body: dict, status: int, field: str | None, message: str | None) -> None:
    kind = "unknown_label" if status == 404 else "invalid_request"
    error = check(client.post("/v1/similar", json=body), status, kind)
    assert error.get("field") == field
    assert message in (None, error["message"])


@pytest.mark.parametrize(
    ("body", "status", "field", "message"),
    [
        ({}, 422, None, f"{EITHER}neither"),
        ({"queries": [{"features": {}}], "labels": ["a"]}, 422, None, f"{EITHER}both"),
        ({"queries": []}, 422, "queries", "expected a list of at least 1, received an empty one"),
        ({"labels": []}, 422, "labels", "expected a list of at least 1, received an empty one"),
        ({"queries": [{"features": {}}] * 6}, 422, "queries", "expected at most 5 queries, received 6"),
        ({"labels": ["a"] * 6}, 422, "labels", "expected at most 5 labels, received 6"),
        (
            {"queries": [{}]}, 422, "queries.0.features",
            "expected a value for features, received none; /docs has examples",
        ),
        (
            {"queries": [{"features": {}, "k": 1}]}, 422, "queries.0.k",
            "expected one of the keys ['features'], received \"k\"",
        ),
        ({"queries": [{"features": {"age": 1e39}}]}, 422, "queries.0.features.age", f"{FLOAT32}1e+39"),
        ({"labels": ["a", "zz"]}, 404, "labels.1", 'expected the id of a label of this release, received "zz"'),
        ({"labels": [10**400]}, 404, "labels.0", None),
        ({"labels": [1.5]}, 422, "labels.0", f"{AN_ID}1.5"),
        ({"labels": ["a"], "release": "r0"}, 404, "release", None),
        (
            {"labels": ["a"], "preview": True}, 422, "preview",
            "expected one of the keys ['queries', 'labels', 'release'], received \"preview\"",
        ),
    ],
)  # fmt: skip
def test_embed(client: httpx.Client, body: dict, status: int, field: str | None, message: str | None) -> None:
    kind = "invalid_request" if status == 422 else "unknown_release" if field == "release" else "unknown_label"
    error = check(post(client, "/v1/embed", body), status, kind)
    assert error.get("field") == field
    assert message in (None, error["message"])
