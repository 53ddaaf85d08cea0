"""A Keras model of raw columns as a tower of encoded features: traced, with its look-ups taken over by the bundle.

The model is called on symbolic columns while its preprocessing layers have another `call`. A first trace shows which
column each of them reads, and from that what kind of feature the column is. The tower is a second trace, in which the
layers look their outputs up by the encoder's rows, and columns are numbers, or stand-ins that have a shape alone.

Legend: `B` queries or labels, `P` list length, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from pydantic import JsonValue

from longtail.bundle import Feature, FeatureError, FeatureReader, Features, Inputs, Vocabulary
from longtail.trainer.errors import ExportError
from longtail.trainer.tfrs.columns import RawColumns, strings, values
from longtail.trainer.tfrs.features import RawColumn, blank
from longtail.trainer.tfrs.layers import INSIDE, LOOKUPS, TEXTS, check_layer, discretize

_SAME = frozenset({"Identity", "IdentityN", "StopGradient", "EnsureShape", "Snapshot"})
"""Operations whose output is their input."""
_SHAPED = frozenset({"ExpandDims", "Squeeze", "Reshape", "StridedSlice"})
"""Operations that keep values and change the shape, which `_again` does to other values."""
_OF_SHAPE = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})
"""Operations that look at the shape alone."""
_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")

Sources = Mapping[Any, str]
"""Names of raw columns by the reference of their tensor."""


@dataclass(frozen=True)
class TracedTower:
    """A tower with its conversion of raw columns.

    Attributes:
        function: tensors by input name, as `bundle.Feature` lists them, to embeddings float32 [B, D].
        columns: columns that reach the output, by name.
    """

    function: Callable[[dict[str, tf.Tensor]], tf.Tensor]
    columns: Mapping[str, RawColumn]

    @property
    def features(self) -> list[Feature]:
        """Get what a request gives."""
        return [feature for column in self.columns.values() for feature in column.features]

    @property
    def vocabularies(self) -> dict[str, Vocabulary]:
        """Get the vocabularies of the features, by name."""
        columns = self.columns.values()
        return {name: Vocabulary(strings(words)) for column in columns for name, words in column.vocabularies.items()}

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """Get the tower's inputs [bundle/FORMAT.md]."""
        return [tf.TensorSpec(shape, dtype, name) for f in self.features for name, (dtype, shape) in f.inputs.items()]

    def read(self, raw: RawColumns, title: str) -> Inputs:
        """Convert raw columns to the tower's inputs."""
        by_name: dict[str, list[JsonValue]] = {}
        for column in self.columns.values():
            for feature in column.features:
                by_name[feature.name] = values(raw.tensors[column.name], feature.kind, column.padding)
        rows: list[Features] = [dict(zip(by_name, row, strict=True)) for row in zip(*by_name.values(), strict=True)]
        try:
            return FeatureReader(self.features, self.vocabularies).read(rows)
        except FeatureError as error:
            raise ExportError(f"{title}: example {error.row}, {error.field}: {error.message}") from error


def trace(model: tf.Module, raw: RawColumns, title: str) -> TracedTower:
    """Trace a Keras model as a tower; refuses what a bundle cannot express, by column and layer or operation.

    Args:
        model: takes `raw` and has been called on it.
        raw: examples: their dtypes and widths are what the model takes, means of their numbers stand for missing ones.
    """
    layers = _preprocessing(model)
    uses, reached = _uses(model, layers, raw, title)
    columns = {
        name: RawColumn.derive(name, tensor, uses.get(name, ()), reached[name], title)
        for name, tensor in raw.tensors.items()
        if name in reached
    }
    if not columns:
        raise ExportError(f"{title}: expected an output that depends on {sorted(raw.tensors)}, found none that does")
    faults: list[str] = []
    tower = TracedTower(lambda inputs: _embed(model, layers, raw, columns, inputs, faults), columns)
    names = [feature.name for feature in tower.features]
    if len(set(names)) < len(names):
        raise ExportError(f"{title}: expected columns that become features of distinct names, found {names}")
    _graph(
        lambda *inputs: tower.function({spec.name: tensor for spec, tensor in zip(tower.specs, inputs, strict=True)}),
        tower.specs,
        title,
    )
    if faults:
        raise ExportError(f"{title}: {faults[0]}")
    return tower


def _uses(
    model: tf.Module, layers: Sequence[Any], raw: RawColumns, title: str
) -> tuple[dict[str, list[Any]], dict[str, set[str]]]:
    """Find the layers and operations that read each column."""
    uses: dict[str, list[Any]] = {}
    faults: list[str] = []

    def traced(*tensors: tf.Tensor) -> tf.Tensor:
        sources.update({tensor.ref(): name for name, tensor in zip(raw.tensors, tensors, strict=True)})

        def record(layer: Any, inputs: Any) -> Any:
            tensor = tf.convert_to_tensor(inputs)
            name, _, stopped = _origin(tensor, sources)
            if tensor.graph is not tensors[0].graph:  # Keras infers a shape, or a branch: the second trace shows it
                return type(layer).call(layer, inputs)
            if name is None:
                behind = min(_readers([tensor], sources), default=None)
                faults.append(
                    f"{title}: expected {type(layer).__name__} {layer.name!r} to read a feature as it is given, found "
                    f"{stopped} between {'no feature' if behind is None else f'feature {behind!r}'} and it: do that to "
                    "the data, before the model"
                )
            elif layer not in uses.setdefault(name, []):
                uses[name].append(layer)
            return type(layer).call(layer, inputs)

        with _replace_calls(layers, record):
            return model(raw.argument(dict(zip(raw.tensors, tensors, strict=True))))

    sources: dict[Any, str] = {}
    specs = [
        tf.TensorSpec([None, *column.shape[1:]], column.dtype, f"raw_{i}")
        for i, column in enumerate(raw.tensors.values())
    ]
    graph = _graph(traced, specs, title)
    if faults:
        raise ExportError(faults[0])
    return uses, _readers(list(graph.outputs), sources)


def _embed(
    model: tf.Module,
    layers: Sequence[Any],
    raw: RawColumns,
    columns: Mapping[str, RawColumn],
    inputs: dict[str, tf.Tensor],
    faults: list[str],
) -> tf.Tensor:
    """Embed encoded inputs, float32 [B, D]; collects faults, which AutoGraph would wrap if they were raised."""
    batch = tf.shape(next(iter(inputs.values())))[0]
    stand_ins = {
        name: columns[name].stand_in(inputs)
        if name in columns
        else blank(column.dtype, batch, [None, *column.shape[1:]])
        for name, column in raw.tensors.items()
    }
    hidden = {
        tensor.ref(): name for name, tensor in stand_ins.items() if name not in columns or columns[name].looked_up
    }

    def look_up(layer: Any, tensor: Any) -> Any:
        name, chain, _ = _origin(tf.convert_to_tensor(tensor), hidden)
        if name is None or name not in columns:  # on no way to the output
            return type(layer).call(layer, tensor)
        return columns[name].output(layer, inputs, lambda tensor: _again(chain, tensor))

    with _replace_calls(layers, look_up):
        embeddings = tf.cast(model(raw.argument(stand_ins)), tf.float32)
    for name, operations in _readers([embeddings], hidden).items():
        if unknown_operations := sorted(operations - _OF_SHAPE):
            faults.append(
                f"expected feature {name!r} to be read by StringLookup, IntegerLookup or "
                f"TextVectorization layers of the model alone, found {', '.join(unknown_operations)} as well: do that "
                "to the data, before the model"
            )
    return embeddings


def _graph(function: Callable[..., tf.Tensor], specs: Sequence[tf.TensorSpec], title: str) -> Any:
    try:
        return tf.function(function).get_concrete_function(*specs).graph
    except ExportError:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise ExportError(f"{title}: expected a model that tf.function can trace, found: {error}") from error


def _preprocessing(model: tf.Module) -> list[Any]:
    """List the preprocessing layers of a model; refuse layers that a bundle cannot express."""
    layers = [layer for layer in (model, *model.submodules) if isinstance(layer, LOOKUPS + TEXTS + INSIDE)]
    parts = [inner for layer in layers if isinstance(layer, TEXTS) for inner in layer.submodules]
    layers = [layer for layer in layers if all(layer is not part for part in parts)]
    for layer in layers:
        check_layer(layer)
    return layers


@contextmanager
def _replace_calls(layers: Sequence[Any], replacement: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Give layers another `call`, those of numbers, `INSIDE`, their own; a model's own tf.functions are inlined."""

    def bound(function: Callable[..., Any], layer: Any) -> Any:
        return tf.autograph.experimental.do_not_convert(lambda inputs: function(layer, inputs))

    eagerly = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    for layer in layers:
        object.__setattr__(layer, "call", bound(discretize if isinstance(layer, INSIDE) else replacement, layer))
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(eagerly)
        for layer in layers:
            object.__delattr__(layer, "call")


def _origin(tensor: tf.Tensor, sources: Sources) -> tuple[str | None, list[tf.Operation], str]:
    """Find the raw column of a tensor, up to its shape.

    Returns:
        The column or None; the operations in between, from the column on; and the operation where the walk ended.
    """
    chain: list[tf.Operation] = []
    while tensor.ref() not in sources:
        operation = tensor.op
        if not _keeps_values(operation):
            return None, chain, operation.type
        chain.insert(0, operation)
        tensor = operation.inputs[0]
    return sources[tensor.ref()], chain, ""


def _again(operations: list[tf.Operation], tensor: tf.Tensor) -> tf.Tensor:
    """Repeat the operations of `_origin` on another tensor."""
    for operation in operations:
        if operation.type == "ExpandDims":
            tensor = tf.expand_dims(tensor, tf.get_static_value(operation.inputs[1]))
        elif operation.type == "Squeeze":
            tensor = tf.squeeze(tensor, operation.get_attr("squeeze_dims") or None)
        elif operation.type == "Reshape":
            tensor = tf.reshape(tensor, operation.inputs[1])
        elif operation.type == "StridedSlice":
            begin, end, strides = operation.inputs[1:]
            masks = {name: operation.get_attr(name) for name in _MASKS}
            tensor = tf.raw_ops.StridedSlice(input=tensor, begin=begin, end=end, strides=strides, **masks)
    return tensor


def _readers(outputs: list[tf.Tensor], sources: Sources) -> dict[str, set[str]]:
    """Find the operations that read each raw column, without reshapes."""
    readers: dict[str, set[str]] = {sources[tensor.ref()]: set() for tensor in outputs if tensor.ref() in sources}
    ahead, visited = [tensor.op for tensor in outputs], set()
    while ahead:
        operation = ahead.pop()
        if operation.name in visited:
            continue
        visited.add(operation.name)
        for tensor in operation.inputs:
            column, _, _ = _origin(tensor, sources)
            if column is not None:
                read = readers.setdefault(column, set())
                if not _keeps_values(operation):
                    read.add(operation.type)
            ahead.append(tensor.op)
    return readers


def _keeps_values(operation: tf.Operation) -> bool:
    """Return whether an operation keeps values, up to the integer type."""
    if operation.type == "Cast":
        return bool(operation.get_attr("SrcT").is_integer and operation.get_attr("DstT").is_integer)
    if operation.type == "AsString":
        return bool(operation.inputs[0].dtype.is_integer and not operation.get_attr("fill"))
    return operation.type in _SAME or operation.type in _SHAPED
