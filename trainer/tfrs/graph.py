"""Where a tensor of a traced graph comes from: the raw column behind it, and the operations in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

SAME = frozenset({"Identity", "IdentityN", "StopGradient", "EnsureShape", "Snapshot"})
"""Operations whose output is their input."""
SHAPED = frozenset({"ExpandDims", "Squeeze", "Reshape", "StridedSlice"})
"""Operations that keep values and change their places, which `again` does to other values."""
OF_SHAPE = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})
"""Operations that look at the shape alone."""


def origin(tensor: tf.Tensor, sources: Mapping[Any, str]) -> tuple[str | None, list[tf.Operation], str]:
    """The raw column that a tensor is, but for its shape.

    Args:
        tensor: of a graph, of any shape.
        sources: names of raw columns by the reference of their tensor.

    Returns:
        The column or None; the operations in between, from the column on; and the operation where the walk ended.
    """
    chain: list[tf.Operation] = []
    while tensor.ref() not in sources:
        operation = tensor.op
        if operation.type not in SAME and operation.type not in SHAPED and not _keeps_ids(operation):
            return None, chain, operation.type
        chain.insert(0, operation)
        tensor = operation.inputs[0]
    return sources[tensor.ref()], chain, ""


def again(operations: list[tf.Operation], tensor: tf.Tensor) -> tf.Tensor:
    """What `origin` found in between, done to another tensor of the same shape."""
    for operation in operations:
        if operation.type == "ExpandDims":
            tensor = tf.expand_dims(tensor, tf.get_static_value(operation.inputs[1]))
        elif operation.type == "Squeeze":
            tensor = tf.squeeze(tensor, operation.get_attr("squeeze_dims") or None)
        elif operation.type == "Reshape":
            tensor = tf.reshape(tensor, operation.inputs[1])
        elif operation.type == "StridedSlice":
            masks = {
                name: operation.get_attr(name)
                for name in ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
            }
            begin, end, strides = operation.inputs[1:]
            tensor = tf.raw_ops.StridedSlice(input=tensor, begin=begin, end=end, strides=strides, **masks)
    return tensor


def behind(tensor: tf.Tensor, sources: Mapping[Any, str]) -> str | None:
    """The first raw column that a tensor of any shape depends on, if it does on any."""
    found = readers([tensor], sources)
    return min(found) if found else None


def readers(outputs: list[tf.Tensor], sources: Mapping[Any, str]) -> dict[str, set[str]]:
    """Types of the operations that read raw columns on their way to outputs of any shape, by column, but reshapes."""
    found: dict[str, set[str]] = {sources[tensor.ref()]: set() for tensor in outputs if tensor.ref() in sources}
    ahead, seen = [tensor.op for tensor in outputs], set()
    while ahead:
        operation = ahead.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        for tensor in operation.inputs:
            column, _, _ = origin(tensor, sources) if tensor.ref() not in sources else (sources[tensor.ref()], [], "")
            if column is not None:
                read = found.setdefault(column, set())
                if operation.type not in SAME | SHAPED and not _keeps_ids(operation):
                    read.add(operation.type)
            ahead.append(tensor.op)
    return found


def _keeps_ids(operation: tf.Operation) -> bool:
    """Whether an operation writes an integer as another integer or in decimal."""
    if operation.type == "Cast":
        return bool(operation.get_attr("SrcT").is_integer and operation.get_attr("DstT").is_integer)
    return bool(
        operation.type == "AsString" and operation.inputs[0].dtype.is_integer and not operation.get_attr("fill")
    )
