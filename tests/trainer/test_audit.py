"""`longtail-audit`: figures are those of loops over lists, and of `fit` for the same lists; the gate has exit codes."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from longtail.bundle import BundleError
from longtail.bundle.promise import QualityPromise
from longtail.trainer.audit.cli import main
from longtail.trainer.audit.measure import Audit, AuditInputs, audit
from longtail.trainer.audit.promise import judge, read_promise
from longtail.trainer.audit.report import show, write as write_report
from longtail.trainer.errors import DataError, RecipeError, TrainerError
from tests.trainer.conftest import Finished

K, USERS, ITEMS = 5, 40, 30
HEAVY = ("tensorflow", "keras", "jax", "onnx", "onnxruntime", "tf2onnx", "tensorboard", "implicit", "xgboost",
         "sqlalchemy", "tomlkit", "faiss", "fastapi")  # fmt: skip


def write(folder: Path, tables: Mapping[str, Mapping[str, list[Any]]]) -> None:
    for name, columns in tables.items():
        pq.write_table(pa.table(dict(columns)), folder / f"{name}.parquet")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users with Zipf tastes; u36 … u39 are new, u39 has no list, and lists are of 7 entries with a score."""
    folder, rng = tmp_path_factory.mktemp("shop"), np.random.default_rng(5)
    popular = 1 / np.arange(1, ITEMS + 1)
    train, test, lists = [], [], []
    for user in range(USERS):
        items = rng.choice(ITEMS, 12, replace=False, p=popular / popular.sum())
        train += [(f"u{user}", f"i{item}") for item in items[:6]] if user < 36 else []
        test += [(f"u{user}", f"i{item}") for item in items[6:9]]
        listed = rng.permutation([*items[7:11], *rng.choice(np.setdiff1d(np.arange(ITEMS), items), 3, replace=False)])
        lists += [(f"u{user}", f"i{item}", float(score)) for item, score in zip(listed, rng.random(7), strict=True)]
    lists = [row for row in lists if row[0] != "u39"]
    names, users = ("user_id", "item_id", "score"), [f"u{user}" for user in range(USERS)]
    tables = {
        name: dict(zip(names, map(list, zip(*table, strict=True)), strict=False))
        for name, table in (("train", train), ("test", test), ("lists", lists))
    }
    write(folder, tables | {"users": {"user_id": users, "country": ["DE", "FR"] * (USERS // 2)}})
    return folder


def audit_lists(folder: Path, lists: str = "lists.parquet", **more: Any) -> Audit:
    options: dict[str, Any] = {"ks": (K,), "baselines": ()} | more
    source = lists if lists.startswith("SELECT") else folder / lists
    return audit(AuditInputs(source, [str(folder / "train.parquet")], [str(folder / "test.parquet")], **options))


def read_rows(path: Path) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in pq.read_table(path).to_pylist()]


def list_figures(result: Audit) -> dict[str, float]:
    return {name: figure.value for name, figure in result.metrics.items()}


def test_figures_equal_plain_loops(shop: Path) -> None:
    train, test = read_rows(shop / "train.parquet"), read_rows(shop / "test.parquet")
    counts = Counter(item for _, item in train)
    lower, upper = np.quantile([*counts.values()], [0.33, 0.66])
    catalogue = {item for _, item in train + test}
    lists: dict[str, list[str]] = {}
    for user, item, _ in sorted(read_rows(shop / "lists.parquet"), key=lambda row: -row[2]):
        lists.setdefault(user, []).append(item)
    catalogue |= {item for items in lists.values() for item in items[:K]}

    def bucket(item: str) -> str:
        count = counts[item]
        return "new" if not count else "head" if count > upper else "torso" if count > lower else "tail"

    result = audit_lists(shop, queries=[str(shop / "users.parquet")], groups=("country",))

    recalls, gains = {}, []
    for user in {user for user, _ in test}:
        held_out, top = {item for other, item in test if other == user}, lists.get(user, [])[:K]
        recalls[user] = len(held_out & {*top}) / len(held_out)
        ideal = sum(1 / math.log2(i + 2) for i in range(min(len(held_out), K)))
        gains.append(sum((item in held_out) / math.log2(i + 2) for i, item in enumerate(top)) / ideal)
    listed_counts = Counter(item for items in lists.values() for item in items[:K])
    expected = {f"recall@{K}": np.mean([*recalls.values()]), f"ndcg@{K}": np.mean(gains)}
    for name in ("head", "torso", "tail", "new"):
        bucket_pairs = [(user, item) for user, item in test if bucket(item) == name]
        hits = sum(item in lists.get(user, [])[:K] for user, item in bucket_pairs)
        expected[f"recall@{K}/{name}"] = hits / len(bucket_pairs) if bucket_pairs else 0
        expected[f"exposure@{K}/{name}"] = (
            sum(n for item, n in listed_counts.items() if bucket(item) == name) / listed_counts.total()
        )
        of_bucket = [item for item in catalogue if bucket(item) == name]
        expected[f"coverage@{K}/{name}"] = np.mean([item in listed_counts for item in of_bucket]) if of_bucket else 0
    exposures = np.array([listed_counts[item] for item in catalogue])
    differences = np.abs(exposures[:, None] - exposures).sum()
    expected[f"gini@{K}"] = differences / (2 * len(catalogue) * exposures.sum())
    assert {name: list_figures(result)[name] for name in expected} == pytest.approx(expected, abs=1e-9)

    groups = {group.name: group.metrics[f"recall@{K}"] for group in result.groups}
    assert groups["history = new"].value == pytest.approx(np.mean([recalls[f"u{user}"] for user in range(36, 40)]))
    assert groups["country = DE"].value == pytest.approx(np.mean([recalls[f"u{user}"] for user in range(0, USERS, 2)]))
    for interval in groups.values():
        assert interval.low <= interval.value <= interval.high
    counts_by_name = {finding.name: (finding.count, finding.total) for finding in result.findings}
    assert counts_by_name["without_list"] == (1, USERS)
    assert "38 of 39 lists" not in " ".join(result.notes)
    assert f"39 of 39 lists are longer than {K} labels: the rest is left out" in result.notes


def test_all_list_formats_have_the_same_figures(shop: Path, tmp_path: Path) -> None:
    expected = list_figures(audit_lists(shop))
    table = pq.read_table(shop / "lists.parquet").sort_by([("user_id", "ascending"), ("score", "descending")])
    lists: dict[str, list[str]] = {}
    for user, item, _ in (tuple(row.values()) for row in table.to_pylist()):
        lists.setdefault(user, []).append(item)
    ranks = [rank for items in lists.values() for rank in range(1, len(items) + 1)]
    shuffled = np.random.default_rng(0).permutation(len(table))
    plain = table.drop_columns(["score"])
    pq.write_table(plain, tmp_path / "in_order.parquet")
    pq.write_table(plain.append_column("rank", pa.array(ranks)).take(shuffled), tmp_path / "ranked.parquet")
    pq.write_table(plain.append_column("place", pa.array(ranks)).take(shuffled), tmp_path / "placed.parquet")
    csv.write_csv(table.take(shuffled), tmp_path / "scored.csv")
    answers = {"user_id": [*lists], "labels": [*lists.values()], "scores": [[0.5] for _ in lists]}
    pq.write_table(pa.table(answers), tmp_path / "served.parquet")
    lines = [json.dumps({"user_id": user, "item_id": items}) for user, items in lists.items()]
    (tmp_path / "lists.jsonl").write_text("\n".join(lines))

    for name, more, order in (
        ("in_order.parquet", {}, "the order of the rows"),
        ("ranked.parquet", {}, "column 'rank'"),
        ("placed.parquet", {"rank": "place"}, "column 'place'"),
        ("scored.csv", {}, "column 'score'"),
        ("served.parquet", {}, "the lists in column 'labels'"),
        ("lists.jsonl", {}, "the lists in column 'item_id'"),
        (f"SELECT user_id, item_id, -score AS loss FROM '{tmp_path}/scored.csv'", {"rank": "loss"}, "column 'loss'"),
    ):
        result = audit_lists(shop, name if " " in name else str(tmp_path / name), **more)
        assert f"Lists are ordered by {order}" in result.notes, name
        assert list_figures(result) == pytest.approx(expected), name


def test_figures_equal_the_report_of_fit(finished: Finished, tmp_path: Path) -> None:
    """The lists of the job's model at its default dial, with what it was trained on and its test pairs as files."""
    from longtail.trainer.evaluation.dial import Setting
    from longtail.trainer.evaluation.ranking import rank
    from longtail.trainer.evaluation.task import Task

    trained, figures = finished.trained, json.loads((finished.out / "metrics.json").read_text())
    dataset, config = trained.dataset, trained.recipe.evaluation
    held_out, past = dataset.with_past(dataset.test, dataset.pairs_before("test"))
    task = Task.create(held_out, past, config, labels=len(dataset.label_ids), seed=0)
    model = trained.ranked_model(past)
    (top_NK,), _ = rank(task.rows_N, model, task.excluded, [Setting(figures["default"])], k=task.k)
    query_ids, label_ids = dataset.query_ids.to_pylist(), dataset.label_ids.to_pylist()

    def ids(pairs: Any) -> dict[str, list[Any]]:
        return {
            "user_id": [query_ids[row] for row in pairs.queries], "item_id": [label_ids[row] for row in pairs.labels],
            "at": pairs.times.tolist(),
        }  # fmt: skip

    lists = {"user_id": [query_ids[row] for row in task.rows_N],
             "item_id": [[label_ids[label] for label in top] for top in top_NK.tolist()]}  # fmt: skip
    splits = {name: ids(getattr(dataset, name)) for name in ("train", "valid", "test")}
    write(tmp_path, splits | {"lists": lists, "items": {"item_id": label_ids}})

    result = audit_lists(
        tmp_path, ks=(5, 3), labels=[str(tmp_path / "items.parquet")], baselines=("item-kNN",),
        valid=[str(tmp_path / "valid.parquet")], timestamp="at",
    )  # fmt: skip

    (default,) = [point for point in figures["curve"] if point["bias_removal"] == figures["default"]]
    expected = {name: figure["value"] for name, figure in default["metrics"].items()}
    assert len(expected) == len(list_figures(result)) > 40
    assert {name: list_figures(result)[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert result.compared.settings["item-kNN"] == figures["baseline_settings"]["item-kNN"]
    theirs = figures["baselines"]["item-kNN"]["recall@5"]["value"]
    assert result.compared.differences["item-kNN"]["recall@5"].value == pytest.approx(
        expected["recall@5"] - theirs, abs=1e-6
    )
    groups = {group.value: group.metrics["recall@5"].value for group in result.groups}
    assert groups == pytest.approx(
        {name: group["metrics"]["recall@5"]["value"] for name, group in figures["groups"]["history"].items()}
    )


LEAKY = {
    "train": {"user_id": ["a", "a", "b", "c"], "item_id": ["x", "y", "x", "z"], "at": [10, 30, 20, 40]},
    "test": {"user_id": ["a", "a", "b", "c", "d"], "item_id": ["y", "z", "y", "x", "x"], "at": [50, 25, 15, 60, 70]},
    "lists": {
        "user_id": ["a", "a", "a", "b", "b", "d", "e"], "item_id": ["y", "z", "z", "ghost", "y", "x", "x"],
    },
}  # fmt: skip


def test_leaks_and_gaps_are_counted(tmp_path: Path) -> None:
    """a lists y, which it has in train, and z twice; b lists what nothing names; c has no list, e no test pair."""
    write(tmp_path, LEAKY)

    result = audit_lists(tmp_path, ks=(3,), timestamp="at")

    assert {finding.name: (finding.count, finding.total) for finding in result.findings} == {
        "seen_listed": (1, 6), "seen_test": (1, 5), "repeated": (1, 6), "unnamed": (1, 6), "without_list": (1, 4),
        "short": (2, 4), "before_train_ends": (2, 5), "before_own_train": (2, 5),
    }  # fmt: skip
    assert result.metrics["recall@3"].value == pytest.approx((1 + 1 + 0 + 1) / 4)
    assert result.metrics["precision@3"].value == pytest.approx((1 + 1 + 0 + 1) / 3 / 4)
    assert result.metrics["exposure@3/new"].value == pytest.approx(1 / 5), "the repeated entry is none"
    assert (result.labels, result.pairs) == (4, 4)
    assert any(note.startswith("1 of 4 lists are of queries without a test pair") for note in result.notes)


def test_histories_without_valid_are_read(tmp_path: Path) -> None:
    write(tmp_path, LEAKY)

    timed, untimed = (audit_lists(tmp_path, ks=(3,), baselines=("item-kNN",), timestamp=at) for at in ("at", None))

    settings = {"neighbours": 200, "shrink": 1, "last": 0, "decay": 1}
    assert timed.compared.settings == untimed.compared.settings == {"item-kNN": settings}
    note = "item-kNN was not tuned, for want of validation data: it reads all pairs of a history alike."
    assert note in timed.compared.notes
    assert note not in untimed.compared.notes, "without times, all pairs count alike in any case"


def test_notes_and_findings_name_options(tmp_path: Path) -> None:
    tables = {"items": {"item_id": ["x", "y"]}, "users": {"user_id": ["a"]}}
    write(tmp_path, LEAKY | tables)
    sources = {side: [str(tmp_path / f"{name}.parquet")] for side, name in (("queries", "users"), ("labels", "items"))}

    with_tables, without_tables = audit_lists(tmp_path, ks=(3,), **sources), audit_lists(tmp_path, ks=(3,))

    notes = " ".join(with_tables.notes)
    assert "Without a row in --queries: 3 of the 4 queries in interactions" in notes
    assert "Without a row in --labels: 1 of the 3 labels in interactions" in notes
    assert "data." not in notes
    texts = [
        {finding.name: str(finding) for finding in result.findings}["unnamed"]
        for result in (with_tables, without_tables)
    ]
    assert texts == [
        "unnamed: 1 of 6 (16.7%) entries are labels that no interaction, nor --labels, names",
        "unnamed: 1 of 6 (16.7%) entries are labels that no interaction names",
    ]


def test_pairs_already_in_training_need_exclude_seen_false(tmp_path: Path) -> None:
    write(tmp_path, LEAKY | {"test": {"user_id": ["a", "b"], "item_id": ["y", "x"]}})
    with pytest.raises(DataError) as error:
        audit_lists(tmp_path, ks=(3,))
    assert str(error.value) == (
        "--test: expected pairs that are not in train or valid too, found 2 that all are; use --set "
        "evaluation.exclude_seen=false where a query may find a label again"
    )
    assert audit_lists(tmp_path, ks=(3,), exclude_seen=False).pairs == 2


def test_skipped_baselines_are_explained(shop: Path, tmp_path: Path) -> None:
    result, screen = audit_lists(shop, baselines=("recent popularity",)), io.StringIO()
    show(result, [], Console(file=screen, width=120))
    write_report(result, [], tmp_path / "out")

    reason = "recent popularity was left out: the pairs have no times."
    assert result.compared is None
    for text in (
        screen.getvalue(), (tmp_path / "out" / "report.html").read_text(),
        (tmp_path / "out" / "metrics.json").read_text(),
    ):  # fmt: skip
        assert text.count(reason) == 1
    for baselines in (("recent popularity",), ("recent popularity", "popularity")):
        promise = QualityPromise(over={"recent popularity": {f"recall@{K}": 0}})
        with pytest.raises(BundleError) as error:
            judge(promise, audit_lists(shop, baselines=baselines))
        assert str(error.value) == f"promise: over: 'recent popularity' is not allowed because {reason}"


def test_exclude_seen_false_allows_seen_labels(tmp_path: Path) -> None:
    write(tmp_path, LEAKY)

    result = audit_lists(tmp_path, ks=(3,), exclude_seen=False)

    assert result.metrics["recall@3"].value == pytest.approx((2 / 2 + 1 + 0 + 1) / 4)
    assert "(allowed by evaluation.exclude_seen=false)" in str(result.findings[0])


@pytest.mark.parametrize(
    ("lists", "more", "message"),
    [
        ({"user_id": ["a", None], "item_id": ["x", "y"]}, {}, "lists.parquet: row 1: expected an id of a query"),
        ({"user_id": ["a", "a"], "item_id": ["x", None]}, {}, "row 1: expected an id of a query and of a label, found"),
        ({"user_id": ["a", "b", "a"], "item_id": [["x"]] * 3}, {}, "row 2: expected one list of each query, found a s"),
        ({"user_id": ["a"], "item_id": [["x", None]]}, {}, "row 0: expected lists of ids, found null in one"),
        ({"user_id": ["a"], "item_id": ["x"], "score": [math.nan]}, {}, "expected a finite number in column 'score'"),
        ({"user_id": ["a"], "item_id": ["x"], "rank": ["1st"]}, {}, "expected a finite number in column 'rank'"),
        ({"user_id": ["a"], "item_id": [["x"]]}, {"score": "s"}, "expected a label in each row with 's', found"),
        ({"user_id": ["a"], "item_id": [1.5]}, {}, "column 'item_id': expected ids as strings or integers"),
        ({"user": ["a"], "item_id": ["x"]}, {}, "found user, item_id: --set data.query_id=COLUMN names another"),
        ({"user_id": ["A "], "item_id": ["x"]}, {}, "expected queries of the interactions, found none, such as 'A '"),
        ({"user_id": ["a"], "item_id": ["9"]}, {}, "expected labels of the interactions, found none, such as '9', whe"),
        ({"user_id": ["a"], "item_id": [[]]}, {}, "expected lists of labels, found none"),
        ({"user_id": ["a"], "item_id": ["x"]}, {"ks": (9,)}, "--k 9 is not allowed because the catalogue has 3 labels"),
        ({"user_id": ["a"], "item_id": ["x"]}, {"rank": "r", "score": "s"}, "rank and score are not allowed toget"),
        ({"user_id": ["a"], "item_id": ["x"]}, {"groups": ("country",)}, "--group country is not allowed without"),
        ({"user_id": ["a"], "item_id": ["x"]}, {"baselines": ("SVD",)}, "baselines.0: expected 'popularity'"),
        ({"user_id": ["a"], "item_id": ["x"]}, {"buckets": "thirds"}, "--set evaluation.buckets: expected 'quantile'"),
    ],
)  # fmt: skip
def test_invalid_tables_and_options_are_refused(
    lists: dict[str, list[Any]], more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    kinds = {name: pa.list_(pa.string()) if column == [[]] else None for name, column in lists.items()}
    columns = {name: pa.array(column, kinds[name]) for name, column in lists.items()}
    write(tmp_path, LEAKY | {"lists": columns})
    with pytest.raises((DataError, TrainerError)) as error:
        audit_lists(tmp_path, **({"ks": (3,)} | more))
    assert message in str(error.value)


PROMISES = {
    'floors = { tail = 0.0, "ndcg@5" = 0.01 }': ["kept", "kept"],
    '[ceilings]\n"gini@5" = 0.01\n"exposure@5/head" = 1.0': ["broken", "kept"],
    '[groups.country.DE.floors]\n"recall@5" = 0.9': ["broken"],
    '[groups.history.new.ceilings]\nhead = 1.0': ["kept"],
    '[over.popularity]\n"recall@5" = -1.0\n"recall@5/tail" = 1.5': ["kept", "broken"],
    "[findings]\nwithout_list = 1\nseen_listed = 0\nshort = 0": ["kept", "kept", "kept"],
    "[findings]\nwithout_list = 0": ["broken"],
    "[in_each_list.1]\nhead = 0.0\ntail = 1.01\n[in_each_list.6]\nhead = 0.01": ["kept", "broken", "broken"],
}  # fmt: skip
REFUSED = {
    '[floors]\n"recal@5" = 0.1': "promise: floors: 'recal@5' is not allowed because this audit has no such figure; use "
    "one that was measured, such as 'recall@5'",
    '[floors]\n"recall@20" = 0.1': "'recall@20' is not allowed because",
    '[groups.country.IT.floors]\n"recall@5" = 0.1': "groups: 'country = IT' is not allowed because this audit has",
    '[over.EASE]\n"recall@5" = 0': "over: 'EASE' is not allowed because",
    '[over.popularity]\n"gini@5" = 0': "over.popularity: 'gini@5' is not allowed because",
    "[findings]\nbefore_own_train = 0": "findings: 'before_own_train' is not allowed because this audit "
    "reads no times; use --set data.timestamp=COLUMN",
    "[findings]\nseen = 0": "findings: 'seen' is not allowed because this audit has no such figure; use one that was",
    "max_drop = 0.1": "'max_drop' is not allowed because an audit has no published release; use floors or over",
    "[in_each_list.1]\nrare = 1": "in_each_list.1: 'rare' is not allowed because",
    "[in_each_list.0]\ntail = 1": "in_each_list.0",
    "[floors]\ntail = 'high'": "floors.tail: expected a number",
    "[floors": "expected TOML",
}


@pytest.fixture(scope="module")
def compared(shop: Path) -> Audit:
    return audit_lists(shop, queries=[str(shop / "users.parquet")], groups=("country",), baselines=("popularity",))


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_is_kept_or_broken_by_values(promise: str, compared: Audit, tmp_path: Path) -> None:
    (tmp_path / "promise.toml").write_text(promise)
    verdicts = judge(read_promise(tmp_path / "promise.toml"), compared)
    assert [str(verdict).split(":")[0].split(",")[0] for verdict in verdicts] == PROMISES[promise]
    assert [verdict.is_kept for verdict in verdicts] == [words == "kept" for words in PROMISES[promise]]


@pytest.mark.parametrize("promise", REFUSED)
def test_promise_without_a_figure_is_refused(promise: str, compared: Audit, tmp_path: Path) -> None:
    (tmp_path / "promise.toml").write_text(promise)
    with pytest.raises(BundleError) as error:
        judge(read_promise(tmp_path / "promise.toml"), compared)
    assert REFUSED[promise] in str(error.value)


def test_lists_with_labels_of_a_bucket_are_counted(compared: Audit, tmp_path: Path) -> None:
    entries = sum(int(of.sum()) for of in compared.listed.values())
    for bucket, listed in compared.listed.items():
        assert listed.sum() / entries == pytest.approx(compared.metrics[f"exposure@5/{bucket}"].value)
        assert len(listed) == compared.queries
    (tmp_path / "promise.toml").write_text("[in_each_list.2]\ntail = 0.5")
    (verdict,) = judge(read_promise(tmp_path / "promise.toml"), compared)
    assert verdict.figure.value == pytest.approx(
        sum(of >= 2 for of in compared.listed["tail"].tolist()) / compared.queries
    )
    assert 0 < verdict.figure.value < 1
    assert str(verdict).startswith(("kept", "broken"))
    assert ": in each list at least 2: tail 0." in str(verdict)


def test_floor_of_an_empty_bucket_is_refused_and_chance_is_reported(compared: Audit, tmp_path: Path) -> None:
    write(tmp_path, LEAKY)
    result = audit_lists(tmp_path, ks=(3,), baselines=("popularity",))
    for name, promise in {
        "floors: recall@3/new": QualityPromise(floors={"new": 0.1}),
        "ceilings: balanced_error@3/new": QualityPromise(ceilings={"balanced_error@3/new": 0.1}),
        "over.popularity: recall@3/new": QualityPromise(over={"popularity": {"recall@3/new": 0}}),
    }.items():
        with pytest.raises(BundleError, match=f"{name} is not allowed because no test pair is there to find"):
            judge(promise, result)
    assert judge(QualityPromise(over={"popularity": {"recall@3/head": -1}}), result)[0].is_kept
    value = compared.metrics["recall@5"]
    floors = {"recall@5": value.low + 0.9 * (value.value - value.low), "ndcg@5": 2}
    (near, far) = judge(QualityPromise(floors=floors), compared)
    assert (near.is_kept, near.by_chance, str(near)[:20]) == (True, True, "kept, within chance:")
    assert (far.is_kept, far.by_chance, str(far)[:7]) == (False, False, "broken:")


def test_arguments_are_refused_before_any_table_is_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        audit_lists(tmp_path, "missing.parquet", buckets="thirds")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "data.event=view",
            "--set: expected KEY=VALUE of data.query_id, data.label_id, data.timestamp, evaluation.bucke",
        ),
        ("evaluation.exclude_seen=no", "--set evaluation.exclude_seen: expected true or false, received 'no'"),
        ("evaluation.buckets=thirds", "--set evaluation.buckets: expected 'quantile' or 'count', received 'thirds'"),
    ],
)
def test_bad_settings_are_one_line(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    setting: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.argv", ["longtail-audit", *arguments(shop, tmp_path / "out", "--set", setting)])
    with pytest.raises(SystemExit, match="2"):
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"longtail-audit: {message}")
    assert not (tmp_path / "out").exists()


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    tables = {name: str(folder / f"{name}.parquet") for name in ("lists", "train", "test", "users")}
    options = [tables["lists"], "--train", tables["train"], "--test", tables["test"], "--k", "5", "--k", "3"]
    return [*options, "--queries", tables["users"], "--group", "country", "--out", str(out), *more]


@pytest.mark.process
def test_the_command_needs_no_training_framework(shop: Path, tmp_path: Path) -> None:
    (tmp_path / "promise.toml").write_text('[over.popularity]\n"recall@5" = -1\n')
    blocked = f"import sys; sys.modules.update(dict.fromkeys({HEAVY})); "
    program = f"{blocked}from longtail.commands import audit; audit()"
    words = arguments(shop, tmp_path / "out", "--promise", str(tmp_path / "promise.toml"))

    completed = subprocess.run([sys.executable, "-c", program, *words], cwd=shop, capture_output=True, text=True)

    assert completed.returncode == 0, completed.stderr
    assert "kept: over popularity: recall@5" in completed.stdout
    assert "without_list: 1 of 40 (2.5%)" in completed.stdout
    figures = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert figures["promise"][0]["kept"] is True
    assert figures["groups"]["country"]["DE"]["queries"] == USERS / 2
    assert {"recall@3", "recall@5/tail"} < figures["metrics"].keys()
    assert figures["against_baselines"].keys() == {"popularity", "item-kNN"}
    page = (tmp_path / "out" / "report.html").read_text()
    texts = ("country = DE", "By bucket of labels", "The recommender less each baseline", "without_list", "1 of 1 kept")
    assert [text for text in texts if text not in page] == []
    assert "<script" not in page


def test_exit_codes_say_whether_a_promise_is_broken_or_cannot_be_judged(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.toml").write_text("[findings]\nwithout_list = 0\n")
    (tmp_path / "unknown.toml").write_text('[floors]\n"recall@7" = 0\n')

    def exit_with(promise: str, out: str) -> object:
        more = ["--baseline", "none", "--promise", str(tmp_path / promise)]
        monkeypatch.setattr("sys.argv", ["longtail-audit", *arguments(shop, tmp_path / out, *more)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    assert exit_with("broken.toml", "out") == 1
    assert "broken: findings: without_list 1, promised <= 0" in capsys.readouterr().out
    assert (tmp_path / "out" / "report.html").is_file()
    for promise, out, message in (
        ("broken.toml", "out", "already exists"),
        ("unknown.toml", "other", "promise: floors: 'recall@7' is not allowed"),
    ):
        assert exit_with(promise, out) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("longtail-audit: ")
        assert message in line
    assert not (tmp_path / "other").exists()
