"""Positives by how far they are above the K-th highest score of their query: `[loss] top_k`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from longtail.bundle import BUCKET_NAMES
from longtail.trainer.config.base import Section

_BUCKETS = BUCKET_NAMES[:3]
"""Those that a positive may be in."""
Count = Annotated[int, Field(ge=1)]


class TopKConfig(Section):
    """The loss of a pair is multiplied by σ((f_y − β)/temperature), β the K-th highest score of its query
    [METHODS §2.5]."""

    k: Count | Annotated[dict[str, Count], Field(min_length=1)]
    """K among all labels, or among those of the positive's bucket, such as `{ head = 20, torso = 20, tail = 50 }`; a
    positive of a bucket that is not named counts in full."""
    temperature: float = Field(default=1.0, gt=0)
    """τ, in logits: a published τ of cosines is this one times the model's temperature."""
    memory: Count = 100
    """Visits of a query that its β is an average over: more are less noisy, fewer follow the model faster."""

    @field_validator("k")
    @classmethod
    def _of_buckets(cls, k: int | dict[str, int]) -> int | dict[str, int]:
        if not isinstance(k, dict):
            return k
        if unknown := set(k) - set(_BUCKETS):
            raise ValueError(f"expected buckets of {', '.join(_BUCKETS)}, received {', '.join(sorted(unknown))}")
        return {name: k[name] for name in _BUCKETS if name in k}

    @property
    def by_bucket(self) -> dict[str, int]:
        """K by bucket; empty where one K is among all labels."""
        return self.k if isinstance(self.k, dict) else {}

    @property
    def whole(self) -> int:
        """K among all labels; 0 where each bucket has its own."""
        return 0 if isinstance(self.k, dict) else self.k

    def __str__(self) -> str:
        named = ", ".join(f"{name} {k}" for name, k in self.by_bucket.items()) or str(self.k)
        return f"top {named} within {self.temperature:g}"
