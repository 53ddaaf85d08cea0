"""Run the query or label tower of a bundle by ONNX Runtime, imported on first use.

Legend: `B` queries (or labels) in the batch, `D` embedding dimensions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from longtail.bundle.arrays import Float32
from longtail.bundle.errors import FeatureError, TowerError
from longtail.bundle.features import FeatureReader, Inputs
from longtail.bundle.manifest import Feature
from longtail.bundle.vocabulary import Vocabulary


class OnnxTower(NamedTuple):
    """Hold an ONNX model, its features, their ids, and the own id's feature.

    `onnx` is None for features of labels that no model embeds.
    """

    onnx: bytes | None
    features: Sequence[Feature] = ()
    vocabularies: Mapping[str, Vocabulary] = MappingProxyType({})
    own_id: str | None = None


class Tower(FeatureReader):
    """Embeds features with one tower of a bundle. Thread-safe, as calls share no mutable state.

    Each call uses one ONNX thread; call from several threads to use several cores. The model is ONNX with output
    float32 [B, dim], given as bytes or as a file whose folder has the tables. Raises TowerError if the model does not
    run, or its inputs do not match the features.
    """

    def __init__(
        self,
        model: bytes | Path,
        features: Sequence[Feature],
        vocabularies: Mapping[str, Vocabulary],
        dim: int,
        *,
        file: str = "query_tower.onnx",
    ) -> None:
        self._file = file
        self._session = onnx_session(model, file)
        self._dim = dim
        # Checked here, because ONNX Runtime names a wrong input only at the first request.
        expected = {name for feature in features for name in feature.inputs}
        inputs = {node.name: node.shape for node in self._session.get_inputs()}
        if set(inputs) != expected:
            raise TowerError(
                f"{file}: expected the inputs {sorted(expected)} of the manifest's {file.split('_')[0]}_features, "
                f"found {sorted(inputs)}"
            )
        # A tower may fix how many entries of a list it takes; lists are then padded to that width.
        widths = {name: shape[1] for name, shape in inputs.items() if len(shape) == 2 and isinstance(shape[1], int)}
        super().__init__(features, vocabularies, widths)

    def embed(self, inputs: Inputs) -> Float32:
        """Compute embeddings, float32 [B, D]; raises FeatureError or TowerError.

        FeatureError: the features of a row give NaN or infinity.
        """
        embeddings_BD: Float32 = self._session.run(None, inputs)[0]
        expected = (len(next(iter(inputs.values()))), self._dim)
        if embeddings_BD.shape != expected:
            raise TowerError(f"{self._file}: expected output of shape {expected}, found {embeddings_BD.shape}")
        finite_B = np.isfinite(embeddings_BD).all(axis=1)
        if not finite_B.all():
            raise FeatureError(
                f"expected features that the {self._file.removesuffix('.onnx').replace('_', ' ')} can embed, "
                "received numbers or weights that overflow in it",
                row=int(finite_B.argmin()),
                field="features",
            )
        return embeddings_BD


def onnx_session(model: bytes | Path, file: str) -> Any:
    """Create an ONNX Runtime session on the CPU, with one thread for each call."""
    # Otherwise the import, from 1.29 on, writes a session id into the temporary folder and reports usage to the vendor.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise TowerError(
            f"{file}: expected ONNX Runtime to run it with; install it with `pip install onnxruntime`: {error}"
        ) from error
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    # Errors alone: warnings about a model's graph say nothing to an operator.
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(model, sess_options=options, providers=["CPUExecutionProvider"])
    # ONNX Runtime's exceptions have no common base but Exception.
    except Exception as error:
        hint = ""
        if "external data" in str(error).lower():
            hint = (
                "its tables must be files in tables/ of its folder: copy a bundle of links into other folders with its "
                "links followed (cp -rL). "
            )
        raise TowerError(f"{file}: expected a model that ONNX Runtime loads: {hint}{error}") from error
