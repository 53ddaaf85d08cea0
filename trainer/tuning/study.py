"""`tune`: trials of a recipe's ranges with Optuna, in a storage that several processes may share."""

from __future__ import annotations

import csv
import gc
import json
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
from optuna.storages import RetryHeartbeatStaleTrialCallback as Retry
from rich.console import Console
from rich.markup import escape

from longtail.bundle.one_line import one_line
from longtail.trainer.config import PLACES, Recipe, load_recipe, recipe_toml
from longtail.trainer.config.tune import maximised
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.prepared import read_dataset, settings_of
from longtail.trainer.errors import DataError, RecipeError, TrainerError
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.export.trial import try_own_layers
from longtail.trainer.history import TrainingHistory
from longtail.trainer.limits import check_choice, check_held_out
from longtail.trainer.metric_registry import k_of
from longtail.trainer.progress import Reporter
from longtail.trainer.trackers import flattened
from longtail.trainer.train import train
from longtail.trainer.trained import choose_dial
from longtail.trainer.tuning.ranges import Ranges

FILE = "study.db"
"""File name of the default Optuna storage in the directory of a study."""
HEARTBEAT = 30
"""Seconds between heartbeats of a trial; after three missed heartbeats, its values are tried again."""


class TuneResult(NamedTuple):
    """Hold the result of a study on valid.

    Attributes:
        recipe: recipe of the best trial, for `fit`.
        best: trial with the best first objective within the constraints, or the trial nearest to the constraints; its
            `user_attrs["found"]` has `metrics` by name, λ, μ, epochs and seconds.
        front: trials on the Pareto front of several objectives.
        trials: complete, pruned and refused ones, in order; `user_attrs["refused"]` has the reason.
    """

    recipe: Recipe
    best: optuna.trial.FrozenTrial
    front: list[optuna.trial.FrozenTrial]
    trials: list[optuna.trial.FrozenTrial]

    def __repr__(self) -> str:
        return one_line(self)


def tune(
    recipe: Recipe | Path | str,
    out: Path | str,
    reporter: Reporter | None = None,
    *,
    overrides: Sequence[str] = (),
    trials: int | None = None,
    storage: str | None = None,
) -> TuneResult:
    """Try values from the ranges of a recipe's `[tune]`, and write the recipe of the best trial to `out`.

    Another call with the same recipe, data and storage, even of another process at the same time, continues the same
    study. Values of an interrupted trial are tried again, from its checkpoint in `out`. Ctrl-C raises
    `KeyboardInterrupt` after the result so far is written.

    Args:
        out: directory for the result, checkpoints and logs; a new directory, or the directory of this study.
        reporter: shows progress; None shows nothing.
        overrides: `KEY=VALUE`, such as `training.epochs=3`, for a recipe given by its path.
        trials: number of trials, earlier calls included, instead of `tune.trials`. Each process that shares a study may
            begin one trial more.
        storage: URL of an Optuna storage, where the study has the recipe's name; by default `study.db` in `out`.

    Raises:
        TrainerError: the recipe has no `[tune]`, the study belongs to another recipe, the data have no validation
            pairs, or no trial could be trained.

    Example:
        >>> search = 'tune.ranges={"model.temperature"={low=0.05, high=0.5, log=true}}'
        >>> found = tune("recipe.toml", "runs/search", overrides=[search, "training.epochs=1"], trials=2)
        >>> [trial.state.name for trial in found.trials], 0.05 <= found.recipe.model.temperature <= 0.5
        (['COMPLETE', 'COMPLETE'], True)
    """
    reporter = reporter or Reporter(Console(quiet=True))
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    search = _Search(Ranges(recipe), Path(out), reporter, storage)
    wanted = search.ranges.tune.trials if trials is None else trials
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)  # Optuna's log would repeat the lines of the reporter
    try:
        search.open()
        while (done := len(search.finished())) < wanted:
            reporter.say(f"[bold]Trial {done + 1} of {wanted}[/]")
            search.study.optimize(search.run, n_trials=1, catch=(TrainerError, DataError))
    except KeyboardInterrupt:
        if any(trial.state.name == "COMPLETE" for trial in search.finished()):
            search.conclude()
        reporter.say(f"[bold]Stopped after {len(search.finished())} of {wanted} trials[/]; the same command goes on")
        raise
    finally:
        optuna.logging.set_verbosity(before)
    return search.conclude()


class _Search:
    """Run trials of `study`, which `open` creates or loads, in one process."""

    study: optuna.Study

    def __init__(self, ranges: Ranges, out: Path, reporter: Reporter, storage: str | None) -> None:
        self.ranges, self._out, self._say, self._reporter = ranges, out, reporter.say, reporter
        if storage is None and not (out / FILE).exists() and out.exists() and (out.is_file() or any(out.iterdir())):
            raise RecipeError(f"{out}: expected a study ({FILE}) to go on with, or a path that is free")
        self._url = storage or f"sqlite:///{(out / FILE).resolve()}"
        self._name = ranges.recipe.name if storage else "tune"
        metric, given = ranges.recipe.evaluation.metric, ranges.tune
        self._objectives = given.objectives or [metric]
        self._prunes = given.prune and self._objectives == [metric] and not given.constraints
        self._dataset = _without_test(ranges.recipe)
        if not len(self._dataset.valid):
            raise DataError("tune: expected validation pairs to measure trials on, found none")
        check_choice(ranges.recipe, self._dataset)
        check_held_out(ranges.recipe, self._dataset)
        labels = len(self._dataset.label_ids)
        for name in (*self._objectives, *given.constraints):
            if int(k_of(name)) > labels:  # an evaluation skips these metrics
                raise DataError(f"tune: expected metrics at a k of at most {labels}, all labels, received {name}")

    def open(self) -> None:
        """Create the study, or load it; refuse a study of another recipe or of other data."""
        self._out.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._again = Retry()
            storage = optuna.storages.RDBStorage(
                self._url, heartbeat_interval=HEARTBEAT, grace_period=3 * HEARTBEAT,
                heartbeat_stale_trial_callback=Retry(max_retry=2),
            )  # fmt: skip
        self.study = optuna.create_study(
            storage=storage,
            study_name=self._name,
            directions=["maximize" if maximised(metric) else "minimize" for metric in self._objectives],
            pruner=optuna.pruners.MedianPruner() if self._prunes else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        given, begun = self._settings(), self.study.user_attrs.get("settings")
        if begun is None:
            self.study.set_user_attr("settings", given)
            self.study.enqueue_trial(self.ranges.own())
        elif other := [key for key in {**begun, **given} if begun.get(key) != given.get(key)]:
            found = ", ".join(f"{key} {given.get(key)} (there: {begun.get(key)})" for key in other[:4])
            raise RecipeError(
                f"{self._out}: expected the recipe and data that its study was begun with, received another {found}: "
                "choose another --out, or remove it"
            )

    def finished(self) -> list[optuna.trial.FrozenTrial]:
        """List the finished trials, without interrupted trials whose values are tried again."""
        trials = self.study.get_trials(deepcopy=False)
        again = {number for each in trials for number in each.system_attrs.get("retry_history", ())}
        return [each for each in trials if each.state.is_finished() and each.number not in again]

    def run(self, trial: optuna.Trial) -> list[float]:
        """Train and measure one trial, as Optuna calls it; return its objectives."""
        kind = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}[self.ranges.tune.sampler]
        seed = np.random.SeedSequence([self.ranges.tune.seed, trial.number]).generate_state(1)
        self.study.sampler = kind(seed=int(seed[0]))  # a seed per process, so that processes try different values
        values = self.ranges.suggest(trial)
        self._say(f"  {escape(_in_words(values))}")
        frozen = self.study.get_trials()[trial.number]
        number = f"{frozen.system_attrs.get('failed_trial', trial.number):04d}"  # of the first attempt
        ended = True
        try:
            found = self.found(self.ranges.recipe_of(values), number, self._judge(trial))
        except KeyboardInterrupt:
            ended = False
            self._again(self.study, frozen)
            raise
        except optuna.TrialPruned as pruned:
            self._say(f"  {pruned}")
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, TrainerError | DataError) else f"{type(error).__name__}: {error}"
            trial.set_user_attr("refused", reason)
            self._say(f"  refused: {escape(reason)}")
            raise
        finally:
            gc.collect()  # frees the trial's tables, which are in reference cycles with compiled steps
            if ended:
                shutil.rmtree(self._out / "work" / number, ignore_errors=True)
        trial.set_user_attr("found", found)
        for name, bound in self.ranges.tune.constraints.items():
            trial.set_constraint(name, bound.missed(found["metrics"][name]))
        self._say(f"  {self._figures(found)}")
        return [found["metrics"][name] for name in self._objectives]

    def found(self, recipe: Recipe, number: str, judge: Callable[..., None]) -> dict[str, Any]:
        """Train a recipe as `fit` does, and return its figures at the λ and μ chosen on valid."""
        began = time.perf_counter()
        try_own_layers(recipe)
        dataset, work, logs = self._data_of(recipe), self._out / "work" / number, self._out / "logs" / number
        trained = train(recipe, dataset, epochs=recipe.training.epochs, work=work, logs=logs, reporter=self._reporter,
                        judge=judge)  # fmt: skip
        judge(trained.history, ends=False)
        dial = choose_dial(trained, dataset).dial
        point = next(point for point in dial.curve if Setting.of(point) == dial.default)
        seconds, epochs = time.perf_counter() - began, trained.history.best_epoch
        metrics = {name: interval.value for name, interval in point.metrics.items()}
        return {"metrics": metrics, **dial.default._asdict(), "epochs": epochs, "seconds": seconds}

    def _judge(self, trial: optuna.Trial) -> Callable[..., None]:
        """Create a function that reports validations to Optuna in order, and ends a pruned trial."""
        reported = 0

        def judge(history: TrainingHistory, *, ends: bool = True) -> None:
            nonlocal reported
            for value in list(history.metrics.values())[reported:] if self._prunes else ():
                trial.report(value, reported)
                reported += 1
            if ends and reported and trial.should_prune():
                raise optuna.TrialPruned("pruned: its best validation is below the median of complete trials")

        return judge

    def _data_of(self, recipe: Recipe) -> Dataset:
        """Return the data of a trial, read again if its settings differ; refuse other validation pairs or labels."""
        if settings_of(recipe) == settings_of(self.ranges.recipe):
            return self._dataset
        ours, theirs = self._dataset, _without_test(recipe)
        same = theirs.label_ids.equals(ours.label_ids) and theirs.query_ids.equals(ours.query_ids)
        if not same or any(
            not np.array_equal(getattr(theirs.valid, rows), getattr(ours.valid, rows)) for rows in ("queries", "labels")
        ):
            raise DataError(
                f"data: expected the recipe's own {len(ours.valid):,} validation pairs over {len(ours.label_ids):,} "
                f"labels, to compare trials, found {len(theirs.valid):,} over {len(theirs.label_ids):,}, or others"
            )
        return theirs

    def _settings(self) -> dict[str, str]:
        places = {*PLACES, "memory"}
        tree = self.ranges.recipe.model_dump(mode="json", by_alias=True, exclude={"name": True, "data": places})
        tree["tune"] = self.ranges.tune.model_dump(mode="json", exclude={"trials"})
        own = {f"own.{name}": json.dumps(origin) for name, origin in self.ranges.recipe.own_rows.items()}
        return dict(flattened(tree)) | own | {"data": self._dataset.fingerprint}

    def conclude(self) -> TuneResult:
        """Choose the best trial, write and report the result; refuse a study without a complete trial."""
        out, trials = self._out, self.finished()
        complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
        if not complete:
            reasons = "; ".join(trial.user_attrs.get("refused", "") for trial in trials[:1])
            raise TrainerError(f"tune: expected trials that can be trained, found none of {len(trials)}; {reasons}")
        signs = [-1 if maximised(name) else 1 for name in self._objectives]
        best = min(complete, key=lambda it: (_missed(it), *(a * b for a, b in zip(signs, it.values, strict=True))))
        front = self.study.best_trials if len(signs) > 1 else []
        for old in out.glob("front/trial-*.toml"):
            old.unlink()
        recipe = self._write_recipe(best, out / "best.toml")
        for each in front:
            self._write_recipe(each, out / f"front/trial-{each.number}.toml")
        self._write_trials(trials)
        figures, missed = self._figures(best.user_attrs["found"]), _missed(best)
        self._say(f"[bold]Best: trial {best.number} of {len(trials)}[/]  {figures}")
        if missed:
            self._say(f"[bold red]No trial meets tune.constraints on valid[/]: the nearest misses by {missed:.4f}")
        self._say(f"[bold]Recipe[/] {out / 'best.toml'}  ·  trials {out / 'trials.csv'}")
        return TuneResult(recipe, best, front, trials)

    def _write_recipe(self, trial: optuna.trial.FrozenTrial, path: Path) -> Recipe:
        path.parent.mkdir(exist_ok=True)
        values, found = self.ranges.values(trial.params), self._figures(trial.user_attrs["found"])
        recipe = self.ranges.recipe_of(values)
        head = f"# Trial {trial.number}, on valid: {found}\n# Tried: {_in_words(values)}\n\n"
        path.write_text(head + recipe_toml(recipe, path.parent), encoding="utf-8")
        return recipe

    def _write_trials(self, finished: list[optuna.trial.FrozenTrial]) -> None:
        """Write a row per trial: state, figures at the chosen λ and μ, and values by key."""
        rows: list[dict[str, Any]] = []
        for trial in finished:
            found, reason = dict(trial.user_attrs.get("found", {})), trial.user_attrs.get("refused")
            state = trial.state.name.lower() if reason is None else "refused"
            values = {key: json.dumps(value) for key, value in self.ranges.values(trial.params).items()}
            row = {"trial": trial.number, "state": state, "missed": _missed(trial), **values}
            rows.append(row | found.pop("metrics", {}) | found | {"reason": reason})
        with (self._out / "trials.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows(rows)

    def _figures(self, found: dict[str, Any]) -> str:
        bounds = self.ranges.tune.constraints
        figures = {name: f"{name} {found['metrics'][name]:.4f}" for name in (*self._objectives, *bounds)}
        figures |= {name: f"{figures[name]} ({bound})" for name, bound in bounds.items()}
        return f"{', '.join(figures.values())} at {Setting(*(found.get(name, 0.0) for name in Setting._fields))}"


def _missed(trial: optuna.trial.FrozenTrial) -> float:
    return sum(trial.constraints.values())


def _in_words(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())


def _without_test(recipe: Recipe) -> Dataset:
    dataset = read_dataset(recipe)
    return replace(dataset, test=dataset.test.take(slice(0)))
