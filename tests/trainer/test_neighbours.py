"""Check audiences and histories as one layer of LightGCN, without a leak of the pair to predict."""

from typing import Any

import numpy as np
import pytest
from keras import ops, random
from pydantic import ValidationError

from longtail.trainer.config import Recipe
from longtail.trainer.data.audience import Audience
from longtail.trainer.data.batches import epoch_batches
from longtail.trainer.data.encode import Encoding
from longtail.trainer.loss_terms.queries import OwnInAudience
from longtail.trainer.model.two_tower import DrawnAudience, TwoTower
from tests.trainer import tiny

QUERIES, LABELS, DIM = 9, 7, 4
ROWS = sorted(
    {(int(query), int(label)) for query, label in np.random.default_rng(3).integers(0, (QUERIES, LABELS - 1), (40, 2))}
)
"""The last label has no pair."""

SEEN_FEATURE = {"name": "seen", "kind": "history", "table": "item_id", "dim": DIM, "combiner": "sum", "unknown_rate": 0}
BY = {"name": "by", "kind": "audience", "table": "user_id", "dim": DIM, "combiner": "sum"}
ITEM = {**tiny.ITEM, "unknown_rate": 0}


def job(history: dict[str, Any] | None = None, by: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    """Ids, the query's labels and the label's queries, added up."""
    return tiny.recipe(
        query={"features": [tiny.USER, SEEN_FEATURE | (history or {})], "combine": "sum"},
        label={"features": [ITEM, BY | (by or {})], "combine": "sum"},
        **sections,
    )


def data(rows: list[tuple[int, int]] = ROWS, **more: Any) -> Any:
    return tiny.dataset(tiny.pairs(*rows), queries=QUERIES, labels=LABELS, **more)


def build_model(recipe: Recipe, dataset: Any, *, batch_size: int = 4) -> tuple[TwoTower, Encoding]:
    model = tiny.model(recipe, dataset, batch_size=batch_size)
    tiny.fill_tables(model)
    return model, Encoding.fit(recipe, dataset)


def read_table(model: TwoTower, name: str) -> np.ndarray:
    """Rows of an embedding table without the out-of-vocabulary row."""
    return ops.convert_to_numpy(model.tables[name].table)[1:].copy()


def adjacency(rows: list[tuple[int, int]]) -> np.ndarray:
    """A_xy / √(d_x·d_y), [Q, L]; a pair that came twice counts twice."""
    a_QL = np.zeros((QUERIES, LABELS))
    np.add.at(a_QL, tuple(np.transpose(rows)), 1)
    return a_QL / np.sqrt(np.maximum(a_QL.sum(axis=1), 1)[:, None] * np.maximum(a_QL.sum(axis=0), 1))


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("rows", [ROWS, [*ROWS, ROWS[3]]], ids=["once", "a pair twice"])
def test_symmetric_weights_equal_one_layer_of_lightgcn(similarity: str, rows: list[tuple[int, int]]) -> None:
    """½(E + ÃE) (He et al. 2020) by a dense matrix, on both sides, whatever training draws."""
    symmetric = {"weights": "symmetric"}
    model, encoding = build_model(
        job(symmetric, symmetric | {"max_length": 2}, model={"similarity": similarity}), data(sorted(rows))
    )
    a_QL, labels = adjacency(rows), np.append(read_table(model, "item_id"), [model_row(model, "item_id", 0)], axis=0)
    queries = read_table(model, "user_id")
    expected_QD, expected_LD = (queries + a_QL @ labels) / 2, (labels + a_QL.T @ queries) / 2
    found_QD, found_LD = (
        model.embed_queries(encoding.query.query_inputs(np.arange(QUERIES))) / 2,
        model.embed_labels() / 2,
    )
    if similarity == "cosine":
        expected_QD, expected_LD = (
            x / np.linalg.norm(x, axis=1, keepdims=True) / 2 for x in (expected_QD, expected_LD)
        )
    np.testing.assert_allclose(found_QD, expected_QD, atol=1e-5)
    np.testing.assert_allclose(found_LD, expected_LD, atol=1e-5)


def model_row(model: TwoTower, name: str, row: int) -> np.ndarray:
    return ops.convert_to_numpy(model.tables[name].table)[row]


def test_labels_are_embedded_with_whole_audiences() -> None:
    """Label 6, which no query chose, has only its id."""
    model, _ = build_model(job(by={"combiner": "mean", "max_length": 1}, model={"similarity": "dot"}), data())
    a_QL = np.zeros((QUERIES, LABELS))
    a_QL[tuple(np.transpose(ROWS))] = 1
    means_LD = a_QL.T @ read_table(model, "user_id") / np.maximum(a_QL.sum(axis=0), 1)[:, None]
    labels = np.append(read_table(model, "item_id"), [model_row(model, "item_id", 0)], axis=0)
    np.testing.assert_allclose(model.embed_labels(), labels + means_LD, atol=1e-5)


def test_drawn_audiences_estimate_the_whole_audience() -> None:
    """Of 11 entries 4 are drawn, of parts of 3, 3, 3 and 2: every one has weight 1 in the mean over draws, and the
    weights' sum is 11 in each. Without the query's own two it is 9, and 0 in the mean for these."""
    queries = np.int32([0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9])
    pairs = tiny.pairs(*((int(query), 0) for query in queries), (0, 1), (4, 1)).sorted()
    audience = Audience.build(pairs, {"by": np.arange(10, dtype=np.int32) + 1}, labels=3)
    drawn, draws, seed = DrawnAudience(audience, {"by": 4}), 20_000, random.SeedGenerator(0)

    def mean_weights(entry_range: list[int] | None) -> np.ndarray:
        labels_C = ops.convert_to_tensor(np.zeros(draws, np.int32))
        own_C2 = None if entry_range is None else ops.convert_to_tensor(np.tile(np.int32(entry_range), (draws, 1)))
        inputs = {name: ops.convert_to_numpy(x) for name, x in drawn.draw(labels_C, seed, own_C2).items()}
        assert (inputs["by__weight"].sum(axis=1) == 11 - (entry_range or [0, 0])[1]).all()
        assert all(len(set(ids)) >= 3 for ids in inputs["by"][:50]), "no entry is drawn twice"
        return np.bincount(inputs["by"].ravel(), inputs["by__weight"].ravel(), minlength=11) / draws

    of_3 = int(np.flatnonzero((pairs.queries == 3) & (pairs.labels == 0))[0])
    assert audience.entry_ranges[of_3].tolist() == [3, 2]
    np.testing.assert_allclose(mean_weights(None), [0, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1], atol=0.05)
    np.testing.assert_allclose(mean_weights([3, 2]), [0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1], atol=0.05)
    others = drawn.draw(ops.convert_to_tensor(np.int32([1, 2, 1])), seed, ops.convert_to_tensor(np.int32([[1, 1]])))
    assert ops.convert_to_numpy(others["by"]).tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [1, 5, 0, 0]]
    assert ops.convert_to_numpy(others["by__weight"]).tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_sampled_history_estimates_the_whole_history(ordered: bool) -> None:
    """Query 0 chose labels 0 to 4, and 2 once more. Of the pair of label 3 the history is the other five, in time the
    three before it; of a pair of label 2 it is the four of other labels."""
    rows = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 2), (1, 5), (2, 5)]
    dataset = tiny.dataset(tiny.pairs(*rows), queries=3, labels=6, ordered=ordered)
    recipe = tiny.recipe(query={"features": [{**SEEN_FEATURE, "sample": 2}]})
    features, draws, rng = Encoding.fit(recipe, dataset).query, 20_000, np.random.default_rng(0)

    def mean_weights(row: int) -> list[float]:
        inputs = features.pair_inputs(np.full(draws, row), rng)
        assert inputs["seen"].shape == (draws, 2)
        assert row == 2 or set(inputs["seen__weight"].sum(axis=1)) == {3 if ordered else 5}
        return np.bincount(inputs["seen"].ravel(), inputs["seen__weight"].ravel(), minlength=7) / draws

    np.testing.assert_allclose(mean_weights(3), [0, 1, 1, 1, 0, 0, 0] if ordered else [0, 1, 1, 2, 0, 1, 0], atol=0.05)
    np.testing.assert_allclose(mean_weights(2), [0, 1, 1, 0, 0, 0, 0] if ordered else [0, 1, 1, 0, 1, 1, 0], atol=0.05)
    alone = features.pair_inputs(np.array([6, 7]), rng)
    assert (alone["seen"].tolist(), alone["seen__weight"].tolist()) == ([[0, 0]] * 2, [[0, 0]] * 2)
    served = features.query_inputs(np.array([0], np.int32))
    assert served["seen__weight"].sum() == 6, "evaluation and the service read all of it"


def find_moved_queries(batch_rows: list[int], recipe: Recipe, dataset: Any, *, times: int = 1) -> list[bool]:
    """Which queries' embeddings some training steps on these pairs move."""
    model, encoding = build_model(recipe, dataset, batch_size=len(batch_rows))
    before = read_table(model, "user_id")
    features, chosen = encoding.query, np.array(batch_rows)
    for step in range(times):
        batch = features.pair_inputs(chosen, np.random.default_rng(step))
        batch |= {"_positive": dataset.train.labels[chosen], "_weight": np.ones(len(chosen), np.float32)}
        batch |= {"_own": encoding.audience.entry_ranges[chosen], "_pair": chosen.astype(np.int32)}
        model.train_step({name: ops.convert_to_tensor(column) for name, column in batch.items()})
    return (read_table(model, "user_id") != before).any(axis=1).tolist()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("limit", "accumulate"), [(50, 1), (2, 2)])
def test_a_query_is_never_in_the_audience_of_its_positive(limit: int, accumulate: int) -> None:
    """Queries that read their histories alone learn through the audiences of their batch: those of labels 0 and 1,
    without query 0 in the first, which has it twice, and without query 3 in the second; query 6 is in neither."""
    rows = [(0, 0), (0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2), (0, 2), (3, 2), (0, 3), (3, 3), (6, 3)]
    dataset = data(rows)
    recipe = tiny.recipe(
        query={"features": [SEEN_FEATURE]},
        label={"features": [ITEM, {**BY, "max_length": limit}], "combine": "sum"},
        training={"accumulate": accumulate},
    )
    train = dataset.train
    at = {pair: row for row, pair in enumerate(zip(train.queries.tolist(), train.labels.tolist(), strict=True))}
    moved = find_moved_queries([at[0, 0], at[3, 1]] * accumulate, recipe, dataset, times=3)
    assert moved == [False, True, True, False, True, True, False]


def test_batches_locate_the_rows_own_queries_in_audiences() -> None:
    dataset = data()
    _, encoding = build_model(job(), dataset)
    settings = {"batch_size": 4, "seed": 0, "epoch": 0, "first": 0}
    ((_, batch), *_) = epoch_batches(dataset.train, encoding.query, [OwnInAudience(encoding.audience)], **settings)
    assert batch["_own"].tolist() == encoding.audience.entry_ranges[batch["_pair"]].tolist()
    starts = encoding.audience.offsets[batch["_positive"]] + batch["_own"][:, 0]
    assert encoding.audience.ids["by"][starts].tolist() == (dataset.train.queries[batch["_pair"]] + 1).tolist()


def test_two_layers_nest_from_the_query_s_side() -> None:
    """A history of what the label tower makes of its labels, which then holds their audiences; labels of no pair have
    the out-of-vocabulary row. The gradient reaches the queries of the labels of the history."""
    nested = {"entries": "label_tower", "weights": "symmetric", "table": None}
    recipe = job(nested, {"weights": "symmetric"}, model={"similarity": "dot"})
    model, encoding = build_model(recipe, data())
    a_QL, queries = adjacency(ROWS), read_table(model, "user_id")
    labels = np.append(read_table(model, "item_id"), [model_row(model, "item_id", 0)], axis=0)
    expected_QD = queries + a_QL @ (labels + a_QL.T @ queries)
    found_QD = model.embed_queries(encoding.query.query_inputs(np.arange(QUERIES)))
    np.testing.assert_allclose(found_QD, expected_QD, atol=1e-5)


@pytest.mark.usefixtures("eager")
def test_the_gradient_reaches_the_second_layer() -> None:
    """Query 0's history is label 1, whose queries are 0, 1 and 2; the batch's positives have 3 and 5 beside its own."""
    rows = [(0, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 2), (5, 2)]
    nested = {"entries": "label_tower", "table": None, "weights": "symmetric"}
    recipe = tiny.recipe(
        query={"features": [SEEN_FEATURE | nested]},
        label={"features": [ITEM, BY | {"weights": "symmetric"}], "combine": "sum"},
    )
    assert find_moved_queries([0, 5], recipe, data(rows)) == [True, True, True, True, False, True]


def test_query_rows_obey_the_min_count_of_their_id() -> None:
    """Query 8 has one pair: below the own id's min_count it reads the out-of-vocabulary row, wherever it stands. Where
    an audience has a table of its own, its own min_count holds."""
    rows = [(0, 0), (0, 1), (8, 1), (3, 1), (3, 2)]
    shared = tiny.recipe(query={"features": [{**tiny.USER, "min_count": 2}]}, label={"features": [ITEM, BY]})
    encoding = Encoding.fit(shared, data(rows))
    assert encoding.vocabularies["user_id"].ids.to_pylist() == ["u0", "u3"]
    assert encoding.audience.ids["by"].tolist() == [1, 1, 2, 0, 2]
    separate = tiny.recipe(label={"features": [ITEM, {**BY, "table": "fans", "min_count": 2}]})
    encoding = Encoding.fit(separate, data(rows))
    assert encoding.vocabularies["fans"].ids.to_pylist() == ["u0", "u3"]
    assert encoding.vocabularies["user_id"].ids.to_pylist() == ["u0", "u3", "u8"]
    (feature,) = [feature for feature in encoding.label_features if feature.name == "by"]
    assert (feature.kind, feature.vocabulary, feature.max_length) == ("audience", "fans", None)


@pytest.mark.parametrize(
    ("query", "label", "message"),
    [
        ([BY], [ITEM], "query feature 'by': expected kinds other than audience, which belongs to"),
        ([tiny.USER], [SEEN_FEATURE], "label feature 'seen': expected kinds other than history, which belongs to"),
        (
            [tiny.USER],
            [{**BY, "combiner": "sqrtn"}],
            "feature 'by': expected another combiner than 'sqrtn' where training draws",
        ),
        (
            [{**SEEN_FEATURE, "sample": 2, "combiner": "sqrtn"}],
            [ITEM],
            "feature 'seen': expected another combiner than 'sqrtn' where training draws",
        ),
        (
            [{**SEEN_FEATURE, "sample": 2, "half_life": 2}],
            [ITEM],
            "feature 'seen' of kind 'history': expected no half_life: sample leaves",
        ),
        ([tiny.USER], [{**BY, "sample": 2}], "feature 'by' of kind 'audience': expected no sample: only for history"),
        (
            [tiny.USER],
            [{**ITEM, "weights": "symmetric"}],
            "feature 'item_id' of kind 'id': expected no weights: only for history and",
        ),
        (
            [tiny.USER],
            [{**BY, "entries": "label_tower"}],
            "feature 'by' of kind 'audience': expected no entries: only for history",
        ),
        ([tiny.USER], [ITEM, {**BY, "table": "item_id"}], "expected ids of queries or of labels, received both"),
        ([SEEN_FEATURE], [{**BY, "table": "item_id"}], "expected ids of queries or of labels, received both"),
        (
            [tiny.USER],
            [ITEM, {**BY, "dim": 8}],
            "table 'user_id': expected one dim, and either ids or one kind and size,",
        ),
    ],
)
def test_impossible_audiences_are_refused(query: list[Any], label: list[Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny.recipe(query={"features": query}, label={"features": label})
