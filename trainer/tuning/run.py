"""A whole study: trials one after another, each kept when it ends, and what they found."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from longtail.trainer.config import Recipe, load_recipe
from longtail.trainer.config.tune import objectives_of, prunes
from longtail.trainer.errors import DataError, TrainerError
from longtail.trainer.history import TrainingHistory
from longtail.trainer.lists import k_of
from longtail.trainer.progress import Reporter
from longtail.trainer.tuning.ranges import Ranges, tuned
from longtail.trainer.tuning.result import TuneResult, figures_in_words, read_result, value_in_words
from longtail.trainer.tuning.study import FOUND, REASON, Study, held, optuna_module, values_of
from longtail.trainer.tuning.trial import Found, Measured, try_recipe
from longtail.trainer.tuning.written import tune_table, write_result

if TYPE_CHECKING:
    import optuna


def tune(
    recipe: Recipe | Path | str,
    out: Path | str,
    reporter: Reporter | None = None,
    *,
    overrides: Sequence[str] = (),
    trials: int | None = None,
) -> TuneResult:
    """Try values from the ranges of a recipe's `[tune]`, and write the recipe of the best trial to `out`.

    Every trial trains the recipe with its values, chooses λ and μ on valid as `fit` does, and is measured there; test
    is dropped once it is read. A killed study called again with the same recipe, data and `out` goes on with what it
    has: an interrupted trial is tried again, from its checkpoint if there is one. With more `trials` a study that had
    ended goes on, too. What the recipe or its data refuse is a trial of its own, with the reason. Of Ctrl-C,
    `KeyboardInterrupt` leaves here after what has been found is written.

    `out` then holds `best.toml`, `trials.csv`, `report.html`, with several objectives or constraints `front/` with the
    recipes on the Pareto front, `study.db` (Optuna's SQLite storage), and `logs/` (TensorBoard, a folder a trial).

    Args:
        recipe: a recipe, or the path of its TOML file.
        out: directory to write; a new one, or that of this study.
        reporter: shows progress and the table of trials; `Reporter()` does on the terminal, None shows nothing.
        overrides: of a recipe that is a path, `KEY=VALUE`, such as `training.epochs=3`.
        trials: how many, instead of `tune.trials`; those of earlier calls included.

    Returns:
        The best trial's recipe, all trials, and those on the front.

    Raises:
        RecipeError: no `[tune]`, a range over what cannot be, a directory of another study, Optuna is not installed.
        DataError: what is wrong with the data of the recipe itself; a metric over more labels than there are.
        TrainerError: none of the trials could be trained.

    Example:
        >>> search = 'tune.ranges={"model.temperature"={low=0.05, high=0.5, log=true}}'
        >>> found = tune("recipe.toml", "runs/search", overrides=[search, "training.epochs=1"], trials=2)
        >>> [trial.state for trial in found.trials], 0.05 <= found.recipe.model.temperature <= 0.5
        (['complete', 'complete'], True)
    """
    out, reporter = Path(out), reporter or Reporter(Console(quiet=True))
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    optuna_module()
    ranges = Ranges(tuned(recipe, trials))
    with held(out):
        measured = Measured(ranges.recipe)
        _check_lengths(ranges, len(measured.dataset.label_ids))
        study = Study(out, ranges, measured.dataset.fingerprint())
        study.tidy()
        _describe(ranges, study, measured, reporter)
        try:
            while len(study.finished) < ranges.tune.trials:
                _next(study, ranges, measured, out, reporter)
        except KeyboardInterrupt:
            if any(trial.state.name == "COMPLETE" for trial in study.finished):
                _conclude(study, ranges, out, reporter)
            done = f"{len(study.finished)} of {ranges.tune.trials} trials"
            reporter.say(f"[bold]Stopped after {done}[/]; the same command goes on")
            raise
        return _conclude(study, ranges, out, reporter)


def _next(study: Study, ranges: Ranges, measured: Measured, out: Path, reporter: Reporter) -> None:
    """Try once: the trial is kept as complete, pruned or refused; an interrupted one goes back into the queue."""
    module, number = optuna_module(), len(study.finished) + 1
    trial = study.ask()
    values = values_of(trial.params, ranges)
    reporter.say(f"[bold]Trial {number} of {ranges.tune.trials}[/]  {escape(_in_words(values))}")
    work = out / "work" / f"{number:04d}"
    states = module.trial.TrialState
    try:
        made = ranges.recipe_of(values)
        found, judge = _twin_of(trial, study), _Judge(trial, ranges)
        if found is None:
            found = try_recipe(made, measured.of(made), work, out / "logs" / f"{number:04d}", reporter, judge)
        judge.tell(found.validated)
    except module.TrialPruned as pruned:
        study.optuna.tell(trial, state=states.PRUNED)
        reporter.say(f"  pruned: {pruned}")
    except TrainerError as error:
        trial.set_user_attr(REASON, str(error))
        study.optuna.tell(trial, state=states.FAIL)
        reporter.say(f"  refused: {escape(str(error))}")
    except KeyboardInterrupt:
        study.again(trial.number)
        raise
    except Exception as error:
        trial.set_user_attr(REASON, f"{type(error).__name__}: {error}")
        study.optuna.tell(trial, state=states.FAIL)
        raise
    else:
        trial.set_user_attr(FOUND, asdict(found))
        for name, bound in ranges.tune.constraints.items():
            trial.set_constraint(name, bound.missed(found.metrics[name]))  # 0 or less is within
        objectives = objectives_of(ranges.tune, ranges.recipe.evaluation)
        study.optuna.tell(trial, [found.metrics[name] for name in objectives])
        reporter.say(f"  {figures_in_words(found, ranges)}")
    shutil.rmtree(work, ignore_errors=True)


class _Judge:
    """Tells Optuna of the validations of a trial, in order, those of a checkpoint among them, and prunes it."""

    def __init__(self, trial: optuna.Trial, ranges: Ranges) -> None:
        self._trial, self._metric = trial, ranges.recipe.evaluation.metric
        self._several, self._told = len(objectives_of(ranges.tune, ranges.recipe.evaluation)) > 1, 0

    def tell(self, validated: Sequence[float]) -> None:
        """Report what has not been reported of all validations so far."""
        if self._several:  # of which Optuna takes no reports
            return
        for value in validated[self._told :]:
            self._trial.report(value, self._told)
            self._told += 1

    def __call__(self, history: TrainingHistory) -> None:
        """Before an epoch.

        Raises:
            optuna.TrialPruned: the best validation so far is below the median.
        """
        self.tell(list(history.metrics.values()))
        if self._told and self._trial.should_prune():
            raise optuna_module().TrialPruned(
                f"the best {self._metric} of {self._told} validations is below the median of complete trials"
            )


def _twin_of(trial: optuna.Trial, study: Study) -> Found | None:
    """What a complete trial of the same values found: training repeats to the last digit."""
    same = (each for each in study.finished if each.params == trial.params and FOUND in each.user_attrs)
    twin = next(same, None)
    return None if twin is None else replace(Found(**twin.user_attrs[FOUND]), seconds=0.0)


def _check_lengths(ranges: Ranges, labels: int) -> None:
    """Refuse metrics of longer lists than there are labels, which an evaluation leaves out."""
    for name in (*objectives_of(ranges.tune, ranges.recipe.evaluation), *ranges.tune.constraints):
        if int(k_of(name)) > labels:
            raise DataError(f"tune: expected metrics at a k of at most {labels}, all labels, received {name}")


def _describe(ranges: Ranges, study: Study, measured: Measured, reporter: Reporter) -> None:
    dataset, config = measured.dataset, ranges.tune
    reporter.say(
        f"[bold]{ranges.recipe.name}[/]: {len(dataset.query_ids):,} queries × {len(dataset.label_ids):,} labels; "
        f"{len(dataset.train):,} training, {len(dataset.valid):,} validation pairs; test is left alone"
    )
    objectives = " and ".join(objectives_of(config, ranges.recipe.evaluation))
    held_to = "".join(f", {name} {bound}" for name, bound in config.constraints.items())
    done = f"; {len(study.finished)} of them are there" if study.finished else ""
    pruned = "median pruner" if prunes(config, ranges.recipe.evaluation) else "no pruner"
    reporter.say(
        f"{config.trials} trials over {', '.join(map(escape, ranges.keys))}, for {objectives}{held_to}; "
        f"sampler {config.sampler}, {pruned}{done}"
    )


def _conclude(study: Study, ranges: Ranges, out: Path, reporter: Reporter) -> TuneResult:
    """Write what has been found, and print it."""
    result = read_result(study, ranges)
    if len(study.finished) >= ranges.tune.trials:
        shutil.rmtree(out / "work", ignore_errors=True)
    write_result(result, study, ranges, out)
    reporter.console.print(tune_table(result, ranges))
    if result.best.missed:
        found = figures_in_words(result.best.found, ranges)
        reporter.say(f"[bold red]No trial meets tune.constraints on valid[/]: the nearest has {found}")
    reporter.say(f"[bold]Recipe[/] {out / 'best.toml'}  ·  report {out / 'report.html'}  ·  {out / 'trials.csv'}")
    return result


def _in_words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value_in_words(value)}" for key, value in values.items())
