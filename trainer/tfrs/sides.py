"""One side of a model, ready for the bundle: its ONNX tower, checked against the model itself.

Legend: `B` examples, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from longtail.bundle.arrays import Array, Float32
from longtail.trainer.errors import ExportError
from longtail.trainer.export.onnx import check_parity
from longtail.trainer.tfrs.columns import Columns, floats
from longtail.trainer.tfrs.tower import QueryTower
from longtail.trainer.tfrs.tracing import trace


@dataclass(frozen=True)
class ExportedTower:
    """A tower that computes what its model does.

    Attributes:
        tower: of encoded inputs.
        onnx: the same as ONNX Runtime runs it.
        embeddings: float32 [B, D], the model's of the examples.
        columns: what the model takes of queries that are given as the examples were.
        embed: the model's embeddings of such columns, float32 [n, D].
    """

    tower: QueryTower
    onnx: bytes
    embeddings: Float32
    columns: Callable[[Any], Columns]
    embed: Callable[[Columns], Float32]


def exported(model: tf.Module, raw: Columns, ids: Mapping[str, Any], where: str) -> ExportedTower:
    """The tower of a Keras model of raw columns.

    What the model says of the examples is compared with what the service would: the values that a request gives for
    them, read by the bundle's own encoder, through ONNX Runtime: of all in one batch, and of the first alone.

    Args:
        model: takes `raw`.
        raw: examples.
        ids: known ids of columns that a Hashing reads, by column.
        where: name of the tower, for errors.

    Raises:
        ExportError: a model that a bundle cannot express, or that computes something else in ONNX.
    """

    def columns(given: Any) -> Columns:
        of = Columns.of(given, next(iter(raw.tensors)), where)
        if set(of.tensors) != set(raw.tensors) or of.single != raw.single:
            raise ExportError(f"{where}: expected the columns {sorted(raw.tensors)}, received {sorted(of.tensors)}")
        return of

    first = raw.take([0])
    embeddings_BD = raw.embed(model, where)
    traced = trace(model, raw, ids, where)
    onnx = traced.tower.to_onnx(where)
    check_parity(where, onnx, traced.read(raw, where), embeddings_BD)
    try:
        check_parity("the first row alone", onnx, traced.read(first, where), embeddings_BD[:1])
    except ExportError as error:
        raise ExportError(
            f"{where}: expected a model whose output for a row does not depend on the others of its batch (as padding "
            f"without a mask makes it), found: {error}"
        ) from error
    return ExportedTower(traced.tower, onnx, embeddings_BD, columns, lambda of: of.embed(model, where))


def encoded(tower: QueryTower, inputs: Mapping[str, Array], where: str) -> ExportedTower:
    """A tower that is given as a function of encoded inputs, with examples of them.

    Args:
        tower: the function.
        inputs: examples, [B] or [B, P] by input name.
        where: name of the tower, for errors.

    Raises:
        ExportError: a function that ONNX cannot run, or that computes something else there.
    """

    def embed(columns: Columns) -> Float32:
        return floats(tower.function(dict(columns.tensors)))

    def columns(given: Any) -> Columns:
        if not isinstance(given, Mapping):
            raise ExportError(
                f"{where}: expected the inputs of the QueryTower by name, received {type(given).__name__}"
            )
        return Columns.of(given, "", where)

    embeddings_BD = embed(Columns({name: tf.constant(column) for name, column in inputs.items()}))
    onnx = tower.to_onnx(where)
    check_parity(where, onnx, {name: np.asarray(column) for name, column in inputs.items()}, embeddings_BD)
    return ExportedTower(tower, onnx, embeddings_BD, columns, embed)
