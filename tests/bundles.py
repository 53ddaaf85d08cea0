"""Synthetic bundles for tests and benchmarks: a real ONNX query tower, no training."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
from onnx import NodeProto, TensorProto, helper, numpy_helper
from pydantic import JsonValue

from longtail.bundle import (
    SCHEMA_VERSION,
    Augmentation,
    BiasRemoval,
    Buckets,
    Bundle,
    Feature,
    Labels,
    Loss,
    Manifest,
    Proposal,
    Vocabulary,
    log_frequencies,
)
from longtail.bundle.cooccurrence import Cooccurrence
from longtail.bundle.histories import Remembered
from longtail.bundle.manifest import CooccurrenceSettings, LogColumns


def onnx_query_tower(users: np.ndarray, items: np.ndarray, *, cosine: bool) -> bytes:
    """`users[user_id] + Σ weight · items[history]` (+ L2 normalisation), as an ONNX model.

    Args:
        users: float32 [U, D].
        items: float32 [I, D].
        cosine: divide the output by its norm.
    """
    nodes = [
        helper.make_node("Gather", ["users", "user_id"], ["user"]),
        *_sum_rows("items", "history"),
        helper.make_node("Add", ["user", "bag"], ["sum"]),
    ]
    inputs = {"user_id": (TensorProto.INT32, ["B"])} | _list_inputs("history")
    return _tower("query_tower", nodes, inputs, {"users": users, "items": items}, cosine=cosine)


def onnx_label_tower(items: np.ndarray, genres: np.ndarray, *, cosine: bool) -> bytes:
    """`items[item_id] + Σ weight · genres[genre] + year · genres[0]` (+ L2 normalisation), as an ONNX model.

    Args:
        items: float32 [I, D].
        genres: float32 [G, D].
        cosine: divide the output by its norm.
    """
    nodes = [
        helper.make_node("Gather", ["own", "item_id"], ["item"]),
        *_sum_rows("genres_table", "genres"),
        helper.make_node("Unsqueeze", ["year", "first"], ["years"]),
        helper.make_node("Mul", ["years", "per_year"], ["dated"]),
        helper.make_node("Sum", ["item", "bag", "dated"], ["sum"]),
    ]
    inputs = {"item_id": (TensorProto.INT32, ["B"])} | _list_inputs("genres") | {"year": (TensorProto.FLOAT, ["B"])}
    tables = {"own": items, "genres_table": genres, "per_year": genres[:1]}
    return _tower("label_tower", nodes, inputs, tables, cosine=cosine)


def _sum_rows(table: str, feature: str) -> list[NodeProto]:
    """Nodes that compute `bag` = Σ weight · table[feature]."""
    return [
        helper.make_node("Gather", [table, feature], ["rows"]),
        helper.make_node("Unsqueeze", [f"{feature}__weight", "last"], ["weight"]),
        helper.make_node("Mul", ["rows", "weight"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted", "first"], ["bag"], keepdims=0),
    ]


def _list_inputs(feature: str) -> dict[str, tuple[int, list[str]]]:
    return {feature: (TensorProto.INT32, ["B", "P"]), f"{feature}__weight": (TensorProto.FLOAT, ["B", "P"])}


def _tower(
    name: str,
    nodes: list[NodeProto],
    inputs: dict[str, tuple[int, list[str]]],
    tables: dict[str, np.ndarray],
    *,
    cosine: bool,
) -> bytes:
    """A model of nodes that compute `sum`, with the types and shapes of its inputs."""
    last = "LpNormalization" if cosine else "Identity"
    nodes = [*nodes, helper.make_node(last, ["sum"], ["embedding"], **({"axis": 1, "p": 2} if cosine else {}))]
    constants = tables | {"last": np.array([2], np.int64), "first": np.array([1], np.int64)}
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(feature, kind, shape) for feature, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["B", next(iter(tables.values())).shape[1]])],
        [numpy_helper.from_array(array, table) for table, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def move_tables(bundle: Bundle, folder: Path) -> Bundle:
    """The bundle with the embedding tables of its towers in files, as exports leave large ones."""
    names = {"users": "users", "items": "items", "own": "own", "genres_table": "genres"}
    models, files = [], {}
    (folder / "tables").mkdir()
    for content in (bundle.query_tower, bundle.label_tower):
        model = None if content is None else onnx.load_from_string(content)
        for tensor in [] if model is None else model.graph.initializer:
            if tensor.name in names:
                file = files[names[tensor.name]] = folder / "tables" / f"{names[tensor.name]}.npy"
                np.save(file, numpy_helper.to_array(tensor))
                location = {"location": f"tables/{file.name}", "offset": 128, "length": len(tensor.raw_data)}
                tensor.ClearField("raw_data")
                tensor.data_location = TensorProto.EXTERNAL
                for key, value in location.items():
                    tensor.external_data.add(key=key, value=str(value))
        models.append(None if model is None else model.SerializeToString())
    return replace(bundle, query_tower=models[0], label_tower=models[1], tables=files)


def label_features(row: int) -> dict[str, JsonValue]:
    """Features of label `row` of a bundle with a label tower, but for its own id: genre `g0…g4` and year."""
    return {"genres": [f"g{row % 5}"], "year": row % 3 - 1}


def label_tree(points_LK: np.ndarray, counts_L: np.ndarray, *, sharpness: float) -> tuple[np.ndarray, ...]:
    """A tree such as training fits, in closed form: weights [N, K], biases [N] and leaf_labels [N] of a `Proposal`.

    Every node halves its labels along one coordinate of their points; its w and b are the log-odds of two normal
    distributions of variance 1 / sharpness around the halves' means, weighted by their counts.
    """
    labels, dims = points_LK.shape
    depth = (labels - 1).bit_length()
    weights, biases = np.zeros((1 << depth, dims), np.float32), np.zeros(1 << depth, np.float32)
    rows_L, sizes = np.arange(labels), np.array([labels])
    for level in range(depth):
        nodes_L = np.repeat(np.arange(len(sizes)), sizes)
        rows_L = rows_L[np.lexsort((points_LK[rows_L, level % dims], nodes_L))]
        halves = np.stack([sizes - sizes // 2, sizes // 2], axis=1).ravel()
        half_L = np.repeat(np.arange(len(halves)), halves)
        mass_L = counts_L[rows_L] + 0.5
        mass = np.maximum(np.bincount(half_L, mass_L, minlength=len(halves)), 1e-9)
        means = np.zeros((len(halves), dims))
        np.add.at(means, half_L, mass_L[:, None] * points_LK[rows_L])
        means /= mass[:, None]
        two = (sizes > 1)[:, None]
        here = slice(1 << level, 2 << level)
        weights[here] = np.where(two, sharpness * (means[1::2] - means[::2]), 0)
        squares = (means**2).sum(axis=1)
        odds = np.log(mass[1::2] / mass[::2]) - sharpness / 2 * (squares[1::2] - squares[::2])
        biases[here] = np.where(sizes > 1, odds, -1e4 * sizes)
        sizes = halves
    leaf_labels = np.full(1 << depth, -1, np.int32)
    leaf_labels[sizes == 1] = rows_L
    return weights, biases, leaf_labels


def log_p_n(proposal: Proposal, z_K: np.ndarray) -> np.ndarray:
    """log p_n(y|x) of every label by walking to its leaf, one after the other, float64 [L]."""
    log_p_L = np.zeros(int(proposal.leaf_labels.max()) + 1)
    for leaf, label in enumerate(proposal.leaf_labels):
        node = 1
        for level in reversed(range(len(proposal.leaf_labels).bit_length() - 1)):
            right = leaf >> level & 1
            activation = proposal.weights[node].astype(np.float64) @ z_K + proposal.biases[node]
            if label >= 0:
                log_p_L[label] -= np.logaddexp(0, -activation if right else activation)
            node = 2 * node + right
    return log_p_L


def random_cooccurrence(labels: int, rng: np.random.Generator) -> Cooccurrence:
    """W with up to 6 neighbours a label, none of every sixth; R = 5, γ = .8, ω = .5."""
    settings = CooccurrenceSettings(
        default=0.5, maximum=2.0, kind="walk", neighbours=6, last=5, decay=0.8, log=LogColumns(query_id="user_id")
    )
    rows = np.full((labels, 6), -1, np.int32)
    for label, count in enumerate(rng.integers(1, 7, labels) * (np.arange(labels) % 6 > 0)):
        others = rng.permutation(labels)
        rows[label, :count] = others[others != label][:count]
    weights = np.where(rows < 0, 0, -np.sort(-rng.uniform(1, 12, rows.shape), axis=1)).astype(np.float32)
    return Cooccurrence(settings, rows, weights, rng.uniform(1, 9, labels).astype(np.float32))


def make_bundle(
    *,
    labels: int = 60,
    dim: int = 8,
    users: int = 20,
    cosine: bool = True,
    bias: bool = False,
    proposal: bool = False,
    label_tower: bool = False,
    popularity: bool = False,
    cooccurrence: bool = False,
    queries: int = 50,
    seed: int = 0,
) -> Bundle:
    """A valid bundle with Zipf counts, users `u0…` and labels `item-0…`; not yet written.

    Args:
        labels: L.
        dim: D.
        users: U.
        cosine: similarity; else dot, with rows of different norms.
        bias: whether labels have one.
        proposal: whether there is a tree p_n(y|x). Its eight coordinates have nothing to do with the embeddings:
            a model learns f to be what its proposal does not say.
        label_tower: whether labels are embedded from features: `item_id` their own id, `label_features` the others.
        popularity: whether log π is a column of its own, beside log ν of the noise (π + 1/L) / 2.
        cooccurrence: whether there is W, of up to 6 neighbours of five labels in six, and the last labels of each user.
        queries: to calibrate with, 50 at most: every trial of an index searches for all, at every dial point.
        seed: of all of it.
    """
    rng = np.random.default_rng(seed)

    def rows(count: int) -> np.ndarray:
        array = rng.standard_normal((count, dim), dtype=np.float32)
        return array / np.linalg.norm(array, axis=1, keepdims=True)

    counts = (1000 / np.arange(1, labels + 1)).astype(np.int64)
    counts = counts[rng.permutation(labels)]
    embeddings = rows(labels) if cosine else rows(labels) * rng.uniform(0.5, 2, (labels, 1)).astype(np.float32)
    tower, label_inputs = None, []
    genres = Vocabulary(pa.array([f"g{genre}" for genre in range(5)]))
    if label_tower:
        own_rows, genre_rows = rows(labels + 1), rows(6)
        label_rows = np.arange(labels)
        embeddings = (
            own_rows[1:]
            + genre_rows[1 + label_rows % 5]
            + (label_rows % 3 - 1)[:, None].astype(np.float32) * genre_rows[0]
        )
        if cosine:
            embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
        tower = onnx_label_tower(own_rows, genre_rows, cosine=cosine)
        label_inputs = [
            Feature(name="item_id", kind="id", vocabulary="items"),
            Feature(name="genres", kind="bag", vocabulary="genres", max_length=3),
            Feature(name="year", kind="number", missing=0.5),
        ]
    log_pi = log_frequencies(counts).astype(np.float32)
    log_pn = np.log((np.exp(log_pi) + 1 / labels) / 2) if popularity else log_pi
    noise = "(π + 1/L) / 2" if popularity else "p_n(y|x)" if proposal else "π"
    biases = rng.standard_normal(labels, dtype=np.float32) if bias else None
    temperature = 0.1
    augmentation = Augmentation.fitted(temperature, embeddings, log_pn, biases, log_pi if popularity else None)
    buckets = Buckets.by_quantile(counts)
    ids = pa.array([f"item-{row}" for row in range(labels)])
    calibration_queries, user_rows, item_rows = rows(50)[:queries], rows(users + 1), rows(labels + 1)
    tree = None
    if proposal:
        z_dims = 8
        points, of_users, of_items = (
            rng.standard_normal((count, z_dims), dtype=np.float32) for count in (labels, users + 1, labels + 1)
        )
        weights, biases_N, leaf_labels = label_tree(points, counts, sharpness=1.0)
        projection = {"user_id": of_users, "history": of_items / 2}
        tree = Proposal(projection, np.full(z_dims, 0.1, np.float32), weights, biases_N, leaf_labels)
    together, remembered = None, None
    if cooccurrence:
        together = random_cooccurrence(labels, rng)
        history_rows = np.stack([rng.permutation(labels)[:8] for _ in range(users + 1)]).astype(np.int32)
        # Users have 0 to 7 entries, the unknown one none.
        history_rows[np.arange(8) < 8 - np.arange(users + 1)[:, None] % 8] = -1
        remembered = Remembered(Vocabulary(pa.array([f"u{user}" for user in range(users)])), history_rows)
    return Bundle(
        manifest=Manifest(
            schema_version=SCHEMA_VERSION,
            name="synthetic",
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
            labels=labels,
            dim=dim,
            similarity="cosine" if cosine else "dot",
            temperature=temperature,
            label_bias=bias,
            kappa=augmentation.kappa,
            kappa_bias=augmentation.kappa_bias,
            kappa_popularity=augmentation.kappa_popularity,
            loss=Loss(family="softmax", sampler="in_batch", weight="unit"),
            query_features=[
                Feature(name="user_id", kind="id", vocabulary="users"),
                Feature(name="history", kind="history", vocabulary="items", max_length=10),
            ],
            label_features=label_inputs,
            own_id="item_id" if label_tower else None,
            display=["title"],
            buckets=buckets,
            bias_removal=BiasRemoval(default=0.5, noise=noise, minimum=0.0 if proposal else -1.0),
            cooccurrence=together and together.settings,
            training_data={"fingerprint": "0" * 64, "pairs": int(counts.sum())},
            software={"longtail": "0.1.0"},
        ),
        labels=Labels(
            ids=ids,
            counts=counts,
            log_pn=log_pn,
            buckets=buckets.assign(counts),
            bias=biases,
            display=pa.table({"title": [f"Title {row}" for row in range(labels)]}),
            log_popularity=log_pi if popularity else None,
        ),
        embeddings=embeddings,
        calibration_queries=calibration_queries,
        query_tower=onnx_query_tower(user_rows, item_rows, cosine=cosine),
        label_tower=tower,
        vocabularies={"users": Vocabulary(pa.array([f"u{user}" for user in range(users)])), "items": Vocabulary(ids)}
        | ({"genres": genres} if label_tower else {}),
        proposal=tree,
        cooccurrence=together,
        remembered=remembered,
    )
