import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from longtail.bundle import BiasRemoval, Bundle, BundleCorruptError, BundleInvariantError, Proposal
from longtail.bundle.integrity import read_manifest
from tests.bundles import label_tree, make_bundle

SIZES = [1, 2, 3, 5, 8, 1000]


def array(*values: object) -> np.ndarray:
    return np.array(values, np.float32)


def by_hand() -> Proposal:
    """Three labels; z = 0 gives p(0) = ¼·¼, p(1) = ¾, p(2) = ¼·¾; the root also reads z."""
    return Proposal(
        projection={"number": array([1])},
        offset=array(0),
        weights=array([9], [1], [0], [0]),
        biases=array(9, np.log(3), -np.log(3), -1e4),
        leaf_labels=np.array([2, 0, 1, -1], np.int32),
    )


def random_tree(labels: int, *, dims: int = 4, seed: int = 0) -> Proposal:
    rng = np.random.default_rng(seed)
    points, counts = rng.standard_normal((labels, dims)), rng.integers(1, 9, labels)
    projection = {"user_id": rng.standard_normal((21, dims), dtype=np.float32)}
    return Proposal(projection, np.zeros(dims, np.float32), *label_tree(points, counts, sharpness=1.0))


def queries(count: int, *, dims: int = 4) -> np.ndarray:
    return np.random.default_rng(7).standard_normal((count, dims), dtype=np.float32)


def every_label(labels: int, count: int) -> np.ndarray:
    return np.tile(np.arange(labels), (count, 1))


def test_probabilities_by_hand() -> None:
    tree = by_hand()
    at_zero = np.log([[1 / 16, 3 / 4, 3 / 16]])
    right = 3 / (3 + np.e)  # σ(ln 3 − 1)
    at_minus_one = np.log([[(1 - right) / 4, right, (1 - right) * 3 / 4]])

    z = array([0], [-1])
    np.testing.assert_allclose(tree.all_log_probabilities(z), np.concatenate([at_zero, at_minus_one]), rtol=1e-6)
    np.testing.assert_allclose(tree.log_probabilities(z[:1], np.array([[2, 0, 0]])), at_zero[:, [2, 0, 0]], rtol=1e-6)
    assert (tree.depth, tree.labels, tree.label_leaves.tolist()) == (2, 3, [1, 2, 0])


def test_projection_by_hand() -> None:
    tree = replace(
        by_hand(),
        projection={
            "city": array([0, 0], [1, 2], [5, 7]),
            "words": array([100, 100], [10, 20], [30, 40]),
            "age": array([0.5, -1]),
        },
        offset=array(0.25, 0),
    )
    inputs = {
        "city": np.array([1, 2], np.int32),
        "words": np.array([[1, 2, 0], [0, 0, 0]], np.int32),
        "words__weight": array([1, 0.5, 0], [1, 0, 0]),
        "age": array(4, -2),
        "not projected": np.array([3, 3], np.int32),
    }
    # the query's city, its words by weight (row 0 counts where its weight is not 0), its age, the offset
    expected = [[1 + 10 + 15 + 2 + 0.25, 2 + 20 + 20 - 4], [5 + 100 - 1 + 0.25, 7 + 100 + 2]]

    projected = tree.project(inputs)

    assert projected.dtype == np.float32
    np.testing.assert_array_equal(projected, expected)


@pytest.mark.parametrize("labels", SIZES)
def test_probabilities_sum_to_one_and_match_the_expansion(labels: int) -> None:
    tree, z = random_tree(labels), queries(9)
    tree.validate(labels)

    every = tree.all_log_probabilities(z)

    assert every.dtype == np.float32
    assert every.shape == (9, labels)
    np.testing.assert_allclose(np.exp(every.astype(np.float64)).sum(axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(tree.log_probabilities(z, every_label(labels, 9)), every, atol=1e-5)


@pytest.mark.parametrize("labels", SIZES)
def test_full_beam_ranks_exactly(labels: int) -> None:
    tree, z = random_tree(labels), queries(9)
    every = tree.all_log_probabilities(z)

    result, log_p = tree.beam(z, labels + 2)

    assert (result.dtype, log_p.dtype) == (np.int64, np.float32)
    np.testing.assert_array_equal(result[:, :labels], np.argsort(-every, axis=1, kind="stable"))
    np.testing.assert_allclose(log_p[:, :labels], -np.sort(-every, axis=1), atol=1e-5)
    assert (result[:, labels:] == -1).all()
    assert np.isneginf(log_p[:, labels:]).all()


def test_a_narrow_beam_keeps_the_best_nodes_of_every_level() -> None:
    # z = ln(2/3) at the root: right ⅔; node 2: right ¼. Width 1 goes right, to label 1.
    result, log_p = by_hand().beam(array([np.log(2 / 3)]), 1)

    assert result.tolist() == [[1]]
    np.testing.assert_allclose(log_p, [[np.log(2 / 3)]], rtol=1e-6)


def test_a_beam_is_a_lower_bound_and_never_returns_padding() -> None:
    tree, z = random_tree(600, dims=16), queries(20, dims=16)
    result, log_p = tree.beam(z, 50)

    assert result.min() >= 0
    assert all(len(set(row)) == 50 for row in result.tolist())
    assert (np.diff(log_p, axis=1) <= 0).all()
    np.testing.assert_allclose(log_p, tree.log_probabilities(z, result), atol=1e-5)
    exact = -np.sort(-tree.all_log_probabilities(z), axis=1)
    assert (log_p <= exact[:, :50] + 1e-5).all()
    assert (log_p[:, 0] >= exact[:, 0] - 1e-5).mean() > 0.9


def test_probabilities_are_not_clipped() -> None:
    tree = replace(by_hand(), biases=array(0, -200, 60, -1e4))

    # Right at the root costs 200 nats; the left node's left child 60.
    np.testing.assert_allclose(tree.all_log_probabilities(array([0])), [[0, -200, -60]], atol=1e-5)


def test_padding_has_probability_zero() -> None:
    tree = by_hand()

    assert np.exp(np.float32(-1e4)) == 0
    assert tree.log_probabilities(array([400]), np.array([[1]]))[0, 0] == 0.0


def test_write_and_read_round_trip(tmp_path: Path) -> None:
    tree = random_tree(5)

    tree.write(tmp_path / "proposal.npz")
    read = Proposal.read(tmp_path / "proposal.npz")

    read.validate(5)
    for name in ("offset", "weights", "biases", "leaf_labels"):
        np.testing.assert_array_equal(getattr(read, name), getattr(tree, name))
    assert list(read.projection) == ["user_id"]
    np.testing.assert_array_equal(read.projection["user_id"], tree.projection["user_id"])
    with np.load(tmp_path / "proposal.npz") as members:
        assert sorted(members) == ["biases", "leaf_labels", "offset", "projection/user_id", "weights"]


def saved(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def plain_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a zip file",
        plain_array(),
        saved(offset=np.zeros(1)),
        saved(**{name: np.zeros(1) for name in ("offset", "weights", "biases", "leaf_labels", "more")}),
        saved(offset=np.array([{}])),
        saved(offset=np.zeros(300))[:-200],
        None,
    ],
    ids=["empty", "noise", "an .npy file", "arrays missing", "an array too many", "pickled objects", "cut", "none"],
)
def test_other_files_are_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "proposal.npz").write_bytes(content)

    with pytest.raises(BundleCorruptError, match=r"proposal.npz: expected a proposal tree \(.npz\)"):
        Proposal.read(tmp_path / "proposal.npz")


INVARIANTS: dict[str, tuple[Callable[[Proposal], Proposal], str]] = {
    "weights of another width": (
        lambda t: replace(t, weights=t.weights[:, :0]),
        r"array weights has its type and shape: expected float32 \(4, 1\), found float32 \(4, 0\)",
    ),
    "biases of another type": (
        lambda t: replace(t, biases=t.biases.astype(np.float64)),
        r"array biases has its type and shape: expected float32 \(4,\), found float64 \(4,\)",
    ),
    "too few leaves": (
        lambda t: replace(t, leaf_labels=t.leaf_labels[:2]),
        r"array leaf_labels has its type and shape: expected int32 \(4,\), found int32 \(2,\)",
    ),
    "a projection of another width": (
        lambda t: replace(t, projection={"number": array([1, 2])}),
        r"array projection/number has its type and shape: expected float32 \(1, 1\), found float32 \(1, 2\)",
    ),
    "no projection": (lambda t: replace(t, projection={}), "projects a feature: expected >= 1 projection, found none"),
    "a weight without a number": (
        lambda t: replace(t, weights=array([0], [np.nan], [0], [0])),
        "array weights is finite: expected finite values, found 1 others",
    ),
    "a label twice": (
        lambda t: replace(t, leaf_labels=np.array([2, 2, 1, -1], np.int32)),
        "exactly one leaf of proposal.npz: expected label rows 0 to 2 once each, found 2 distinct of 3",
    ),
    "a label too many": (
        lambda t: replace(t, leaf_labels=np.array([2, 0, 1, 3], np.int32)),
        "exactly one leaf of proposal.npz: expected label rows 0 to 2 once each, found 4 distinct of 4",
    ),
    "padding that can be drawn": (
        lambda t: replace(t, biases=array(0, 0, 0, -20)),
        r"padding of proposal.npz has probability 0: expected .*, found 1 nodes that differ, the first \[3\]",
    ),
    "padding on the wrong side": (
        lambda t: replace(t, biases=array(0, 0, 0, 1e4)),
        r"padding of proposal.npz has probability 0: expected .*, found 1 nodes that differ, the first \[3\]",
    ),
    "padding that depends on the query": (
        lambda t: replace(t, weights=array([0], [0], [0], [1])),
        r"padding of proposal.npz has probability 0: expected .*, found 1 nodes that differ, the first \[3\]",
    ),
}


@pytest.mark.parametrize(("break_it", "message"), INVARIANTS.values(), ids=INVARIANTS)
def test_broken_invariants(break_it: Callable[[Proposal], Proposal], message: str) -> None:
    by_hand().validate(3)

    with pytest.raises(BundleInvariantError, match=message):
        break_it(by_hand()).validate(3)


def test_bundle_contains_the_tree(tmp_path: Path) -> None:
    tree = random_tree(12)
    replace(make_bundle(labels=12, dim=4, users=20, proposal=True), proposal=tree).write(tmp_path / "bundle")

    assert "proposal.npz" in read_manifest(tmp_path / "bundle").files
    loaded = Bundle.load(tmp_path / "bundle").proposal
    assert loaded is not None
    np.testing.assert_array_equal(loaded.all_log_probabilities(queries(3)), tree.all_log_probabilities(queries(3)))


def test_a_bundle_refuses_a_tree_of_other_labels_or_features(tmp_path: Path) -> None:
    bundle = make_bundle(labels=12, dim=4, users=20)

    with pytest.raises(BundleInvariantError, match=r"found float32 \(8, 4\)"):
        replace(bundle, proposal=random_tree(8)).write(tmp_path / "bundle")
    for projection, result in (
        ({"user_id": np.zeros((20, 4), np.float32)}, r"\{'user_id': 20\}"),
        ({"city": np.zeros((21, 4), np.float32)}, r"\{'city': 21\}"),
    ):
        tree = replace(random_tree(12), projection=projection)
        with pytest.raises(
            BundleInvariantError, match=rf"expected some of \{{'user_id': 21, 'history': 13\}}, found {result}"
        ):
            replace(bundle, proposal=tree).write(tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_tree_requires_a_dial_from_zero_and_no_prior(tmp_path: Path) -> None:
    bundle = make_bundle(labels=12, dim=4, users=20, proposal=True)
    dial = BiasRemoval(default=0.5, minimum=-0.5)
    with pytest.raises(BundleInvariantError, match=r"does not go below 0.* bias_removal.minimum >= 0, found -0.5"):
        replace(bundle, manifest=bundle.manifest.model_copy(update={"bias_removal": dial})).write(tmp_path / "bundle")
    two = make_bundle(labels=12, dim=4, users=20, popularity=True)
    two = replace(two, manifest=two.manifest.model_copy(update={"bias_removal": BiasRemoval(default=0, minimum=0)}))
    with pytest.raises(BundleInvariantError, match="log_pn is log π with a tree"):
        replace(two, proposal=bundle.proposal).write(tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []
