"""Synthetic bundles for tests and benchmarks: a real ONNX query tower, no training."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import onnx
import pyarrow as pa
from onnx import TensorProto, helper, numpy_helper

from bundle import (
    Augmentation,
    BiasRemoval,
    Buckets,
    Bundle,
    Feature,
    Labels,
    Loss,
    Manifest,
    Vocabulary,
    log_frequencies,
)


def onnx_query_tower(users: np.ndarray, items: np.ndarray, *, cosine: bool) -> bytes:
    """`users[user_id] + Σ weight · items[history]` (+ L2 normalisation), as an ONNX model.

    Args:
        users: float32 [U, D].
        items: float32 [I, D].
        cosine: divide the output by its norm.
    """
    dim = users.shape[1]
    nodes = [
        helper.make_node("Gather", ["users", "user_id"], ["user"]),
        helper.make_node("Gather", ["items", "history"], ["seen"]),
        helper.make_node("Unsqueeze", ["history__weight", "last"], ["weight"]),
        helper.make_node("Mul", ["seen", "weight"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted", "first"], ["bag"], keepdims=0),
        helper.make_node("Add", ["user", "bag"], ["sum" if cosine else "embedding"]),
    ]
    if cosine:
        nodes.append(helper.make_node("LpNormalization", ["sum"], ["embedding"], axis=1, p=2))
    graph = helper.make_graph(
        nodes,
        "query_tower",
        [
            helper.make_tensor_value_info("user_id", TensorProto.INT32, ["B"]),
            helper.make_tensor_value_info("history", TensorProto.INT32, ["B", "P"]),
            helper.make_tensor_value_info("history__weight", TensorProto.FLOAT, ["B", "P"]),
        ],
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["B", dim])],
        [
            numpy_helper.from_array(users, "users"),
            numpy_helper.from_array(items, "items"),
            numpy_helper.from_array(np.array([2], np.int64), "last"),
            numpy_helper.from_array(np.array([1], np.int64), "first"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def make_bundle(
    *, labels: int = 60, dim: int = 8, users: int = 20, cosine: bool = True, bias: bool = False, seed: int = 0
) -> Bundle:
    """A valid bundle with Zipf counts, users `u0…` and labels `item-0…`; not yet written."""
    rng = np.random.default_rng(seed)

    def rows(count: int) -> np.ndarray:
        array = rng.standard_normal((count, dim), dtype=np.float32)
        return array / np.linalg.norm(array, axis=1, keepdims=True)

    counts = (1000 / np.arange(1, labels + 1)).astype(np.int64)
    counts = counts[rng.permutation(labels)]
    embeddings = rows(labels) if cosine else rows(labels) * rng.uniform(0.5, 2, (labels, 1)).astype(np.float32)
    log_pn = log_frequencies(counts).astype(np.float32)
    biases = rng.standard_normal(labels, dtype=np.float32) if bias else None
    temperature = 0.1
    augmentation = Augmentation.conditioned(temperature, embeddings, log_pn, biases)
    buckets = Buckets.by_quantile(counts)
    ids = pa.array([f"item-{row}" for row in range(labels)])
    return Bundle(
        manifest=Manifest(
            schema_version=1,
            name="synthetic",
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
            labels=labels,
            dim=dim,
            similarity="cosine" if cosine else "dot",
            temperature=temperature,
            label_bias=bias,
            kappa=augmentation.kappa,
            kappa_bias=augmentation.kappa_bias,
            loss=Loss(family="softmax", sampler="in_batch", weight="unit"),
            query_features=[
                Feature(name="user_id", kind="id", vocabulary="users"),
                Feature(name="history", kind="history", vocabulary="items", max_length=10),
            ],
            display=["title"],
            buckets=buckets,
            bias_removal=BiasRemoval(default=0.5),
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
        ),
        embeddings=embeddings,
        calibration_queries=rows(50),
        query_tower=onnx_query_tower(rows(users + 1), rows(labels + 1), cosine=cosine),
        vocabularies={"users": Vocabulary(pa.array([f"u{user}" for user in range(users)])), "items": Vocabulary(ids)},
    )
