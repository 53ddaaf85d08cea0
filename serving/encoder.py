"""Runs a bundle's query tower with ONNX Runtime: features in, query embeddings out.

Legend: `B` queries in the batch, `D` embedding dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from pydantic import JsonValue

from bundle import Feature, Vocabulary
from serving.errors import InvalidRequestError, UnservableReleaseError
from serving.features import FeatureReader, Features, Inputs

Float32 = npt.NDArray[np.float32]


class Encoder:
    """The query tower of one bundle. Thread-safe: ONNX Runtime sessions and the reader hold no state of a call.

    One ONNX thread per call: the service's own search threads already fill the cores.

    Args:
        query_tower: an ONNX model, float32 [B, dim] out.
        features: what the tower takes, in order.
        vocabularies: by name.
        dim: D.

    Raises:
        UnservableReleaseError: not an ONNX model that runs here, or its inputs are not the features'.
    """

    def __init__(
        self, query_tower: bytes, features: Sequence[Feature], vocabularies: Mapping[str, Vocabulary], dim: int
    ) -> None:
        self._reader = FeatureReader(features, vocabularies)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            self._session = ort.InferenceSession(query_tower, options, providers=["CPUExecutionProvider"])
        # ONNX Runtime's own exceptions share no base but Exception.
        except Exception as error:
            raise UnservableReleaseError(
                f"query_tower.onnx: expected a model that ONNX Runtime loads: {error}"
            ) from error
        self._pad_to = self._check_inputs()
        self._dim = dim

    @property
    def features(self) -> Sequence[Feature]:
        """What a query may carry, in the tower's order."""
        return self._reader.features

    def example(self) -> dict[str, JsonValue]:
        """Features of a valid query."""
        return self._reader.example()

    def read(self, features_B: Sequence[Features]) -> Inputs:
        """The tower's inputs, int32 or float32 [B] or [B, P] by name.

        Raises:
            InvalidRequestError: features that the tower does not take.
        """
        return self._reader.read(features_B, self._pad_to)

    def embed(self, inputs: Inputs) -> Float32:
        """Query embeddings, float32 [B, D].

        Args:
            inputs: from `read`.

        Raises:
            InvalidRequestError: features that the tower turns into NaN or infinity.
            UnservableReleaseError: the tower's output is not [B, D].
        """
        queries_BD: Float32 = self._session.run(None, inputs)[0]
        expected = (len(next(iter(inputs.values()))), self._dim)
        if queries_BD.shape != expected:
            raise UnservableReleaseError(
                f"query_tower.onnx: expected output of shape {expected}, found {queries_BD.shape}"
            )
        finite_B = np.isfinite(queries_BD).all(axis=1)
        if not finite_B.all():
            raise InvalidRequestError(
                "expected features that the query tower can embed, received numbers or weights that overflow in it",
                field=f"queries.{int(finite_B.argmin())}.features",
            )
        return queries_BD

    def _check_inputs(self) -> dict[str, int]:
        """Compare the tower's inputs with the features'; returns the widths that the tower fixes."""
        expected = {
            name
            for feature in self._reader.features
            for name in ([feature.name] if feature.max_length is None else [feature.name, f"{feature.name}__weight"])
        }
        inputs = {node.name: node.shape for node in self._session.get_inputs()}
        if set(inputs) != expected:
            raise UnservableReleaseError(
                f"query_tower.onnx: expected the inputs {sorted(expected)} of the manifest's query_features, "
                f"found {sorted(inputs)}"
            )
        return {name: shape[1] for name, shape in inputs.items() if len(shape) == 2 and isinstance(shape[1], int)}
