"""Audiences of labels in a training step: a random sample of each label's queries, drawn again in every step.

Legend: `B` batch, `C` labels, `P` entries drawn of a label, `N` training pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from longtail.trainer import backend
from longtail.trainer.arrays import untrained_variable
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.data.audience import Audience


class DrawnAudience:
    """Sample the audiences of labels, on the device.

    An audience of n entries is cut into P parts of n // P or n // P + 1 entries. One entry is drawn from each part,
    with the size of the part as its weight. Each entry then has expected weight 1, the weights sum to n, and an
    audience of at most P entries is read whole. Every step draws again: with one draw per epoch, a popular label would
    see the same few queries all the time.
    """

    def __init__(self, audience: Audience, limits: Mapping[str, int]) -> None:
        self._widths = {name: min(limit, audience.longest) for name, limit in limits.items()}
        self._offsets = untrained_variable(audience.offsets.astype(np.int32), "audience")
        self._ids = {name: untrained_variable(audience.ids[name], name) for name in limits}

    @property
    def variables(self) -> list[keras.Variable]:
        """Return the variables with all audiences."""
        return [self._offsets, *self._ids.values()]

    def draw(
        self, labels_C: Tensor, seed: keras.random.SeedGenerator, own_B2: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Draw the label tower's inputs: `name` int32 [C, P] and `name__weight` float32 [C, P] per feature.

        `own_B2`, int32, names entries to exclude for the first B labels: the first entry and their number.
        """
        start_C1 = backend.gather(self._offsets, labels_C)[:, None]
        size_C1 = backend.gather(self._offsets, labels_C + 1)[:, None] - start_C1
        first_C1 = own_C1 = ops.zeros_like(size_C1)
        if own_B2 is not None:
            own_C2 = ops.pad(own_B2, [[0, labels_C.shape[0] - own_B2.shape[0]], [0, 0]])
            first_C1, own_C1 = own_C2[:, :1], own_C2[:, 1:]
        drawn: dict[str, Tensor] = {}
        for name, width in self._widths.items():
            places_1P = ops.arange(width, dtype="int32")[None]
            # Stratified draws: the first `more` parts have one entry more than the others, so the parts cover all.
            each_C1 = (size_C1 - own_C1) // width
            more_C1 = size_C1 - own_C1 - each_C1 * width
            part_CP = each_C1 + ops.cast(places_1P < more_C1, "int32")
            random_CP = keras.random.uniform((ops.shape(labels_C)[0], width), seed=seed)
            # Guard against rounding up to `part`, which would be the next part's first entry.
            within_CP = ops.minimum(ops.cast(random_CP * ops.cast(part_CP, "float32"), "int32"), part_CP - 1)
            at_CP = places_1P * each_C1 + ops.minimum(places_1P, more_C1) + within_CP
            # Places count the entries without the own ones, so places from the first own entry on skip these.
            at_CP = start_C1 + at_CP + ops.where(at_CP >= first_C1, own_C1, 0)
            there_CP = part_CP > 0
            ids_CP = backend.gather(self._ids[name], ops.where(there_CP, at_CP, 0))
            drawn[name] = ops.where(there_CP, ids_CP, 0)
            drawn[f"{name}__weight"] = ops.cast(part_CP, "float32")
        return drawn
