"""Figures by group of queries are those of an evaluation of the group's queries alone."""

import json

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from longtail.bundle import Buckets
from longtail.trainer.data.dataset import Requests
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.groups import figures_by_group, list_records
from longtail.trainer.evaluation.metrics import LabelFacts
from longtail.trainer.evaluation.task import Task
from tests.trainer import tiny
from tests.trainer.conftest import Finished

L, K = 12, 3
COUNTRIES = ["DE", "FR", "DE", None, "FR", "DE"]
TRAIN = tiny.pairs((0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 3), (2, 4), (2, 5), (3, 1))
TEST = tiny.pairs((0, 3), (0, 6), (1, 1), (2, 7), (3, 0), (3, 9), (4, 0), (5, 2))
TOP = np.int32([[3, 4, 5], [2, 3, 4], [7, 8, 9], [0, 2, 9], [0, 1, 2], [0, 1, 3]])
DATA = tiny.dataset(TRAIN, queries=6, labels=L, test=TEST, query_table=pa.table({"country": COUNTRIES}))
CONFIG = tiny.recipe(evaluation={"ks": [K], "metric": f"recall@{K}"}).evaluation
PAST = Past.fixed(TRAIN, queries=6)
TASK = Task.create(TEST, PAST, CONFIG, labels=L, seed=0)
COUNTS = np.bincount(TRAIN.labels, minlength=L)
FACTS = LabelFacts(COUNTS, Buckets.by_quantile(COUNTS).assign(COUNTS))


def test_groups_by_known_pairs_and_by_a_column() -> None:
    """Known pairs are 3, 1, 4, 1, 0, 0: the median of those with any is 2. Recalls: ½, 0, 1, 1, 1, 0."""
    groups = figures_by_group(["country"], DATA, TASK, TOP, FACTS)

    figures = {group.name: (group.queries, group.pairs, group.metrics[f"recall@{K}"].value) for group in groups}
    assert figures == {
        "history = new": (2, 2, 1 / 2),
        "history = few": (2, 3, 1 / 2),
        "history = many": (2, 3, 3 / 4),
        "country = DE": (3, 4, pytest.approx((1 / 2 + 1 + 0) / 3)),
        "country = FR": (2, 2, 1 / 2),
        "country = unknown": (1, 2, 1),
    }
    assert groups[1].about == "up to 2 known pairs, the median"
    few = list_records(groups)["history"]["few"]
    assert (few["queries"], few["metrics"][f"recall@{K}"]["value"]) == (2, 1 / 2)


@pytest.mark.parametrize("country", ["DE", "FR"])
def test_group_figures_equal_those_of_its_queries(country: str) -> None:
    rows = [row for row, of in enumerate(COUNTRIES) if of == country]
    alone = Task.create(TEST.take(np.isin(TEST.queries, rows)), PAST, CONFIG, labels=L, seed=0)
    expected = alone.metrics(TOP[rows], FACTS)

    (group,) = [
        figures for figures in figures_by_group(["country"], DATA, TASK, TOP, FACTS) if figures.value == country
    ]

    assert group.metrics.keys() == expected.keys()
    for name, interval in group.metrics.items():
        assert interval.value == pytest.approx(expected[name].value), name
        assert interval.low is None or interval.low <= interval.value <= interval.high


def test_requests_are_grouped_by_context() -> None:
    held_out = Pairs(np.int32([0, 0]), np.int32([3, 6]), requests=np.int32([0, 1]))
    requests = Requests(np.int32([0, 0]), contexts=np.int32([1, 0]))
    data = tiny.dataset(TRAIN, queries=6, labels=L, requests=requests, contexts=pa.table({"device": ["tv", "phone"]}))
    task = Task.create(held_out, Past.fixed(TRAIN, queries=6, requests=requests.queries), CONFIG, labels=L, seed=0)

    groups = figures_by_group(["device"], data, task, np.int32([[3, 4, 5], [3, 4, 5]]), FACTS)

    recalls = {group.name: group.metrics[f"recall@{K}"].value for group in groups if group.column == "device"}
    assert recalls == {"device = phone": 1, "device = tv": 0}


def test_rare_values_are_one_group() -> None:
    """A value that is called `other` is in it, however frequent it is; alone it is a value like any."""
    queries = 60
    test = tiny.pairs(*[(query, 0) for query in range(queries)])
    data = tiny.dataset(
        TRAIN,
        queries=queries,
        labels=L,
        query_table=pa.table(
            {"zip": [*map(str, range(30)), *map(str, range(24)), *["other"] * 6], "few": ["other", "a"] * 30}
        ),
    )
    task = Task.create(test, Past.fixed(TRAIN.take(slice(0)), queries=queries), CONFIG, labels=L, seed=0)

    groups = figures_by_group(["zip", "few"], data, task, np.zeros((queries, K), np.int32), FACTS)

    of_zip = [group for group in groups if group.column == "zip"]
    assert [group.name for group in of_zip] == [*(f"zip = {zip_code}" for zip_code in range(20)), "zip = other"]
    assert {group.queries for group in of_zip[:-1]} == {2}
    assert (of_zip[-1].queries, of_zip[-1].about) == (20, "11 values of zip")
    assert list_records(groups)["zip"]["other"]["about"] == "11 values of zip"
    assert [(group.name, group.queries, group.about) for group in groups if group.column == "few"] == [
        ("few = other", 30, ""), ("few = a", 30, ""),
    ]  # fmt: skip


def test_columns_of_wrong_types_are_refused() -> None:
    table = pa.table({"country": COUNTRIES, "history": COUNTRIES, "tags": [["a"]] * 6})
    data = tiny.dataset(TRAIN, queries=6, labels=L, query_table=table)
    refused = {
        "town": "group 'town': expected a column of queries, found country, history, tags",
        "tags": "group 'tags': expected texts, numbers or booleans, found list<item: string>",
        "history": "group 'history' is not allowed because it names the known pairs; rename the column",
    }
    for name, message in refused.items():
        with pytest.raises(DataError) as error:
            figures_by_group([name], data, TASK, TOP, FACTS)
        assert str(error.value) == message


def test_a_recipe_reads_its_group_columns_and_refuses_them_without_a_table() -> None:
    columns = {"train": "train.parquet", "query_id": "user_id", "label_id": "item_id"}
    recipe = tiny.recipe(data=columns | {"queries": "users.parquet"}, evaluation={"groups": ["country"]})
    assert recipe.table_columns["query"] == ["country"]
    with pytest.raises(ValidationError, match=r"evaluation\.groups: expected data\.queries, a table with 'country'"):
        tiny.recipe(evaluation={"groups": ["country"]})


def test_fit_reports_groups(finished: Finished) -> None:
    """All queries have pairs in training, so that none is new, and groups together have the recall of all."""
    figures = json.loads((finished.out / "metrics.json").read_text())
    (default,) = [point for point in figures["curve"] if point["bias_removal"] == figures["default"]]
    groups = figures["groups"]["history"]

    assert groups.keys() <= {"few", "many"}
    total = sum(group["queries"] for group in groups.values())
    recall = sum(group["queries"] * group["metrics"]["recall@5"]["value"] for group in groups.values()) / total
    assert recall == pytest.approx(default["metrics"]["recall@5"]["value"])
    assert "history = few" in finished.output
    page = (finished.out / "report.html").read_text()
    assert "history = few" in page
    examples = page.split("<h2>Example answers</h2>")[1].split("</table>")[0]
    assert examples.count("<tr><th>") == 5 + 1, "five queries under the heading"
    assert "First at λ = 0<" in examples
