"""`recommend` and `similar`: every kind of frame, and the same answers as the service, to the last digit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import httpx2 as httpx
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import longtail
from longtail.index import open_releases
from longtail.serving import ServingError

USERS = pa.table({
    "user_id": ["u3", "u7", "stranger"],
    "history": [["item-1", "item-2"], [], ["item-9"]],
    "age": [30, 40, 50],
})  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias_removal": 0.0},
    {"bias_removal": 0.7, "popularity": -0.3, "cooccurrence": 0.4},
    {"exclude": ["item-4", "item-5"], "buckets": ["torso", "tail"], "exclude_history": True},
    {"filter": {"title": {"in": ["Title 3", "Title 8", "Title 21"]}}},
    {"max_per": {"title": 1}, "mmr": 0.2, "pool": 50},
    {"at_least": [{"bucket": "tail", "n": 2}, {"filter": {"title": {"in": ["Title 8", "Title 21"]}}, "n": 1}]},
]


def polars_frame(table: pa.Table) -> Any:
    return pytest.importorskip("polars").from_arrow(table)


FRAMES = {
    "pandas": lambda table: table.to_pandas(),
    "polars": polars_frame,
    "pyarrow": lambda table: table,
    "duckdb": duckdb.from_arrow,
}


def convert_to_arrow(frame: Any) -> pa.Table:
    if isinstance(frame, pd.DataFrame):
        return pa.Table.from_pandas(frame, preserve_index=False)
    if isinstance(frame, duckdb.DuckDBPyRelation):
        return frame.to_arrow_table()
    return frame if isinstance(frame, pa.Table) else frame.to_arrow()


def list_rows(frame: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = convert_to_arrow(frame).to_pylist()
    return rows


def request_labels(service: str, path: str, body: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the labels of every result, as the service writes them."""
    answer = httpx.post(f"{service}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return [result["labels"] for result in answer.json()["results"]]


def assert_same(rows: list[dict[str, Any]], lists: list[list[dict[str, Any]]]) -> None:
    served = [(rank, label) for labels in lists for rank, label in enumerate(labels, 1)]
    assert [row["rank"] for row in rows] == [rank for rank, _ in served]
    assert [row["label_id"] for row in rows] == [label["id"] for _, label in served]
    assert [row["bucket"] for row in rows] == [label["bucket"] for _, label in served]
    assert [row["title"] for row in rows] == [label["display"]["title"] for _, label in served]
    assert [np.float32(row["score"]) for row in rows] == [np.float32(label["score"]) for _, label in served]


@pytest.mark.parametrize("options", OPTIONS)
def test_one_query_gets_the_answer_of_the_service(options: dict[str, Any], model: longtail.Model, service: str) -> None:
    features = {"user_id": "u3", "history": ["item-1", "item-2"]}
    frame = model.recommend(features, k=7, **options)
    lists = request_labels(service, "retrieve", {"queries": [{"features": features, "k": 7, **options}]})
    assert isinstance(frame, pd.DataFrame)
    assert lists[0]
    assert_same(list_rows(frame), lists)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_of_queries_gets_a_frame_of_its_library(
    kind: str, options: dict[str, Any], model: longtail.Model, service: str
) -> None:
    source = FRAMES[kind](USERS)
    answers = model.recommend(source, k=5, **options)
    assert type(answers) is type(source)
    bodies = [
        {"features": {"user_id": row["user_id"], "history": row["history"]}, "k": 5, **options}
        for row in USERS.to_pylist()
    ]
    lists = request_labels(service, "retrieve", {"queries": bodies})
    rows = list_rows(answers)
    assert_same(rows, lists)
    names = [name for name, labels in zip(USERS["user_id"].to_pylist(), lists, strict=True) for _ in labels]
    assert [row["user_id"] for row in rows] == names


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_a_path_of_queries_is_answered(ending: str, model: longtail.Model, tmp_path: Path) -> None:
    users = USERS.select(["user_id"])
    path = tmp_path / f"users.{ending}"
    if ending == "csv":
        users.to_pandas().to_csv(path, index=False)
    else:
        pq.write_table(users, path)
    with pytest.warns(UserWarning, match=rf"^users\.{ending}: no column 'history'"):
        answers = model.recommend(path, k=4)
    assert list_rows(answers) == list_rows(model.recommend(users.to_pylist(), k=4))


def test_lists_of_labels_may_be_columns(model: longtail.Model) -> None:
    best = model.recommend(USERS, k=2)
    lists = [best["label_id"][2 * row : 2 * row + 2].to_pylist() for row in range(3)]
    others = model.recommend(USERS.append_column("bought", pa.array(lists)), k=2, exclude="bought")
    for row in range(3):
        assert not {*others["label_id"][2 * row : 2 * row + 2].to_pylist()} & {*lists[row]}


def test_values_of_pandas_and_numpy_are_plain(model: longtail.Model) -> None:
    plain = model.recommend({"user_id": "u3", "history": ["item-1", "item-2"]}, k=3, bias_removal=0.5)
    features = {"user_id": "u3", "history": pd.Series(["item-1", "item-2"])}
    assert list_rows(model.recommend(features, k=np.int64(3), bias_removal=np.float32(0.5))) == list_rows(plain)


def test_a_query_may_be_a_vector(model: longtail.Model, service: str) -> None:
    vector = model.bundle.embeddings[4]
    rows = list_rows(model.recommend(vector=vector, k=3))
    assert_same(rows, request_labels(service, "retrieve", {"queries": [{"vector": vector.tolist(), "k": 3}]}))


def test_an_explanation_is_a_column(model: longtail.Model, service: str) -> None:
    rows = list_rows(model.recommend({"user_id": "u3"}, k=2, explain=True))
    query = {"features": {"user_id": "u3"}, "k": 2, "explain": True}
    ((first, _),) = request_labels(service, "retrieve", {"queries": [query]})
    assert np.float32(rows[0]["explanation"]["taste"]) == np.float32(first["explanation"]["taste"])


def test_similar_labels_match_the_service(model: longtail.Model, service: str) -> None:
    assert_same(list_rows(model.similar("item-7", k=4)), request_labels(service, "similar", {"id": "item-7", "k": 4}))
    several = model.similar(["item-7", "item-8"], k=2)
    assert_same(list_rows(several), request_labels(service, "similar", {"ids": ["item-7", "item-8"], "k": 2}))
    assert several["query"].tolist() == ["item-7", "item-7", "item-8", "item-8"]


def test_an_empty_answer_has_its_columns(model: longtail.Model) -> None:
    nothing = model.recommend(USERS, k=3, allow=[])
    assert nothing.num_rows == 0
    assert nothing.column_names == ["user_id", "rank", "label_id", "score", "bucket"]


def test_unknown_labels_warn(model: longtail.Model) -> None:
    with pytest.warns(UserWarning, match="ids that this release does not have were left out: 2 in exclude"):
        model.recommend({"user_id": "u3"}, exclude=["nothing", "none", "item-1"])


@pytest.mark.parametrize("queries", [{"user_id": "u3"}, USERS])
def test_a_wrong_option_gets_the_error_of_the_service(queries: Any, model: longtail.Model) -> None:
    with pytest.raises(ServingError, match="did you mean 'bias_removal'"):
        model.recommend(queries, bias_removel=1)
    with pytest.raises(ServingError, match=r"expected -1\.0 <= bias_removal <= 2\.0, received 7\.0"):
        model.recommend(queries, bias_removal=7)


def test_a_wrong_row_of_a_frame_is_named_without_its_temporary_folder(model: longtail.Model) -> None:
    with pytest.raises(ServingError, match=r"^queries\.parquet: expected columns of the features user_id, history"):
        model.recommend(pa.table({"nothing": [1]}))
    users = pa.table({"user_id": ["u1", "u2"], "history": [[], []], "bought": ["['item-1']", "item"]})
    with pytest.raises(ServingError, match=r"^queries\.parquet: row 1: column 'bought': expected lists of label ids"):
        model.recommend(users, exclude="bought")


def test_a_server_of_a_model_answers_with_its_scores(model: longtail.Model) -> None:
    with model.serve() as server, longtail.Client(server.url) as client:
        (result,) = client.retrieve(features={"user_id": "u3"}, k=3).results
    rows = list_rows(model.recommend({"user_id": "u3"}, k=3))
    assert [(row["label_id"], np.float32(row["score"])) for row in rows] == [
        (label.id, np.float32(label.score)) for label in result.labels
    ]
    assert repr(server).endswith("stopped)")
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


def test_bundle_release_and_releases_load_the_same_model(releases: Path, model: longtail.Model) -> None:
    expected = list_rows(model.recommend({"user_id": "u3"}, k=5))
    for source in (releases, str(releases), releases / "first", releases / "first" / "bundle"):
        rows = list_rows(longtail.load(source).recommend({"user_id": "u3"}, k=5))
        assert [row["label_id"] for row in rows] == [row["label_id"] for row in expected]
        assert [row["score"] for row in rows] == pytest.approx([row["score"] for row in expected], rel=3e-6)
    assert list_rows(longtail.load(releases, "first").recommend({"user_id": "u3"}, k=5)) == expected


def test_loading_without_a_published_release_fails_clearly(tmp_path: Path) -> None:
    open_releases(tmp_path)
    with pytest.raises(longtail.index.ReleaseNotFoundError, match="expected a bundle, a release or a directory"):  # type: ignore[attr-defined]
        longtail.load(tmp_path)
