"""A study on disk: Optuna's SQLite storage, one process at a time, of one recipe and its data."""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longtail.trainer.config import TuneConfig
from longtail.trainer.config.tune import maximised, objectives_of, prunes
from longtail.trainer.errors import RecipeError
from longtail.trainer.trackers import flattened
from longtail.trainer.tuning.ranges import Ranges

if TYPE_CHECKING:
    import optuna

FILE = "study.db"
"""In the directory of a study: `optuna-dashboard sqlite:///DIR/study.db` reads it, too."""

_NAME, _BEGUN_WITH = "longtail", "begun_with"
FOUND, REASON = "found", "reason"
"""Attributes of a trial: what a complete one has on valid, and why one was refused."""

_ATTEMPT, _ATTEMPTS = "attempt", 3
"""A trial that ends its process, for want of memory perhaps, is tried this often."""

_SHOWN = 4


def optuna_module() -> Any:
    """Optuna.

    Raises:
        RecipeError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise RecipeError(f"tune: expected optuna to be installed: pip install 'longtail[tune]' ({error})") from error
    return optuna


@contextmanager
def held(out: Path) -> Iterator[None]:
    """The directory of a study, made if it is not there, for this process alone.

    Raises:
        RecipeError: it holds something else than a study, or another process is at work in it.
    """
    lock_file = out / f"{FILE}.lock"
    foreign = out.exists() and (not out.is_dir() or any(path != lock_file for path in out.iterdir()))
    if foreign and not (out / FILE).exists():
        raise RecipeError(f"{out}: expected a study ({FILE}) to go on with, or a path that is free")
    out.mkdir(parents=True, exist_ok=True)
    with lock_file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecipeError(f"{out}: expected no other tune at work in it, found one") from error
        try:
            yield
        finally:
            if not (out / FILE).exists():  # it was refused before it began
                lock_file.unlink()
                out.rmdir()


class Study:
    """Optuna's study of one recipe, whose next trial depends on `tune.seed` and what earlier ones found alone.

    Args:
        out: its directory.
        ranges: of the recipe.
        data: fingerprint of the training and validation data.

    Attributes:
        optuna: Optuna's own study.

    Raises:
        RecipeError: the directory holds the study of another recipe, or of other data.
    """

    def __init__(self, out: Path, ranges: Ranges, data: str) -> None:
        module = optuna_module()
        self._ranges, self._tune = ranges, ranges.tune
        objectives = objectives_of(self._tune, ranges.recipe.evaluation)
        with _quiet(module):
            self.optuna: optuna.Study = module.create_study(
                storage=f"sqlite:///{(out / FILE).resolve()}",
                study_name=_NAME,
                directions=["maximize" if maximised(metric) else "minimize" for metric in objectives],
                load_if_exists=True,
            )
        pruned = prunes(self._tune, ranges.recipe.evaluation)
        self.optuna.pruner = module.pruners.MedianPruner() if pruned else module.pruners.NopPruner()
        given = _settings(ranges) | {"data": data}
        self._refuse_another(out, given)
        if _BEGUN_WITH not in self.optuna.user_attrs:
            self.optuna.set_user_attr(_BEGUN_WITH, given)

    @property
    def finished(self) -> list[optuna.trial.FrozenTrial]:
        """Trials that have ended: complete, pruned or refused; not those that were interrupted and are tried again."""
        states = optuna_module().trial.TrialState
        return [
            trial
            for trial in self.optuna.get_trials(deepcopy=False)
            if trial.state in (states.COMPLETE, states.PRUNED) or (trial.state == states.FAIL and reason_of(trial))
        ]

    def tidy(self) -> None:
        """Try trials again that a killed process left behind; the recipe's own values come first of all."""
        states = optuna_module().trial.TrialState
        for trial in self.optuna.get_trials(deepcopy=False, states=[states.RUNNING]):
            attempt = trial.user_attrs.get(_ATTEMPT, 1)
            self.again(trial.number, attempt + 1)
        if not self.optuna.get_trials(deepcopy=False) and self._ranges.own is not None:
            self.optuna.enqueue_trial(self._ranges.own)

    def again(self, number: int, attempt: int = 1) -> None:
        """End a trial of Optuna's number as interrupted, and put its values into the queue, unless it had its turns."""
        running = self.optuna.get_trials(deepcopy=False)[number]
        self.optuna.tell(number, state=optuna_module().trial.TrialState.FAIL)
        if attempt <= _ATTEMPTS:
            self.optuna.enqueue_trial(running.params, user_attrs={_ATTEMPT: attempt})

    def ask(self) -> optuna.Trial:
        """The next trial, its values suggested."""
        samplers = optuna_module().samplers
        kind = {"tpe": samplers.TPESampler, "random": samplers.RandomSampler}[self._tune.sampler]
        # A seed of its own: one generator for all would begin again with the first values whenever a study goes on.
        seed = np.random.SeedSequence([self._tune.seed, len(self.finished)]).generate_state(1)
        self.optuna.sampler = kind(seed=int(seed[0]))
        trial = self.optuna.ask()
        for key in self._ranges.keys:
            _suggest(trial, key, self._ranges, self._tune)
        return trial

    def _refuse_another(self, out: Path, given: dict[str, str]) -> None:
        begun = self.optuna.user_attrs.get(_BEGUN_WITH, given)
        other = [key for key in {**begun, **given} if begun.get(key) != given.get(key)]
        if other == ["data"]:
            raise RecipeError(
                f"{out}: expected the data that its study was begun with, found others: choose another --out, or "
                "remove it"
            )
        if other:
            shown = ", ".join(
                f"{key} {given.get(key, 'left out')} (there: {begun.get(key, 'left out')})" for key in other[:_SHOWN]
            )
            more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
            raise RecipeError(
                f"{out}: expected the recipe that its study was begun with, received another {shown}{more}: choose "
                "another --out, or remove it"
            )


def _suggest(trial: optuna.Trial, key: str, ranges: Ranges, tune: TuneConfig) -> None:
    values = tune.ranges[key]
    if values.choices is not None:
        trial.suggest_categorical(key, list(ranges.choices(key)))
    elif values.low is not None and values.high is not None:
        if values.whole:
            trial.suggest_int(key, int(values.low), int(values.high), step=int(values.step or 1), log=values.log)
        else:
            trial.suggest_float(key, values.low, values.high, step=values.step, log=values.log)


def _settings(ranges: Ranges) -> dict[str, str]:
    """Everything that a study's figures depend on but for the data, by dotted key, as JSON."""
    places = {"train", "valid", "test", "queries", "labels"}
    tree = ranges.recipe.model_dump(mode="json", by_alias=True, exclude={"name": True, "data": places})
    tree["tune"] = ranges.tune.model_dump(mode="json", exclude={"trials"})
    own = {f"own.{name}": json.dumps(origin) for name, origin in ranges.recipe.own_rows.items()}
    return dict(flattened(tree)) | own


def reason_of(trial: optuna.trial.FrozenTrial) -> str | None:
    """Why a failed trial counts as refused; None of one that was interrupted, which is tried again."""
    if trial.user_attrs.get(_ATTEMPT, 1) >= _ATTEMPTS and REASON not in trial.user_attrs:
        return f"the process ended in each of {_ATTEMPTS} attempts at it"
    reason: str | None = trial.user_attrs.get(REASON)
    return reason


def values_of(params: Mapping[str, Any], ranges: Ranges) -> dict[str, Any]:
    """A trial's values by key, as a recipe has them, of what the study calls them."""
    chosen = {key: ranges.choices(key) for key in params}
    return {key: chosen[key][value] if chosen[key] else value for key, value in params.items()}


@contextmanager
def _quiet(module: Any) -> Iterator[None]:
    """Without Optuna's own lines, which come beside ours."""
    before = module.logging.get_verbosity()
    module.logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        module.logging.set_verbosity(before)
