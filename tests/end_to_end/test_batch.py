"""`longtail-serve batch` answers as the service does, in shards or whole, killed or not."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Hide, Restore, Upsert, Vocabulary
from longtail.index import open_releases
from longtail.serving.batch import BatchError, TableOptions, answer
from longtail.serving.cli import main
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import RetrieveQuery
from longtail.state import LabelStore
from longtail.tables.features import as_known
from tests.bundles import make_bundle
from tests.end_to_end.commands import fitted_and_published, longtail, served
from tests.end_to_end.releases import publish_bundle
from tests.rounding import within_rounding

USERS, ITEMS = 60, 30
RECIPE = """
name = "shop"
[data]
train = "pairs.parquet"
query_id = "user_id"
label_id = "item_id"
queries = "users.parquet"
labels = "items.parquet"
display = ["brand"]
split = { strategy = "random", valid = 0.1, test = 0.1 }
[query]
features = [
    { name = "user_id", kind = "id", dim = 4 },
    { name = "joined", kind = "date", dim = 4 },
    { name = "likes", kind = "bag", dim = 4 },
    { name = "history", kind = "history", table = "item_id", dim = 4 },
]
[label]
features = [{ name = "item_id", kind = "id", dim = 4 }, { name = "brand", kind = "id", dim = 2 }]
[model]
dim = 4
[training]
epochs = 1
batch_size = 64
[evaluation]
ks = [5]
metric = "recall@5"
bootstrap = 10
baselines = []
bias_removal = [0, 1]
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published release, and queries in four files."""
    folder, rng = tmp_path_factory.mktemp("shop"), np.random.default_rng(0)
    pairs = {
        "user_id": [f"u{user}" for user in rng.integers(0, USERS, 600)],
        "item_id": [f"i{item}" for item in np.minimum(rng.geometric(0.1, 600), ITEMS) - 1],
    }
    users = {
        "user_id": [f"u{user}" for user in range(USERS)],
        "joined": pa.array([1_600_000_000 + 86_400 * user for user in range(USERS)], pa.timestamp("s", "UTC")),
        "likes": pa.array([[("music", 1.0), ("sport", user / 9)] for user in range(USERS)], LIKES),
    }
    items = {"item_id": [f"i{item}" for item in range(ITEMS)], "brand": [f"b{item % 4}" for item in range(ITEMS)]}
    for name, table in {"pairs": pairs, "users": users, "items": items}.items():
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
    (folder / "recipe.toml").write_text(RECIPE)
    fitted_and_published(folder, "--set", "training.refit=false")
    (folder / "queries").mkdir()
    queries = pa.table(
        users
        | {
            "history": [[f"i{item}" for item in rng.integers(0, ITEMS, user % 5)] for user in range(USERS)],
            "seen": [None if user % 7 == 0 else [f"i{user % ITEMS}", "i0", "of no release"] for user in range(USERS)],
            "segment": [user % 3 for user in range(USERS)],
        }
    )
    for name, start, end in (("a", 0, 10), ("b", 10, 20), ("c", 20, 25), ("d", 25, USERS)):
        pq.write_table(queries.slice(start, end - start), folder / "queries" / f"{name}.parquet")
    return folder


LIKES = pa.map_(pa.string(), pa.float64())
OPTIONS = {"k": 7, "bias_removal": 0.25, "filter": {"brand": {"ne": "b1"}}}
FILES = [f"part-{number:06}.parquet" for number in range(4)]


def answers(out: Path) -> pa.Table:
    """The folder as a table, as anybody reads it."""
    return pq.read_table(out)


def command(shop: Path, out: Path, *more: object) -> list[str]:
    words = ["batch", shop / "releases", shop / "queries", "--out", out]
    words += [word for key, value in OPTIONS.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    return [*map(str, words), "--exclude", "seen", *map(str, more)]


def build_query(row: dict[str, Any]) -> dict[str, Any]:
    """A row as a client would ask for it."""
    features = {name: row[name] for name in ("user_id", "history")}
    features |= {"joined": row["joined"].isoformat(), "likes": dict(row["likes"])}
    return OPTIONS | {"features": features, "exclude": row["seen"] or []}


def test_batch_answers_equal_the_service(shop: Path, tmp_path: Path) -> None:
    rows = pa.concat_tables([pq.read_table(shop / "queries" / f"{name}.parquet") for name in "abcd"])
    with served(shop) as http:
        added = http.post("/v1/labels", json={"labels": [{"id": "new", "features": {"brand": "b2"}}]})
        assert added.status_code == 200, added.text
        assert http.delete("/v1/labels/i2").status_code == 200
        results = http.post("/v1/retrieve", json={"queries": [build_query(row) for row in rows.to_pylist()]}).json()[
            "results"
        ]
        assert longtail("serving", *command(shop, tmp_path / "out")).strip() == str(tmp_path / "out")
    table = answers(tmp_path / "out")
    assert table["labels"].to_pylist() == [[label["id"] for label in result["labels"]] for result in results]
    scores = [[label["score"] for label in result["labels"]] for result in results]
    np.testing.assert_allclose(np.array(table["scores"].to_pylist()), scores, atol=1e-5)
    assert table.column_names == ["user_id", "joined", "segment", "labels", "scores"]
    assert table.select(["user_id", "segment"]).equals(rows.select(["user_id", "segment"]))
    everything = {label for labels in table["labels"].to_pylist() for label in labels}
    assert "new" in everything
    assert "i2" not in everything
    names = [path.name for path in sorted((tmp_path / "out").iterdir())]
    assert names == ["_batch.json", "_begun.txt", "_labels.jsonl", *FILES]


def test_shards_join_to_the_full_answer_after_a_kill(shop: Path, tmp_path: Path) -> None:
    longtail("serving", *command(shop, tmp_path / "whole"))
    at_once = answers(tmp_path / "whole")

    out = tmp_path / "out"
    longtail("serving", *command(shop, out, "--shard", "1/2"))
    assert [path.name for path in sorted(out.glob("part-*"))] == FILES[1::2]
    before = {path: path.stat().st_mtime_ns for path in out.glob("part-*")}
    process = subprocess.Popen([sys.executable, "-m", "longtail.serving", *command(shop, out)])
    deadline = time.monotonic() + 60
    while len(list(out.glob("part-*"))) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list(out.glob("part-*"))) >= 3
    longtail("serving", *command(shop, out))
    assert answers(out).equals(at_once)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_shards_use_the_label_changes_of_the_first(shop: Path, tmp_path: Path) -> None:
    """They all answer with the labels that the first one found, also where the store has forgotten older changes."""
    state, table_options = tmp_path / "state", TableOptions({"k": ITEMS})
    state.mkdir()
    store = LabelStore(state)
    added = Upsert(id="new", at=datetime.now(UTC), features={"brand": "b2"})
    store.append([added, Hide(id="i1", at=datetime.now(UTC))])

    def join_shares(out: Path, *shares: tuple[int, int]) -> pa.Table:
        for share in shares:
            answer(shop / "releases", shop / "queries", out, table_options, state=state, share=share)
        return answers(out)

    expected = join_shares(tmp_path / "whole", (0, 1))
    answer(shop / "releases", shop / "queries", tmp_path / "out", table_options, state=state, share=(0, 2))
    now = datetime.now(UTC)
    store.append([Hide(id="new", at=now), Restore(id="i1", at=now), *(Hide(id=f"i{row}", at=now) for row in range(9))])
    store.compact()
    store.close()
    assert join_shares(tmp_path / "out", (1, 2)).equals(expected)
    assert not join_shares(tmp_path / "later", (0, 1)).equals(expected)
    shutil.rmtree(state)
    for path in (tmp_path / "out").glob("part-*"):
        path.unlink()
    assert join_shares(tmp_path / "out", (0, 1)).equals(expected)


def test_output_of_another_batch_is_refused(shop: Path, tmp_path: Path) -> None:
    table_options = TableOptions({"k": 3})
    answer(shop / "releases", shop / "queries", tmp_path, table_options)
    messages: list[str] = []
    answer(shop / "releases", shop / "queries", tmp_path, table_options, say=messages.append)
    assert messages == ["4 of 4 files are there"]
    with pytest.raises(BatchError, match=r'_batch\.json: expected a batch of options {"k": 4}, found {"k": 3}: give'):
        answer(shop / "releases", shop / "queries", tmp_path, TableOptions({"k": 4}))


def test_popularity_answers_and_unmet_floors_are_reported(shop: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"user_id": ["u1", "nobody", "u2"]}), tmp_path / "users.parquet")
    floor, messages = {"filter": {"brand": "no such brand"}, "n": 1}, list[str]()
    options = TableOptions({"k": 3, "at_least": [floor]})
    answer(shop / "releases", tmp_path / "users.parquet", tmp_path / "out", options, say=messages.append)
    assert "3 queries; answered by popularity alone: 1; floors not met: 3, " in messages[-1]


WRONG = {
    "a row": (TableOptions({}), {"user_id": ["u1", "u2"], "history": [["i1"], [None]]}, "row 1: features.hist"),
    "exclude": (TableOptions({}, "seen"), {"user_id": ["u1"], "seen": [[1.5]]}, "row 0: exclude.0: expected an id"),
    "no feature": (
        TableOptions({}),
        {"user": ["u1"]},
        "expected columns of the features user_id, joined, likes, history, fo",
    ),
    "no column": (TableOptions({}, "seen"), {"user_id": ["u1"]}, "expected a column 'seen', found user_id"),
    "a name": (TableOptions({}), {"user_id": ["u1"], "scores": [1]}, "column 'scores': expected other names"),
    "an option": (TableOptions({"k": 0}), {"user_id": ["u1"]}, "--set: k: expected at least 1"),
    "a feature": (
        TableOptions({"vector": [1]}),
        {"user_id": ["u1"]},
        "--set: expected options of all queries alike, rece",
    ),
    "a filter": (TableOptions({"filter": {"colour": 1}}), {"user_id": ["u1"]}, "--set: filter.colour: "),
    "exclude of text": (
        TableOptions({}, "seen"),
        {"user_id": ["u1"], "seen": ["i1"]},
        "'seen': expected lists of label ids",
    ),
    "no rows": (TableOptions({}), {"user_id": pa.array([], pa.string())}, "expected a table with rows, found none"),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_name_column_and_row(shop: Path, tmp_path: Path, what: str) -> None:
    table_options, columns, messages = WRONG[what]
    pq.write_table(pa.table(columns), tmp_path / "queries.parquet")
    with pytest.raises(BatchError, match=messages):
        answer(shop / "releases", tmp_path / "queries.parquet", tmp_path / "out", table_options)
    assert not list((tmp_path / "out").glob("*part-*"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("k", "--set: expected KEY=VALUE, received 'k'"),
        (
            'filter={"brand":',
            """--set filter: expected JSON, received '{"brand":': Expecting value: line 1 column 10""",
        ),
        ("at_least=[1", "--set at_least: expected JSON, received '[1': Expecting ',' delimiter"),
        ('by="choices', "--set by: expected JSON, received '\"choices': Unterminated string"),
    ],
)
@pytest.mark.parametrize("name", ["batch", "invert"])
def test_bad_settings_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, setting: str, message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([name, str(tmp_path), "rows.parquet", "--out", str(tmp_path / "out.csv"), "--set", setting])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"longtail-serve: {message}")


def test_errors_suggest_the_meant_option(shop: Path) -> None:
    queries, out = shop / "queries", shop / "queries" / "answers"
    with pytest.raises(BatchError, match="--set: kk: "):
        answer(shop / "releases", queries, out, TableOptions({"kk": 3}))
    with pytest.raises(BatchError, match="expected a column 'nothing'"):
        answer(shop / "releases", queries, out, TableOptions({}, "nothing"))
    (queries / "_temporary").mkdir()
    (queries / "_temporary" / "half.parquet").write_bytes(b"PAR1")
    for _ in range(2):  # answers below the queries are no queries
        answer(shop / "releases", queries, out, TableOptions({"exclude_history": False}))
    assert [len(labels) for labels in answers(out)["labels"].to_pylist()] == [ITEMS] * USERS
    shutil.rmtree(out)
    shutil.rmtree(queries / "_temporary")


def test_missing_release_and_bad_parquet_are_refused(shop: Path, tmp_path: Path) -> None:
    (tmp_path / "queries.parquet").write_text("user_id\nu1\n")
    with pytest.raises(BatchError, match="expected a published release, found none; use the path of one"):
        answer(tmp_path / "releases", tmp_path / "queries.parquet", tmp_path / "out", TableOptions({}))
    with pytest.raises(BatchError, match=r"queries\.parquet: expected a readable parquet file"):
        answer(shop / "releases", tmp_path / "queries.parquet", tmp_path / "out", TableOptions({}))


def test_training_table_is_read_as_in_training(tmp_path: Path) -> None:
    """Booleans, decimals, joined text, whole floats, categories and times as text are read as `fit` reads them."""
    rng = np.random.default_rng(0)
    pairs = {"user_id": rng.integers(0, USERS, 600), "item_id": rng.integers(0, ITEMS, 600)}
    rates = [None if user == 3 else Decimal(user % 3) / 2 for user in range(USERS)]
    users = {
        "user_id": pa.array([float(user) for user in range(USERS)]),
        "premium": [None if user == 5 else user % 2 == 0 for user in range(USERS)],
        "rate": pa.array(rates, pa.decimal128(9, 2)),
        "score": pa.array([user / 7 for user in range(USERS)], pa.float32()),
        "likes": [["music , sport", "sport,", None, "['music', 'art']"][user % 4] for user in range(USERS)],
        "segment": pa.array(["a" if user % 3 else "b" for user in range(USERS)]).dictionary_encode(),
        "joined": [f"2026-01-{1 + user % 28:02} 01:03:49.1234567+00" for user in range(USERS)],
    }
    kinds = {"user_id": "id", "premium": "id", "rate": "id", "score": "number", "likes": "bag", "segment": "id"}
    features = [
        f'{{ name = "{name}", kind = "{kind}", dim = 4 }}' for name, kind in (kinds | {"joined": "date"}).items()
    ]
    features.append('{ name = "paid", column = "rate", kind = "number" }')
    text = RECIPE.replace('labels = "items.parquet"\ndisplay = ["brand"]\n', "")
    text = text[: text.index("features = [")] + f"features = [{', '.join(features)}]\n" + text[text.index("[label]") :]
    text = text.replace(', { name = "brand", kind = "id", dim = 2 }', "")
    text = text.replace('name = "likes", kind = "bag"', 'name = "likes", kind = "bag", separator = ","')
    pq.write_table(pa.table(pairs), tmp_path / "pairs.parquet")
    pq.write_table(pa.table(users), tmp_path / "users.parquet")
    (tmp_path / "recipe.toml").write_text(text)
    fitted_and_published(tmp_path, "--set", "training.refit=false")
    pq.write_table(pa.table(users | {"paid": users["rate"]}), tmp_path / "asked.parquet")
    answer(tmp_path / "releases", tmp_path / "asked.parquet", tmp_path / "out", TableOptions({"k": 5}))
    with served(tmp_path) as client:
        answered = answers(tmp_path / "out").to_pylist()
        for user in range(0, USERS, 7):
            features = {
                "user_id": user,
                "premium": users["premium"][user],
                "rate": None if user == 3 else str(float(user % 3) / 2).removesuffix(".0"),
                "paid": None if user == 3 else user % 3 / 2,
                "score": user / 7,
                "likes": [["music", "sport"], ["sport"], None, ["music", "art"]][user % 4],
                "segment": "a" if user % 3 else "b",
                "joined": f"2026-01-{1 + user % 28:02}T01:03:49Z",
            }
            queries = {"queries": [{"k": 5, "features": features}]}
            expected = client.post("/v1/retrieve", json=queries).json()["results"][0]["labels"]
            assert answered[user]["labels"] == [label["id"] for label in expected]
            assert answered[user]["scores"] == within_rounding([label["score"] for label in expected])
    rows = pa.table(users | {"paid": users["rate"]}).to_pylist()
    for row in rows:
        row["premium"] = None if row["premium"] is None else str(row["premium"])
        row["rate"] = row["paid"] = "n/a" if row["rate"] is None else str(row["rate"])
    (tmp_path / "asked.csv.gz").write_bytes(gzip.compress(joined_by(";", rows).encode("utf-8-sig")))
    (tmp_path / "asked.tsv").write_text(joined_by("\t", rows))
    for name in ("asked.csv.gz", "asked.tsv"):
        answer(tmp_path / "releases", tmp_path / name, tmp_path / name[6:], TableOptions({"k": 5}))
        assert answers(tmp_path / name[6:]).select(["labels", "scores"]).to_pylist() == [
            {name: row[name] for name in ("labels", "scores")} for row in answered
        ], name


def joined_by(delimiter: str, rows: list[dict[str, Any]]) -> str:
    """Write rows as text."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*rows[0]], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def test_all_table_formats_get_equal_answers(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists and excluded labels as text, maps of JSON, folders, URLs; in files of a few rows, whatever the table is."""
    monkeypatch.setattr("longtail.serving.batch.ROWS", 7)
    keep, table_options = ["user_id", "segment"], TableOptions(OPTIONS, "seen", ["user_id", "segment"])
    table = pa.concat_tables([pq.read_table(file) for file in sorted((shop / "queries").iterdir())])
    rows = [row | {"joined": row["joined"].isoformat(), "likes": dict(row["likes"])} for row in table.to_pylist()]
    (tmp_path / "queries.ndjson").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(table, tmp_path / "likes.parquet", row_group_size=9)
    answer(shop / "releases", tmp_path / "likes.parquet", tmp_path / "0", table_options)
    assert [file.name for file in sorted((tmp_path / "0").glob("p*"))] == [f"part-{at:06}.parquet" for at in range(9)]
    assert [pq.read_metadata(file).num_rows for file in sorted((tmp_path / "0").glob("p*"))] == [7] * 8 + [4]
    answer(shop / "releases", tmp_path / "queries.ndjson", tmp_path / "1", table_options)
    assert answers(tmp_path / "1").to_pylist() == answers(tmp_path / "0").to_pylist()
    without = table.drop_columns(["likes"])
    pq.write_table(without, tmp_path / "p.parquet", row_group_size=9)
    for segment in range(3):
        (tmp_path / "hive" / f"segment={segment}").mkdir(parents=True)
    texts = [{name: value for name, value in row.items() if name not in ("likes", "segment")} for row in rows]
    for segment in range(3):
        (tmp_path / "hive" / f"segment={segment}" / "x.csv").write_text(joined_by(",", texts[segment * 20 :][:20]))
    (tmp_path / "t.csv").write_text(joined_by(",", [row | {"segment": i // 20} for i, row in enumerate(texts)]))
    messages: list[str] = []
    answer(shop / "releases", tmp_path / "p.parquet", tmp_path / "p", table_options, say=messages.append)
    expected = answers(tmp_path / "p").select(["user_id", "labels", "scores"])
    assert messages[0].endswith("p.parquet: no column 'likes': queries are answered as without these features")
    answer(shop / "releases", f"file://{tmp_path}/p.parquet", tmp_path / "url", table_options)
    assert answers(tmp_path / "url").equals(answers(tmp_path / "p"))
    for number, source in enumerate(
        [tmp_path / "t.csv", tmp_path / "hive", f"file://{tmp_path}/t.c*", tmp_path / "t*.csv"]
    ):
        out = tmp_path / f"t{number}"
        for share in (1, 0):
            answer(shop / "releases", source, out, table_options, share=(share, 2))
        assert answers(out).column_names == [*keep, "labels", "scores"]
        answered = answers(out)
        assert answered.select(["user_id", "labels"]).equals(expected.select(["user_id", "labels"])), source
        scores = [pc.list_flatten(table["scores"]).to_numpy() for table in (answered, expected)]
        np.testing.assert_allclose(*scores, rtol=1e-5, atol=2e-6)  # other batches round otherwise
        assert answers(out)["segment"].to_pylist() == [i // 20 for i in range(USERS)]


def test_ids_of_text_files_match_as_text_or_number() -> None:
    vocabulary = Vocabulary(pa.array([" 7", "1.10", "9007199254740993", "0.5", "true"]))
    texts = [" 7", "1.10", "9007199254740993.0", "0.50", "True", None, "8.0"]
    values = [7.0, 1.1, 9007199254740992.0, 0.5, True, None, 8.0]
    assert as_known(texts, values, vocabulary) == [" 7", "1.10", "9007199254740993.0", 0.5, "True", None, 8.0]


BROKEN = {
    "a line": ({"a.csv": "user_id,joined\nu1,2026-01-01\nu2\n"}, r"a\.csv: line 3: expected 2 columns, found 1"),
    "a feature of some": (
        {"a.csv": "user_id,joined\nu1,\n", "b.csv": "user_id\nu2\n"},
        r"b\.csv: expected a column 'jo",
    ),
    "two types": (
        {"a.csv": "user_id,seen\nu1,[i1]\n"},
        r"a\.csv: row 0: column 'seen': expected lists of label ids, fo",
    ),
    "a value": (
        {"a.csv": 'user_id,joined\n"u\n1",\nu2,soon\n'},
        r"a\.csv: row 1: features\.joined: expected a date or",
    ),
    "a JSON line": (
        {"a.jsonl": '{"user_id": "u1"}\n{"user_id": u2}\n'},
        r"a\.jsonl: line 2: expected an object of JSON",
    ),
    "another code": ({"a.csv": "user_id\nµ\n".encode("latin-1")}, r"a\.csv: expected UTF-8 text, found other bytes"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_errors_name_line_of_broken_text_file(shop: Path, tmp_path: Path, what: str) -> None:
    files, messages = BROKEN[what]
    (tmp_path / "queries").mkdir()
    for name, text in files.items():
        (tmp_path / "queries" / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BatchError, match=messages):
        answer(
            shop / "releases",
            tmp_path / "queries",
            tmp_path / "out",
            TableOptions({}, "seen" if "two" in what else None),
        )
    assert not list((tmp_path / "out").glob("*part-*"))


def test_histories_come_from_a_column_or_the_release(tmp_path: Path) -> None:
    bundle = make_bundle(labels=60, cooccurrence=True)
    retriever = load_release(open_releases(publish_bundle(bundle, tmp_path)), "only")
    chosen = [["item-3", "item-9"], [], None, ["item-8", "of no release"]]
    rows = {"user_id": ["u3", "u4", "u5", "u6"], "chosen": chosen}
    pq.write_table(pa.table(rows), tmp_path / "queries.parquet")
    table_options = TableOptions({"k": 12, "cooccurrence": 1.5}, history="chosen")
    answer(tmp_path / "releases", tmp_path / "queries.parquet", tmp_path / "out", table_options)
    queries = [
        RetrieveQuery(features={"user_id": user}, history=history, k=12, cooccurrence=1.5)
        for user, history in zip(rows["user_id"], chosen, strict=True)
    ]
    expected = [[label["id"] for label in result["labels"]] for result in retriever.retrieve(queries).results]
    assert answers(tmp_path / "out")["labels"].to_pylist() == expected
    assert bundle.remembered is not None
    remembered = [f"item-{row}" for row in bundle.remembered.history("u5").tolist()]
    (by_column,) = retriever.retrieve([queries[2].model_copy(update={"history": remembered})]).results
    assert [label["id"] for label in by_column["labels"]] == expected[2]
    with pytest.raises(BatchError, match="--set: expected options of all queries alike, received history"):
        answer(
            tmp_path / "releases",
            tmp_path / "queries.parquet",
            tmp_path / "other",
            TableOptions({"history": ["item-1"]}),
        )
