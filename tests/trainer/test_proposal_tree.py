from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle import Proposal
from longtail.trainer.config import FeatureConfig
from longtail.trainer.data.encode import Encoding
from longtail.trainer.sampling import proposal, tree_fit
from longtail.trainer.sampling.projection import fit_projection
from longtail.trainer.sampling.proposal import FittedTree, fit_proposal, held_out_likelihood, read_or_fit_proposal
from longtail.trainer.sampling.tree_fit import fit_tree
from tests.trainer import tiny

PENALTY = 0.1


def fit_alone(z: np.ndarray, labels_of: np.ndarray, labels: int) -> Proposal:
    """The tree alone: z is the one feature."""
    weights, biases, leaf_labels = fit_tree(z, labels_of, labels=labels, penalty=PENALTY)
    dims = z.shape[1]
    tree = Proposal({"z": np.zeros((1, dims), np.float32)}, np.zeros(dims, np.float32), weights, biases, leaf_labels)
    tree.validate(labels)
    return tree


def clusters(labels: int, pairs: int, dims: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pairs whose z lies near one of labels/5 centres; every label belongs to a centre, frequencies are Zipf's."""
    rng = np.random.default_rng(seed)
    centres = 2 * rng.standard_normal((max(labels // 5, 1), dims))
    centre_of = rng.integers(0, len(centres), labels)
    share = 1 / (1 + rng.permutation(labels))
    labels_of = rng.choice(labels, pairs, p=share / share.sum()).astype(np.int32)
    z = centres[centre_of[labels_of]] + 0.5 * rng.standard_normal((pairs, dims))
    return z.astype(np.float32), labels_of


def list_nodes(tree: Proposal) -> Iterator[tuple[int, list[int], list[int]]]:
    """Inner nodes with the labels left and right of them."""
    leaves = tree.leaf_labels.tolist()
    for level in range(tree.depth):
        width = len(leaves) >> level
        for i in range(1 << level):
            below = leaves[i * width : (i + 1) * width]
            halves = below[: width // 2], below[width // 2 :]
            left_labels, right_labels = ([y for y in half if y >= 0] for half in halves)
            yield (1 << level) + i, left_labels, right_labels


def objective(theta: np.ndarray, z: np.ndarray, towards: np.ndarray) -> float:
    """Σ log σ(ζ(w·z + b)) − penalty·(‖w‖² + b²), straight from the paper."""
    activation = z @ theta[:-1] + theta[-1]
    return float(-np.logaddexp(0, -towards * activation).sum() - PENALTY * (theta**2).sum())


def ascend(theta: np.ndarray, z: np.ndarray, towards: np.ndarray) -> np.ndarray:
    """Newton ascent with halving, one node, to convergence."""
    extended = np.concatenate([z, np.ones((len(z), 1))], axis=1)
    for _ in range(100):
        miss = 1 / (1 + np.exp(towards * (extended @ theta)))
        gradient = extended.T @ (towards * miss) - 2 * PENALTY * theta
        hessian = (extended.T * (miss * (1 - miss))) @ extended + 2 * PENALTY * np.eye(len(theta))
        step = np.linalg.solve(hessian, gradient)
        while objective(theta + step, z, towards) < objective(theta, z, towards) and np.abs(step).max() > 1e-12:
            step = step / 2
        theta = theta + step
        if np.abs(step).max() < 1e-10:
            break
    return theta


def reference_split(z: np.ndarray, labels_of: np.ndarray, labels: list[int]) -> tuple[list[int], list[int]]:
    """[BM20 §3] for one node, a label at a time; its objective never falls."""
    mine = np.isin(labels_of, labels)
    z, labels_of = z[mine].astype(np.float64), labels_of[mine]
    sums = np.array([z[labels_of == label].sum(axis=0) for label in labels])
    leading = np.linalg.eigh(np.cov(sums.T, bias=True).reshape(z.shape[1], -1))[1][:, -1]
    theta = np.append(leading * np.sign(leading[np.abs(leading).argmax()]), 0.0)
    before, right = -np.inf, set[int]()
    for _ in range(50):
        gains = {y: float((z[labels_of == y] @ theta[:-1] + theta[-1]).sum()) for y in labels}
        better = set(sorted(labels, key=lambda y: (-gains[y], y))[: len(labels) // 2])
        if better == right:
            break
        right = better
        towards = np.where(np.isin(labels_of, list(right)), 1.0, -1.0)
        split = objective(theta, z, towards)
        theta = ascend(theta, z, towards)
        after = objective(theta, z, towards)
        assert before <= split + 1e-9 <= after + 2e-9
        before = after
    return sorted(set(labels) - right), sorted(right)


@pytest.mark.parametrize("labels", [1, 2, 3, 5, 8, 1000])
def test_subtrees_differ_by_a_label_at_most_and_probabilities_sum_to_one(labels: int) -> None:
    z, labels_of = clusters(labels, 500, 3)
    tree = fit_alone(z, labels_of, labels)

    assert tree.depth == {1: 0, 2: 1, 3: 2, 5: 3, 8: 3, 1000: 10}[labels]
    for _, left_labels, right_labels in list_nodes(tree):
        assert 0 <= len(left_labels) - len(right_labels) <= 1
    totals = np.exp(tree.all_log_probabilities(z[:20]).astype(np.float64)).sum(axis=1)
    np.testing.assert_allclose(totals, 1, atol=1e-5)


def test_the_tree_is_the_one_of_the_paper_node_by_node() -> None:
    z, labels_of = clusters(23, 400, 3)
    tree = fit_alone(z, labels_of, 23)

    compared = 0
    for _, left_labels, right_labels in list_nodes(tree):
        if right_labels:
            split = reference_split(z, labels_of, sorted(left_labels + right_labels))
            assert (sorted(left_labels), sorted(right_labels)) == split
            compared += 1
    assert compared == 22


def test_every_node_is_at_its_optimum() -> None:
    z, labels_of = clusters(200, 3000, 4)
    tree = fit_alone(z, labels_of, 200)

    for node, left_labels, right_labels in list_nodes(tree):
        if not right_labels:
            continue
        mine = np.isin(labels_of, left_labels + right_labels)
        towards = np.where(np.isin(labels_of[mine], right_labels), 1.0, -1.0)
        theta = np.append(tree.weights[node], tree.biases[node]).astype(np.float64)
        reached = objective(theta, z[mine].astype(np.float64), towards)
        best = objective(ascend(theta, z[mine].astype(np.float64), towards), z[mine].astype(np.float64), towards)
        assert reached >= best - 1e-5 * (1 - best)
        labels = left_labels + right_labels
        gains = {y: (z[labels_of == y].astype(np.float64) @ theta[:-1] + theta[-1]).sum() for y in labels}
        assert min(gains[y] for y in right_labels) >= max(gains[y] for y in left_labels) - 1e-4


def test_the_bias_of_a_node_without_features_by_hand() -> None:
    labels_of = np.array([0, 0, 0, 1], np.int32)
    tree = fit_alone(np.zeros((4, 1), np.float32), labels_of, 2)

    # All Δ are 0: label 0 goes right. Then 3σ(−b) − σ(b) = 2·0.1·b, which b = 0.946… solves.
    assert tree.leaf_labels.tolist() == [1, 0]
    b = float(tree.biases[1])
    assert 3 / (1 + np.exp(b)) - 1 / (1 + np.exp(-b)) == pytest.approx(0.2 * b, abs=1e-5)
    assert tree.weights[1, 0] == pytest.approx(0, abs=1e-6)


def test_without_pairs_labels_go_right_by_row_and_every_leaf_is_equally_likely() -> None:
    tree = fit_alone(np.zeros((0, 2), np.float32), np.zeros(0, np.int32), 4)

    assert tree.leaf_labels.tolist() == [3, 2, 1, 0]
    np.testing.assert_allclose(tree.all_log_probabilities(np.ones((1, 2), np.float32)), np.log([[0.25] * 4]), rtol=1e-6)


FEATURES = [
    FeatureConfig(name="city", kind="id"),
    FeatureConfig(name="words", kind="text", hash_rows=6),
    FeatureConfig(name="age", kind="number"),
]
ROWS = {"city": 4, "words": 6}


def inputs(count: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "city": rng.integers(0, 4, count).astype(np.int32),
        "words": rng.integers(0, 6, (count, 3)).astype(np.int32),
        "words__weight": rng.integers(0, 3, (count, 3)).astype(np.float32),
        "age": rng.integers(0, 80, count).astype(np.float32),
        "user_id": np.arange(count, dtype=np.int32),
    }


def dense(block: dict[str, np.ndarray], *, age: tuple[float, float]) -> np.ndarray:
    """The design matrix, cell by cell."""
    rows = []
    for city, words, weights, years in zip(
        block["city"], block["words"], block["words__weight"], block["age"], strict=True
    ):
        row = np.zeros(11)
        row[city] = 1
        for word, weight in zip(words, weights, strict=True):
            row[4 + word] += weight
        row[10] = (years - age[0]) / age[1]
        rows.append(row)
    return np.array(rows)


def test_the_projection_is_the_pca_of_the_encoded_queries() -> None:
    blocks = [inputs(40), inputs(25, seed=1)]
    ages = np.concatenate([block["age"] for block in blocks]).astype(np.float64)
    matrix = np.concatenate([dense(block, age=(ages.mean(), ages.std())) for block in blocks])
    scores, singular, directions = np.linalg.svd(matrix - matrix.mean(axis=0), full_matrices=False)
    signs = np.sign([row[np.abs(row).argmax()] for row in directions])
    expected = (scores * singular * signs)[:, :4] / (singular[0] / np.sqrt(65))

    projection, offset = fit_projection(FEATURES, blocks, ROWS, 4)
    tree = Proposal(projection, offset, *fit_tree(np.zeros((1, 4), np.float32), np.zeros(1, np.int32), labels=1))
    z = np.concatenate([tree.project(block) for block in blocks])

    np.testing.assert_allclose(z, expected, atol=2e-5)
    np.testing.assert_allclose(z.mean(axis=0), 0, atol=1e-6)
    assert z[:, 0].std() == pytest.approx(1, abs=1e-5)
    assert {name: rows.shape for name, rows in projection.items()} == {"city": (4, 4), "words": (6, 4), "age": (1, 4)}
    assert offset.dtype == projection["city"].dtype == np.float32


def test_a_proposal_from_training_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    users, items = 80, 12
    group = rng.integers(0, 2, users)
    rows = {(user, 6 * int(group[user]) + int(rng.integers(0, 6))) for user in range(users) for _ in range(4)}
    table = pa.table({"user_id": [f"u{user}" for user in range(users)], "age": 20.0 + 40 * group})
    job = tiny.recipe(
        query={
            "features": [
                tiny.USER,
                {"name": "age", "kind": "number"},
                {"name": "seen", "kind": "history", "table": "item_id", "dim": 4, "unknown_rate": 0},
            ]
        }
    )
    data = tiny.dataset(tiny.pairs(*sorted(rows)), queries=users, labels=items, query_table=table)
    encoding = Encoding.fit(job, data)
    monkeypatch.setattr(proposal, "_READ_TOGETHER", 50)
    monkeypatch.setattr(proposal, "_PROJECTED_PAIRS", 120)

    def inputs_of(pairs: np.ndarray) -> dict[str, np.ndarray]:
        assert len(pairs) <= 50
        return encoding.query.pair_inputs(pairs, np.random.default_rng(0))

    tree, held_out = fit_proposal(
        job.query.features,
        inputs_of,
        data.train.labels,
        vocabulary_rows=encoding.vocabulary_rows,
        labels=items,
        dims=4,
        penalties=[0.1],
        query_id="user_id",
    )

    tree.validate(items)
    assert held_out == {}, "one λ_n, nothing to choose"
    assert {name: rows.shape for name, rows in tree.projection.items()} == {"age": (1, 4), "seen": (items + 1, 4)}
    every = encoding.query.pair_inputs(np.arange(len(data.train)), np.random.default_rng(0))
    z = tree.project(every)
    assert z[:, 0].std() == pytest.approx(1, abs=0.2)
    probability = np.exp(tree.all_log_probabilities(z))
    in_group = data.train.labels // 6 == group[data.train.queries]
    assert in_group.all()
    mine = np.where(group[data.train.queries], probability[:, 6:].sum(axis=1), probability[:, :6].sum(axis=1))
    assert mine.min() > 0.9


def test_the_held_out_likelihood_of_two_labels_by_hand() -> None:
    """One node and z = 0: its bias is the log-odds of the labels in the other folds, drawn to 0 by λ_n."""
    labels_of, z = np.int32([1, 1, 0, 1, 0, 1, 1, 0, 1]), np.zeros((9, 1), np.float32)
    fold = np.random.default_rng(0).permutation(9) % 3
    expected = 0.0
    for held_out in range(3):
        ones = [labels_of[fold != held_out].sum(), labels_of[fold == held_out].sum()]
        share = ones[0] / 6
        expected += ones[1] * np.log(share) + (3 - ones[1]) * np.log(1 - share)

    assert held_out_likelihood(z, labels_of, 2, penalty=1e-6) == pytest.approx(expected / 9, rel=1e-3)
    assert held_out_likelihood(z, labels_of, 2, penalty=1e6) == pytest.approx(np.log(0.5), rel=1e-3)


@pytest.mark.parametrize(("signal", "best"), [(0.0, 100.0), (2.0, 0.01)], ids=["noise", "signal"])
def test_lambda_n_is_chosen_by_held_out_pairs(signal: float, best: float, tmp_path: Path) -> None:
    """Labels that do not depend on z want a strong penalty, labels that follow it want none."""
    rng = np.random.default_rng(4)
    age = rng.normal(0, 1, 120).astype(np.float32)
    noise = rng.normal(0, 1, 120) if signal == 0 else rng.normal(0, 0.1, 120)
    labels_of = np.clip(np.floor(signal * age + noise) + 2, 0, 3).astype(np.int32)

    def fit() -> FittedTree:
        return fit_proposal(
            FEATURES[2:3], lambda rows: {"age": age[rows]}, labels_of,
            vocabulary_rows={}, labels=4, dims=1, penalties=[0.01, 100.0], query_id="user_id",
        )  # fmt: skip

    tree, held_out = read_or_fit_proposal(tmp_path / "tree.npz", fit)
    assert list(held_out) == [0.01, 100.0]
    assert max(held_out, key=held_out.__getitem__) == best
    z = tree.project({"age": age})
    np.testing.assert_array_equal(tree.weights, fit_tree(z, labels_of, labels=4, penalty=best)[0])
    again = read_or_fit_proposal(tmp_path / "tree.npz", lambda: pytest.fail("it is there"))
    assert again.held_out == held_out


def test_newton_never_lowers_the_objective_however_bad_the_start() -> None:
    rng = np.random.default_rng(0)
    z, labels_of = clusters(6, 300, 3)
    order = np.argsort(labels_of, kind="stable")
    extended = np.concatenate([z[order], np.ones((300, 1))], axis=1).astype(np.float64)
    node_of = labels_of[order] // 2
    blocks = tree_fit._Blocks.cut(extended, labels_of[order].astype(np.int64), np.bincount(node_of, minlength=3))
    right = np.array([0, 1, 0, 1, 1, 0], bool)
    towards = np.where(right[labels_of[order]], 1.0, -1.0)
    for size in (1, 10, 1000):
        start = size * rng.standard_normal((3, 4))
        end = tree_fit._ascend(start.copy(), blocks, np.where(right[blocks.labels_GH], 1.0, -1.0), PENALTY)
        for node in range(3):
            mine = node_of == node
            before, after, best = (
                objective(theta, extended[mine, :3], towards[mine])
                for theta in (start[node], end[node], ascend(np.zeros(4), extended[mine, :3], towards[mine]))
            )
            assert before <= after
            assert after == pytest.approx(best, abs=1e-4)


def test_labels_never_seen_keep_a_finite_probability() -> None:
    z, labels_of = clusters(10, 200, 2)
    tree = fit_alone(z, labels_of, 37)

    log_p = tree.all_log_probabilities(z)
    assert np.isfinite(log_p).all()
    assert log_p[:, :10].mean() > log_p[:, 10:].mean()
