"""The query tower of a bundle; its errors are the service's: bad features the client's, a bad tower the release's.

Legend: `B` queries in the batch, `D` embedding dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import JsonValue

from longtail.bundle import Feature, Features, InputError, Inputs, Tower, TowerError, Vocabulary
from longtail.bundle.arrays import Float32
from longtail.serving.errors import InvalidRequestError, UnservableReleaseError


class Encoder:
    """The query tower of one bundle. Thread-safe.

    Args:
        query_tower: an ONNX model, float32 [B, dim] out, or its file, whose large tables are mapped.
        features: what the tower takes, in order.
        vocabularies: by name.
        dim: D.

    Raises:
        UnservableReleaseError: not an ONNX model that runs here, or its inputs are not the features'.
    """

    def __init__(
        self,
        query_tower: bytes | Path,
        features: Sequence[Feature],
        vocabularies: Mapping[str, Vocabulary],
        dim: int,
    ) -> None:
        with serving_errors("queries"):
            self._tower = Tower(query_tower, features, vocabularies, dim, file="query_tower.onnx")

    @property
    def features(self) -> Sequence[Feature]:
        """What a query may carry, in the tower's order."""
        return self._tower.features

    def example(self) -> dict[str, JsonValue]:
        """Features of a valid query."""
        return self._tower.example()

    def read(self, features_B: Sequence[Features]) -> Inputs:
        """The tower's inputs, int32 or float32 [B] or [B, P] by name.

        Raises:
            InvalidRequestError: features that the tower does not take.
        """
        with serving_errors("queries"):
            return self._tower.read(features_B)

    def embed(self, inputs: Inputs) -> Float32:
        """Query embeddings, float32 [B, D].

        Args:
            inputs: from `read`.

        Raises:
            InvalidRequestError: features that the tower turns into NaN or infinity.
            UnservableReleaseError: the tower's output is not [B, D].
        """
        with serving_errors("queries"):
            return self._tower.embed(inputs)


@contextmanager
def serving_errors(items: str) -> Iterator[None]:
    """Raise a bundle's errors about its towers and their inputs as the service's.

    Args:
        items: leads the field of a client's error: `queries` makes `queries.0.features.NAME`.

    Raises:
        InvalidRequestError: for an InputError.
        UnservableReleaseError: for a TowerError.
    """
    try:
        yield
    except InputError as error:
        raise InvalidRequestError(error.message, field=f"{items}.{error.row}.{error.field}") from error
    except TowerError as error:
        raise UnservableReleaseError(str(error)) from error
