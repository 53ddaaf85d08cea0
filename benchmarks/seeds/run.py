"""Training of a study's methods: a search of each method's grid on validation, then measurement on test.

A step that is compiled for one seed serves other seeds, because a seed only changes the values of variables.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.seeds.measure import HeldOut, Measured, measure, popularity_side
from benchmarks.seeds.store import Record, Store, key_of, pack_values, protocol_of
from benchmarks.seeds.study import POPULARITY, SEEDS, Ladder, Method, Study
from longtail.bundle import log_frequencies
from longtail.trainer.config import Recipe, load_recipe
from longtail.trainer.data.batches import epoch_batches, one_per_query
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.loading import load_dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.run import Run, prepare_run
from longtail.trainer.trained import Trained

_VALID_QUERIES = 2_000
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
"""Sections of recipes at the time of the studies, outside of the protocol; the recipes have changed since."""


@dataclass(frozen=True)
class Bench:
    """Run one study on data that are loaded once."""

    study: Study
    data: Path
    store: Store
    work: Path
    console: Console

    def recipe(self, method: Method, choice: dict[str, float], seed: int) -> Recipe:
        """Return the data set's recipe of the study's time, with this run's changes."""
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
            held_out = np.isin(dataset.train.queries, rng.choice(rows, int(_HELD_OUT_ROWS * len(rows)), replace=False))
            dataset = replace(dataset, train=dataset.train.take(~held_out), valid=dataset.train.take(held_out))
        if self.study.max_pairs is not None and len(dataset.train) > self.study.max_pairs:
            selected = np.random.default_rng(0).choice(len(dataset.train), self.study.max_pairs, replace=False)
            dataset = replace(dataset, train=dataset.train.take(np.sort(selected)))
        return dataset

    def held_out(self, pairs: Pairs, earlier: Pairs, recipe: Recipe, at_most: int | None = None) -> HeldOut:
        """Group pairs of valid or test for ranking."""
        return HeldOut.collect(
            pairs, earlier, labels=len(self.dataset.label_ids),
            exclude_seen=recipe.evaluation.exclude_seen, most=at_most,
        )  # fmt: skip

    def measure(self, trained: Trained, split: str, grid: tuple[float, ...]) -> dict[float, Measured]:
        """Measure a model on `valid` or `test`."""
        earlier = self.dataset.train if split == "valid" else self.dataset.train.merge_later(self.dataset.valid)
        pairs = self.dataset.valid if split == "valid" else self.dataset.test
        features = trained.encoding.query.with_history(Past.fixed(earlier, queries=len(self.dataset.query_ids)))
        at_most = _VALID_QUERIES if split == "valid" else None
        return measure(
            self.held_out(pairs, earlier, trained.recipe, at_most),
            lambda rows_B: trained.model.embed_queries(features.query_inputs(rows_B)),
            trained.label_side(),
            trained.recipe.evaluation,
            grid,
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
        if seed == SEEDS[0] and key in best:
            record, run = first, best[key]
        else:
            run = self.prepare(method, choice, seed, compiled=best.get(key))
            record = self._trained(method, choice, seed, run)
            best[key] = run
        lam = record.bias_removal = first.bias_removal
        if np.isfinite(record.valid):
            self._keep(record, self.measure(run.trained, "test", tuple(dict.fromkeys((*self.study.grid, lam)))))
        self.store.put(record)

    def _keep(self, record: Record, measured: dict[float, Measured]) -> None:
        """Add test figures to a record: metrics at every λ, and values per query at the λ of contrasts."""
        names = [name for name in self.study.show if name in next(iter(measured.values())).metrics]
        record.test = {f"{at:g}": {name: round(it.metrics[name], 6) for name in names} for at, it in measured.items()}
        contributions = measured[self.study.grid[0]].contributions
        record.values |= {
            f"{name}@{self.study.grid[0]:g}": pack_values(contributions[name])
            for name in self.study.compare
            if name in contributions
        }

    def prepare(self, method: Method, choice: dict[str, float], seed: int, *, compiled: Run | None = None) -> Run:
        """Prepare a new run, with the compiled step of another seed, if given."""
        recipe = self.recipe(method, choice, seed)
        run = prepare_run(recipe, self.dataset, epochs=self.study.epochs, work=self.work)
        if compiled is None:
            return run
        for variable, value in zip(compiled.trained.step.variables, run.trained.step.variables, strict=True):
            variable.assign(value)
        return replace(compiled, trained=replace(compiled.trained, recipe=recipe, history=run.trained.history))

    def _trained(self, method: Method, choice: dict[str, float], seed: int, run: Run) -> Record:
        """Train a prepared run; return its figures on valid, −∞ if the loss becomes infinite or NaN."""
        record = Record(
            self.study.name, method.name, choice, seed, protocol_of(self.study, method), float("-inf"), 0.0, 0.0,
            len(self.dataset.label_ids), len(self.dataset.train),
        )  # fmt: skip
        record.seconds, loss = train(run, self.study.epochs)
        if not np.isfinite(loss):
            return record
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
        if key_of(POPULARITY, {}, SEEDS[0]) in self.store.records(self.study):
            return
        dataset, run = self.dataset, self.prepare(self.study.methods[1], {}, SEEDS[0])
        recipe = run.trained.recipe
        visits_L = dataset.label_visits(one_label_per_query=recipe.data.reduction == "sample")
        log_pi_L = log_frequencies(visits_L, smoothing=0.5).astype(np.float32)
        earlier = dataset.train.merge_later(dataset.valid)
        measured = measure(
            self.held_out(dataset.test, earlier, recipe),
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


def train(run: Run, epochs: int) -> tuple[float, float]:
    """Train a prepared run; return CPU seconds after the first step, which compiles, and the last loss."""
    trained, started = run.trained, time.process_time()
    loss: Any = 0.0
    sampled = trained.recipe.data.reduction == "sample"
    visits = partial(one_per_query, trained.dataset.train) if sampled else None
    for epoch in range(epochs):
        trained.step.begin_epoch()
        batches = epoch_batches(
            trained.dataset.train, trained.encoding.query, trained.step.terms, batch_size=run.batch_size,
            seed=trained.recipe.seed, epoch=epoch, visits=visits,
        )  # fmt: skip
        for step, (_, batch) in enumerate(batches):
            loss = trained.step(batch)
            if epoch == step == 0:
                float(loss)
                started = time.process_time()
    return round(time.process_time() - started, 2), float(loss)


def climb(grid: tuple[Ladder, ...], valid: Callable[[dict[str, float]], float]) -> dict[str, float]:
    """Find the choice with the best `valid`, ladder by ladder; the choice nearer to the start breaks ties.

    On a ladder, both neighbours of the best value are tried until neither is better.
    """
    choice = {ladder.key: ladder.values[ladder.start] for ladder in grid}
    for ladder in grid:
        scores: dict[int, float] = {}
        i = ladder.start
        while True:
            for rung in (i, i - 1, i + 1):
                if 0 <= rung < len(ladder.values) and rung not in scores:
                    scores[rung] = valid(choice | {ladder.key: ladder.values[rung]})
            best = max(scores, key=lambda rung: (scores[rung], -abs(rung - ladder.start)))
            if best == i:
                break
            i = best
        choice[ladder.key] = ladder.values[i]
    return choice
