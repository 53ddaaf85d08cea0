"""A tower as a service can run it: inputs encoded as a bundle says, no lookup of strings inside.

Legend: `B` queries, `P` list length, `D` dimensions.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import tensorflow as tf
import tf2onnx
from onnx import TensorProto, helper, numpy_helper

from longtail.bundle import Feature, Vocabulary, onnx_session
from longtail.trainer import backend
from longtail.trainer.errors import ExportError
from longtail.trainer.export.onnx import ONNX_LIMIT

_OPSET = 17


@dataclass(frozen=True)
class QueryTower:
    """A query model of encoded inputs.

    Attributes:
        function: tensors by input name, as `bundle.Feature` lists them (`id`: `NAME` int32 [B]; `history`, `bag`
            and `text`: `NAME` int32 and `NAME__weight` float32 [B, P]; `number`: `NAME` float32 [B]), to query
            embeddings float32 [B, D]. Anything TensorFlow can trace and tf2onnx can convert.
        features: what a request gives.
        vocabularies: of the features, by the name they call it.
    """

    function: Callable[[dict[str, tf.Tensor]], tf.Tensor]
    features: Sequence[Feature]
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)

    def to_onnx(self, where: str = "query tower") -> bytes:
        """The tower as an ONNX model: the inputs by name, one output `embedding`.

        Args:
            where: name of the tower, for errors.

        Raises:
            ExportError: weights beyond ONNX's 2 GiB, or an operation that ONNX does not have.
        """
        specs = [spec for feature in self.features for spec in _specs(feature)]

        def named(*inputs: tf.Tensor) -> dict[str, tf.Tensor]:
            by_name = {spec.name: tensor for spec, tensor in zip(specs, inputs, strict=True)}
            return {"embedding": tf.cast(self.function(by_name), tf.float32)}

        traced = tf.function(named)
        graph = traced.get_concrete_function(*specs).graph
        size = sum(variable.dtype.size * variable.shape.num_elements() for variable in graph.variables)
        if size > ONNX_LIMIT:
            raise ExportError(f"{where}: expected at most {ONNX_LIMIT} bytes of weights, ONNX's limit, found {size}")
        try:
            with _quiet():
                convert = backend.without_autograph(tf2onnx.convert.from_function)
                model, _ = convert(traced, input_signature=specs, opset=_OPSET)
            _embed_constants(model, graph)
            _keep_inputs(model, specs)
            content: bytes = model.SerializeToString()
            onnx_session(content, where)
        # Both raise errors of any type; what tf2onnx silently leaves unconverted, ONNX Runtime refuses.
        except Exception as error:
            raise ExportError(
                f"{where}: expected operations that ONNX has; for look-ups of strings, hashing and text, give a "
                f"QueryTower of encoded inputs. Found: {error}"
            ) from error
        return content


def split_lookup(model: tf.keras.Model) -> tuple[Vocabulary, Callable[[tf.Tensor], tf.Tensor]]:
    """Part `Sequential[StringLookup or IntegerLookup, Embedding, …]` into what a bundle keeps apart.

    Args:
        model: a `tf.keras.Sequential` (of Sequentials) that begins with a lookup of one out-of-vocabulary index.

    Returns:
        The vocabulary, integers as their decimal strings, and the rest of the model as a function of the
        vocabulary's rows: int32 of any shape, 0 for out-of-vocabulary.

    Raises:
        ExportError: another kind of model or of lookup.
    """
    layers = _chain(model)
    lookup = layers[0] if layers else None
    if not isinstance(lookup, tf.keras.layers.StringLookup | tf.keras.layers.IntegerLookup):
        raise ExportError(
            f"query model {model.name!r}: expected a Sequential that begins with a StringLookup or IntegerLookup, "
            f"found {type(lookup or model).__name__}: give a QueryTower, with split_lookup for each lookup inside"
        )
    config = lookup.get_config()
    for option, expected in (("num_oov_indices", 1), ("output_mode", "int"), ("invert", False)):
        if config[option] != expected:
            raise ExportError(f"{lookup.name}: expected {option}={expected}, found {config[option]}")
    tokens = lookup.get_vocabulary()
    unknown = int(config["mask_token"] is not None)
    rows = [index for index in range(len(tokens)) if index != unknown]
    index_of_row = np.array([unknown, *rows], np.int64)

    def rest(row: tf.Tensor) -> tf.Tensor:
        output = tf.gather(index_of_row, row)
        for layer in layers[1:]:
            output = layer(output)
        return output

    return Vocabulary(pa.array([str(tokens[index]) for index in rows], pa.string())), rest


def begins_with_lookup(model: Any) -> bool:
    """Whether a model is a Sequential that `split_lookup` can part."""
    layers = _chain(model)
    return len(layers) > 1 and isinstance(layers[0], tf.keras.layers.StringLookup | tf.keras.layers.IntegerLookup)


def _embed_constants(model: onnx.ModelProto, graph: Any) -> None:
    """Turn inputs that stand for tensors of the eager process (a Normalization's mean) into what they hold.

    tf2onnx does that to variables only.
    """
    values = {inner.name: outer for outer, inner in graph.captures if outer.dtype != tf.resource}
    for node in [node for node in model.graph.input if node.name in values]:
        model.graph.input.remove(node)
        model.graph.initializer.append(numpy_helper.from_array(values[node.name].numpy(), node.name))


def _keep_inputs(model: onnx.ModelProto, specs: Sequence[tf.TensorSpec]) -> None:
    """Declare the inputs that the function does not use, such as whether a vector is missing."""
    declared = {node.name for node in model.graph.input}
    for spec in specs:
        if spec.name not in declared:
            of_type = TensorProto.FLOAT if spec.dtype == tf.float32 else TensorProto.INT32
            model.graph.input.append(helper.make_tensor_value_info(spec.name, of_type, [None, *spec.shape[1:]]))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide tf2onnx' FutureWarning, and log lines about look-up tables and about errors that are raised as well."""
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


def _chain(layer: tf.keras.layers.Layer) -> list[tf.keras.layers.Layer]:
    """The layers of nested Sequentials, in order."""
    if not isinstance(layer, tf.keras.Sequential):
        return [layer]
    return [leaf for inner in layer.layers for leaf in _chain(inner)]


def _specs(feature: Feature) -> list[tf.TensorSpec]:
    """The tower's inputs for one feature [bundle/FORMAT.md]."""
    return [tf.TensorSpec(shape, dtype, name) for name, (dtype, shape) in feature.inputs.items()]
