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
        label: the label tower.
    """

    def __init__(self, model: TwoTower) -> None:
        super().__init__(name="two_towers")
        self.query, self.label = model.towers.query, model.towers.label
        self.built = True

    def call(self, inputs: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Embeddings of `{"query": inputs, "label": inputs}` by tower, float32 [B, D]."""
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

    Args:
        callbacks: of Keras.
        model: what is trained.
        epochs, steps: of the run, and of an epoch.

    Raises:
        TypeError: one of them is no `keras.callbacks.Callback`.
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
        """The run begins, or goes on from a checkpoint."""
        if self._model is not None:
            self._model.stop_training = False
            self._all.on_train_begin()

    def epoch_begins(self, epoch: int) -> None:
        """An epoch begins, counted from 0."""
        self._all.on_epoch_begin(epoch)

    def epoch_ends(self, epoch: int, logs: dict[str, float]) -> bool:
        """An epoch has ended; whether one of the callbacks asks to stop."""
        self._all.on_epoch_end(epoch, logs)
        return self._model is not None and bool(self._model.stop_training)

    def end(self) -> None:
        """The run has ended, by itself or stopped."""
        if self._model is not None:
            self._all.on_train_end()
