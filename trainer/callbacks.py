"""Keras callbacks of a run, which are called at its begin, its epochs and its end, and may stop it."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from longtail.trainer.backend import Tensor
from longtail.trainer.model.two_tower import TwoTower


class TwoTowers(keras.Model):
    """Both towers as one Keras model, which callbacks see as `callback.model`.

    `get_weights`, `set_weights`, `save_weights` and `stop_training` work as on any Keras model. It is not compiled:
    rates are the recipe's, so that callbacks which change `model.optimizer` have nothing to change.

    Attributes:
        query, label: the towers, `keras.Model` of named inputs.
    """

    def __init__(self, model: TwoTower) -> None:
        super().__init__(name="two_towers")
        self.query, self.label = model.towers.query, model.towers.label
        self.stop_training = False
        self.built = True

    def call(self, inputs: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Embed `{"query": inputs, "label": inputs}` by tower, float32 [B, D]."""
        return {side: {"query": self.query, "label": self.label}[side](columns) for side, columns in inputs.items()}


def callbacks_of(
    callbacks: Sequence[keras.callbacks.Callback], model: TwoTower, *, epochs: int, steps: int
) -> keras.callbacks.CallbackList:
    """Create Keras' list of callbacks over a two-tower model; epochs are counted from 0, batches are not reported."""
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise TypeError(f"callbacks: expected keras.callbacks.Callback, received {type(callback).__name__}")
    return keras.callbacks.CallbackList(
        list(callbacks), add_history=False, add_progbar=False, model=TwoTowers(model), epochs=epochs, steps=steps,
        verbose=0,
    )  # fmt: skip
