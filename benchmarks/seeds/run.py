"""Training of a study's methods: a search of each method's grid on validation, then measurement on test.

A step that is compiled for one seed serves other seeds, because a seed only changes the values of variables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.seeds.measure import HeldOut, Measured, measure, popularity_side
from benchmarks.seeds.store import Record, Store, key_of, pack_values, protocol_of
from benchmarks.seeds.study import POPULARITY, SEEDS, Ladder, Method, Study
from longtail.bundle import log_frequencies
from longtail.trainer.checkpoint import identity_of
from longtail.trainer.config import Recipe, load_recipe
from longtail.trainer.data.batches import epoch_batches, one_per_query
from longtail.trainer.data.dataset import Dataset, load_dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.evaluation.ranking import log_proposal_of
from longtail.trainer.train import Run, prepare_run
from longtail.trainer.trained import Trained

_VALID_QUERIES, _MOMENTS = 2_000, 4
_HELD_OUT_ROWS = 0.1
AS_MEASURED: dict[str, dict[str, str]] = {
    "delicious": {"loss": '{ sampler = "full" }'},
    "amazon-beauty": {
        "query": '{ combine = "sum", features = [{ name = "user_id", kind = "id" }, '
        '{ name = "history", kind = "history", table = "item_id", max_length = 20 }] }',
        "model": "{ temperature = 0.1 }",
        "loss": "{}",
        "optimizer": "{ embedding_learning_rate = 0.01 }",
        "training": "{ batch_size = 1024 }",
        "evaluation": "{}",
    },
}
"""Sections of recipes at the time of the studies; the recipes have changed since.

They are not part of the protocol, which covers only a study's own settings.
"""


class OutOfTimeError(Exception):
    """Report that the caller's time is over; measured records are kept."""


@dataclass(frozen=True)
class Bench:
    """Run one study on data that are loaded once; no run begins after `deadline` (`time.monotonic()`)."""

    study: Study
    data: Path
    store: Store
    work: Path
    deadline: float
    console: Console

    def recipe(self, method: Method, choice: dict[str, float], seed: int) -> Recipe:
        """Return the data set's recipe at the time of the study, with the changes of this run."""
        before = AS_MEASURED.get(self.study.data, {})
        settings = {
            **before,
            **self.study.settings,
            **method.settings,
            **{key: f"{value:g}" for key, value in choice.items()},
        }
        recipe = load_recipe(
            self.data / self.study.data / "recipe.toml", [f"{key}={value}" for key, value in settings.items()]
        )
        return recipe.model_copy(update={"seed": seed})

    @cached_property
    def dataset(self) -> Dataset:
        """Load train, valid and test pairs; the split and the cap always use seed 0."""
        recipe = self.recipe(self.study.methods[1], {}, 0)
        dataset = load_dataset(recipe.data, seed=0)
        if self.study.hold_out == "rows":
            rng = np.random.default_rng(0)
            rows = np.unique(dataset.train.queries)
            held = np.isin(dataset.train.queries, rng.choice(rows, int(_HELD_OUT_ROWS * len(rows)), replace=False))
            dataset = replace(dataset, train=dataset.train.take(~held), valid=dataset.train.take(held))
        if self.study.max_pairs is not None and len(dataset.train) > self.study.max_pairs:
            kept = np.random.default_rng(0).choice(len(dataset.train), self.study.max_pairs, replace=False)
            dataset = replace(dataset, train=dataset.train.take(np.sort(kept)))
        return dataset

    def held_out(self, pairs: Pairs, known: Pairs, recipe: Recipe, at_most: int | None = None) -> HeldOut:
        """Group pairs of valid or test for ranking."""
        return HeldOut.of(
            pairs, known, labels=len(self.dataset.label_ids),
            exclude_seen=recipe.evaluation.exclude_seen, at_most=at_most,
        )  # fmt: skip

    def measure(self, trained: Trained, split: str, grid: tuple[float, ...]) -> dict[float, Measured]:
        """Measure a model on `valid` or `test`."""
        known = self.dataset.train if split == "valid" else self.dataset.train.merge_later(self.dataset.valid)
        pairs = self.dataset.valid if split == "valid" else self.dataset.test
        features = trained.encoding.query.with_history(Past.fixed(known, queries=len(self.dataset.query_ids)))
        at_most = _VALID_QUERIES if split == "valid" else None
        return measure(
            self.held_out(pairs, known, trained.recipe, at_most),
            lambda rows_B: trained.model.embed_queries(features.query_inputs(rows_B)),
            trained.label_side(),
            trained.recipe.evaluation,
            grid,
            log_proposal=log_proposal_of(trained.model.proposal, features),
        )

    def finish(self, method: Method) -> None:
        """Complete a method: choose on validation with the first seed, then measure every seed on test."""
        if method.name == POPULARITY:
            self._popularity(method)
            return
        best: dict[str, Run] = {}
        choice = climb(method.grid, lambda choice: self._tuned(method, choice, best).valid)
        first = self._tuned(method, choice, best)
        for seed in SEEDS:
            done = self.store.records(self.study).get(key_of(method.name, choice, seed))
            if done is None or not done.test:
                self._tested(method, choice, seed, first, best)

    def _tuned(self, method: Method, choice: dict[str, float], best: dict[str, Run]) -> Record:
        """Return the record of a choice with the first seed, trained if needed; `best` keeps the best model."""
        records = self.store.records(self.study)
        key = key_of(method.name, choice, SEEDS[0])
        if key not in records:
            run = self.prepare(method, choice, SEEDS[0])
            records[key] = self._trained(method, choice, SEEDS[0], run)
            rivals = [it.valid for it in records.values() if it.method == method.name and it.seed == SEEDS[0]]
            if records[key].valid == max(rivals):
                best.clear()
                best[key] = run
            self.store.put(records[key])
        return records[key]

    def _tested(self, method: Method, choice: dict[str, float], seed: int, first: Record, best: dict[str, Run]) -> None:
        """Measure a choice on test; the first seed uses the model of the tuning, if it is in memory."""
        key = key_of(method.name, choice, SEEDS[0])
        if seed == SEEDS[0] and key in best and not self.study.timed:
            record, run = first, best[key]
        else:
            run = self.prepare(method, choice, seed, compiled=best.get(key))
            record = self._trained(
                method, choice, seed, run, moments_at=first.bias_removal if self.study.timed else None
            )
            best[key] = run
        lam = record.bias_removal = first.bias_removal
        if np.isfinite(record.valid):
            self._keep(record, self.measure(run.trained, "test", tuple(dict.fromkeys((*self.study.grid, lam)))))
        self.store.put(record)

    def _keep(self, record: Record, measured: dict[float, Measured]) -> None:
        """Add test figures to a record: metrics at every λ, and values per query at the λ of contrasts."""
        names = [name for name in self.study.show if name in next(iter(measured.values())).metrics]
        record.test = {f"{at:g}": {name: round(it.metrics[name], 6) for name in names} for at, it in measured.items()}
        trained = self.study.shown_at == "trained"
        kept = (self.study.grid[0],) if trained else (record.bias_removal, record.likely_at)
        record.values |= {
            f"{name}@{at:g}": pack_values(measured[at].contributions[name])
            for at in dict.fromkeys(kept)
            if at in measured
            for name in self.study.compare
            if name in measured[at].contributions
        }

    def prepare(self, method: Method, choice: dict[str, float], seed: int, *, compiled: Run | None = None) -> Run:
        """Prepare a new run, with the compiled step of another seed, if given."""
        if time.monotonic() > self.deadline:
            raise OutOfTimeError
        recipe = self.recipe(method, choice, seed)
        mine = self.work / f"proposal-{identity_of(recipe, self.dataset)[:16]}.npz"
        fitted = next(iter(sorted(self.work.glob("proposal-*.npz"))), None)
        if recipe.loss.sampler.name == "adversarial" and fitted is not None and not mine.exists():
            mine.hardlink_to(fitted)  # the tree depends only on the pairs, not on learning rate or seed
        started = time.process_time()
        run = prepare_run(recipe, self.dataset, epochs=self.study.epochs * method.length, work=self.work)
        if fitted is None and mine.exists():
            self._tree_seconds.write_text(f"{time.process_time() - started:.2f}", encoding="utf-8")
        if compiled is None:
            return run
        for variable, value in zip(compiled.trained.step.variables, run.trained.step.variables, strict=True):
            variable.assign(value)
        return replace(compiled, trained=replace(compiled.trained, recipe=recipe, history=run.trained.history))

    @property
    def _tree_seconds(self) -> Path:
        """Name the file with the time of the tree's fit, which counts for methods that draw from the tree."""
        return self.work / "tree-seconds.txt"

    def _trained(
        self, method: Method, choice: dict[str, float], seed: int, run: Run, *, moments_at: float | None = None
    ) -> Record:
        """Train a prepared run; return its figures on valid, and on test during training at λ = `moments_at`.

        A run whose loss becomes infinite or NaN has −∞ on valid.
        """
        record = Record(
            self.study.name, method.name, choice, seed, protocol_of(self.study, method), float("-inf"), 0.0, 0.0,
            len(self.dataset.label_ids), len(self.dataset.train), method.likely_at,
        )  # fmt: skip
        tree = run.trained.model.proposal is not None
        seconds = float(self._tree_seconds.read_text(encoding="utf-8")) if tree else 0.0
        for spent, loss in train(run, self.study.epochs * method.length):
            seconds += spent
            record.seconds = round(seconds, 2)
            if not np.isfinite(loss):
                return record
            if moments_at is not None:
                measured = self.measure(run.trained, "test", tuple(dict.fromkeys((moments_at, method.likely_at))))
                moment = len(record.curve)
                record.values |= {
                    f"{name}#{moment}": pack_values(measured[moments_at].contributions[name])
                    for name in self.study.compare
                }
                metrics = {
                    name: measured[method.likely_at if name == "log_likelihood" else moments_at].metrics[name]
                    for name in self.study.show
                }
                record.curve.append(
                    {"seconds": record.seconds} | {name: round(value, 6) for name, value in metrics.items()}
                )
        by_lambda = self.measure(run.trained, "valid", self.study.grid)
        record.bias_removal = max(by_lambda, key=lambda at: (by_lambda[at].metrics[self.study.choose_by], -at))
        record.valid = round(by_lambda[record.bias_removal].metrics[self.study.choose_by], 6)
        self.console.print(
            f"{self.study.name} · {key_of(method.name, choice, seed)} · {record.seconds:.1f} s · "
            f"{self.study.choose_by} {record.valid:.4f} at λ = {record.bias_removal:g}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        return record

    def _popularity(self, method: Method) -> None:
        """Measure all labels by their training pairs."""
        if self.store.records(self.study):
            done = self.store.records(self.study).get(key_of(POPULARITY, {}, SEEDS[0]))
            if done is not None:
                return
        dataset, run = self.dataset, self.prepare(self.study.methods[1], {}, SEEDS[0])
        recipe = run.trained.recipe
        visits_L = dataset.label_visits(one_label_per_query=recipe.data.reduction == "sample")
        log_pi_L = log_frequencies(visits_L, smoothing=0.5).astype(np.float32)
        known = dataset.train.merge_later(dataset.valid)
        measured = measure(
            self.held_out(dataset.test, known, recipe),
            lambda rows_B: np.zeros((len(rows_B), 1), np.float32),
            popularity_side(run.trained.label_side(), log_pi_L),
            recipe.evaluation,
            (1.0,),
        )
        record = Record(
            self.study.name, POPULARITY, {}, SEEDS[0], protocol_of(self.study, method), 0.0, self.study.grid[0], 0.0,
            len(dataset.label_ids), len(dataset.train),
        )  # fmt: skip
        self._keep(record, {self.study.grid[0]: measured[1.0]})
        self.store.put(record)


def train(run: Run, epochs: int) -> Iterator[tuple[float, float]]:
    """Train a prepared run; yield CPU seconds and the last loss after every quarter of the steps.

    Time excludes the first step, whose compilation takes seconds that would not matter in a longer training.
    """
    trained, batches = run.trained, epochs * run.steps_per_epoch
    moments = {max(1, batches * at // _MOMENTS) for at in range(1, _MOMENTS + 1)}
    sampled = trained.recipe.data.reduction == "sample"
    visits = partial(one_per_query, trained.dataset.train) if sampled else None
    step_number, started = 0, time.process_time()
    for epoch in range(epochs):
        trained.step.begin_epoch()
        for _, batch in epoch_batches(
            trained.dataset.train, trained.encoding.query, trained.step.methods, batch_size=run.batch_size,
            seed=trained.recipe.seed, epoch=epoch, visits=visits,
        ):  # fmt: skip
            loss = trained.step(batch)
            step_number += 1
            if step_number == 1:
                float(loss)
                started = time.process_time()
            if step_number in moments:
                yield time.process_time() - started, float(loss)
                started = time.process_time()


def climb(grid: tuple[Ladder, ...], valid: Callable[[dict[str, float]], float]) -> dict[str, float]:
    """Find the choice with the best `valid`, ladder by ladder; the choice nearer to the start breaks ties.

    On a ladder, both neighbours of the best value are tried until neither is better.
    """
    choice = {ladder.key: ladder.values[ladder.start] for ladder in grid}
    for ladder in grid:
        scores: dict[int, float] = {}
        at = ladder.start
        while True:
            for place in (at, at - 1, at + 1):
                if 0 <= place < len(ladder.values) and place not in scores:
                    scores[place] = valid(choice | {ladder.key: ladder.values[place]})
            best = max(scores, key=lambda place: (scores[place], -abs(place - ladder.start)))
            if best == at:
                break
            at = best
        choice[ladder.key] = ladder.values[at]
    return choice
