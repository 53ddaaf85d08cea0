"""What ONNX Runtime computes is what was trained, or there is no bundle."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from longtail.bundle import onnx_session
from longtail.bundle.arrays import Array, Float32
from longtail.trainer.errors import ExportError

_TOLERANCE = 1e-4


def check_parity(name: str, model: bytes, inputs: Mapping[str, Array], expected_BD: Float32) -> None:
    """Refuse a tower that ONNX Runtime computes otherwise than the training framework.

    Args:
        name: of the tower, for the error.
        model: ONNX.
        inputs: by name, first axis B.
        expected_BD: embeddings by the training framework.

    Raises:
        ExportError: other inputs, another shape, or embeddings more than 1e-4 of their scale apart.
    """
    session = onnx_session(model, name)
    wanted = {node.name for node in session.get_inputs()}
    if wanted != set(inputs):
        raise ExportError(f"{name}: expected queries with the inputs {sorted(wanted)}, received {sorted(inputs)}")
    found_BD = session.run(None, dict(inputs))[0]
    if found_BD.shape != expected_BD.shape:
        raise ExportError(f"{name}: expected embeddings of shape {expected_BD.shape}, found {found_BD.shape}")
    worst = float(np.abs(found_BD - expected_BD).max())
    if not worst <= _TOLERANCE * max(1.0, float(np.abs(expected_BD).max())):
        raise ExportError(f"{name}: expected the trained outputs within {_TOLERANCE}, found {worst:.3g} apart")
