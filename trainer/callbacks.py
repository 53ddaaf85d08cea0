"""Keras callbacks beside a run: told of its begin, its epochs and its end, and free to stop it."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from longtail.trainer.backend import Tensor
from longtail.trainer.model.two_tower import TwoTower


class TwoTowers(keras.Model):
    """What `callback.model` is: both towers, whose weights are the model's.

    `get_weights`, `set_weights`, `save_weights` and `stop_training` work as on any Keras model. It is not compiled:
    rates are the recipe's, so that callbacks which change `model.optimizer` have nothing to change.

    Attributes:
        query: the query tower, `keras.Model` of named inputs.
    """

    def __init__(self, model: TwoTower) -> None:
        super().__init__(name="two_towers")
        self.query, self.label = model.towers.query, model.towers.label
        self.built = True

    def call(self, inputs: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return embeddings of `{"query": inputs, "label": inputs}` by tower, float32 [B, D]."""
        return {
            side: tower(inputs[side])
            for side, tower in (("query", self.query), ("label", self.label))
            if side in inputs
        }


class Callbacks:
    """Keras' own list of callbacks over a two-tower model.

    `on_train_begin`, `on_epoch_begin`, `on_epoch_end` and `on_train_end` are called, epochs counted from 0; the logs
    of an epoch's end are `loss` and, where it was validated, `val_METRIC`, such as
    `val_recall@20`. Batches are not reported.
    """

    def __init__(
        self, callbacks: Sequence[keras.callbacks.Callback], model: TwoTower, *, epochs: int, steps: int
    ) -> None:
        for callback in callbacks:
            if not isinstance(callback, keras.callbacks.Callback):
                raise TypeError(f"callbacks: expected keras.callbacks.Callback, received {type(callback).__name__}")
        self._model = TwoTowers(model) if callbacks else None
        self._all = keras.callbacks.CallbackList(
            list(callbacks), add_history=False, add_progbar=False, model=self._model, epochs=epochs, steps=steps,
            verbose=0,
        )  # fmt: skip

    def begin(self) -> None:
        """Begin the run, or go on from a checkpoint."""
        if self._model is not None:
            self._model.stop_training = False
            self._all.on_train_begin()

    def epoch_begins(self, epoch: int) -> None:
        """Begin an epoch, counted from 0."""
        self._all.on_epoch_begin(epoch)

    def epoch_ends(self, epoch: int, logs: dict[str, float]) -> bool:
        """End an epoch; return whether a callback stops the run."""
        self._all.on_epoch_end(epoch, logs)
        return self._model is not None and bool(self._model.stop_training)

    def end(self) -> None:
        """End the run."""
        if self._model is not None:
            self._all.on_train_end()
