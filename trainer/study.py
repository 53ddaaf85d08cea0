"""`tune`: Optuna searches a recipe's ranges, in a storage that several machines may share."""

from __future__ import annotations

import gc
import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
from rich.console import Console
from rich.markup import escape

from longtail.bundle.one_line import one_line
from longtail.trainer.choice import choose_dial
from longtail.trainer.config import Recipe, load_recipe, recipe_toml
from longtail.trainer.config.tune import maximised
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.prepared import data_settings, read_dataset
from longtail.trainer.errors import DataError, RecipeError, TrainerError
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.export.trial import try_own_layers
from longtail.trainer.history import TrainingHistory
from longtail.trainer.limits import check_choice, check_held_out, check_sizes, count_held_out
from longtail.trainer.metric_registry import parse_k
from longtail.trainer.progress import Reporter
from longtail.trainer.search_space import SearchSpace
from longtail.trainer.trackers import flatten_settings
from longtail.trainer.train import train

FILE = "study.db"
"""File name of the default Optuna storage in the directory of a study."""
HEARTBEAT = 30
"""Seconds between heartbeats of a trial; after three missed heartbeats, its values are tried again."""
with warnings.catch_warnings():
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    _RETRY = optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=2)


class TuneResult(NamedTuple):
    """Hold the result of a study on valid.

    Attributes:
        recipe: recipe of the best trial, for `fit`.
        best: trial with the best first objective within the constraints, or the trial nearest to the constraints; its
            `user_attrs["figures"]` has metrics by name, λ, μ and epochs.
        study: Optuna's study, with all trials; `best_trials` is the Pareto front of several objectives.
    """

    recipe: Recipe
    best: optuna.trial.FrozenTrial
    study: optuna.Study

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
    """Try values from the ranges of a recipe's `[tune]`; write the recipe of the best trial to `out`.

    The best recipe is written after every trial. Another call with the same recipe, data and storage, even of another
    process at the same time, continues the same study. Values of an interrupted trial are tried again, from its
    checkpoint in `out`.

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
        >>> result = tune("recipe.toml", "runs/search", overrides=[search, "training.epochs=1"], trials=2)
        >>> [trial.state.name for trial in result.study.trials], 0.05 <= result.recipe.model.temperature <= 0.5
        (['COMPLETE', 'COMPLETE'], True)
    """
    out, reporter = Path(out), reporter or Reporter(Console(quiet=True, force_jupyter=False))
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    space = SearchSpace(recipe)
    if storage is None and not (out / FILE).exists() and out.exists() and (out.is_file() or any(out.iterdir())):
        raise RecipeError(f"{out}: expected a study ({FILE}) to go on with, or a path that is free")
    dataset = _read_without_test(space.recipe)
    _check_measured(space, dataset)
    limit = space.tune.trials if trials is None else trials
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)  # Optuna's log would repeat the lines of the reporter
    try:
        study = _open_study(space, dataset, out, storage)
        run = partial(_run_trial, study, space, dataset, out, reporter)
        while (done := len(list_finished_trials(study))) < limit:
            reporter.say(f"[bold]Trial {done + 1} of {limit}[/]")
            study.optimize(run, n_trials=1, catch=(TrainerError, DataError))
            _write_best(study, space, out)
    finally:
        optuna.logging.set_verbosity(verbosity)
    best = _write_best(study, space, out)
    done = len(list_finished_trials(study))
    if best is None:
        reasons = [trial.user_attrs["refused"] for trial in study.trials if "refused" in trial.user_attrs][:1]
        raise TrainerError(f"tune: expected trials that can be trained, found none of {done}; {'; '.join(reasons)}")
    reporter.say(f"[bold]Best: trial {best.number} of {done}[/]  {_format_figures(best.user_attrs['figures'], space)}")
    if missed := _sum_missed(best):
        reporter.say(f"[bold red]No trial meets tune.constraints on valid[/]: the nearest misses by {missed:.4f}")
    reporter.say(f"[bold]Recipe[/] {out / 'best.toml'}")
    return TuneResult(space.create_recipe(space.values(best.params)), best, study)


def list_finished_trials(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """List the complete, pruned and refused trials; interrupted trials are tried again."""
    trials = study.get_trials(deepcopy=False)
    return [trial for trial in trials if trial.state.name in ("COMPLETE", "PRUNED") or "refused" in trial.user_attrs]


def _check_measured(space: SearchSpace, dataset: Dataset) -> None:
    """Refuse data on which trials cannot be compared."""
    if not len(dataset.valid):
        raise DataError("tune: expected validation pairs to measure trials on, found none")
    check_choice(space.recipe, dataset)
    check_held_out(count_held_out(space.recipe, dataset))
    labels = len(dataset.label_ids)
    for name in (*space.objectives, *space.tune.constraints):
        if int(parse_k(name)) > labels:  # an evaluation skips these metrics
            raise DataError(f"tune: expected metrics at a k of at most {labels}, all labels, received {name}")


def _open_study(space: SearchSpace, dataset: Dataset, out: Path, storage: str | None) -> optuna.Study:
    """Create the study, or load it; refuse a study of another recipe or of other data."""
    out.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        opened = optuna.storages.RDBStorage(
            storage or f"sqlite:///{(out / FILE).resolve()}", heartbeat_interval=HEARTBEAT, grace_period=3 * HEARTBEAT,
            heartbeat_stale_trial_callback=_RETRY,
        )  # fmt: skip
    study = optuna.create_study(
        storage=opened,
        study_name=space.recipe.name if storage else "tune",
        directions=["maximize" if maximised(metric) else "minimize" for metric in space.objectives],
        pruner=optuna.pruners.MedianPruner() if space.prunes else optuna.pruners.NopPruner(),
        load_if_exists=True,
    )
    tree = space.recipe.model_dump(mode="json", by_alias=True, exclude={"name", "data"})
    tree["tune"] = space.tune.model_dump(mode="json", exclude={"trials"})
    custom = {f"custom.{name}": json.dumps(origin) for name, origin in space.recipe.own_rows.items()}
    settings = dict(flatten_settings(tree)) | custom | {"data": dataset.fingerprint}
    stored = study.user_attrs.get("settings")
    if stored is None:
        study.set_user_attr("settings", settings)
        # The recipe's own values are the first trial, so that the study never ends below them.
        study.enqueue_trial(space.recipe_params())
    elif changed := [key for key in {**stored, **settings} if stored.get(key) != settings.get(key)]:
        changes = ", ".join(f"{key} {settings.get(key)} (there: {stored.get(key)})" for key in changed[:4])
        raise RecipeError(
            f"{out}: expected the recipe and data that its study was begun with, received another {changes}: "
            "choose another --out, or remove it"
        )
    return study


def _run_trial(
    study: optuna.Study, space: SearchSpace, dataset: Dataset, out: Path, reporter: Reporter, trial: optuna.Trial
) -> list[float]:
    """Train and measure one trial, as Optuna calls it; return its objectives."""
    seed = np.random.SeedSequence([space.recipe.seed, trial.number]).generate_state(1)
    # A seed for each trial, so that processes which share a study try different values.
    study.sampler = optuna.samplers.TPESampler(seed=int(seed[0]))
    values = space.suggest(trial)
    reporter.say(f"  {escape(_format_values(values))}")
    frozen = study.get_trials()[trial.number]
    number = f"{frozen.system_attrs.get('failed_trial', trial.number):04d}"  # of the first attempt, with its checkpoint
    work = out / "work" / number
    try:
        recipe = space.create_recipe(values)
        alike = data_settings(recipe) == data_settings(space.recipe)
        trial_data = dataset if alike else _read_without_test(recipe)
        judged = trial if space.prunes else None
        figures = train_trial(recipe, trial_data, work, out / "logs" / number, reporter, judged)
    except KeyboardInterrupt:
        _RETRY(study, frozen)
        raise
    except Exception as error:
        if isinstance(error, optuna.TrialPruned):
            reporter.say(f"  {error}")
        else:
            plain = isinstance(error, TrainerError | DataError)
            trial.set_user_attr("refused", str(error) if plain else f"{type(error).__name__}: {error}")
            reporter.say(f"  refused: {escape(str(error))}")
        shutil.rmtree(work, ignore_errors=True)
        raise
    finally:
        gc.collect()  # frees the trial's tables, which are in reference cycles with compiled steps
    shutil.rmtree(work, ignore_errors=True)
    trial.set_user_attr("figures", figures)
    for name, limit in space.tune.constraints.items():
        missed = limit - figures[name] if maximised(name) else figures[name] - limit
        trial.set_constraint(name, max(missed, 0.0))
    reporter.say(f"  {_format_figures(figures, space)}")
    return [figures[name] for name in space.objectives]


def train_trial(
    recipe: Recipe, dataset: Dataset, work: Path, logs: Path, reporter: Reporter, trial: optuna.Trial | None
) -> dict[str, float]:
    """Train a recipe as `fit` does; return its figures at the λ and μ chosen on valid.

    Args:
        trial: learns of every validation, and may end the training; None ends none.
    """
    reported = 0

    def report(history: TrainingHistory) -> None:
        nonlocal reported
        if trial is None:
            return
        for value in list(history.metrics.values())[reported:]:
            trial.report(value, reported)
            reported += 1
        if reported and trial.should_prune():
            raise optuna.TrialPruned("pruned: its best validation is below the median of complete trials")

    try_own_layers(recipe)
    check_sizes(recipe, dataset)  # `train` trusts its callers, and a range may ask for more labels than there are
    trained = train(
        recipe, dataset, epochs=recipe.training.epochs, work=work, logs=logs, reporter=reporter, judge=report
    )  # fmt: skip
    dial = choose_dial(trained, dataset).dial
    point = next(point for point in dial.curve if Setting.read_point(point) == dial.default)
    metrics = {name: interval.value for name, interval in point.metrics.items()}
    return metrics | dial.default._asdict() | {"epochs": trained.history.best_epoch}


def _write_best(study: optuna.Study, space: SearchSpace, out: Path) -> optuna.trial.FrozenTrial | None:
    """Write the recipe of the best complete trial, if any trial is complete."""
    complete = [trial for trial in list_finished_trials(study) if trial.state.name == "COMPLETE"]
    if not complete:
        return None
    sign = -1 if maximised(space.objectives[0]) else 1
    best = min(complete, key=lambda trial: (_sum_missed(trial), sign * trial.values[0]))
    values, figures = space.values(best.params), _format_figures(best.user_attrs["figures"], space)
    head = f"# Trial {best.number}, on valid: {figures}\n# Tried: {_format_values(values)}\n\n"
    (out / "best.toml").write_text(head + recipe_toml(space.create_recipe(values), out), encoding="utf-8")
    return best


def _sum_missed(trial: optuna.trial.FrozenTrial) -> float:
    return sum(trial.constraints.values())


def _format_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())


def _format_figures(figures: Mapping[str, float], space: SearchSpace) -> str:
    limits = space.tune.constraints
    words = {name: f"{name} {figures[name]:.4f}" for name in (*space.objectives, *limits)}
    words |= {name: f"{words[name]} ({'≥' if maximised(name) else '≤'} {limit:g})" for name, limit in limits.items()}
    return f"{', '.join(words.values())} at {Setting(*(figures.get(name, 0.0) for name in Setting._fields))}"


def _read_without_test(recipe: Recipe) -> Dataset:
    dataset = read_dataset(recipe)
    return replace(dataset, test=dataset.test.take(slice(0)))
