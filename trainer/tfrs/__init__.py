"""Train TensorFlow Recommenders models with this project's losses, and export them as bundles.

Install it in an environment of its own (`pip install '.[tfrs]'` in a clone), because TFRS needs legacy Keras. Losses,
weights and mining are the trainer's own code, in Keras 3 operations on TensorFlow tensors.
"""

import keras

_NEEDS = (
    "longtail.trainer.tfrs: expected tensorflow-recommenders on legacy Keras: install 'longtail[tfrs]' and set "
    "TF_USE_LEGACY_KERAS=1 before TensorFlow is imported; found: "
)

if keras.backend.backend() != "tensorflow":
    raise ImportError(f"{_NEEDS}KERAS_BACKEND={keras.backend.backend()}, where only tensorflow can train a TFRS model")
try:
    import tensorflow_recommenders as _  # noqa: F401
except ImportError as error:
    raise ImportError(f"{_NEEDS}{error}") from error

from longtail.trainer.tfrs.export import TfrsOptions, export_tfrs  # noqa: E402
from longtail.trainer.tfrs.measure import Validation  # noqa: E402
from longtail.trainer.tfrs.retrieval import SampledRetrieval  # noqa: E402

__all__ = ["SampledRetrieval", "TfrsOptions", "Validation", "export_tfrs"]
