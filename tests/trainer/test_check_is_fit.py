"""`check` and `fit` agree: what one refuses, the other refuses before an epoch, over drawn recipes and data."""

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings, strategies as st
from pydantic import ValidationError

from longtail.trainer.check import check
from longtail.trainer.config import Recipe
from longtail.trainer.errors import DataError, TrainerError
from longtail.trainer.job import fit
from tests.trainer import tiny

DAY = 86_400
NOW = 1_700_000_000
TIMES = {
    "hours": lambda i: NOW + i * 3600,
    "days": lambda i: NOW // DAY * DAY + i // 6 * DAY,
    "one": lambda i: NOW,  # noqa: ARG005
    "order": lambda i: i,
    "sentinel": lambda i: 0 if i == 3 else NOW + i * 3600,
}
VALUES: dict[str, list[Any]] = {
    "age": [1.5, None, 3.0],
    "broken": [1.5, float("inf"), 3.0],
    "plan": ["free", None, "paid"],
    "born": ["2020-01-31", None, "soon"],
}


CHANGES: list[dict[str, Any]] = [
    {"data": {"split": {"strategy": "temporal"}}},
    {"data": {"split": {"strategy": "temporal_per_query", "valid": 0.2, "test": 0.2}}},
    {"data": {"split": {"strategy": "leave_last_out"}}},
    {"data": {"split": {"strategy": "random", "valid": 0}}},
    {"data": {"split": None}},
    {"data": {"timestamp": None, "split": {"strategy": "random"}}},
    {"data": {"repeats": "drop"}},
    {"data": {"reduction": "sample"}},
    {"data": {"max_bad_rows": 0.05}},
    {"data": {"display": ["title"]}},
    {"data": {"display": ["tags"]}},
    {"query": {"features": [{"name": "history", "kind": "history", "table": "item", "dim": 4}]}},
    {"query": {"features": [{"name": "age", "kind": "number"}]}},
    {"query": {"features": [{"name": "broken", "kind": "number"}]}},
    {"query": {"features": [{"name": "plan", "kind": "id", "dim": 4}]}},
    {"query": {"features": [{"name": "born", "kind": "date", "dim": 4}]}},
    {"model": {"temperature": "auto"}},
    *({"loss": {"sampler": sampler}} for sampler in (
        {"name": "uniform", "negatives": 3}, {"name": "mixed", "negatives": 8}, {"name": "full"},
        {"name": "adversarial", "negatives": 2},
    )),
    {"loss": {"weight": "importance"}},
    {"loss": {"mining": {"keep": 6}}},
    {"loss": {"top_k": {"k": 5}}},
    {"training": {"accumulate": 2}},
    {"training": {"refit": False}},
    {"evaluation": {"ks": [12], "metric": "recall@12"}},
    *({"evaluation": {"metric": f"recall@2/{bucket}"}} for bucket in ("head", "tail", "new")),
    {"evaluation": {"exclude_seen": True}},
    {"evaluation": {"history": "growing", "least_history": 2}},
    {"evaluation": {"least_history": 9}},
    *({"evaluation": {"groups": [column]}} for column in ("plan", "broken", "nothing")),
    {"evaluation": {"target_prior": "shares.parquet"}},
    {"evaluation": {"target_prior": "uniform"}},
    {"evaluation": {"baselines": ["popularity", "item-kNN", "recent popularity"]}},
    {"prior": {"kind": "decayed"}},
    {"prior": {"kind": "decayed", "horizon": "2h"}},
    {"prior": {"kind": "decayed", "horizon": "9d"}},
    {"prior": {"kind": "forecast", "horizon": "2h"}},
    {"prior": {"kind": "decayed", "horizon": "2h", "since": "since"}},
    {"cooccurrence": {}},
]  # fmt: skip
"""Changes of a recipe that `fit` takes, by section; None leaves a key out."""


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    """Draw sections of a recipe, and its tables by name: a job that trains, with up to three changes."""
    rows, users, items = draw(st.sampled_from([(60, 7, 9), (60, 7, 9), (60, 7, 9), (9, 3, 4), (40, 20, 1), (40, 1, 9)]))
    times, share = draw(st.sampled_from(["hours", "hours", *TIMES])), draw(st.sampled_from([1.0, 0.0]))
    log = {
        "user": [f"u{i * 7 // (i % 3 + 1) % users}" for i in range(rows)],
        "item": [f"i{i * i % items}" for i in range(rows)],
        "when": [TIMES[times](i) for i in range(rows)],
    }
    values = {name: [of[i % 3] for i in range(users)] for name, of in VALUES.items()}
    labels = {"title": "a title", "tags": [["a"]], "since": NOW + DAY * 400}
    tables = {
        "log": pa.table(log),
        "users": pa.table({"user": [f"u{i}" for i in range(users)], **values}),
        "items": pa.table(
            {"item": [f"i{i}" for i in range(items)], **{name: [of] * items for name, of in labels.items()}}
        ),
        "shares": pa.table({"label": ["i0", "zz"], "share": [share, 1.0]}),
    }
    sections: dict[str, dict[str, Any]] = {
        "data": {
            "train": "log.parquet", "query_id": "user", "label_id": "item", "queries": "users.parquet",
            "labels": "items.parquet", "timestamp": "when", "split": {"strategy": "temporal"},
        },
        "query": {"features": [{"name": "user", "kind": "id", "dim": 4}]},
        "label": {"features": [{"name": "item", "kind": "id", "dim": 4}]},
        "model": {"dim": 4},
        "training": {"epochs": 1, "batch_size": 8},
        "evaluation": {"bootstrap": 10, "baselines": [], "ks": [2], "metric": "recall@2", "exclude_seen": False},
    }  # fmt: skip
    for change in draw(st.lists(st.sampled_from(CHANGES), max_size=3)):
        for section, read_values in change.items():
            changed = sections.get(section, {}) | read_values
            sections[section] = {key: value for key, value in changed.items() if value is not None}
    return sections, tables


@settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(job=jobs())
def test_check_refuses_what_fit_refuses(job: tuple[dict[str, Any], dict[str, pa.Table]]) -> None:
    sections, tables = job
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for table_name, table in tables.items():
            pq.write_table(table, folder / f"{table_name}.parquet")
        path_keys = {"data": ("train", "queries", "labels"), "evaluation": ("target_prior",)}
        for section, keys in path_keys.items():
            sections[section] |= {key: folder / sections[section][key] for key in keys if key in sections[section]}
        try:
            recipe = Recipe.model_validate({"name": "drawn", **sections})
        except ValidationError:
            return  # neither sees the data
        report, (reporter, screen) = check(recipe), tiny.record_output()
        try:
            fit(recipe, folder / "bundle", reporter)
        except (TrainerError, DataError) as error:
            refused = str(error)
        else:
            refused = None
        assert report.ok == (refused is None), f"check: {report.problems}; fit: {refused}"
        assert refused is None or "epoch 1/" not in screen.getvalue(), f"fit trains before it refuses: {refused}"
