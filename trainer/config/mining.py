"""Hard negative mining: `[loss] mining`."""

from __future__ import annotations

from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from longtail.trainer.config.base import Section
from longtail.trainer.losses.mining import Mining


class MiningConfig(Section):
    """Hard negative mining: of a row's negatives, the highest-scored count [METHODS §3]."""

    keep: int | None = Field(default=None, ge=1)
    """Negatives kept, the highest-scored."""
    power: float = Field(default=0.0, ge=0)
    """Weighs the j-th highest-scored by j^−power; 0 weighs what is kept equally."""
    theta: tuple[Annotated[float, Field(ge=0)], ...] | None = Field(default=None, min_length=1)
    """ϑ of the highest-scored, the second and so on, non-increasing, as it stands; in place of keep and power, which
    sum to 1. With weight importance and uniform negatives, [Re19]'s ϑ is (L − 1)/m times this."""
    epsilon: float = Field(default=0.0, ge=0)
    """ϑ of every rank beyond those; above 0 the mined loss stays calibrated [Re19 footnote 2]."""
    draw: int | None = Field(default=None, ge=1)
    """Samples ϑ: as many ranks, drawn in proportion to it with replacement, each weighing its sum by their number; the
    loss is computed of these alone. All that ϑ weighs if not given [Re19 §3.1]."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.theta is not None and (self.keep is not None or self.power):
            raise ValueError(
                f"mining: expected theta alone or keep and power, received theta = {list(self.theta)}, "
                f"keep = {self.keep}, power = {self.power}"
            )
        if self.theta is None and self.keep is None and self.power == 0:
            raise ValueError("mining: expected keep, power, both or theta, received none")
        if self.epsilon and self.theta is None and self.keep is None:
            raise ValueError(f"mining: expected keep or theta, beyond which epsilon is, received {self}")
        if self.theta is not None or self.epsilon:
            ranks = self.mining().theta_of((self.mining().named or 0) + 1)
            if ranks[0] == 0 or (np.diff(ranks) > 0).any():
                raise ValueError(
                    f"mining: expected a non-increasing ϑ that begins above 0, received {ranks.round(6).tolist()}"
                )
        return self

    def mining(self) -> Mining:
        """Return what this section describes."""
        return Mining(self.keep, self.power, self.theta, self.epsilon, self.draw)

    def __str__(self) -> str:
        given = {
            name: value for name, value in self.model_dump().items() if value != type(self).model_fields[name].default
        }
        return ", ".join(
            f"{name} = {list(value) if isinstance(value, tuple) else value}" for name, value in given.items()
        )
