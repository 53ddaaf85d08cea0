import dataclasses
from typing import Any

import numpy as np
import pytest

from longtail.bundle import Augmentation, Buckets, CurvePoint, Interval
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.data.past import Past
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.dial import Noise, Setting, best_dial, lines
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.ranking import RankedModel, bias_removal_curve, rank
from longtail.trainer.limits import check_choice
from tests.trainer import tiny

QUERIES, L, D, T = 12, 9, 4, 0.3
GRID = [-0.5, 0.0, 0.7, 2.0]
rng = np.random.default_rng(1)
USERS = rng.standard_normal((QUERIES, D)).astype(np.float32)
ITEMS = rng.standard_normal((L, D)).astype(np.float32)
BIAS = rng.standard_normal(L).astype(np.float32)
COUNTS = np.array([50, 30, 9, 9, 4, 2, 1, 1, 0])
LOG_PN = np.log((COUNTS + 0.5) / (COUNTS.sum() + L / 2))
KNOWN_PAIRS = tiny.pairs(*[(query, label) for query in range(QUERIES) for label in rng.permutation(L)[:3]]).sorted()
PAST = Past.fixed(KNOWN_PAIRS, queries=QUERIES)
HELD_OUT = tiny.pairs(*[(query, label) for query in range(1, QUERIES) for label in rng.permutation(L)[:3]])


def embed(rows: np.ndarray) -> np.ndarray:
    return USERS[rows]


def label_side(*, bias: bool = True) -> LabelSide:
    return LabelSide.build(
        ITEMS, BIAS if bias else None, COUNTS, training_queries=100, temperature=T, log_pn=LOG_PN.astype(np.float32),
        buckets=Buckets.by_quantile(COUNTS),
    )  # fmt: skip


def model(*, bias: bool = True) -> RankedModel:
    return RankedModel(embed, label_side(bias=bias))


def config(**changes: object) -> EvaluationConfig:
    defaults = {"ks": [2, 4], "metric": "recall@2", "bias_removal": GRID, "bootstrap": 10}
    return EvaluationConfig.model_validate(defaults | changes)


def brute_force(bias_removal: float, k: int, *, bias: bool, exclude_seen: bool) -> dict[str, float]:
    """Recall, nDCG and hit rate of sorted scores, query by query."""
    recalls, gains, hits = [], [], []
    for query in range(QUERIES):
        seen_labels = set(KNOWN_PAIRS.labels[KNOWN_PAIRS.queries == query].tolist()) if exclude_seen else set()
        held_out = set(HELD_OUT.labels[HELD_OUT.queries == query].tolist()) - seen_labels
        if not held_out:
            continue
        scores = ITEMS @ USERS[query] / T + bias * BIAS + bias_removal * LOG_PN
        ranking = [label for label in np.argsort(-scores).tolist() if label not in seen_labels][:k]
        is_hit = [label in held_out for label in ranking]
        recalls.append(sum(is_hit) / len(held_out))
        hits.append(any(is_hit))
        ideal = sum(1 / np.log2(i + 2) for i in range(min(len(held_out), k)))
        gains.append(sum(hit / np.log2(i + 2) for i, hit in enumerate(is_hit)) / ideal)
    return {f"recall@{k}": np.mean(recalls), f"ndcg@{k}": np.mean(gains), f"hit_rate@{k}": np.mean(hits)}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("exclude_seen", [True, False], ids=["unseen", "all"])
@pytest.mark.parametrize("block_bytes", [1 << 20, 4 * L * 5], ids=["one block", "blocks of 5"])
def test_evaluation_equals_sorting_every_score(
    bias: bool, exclude_seen: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longtail.trainer.evaluation.ranking._BLOCK_BYTES", block_bytes)

    curve = bias_removal_curve(HELD_OUT, PAST, model(bias=bias), config(exclude_seen=exclude_seen), seed=0)

    assert [point.bias_removal for point in curve] == GRID
    for point in curve:
        for k in (2, 4):
            expected = brute_force(point.bias_removal, k, bias=bias, exclude_seen=exclude_seen)
            assert {name: point.metrics[name].value for name in expected} == pytest.approx(expected, abs=1e-6)


def test_propensity_scores_follow_counts_and_training_queries() -> None:
    """1 / p_y = 1 + 2 (ln 100 − 1) / (N_y + 1), and every query reaches a share of its own best."""
    inverse = 1 + 2 * (np.log(100) - 1) / (COUNTS + 1)

    (point,) = bias_removal_curve(
        HELD_OUT, PAST, model(), config(propensity=[1, 1], bias_removal=[0.7]), seed=0,
    )  # fmt: skip

    reached, best = 0.0, 0.0
    for query in range(QUERIES):
        seen_labels = KNOWN_PAIRS.labels[KNOWN_PAIRS.queries == query]
        held_out = np.setdiff1d(HELD_OUT.labels[HELD_OUT.queries == query], seen_labels)
        scores = ITEMS @ USERS[query] / T + BIAS + 0.7 * LOG_PN
        scores[seen_labels] = -np.inf
        top = np.argsort(-scores)[:2]
        reached += inverse[np.intersect1d(top, held_out)].sum()
        best += np.sort(inverse[held_out])[::-1][:2].sum()
    assert point.metrics["psp@2"].value == pytest.approx(reached / best)
    assert not any(name.startswith("ps") for name in bias_removal_curve(
        HELD_OUT, PAST, model(), config(), seed=0
    )[0].metrics)  # fmt: skip


def test_rankings_exclude_seen_labels_and_end_with_padding() -> None:
    known_pairs = tiny.pairs(*[(0, label) for label in range(L - 2)], (1, 3))
    past = Past.fixed(known_pairs, queries=2)

    top, likelihoods = rank(np.int32([0, 1]), model(), past, [Setting(0.0), Setting(1.0)], k=L)

    assert likelihoods == [None, None]

    assert top.shape == (2, 2, L)
    for ranking in top[:, 0].tolist():
        assert sorted(ranking[:2]) == [L - 2, L - 1]
        assert ranking[2:] == [-1] * (L - 2)
    for ranking in top[:, 1].tolist():
        assert sorted(ranking) == [-1, 0, 1, 2, 4, 5, 6, 7, 8]
        assert ranking[-1] == -1


def log_softmax(scores: np.ndarray) -> np.ndarray:
    return scores - np.logaddexp.reduce(scores)


@pytest.mark.parametrize("calibrated_at", GRID)
def test_log_likelihood_is_the_mean_log_softmax_over_ranked_labels(calibrated_at: float) -> None:
    curve = bias_removal_curve(
        HELD_OUT, PAST, RankedModel(embed, label_side(), calibrated_at=calibrated_at), config(log_likelihood=True),
        seed=0,
    )  # fmt: skip

    for point in curve:
        if point.bias_removal != calibrated_at:
            assert "log_likelihood" not in point.metrics, "its scores are no log-probabilities"
            continue
        log_likelihoods = []
        for query in range(QUERIES):
            unseen = np.setdiff1d(np.arange(L), KNOWN_PAIRS.labels[KNOWN_PAIRS.queries == query])
            scores = ITEMS[unseen] @ USERS[query] / T + BIAS[unseen] + point.bias_removal * LOG_PN[unseen]
            is_held_out = np.isin(unseen, HELD_OUT.labels[HELD_OUT.queries == query])
            log_likelihoods += log_softmax(scores)[is_held_out].tolist()
        interval = point.metrics["log_likelihood"]
        assert interval.value == pytest.approx(np.mean(log_likelihoods), rel=1e-5)
        assert interval.low < interval.value < interval.high


def test_repeated_and_weighted_pairs_count_in_the_likelihood() -> None:
    """Of 20 pairs of one query, as p has them: −Σ p log p, above any other distribution; recall is of labels."""
    times_L = np.array([9, 5, 3, 1, 1, 1, 0, 0, 0])
    repeated = tiny.pairs(*[(0, label) for label in np.repeat(np.arange(L), times_L)])
    weighed = tiny.pairs(*[(0, label) for label in range(6)], weights=times_L[:6])
    logs = {"p": np.log(np.maximum(times_L, 1e-9) / 20), "even": np.zeros(L)}

    def measured(pairs: Any, log_p_L: np.ndarray) -> dict[str, float]:
        side = dataclasses.replace(label_side(), embeddings=ITEMS * 0, bias=log_p_L.astype(np.float32))
        (point,) = bias_removal_curve(
            pairs, PAST, RankedModel(embed, side, calibrated_at=0.0),
            config(log_likelihood=True, exclude_seen=False, ks=[3], metric="recall@3"), seed=0, settings=[Setting(0.0)],
        )  # fmt: skip
        return {name: interval.value for name, interval in point.metrics.items()}

    for pairs in (repeated, weighed):
        p = times_L[:6] / 20
        assert measured(pairs, logs["p"])["log_likelihood"] == pytest.approx(p @ np.log(p), rel=1e-5)
        assert measured(pairs, logs["even"])["log_likelihood"] == pytest.approx(-np.log(L), rel=1e-5)
        assert measured(pairs, logs["p"])["recall@3"] == 0.5


def test_labels_without_training_pairs_are_outside_the_likelihood() -> None:
    """Label 8 has no training pairs; its score is no log-probability, and moving it by 10 nats changes nothing."""
    far = dataclasses.replace(label_side(), bias=BIAS + 10 * (COUNTS == 0).astype(np.float32))
    held_out = HELD_OUT.take(HELD_OUT.labels != 8)
    assert len(held_out) < len(HELD_OUT)

    def likelihood(side: LabelSide, pairs: Any, *, described: bool) -> float:
        (point,) = bias_removal_curve(
            pairs, PAST, RankedModel(embed, side, calibrated_at=0.7, described=described), config(log_likelihood=True),
            seed=0, settings=[Setting(0.7)],
        )  # fmt: skip
        return point.metrics["log_likelihood"].value

    with_it = likelihood(label_side(), held_out, described=False)
    without_it = likelihood(label_side(), held_out, described=True)
    assert without_it > with_it
    assert likelihood(far, held_out, described=True) == pytest.approx(without_it)
    assert likelihood(far, HELD_OUT, described=True) == pytest.approx(without_it), "nor are pairs of such labels"


LOG_NU = np.log(rng.dirichlet(np.ones(L)))


@pytest.mark.parametrize("log_proposal", [None, np.log(np.random.default_rng(4).dirichlet(np.ones(L), QUERIES))])
def test_noise_and_prior_have_separate_dials(log_proposal: np.ndarray | None) -> None:
    """`f + λ·log ν + μ·log π`; beside a tree ν is the tree, and the labels' one column is log π."""
    tree = log_proposal is not None
    side = LabelSide.build(
        ITEMS, BIAS, COUNTS, training_queries=100, temperature=T, buckets=Buckets.by_quantile(COUNTS),
        log_pn=np.float32(LOG_PN if tree else LOG_NU), log_popularity=None if tree else np.float32(LOG_PN),
    )  # fmt: skip
    settings = [Setting(0.0), Setting(1.0), Setting(0.7, -0.5, 0), Setting(0.0, 2.0)]

    log_p = (lambda rows: log_proposal[rows].astype(np.float32)) if tree else None
    top, _ = rank(np.arange(QUERIES, dtype=np.int32), RankedModel(embed, side, log_p), None, settings, k=L)

    assert side.rows().shape == (L, D + (2 if tree else 3))
    for at, (bias_removal, popularity, *_) in enumerate(settings):
        noise = log_proposal if tree else LOG_NU
        scores = USERS @ ITEMS.T / T + BIAS + bias_removal * noise + popularity * LOG_PN
        np.testing.assert_array_equal(top[at], np.argsort(-scores, axis=1))


def point(setting: Setting, recall: float) -> CurvePoint:
    return CurvePoint(
        bias_removal=setting.bias_removal, popularity=setting.popularity, metrics={"recall@2": Interval(value=recall)}
    )  # fmt: skip


def measure(settings: list[Setting]) -> list[CurvePoint]:
    """Best at λ = ¾, μ = ¼; at μ = 0 the best λ of the grid is 0.7."""
    return [point(at, -((at.bias_removal - 0.75) ** 2) - (at.popularity - 0.25) ** 2) for at in settings]


@pytest.mark.parametrize("tree", [False, True], ids=["frequencies", "tree"])
@pytest.mark.parametrize("block_bytes", [1 << 20, 4 * 700 * 5], ids=["one block", "blocks of 5"])
def test_lists_of_two_lines_equal_a_sort_with_ties(
    tree: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of few bits: every score is exact in float32, in any order of its sum, and many are equal."""
    monkeypatch.setattr("longtail.trainer.evaluation.ranking._BLOCK_BYTES", block_bytes)
    labels, k, few = 700, 8, np.random.default_rng(9)
    users, items = few.integers(-2, 3, (QUERIES, D)) / 2, few.integers(-2, 3, (labels, D)) / 2
    bias, log_nu, log_pi = few.integers(-4, 5, (3, labels)) / 4
    of_queries = few.integers(-4, 5, (QUERIES, labels)) / 4
    side = LabelSide(
        np.float32(items), np.float32(log_pi if tree else log_nu), np.float32(bias), np.ones(labels, np.int64), 100,
        np.int8(few.integers(0, 4, labels)), Augmentation(0.5, 2.0, 0.25, None if tree else 4.0),
        None if tree else np.float32(log_pi),
    )  # fmt: skip
    first_line, second_line = map(Setting, (-0.5, 0, 0.25, 1)), [Setting(0.25, at) for at in (-1, 0.5)]
    settings = [*first_line, *second_line, Setting(0, 2), Setting(-64, 32)]
    settings += [Setting(0.25, tail=at, new=at) for at in (0.5, 64)] + [Setting(1, -1, torso=0.75, tail=-0.25)]
    seen_QL = few.random((QUERIES, labels)) < 0.1
    past = Past.fixed(tiny.pairs(*np.argwhere(seen_QL)), queries=QUERIES)

    log_p = (lambda rows: np.float32(of_queries[rows])) if tree else None
    model = RankedModel(lambda rows: np.float32(users[rows]), side, log_p)
    top, _ = rank(np.arange(QUERIES, dtype=np.int32), model, past, settings, k=k)

    for at, (bias_removal, popularity, _, torso, tail, new) in enumerate(settings):
        noise = of_queries if tree else log_nu
        bonus = np.array([0, torso, tail, new])[side.buckets]
        scores = np.where(
            seen_QL, -np.inf, users @ items.T / 0.5 + bias + bias_removal * noise + popularity * log_pi + bonus
        )
        assert len(np.unique(scores[0])) < 500, "ties"
        np.testing.assert_array_equal(top[at], np.argsort(-scores, axis=1, kind="stable")[:, :k])


def test_prior_is_chosen_after_the_noise_if_they_differ() -> None:
    grids = config(popularity=[-0.5, 0.0, 0.5, 0.3])
    best, curve = best_dial(measure, grids, Noise("π^0.5", constant=False, separate_prior=True))
    assert best == Setting(0.7, 0.3)
    assert [*map(Setting.read_point, curve)] == [*map(Setting, GRID), *(Setting(0.7, at) for at in (-0.5, 0.5, 0.3))]
    assert [*map(Setting.read_point, curve)] == lines(grids, Noise("π^0.5", constant=False, separate_prior=True), best)

    best, curve = best_dial(measure, config(), Noise("π", constant=False, separate_prior=False))
    assert (best, [*map(Setting.read_point, curve)]) == (Setting(0.7), [*map(Setting, GRID)])

    best, curve = best_dial(measure, config(), Noise("uniform", constant=True, separate_prior=True))
    assert best == Setting(0), "¼ from the best, as no other μ of the grid is"
    assert [*map(Setting.read_point, curve)] == [Setting(0, at) for at in (0, -0.5, 0.7, 2)]


def test_prior_with_a_calendar_is_always_used() -> None:
    def measure(settings: list[Setting]) -> list[CurvePoint]:
        """Best at λ = 0.7 and μ = 0; of μ > 0 at λ = 0 and μ = 0.5."""
        return [
            point(at, -((at.bias_removal - (0 if at.popularity else 0.7)) ** 2) - (at.popularity or 0.2) ** 2)
            for at in settings
        ]

    ahead, grid = Noise("π", constant=False, separate_prior=True, ahead=True), config(popularity=[0.5, 1.0])
    assert best_dial(measure, grid, ahead)[0] == Setting(0.7)
    best, curve = best_dial(measure, grid, ahead, seasonal=True)
    assert best == Setting(0.0, 0.5)
    assert {*map(Setting, GRID)} < {*map(Setting.read_point, curve)}


def priced(settings: list[Setting]) -> list[CurvePoint]:
    """Recall rises with λ from .1 to .2 and the tail's falls from .04 to 0; μ gives half of that back. nDCG is best at
    λ = .37."""
    return [
        CurvePoint(
            bias_removal=at.bias_removal,
            popularity=at.popularity,
            metrics={
                "recall@2": Interval(value=0.1 + 0.1 * at.bias_removal - 0.01 * at.popularity),
                "recall@2/tail": Interval(value=0.04 - 0.04 * at.bias_removal + 0.02 * at.popularity),
                "recall@2/torso": Interval(value=0.0),
                "ndcg@2": Interval(value=1 - (at.bias_removal - 0.37) ** 2),
            },
        )
        for at in settings
    ]


@pytest.mark.parametrize(
    ("metric", "floor", "expected"),
    [
        ("recall@2", {}, 1.0),
        ("recall@2", {"tail": 0.02}, 0.5),
        ("recall@2", {"recall@2/tail": 0.02, "torso": 0.0}, 0.5),
        ("recall@2", {"tail": 0.5}, 0.0),  # no λ reaches it: the nearest
        ("recall@2", {"tail": 0.02, "torso": 0.1}, 0.5),  # torso is as far everywhere
        ("recall@2/tail", {"recall@2": 0.15}, 0.5),
        ("recall@2/tail", {}, 0.0),
        ("recall@2", {"tail": {"times": 1.5, "bias_removal": 0.5}}, 0.25),
        ("recall@2/tail", {"recall@2": {"times": 0.85}}, 0.75),
        ("recall@2", {"ndcg@2": {"times": 0.999}, "tail": 0.02}, 0.25),
    ],
)
def test_default_is_the_best_setting_above_the_floors(metric: str, floor: dict[str, Any], expected: float) -> None:
    grid = config(metric=metric, bias_removal=[0.0, 0.25, 0.5, 0.75, 1.0], popularity=[0.0, 0.5], floor=floor)
    assert best_dial(priced, grid, Noise("π", constant=False, separate_prior=False))[0] == Setting(expected)


def test_prior_can_approach_a_floor() -> None:
    for floor, expected in ((0.02, Setting(0.5)), (0.5, Setting(0, 0.5))):
        grid = config(bias_removal=[0.0, 0.25, 0.5, 0.75, 1.0], popularity=[0.0, 0.5], floor={"tail": floor})
        assert best_dial(priced, grid, Noise("π^0.5", constant=False, separate_prior=True))[0] == expected


def test_nothing_to_find_is_an_error() -> None:
    with pytest.raises(DataError, match="expected held-out pairs to find, found none of 36: 36 seen before"):
        bias_removal_curve(KNOWN_PAIRS, PAST, model(), config(), seed=0)


def test_metric_with_k_above_the_catalogue_is_an_error() -> None:
    long = config(ks=[2, 20], metric="recall@20")

    with pytest.raises(DataError, match=r"metric: expected a k of at most 9, all labels, received recall@20"):
        bias_removal_curve(HELD_OUT, PAST, model(), long, seed=0)


def test_a_metric_of_a_bucket_without_valid_pairs_is_refused() -> None:
    data = tiny.dataset(tiny.pairs((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)), queries=3, labels=4)
    job = tiny.recipe(evaluation={"ks": [2], "metric": "recall@2/tail"})

    check_choice(job, dataclasses.replace(data, valid=tiny.pairs((1, 2))))
    with pytest.raises(DataError, match="expected valid pairs of tail labels for recall@2/tail, found none"):
        check_choice(job, dataclasses.replace(data, valid=tiny.pairs((1, 0))))
