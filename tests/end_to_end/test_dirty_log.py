"""A dirty log of 20,000 rows from `init` to answers by five commands, with nothing written by hand between them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.commands import fitted_and_published, longtail, served

pytestmark = [pytest.mark.slow, pytest.mark.process]

USERS, PRODUCTS, ROWS, GROUPS = 600, 500, 20_000, 10
START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
EVENTS = ["view"] * 16 + ["cart"] * 3 + ["purchase"]
BAD = {"undefined": 0, "no product": 1, "no event": 2, "0000-00-00 00:00:00": 3}
"""Values that a bad row has, and the column it has it in."""
EACH = 75
"""Rows of each."""


def write_logs(folder: Path) -> None:
    """As people export them: a byte order mark, quotes, a column that nobody needs, holes; products with two rows."""
    rng = np.random.default_rng(7)
    users, times = rng.integers(USERS, size=ROWS), np.sort(rng.integers(60 * 86_400, size=ROWS)) + START
    popular_P, group_P = 1 / np.arange(1, PRODUCTS + 1) ** 0.9, np.arange(PRODUCTS) % GROUPS
    wanted_GP = popular_P * np.where(group_P == np.arange(GROUPS)[:, None], 12, 1)
    wanted_GP = np.cumsum(wanted_GP / wanted_GP.sum(axis=1, keepdims=True), axis=1)
    rows = []
    for user, time, chance in zip(users, times, rng.random(ROWS), strict=True):
        product = int(np.searchsorted(wanted_GP[user % GROUPS], chance * 0.999999))
        when = datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S")
        rows.append([str(user), f"p{product}", str(rng.choice(EVENTS)), when, '"seen, ""here"""'])
    bad = rng.permutation(ROWS)[: EACH * len(BAD)].reshape(len(BAD), EACH)
    for (value, column), places in zip(BAD.items(), bad, strict=True):
        for row in places:
            rows[row][column] = "" if value.startswith("no ") else value
    lines = ["user_id,product_id,event,time,note", *map(",".join, rows)]
    (folder / "clicks.csv").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    products = [
        f'p{each},"The {["red", "blue", "green"][each % 3]} thing of group {each % GROUPS}, no. {each}",'
        f"{'' if each % 50 == 3 else 5 + each % 90},brand{each % GROUPS}"
        for each in range(PRODUCTS + 5)
    ]
    (folder / "products.csv").write_text("\n".join(["product_id,title,price,brand", *products, products[2], ",?,1,x"]))


def test_a_dirty_log_from_init_to_answers(tmp_path: Path) -> None:
    write_logs(tmp_path)

    longtail("trainer", "init", "clicks.csv", "--labels", "products.csv", folder=tmp_path)
    found = longtail("trainer", "check", "recipe.toml", folder=tmp_path)
    fitted_and_published(tmp_path, "--set", "training.epochs=1")
    with served(tmp_path) as client:
        query = {"features": {"user_id": "3", "history": ["p3", "p13"]}, "k": 10, "bias_removal": 0}
        answer = client.post("/v1/retrieve", json={"queries": [query, query | {"features": {"user_id": "nobody"}}]})

    recipe = (tmp_path / "recipe.toml").read_text()
    for written in (
        'events = { column = "event", weights = { "view" = 1,',
        'timestamp = "time"', f"not in {EACH} rows", 'on_bad_row = "drop"', 'placeholders = ["undefined"]',
        'display = ["title", "brand"]',
    ):  # fmt: skip
        assert written in recipe, written
    # Of the products' rows, p2's second and the one without an id.
    assert f"of 20,000 rows read: {EACH * len(BAD) + 2} by bad rows" in found
    assert "fit would train" in found
    assert answer.status_code == 200, answer.text
    known, unknown = answer.json()["results"]
    assert [len(result["labels"]) for result in (known, unknown)] == [10, 10]
    assert [label["id"] for label in known["labels"]] != [label["id"] for label in unknown["labels"]]
    assert known["labels"][0]["display"]["brand"].startswith("brand")
