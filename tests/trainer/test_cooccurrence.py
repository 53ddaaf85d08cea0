"""The term of co-occurrence: exact lists by brute force, histories, its choice on valid, and a whole job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Augmentation
from longtail.bundle.histories import LogPairs
from longtail.bundle.manifest import CooccurrenceSettings
from longtail.bundle.neighbours import cooccurrences
from longtail.trainer import RecipeError, evaluate, fit, load_recipe
from longtail.trainer.cooccurrence import choose_term
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.evaluation.cooccurrence import HistoryEntries, HistoryTerm
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.ranking import RankedModel, tower_lists
from longtail.trainer.evaluation.task import Task
from tests.trainer import tiny

SETTINGS = CooccurrenceSettings(default=1, maximum=4, kind="walk", power=0.3, last=4, decay=0.7, neighbours=5)


class World:
    """Random towers, known pairs and one held-out pair per query."""

    def __init__(self, queries: int = 30, labels: int = 40, *, bias: bool = False, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        known_pairs = tiny.pairs(
            *zip(np.repeat(np.arange(queries), 7), rng.integers(0, labels, 7 * queries), strict=True)
        )
        self.labels, self.config = labels, tiny.recipe(evaluation={"ks": [3, 8], "metric": "recall@3"}).evaluation
        self.past = Past.fixed(known_pairs, queries=queries)
        held_out = tiny.pairs(*zip(range(queries), rng.integers(0, labels, queries), strict=True))
        self.task = Task.create(held_out, self.past, self.config, labels=labels, seed=0)
        self.vectors = rng.normal(size=(queries, 4)).astype(np.float32)
        log_nu, log_pi = (np.log(rng.dirichlet(np.ones(labels))).astype(np.float32) for _ in range(2))
        self.side = LabelSide(
            embeddings=rng.normal(size=(labels, 4)).astype(np.float32), log_pn=log_nu,
            bias=rng.normal(size=labels).astype(np.float32) if bias else None, counts=np.ones(labels, np.int64),
            training_queries=queries, buckets=np.int8(rng.integers(0, 4, labels)), log_popularity=log_pi,
            augmentation=Augmentation(0.5, 1.0, 1.0 if bias else None, 1.0),
        )  # fmt: skip
        (term,) = cooccurrences(LogPairs(known_pairs.queries, known_pairs.labels), labels, [SETTINGS])
        self.term = term.scaled(20)

    def brute(self, setting: Setting, k: int) -> list[list[int]]:
        """The k best labels of every row by all scores."""
        weights, side = self.term.matrix().toarray(), self.side
        scores = self.vectors @ side.embeddings.T / 0.5 + setting.bias_removal * side.log_pn
        scores += setting.popularity * side.log_popularity + (0 if side.bias is None else side.bias)
        scores += np.array([0, setting.torso, setting.tail, setting.new])[side.buckets]
        best = []
        for i, row in enumerate(self.task.rows_N.tolist()):
            history = self.past.pairs.labels[7 * row : 7 * row + 7]
            c = sum(0.7**age * weights[label] for age, label in enumerate(history[::-1][:4]))
            of_row = scores[row] + setting.cooccurrence * c
            of_row[history] = -np.inf
            best.append(np.argsort(-of_row, kind="stable")[:k].tolist())
            assert i == len(best) - 1
        return best


GRID = [
    Setting(bias_removal, popularity, weight, *bonus)
    for bias_removal, popularity, *bonus in ((0.0, 0.0), (1.0, 0.0), (0.3, -0.5, 0.5, 2.0, 0.25))
    for weight in (0.0, 0.5, 20.0)
]


@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
@pytest.mark.parametrize("block", [256, 4])
def test_lists_with_the_term_equal_a_full_ranking(bias: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(bias=bias)
    monkeypatch.setattr("longtail.trainer.evaluation.cooccurrence._QUERIES", block)
    towers = list(dict.fromkeys(setting.of_towers for setting in GRID))
    lists, _ = tower_lists(world.task, RankedModel(lambda rows_B: world.vectors[rows_B], world.side), towers)
    term = HistoryTerm(world.term, HistoryEntries(world.past))
    top_SNK = lists.select_lists(GRID, term)
    changed = 0
    for setting, top_NK in zip(GRID, top_SNK, strict=True):
        assert top_NK.tolist() == world.brute(setting, 8), setting
        changed += top_NK.tolist() != world.brute(setting.of_towers, 8)
    assert changed == 6  # every ω > 0 moves some list
    assert lists.with_term(term, GRID, 2).tolist() == top_SNK[:, :, :2].tolist()
    hits_SNK = np.stack([world.task.positives.hits(top_NK) for top_NK in top_SNK])
    assert 0 < hits_SNK.sum() < hits_SNK.size
    alone_SNK = lists.with_term(term, GRID, positives=world.task.positives)
    for setting, alone_NK, top_NK, hits_NK in zip(GRID, alone_SNK, top_SNK, hits_SNK, strict=True):
        expected = np.where(hits_NK, top_NK, -1) if setting.cooccurrence else top_NK
        assert alone_NK.tolist() == expected.tolist(), setting


def test_rows_without_features_are_ranked_by_popularity_and_the_term() -> None:
    world, plain = World(bias=True), World(bias=True)
    unknown_N = world.task.rows_N % 3 == 0
    towers = list(dict.fromkeys(setting.of_towers for setting in GRID))
    model = RankedModel(
        lambda rows_B: world.vectors[rows_B], world.side, unknown=lambda rows_B: rows_B % 3 == 0
    )  # fmt: skip
    lists, _ = tower_lists(world.task, model, towers)
    top_SNK = lists.select_lists(GRID, HistoryTerm(world.term, HistoryEntries(world.past)))
    few_SNK = lists.select_rows(unknown_N).select_lists(GRID, HistoryTerm(world.term, HistoryEntries(world.past)))
    world.vectors[:], world.side.bias[:] = 0, 0
    for setting, top_NK, few_NK in zip(GRID, top_SNK, few_SNK, strict=True):
        weight = max(setting.cooccurrence, 3.0) if setting.cooccurrence else 0.0
        alone = setting._replace(bias_removal=0.0, popularity=1.0, cooccurrence=weight)
        popular, ranked = world.brute(alone, 8), plain.brute(setting, 8)
        expected = [
            by_popularity if unknown else by_scores
            for unknown, by_popularity, by_scores in zip(unknown_N, popular, ranked, strict=True)
        ]
        assert top_NK.tolist() == expected, setting
        assert few_NK.tolist() == [expected[row] for row in np.flatnonzero(unknown_N)]


def test_entries_are_the_last_of_selected_types() -> None:
    pairs = Pairs(np.int32([0, 0, 0, 0, 1]), np.int32([5, -1, 6, 7, 8]), events=np.int32([0, 0, 1, 0, 1]))
    past = Past.fixed(pairs, queries=3)
    rows = np.int32([1, 0, 2])
    every = HistoryEntries(past)
    assert every.padded(rows, 2).tolist() == [[-1, 8], [6, 7], [-1, -1]]
    labels, begins = every.last(rows, 9)
    assert (labels.tolist(), begins.tolist()) == ([8, 5, 6, 7], [0, 1, 4, 4])
    assert HistoryEntries(past, [0]).padded(rows, 2).tolist() == [[-1, -1], [5, 7], [-1, -1]]


def test_a_growing_past_is_read_event_by_event() -> None:
    known_pairs, held_out = tiny.pairs((0, 1)), tiny.pairs((0, 2), (0, 3))
    past = Past.growing(known_pairs, held_out, queries=1)
    assert HistoryEntries(past).padded(np.int32([0, 1]), 3).tolist() == [[-1, -1, 1], [-1, 1, 2]]


def test_least_popularity_is_chosen_within_chance() -> None:
    world, queries = World(), 30
    towers = [Setting(bias_removal) for bias_removal in (0.0, 0.5, 1.0)]
    lists, _ = tower_lists(world.task, RankedModel(lambda rows_B: world.vectors[rows_B], world.side), towers)
    unordered = tiny.dataset(world.past.pairs, queries=queries, labels=world.labels)
    ordered = replace(unordered, ordered=True)
    recipe = tiny.recipe(cooccurrence={"kinds": ["walk"], "weights": [0, 5]})
    of_towers = {lists.top_GNK[i].tobytes() for i in range(3)}
    facts = world.side.facts(world.config)

    def judge(_: Task, top_NK: np.ndarray) -> float:  # the more popularity, and the term, the better
        if top_NK.tobytes() in of_towers:
            return 0.0
        return 1 + float(world.side.log_pn[top_NK].mean()) / 100

    def settings(within: float, gain: float, dataset: Dataset = ordered) -> object:
        def error(_: np.ndarray, second_NK: np.ndarray) -> float:
            return gain if second_NK.tobytes() in of_towers else within

        entries = HistoryEntries(world.past)
        choice = choose_term(recipe, dataset, world.task, lists, entries, metric=judge, error=error, k=world.task.k)
        return None if choice is None else choice.best

    assert settings(within=0.0, gain=0.5) == Setting(1.0, 0.0, 5.0)
    assert settings(within=10.0, gain=0.5) == Setting(0.0, 0.0, 5.0)
    assert settings(within=10.0, gain=0.5, dataset=unordered) == Setting(1.0, 0.0, 5.0)
    assert settings(within=10.0, gain=2.0) == Setting(0.0)
    first_NK, second_NK = lists.top_GNK[0], lists.top_GNK[2]
    hits_N, other_N = (
        (top_NK[:, :3] == world.task.positives.label_rows[:, None]).any(axis=1) for top_NK in (first_NK, second_NK)
    )
    expected = np.std(hits_N.astype(float) - other_N) / np.sqrt(len(hits_N))
    assert expected > 0
    assert world.task.error("recall@3", first_NK, second_NK, facts) == pytest.approx(expected)


CHAIN = tiny.RECIPE.replace('"recall@5"', '"recall@3"') + "\n[cooccurrence]\n"


def write_chain(folder: Path, recipe: str = CHAIN) -> Path:
    """A log in which every user walks around a circle of 16 items: the last item says what is next."""
    recipe_path = tiny.write_job(folder, recipe=recipe)
    user, step = np.repeat(np.arange(60), 7), np.tile(np.arange(7), 60)
    item = (user * 5 + step * 3) % 16
    table = pa.table({"user_id": user, "item_id": item, "timestamp": np.arange(len(user))})
    pq.write_table(table, folder / "interactions.parquet")
    return recipe_path


def test_job_chooses_the_term_and_serves_it(tmp_path: Path) -> None:
    reporter, screen = tiny.record_output()
    bundle = fit(write_chain(tmp_path), tmp_path / "model", reporter, overrides=["training.refit=true"])
    term = bundle.manifest.cooccurrence
    assert term is not None
    assert bundle.cooccurrence is not None
    assert (term.kind, term.neighbours, term.maximum) == ("next", 20, 6)
    assert term.default > 0
    assert term.until is None  # the log has numbers, not dates
    assert "Co-occurrence on valid: next, β = " in screen.getvalue()
    stored = evaluate(tmp_path / "model")
    again = evaluate(tmp_path / "model", tmp_path / "recipe.toml")
    assert [Setting.read_point(point) for point in again.curve] == [Setting.read_point(point) for point in stored.curve]
    for point, repeated in zip(stored.curve, again.curve, strict=True):
        assert point.metrics == repeated.metrics, Setting.read_point(point)
    assert stored.value("recall@3") > 0.9 > stored.value("recall@3", bias_removal=1.0, cooccurrence=0.0)
    weights = {point.cooccurrence for point in stored.curve}
    assert weights >= {0.0, 0.05, 0.5, 3.0}
    metrics = json.loads((tmp_path / "model" / "metrics.json").read_text())
    assert {point["cooccurrence"] for point in metrics["curve"]} == weights
    assert b"Co-occurrence" in (tmp_path / "model" / "report.html").read_bytes()


def test_gain_within_chance_leaves_the_weight_to_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Task, "error", lambda *_: 1.0)
    reporter, screen = tiny.record_output()
    bundle = fit(write_chain(tmp_path), tmp_path / "model", reporter)
    settings = bundle.manifest.cooccurrence
    assert settings is not None
    assert settings.default == 0
    assert settings.maximum > 0
    assert bundle.cooccurrence is not None
    assert {point.cooccurrence for point in bundle.manifest.bias_removal.curve} >= {0, 0.1, 1}
    assert "its gain is within chance, so that requests alone set ω" in screen.getvalue()


def test_job_without_choices_has_no_term(tmp_path: Path) -> None:
    reporter, screen = tiny.record_output()
    recipe = tiny.write_job(tmp_path, recipe=tiny.RECIPE + "\n[cooccurrence]\nweights = [0]\n")
    bundle = fit(recipe, tmp_path / "model", reporter)
    assert bundle.manifest.cooccurrence is None
    assert bundle.cooccurrence is None
    assert "Co-occurrence: left out, because there is nothing to choose it from" in screen.getvalue()


def test_queries_without_history_feature_are_remembered(tmp_path: Path) -> None:
    alone = CHAIN.replace(
        '    { name = "history", kind = "history", table = "item_id", dim = 4, max_length = 8 },\n', ""
    )
    bundle = fit(write_chain(tmp_path, alone), tmp_path / "model", overrides=["cooccurrence.remember=3"])
    assert bundle.remembered is not None
    assert bundle.manifest.exclude_history
    assert bundle.calibration_histories is not None
    assert bundle.calibration_histories.shape == (len(bundle.calibration_queries), bundle.manifest.cooccurrence.last)
    ids = bundle.labels.ids.to_pylist()
    last = [ids[row] for row in bundle.remembered.history("2")]
    assert last == [str((10 + step * 3) % 16) for step in (3, 4, 5)]  # its last pair is test's


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("kinds = []", "cooccurrence.kinds: expected at least 1 of them"),
        ('kinds = ["lift"]', "cooccurrence.kinds.0: expected 'walk', 'cosine', 'next' or 'mixed', received 'lift'"),
        ("weights = [-1]", "cooccurrence.weights.0: expected at least 0, received -1"),
        ("betas = [1]", "cooccurrence.betas: expected one of kinds, weights, remember, received an unknown key"),
    ],
)
def test_wrong_keys_are_refused(section: str, message: str, tmp_path: Path) -> None:
    recipe = tiny.write_job(tmp_path, recipe=tiny.RECIPE + f"\n[cooccurrence]\n{section}\n")
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe)
