"""A Keras model of raw columns as a tower of encoded features: traced, with its look-ups taken over by the bundle.

The model is called on symbolic columns while its preprocessing layers have another `call`. A first trace tells which
column each of them reads, and from that what kind of feature the column is. The tower is a second trace, in which the
layers look their outputs up by the encoder's rows, and columns are numbers, or stand-ins that have a shape alone.

Legend: `B` queries or labels, `P` list length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from pydantic import JsonValue

from longtail.bundle import FeatureError, FeatureReader, Features, Inputs, Vocabulary
from longtail.trainer.errors import ExportError
from longtail.trainer.tfrs.columns import Columns, strings, values
from longtail.trainer.tfrs.features import Column, Use, blank
from longtail.trainer.tfrs.graph import OF_SHAPE, again, behind, origin, readers
from longtail.trainer.tfrs.preprocessing import HASHES, INSIDE, LOOKUPS, check_lookup, inside
from longtail.trainer.tfrs.text import TEXTS, check_text
from longtail.trainer.tfrs.tower import QueryTower

Replacement = Callable[[Any, Any], Any]
"""From a layer and its input to its output."""


@dataclass(frozen=True)
class TracedTower:
    """A tower, and how raw columns are given to it.

    Attributes:
        tower: of encoded inputs.
        columns: what the model takes that reaches its output, by name.
    """

    tower: QueryTower
    columns: Mapping[str, Column]

    def features(self, raw: Columns) -> list[Features]:
        """What requests give for raw columns, one object per row."""
        by_name: dict[str, list[JsonValue]] = {}
        for column in self.columns.values():
            for feature in column.features:
                by_name[feature.name] = values(raw.tensors[column.name], feature.kind, column.padding)
        return [dict(zip(by_name, row, strict=True)) for row in zip(*by_name.values(), strict=True)]

    def read(self, raw: Columns, where: str) -> Inputs:
        """The tower's inputs for raw columns, by the encoder that the service uses.

        Raises:
            ExportError: a value that no request can give.
        """
        try:
            return FeatureReader(self.tower.features, self.tower.vocabularies).read(self.features(raw))
        except FeatureError as error:
            raise ExportError(f"{where}: example {error.row}, {error.field}: {error.message}") from error


def trace(model: tf.Module, raw: Columns, ids: Mapping[str, Any], where: str) -> TracedTower:
    """The tower of a Keras model.

    Args:
        model: that takes `raw` and has been called on it.
        raw: examples: their dtypes and widths are what the model takes, means of their numbers stand for missing ones.
        ids: the known ids of columns that a Hashing reads, by column.
        where: name of the tower, for errors.

    Raises:
        ExportError: what a bundle cannot express; names the column and the layer or the operation.
    """
    layers = _preprocessing(model)
    uses, reached = _uses(model, layers, raw, where)
    columns = {
        name: Column.of(name, raw.tensors[name], uses.get(name, []), ids.get(name), reached[name], where)
        for name in raw.tensors
        if name in reached
    }
    if not columns:
        raise ExportError(f"{where}: expected an output that depends on {sorted(raw.tensors)}, found none that does")
    features = [feature for column in columns.values() for feature in column.features]
    names = [feature.name for feature in features]
    if len(set(names)) < len(names):
        raise ExportError(f"{where}: expected columns that become features of distinct names, found {names}")
    faults: list[str] = []
    tower = QueryTower(
        lambda inputs: _embed(model, layers, raw, columns, inputs, faults),
        features,
        {
            name: Vocabulary(strings(known))
            for column in columns.values()
            for name, known in column.vocabularies.items()
        },
    )
    specs = [tf.TensorSpec(shape, dtype, name) for f in features for name, (dtype, shape) in f.inputs.items()]
    _graph(
        lambda *inputs: tower.function({spec.name: at for spec, at in zip(specs, inputs, strict=True)}), specs, where
    )
    if faults:
        raise ExportError(f"{where}: {faults[0]}")
    return TracedTower(tower, columns)


def _uses(
    model: tf.Module, layers: Sequence[Any], raw: Columns, where: str
) -> tuple[dict[str, list[Use]], dict[str, set[str]]]:
    """Which layers read which column, and the columns that reach the output with the operations that read them."""
    uses: dict[str, list[Use]] = {}
    faults: list[str] = []

    def traced(*tensors: tf.Tensor) -> tf.Tensor:
        sources.update({tensor.ref(): name for name, tensor in zip(raw.tensors, tensors, strict=True)})

        def record(layer: Any, inputs: Any) -> Any:
            tensor = tf.convert_to_tensor(inputs)
            name, _, stopped = origin(tensor, sources)
            if tensor.graph is not tensors[0].graph:  # Keras infers a shape, or a branch: the second trace tells
                return type(layer).call(layer, inputs)
            if name is None:
                name = behind(tensor, sources)
                faults.append(
                    f"{where}: expected {type(layer).__name__} {layer.name!r} to read a feature as it is given, found "
                    f"{stopped} between {'no feature' if name is None else f'feature {name!r}'} and it: do that to "
                    "the data, before the model"
                )
            else:
                uses.setdefault(name, []).append(Use(layer, tensor.dtype.is_integer))
            return type(layer).call(layer, inputs)

        with _replaced(layers, record):
            return model(raw.argument(dict(zip(raw.tensors, tensors, strict=True))))

    sources: dict[Any, str] = {}
    specs = [
        tf.TensorSpec([None, *column.shape[1:]], column.dtype, f"raw_{at}")
        for at, column in enumerate(raw.tensors.values())
    ]
    graph = _graph(traced, specs, where)
    if faults:
        raise ExportError(faults[0])
    return uses, readers(list(graph.outputs), sources)


def _embed(
    model: tf.Module,
    layers: Sequence[Any],
    raw: Columns,
    columns: Mapping[str, Column],
    inputs: dict[str, tf.Tensor],
    faults: list[str],
) -> tf.Tensor:
    """Embeddings of encoded inputs, float32 [B, D]; faults, which AutoGraph would wrap if they were raised."""
    batch = tf.shape(next(iter(inputs.values())))[0]
    stand_ins = {
        name: columns[name].stand_in(inputs)
        if name in columns
        else blank(column.dtype, batch, [None, *column.shape[1:]])
        for name, column in raw.tensors.items()
    }
    hidden = {
        stand_ins[name].ref(): name
        for name in stand_ins
        if name not in columns or not columns[name].numeric
    }  # fmt: skip

    def look_up(layer: Any, given: Any) -> Any:
        name, chain, _ = origin(tf.convert_to_tensor(given), hidden)
        if name is None or name not in columns:  # on no way to the output
            return type(layer).call(layer, given)
        return columns[name].output(layer, inputs, lambda tensor: again(chain, tensor))

    with _replaced(layers, look_up):
        embeddings = tf.cast(model(raw.argument(stand_ins)), tf.float32)
    for name, operations in readers([embeddings], hidden).items():
        if left := sorted(operations - OF_SHAPE):
            faults.append(
                f"expected feature {name!r} to be read by StringLookup, IntegerLookup, Hashing or "
                f"TextVectorization layers of the model alone, found {', '.join(left)} as well: do that to the data, "
                "before the model, or give a QueryTower of encoded inputs"
            )
    return embeddings


def _graph(function: Callable[..., tf.Tensor], specs: Sequence[tf.TensorSpec], where: str) -> Any:
    try:
        return tf.function(function).get_concrete_function(*specs).graph
    except ExportError:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise ExportError(f"{where}: expected a model that tf.function can trace, found: {error}") from error


def _preprocessing(model: tf.Module) -> list[Any]:
    """The preprocessing layers of a model; refuses those that a bundle cannot express."""
    layers = [layer for layer in (model, *model.submodules) if isinstance(layer, LOOKUPS + HASHES + TEXTS + INSIDE)]
    parts = [inner for layer in layers if isinstance(layer, TEXTS) for inner in layer.submodules]
    layers = [layer for layer in layers if all(layer is not part for part in parts)]
    for layer in layers:
        if isinstance(layer, LOOKUPS):
            check_lookup(layer)
        elif isinstance(layer, TEXTS):
            check_text(layer)
    return layers


@contextmanager
def _replaced(layers: Sequence[Any], replacement: Replacement) -> Iterator[None]:
    """Give layers another `call`, those of numbers, `INSIDE`, their own; a model's own tf.functions are inlined."""
    eagerly = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    for layer in layers:
        own = inside if isinstance(layer, INSIDE) else replacement
        object.__setattr__(layer, "call", _bound(own, layer))
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(eagerly)
        for layer in layers:
            object.__delattr__(layer, "call")


def _bound(function: Callable[..., Any], layer: Any) -> Callable[..., Any]:
    bound: Callable[..., Any] = tf.autograph.experimental.do_not_convert(
        lambda inputs, **others: function(layer, inputs, **others)
    )
    return bound
