"""One side of a model, ready for the bundle: its ONNX tower, checked against the model itself.

Legend: `B` examples, `D` dimensions.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx
import tensorflow as tf
import tf2onnx
from onnx import TensorProto, helper, numpy_helper

from longtail.bundle.arrays import Float32
from longtail.bundle.tower import OnnxTower, onnx_session
from longtail.trainer.errors import ExportError
from longtail.trainer.export.onnx import ONNX_LIMIT, check_parity
from longtail.trainer.tfrs.columns import RawColumns
from longtail.trainer.tfrs.tracing import TracedTower, trace

_OPSET = 17


@dataclass(frozen=True)
class ExportedTower:
    """Hold a tower with the outputs of its model; `embeddings` are those of the examples, float32 [B, D]."""

    model: tf.Module
    raw: RawColumns
    title: str
    tower: TracedTower
    onnx: bytes
    embeddings: Float32

    def columns(self, values: Any) -> RawColumns:
        """Read what the model takes, given as the examples were."""
        columns = RawColumns.read(values, next(iter(self.raw.tensors)), self.title)
        if set(columns.tensors) != set(self.raw.tensors) or columns.single != self.raw.single:
            raise ExportError(
                f"{self.title}: expected the columns {sorted(self.raw.tensors)}, received {sorted(columns.tensors)}"
            )
        return columns

    def onnx_tower(self, own_id: str | None = None) -> OnnxTower:
        """Return the tower for a bundle."""
        return OnnxTower(self.onnx, self.tower.features, self.tower.vocabularies, own_id)

    def embed(self, columns: RawColumns) -> Float32:
        """Compute the model's embeddings, float32 [n, D]."""
        return columns.embed(self.model, self.title)


def export_tower(model: tf.Module, raw: RawColumns, title: str) -> ExportedTower:
    """Export a Keras model of raw columns; refuses one that a bundle cannot express or that ONNX computes otherwise.

    The model's embeddings of the examples are compared with the service's: the values that a request gives for them,
    read by the bundle's own encoder, through ONNX Runtime: of all in one batch, and of the first alone.
    """
    first = raw.take([0])
    embeddings_BD = raw.embed(model, title)
    tower = trace(model, raw, title)
    content = _to_onnx(tower, title)
    check_parity(title, content, tower.read(raw, title), embeddings_BD)
    try:
        check_parity("the first row alone", content, tower.read(first, title), embeddings_BD[:1])
    except ExportError as error:
        raise ExportError(
            f"{title}: expected a model whose output for a row does not depend on the others of its batch (as padding "
            f"without a mask makes it), found: {error}"
        ) from error
    return ExportedTower(model, raw, title, tower, content, embeddings_BD)


def _to_onnx(tower: TracedTower, title: str) -> bytes:
    """Convert a tower to ONNX: its inputs by name, one output `embedding`."""
    specs = tower.specs

    def named(*inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"embedding": tower.function({spec.name: tensor for spec, tensor in zip(specs, inputs, strict=True)})}

    traced = tf.function(named)
    graph = traced.get_concrete_function(*specs).graph
    size = sum(variable.dtype.size * variable.shape.num_elements() for variable in graph.variables)
    if size > ONNX_LIMIT:
        raise ExportError(f"{title}: expected at most {ONNX_LIMIT} bytes of weights, ONNX's limit, found {size}")
    try:
        with _quiet():
            convert = tf.autograph.experimental.do_not_convert(tf2onnx.convert.from_function)
            model, _ = convert(traced, input_signature=specs, opset=_OPSET)
        _embed_constants(model, graph)
        _keep_inputs(model, specs)
        content: bytes = model.SerializeToString()
        onnx_session(content, title)
    # Both raise errors of any type; what tf2onnx silently leaves unconverted, ONNX Runtime refuses.
    except Exception as error:
        raise ExportError(
            f"{title}: expected operations that ONNX has: do others to the data, before the model; found: {error}"
        ) from error
    return content


def _embed_constants(model: onnx.ModelProto, graph: Any) -> None:
    """Turn captured eager tensors, such as a Normalization's mean, into constants.

    tf2onnx does that to variables only.
    """
    values = {inner.name: outer for outer, inner in graph.captures if outer.dtype != tf.resource}
    for node in [node for node in model.graph.input if node.name in values]:
        model.graph.input.remove(node)
        model.graph.initializer.append(numpy_helper.from_array(values[node.name].numpy(), node.name))


def _keep_inputs(model: onnx.ModelProto, specs: Sequence[tf.TensorSpec]) -> None:
    """Declare the inputs that the function does not use."""
    declared = {node.name for node in model.graph.input}
    for spec in specs:
        if spec.name not in declared:
            of_type = TensorProto.FLOAT if spec.dtype == tf.float32 else TensorProto.INT32
            model.graph.input.append(helper.make_tensor_value_info(spec.name, of_type, [None, *spec.shape[1:]]))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings and log lines of tf2onnx."""
    loggers = tf.get_logger(), logging.getLogger("tf2onnx")
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
