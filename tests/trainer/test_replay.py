"""After a warm start epochs visit what is new and a share of the rest, and weigh their negatives by what they visit."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from longtail.trainer import fit, load_recipe
from longtail.trainer.data.batches import epoch_batches
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.pairs import Pairs, Replay
from longtail.trainer.progress import Reporter
from tests.trainer import tiny

DATA = {"train": "train.parquet", "query_id": "user_id", "label_id": "item_id", "timestamp": "time"}


def timed(count: int) -> Pairs:
    """A pair a second, of seven queries in turn, each with another label."""
    rows = tiny.pairs(*[(row % 7, row) for row in range(count)])
    return replace(rows, times=np.arange(count, dtype=np.float64)).sorted()


def test_an_epoch_visits_every_new_pair_and_draws_anew_from_the_old() -> None:
    train = timed(100)
    replay = Replay.of(train, share=0.25, newest=79.0)
    epochs = [replay.rows(np.random.default_rng([0, epoch])) for epoch in range(40)]

    assert replay.visits == 20 + 20
    for rows in epochs:
        times = train.times[rows]
        assert sorted(times[times > 79]) == list(range(80, 100))
        assert len(np.unique(rows)) == 40
    assert len({tuple(np.sort(rows)) for rows in epochs}) == 40
    visited = np.bincount(np.concatenate(epochs), minlength=100) / 40
    np.testing.assert_allclose(visited, replay.chances(), atol=0.25)
    assert str(replay) == "epochs visit 20 new pairs and 20 of the 80 old ones"


def test_batches_are_of_the_visited_pairs_and_histories_of_all() -> None:
    """Of query 0, a new pair's history still holds what came long before."""
    train = timed(70)
    history = {"name": "history", "kind": "history", "table": "item_id", "dim": 4, "unknown_rate": 0}
    recipe = tiny.recipe(data=DATA, query={"features": [tiny.USER, history]})
    data = tiny.dataset(train, queries=7, labels=70, ordered=True)
    replay = Replay.of(train, share=0, newest=55.0)
    batches = [
        batch
        for _, batch in epoch_batches(
            train, Encoding.fit(recipe, data).query, batch_size=7, seed=0, epoch=0, visits=replay.rows,
        )
    ]  # fmt: skip

    assert len(batches) == 2
    assert all((train.times[batch["_pair"]] > 55).all() for batch in batches)
    assert min((batch["history__weight"] > 0).sum(axis=1).min() for batch in batches) == 8


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"data": {**DATA, "timestamp": None}}, "training.replay: expected data.timestamp"),
        (
            {"data": {**DATA, "reduction": "sample"}},
            r"training\.replay: expected data\.timestamp, and no data\.reduction =",
        ),
    ],
)
def test_a_recipe_that_cannot_tell_new_pairs_is_refused(section: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.recipe(training={"replay": 0.5}, **section)
    with pytest.raises(ValueError, match="less than or equal to 1"):
        tiny.recipe(data=DATA, training={"replay": 1.5})


@pytest.mark.slow
def test_a_daily_job_visits_the_day_and_says_what_it_has_learnt_before(tmp_path: Path) -> None:
    """Yesterday's job, then today's: the second steps over new pairs and a tenth of the old, ."""
    recipe = tiny.write_job(tmp_path)
    table = pq.read_table(tmp_path / "interactions.parquet")
    order = np.argsort(table["timestamp"].to_numpy(), kind="stable")
    table = table.take(order).set_column(2, "timestamp", pa.array(np.arange(len(order)) + 1_700_000_000))
    split = ["data.split={strategy='temporal', valid=0.1, test=0.0}", "training.refit=true"]
    pq.write_table(table[:200], tmp_path / "interactions.parquet")
    yesterday = fit(load_recipe(recipe, split), tmp_path / "yesterday")
    last = 1_700_000_000 + 199
    assert yesterday.manifest.training_data["newest"] == last  # refitted on train and valid
    pq.write_table(table, tmp_path / "interactions.parquet")

    today, screen = load_recipe(recipe, [*split, "training.replay=0.1", "training.batch_size=8"]), StringIO()
    reporter = Reporter(Console(file=screen, width=200))
    bundle = fit(today, tmp_path / "today", reporter, warm_start=tmp_path / "yesterday")

    pairs = round(0.9 * len(table))
    assert f"epochs visit {pairs - 200} new pairs and 20 of the 200 old ones" in screen.getvalue()
    assert "valid pairs are no newer" not in screen.getvalue()
    assert bundle.manifest.training_data["newest"] == 1_700_000_000 + len(table) - 1

    late = load_recipe(recipe, ["data.split={strategy='temporal', valid=0.5, test=0.1}", "training.epochs=1"])
    screen.truncate(0)
    fit(late, tmp_path / "late", reporter, warm_start=tmp_path / "yesterday")
    assert "valid pairs are no newer than the last one that the bundle has learnt from" in screen.getvalue()
