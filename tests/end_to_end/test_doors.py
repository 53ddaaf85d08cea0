"""A zoo of files of one log: every door that reads it finds the same ids, times and pairs."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Vocabulary
from longtail.bundle.manifest import LogColumns
from longtail.index import Releases, open_releases
from longtail.index.building.pairs import read_pairs
from longtail.index.building.priors import Limits, PriorTable
from longtail.index.building.vectors import VectorFiles
from longtail.serving.batch import TableOptions, iterate_answers
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import RetrieveQuery
from longtail.serving.core.retriever import Retriever
from longtail.serving.export import export
from longtail.tables import DataError
from longtail.tables.times import UNITS
from longtail.trainer.audit.lists import ListColumns, match_ids, read_lists
from longtail.trainer.config import DataConfig, load_recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.loading import load_dataset
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.init.recipe import draft_recipe
from tests.bundles import make_bundle
from tests.end_to_end.killing import server
from tests.end_to_end.releases import publish_bundle

ROWS = 24
BEGIN = int(datetime(2026, 1, 31, 22, tzinfo=UTC).timestamp())
USERS, ITEMS = [row % 5 + 10 for row in range(ROWS)], [row * row % 9 + 1 for row in range(ROWS)]
SECONDS = [BEGIN + row * 3600 for row in range(ROWS)]
MOMENTS = [datetime.fromtimestamp(second, UTC) for second in SECONDS]
Pairs = set[tuple[str, str, float]]


class Animal(NamedTuple):
    """Columns of one log: user, item and time; what `id` makes of a number is its id in every door."""

    users: Any
    items: Any
    times: Any
    id: Callable[[int], str] = str


def plain(times: Any = SECONDS) -> Animal:
    return Animal(USERS, ITEMS, times)


def ids(of: Callable[[int], Any], id_: Callable[[int], str] = str, kind: pa.DataType | None = None) -> Animal:
    users, items = ([of(value) for value in values] for values in (USERS, ITEMS))
    return Animal(pa.array(users, kind), pa.array(items, kind), SECONDS, id_)


def printed(form: str, zone: timezone = UTC) -> list[str]:  # type: ignore[assignment]
    return [moment.astimezone(zone).strftime(form) for moment in MOMENTS]


BIG = 2**53
TYPED: dict[str, Animal] = {
    "integers": plain(),
    **{f"ids of {kind}": ids(int, kind=kind) for kind in (pa.int8(), pa.uint32(), pa.int64(), pa.uint64())},
    **{f"ids of {kind}": ids(float, kind=kind) for kind in (pa.float32(), pa.float64())},
    "ids as decimals": ids(Decimal, kind=pa.decimal128(12, 2)),
    "ids as text": ids(str),
    "ids as long text": ids(str, kind=pa.large_string()),
    "ids as text of floats": ids(lambda value: f"{value}.0"),
    "ids with blanks": ids(lambda value: f" {value} b", lambda value: f" {value} b"),
    "ids with zeros": ids(lambda value: f"{value:06}", lambda value: f"{value:06}"),
    "ids beyond a double": ids(lambda value: BIG + value, lambda value: str(BIG + value)),
    "ids beyond BIGINT": ids(lambda value: 2**63 + value, lambda value: str(2**63 + value), pa.uint64()),
    "ids of other scripts": ids(lambda value: f"μ-{value}-ü", lambda value: f"μ-{value}-ü"),
    "ids as bytes": ids(lambda value: str(value).encode(), kind=pa.binary()),
    "dictionaries": Animal(*(pa.array(map(str, of)).dictionary_encode() for of in (USERS, ITEMS)), SECONDS),
    **{unit: plain([second * int(scale) for second in SECONDS]) for unit, scale in UNITS.items()},
    "floats of seconds": plain([float(second) for second in SECONDS]),
    **{f"timestamps in {unit}": plain(
        pa.array(MOMENTS, pa.timestamp(unit, "UTC"))) for unit in ("s", "ms", "us", "ns")},
    **{f"timestamps without a zone in {unit}": plain(
        pa.array([moment.replace(tzinfo=None) for moment in MOMENTS], pa.timestamp(unit))) for unit in ("s", "ns")},
    "timestamps of a zone": plain(pa.array(MOMENTS, pa.timestamp("us", "Europe/Berlin"))),
    "text of seconds": plain([str(second) for second in SECONDS]),
    "text of milliseconds": plain([f"{second}000" for second in SECONDS]),
    "ISO 8601": plain([moment.isoformat() for moment in MOMENTS]),
    "ISO 8601 with Z": plain(printed("%Y-%m-%dT%H:%M:%SZ")),
    "ISO 8601 of a zone": plain(printed("%Y-%m-%dT%H:%M:%S+05:30", timezone(timedelta(hours=5, minutes=30)))),
    "times of a database": plain(printed("%Y-%m-%d %H:%M:%S.123456+00")),
    "times of a warehouse": plain(printed("%Y-%m-%d %H:%M:%S UTC")),
}  # fmt: skip


def values(column: Any) -> list[Any]:
    return column.to_pylist() if isinstance(column, pa.Array) else list(column)


def cells(animal: Animal) -> list[tuple[Any, ...]]:
    return list(zip(*(map(values, animal[:3])), strict=True))


def write_parquet(animal: Animal, folder: Path) -> Path:
    pq.write_table(
        pa.table({"user_id": animal.users, "item_id": animal.items, "time": animal.times}), folder / "a.parquet"
    )
    return folder / "a.parquet"


def format_text(animal: Animal, *, delimiter: str = ",", line: str = "\n") -> str:
    rows = ["user_id,item_id,time".replace(",", delimiter)]
    for row in cells(animal):
        texts = [value.decode() if isinstance(value, bytes) else str(value) for value in row]
        rows.append(delimiter.join(texts))
    return line.join(rows) + line


def format_lines(animal: Animal) -> str:
    names = ("user_id", "item_id", "time")
    rows = [dict(zip(names, row, strict=True)) for row in cells(animal)]
    return "".join(json.dumps(row, default=str) + "\n" for row in rows)


TEXTS: dict[str, tuple[str, Callable[[Animal], bytes]]] = {
    "CSV": ("a.csv", lambda animal: format_text(animal).encode()),
    "TSV": ("a.tsv", lambda animal: format_text(animal, delimiter="\t").encode()),
    "CSV with a BOM": ("a.csv", lambda animal: b"\xef\xbb\xbf" + format_text(animal).encode()),
    "CSV of Windows": ("a.csv", lambda animal: format_text(animal, delimiter=";", line="\r\n").encode()),
    "packed CSV": ("a.csv.gz", lambda animal: gzip.compress(format_text(animal).encode())),
    "quoted CSV": ("a.csv", lambda animal: re.sub("[^,\n]+", r'"\g<0>"', format_text(animal)).encode()),
    "JSON lines": ("a.jsonl", lambda animal: format_lines(animal).encode()),
}  # fmt: skip
OF_JSON = {name: animal for name, animal in TYPED.items() if "bytes" not in name and "decimals" not in name}
ZOO = [
    *(("Parquet", name) for name in TYPED),
    *((form, name) for form in TEXTS for name in TYPED if form in ("CSV", "JSON lines") and name in OF_JSON),
    *((form, name) for form in TEXTS for name in ("integers", "ids as text of floats", "ISO 8601", "ids with zeros")),
]


DRAFTED = [
    *((form, name) for form in ("Parquet", "CSV") for name in ("ids of double", "ids as text of floats")),
    ("Parquet", "dictionaries"), ("Parquet", "milliseconds"), ("JSON lines", "ISO 8601"),
]  # fmt: skip
"""Files that are drafted from, too, which takes longer."""


def cell(row_number: int, form: str, name: str) -> object:
    """A file of the zoo, nightly but for Parquet, those drafted from, and every third: of every form and every name."""
    daily = form == "Parquet" or (form, name) in DRAFTED or row_number % 3 == 0
    return pytest.param(form, name, marks=() if daily else pytest.mark.nightly)


def collect_pairs(dataset: Dataset) -> Pairs:
    queries, labels = dataset.query_ids.to_pylist(), dataset.label_ids.to_pylist()
    assert dataset.report.unit is not None
    triples: Pairs = set()
    for pairs in (dataset.train, dataset.valid, dataset.test):
        assert pairs.times is not None
        rows = zip(pairs.queries, pairs.labels, pairs.times / UNITS[dataset.report.unit] // 1, strict=True)
        triples |= {(queries[query], labels[label], float(time)) for query, label, time in rows}
    return triples


@pytest.mark.parametrize(
    ("form", "name"), [cell(row_number, *cell_key) for row_number, cell_key in enumerate(dict.fromkeys(ZOO))]
)
def test_all_commands_read_equal_pairs(tmp_path: Path, form: str, name: str) -> None:
    animal = TYPED[name]
    path = write_parquet(animal, tmp_path)
    if form != "Parquet":
        file, content = TEXTS[form]
        path = tmp_path / file
        path.write_bytes(content(animal))
    expected = {
        (animal.id(user), animal.id(item), float(second))
        for user, item, second in zip(USERS, ITEMS, SECONDS, strict=True)
    }

    data = {"train": path, "query_id": "user_id", "label_id": "item_id", "timestamp": "time"}
    dataset = load_dataset(DataConfig.model_validate(data), seed=0)
    assert collect_pairs(dataset) == expected, "training"

    read = read_pairs(path, LogColumns(query_id="user_id", label_id="item_id"), lambda _: None)
    triples = zip(read["id"].to_pylist(), read["label"].to_pylist(), read["time"].to_pylist(), strict=True)
    assert {(user, item, second // 1) for user, item, second in triples} == expected, "a refresh"

    if (form, name) in DRAFTED:
        roles = draft_recipe(path, tmp_path / "drafted.toml")
        assert (roles.query_id, roles.label_id, roles.timestamp) == ("user_id", "item_id", "time")
        drafted = read_dataset(load_recipe(tmp_path / "drafted.toml", ["data.repeats=keep"]))
        assert collect_pairs(drafted) == expected, "init"

    lists = read_lists(path, ListColumns("user_id", "item_id"), ROWS)
    query_rows = match_ids(lists.queries, dataset.query_ids, "queries", "lists")
    label_rows = match_ids(lists.labels, dataset.label_ids, "labels", "lists")
    assert (query_rows >= 0).all(), "lists of an audit"
    assert (label_rows >= 0).all(), "lists of an audit"

    query = f"SELECT item_id, count(*) AS count FROM '{path}' GROUP BY item_id ORDER BY min({{}})".format("time")
    vectors = np.eye(len(set(ITEMS)), 4, dtype=np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    bundle = VectorFiles(query, tmp_path / "vectors.npy", id="item_id").read("given", lambda _: None)
    assert {*bundle.labels.ids.to_pylist()} == {item for _, item, _ in expected}, "from-vectors"


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_all_commands_agree_about_missing_ids(tmp_path: Path, kind: str) -> None:
    users: list[float | None] = [float(user) for user in USERS]
    users[3], users[7] = None, float("nan")
    animal = Animal(pa.array(users), ITEMS, SECONDS)
    path = write_parquet(animal, tmp_path)
    if kind != "parquet":
        path = tmp_path / f"b.{kind}"
        text = format_text(animal).replace("None", "").replace("nan", "") if kind == "csv" else format_lines(animal)
        path.write_text(text.replace("NaN", "null"))
    data = {
        "train": path, "query_id": "user_id", "label_id": "item_id", "timestamp": "time", "max_bad_rows": 2,
    }  # fmt: skip
    expected = {
        (str(user), str(item), float(second))
        for row, (user, item, second) in enumerate(zip(USERS, ITEMS, SECONDS, strict=True))
        if row not in (3, 7)
    }

    assert collect_pairs(load_dataset(DataConfig.model_validate(data), seed=0)) == expected
    read = read_pairs(path, LogColumns(query_id="user_id", label_id="item_id"), lambda _: None)
    triples = zip(read["id"].to_pylist(), read["label"].to_pylist(), read["time"].to_pylist(), strict=True)
    assert {*triples} == expected


def test_all_commands_find_units_of_time_by_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    days = [date(2026, 2, 1)] * ROWS
    for name, times in {"a": SECONDS, "b": [1000 * second for second in SECONDS], "c": MOMENTS, "d": days}.items():
        users = [f"{name}{user}" for user in USERS]
        pq.write_table(pa.table({"user_id": users, "item_id": ITEMS, "time": times}), log / f"{name}.parquet")
    (log / "e.csv").write_text("")
    (log / "_f.csv").write_text("user_id,item_id,time\nx,1,0\n")
    data = {"train": log, "query_id": "user_id", "label_id": "item_id", "timestamp": "time"}

    pairs = collect_pairs(load_dataset(DataConfig.model_validate(data), seed=0))
    messages: list[str] = []
    read = read_pairs(log, LogColumns(query_id="user_id", label_id="item_id"), messages.append)

    triples = zip(read["id"].to_pylist(), read["label"].to_pylist(), read["time"].to_pylist(), strict=True)
    assert {*triples} == pairs
    assert {time for user, _, time in pairs if user[0] == "a"} == {time for user, _, time in pairs if user[0] == "c"}
    assert messages == [f"pairs: without rows: {log}/e.csv"]


def test_all_commands_name_empty_files(tmp_path: Path) -> None:
    folder, messages = tmp_path / "a", list[str]()
    folder.mkdir()
    bundle = make_bundle(labels=20)
    ids = bundle.labels.ids
    table = {
        "label_id": ids,
        "query_id": ids,
        "count": [1] * 20,
        "vector": list(bundle.embeddings),
        "margin": [0.5] * 20,
    }
    pq.write_table(pa.table(table).drop_columns("query_id"), folder / "a.parquet")
    (folder / "b.csv").write_text("")
    line = f"without rows: {folder}/b.csv"

    VectorFiles(folder).read("given", messages.append)
    PriorTable(folder, {"margin": Limits(-1, 1)}).read(bundle, progress=messages.append)
    assert [text for text in messages if "without rows" in text] == [f"labels: {line}", f"priors: {line}"]

    pq.write_table(pa.table(table).select(["label_id", "query_id"]), folder / "a.parquet")
    assert read_lists(folder, ListColumns("query_id", "label_id"), 5).empty_files == f"W{line[1:]}"
    (folder / "a.parquet").unlink()
    with pytest.raises(DataError, match=r"b\.csv: expected a header with the names of columns, found an empty file"):
        read_lists(folder, ListColumns("query_id", "label_id"), 5)


IDS = [list(dict.fromkeys(animal.id(value) for animal in TYPED.values() for value in of)) for of in (USERS, ITEMS)]
"""Users and items of all animals."""


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    """A release that knows the users and items of all animals."""
    folder, (users, items) = tmp_path_factory.mktemp("releases"), IDS
    bundle = make_bundle(labels=len(items), users=len(users))
    bundle = replace(bundle, labels=replace(bundle.labels, ids=pa.array(items)))
    bundle = replace(bundle, vocabularies={"users": Vocabulary(pa.array(users)), "items": Vocabulary(pa.array(items))})
    return open_releases(publish_bundle(bundle, folder, "all"))


@pytest.fixture(scope="module")
def retriever(releases: Releases) -> Retriever:
    return load_release(releases, "all")


def retrieve_answers(retriever: Retriever, animal: Animal) -> list[list[str]]:
    """Answers to each row's user with the row's item as history, and without that item."""
    queries = [
        RetrieveQuery(
            features={"user_id": animal.id(user), "history": [animal.id(item)]}, exclude=[animal.id(item)], k=5,
            bias_removal=0.0,
        )
        for user, item in zip(USERS, ITEMS, strict=True)
    ]  # fmt: skip
    return [[label["id"] for label in result["labels"]] for result in retriever.retrieve(queries).results]


@pytest.mark.parametrize("form", ["Parquet", "CSV", "JSON lines"])
def test_batch_reads_like_training(tmp_path: Path, retriever: Retriever, form: str) -> None:
    for name, animal in (TYPED if form == "Parquet" else OF_JSON).items():
        path = tmp_path / {"Parquet": "a.parquet", "CSV": "a.csv", "JSON lines": "a.jsonl"}[form]
        items = values(animal.items)
        lists: Any = [[item] for item in items]
        if isinstance(animal.items, pa.Array) and not pa.types.is_dictionary(animal.items.type):
            lists = pa.array(lists, pa.list_(animal.items.type))
        users = pa.array(animal.users) if isinstance(animal.users, list) else animal.users
        if form == "Parquet":
            pq.write_table(pa.table({"user_id": users, "history": lists, "without": lists}), path)
        else:
            rows = zip(values(users), [[item] for item in items], strict=True)
            if form == "CSV":
                text = [f'{user},"{str(history).replace(chr(34), chr(39))}","{history}"' for user, history in rows]
                path.write_text("\n".join(["user_id,history,without", *text]) + "\n")
            else:
                text = [json.dumps({"user_id": user, "history": history, "without": history}) for user, history in rows]
                path.write_text("\n".join(text) + "\n")
        options = TableOptions({"k": 5, "bias_removal": 0.0}, exclude="without", keep=[])
        triples = [
            [label["id"] for label in result["labels"]]
            for _, retrieval in iterate_answers(retriever, path, options, lambda _: None)
            for result in retrieval.results
        ]
        assert triples == retrieve_answers(retriever, animal), name


def posted(animal: Animal) -> Iterator[tuple[Any, Any]]:
    """Users and items of an animal as JSON has them."""
    for user, item, _ in cells(animal):
        yield json.loads(json.dumps([user, item], default=str))


@pytest.mark.process
def test_requests_and_feedback_are_read_like_training(tmp_path: Path, releases: Releases, retriever: Retriever) -> None:
    with (
        server(releases.root, tmp_path / "log", events=tmp_path / "events") as running,
        httpx.Client(base_url=running.url, timeout=30) as http,
    ):
        running.wait_until_ready(90)
        for name, animal in OF_JSON.items():
            queries = [
                {"features": {"user_id": user, "history": [item]}, "exclude": [item], "k": 5, "bias_removal": 0}
                for user, item in posted(animal)
            ]
            answer = http.post("/v1/retrieve", json={"queries": queries})
            assert answer.status_code == 200, f"{name}: {answer.text}"
            triples = [[label["id"] for label in result["labels"]] for result in answer.json()["results"]]
            assert triples == retrieve_answers(retriever, animal), name
            events = [
                {"features": {"user_id": user, "history": [item]}, "labels": [item], "event": name}
                for user, item in posted(animal)
            ]
            answer = http.post("/v1/feedback", json={"events": events})
            assert answer.status_code == 200, f"{name}: {answer.text}"

    window = (0.0, datetime.now(UTC).timestamp() + 60)
    export(releases.root, tmp_path / "events", tmp_path / "all.parquet", window=window)
    exported = pq.read_table(tmp_path / "all.parquet").rename_columns({"label_id": "item_id"})
    for name, animal in OF_JSON.items():
        rows = exported.filter(pc.equal(exported["event"], name))
        pq.write_table(rows.select(["user_id", "item_id", "time"]), tmp_path / "a.parquet")
        data = {"train": tmp_path / "a.parquet", "query_id": "user_id", "label_id": "item_id", "timestamp": "time"}
        pairs = collect_pairs(load_dataset(DataConfig.model_validate(data), seed=0))
        expected = {(animal.id(user), animal.id(item)) for user, item in zip(USERS, ITEMS, strict=True)}
        assert {(user, item) for user, item, _ in pairs} == expected, f"export of {name}"
        read = read_pairs(tmp_path / "a.parquet", LogColumns(query_id="user_id", label_id="item_id"), lambda _: None)
        triples = zip(read["id"].to_pylist(), read["label"].to_pylist(), strict=True)
        assert {*triples} == expected, f"a refresh by the export of {name}"
