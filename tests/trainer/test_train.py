import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from longtail.bundle import CurvePoint, Interval
from longtail.trainer import fit, load_recipe
from longtail.trainer.checkpoint import lock_folder
from longtail.trainer.data.batches import prefetch
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.errors import CheckpointError, DataError, RecipeError
from longtail.trainer.limits import check_sizes
from longtail.trainer.study import train_trial
from longtail.trainer.trackers import tracker_module
from longtail.trainer.trained import Trained
from tests.serving.process import until
from tests.trainer import tiny

TABLE = tiny.clustered(users=12, items=8, per_user=6, seed=0)
ROWS = list(zip(TABLE["user_id"].to_pylist(), TABLE["item_id"].to_pylist(), strict=True))


def data(*, valid: bool = True) -> Dataset:
    held_out = tiny.pairs(*ROWS[::6]) if valid else tiny.pairs()
    return tiny.dataset(
        tiny.pairs(*[row for at, row in enumerate(ROWS) if at % 6 or not valid]), queries=12, labels=8, valid=held_out
    )


def run(work: Path, dataset: Dataset, *, epochs: int, seed: int = 0, **training: object) -> Trained:
    recipe = tiny.recipe(seed=seed, training={"batch_size": 12, **training}, optimizer={"embedding_learning_rate": 0.1})
    return tiny.train(recipe, dataset, work, epochs=epochs)


@pytest.mark.slow
def test_training_repeats_under_a_seed_and_lowers_the_loss(tmp_path: Path) -> None:
    first, again, other = (
        run(tmp_path / name, data(), epochs=4, seed=seed) for name, seed in [("first", 3), ("again", 3), ("other", 4)]
    )

    assert first.history == again.history
    np.testing.assert_array_equal(first.model.embed_labels(), again.model.embed_labels())
    assert other.history.losses != first.history.losses
    assert len(first.history.losses) == 4
    assert first.history.losses[-1] < first.history.losses[0]
    assert sorted(first.history.metrics) == [1, 2, 3, 4]


def scripted_point(value: float) -> CurvePoint:
    """A validation at λ = 0 where every metric is `value`."""
    metrics = {f"recall@{k}": Interval(value=value) for k in range(1, 101)}
    return CurvePoint(bias_removal=0.0, metrics=metrics)


@pytest.mark.slow
def test_early_stopping_waits_for_its_patience_and_restores_the_best_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted = iter([0.1, 0.5, 0.4, 0.5, 0.3, 0.2, *(0.1, 0.2, 0.3, 0.4)])
    monkeypatch.setattr(Trained, "curve", lambda *_, **__: [scripted_point(next(scripted))])

    stopped = run(tmp_path / "stopped", data(), epochs=9, patience=2)
    four = run(tmp_path / "four", data(), epochs=4)

    assert stopped.history.metrics == {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.5, 5: 0.3, 6: 0.2}
    assert stopped.history.best_epoch == 4, "of equals, the one trained longer"
    assert stopped.history.losses[:4] == four.history.losses
    np.testing.assert_array_equal(stopped.model.embed_labels(), four.model.embed_labels())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bucket", "metrics", "missed", "best"),
    [
        ("head", {1: 0.1, 2: 0.3, 3: 0.2, 4: 0.4}, {1: 0.05, 2: 0, 3: 0, 4: 0.01}, 2),
        ("tail", dict.fromkeys(range(1, 5), 0.9), {}, 4),
    ],
)
def test_the_floor_decides_which_epoch_is_best(
    bucket: str, metrics: dict[int, float], missed: dict[int, float], best: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def point(bias_removal: float, recall: float, of_bucket: float) -> CurvePoint:
        values = {"recall@2": Interval(value=recall), f"recall@2/{bucket}": Interval(value=of_bucket)}
        return CurvePoint(bias_removal=bias_removal, metrics=values)

    # λ = 1 has the recall, λ = 0 the bucket; the second epoch has the best recall of those that reach the floor. A
    # floor of the tail is reached by β after training, whatever the epoch: recall alone decides.
    scripted = iter([(0.1, 0.1), (0.3, 0.2), (0.2, 0.25), (0.4, 0.14)])

    def curve(*_: object, **__: object) -> list[CurvePoint]:
        recall, of_bucket = next(scripted)
        return [point(0.0, recall, of_bucket), point(1.0, 0.9, 0.0)]

    monkeypatch.setattr(Trained, "curve", curve)
    evaluation = {"ks": [2], "metric": "recall@2", "floor": {bucket: 0.15}}
    recipe = tiny.recipe(training={"batch_size": 12}, evaluation=evaluation)
    history = tiny.train(recipe, data(), tmp_path, epochs=4).history

    assert history.metrics == metrics
    assert history.missed == pytest.approx(missed)
    assert history.best_epoch == best


@pytest.mark.slow
def test_validation_runs_at_its_epochs_and_the_last(tmp_path: Path) -> None:
    trained = run(tmp_path, data(), epochs=5, evaluate_every=2)

    assert sorted(trained.history.metrics) == [2, 4, 5]


@pytest.mark.slow
def test_without_validation_the_last_epoch_is_kept(tmp_path: Path) -> None:
    trained = run(tmp_path, data(valid=False), epochs=2)

    assert (trained.history.best_epoch, trained.history.metrics) == (2, {})


@pytest.mark.slow
def test_a_finished_run_is_only_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(tmp_path, data(), epochs=2)
    monkeypatch.setattr("longtail.trainer.train.epoch_batches", lambda *_, **__: pytest.fail("trains again"))

    again = run(tmp_path, data(), epochs=2)

    assert again.history == done.history
    np.testing.assert_array_equal(again.model.embed_labels(), done.model.embed_labels())


def test_a_loss_that_is_not_finite_stops_the_job(tmp_path: Path) -> None:
    heavy = data(valid=False)
    weights = np.full(len(heavy.train), 3e38, np.float32)
    broken = tiny.dataset(
        tiny.pairs(*zip(heavy.train.queries, heavy.train.labels, strict=True), weights=weights), queries=12, labels=8
    )

    with pytest.raises(DataError, match="expected a finite loss, found inf at epoch 1, step 1"):
        run(tmp_path, broken, epochs=1)


def test_a_threshold_above_every_label_leaves_no_negatives() -> None:
    recipe = tiny.recipe(loss={"weight": {"name": "equalised", "threshold": 0.9}})
    with pytest.raises(DataError, match=r"threshold: expected at most 0\.\d+, .*received 0\.9"):
        check_sizes(recipe, data())


def test_trial_with_more_retrieved_labels_than_the_catalogue_is_refused(tmp_path: Path) -> None:
    recipe = tiny.recipe(loss={"retrieved_negatives": {"depth": 99}})
    with pytest.raises(DataError, match="depth: expected at most 8, the labels there are, received 99"):
        train_trial(recipe, data(), tmp_path, tmp_path, tiny.record_output()[0], None)


def test_batches_prepared_ahead_are_equal_and_pass_errors_on() -> None:
    prepared: list[int] = []

    def batches() -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        for step in range(4):
            prepared.append(step)
            yield step, {}
        raise ValueError("no more pairs")

    ahead = prefetch(batches())
    assert next(ahead)[0] == 0
    until(lambda: prepared == [0, 1], "the next to be made while the first is used")
    assert [step for step, _ in islice(ahead, 3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="no more pairs"):
        next(ahead)


def test_a_second_job_on_a_folder_is_refused_before_it_trains(tmp_path: Path) -> None:
    recipe, out = tiny.write_job(tmp_path), tmp_path / "out"
    with (
        lock_folder(out.with_name("out.work")),
        pytest.raises(CheckpointError, match="expected no other job here, found one"),
    ):
        fit(recipe, out)
    assert not out.exists()
    with lock_folder(out.with_name("out.work")):  # the lock went with the job
        pass


@pytest.mark.parametrize("table", ["genres", "user_id", "nonsense"])
def test_a_history_reads_no_table_of_other_ids(tmp_path: Path, table: str) -> None:
    recipe = tiny.write_job(tmp_path)
    with pytest.raises(RecipeError, match=f"'history': table = '{table}' is not allowed .* use table = 'item_id'"):
        load_recipe(recipe, [f"query.features.1.table={table}"])


def test_a_tracker_that_is_unknown_or_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="track: expected one of mlflow, wandb, received 'comet'"):
        tracker_module("comet")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(RecipeError, match=r"expected mlflow to be installed: pip install '.*\[track\]'"):
        tracker_module("mlflow")
